"""The derivation of what tensor-parallel and pipeline ranks can split in a model of transformers."""
