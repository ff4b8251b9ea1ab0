"""The gated delta rule over chunks of a sequence, exact: products of matrices instead of a step for every token.

A head's state S [K, V] maps keys to values. Token t lets it decay by exp(g), then corrects, by the share beta, the
value that it returns for the token's key (Yang et al., "Gated Delta Networks", 2024):

    S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  y_t = S^T q_t

Within a chunk all corrections solve one triangular system (Yang et al., "Parallelizing Linear Transformers with the
Delta Rule", 2024), so the state passes only from chunk to chunk, by an affine map. Documents of a packed row do not see
one another: the state that a document leaves is dropped at the start of the next.

Shapes: B batch, T sequence, G key heads, R value heads that share one, H = G R value heads, K key width, V value width,
N chunks, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens of a chunk."""
AT_ONCE = 2**21
"""Numbers of the values that are computed together, by heads: memory of this size is used again, larger is not."""
SMALLEST = 8
"""Size of triangular matrices that are inverted by powers: those of larger ones may lose digits."""
EPS = 1e-6
"""Added to the squared length of queries and keys."""


class Heads(NamedTuple):
    """What the tokens of a sequence contribute, in the dtype of the computation."""

    q: torch.Tensor
    """Queries of length one over the root of K, [B, T, G, K]."""
    k: torch.Tensor
    """Keys of length one, [B, T, G, K]."""
    v: torch.Tensor
    """Values, [B, T, H, V]."""
    g: torch.Tensor
    """Logarithms of decays, at most 0, [B, T, H]."""
    beta: torch.Tensor
    """Shares of the corrections, [B, T, H]."""


class Chunks(NamedTuple):
    """The affine maps of every chunk: y = reads S + scores new, new = values - keys S, S' = decay S + writes^T new."""

    values: torch.Tensor
    """[B, H, N, C, V]."""
    keys: torch.Tensor
    """[B, H, N, C, K]."""
    reads: torch.Tensor
    """[B, H, N, C, K]."""
    writes: torch.Tensor
    """[B, H, N, C, K]."""
    scores: torch.Tensor
    """[B, H, N, C, C]."""
    decay: torch.Tensor
    """[B, H, N, 1, 1]."""


def of_length_one(x: torch.Tensor) -> torch.Tensor:
    """Vectors over the last dim, divided by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def gated_delta_rule(
    heads: Heads, documents: torch.Tensor | None = None, state: torch.Tensor | None = None, size: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [B, T, H, V] and the last state [B, H, K, V].

    Args:
        documents: of each token and, first, of the one before the sequence: [B, 1 + T]; None: a single document.
        state: the state [B, H, K, V] that the token before left; None: zero.
        size: tokens of a chunk.
    """
    groups, (batch, length, count, width) = heads.k.shape[2], heads.v.shape
    if state is None:
        state = heads.v.new_zeros(batch, count, heads.k.shape[-1], width)
    wanted = heads.v.numel() / AT_ONCE
    parts = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= max(1, wanted))
    results = []
    for *part, of_state in zip(*(x.tensor_split(parts, 2) for x in heads), state.tensor_split(parts, 1), strict=True):
        chunks = cut(Heads(*part), documents, size)
        states, new, last = scan(chunks, of_state)
        results.append((outputs(chunks, states, new, length), last))
    return torch.cat([y for y, _ in results], 2), torch.cat([last for _, last in results], 1)


def cut(heads: Heads, documents: torch.Tensor | None, size: int = CHUNK) -> Chunks:
    """The chunks of a sequence; `documents` as in `gated_delta_rule`."""
    length, shares = heads.v.shape[1], heads.v.shape[2] // heads.k.shape[2]
    size = min(size, length)
    q, k, v, g, beta = (_chunked(x, -length % size, size) for x in heads)
    together_BHNC = g.cumsum(-1)
    # Between two tokens of a chunk the state decays by exp(difference); above the diagonal that might overflow.
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = (together_BHNC[..., :, None] - together_BHNC[..., None, :]).masked_fill(later, -torch.inf).exp()
    since_start, until_end, decay = together_BHNC.exp(), (together_BHNC[..., -1:] - together_BHNC).exp(), None
    if documents is not None:
        same, goes_on, stays, passes = _seen(documents, -length % size, size)
        between, since_start, until_end = between * same, since_start * goes_on, until_end * stays
        decay = together_BHNC[..., -1:].exp() * passes
    decay = together_BHNC[..., -1:].exp() if decay is None else decay
    scores = _shared(q @ k.mT, shares) * between
    system = _shared(k @ k.mT, shares) * (between * beta[..., None])
    inverse = _inverse(system.tril(-1)) if torch.compiler.is_compiling() else _UnitInverse.apply(system)
    k_BHNCK, corrections = _shared(k, shares), inverse * beta[..., None, :]
    values, keys = corrections @ v, (corrections * since_start[..., None, :]) @ k_BHNCK
    reads = _shared(q, shares) * since_start[..., None]
    return Chunks(values, keys, reads, k_BHNCK * until_end[..., None], scores, decay[..., None])


