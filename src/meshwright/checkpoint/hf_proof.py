"""Proof of an export: the directory, read back, computes the logits of the model that was exported."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.families import parameter_table, read_hf_directory, state_table
from meshwright.models import Decoder, build_model, named_tensors
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

TOLERANCE = 1e-4
"""Largest allowed difference of two logits, as a part of the largest logit. All models compute in fp32 from
the same stored weights, so differences are of rounding (about 1e-6); one wrong tensor makes them as large as
the logits."""

PROBE = (2, 64)
"""Sequences and tokens that are compared."""

RowReader = Callable[[str, int, int], torch.Tensor]


@torch.no_grad()
def prove_export(reference: Decoder, directory: Path, open_weights: Callable[[ModelSpec], RowReader]) -> float:
    """Compare the logits of `reference` (fp32, with the weights as they were rounded for export) with those
    of the model in `directory`: read by us and, if it is installed, by transformers.

    Args:
        open_weights: from the model that config.json describes to a reader of its parameters' rows.

    Returns:
        the largest difference found.

    Raises:
        UserError: the logits differ.
    """
    spec = reference.spec
    batch = Batch(probe_tokens(spec))
    expected_BTV = reference.logits(batch)

    found = read_hf_directory(directory, family=spec.family)
    read_rows = open_weights(found)
    reread = build_model(found, device="cpu")
    tensors = named_tensors(reread)
    for row in parameter_table(found) + state_table(found):
        tensors[row.name].copy_(read_rows(row.name, 0, row.shape[0]))
    worst = compare_logits(expected_BTV, reread.logits(batch), "read back")
    del reread, tensors

    if find_spec("transformers") is not None:
        theirs_BTV = _transformers_logits(directory, batch.tokens)
        worst = max(worst, compare_logits(expected_BTV, theirs_BTV, "read by transformers"))
    return worst


@torch.no_grad()
def prove_merge(adapted: Decoder, merged: Decoder) -> float:
    """Compare the logits of a model and of the same with its adapters merged, both in fp32; returns the largest
    difference. Raises `UserError` if they differ by more than rounding."""
    batch = Batch(probe_tokens(adapted.spec))
    return compare_logits(adapted.logits(batch), merged.logits(batch), "adapters merged")


def probe_tokens(spec: ModelSpec) -> torch.Tensor:
    """The same random tokens for every export of a model."""
    length = min(PROBE[1], spec.max_positions)
    return torch.randint(spec.vocab, (PROBE[0], length), generator=torch.Generator().manual_seed(0))


def _transformers_logits(directory: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    # Heavy and optional, so it is imported only if an export is proved.
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()
    return model(tokens_BT).logits


def compare_logits(expected_BTV: torch.Tensor, found_BTV: torch.Tensor, how: str, *, what: str = "the export") -> float:
    """The largest difference of two logits; raises `UserError`, which says `what` was read `how`, where it is more than
    rounding."""
    difference = (expected_BTV - found_BTV).abs().max().item()
    if not difference <= TOLERANCE * expected_BTV.abs().max().item():
        raise UserError(
            f"{what} was refused: {how}, its logits differ from the model's by {difference:.3g} "
            f"(the largest logit is {expected_BTV.abs().max().item():.3g})"
        )
    return difference
