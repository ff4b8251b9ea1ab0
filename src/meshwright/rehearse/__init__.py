"""A run on fake ranks: the real training program, with tensors that have shapes but no data."""
