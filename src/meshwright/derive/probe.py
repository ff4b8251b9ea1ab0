"""The model that is probed: transformers' own, with random weights in float64, and small enough to compute in seconds.

A small model is probed as it is. Of a large one a copy is probed that keeps what a split depends on, the numbers of
heads, groups and ranks' shares, and the first blocks of each kind; widths shrink.
"""

import inspect
import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from meshwright.derive.context import derive_context
from meshwright.derive.cuts import derive_cuts, with_name
from meshwright.derive.derive import Blocks, derive_split, recheck
from meshwright.derive.experts import derive_experts
from meshwright.derive.overrides import check_overruled, overruled
from meshwright.derive.whole_model import check_whole
from meshwright.families.wrapped import parsed
from meshwright.models.foreign import without_dropout
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import (
    ExpertModule,
    ForeignContext,
    ForeignCuts,
    ForeignExperts,
    ForeignModel,
    ForeignSplit,
    SplitParameter,
)

LARGEST = 3_000_000
"""Parameters of a model that is probed as it is."""

MOST = 80_000_000
"""Parameters of a shrunk copy."""

ROWS, LENGTH = 4, 16
"""Sequences, and tokens of each; with fewer, unchosen experts and units without gradient hide structure."""

HEAD_DIM, VOCAB, LATENT = 8, 64, 16

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim")
HEAD_WIDTHS = (
    *("head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "global_head_dim", "d_kv"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "attention_head_dim"),
)
ROTATED = ("rotary_dim", "qk_rope_head_dim")
INNER = (
    *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "dff", "dim_ff", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("expert_ffn_hidden_size", "intermediate_size_mlp"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
OTHERS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"), 6),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), LATENT),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
}


def derived_split(foreign: ForeignModel, parts: int) -> ForeignSplit:
    """The split of a model over this many parts.

    A large model's split is scaled up from a small copy's, if it also passes the slice test in a copy of other widths.

    All split modules together then pass a slice test of the whole model.

    Raises:
        UserError: no small copy of it can be made, or the splits do not hold together.
    """
    if not is_large(foreign):
        blocks = probe_blocks(foreign, parts)
        split = overruled(foreign, derive_split(blocks, parts))
        check_overruled(blocks, split, foreign, parts)
        return _checked(blocks, split, parts)
    small, wider = (probe_blocks(foreign, parts, scale) for scale in (1, 2))
    split = derive_split(small, parts)
    widths, wide = (
        {name: tuple(one.shape) for name, one in blocks.model.named_parameters()} for blocks in (small, wider)
    )
    again = scaled_up(split, widths, wide, foreign.blocks)
    same, lost = recheck(wider, again, parts)
    kept = split.model_copy(update={"modules": tuple(split.modules[number] for number in same)})
    kept = _checked(small, kept, parts)
    whole = [(f"{foreign.blocks}.*.{name}", reason) for name, reason in lost.items()]
    scaled = scaled_up(kept, widths, dict(foreign.tensors), foreign.blocks)
    scaled = scaled.model_copy(update={"whole": tuple(sorted({*split.whole, *whole}))})
    if not foreign.dims:
        return scaled
    scaled = overruled(foreign, scaled)
    again = scaled_up(scaled, dict(foreign.tensors), widths, foreign.blocks)
    check_overruled(small, again, foreign, parts)
    return scaled.model_copy(update={"masked": _checked(small, again, parts).masked})


def derived_cuts(foreign: ForeignModel) -> ForeignCuts:
    """Where pipeline stages can cut a model; with a `problem` if nowhere. A large model is cut as a small copy.

    Raises:
        UserError: no small copy of it can be made.
    """
    cuts = derive_cuts(probe_blocks(foreign, 1))
    names = dict(foreign.tensors)
    renamed = "embed_out.weight" in names and "lm_head.weight" not in names  # as in `models/foreign.py`
    return with_name(cuts, "lm_head", "embed_out") if renamed else cuts


def derived_context(foreign: ForeignModel) -> ForeignContext:
    """Whether context-parallel ranks can share a model's rows; with a `problem` if not. Of a large model, a small copy
    is asked.

    Raises:
        UserError: no small copy of it can be made.
    """
    return derive_context(probe_blocks(foreign, 1))


def derived_experts(foreign: ForeignModel) -> ForeignExperts:
    """How expert-parallel ranks share a model's experts; with a `problem` if they cannot. Of a large model, the experts
    of a small copy are divided.

    Raises:
        UserError: no small copy of it can be made.
    """
    experts = derive_experts(probe_blocks(foreign, 1))
    shapes = dict(foreign.tensors)

    def whole(one: ExpertModule) -> ExpertModule:
        name = f"{foreign.blocks}.{one.layers[0]}.{one.name}.{one.parameters[0]}"
        return one.model_copy(update={"count": shapes[name][0]})

    return experts.model_copy(update={"modules": tuple(map(whole, experts.modules))})


def _checked(blocks: Blocks, split: ForeignSplit, parts: int) -> ForeignSplit:
    """The split, with `masked`."""
    try:
        check_whole(blocks, split, parts)
    except Exception as error:  # transformers' code may fail with parts that each work alone
        raise UserError(f"its modules' splits do not hold in the whole model: {error}") from error
    if "position_ids" not in inspect.signature(type(blocks.model).forward).parameters:
        return split
    positions_BT = (torch.arange(LENGTH) % (LENGTH // 2)).expand(ROWS, -1)
    try:
        check_whole(blocks, split, parts, positions_BT)
    except Exception:
        return split.model_copy(update={"masked": False})
    return split


def is_large(foreign: ForeignModel) -> bool:
    """Whether only a small copy of a model is probed."""
    return sum(map(prod, dict(foreign.tensors).values())) > LARGEST


def scaled_up(
    split: ForeignSplit, before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]], blocks: str
) -> ForeignSplit:
    """The split of a model with these shapes `before` with the sizes of the same model with others `after`."""

    def scaled(one: SplitParameter, layer: int, module: str) -> SplitParameter:
        name = ".".join(filter(None, (module, one.name)))
        old, new = (shapes[f"{blocks}.{layer}.{name}"][one.dim] for shapes in (before, after))

        def size(count: int) -> int:
            return count * new // old

        kept = tuple((size(start), size(stop)) for start, stop in one.kept)
        return one.model_copy(update={"segments": tuple(map(size, one.segments)), "kept": kept})

    modules = [
        module.model_copy(
            update={"parameters": tuple(scaled(one, module.layers[0], module.name) for one in module.parameters)}
        )
        for module in split.modules
    ]
    return split.model_copy(update={"modules": tuple(modules)})


def probe_blocks(foreign: ForeignModel, parts: int, scale: int = 1) -> Blocks:
    """The model to probe for a split over this many parts; `scale`: of a small copy's widths.

    Raises:
        UserError: no small copy of it can be made.
    """
    config, kinds, large = json.loads(foreign.config), block_kinds(foreign), is_large(foreign)
    if large:
        config = shrunk(config, parts, max(kinds) + 1, scale)
    settings = without_dropout(config)
    try:
        model: Any = _built(settings)
    except UserError:
        raise
    except Exception as error:  # transformers' own, for sizes that do not fit one another
        what = "a small copy of it" if large else "it"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"transformers cannot compute {what}: {reason}") from error
    generator = torch.Generator().manual_seed(1)
    vocab = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocab, (ROWS, LENGTH), generator=generator)
    return Blocks(model, foreign.blocks, kinds, tokens)


