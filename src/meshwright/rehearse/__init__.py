"""A run on fake ranks: the program that really trains, with tensors that have shapes but no numbers."""
