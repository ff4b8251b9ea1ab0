"""Dropout that is the same on every layout: a hash of seed, layer, token and feature decides which numbers are dropped.

A token has a number in the run's endless order of samples (`Batch.numbers`), which encodes step, sample and position.
There is no generator state: the same numbers are dropped on any rank, in any microbatch and in every recomputation of a
forward pass. (Counter-based, as in Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; the mixing is
MurmurHash3's, Appleby, 2011.)

Shapes: B batch, T sequence, N = B T tokens, D features of a token on this rank.
"""

import hashlib

import torch
from torch import nn

AT_ONCE = 2**22
"""Numbers hashed at a time, which bounds the memory."""

ODD_64, ODD_32 = -7046029254386353131, -1640531527  # 2**64 and 2**32 over the golden ratio, as signed integers
MIX_32 = ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387))
"""Shift, mask of the remaining bits, factor."""


class Draws:
    """The numbers of the tokens in the current forward pass; all dropouts of a model read them."""

    numbers: torch.Tensor | None = None
    """int64 [B, T]."""


class Dropout(nn.Module):
    """Sets a share of its inputs to 0 and scales up the others, in training only."""

    def __init__(self, share: float, draws: Draws, seed: int, name: str) -> None:
        """`name`: the layer's; each layer draws different numbers."""
        super().__init__()
        self.share, self.draws = share, draws
        self.key = hash_key(seed, name)
        self.part = 0
        """A slot: the index of this rank's part of the features, if tensor-parallel ranks have equal parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        if not self.training:
            return x
        numbers_BT = self.draws.numbers
        assert numbers_BT is not None, "dropout draws by the numbers of tokens, and this batch has none"
        dropped = self.dropped(numbers_BT.flatten(), x.shape[-1]).view(x.shape)
        return x.masked_fill(dropped, 0).mul_(1 / (1 - self.share))

    @torch.no_grad()
    def dropped(self, numbers_N: torch.Tensor, features: int) -> torch.Tensor:
        """Which of the `features` features of each token are dropped, bool [N, D]."""
        return drawn_bits(self.key, numbers_N, self.part * features, features) < int(self.share * 2**31)

    def extra_repr(self) -> str:
        """The share."""
        return f"{self.share:g}"


def hash_key(*parts: int | str) -> int:
    """A key for `drawn_bits`: a hash of seed, name and use."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def drawn_bits(key: int, numbers_N: torch.Tensor, first: int, features: int) -> torch.Tensor:
    """Uniform in [0, 2**31), int32 [N, D]: a hash of a key, the tokens' numbers and `features` features, starting at
    `first`."""
    features_D = torch.arange(first, first + features, device=numbers_N.device, dtype=torch.int32) * ODD_32
    mixed_N = (numbers_N + key) * ODD_64
    keys_N1 = (mixed_N ^ (mixed_N >> 32)).to(torch.int32)[:, None]
    rows = max(1, AT_ONCE // features)
    return torch.cat([_mix(keys_R1 ^ features_D) for keys_R1 in keys_N1.split(rows)])


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mixes every bit of int32 numbers into all others, then drops the sign: uniform in [0, 2**31)."""
    for shift, kept, factor in MIX_32:
        bits = (bits ^ ((bits >> shift) & kept)) * factor
    return (bits ^ ((bits >> 16) & 0xFFFF)) & 0x7FFFFFFF
