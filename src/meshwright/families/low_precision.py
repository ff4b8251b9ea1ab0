"""The linear layers and experts that multiply in low precision, the state of their scales, and the layouts that cannot
do so."""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from meshwright.families.split import TP_SPLITS, is_experts, split_dim
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.fit import context_method
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.low_precision import BLOCKS, DELAYED
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.training import TrainingSpec

HEADS, INNER = frozenset({"heads", "v_heads"}), frozenset({"ffn", "shared_ffn", "expert_ffn"})
"""Named dims of the inputs that attention saves, and of those that only one layer reads."""
OPERANDS = 3
"""The operands of a layer's products: input, weight and gradient."""


HISTORY = ".scaling.amax_history"
"""Suffix of the name of a layer's largest values in the last steps."""


def low_precision_layers(table: Iterable[Parameter], training: TrainingSpec) -> tuple[str, ...]:
    """The linear layers and experts' matrices of blocks with low-precision products, by name, in the table's order.

    Raises `UserError` if a pattern of `keep` matches no layer, or if no layer is left.
    """
    if training.product_recipe is None:
        return ()
    linear = [row.name.removesuffix(".weight") for row in table if _is_linear(row)]
    blocks = 1 + max((int(name.split(".")[1]) for name in linear), default=0)
    kept: set[str] = set()
    for pattern in training.low_precision.keep:
        counted = re.sub(r"^layers\.-(\d+)", lambda match: f"layers.{blocks - int(match[1])}", pattern)
        named = {name for name in linear if fnmatchcase(name, counted) or fnmatchcase(name, f"{counted}.*")}
        if not named:
            raise UserError(
                f"training.low_precision.keep: {pattern!r} matches no linear layer of a block; "
                f"there are {linear[0]}, ..., {linear[-1]}"
            )
        kept |= named
    if not kept < set(linear):
        raise UserError(
            f"training.low_precision.keep leaves no layer in {training.precision}; use training.precision=bf16"
        )
    return tuple(name for name in linear if name not in kept)


def keeps_codes(row: Parameter, training: TrainingSpec) -> bool:
    """Whether the layer of this matrix saves its input as codes for the backward pass. Not if attention saves the same
    tensor anyway, nor if other layers read it with their own scales, because each would save its codes."""
    into = row.dims[-1]
    if not training.keeps_codes or into in HEADS:
        return False
    return into in INNER or training.product_recipe != DELAYED


def describe_low_precision(table: Iterable[Parameter], training: TrainingSpec) -> str:
    """The low-precision layers, in words."""
    rows = tuple(table)
    chosen, everything = low_precision_layers(rows, training), sum(map(_is_linear, rows))
    experts = ", experts' included" if any(map(is_experts, rows)) else ""
    return f"{training.arithmetic} in {len(chosen)} of {everything} linear layers of blocks{experts}"


def low_precision_state(table: Iterable[Parameter], training: TrainingSpec) -> tuple[Parameter, ...]:
    """The histories for delayed scales: state, sharded and saved like a parameter but not trained."""
    if training.product_recipe != DELAYED:
        return ()
    table = tuple(table)
    weights, steps = {row.name: row for row in table}, training.low_precision.amax_history

    def history(layer: str) -> Parameter:
        row = weights[f"{layer}.weight"]
        shape = OPERANDS * (row.shape[0] if is_experts(row) else 1), steps
        return Parameter(name=f"{layer}{HISTORY}", dims=("operands", "steps"), shape=shape, init="zeros")

    return tuple(map(history, low_precision_layers(table, training)))


