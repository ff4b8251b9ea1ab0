"""A trained model in use: loaded from a run or a directory, generating, evaluated, served."""
