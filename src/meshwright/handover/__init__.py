"""A trained model handed over to other programs: directories, GGUF files, adapters, each read back and compared."""
