"""The fit of a layout to a model and its sequences: reasons against it, and legal alternatives."""

from collections.abc import Iterator
from itertools import product
from math import gcd, lcm
from typing import assert_never

from meshwright.spec.asynchronous import model_misfits
from meshwright.spec.errors import NEAREST, UserError
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.foreign import ForeignModel
from meshwright.spec.layout import ContextMethod, LayoutSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.precision import FP64, NARROW
from meshwright.spec.run import Run
from meshwright.spec.training import TrainingSpec


def check_positions(length: int, model: ModelSpec) -> None:
    """Raise `UserError` if a sequence is longer than the model's positions."""
    if length > model.max_positions:
        raise UserError(
            f"data.sequence_length={length} is longer than the model's {model.max_positions} positions; use "
            f"data.sequence_length={model.max_positions} or raise model.max_positions"
        )


def find_misfits(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> list[str]:
    """Every reason why the layout cannot train the model on sequences of this length: sentences that start with the
    setting and end with the nearest legal layout."""
    if model.foreign is not None:
        stages = () if layout.pp == 1 else _stage_misfits(layout, model)
        rows = () if layout.cp == 1 else _shared_row_misfits(layout, model, model.foreign, sequence_length)
        return [*_derived_misfits(layout, model.foreign, model.num_heads), *rows, *stages]
    reasons = _reasons(layout, model, sequence_length)
    advice = _advice(layout, model, sequence_length) if reasons else ""
    return [
        *(f"{reason}; {NEAREST} {advice}" for reason in reasons),
        *_stage_misfits(layout, model),
        *model_misfits(layout, model),
    ]


def _reasons(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> list[str]:
    """The reasons why the degrees of tp, cp and ep do not fit; empty if they fit."""
    reason = _tensor_misfit(layout, model, sequence_length) if layout.tp > 1 else None
    return [
        *([f"layout.tp={layout.tp}: {reason}"] if reason else ()),
        *(_context_misfits(layout, model, sequence_length) if layout.cp > 1 else ()),
        *(_expert_misfits(layout, model) if layout.ep > 1 else ()),
    ]


def _advice(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> str:
    """Legal alternatives: the nearest degrees, or the same degrees with another method or length."""
    ways, ring = [], layout.model_copy(update={"cp_method": "ring"})
    if layout.cp_method == "ulysses" and not _reasons(ring, model, sequence_length):
        ways.append(f"cp={layout.cp}, cp_method=ring")
    ways.append(_nearest_degrees(layout, model, sequence_length))
    unit = layout.cp * lcm(_chunks(layout, model, sequence_length), layout.tp)
    length = max(1, round(sequence_length / unit)) * unit
    if length != sequence_length and length <= model.max_positions and not _reasons(layout, model, length):
        ways.append(f"use data.sequence_length={length}")
    return ", or ".join(ways)


def _nearest_degrees(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> str:
    """The settings to change for the nearest degrees of tp, cp and ep that fit together."""

    def distance(degrees: tuple[int, int, int]) -> tuple[int, ...]:
        moves = [abs(degree - getattr(layout, axis)) for axis, degree in zip(("tp", "cp", "ep"), degrees, strict=True)]
        return sum(moves), sum(map(bool, moves)), moves[0], degrees[0]

    tps = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0] if layout.tp > 1 else [1]
    eps = [n for n in range(1, min(layout.ep, model.num_experts) + 1) if model.num_experts % n == 0] or [1]
    cps = range(1, min(layout.cp, sequence_length) + 1)  # a rank has at least one token
    for tp, cp, ep in sorted(product(tps, cps, eps), key=distance):
        near = layout.model_copy(update={"tp": tp, "cp": cp, "ep": ep})
        if layout.dp_shard * cp * tp % ep or _reasons(near, model, sequence_length):
            continue
        if layout.zero in (1, 2, 3) and near.shard == 1:
            near = near.model_copy(update={"zero": 0})
        axes = [axis for axis in ("tp", "cp", "ep", "zero") if getattr(near, axis) != getattr(layout, axis)]
        return ", ".join(f"{axis}={getattr(near, axis)}" for axis in axes)
    raise AssertionError("a degree of 1 always works")


def _derived_misfits(layout: LayoutSpec, foreign: ForeignModel, heads: int) -> Iterator[str]:
    """The reasons that follow from what is derived about a model that transformers computes."""
    yield from _shared_expert_misfits(layout, foreign) if layout.ep > 1 else ()
    split = foreign.split_over(layout.tp)
    if layout.tp > 1 and split is None:
        yield f"layout.tp={layout.tp}: the split over {layout.tp} ranks was not derived; set layout.tp in the recipe"
    elif layout.tp > 1 and split is not None and not split.modules:
        reasons = split.problem or "; ".join(sorted({reason for _, reason in split.whole}))
        divisors = [f"tp={tp}" for tp in range(2, heads + 1) if heads % tp == 0][:4]
        uneven = heads % layout.tp and divisors
        advice = f"{', '.join(divisors)} divide its {heads} heads" if uneven else f"{NEAREST} tp=1"
        yield f"layout.tp={layout.tp}: no module of this model can be split over ranks ({reasons}); {advice}"
    if layout.pp > 1 and foreign.cuts is None:
        yield f"layout.pp={layout.pp}: the cuts of the model were not derived; set layout.pp in the recipe"
    elif layout.pp > 1 and foreign.cuts is not None and foreign.cuts.problem:
        yield f"layout.pp={layout.pp}: this model cannot be cut into stages: {foreign.cuts.problem}; {NEAREST} pp=1"
    if layout.tiers.parameters != "device":
        yield (
            f"layout.offload={layout.offload_word}: is not supported for models that transformers computes, because "
            "their constants would stay on the host; use none"
        )


def _shared_expert_misfits(layout: LayoutSpec, foreign: ForeignModel) -> Iterator[str]:
    """The reasons why expert-parallel ranks cannot share the experts of a model that transformers computes."""
    experts, where = foreign.experts, f"layout.ep={layout.ep}"
    if experts is None:
        yield f"{where}: how ranks share experts was not derived; set layout.ep in the recipe"
    elif experts.problem:
        yield f"{where}: ranks cannot share the experts of this model: {experts.problem}; {NEAREST} ep=1"
    elif layout.tp > 1:
        yield f"{where} with layout.tp={layout.tp}: transformers' experts are shared only without tp; {NEAREST} tp=1"
    else:
        shapes, shards = dict(foreign.tensors), layout.expert_shard
        sharers = layout.dp_shard * layout.cp
        for one in experts.modules:
            stacks = [shapes[f"{foreign.blocks}.{one.layers[0]}.{one.name}.{name}"] for name in one.parameters]
            if one.count % layout.ep:
                nearest = f"{NEAREST} ep={gcd(one.count, sharers)}"
                yield f"{where}: {one.count} experts cannot be split evenly over {layout.ep} ranks; {nearest}"
                return
            if any(rows % shards and columns % shards for _, rows, columns in stacks):
                yield (
                    f"{where}: {shards} ranks share the state of the same experts, and divide neither the rows nor the "
                    "columns of their matrices; use another dp_shard, or zero=0"
                )
                return


def _shared_row_misfits(
    layout: LayoutSpec, model: ModelSpec, foreign: ForeignModel, sequence_length: int
) -> Iterator[str]:
    """The reasons why context-parallel ranks cannot share the rows of a model that transformers computes."""
    context, method = foreign.context, layout.cp_method
    if context is None:
        yield f"layout.cp={layout.cp}: whether ranks can share rows was not derived; set layout.cp in the recipe"
    elif context.problem:
        yield f"layout.cp={layout.cp}: ranks cannot share the rows of this model: {context.problem}; {NEAREST} cp=1"
    elif method not in ("auto", "all_gather"):
        yield f"layout.cp_method={method}: models that transformers computes support all_gather; use auto"
    else:
        for misfit in _context_misfits(layout, model, sequence_length):
            unit = 2 * layout.cp
            yield f"{misfit}; use data.sequence_length={max(1, round(sequence_length / unit)) * unit}, or cp=1"


def foreign_misfits(run: Run, layout: LayoutSpec, foreign: ForeignModel) -> list[str]:
    """The reasons why a model that transformers computes cannot be trained with a recipe's settings in a layout, in
    sentences that start with the setting."""
    training, finetune, misfits = run.training, run.finetune, []
    if training.compile:
        misfits.append("training.compile=true: is not supported for models that transformers computes; use false")
    if training.attention != "auto":
        misfits.append(
            f"training.attention={training.attention}: transformers computes this model's attention; use auto"
        )
    mixing = foreign.context is not None and not foreign.context.documents
    if run.data.separate_documents and layout.cp > 1 and mixing:
        misfits.append(
            f"layout.cp={layout.cp} with data.separate_documents: ranks that share this model's rows cannot keep "
            "documents apart; use cp=1, data.separate_documents=false, or data.packing=padded"
        )
    split = foreign.split_over(layout.tp)
    if (run.data.separate_documents or layout.cp > 1) and layout.tp > 1 and split is not None and not split.masked:
        needs = f"layout.cp={layout.cp}" if layout.cp > 1 else "data.separate_documents"
        misfits.append(
            f"layout.tp={layout.tp} with {needs}: the split of this model fails where its attention gets a mask; use "
            "tp=1, or neither of cp, data.separate_documents"
        )
    if finetune is not None and finetune.method == "ia3":
        misfits.append("finetune.method=ia3: is not supported for models that transformers computes; use lora")
    if layout.tp > 1 and getattr(finetune, "base", "plain") != "plain":
        misfits.append(
            f"finetune.method=qlora with layout.tp={layout.tp}: is not supported for models that transformers "
            "computes; use lora, or layout.tp=1"
        )
    return misfits


def quantized_misfits(layout: LayoutSpec, finetune: FinetuneSpec | None) -> list[str]:
    """The reasons against the layout's quantized collectives, in sentences that start with the setting; empty if there
    are none."""
    misfits, base = [], getattr(finetune, "base", "plain")
    if layout.quantized_weights != "none" and base != "plain":
        misfits.append(
            f"layout.quantized_weights={layout.quantized_weights} with finetune.base={base}: the frozen matrices "
            "are already gathered quantized; use layout.quantized_weights=none"
        )
    if layout.quantized_gradients != "none" and layout.pp > 1 and layout.virtual_stages > 1:
        misfits.append(
            f"layout.quantized_gradients={layout.quantized_gradients} with layout.schedule={layout.schedule}: a "
            "rank with several stages reduces embedding and head separately; use layout.quantized_gradients=none, "
            "or schedule=1f1b"
        )
    return misfits


def fp8_gather_misfits(layout: LayoutSpec, training: TrainingSpec, finetune: FinetuneSpec | None) -> list[str]:
    """The reasons why weights cannot be gathered as the codes of fp8 products; empty if they can."""
    where = f"layout.quantized_weights={layout.quantized_weights}"
    if layout.quantized_weights != "fp8":
        return []
    if training.product_recipe != "tensorwise":
        products = training.product_recipe or training.precision
        return [
            f"{where}: products in {products} have no single scale per weight; use training.precision=fp8 with "
            "training.low_precision.recipe=tensorwise, or layout.quantized_weights=int8"
        ]
    if getattr(finetune, "dora", False):
        return [f"{where} with finetune.dora=true: DoRA's magnitudes need unquantized weights; use none"]
    return []


def sample_misfits(training: TrainingSpec, model: ModelSpec) -> list[str]:
    """The reason why samples in training exceed the model's positions; empty if they do not."""
    if training.samples is None or training.samples.max_tokens < model.max_positions:
        return []
    return [
        f"training.samples.max_tokens={training.samples.max_tokens} leaves no room for a prompt; the model supports "
        f"{model.max_positions} positions"
    ]


def batch_misfits(layout: LayoutSpec, global_batch: int) -> list[str]:
    """The reason why the data-parallel ranks cannot share a step's sequences evenly; empty if they can."""
    ranks = layout.data_parallel
    if global_batch % ranks == 0:
        return []
    return [
        f"training.global_batch={global_batch} sequences cannot be split over {ranks} data-parallel ranks; the "
        f"nearest multiple is {max(1, round(global_batch / ranks)) * ranks}"
    ]


def _tensor_misfit(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> str | None:
    """The reason why tensor-parallel ranks cannot share this model; None if they can."""
    tp, heads, kv_heads, tokens = layout.tp, model.num_heads, model.num_kv_heads, sequence_length // layout.cp
    rows = -(-model.vocab // tp)
    if heads % tp:
        return f"{heads} query heads cannot be split evenly over {tp} ranks"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} key/value heads can neither be split over {tp} ranks nor replicated evenly on them"
    if any(model.delta_layers) and model.delta_key_heads % tp:
        return f"{model.delta_key_heads} key heads of the gated delta rule cannot be split evenly over {tp} ranks"
    if model.ffn % tp and not all(model.is_moe(layer) for layer in range(model.num_layers)):
        return f"a feed-forward layer of width {model.ffn} cannot be split evenly over {tp} ranks"
    if model.shared_width % tp:
        shared = f"{model.shared_experts} shared experts of width {model.expert_ffn}"
        shared = f"a shared expert of width {model.shared_ffn}" if model.shared_ffn else shared
        return f"{shared} cannot be split evenly over {tp} ranks"
    if tokens % tp and sequence_length % layout.cp == 0:  # otherwise cp is the reason
        return f"{tp} ranks share the sequence between blocks, and {tokens} tokens cannot be split evenly over them"
    if rows * (tp - 1) >= model.vocab:
        return f"a vocabulary of {model.vocab} leaves the last of {tp} ranks without a row"
    if model.vocab % tp and model.hidden % layout.shard:
        return (
            f"a vocabulary of {model.vocab} cannot be split evenly over {tp} ranks, so ZeRO shards the embedding's "
            f"columns, and {model.hidden} of them cannot be split evenly over {layout.shard} ranks"
        )
    return None


def tensor_notes(layout: LayoutSpec, model: ModelSpec) -> str:
    """The parts that tensor-parallel ranks do not share evenly; empty if they share everything."""
    tp, rows = layout.tp, -(-model.vocab // layout.tp)
    notes = []
    if model.num_kv_heads % tp:
        notes.append(f"{model.num_kv_heads} key/value heads for {tp} ranks, so wk and wv are replicated")
    if model.vocab % tp:
        last = model.vocab - rows * (tp - 1)
        notes.append(f"{model.vocab} tokens for {tp} ranks, so the last has {last} of them and the others {rows}")
    return "; ".join(notes)


def context_method(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> tuple[ContextMethod, str]:
    """The method of context-parallel attention, and the reason for it."""
    if layout.cp_method != "auto":
        return layout.cp_method, "given"
    if model.foreign is not None:
        return "all_gather", "transformers computes the attention, to the keys and values of all ranks"
    ranks, kv_heads = layout.cp * layout.tp, model.num_kv_heads
    if kv_heads % ranks == 0:
        return "ulysses", f"{kv_heads} key/value heads divide over cp x tp = {ranks} ranks, so ulysses sends least"
    if sequence_length % (2 * layout.cp) and model.num_heads % ranks == 0:
        return (
            "ulysses",
            f"{sequence_length} tokens do not divide into 2 x cp = {2 * layout.cp} chunks, as a ring needs",
        )
    return "ring", f"{kv_heads} key/value heads do not divide over cp x tp = {ranks} ranks, as ulysses needs"


def _chunks(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> int:
    """Number of chunks of a sequence on each context-parallel rank."""
    method, _ = context_method(layout, model, sequence_length)
    if layout.cp == 1:
        return 1
    match method:
        case "ulysses":
            return 1
        case "ring" | "all_gather":
            return 2
        case _:
            assert_never(method)


def _context_misfits(layout: LayoutSpec, model: ModelSpec, sequence_length: int) -> Iterator[str]:
    method, _ = context_method(layout, model, sequence_length)
    cp, tp, parts = layout.cp, layout.tp, layout.cp * _chunks(layout, model, sequence_length)
    where = f"layout.cp={cp} with cp_method={method}"
    if method == "ulysses" and model.num_heads % tp == 0 and model.num_heads // tp % cp:
        yield f"{where}: {model.num_heads} heads do not divide over cp x tp = {cp * tp} ranks"
    if sequence_length % parts:
        equal = "parts" if parts == cp else "chunks, two for each rank"
        yield f"{where}: data.sequence_length={sequence_length} does not divide into {parts} equal {equal}"


def _expert_misfits(layout: LayoutSpec, model: ModelSpec) -> Iterator[str]:
    shards = layout.expert_shard
    if not model.num_experts:
        yield f"layout.ep={layout.ep}: {model.family} has no experts"
    elif model.num_experts % layout.ep:
        yield f"layout.ep={layout.ep}: {model.num_experts} experts cannot be split evenly over {layout.ep} ranks"
    elif model.expert_ffn % shards and model.hidden % shards:
        yield (
            f"layout.ep={layout.ep}: {shards} ranks share the state of the same experts, and divide neither "
            f"their width, {model.expert_ffn}, nor model.hidden={model.hidden}"
        )


def _stage_misfits(layout: LayoutSpec, model: ModelSpec) -> Iterator[str]:
    stages, layers = layout.pp * layout.virtual_stages, model.num_layers
    if stages > layers:
        each = f" with {layout.virtual_stages} stages on each rank" if layout.virtual_stages > 1 else ""
        yield (
            f"layout.pp={layout.pp}{each}: {layers} layers cannot be split into {stages} pipeline stages; "
            f"use at most {layers}"
        )


def device_misfits(run: Run) -> list[str]:
    """Reasons why a run's device cannot compute it."""
    if run.device != "mps":
        return []
    misfits = []
    if run.layout.world_size > 1:
        misfits.append(
            f"device=mps with {run.layout.world_size} ranks: an Apple GPU is one process's; use layout: {{}} or "
            "device=cpu"
        )
    if run.training.precision in (FP64.name, *NARROW):
        misfits.append(f"device=mps with training.precision={run.training.precision}: use fp32, bf16 or fp16")
    return misfits