def low_precision_misfits(
    training: TrainingSpec,
    table: Iterable[Parameter],
    model: ModelSpec,
    finetune: FinetuneSpec | None,
    layout: LayoutSpec,
    sequence_length: int,
) -> list[str]:
    """Every reason why a layout cannot multiply a model's matrices in low precision, each a sentence that starts with
    the setting; empty if it can."""
    recipe = training.product_recipe
    if recipe is None:
        return []
    where = f"training.precision={training.precision}"
    if model.foreign is not None:
        return [f"{where}: is not supported for models that transformers computes; use bf16"]
    base = getattr(finetune, "base", "plain")
    if base != "plain":
        return [f"{where} with finetune.base={base}: the frozen matrices are already quantized; use one of the two"]
    chosen = set(low_precision_layers(table, training))
    rows = [row for row in table if _is_linear(row) and row.name.removesuffix(".weight") in chosen]
    misfits = []
    experts, rows = [row for row in rows if is_experts(row)], [row for row in rows if not is_experts(row)]
    if experts and layout.cp * layout.tp > 1:
        misfits += _expert_misfits(where, recipe, layout)
    if layout.tp > 1:
        misfits += _tensor_misfits(f"{where} with layout.tp={layout.tp}", rows, model, layout.tp, BLOCKS.get(recipe, 1))
    if layout.cp > 1 and recipe in BLOCKS:
        misfits += _context_misfits(
            f"{where} with layout.cp={layout.cp}", model, layout, sequence_length, BLOCKS[recipe]
        )
    return misfits


def _is_linear(row: Parameter) -> bool:
    """Whether it is the matrix of a linear layer of a block, or of its experts; a router's is not."""
    ours = row.name.startswith("layers.") and row.name.endswith(".weight")
    return ours and (is_experts(row) or (len(row.dims) == 2 and "experts" not in row.dims))


def _expert_misfits(where: str, recipe: str, layout: LayoutSpec) -> Iterator[str]:
    """Ranks that share a microbatch each have a part of every expert's rows."""
    sharers = layout.cp * layout.tp
    axes = " and ".join(f"layout.{axis}={getattr(layout, axis)}" for axis in ("cp", "tp") if getattr(layout, axis) > 1)
    if recipe in BLOCKS:
        yield (
            f"{where} with {axes}: {BLOCKS[recipe]} rows of an expert share a scale, but lie on several ranks; set "
            "training.low_precision.keep=[*.experts], or use precision=fp8 with recipe=tensorwise or rowwise"
        )
    elif sharers % layout.ep and layout.ep % sharers:
        yield (
            f"{where} with {axes} and layout.ep={layout.ep}: an expert's rows of one microbatch lie on some of the "
            f"{sharers} ranks that share it, and with others'; use an ep that divides {sharers} or is a multiple of it"
        )


def _tensor_misfits(where: str, rows: list[Parameter], model: ModelSpec, tp: int, block: int) -> Iterator[str]:
    split = {row.name: split_dim(row, model, tp) for row in rows}
    whole = sorted({row.name.split(".", 2)[2].removesuffix(".weight") for row in rows if split[row.name] is None})
    if whole:
        keep = ", ".join(f"*.{name}" for name in whole)
        yield (
            f"{where}: {', '.join(whole)} are whole on every rank, where they get a share of the gradient each, and no "
            f"rank knows the scale of their sum; set training.low_precision.keep=[{keep}]"
        )
    for row in rows:
        dim = split[row.name]
        if dim is not None and (row.shape[dim] // tp) % block:
            assert row.dims[dim] in TP_SPLITS
            yield (
                f"{where}: a rank's {row.shape[dim] // tp} of the {row.shape[dim]} "
                f"{'outputs' if dim == 0 else 'inputs'} of {row.name.removesuffix('.weight')} are not a multiple of "
                f"{block}, the numbers that share a scale; use another degree, or keep the layer in bf16"
            )
            return


def _context_misfits(
    where: str, model: ModelSpec, layout: LayoutSpec, sequence_length: int, block: int
) -> Iterator[str]:
    method, _ = context_method(layout, model, sequence_length)
    chunk = sequence_length // layout.cp // (1 if method == "ulysses" else 2)
    if chunk % block:
        yield (
            f"{where}: a rank's tokens come in runs of {chunk}, no multiple of {block}, the tokens that share a scale; "
            f"use a data.sequence_length that is a multiple of {sequence_length // chunk * block}"
        )
