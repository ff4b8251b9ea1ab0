"""What a run leaves on disk to continue from, and the border to Hugging Face's files."""
