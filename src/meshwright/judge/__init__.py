"""Answers of models compared by a judge: another model, or people. No torch here."""
