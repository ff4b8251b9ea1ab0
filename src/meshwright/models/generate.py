"""Generation, token by token: batched, with or without a KV cache, sampled reproducibly.

Shapes: B prompts, T their longest length, or room for all that is asked for, V vocabulary.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch

from meshwright.models.decoder import Cache, Decoder
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token always."""
    top_k: int = 0
    """Only the likeliest `top_k` tokens may be drawn; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability may be drawn (Holtzman et al., 2020)."""
    seed: int = 0
    """Row i of a batch draws from a stream of its own, a pure function of (seed, i)."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature={self.temperature} is not allowed: must be at least 0")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is not allowed: must be at least 0 (0 allows every token)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not allowed: must be greater than 0 and at most 1")


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int | Collection[int],
    sampling: Sampling,
) -> list[list[int]]:
    """Up to `max_tokens` new token ids for each prompt, ending before `eos_id` (or any of several) where it says so.

    A prompt's continuation does not depend on the prompts beside it, up to rounding.

    Raises:
        UserError: an empty prompt, or more positions than the model is meant for.
    """
    check_room(prompts, max_tokens, model.spec.max_positions)
    streams = [random.Random(f"{sampling.seed}/{row}") for row in range(len(prompts))]
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id)
    begin = CachedRows if model.spec.foreign is None else _read_anew
    rows = begin(model, prompts, max_tokens)
    return continue_rows(rows, max_tokens, ends, lambda logits_BV: choose(logits_BV, sampling, streams))


class Rows(Protocol):
    """Prompts and what has been written behind them, as a model reads them."""

    def logits(self) -> torch.Tensor:
        """Of the token behind each row, [B, V]."""
        ...

    def append(self, next_B: torch.Tensor) -> None:
        """Write a token behind each row."""
        ...


def continue_rows(
    rows: Rows, max_tokens: int, ends: Collection[int], choose_next: Callable[[torch.Tensor], torch.Tensor]
) -> list[list[int]]:
    """Up to `max_tokens` new token ids for each row, ending before one of `ends`.

    `choose_next`: logits [B, V] to the next tokens [B], int64.
    """
    continued: list[list[int]] = []
    unfinished: set[int] = set()
    for _ in range(max_tokens):
        next_B = choose_next(rows.logits())
        if not continued:
            continued, unfinished = [[] for _ in next_B], set(range(len(next_B)))
        for row, token in enumerate(next_B.tolist()):
            if row in unfinished and token in ends:
                unfinished.remove(row)
            elif row in unfinished:
                continued[row].append(token)
        if not unfinished:
            break
        rows.append(next_B)
    return continued


class CachedRows:
    """Rows of which a whole model on one device reads every token once, padded on the left."""

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        device, longest = model.tok_embeddings.weight.device, max(map(len, prompts))
        padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        self.model = model
        self.tokens_BT = torch.tensor(
            [[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        self.positions_BT = (torch.arange(longest, device=device) - padding_B[:, None]).clamp(min=0)
        self.cache = Cache(model, len(prompts), longest + max_tokens, padding_B if padding_B.any() else None)

    def logits(self) -> torch.Tensor:
        """See `Rows`."""
        batch = Batch(self.tokens_BT, position_ids=self.positions_BT)
        return self.model(batch, lambda x_BTD, head, _: head.logits(x_BTD[:, -1]), cache=self.cache)

    def append(self, next_B: torch.Tensor) -> None:
        """See `Rows`."""
        self.tokens_BT, self.positions_BT = next_B[:, None], self.positions_BT[:, -1:] + 1


class WholeRows:
    """Rows that are read anew for every token, padded on the right to one length: serves every model that has a forward
    pass, however it is split."""

    def __init__(
        self,
        read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        multiple: int,
        device: torch.device,
    ) -> None:
        """`read`: tokens [B, T], int64, and the place asked for in each row [B, T], bool, to logits [B, V]. T is a
        multiple of `multiple`."""
        self.read = read
        length = ceil((max(map(len, prompts)) + max_tokens) / multiple) * multiple
        self.tokens_BT = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=device)
        self.last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)

    def logits(self) -> torch.Tensor:
        """See `Rows`."""
        places_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        return self.read(self.tokens_BT, places_T == self.last_B1)

    def append(self, next_B: torch.Tensor) -> None:
        """See `Rows`."""
        self.last_B1 = self.last_B1 + 1
        self.tokens_BT.scatter_(1, self.last_B1, next_B[:, None])


def _read_anew(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> WholeRows:
    """What transformers computes has no cache of ours."""
    return WholeRows(
        lambda tokens_BT, asked_BT: model(Batch(tokens_BT), lambda x, head, _: head.next_logits(x, asked_BT)),
        prompts,
        max_tokens,
        multiple=1,
        device=model.like.device,
    )


def choose(logits_BV: torch.Tensor, sampling: Sampling, streams: Sequence[random.Random]) -> torch.Tensor:
    """One token id [B] per row of logits [B, V]; every row takes one number from its stream."""
    drawn_B = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=logits_BV.device)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sorted_BV, order_BV = (logits_BV.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_BV, order_BV = sorted_BV[:, : sampling.top_k], order_BV[:, : sampling.top_k]
    probability_BV = sorted_BV.softmax(-1)
    before_BV = probability_BV.cumsum(-1) - probability_BV
    # The likeliest token always stays, for nothing comes before it.
    probability_BV = probability_BV * (before_BV < sampling.top_p)
    cumulative_BV = probability_BV.cumsum(-1)
    target_B1 = drawn_B[:, None] * cumulative_BV[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    return order_BV.gather(-1, index_B1.clamp(max=cumulative_BV.shape[1] - 1)).squeeze(-1)


def check_room(prompts: Sequence[Sequence[int]], max_tokens: int, room: int) -> None:
    """Raise `UserError` where prompts and new tokens have no room in a model that is meant for `room` positions."""
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens} is not allowed: must be at least 1")
    if not prompts or not all(prompts):
        raise UserError("a prompt must hold at least one token")
    longest = max(map(len, prompts))
    if longest >= room:
        raise UserError(f"the prompt has {longest} tokens, but the model is meant for {room}; shorten it")
    if longest + max_tokens > room:
        raise UserError(
            f"a prompt of {longest} tokens and max_tokens={max_tokens} are more than the {room} positions "
            f"that the model is meant for; at most {room - longest} new tokens have room"
        )
