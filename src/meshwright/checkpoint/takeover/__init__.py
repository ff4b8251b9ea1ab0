"""Weights of other training systems, read as plain tensors and written as a Hugging Face directory."""
