"""The one place that says whether a layout fits a model and the sequences it is trained on, and how."""

from collections.abc import Iterator

from meshwright.spec.layout import NEAREST, ContextMethod, LayoutSpec
from meshwright.spec.model import ModelSpec


def find_misfits(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> list[str]:
    """Every reason why the layout cannot train the model on sequences of so many tokens, each a sentence that begins
    with the setting and ends with the nearest legal layout."""
    return list(_context_misfits(layout, model, sequence_length) if layout.cp > 1 else ())


def context_method(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> tuple[ContextMethod, str]:
    """How context-parallel ranks attend to each other's tokens, and why."""
    if layout.cp_method != "auto":
        return layout.cp_method, "given"
    ranks, kv_heads = layout.cp * layout.tp, model.num_kv_heads
    if kv_heads % ranks == 0:
        return "ulysses", f"{kv_heads} key and value heads divide over cp x tp = {ranks} ranks, which sends least"
    if sequence_length % (2 * layout.cp) and model.num_heads % ranks == 0:
        return (
            "ulysses",
            f"{sequence_length} tokens do not divide into 2 x cp = {2 * layout.cp} chunks, as a ring needs",
        )
    return "ring", f"{kv_heads} key and value heads do not divide over cp x tp = {ranks} ranks, as ulysses needs"


def _context_misfits(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> Iterator[str]:
    method, _ = context_method(layout, model, sequence_length)
    cp, heads, by_heads = layout.cp, model.num_heads // layout.tp, method == "ulysses"
    chunks = 1 if by_heads else 2  # of each rank
    length = max(1, round(sequence_length / (chunks * cp))) * chunks * cp
    fitting = max(n for n in range(1, cp) if n == 1 or not (sequence_length % (chunks * n) or (by_heads and heads % n)))
    where = f"layout.cp={cp} with cp_method={method}"
    if by_heads and heads % cp:
        yield (
            f"{where}: {model.num_heads} heads do not divide over cp x tp = {cp * layout.tp} ranks; "
            f"{NEAREST} cp={cp}, cp_method=ring, or cp={fitting}"
        )
    if sequence_length % (chunks * cp):
        yield (
            f"{where}: data.sequence_length={sequence_length} does not divide into {chunks * cp} equal "
            f"{'parts' if by_heads else 'chunks, two for each rank'}; "
            f"{NEAREST} cp={fitting}, or use data.sequence_length={length}"
        )
