"""Checkpoints of runs, and the conversion from and to Hugging Face's files."""
