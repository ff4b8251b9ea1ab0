"""Optimizers, learning-rate schedules, clipping and loss scaling, on plain and on sharded tensors alike."""
