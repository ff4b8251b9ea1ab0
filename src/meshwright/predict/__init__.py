"""Predictions about a run without running it; no torch here."""
