"""The version of this package; pyproject.toml reads it."""

VERSION = "0.1.0"
