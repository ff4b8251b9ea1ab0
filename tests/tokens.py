"""Token files for tests, in memory."""

import numpy as np

from meshwright.data.token_file import TokenFile, file_in_memory


def token_file(tokens, lengths) -> TokenFile:
    """A stream of documents of these lengths."""
    assert sum(lengths) == len(tokens)
    return file_in_memory(np.split(np.asarray(tokens), np.cumsum(lengths)[:-1]))
