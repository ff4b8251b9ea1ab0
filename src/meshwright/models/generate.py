"""Sampling of the next token, and generation without a cache.

Serving uses a KV cache (`models/cache.py`, `serve/engine.py`).

Shapes: B prompts, T their longest length, or room for all tokens asked for, V vocabulary.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import torch

from meshwright.devices import widest
from meshwright.spec.errors import UserError

LEAST_PENALTY, MOST_PENALTY = 1e-6, 1e6
"""Logits stay finite within these bounds."""
COLDEST = 1e-200
"""The least temperature that logits are divided by: smaller ones would give infinite quotients."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Only the likeliest `top_k` tokens may be drawn; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability may be drawn (Holtzman et al., 2020)."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest may be drawn (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or answer, and multiplies their negative ones (Keskar et al.,
    2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """The same, once for each occurrence of the token."""
    seed: int = 0
    """Row i of a batch draws from its own random stream, a pure function of (seed, i)."""

    def __post_init__(self) -> None:
        for name, allowed, rule in (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 allows every token)"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "at least 0 and at most 1"),
            (
                "repetition_penalty",
                LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
                f"from {LEAST_PENALTY:g} to {MOST_PENALTY:g}",
            ),
            ("temperature", isfinite(self.temperature), "a finite number"),
            ("presence_penalty", abs(self.presence_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g}"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g}"),
        ):
            if not allowed:
                raise UserError(f"{name}={getattr(self, name)} is not allowed: must be {rule}")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def continue_rows(
    choose_next: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    ends: Collection[int],
    *,
    multiple: int,
    device: torch.device,
) -> list[list[int]]:
    """Up to `max_tokens` new token ids after each prompt, ending before one of `ends`.

    Rows are padded on the right to one length T, a multiple of `multiple`, and read in full for every token. This works
    for any model with a forward pass, however it is split.

    `choose_next`: (tokens [B, T], int64, and the last position in each row so far [B, T], bool) to the next tokens [B],
    int64.
    """
    length = ceil((max(map(len, prompts)) + max_tokens) / multiple) * multiple
    tokens_BT = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=device)
    last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    places_T = torch.arange(length, device=device)
    continued: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    for _ in range(max_tokens):
        next_B = choose_next(tokens_BT, places_T == last_B1)
        for row, token in enumerate(next_B.tolist()):
            if row in unfinished and token in ends:
                unfinished.remove(row)
            elif row in unfinished:
                continued[row].append(token)
        if not unfinished:
            break
        last_B1 = last_B1 + 1
        tokens_BT.scatter_(1, last_B1, next_B[:, None])
    return continued


def choose(logits_BV: torch.Tensor, sampling: Sampling, streams: Sequence[random.Random]) -> torch.Tensor:
    """One token id [B] per row of logits [B, V]; each row takes one number from its stream, unless temperature is 0."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    wide = widest(logits_BV)
    drawn_B = torch.tensor([stream.random() for stream in streams], dtype=wide, device=logits_BV.device)
    temperature = max(sampling.temperature, COLDEST)
    probability_BV, order_BV = _allowed((logits_BV.to(wide) / temperature).softmax(-1), sampling)
    cumulative_BV = probability_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    # Never the total itself, to which a product may be rounded: only forbidden tokens come after it.
    target_B1 = (drawn_B[:, None] * total_B1).minimum(total_B1.nextafter(torch.zeros_like(total_B1)))
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    return (index_B1 if order_BV is None else order_BV.gather(-1, index_B1)).squeeze(-1)


def _allowed(probability_BV: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities of tokens that may be drawn, 0 for the others, and the tokens' ids if they are in another
    order.

    Probabilities need not sum to 1: `top_p` is a share of the tokens that `top_k` keeps.
    """
    order_BV, minimum_B1 = None, sampling.min_p * probability_BV.amax(-1, keepdim=True)
    if 0 < sampling.top_k < probability_BV.shape[1]:
        probability_BV, order_BV = probability_BV.topk(sampling.top_k)
    elif sampling.top_p < 1:
        probability_BV, order_BV = probability_BV.sort(descending=True, stable=True)
    if sampling.top_p < 1:
        before_BV = probability_BV.cumsum(-1) - probability_BV
        # The likeliest token always stays, because nothing comes before it.
        within_BV = before_BV < sampling.top_p * probability_BV.sum(-1, keepdim=True)
        probability_BV = probability_BV * within_BV
    return probability_BV * (probability_BV >= minimum_B1), order_BV


def penalize(logits_V: torch.Tensor, sampling: Sampling, read_V: torch.Tensor, written_V: torch.Tensor) -> torch.Tensor:
    """The logits of one row, penalized for tokens in prompt and answer (`read`, bool) and by their count in the answer
    so far (`written`)."""
    if sampling.repetition_penalty != 1:
        lowered_V = torch.where(
            logits_V < 0, logits_V * sampling.repetition_penalty, logits_V / sampling.repetition_penalty
        )
        logits_V = torch.where(read_V, lowered_V, logits_V)
    if sampling.presence_penalty or sampling.frequency_penalty:
        logits_V = logits_V - sampling.presence_penalty * (written_V > 0) - sampling.frequency_penalty * written_V
    return logits_V


def check_room(prompts: Sequence[Sequence[int]], max_tokens: int, room: int) -> None:
    """Raise `UserError` if prompts and new tokens exceed the `room` positions that the model supports."""
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens} is not allowed: must be at least 1")
    if not prompts or not all(prompts):
        raise UserError("a prompt must have at least one token")
    longest = max(map(len, prompts))
    if longest >= room:
        raise UserError(f"the prompt has {longest} tokens, but the model supports {room}; shorten it")
    if longest + max_tokens > room:
        raise UserError(
            f"a prompt of {longest} tokens and max_tokens={max_tokens} exceed the {room} positions that the model "
            f"supports; use at most max_tokens={room - longest}"
        )
