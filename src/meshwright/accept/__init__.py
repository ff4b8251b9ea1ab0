"""Acceptance of a machine: the product tried on its devices, step by step, and one report about it."""
