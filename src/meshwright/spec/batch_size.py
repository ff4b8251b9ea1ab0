"""The number of sequences of an optimizer step."""

from meshwright.spec.errors import UserError
from meshwright.spec.run import Run

DEFAULT_GLOBAL_BATCH = 64
"""Sequences per step if a recipe gives no batch size."""


def sequences_per_step(run: Run) -> int:
    """Sequences per optimizer step over all ranks. Raises `UserError` if the tokens do not fill whole sequences."""
    tokens, length = run.training.global_batch_tokens, run.data.sequence_length
    if tokens is None:
        return run.training.global_batch or DEFAULT_GLOBAL_BATCH
    if tokens % length:
        raise UserError(
            f"training.global_batch_tokens={tokens} is not a multiple of data.sequence_length={length}; "
            f"the nearest multiple is {max(1, round(tokens / length)) * length}"
        )
    return tokens // length
