"""torchtitan's checkpoints: torch.distributed.checkpoint's folder with the names and the rotary layout of its Llama."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.metadata import METADATA, SafeReader
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
"""Hugging Face's names -> torchtitan's."""
RENAMED = {".attention.w": ".attention.qkv_linear.w", "output.": "lm_head."}
"""Names that differ in releases from 0.3 on."""


def is_dcp(path: Path) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def read_torchtitan(path: Path, model: ModelSpec) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face's names; optimizer state is not read.

    Raises `UserError` if the folder holds another model than `model`, or is damaged.
    """
    if model.family != "llama":
        raise UserError(f"{path}: only torchtitan's Llama models are supported, not {model.family}")
    held = SafeReader(path).read_metadata().state_dict_metadata
    names = {key: _name(key, held) for key in _keys(model)}
    if missing := [key for key, name in names.items() if name is None]:
        raise UserError(
            f"{path}: has no {_theirs(missing[0])}, which --model needs; it may be of another model or system"
        )
    sizes = {name: tuple(getattr(held[name], "size", ())) for name in names.values() if name}
    tensors = {name: torch.empty(size) for name, size in sizes.items()}
    load_tensors(path, tensors)
    weights = {key: tensors[name] for key, name in names.items() if name}
    for number in range(model.num_layers):
        for one, heads in (("q", model.num_heads), ("k", model.num_kv_heads)):
            key = f"model.layers.{number}.self_attn.{one}_proj.weight"
            weights[key] = halves(weights[key], heads)
    return weights


def halves(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries' or keys' rows, from interleaved rotary pairs to Hugging Face's layout: the two halves of a head."""
    return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _keys(model: ModelSpec) -> list[str]:
    keys = [key.format(number) for key in NAMES for number in (range(model.num_layers) if "{}" in key else (0,))]
    return [key for key in keys if key != "lm_head.weight" or not model.tied_embeddings]


def _theirs(key: str) -> str:
    number = re.search(r"\d+", key)
    return NAMES[re.sub(r"\d+", "{}", key, count=1)].format(number and number[0])


def _name(key: str, held: Mapping[str, object]) -> str | None:
    """The name of a tensor in the folder."""
    newer = _theirs(key)
    for old, new in RENAMED.items():
        if not newer.endswith(".wo.weight"):
            newer = newer.replace(old, new)
    candidates = [f"{prefix}{name}" for prefix in ("", "model.") for name in (_theirs(key), newer)]
    return next((name for name in candidates if name in held), None)
