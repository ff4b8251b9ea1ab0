"""The derivation of what tensor-parallel ranks can split in a model of transformers."""
