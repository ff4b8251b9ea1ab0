"""The version of Meshwright."""

__version__ = "0.1.0"