def scan(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state before each chunk [B, H, N, K, V], the corrections that its tokens write [B, H, N, C, V], and the last
    state. `state` may have more columns than values; the others are corrected to nothing."""
    states, news = [], []
    more = state.shape[-1] - chunks.values.shape[-1]
    values = F.pad(chunks.values, (0, more)) if more else chunks.values
    for value, key, write, decay in zip(*(x.unbind(2) for x in (values, *_moving(chunks))), strict=True):
        new = value - key @ state
        states.append(state)
        news.append(new)
        state = decay * state + write.mT @ new
    return torch.stack(states, 2), torch.stack(news, 2), state


def outputs(chunks: Chunks, states: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    """The outputs [B, T, H, V] from the results of `scan`."""
    y_BHNCV = chunks.reads @ states + chunks.scores @ new
    return y_BHNCV.flatten(2, 3)[:, :, :length].transpose(1, 2)


def one_token(
    q_PGK: torch.Tensor, k_PGK: torch.Tensor, v_PHV: torch.Tensor, decay_PH: torch.Tensor, beta_PH: torch.Tensor
) -> "OneToken":
    """The next token of each of P sequences; `decay` is exp(g)."""
    shares = v_PHV.shape[1] // k_PGK.shape[1]
    q_PHK, k_PHK = (x.repeat_interleave(shares, 1) for x in (q_PGK, k_PGK))
    return OneToken(q_PHK, k_PHK, v_PHV, decay_PH[..., None, None], beta_PH[..., None])


class OneToken(NamedTuple):
    """What one token of each of several sequences does to their states."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def apply(self, state_PHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs [P, H, V] and the new states."""
        state = state_PHKV * self.decay
        new = (self.v - (self.k[..., None, :] @ state).squeeze(-2)) * self.beta
        state = state + self.k[..., :, None] * new[..., None, :]
        return (self.q[..., None, :] @ state).squeeze(-2), state


class _UnitInverse(torch.autograd.Function):
    """The inverse of matrices [..., C, C], of which only the numbers below the diagonal count; those on it are ones,
    those above zeros. By products of halves: torch's triangular solver takes ten times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, system: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse := _inverse(system.tril(-1)))
        return inverse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ grad_outputs[0] @ inverse.mT).tril_(-1).neg_()


def _inverse(below: torch.Tensor) -> torch.Tensor:
    """The inverse of I + `below`, from those of its halves, of which the smallest are sums of powers."""
    size = below.shape[-1]
    if size <= SMALLEST:
        one = torch.eye(size, dtype=below.dtype, device=below.device)
        total, power, reached = one - below, below, 2
        while reached < size:
            power, reached = power @ power, 2 * reached
            total = total @ (one + power)
        return total
    half = size // 2
    first, second = _inverse(below[..., :half, :half]), _inverse(below[..., half:, half:])
    inverse = torch.zeros_like(below)
    inverse[..., :half, :half], inverse[..., half:, half:] = first, second
    inverse[..., half:, :half] = -(second @ below[..., half:, :half] @ first)
    return inverse


def _moving(chunks: Chunks) -> tuple[torch.Tensor, ...]:
    return chunks.keys, chunks.writes, chunks.decay


def _chunked(x: torch.Tensor, more: int, size: int) -> torch.Tensor:
    """[B, T, H, ...] to [B, H, N, C, ...], zeros after the last token: these write nothing."""
    x = x.transpose(1, 2)
    if more:
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, more))
    return x.unflatten(2, (-1, size))


def _shared(x_BGN: torch.Tensor, shares: int) -> torch.Tensor:
    """[B, G, ...] to [B, H, ...]."""
    return x_BGN if shares == 1 else x_BGN.repeat_interleave(shares, 1)


def _seen(documents: torch.Tensor, more: int, size: int) -> tuple[torch.Tensor, ...]:
    """[B, 1, N, C, C]: whether two tokens of a chunk are of one document. [B, 1, N, C]: whether a token is of the
    document before its chunk; of the last in its chunk. [B, 1, N, 1]: whether a chunk's last one is that before it."""
    before_B1, own_BT = documents[:, :1], documents[:, 1:]
    own_BT = torch.cat((own_BT, own_BT[:, -1:].expand(-1, more)), 1) if more else own_BT
    own_BNC = own_BT.unflatten(1, (-1, size))
    last_BN1 = own_BNC[..., -1:]
    before_BN1 = torch.cat((before_B1, last_BN1[:, :-1, 0]), 1)[..., None]
    same = own_BNC[..., :, None] == own_BNC[..., None, :]
    return tuple(x[:, None] for x in (same, own_BNC == before_BN1, own_BNC == last_BN1, last_BN1 == before_BN1))
