"""What can be said about a run without running it; no torch here."""
