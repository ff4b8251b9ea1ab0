"""The order of samples: a pure function of seed and position, with no state to save."""

import hashlib

from meshwright.spec.errors import UserError

ROUNDS = 8
"""Rounds of the Feistel network: 4 make it pseudo-random (Luby and Rackoff, 1988); small sizes benefit from more."""


def permuted(index: int, size: int, seed: int, epoch: int = 0, stream: int = 0) -> int:
    """The image of `index` under a pseudo-random permutation of 0 .. size-1, one for each seed, epoch and stream.

    Constant time and memory: a Feistel network permutes the smallest power of 4 that is at least `size`, and is applied
    repeatedly until the result is below `size` (cycle walking, Black and Rogaway, 2002), at most 4 times on average.
    """
    if not 0 <= index < size:
        raise UserError(f"index {index} is not in 0 .. {size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    key = b"%d %d" % (seed, epoch) + (b" %d" % stream if stream else b"")
    while True:
        index = _feistel(index, half_bits, key)
        if index < size:
            return index


def sample_at(position: int, size: int, seed: int, stream: int = 0) -> int:
    """The sample (of `size`) at `position` of a stream's endless sequence of epochs, each in its own order."""
    epoch, index = divmod(position, size)
    return permuted(index, size, seed, epoch, stream)


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(b"%b %d %d" % (key, number, right), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest) & mask)
    return left << half_bits | right
