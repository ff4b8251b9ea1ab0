"""One file an engine; each is a program that `engines.py` starts."""
