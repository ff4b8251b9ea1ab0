"""Proof that a layout computes what one process computes; on a difference, the first tensor that differs."""
