"""The one place that continues prompts token by token: batched, with a cache, sampled reproducibly.

Shapes: B prompts, T their longest length, V vocabulary.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from meshwright.models.decoder import Cache, Decoder


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
            raise ValueError(f"temperature={self.temperature} is not allowed: must be at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is not allowed: must be at least 0 (0 allows every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not allowed: must be greater than 0 and at most 1")


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
        ValueError: an empty prompt, or more positions than the model is meant for.
    """
    _check(model, prompts, max_tokens)
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id)
    device = model.tok_embeddings.weight.device
    longest = max(map(len, prompts))
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens_BT = torch.tensor(
        [[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    cache = Cache(model, len(prompts), longest + max_tokens, padding_B if padding_B.any() else None)
    positions_BT = (torch.arange(longest, device=device) - padding_B[:, None]).clamp(min=0)
    streams = [random.Random(f"{sampling.seed}/{row}") for row in range(len(prompts))]
    continued: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    for _ in range(max_tokens):
        features_BTD = model.features(tokens_BT, positions_BT=positions_BT, cache=cache)
        next_B = choose(model.logits(features_BTD[:, -1]), sampling, streams)
        for row, token in enumerate(next_B.tolist()):
            if row in unfinished and token in ends:
                unfinished.remove(row)
            elif row in unfinished:
                continued[row].append(token)
        if not unfinished:
            break
        tokens_BT, positions_BT = next_B[:, None], positions_BT[:, -1:] + 1
    return continued


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


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} is not allowed: must be at least 1")
    if not prompts or not all(prompts):
        raise ValueError("a prompt must hold at least one token")
    longest, room = max(map(len, prompts)), model.spec.max_positions
    if longest >= room:
        raise ValueError(f"the prompt has {longest} tokens, but the model is meant for {room}; shorten it")
    if longest + max_tokens > room:
        raise ValueError(
            f"a prompt of {longest} tokens and max_tokens={max_tokens} are more than the {room} positions "
            f"that the model is meant for; at most {room - longest} new tokens have room"
        )
