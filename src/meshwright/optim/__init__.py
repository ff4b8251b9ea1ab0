"""Optimizers, learning-rate schedules, clipping and loss scaling, on plain and sharded tensors."""