def block_kinds(foreign: ForeignModel) -> dict[int, tuple[int, ...]]:
    """The first block with the same parameters -> all blocks with them."""
    of_layer: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in foreign.tensors:
        if match := re.fullmatch(rf"{re.escape(foreign.blocks)}\.(\d+)\.(.+)", name):
            of_layer.setdefault(int(match[1]), []).append((match[2], shape))
    layers: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
    for layer in sorted(of_layer):
        layers.setdefault(tuple(sorted(of_layer[layer])), []).append(layer)
    return {same[0]: tuple(same) for same in layers.values()}


def shrunk(config: dict[str, Any], parts: int, layers: int, scale: int = 1) -> dict[str, Any]:
    """A config with the same structure and small widths, of the first `layers` blocks."""
    small = {key: OTHERS.get(key, value) if value is not None else None for key, value in config.items()}
    heads = next((config[key] for key in HEADS if type(config.get(key)) is int), 1)
    hidden = next((config[key] for key in HIDDEN if type(config.get(key)) is int), 1)
    width = config.get("head_dim") or hidden // heads
    wanted = scale * (HEAD_DIM if "partial_rotary_factor" in json.dumps(config) else HEAD_DIM // 2)
    ratio = width // wanted if width % wanted == 0 else 1
    for key, value in config.items():
        if type(value) is not int:
            continue
        if key in HIDDEN:
            by_heads = not config.get("head_dim") or hidden == heads * width
            small[key] = heads * (width // ratio if width % wanted == 0 else wanted) if by_heads else 64 * scale
        elif key in HEAD_WIDTHS:
            small[key] = max(2, value // ratio)
        elif key in ROTATED:
            small[key] = max(2, value // ratio // 2 * 2)
        elif key in INNER:
            small[key] = 4 * parts * scale if value % parts == 0 else 4 * parts * scale + 1
    small |= _few_experts(config) | _few_layers(config, layers)
    if "qk_head_dim" in small and "qk_nope_head_dim" in small:
        small["qk_head_dim"] = sum(small[key] or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return {key: _plain_rope(value) if key.startswith("rope_") else value for key, value in small.items()}


def _few_experts(config: Mapping[str, Any]) -> dict[str, int]:
    """Two experts of each group more than a token uses."""
    groups = config.get("n_group") or config.get("num_expert_groups") or 1
    chosen = max(
        [config.get(key) or 0 for key in ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")]
    )
    count = groups * max(2, -(-(chosen + 2) // groups))
    return {key: min(count, config[key]) for key in EXPERTS if type(config.get(key)) is int and config[key] > 0}


def _few_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The number of blocks, and lists with a value for each."""
    keys = [key for key in ("num_hidden_layers", "n_layer", "n_layers") if type(config.get(key)) is int]
    total = config[keys[0]] if keys else 0
    lists = {key: value[:layers] for key, value in config.items() if isinstance(value, list) and len(value) == total}
    return lists | dict.fromkeys(keys, layers)


def _plain_rope(value: Any) -> Any:
    """Rotary settings without scaling, which lists widths."""
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(one, Mapping) for one in value.values()):
        return {key: _plain_rope(one) for key, one in value.items()}
    kept = {key: one for key, one in value.items() if key in ("rope_theta", "partial_rotary_factor")}
    return {**kept, "rope_type": "default"}


def _built(settings: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM  # heavy and optional

    complete = parsed(settings, where="config.json")
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(complete).parameters())
    if size > MOST:
        raise UserError(f"a small copy of it still has {size / 1e6:.0f}M parameters")
    model: Any = AutoModelForCausalLM.from_config(complete, dtype=torch.float64)
    draw(model)
    model.to(torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Random weights without structure: no norm of ones, no bias of zeros, no even router."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(noise * (0.1 if "A_log" in name or "dt_bias" in name else 0.2))
        parameter.requires_grad_()
    for name, buffer in model.named_buffers():
        if "score_correction" in name or "expert_bias" in name:
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
