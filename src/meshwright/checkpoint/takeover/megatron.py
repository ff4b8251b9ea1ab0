"""Megatron-core's distributed checkpoints (`torch_dist`): a folder of torch.distributed.checkpoint.

Tensors have their whole shapes, whatever layout wrote them; tensors of equal layers are stacked.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.metadata import SafeReader
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

EMBEDDING, HEAD, LAYERS = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers."
PREFIXES = ("", "model.", "module.", "model.module.")
"""Prefixes that programs add to Megatron-core's names."""
NORMS = {
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
"""Hugging Face's norms -> Megatron-core's: fused with the layer that follows, or not."""


def is_megatron(path: Path) -> bool:
    """Whether a folder of torch.distributed.checkpoint is Megatron-core's."""
    return _prefix(path) is not None


def read_megatron(path: Path, model: ModelSpec) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights by Hugging Face's names, and notes on differences; optimizer state is not read.

    Raises `UserError` if the folder holds another model than `model`, or is damaged.
    """
    if model.family != "llama":
        raise UserError(f"{path}: only Llama models of Megatron-core are supported, not {model.family}")
    prefix = _prefix(path)
    assert prefix is not None
    held = SafeReader(path).read_metadata().state_dict_metadata
    wanted = [name for name in held if name.startswith(prefix) and name.endswith("weight") and "optimizer" not in name]
    tensors = {name: torch.empty(tuple(getattr(held[name], "size", ()))) for name in wanted}
    load_tensors(path, tensors)
    by_name = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    reader = _Tensors(path, by_name)
    weights, notes = dict(_layers(reader, model)), ()
    rows = reader.tensor(EMBEDDING).shape[0]
    if rows > model.vocab:
        notes = (
            f"the vocabulary is padded from {model.vocab} to {rows} rows; the last {rows - model.vocab} are dropped",
        )
    weights["model.embed_tokens.weight"] = reader.tensor(EMBEDDING)[: model.vocab]
    weights["model.norm.weight"] = reader.tensor("decoder.final_layernorm.weight")
    if HEAD in by_name:
        weights["lm_head.weight"] = reader.tensor(HEAD)[: model.vocab]
    return weights, notes


class _Tensors:
    """A checkpoint's tensors by Megatron-core's names."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._path, self._tensors = path, tensors

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; raises `UserError` if there is none."""
        if name not in self._tensors:
            raise UserError(f"{self._path}: has no {name}, which --model needs")
        return self._tensors[name]

    def of_layer(self, number: int, *names: str) -> torch.Tensor:
        """A layer's tensor, separate or stacked with the others', by the first of `names` that exists."""
        for name in names:
            if f"{LAYERS}{number}.{name}" in self._tensors:
                return self._tensors[f"{LAYERS}{number}.{name}"]
            stacked = self._tensors.get(LAYERS + name)
            if stacked is not None and number < len(stacked):
                return stacked[number]
        raise UserError(f"{self._path}: has no {LAYERS}{names[0]} of layer {number}, which --model needs")


def _layers(reader: _Tensors, model: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Queries, keys and values are merged by group of heads; gate and up projection are merged too."""
    for number in range(model.num_layers):
        layer = f"model.layers.{number}."
        qkv = reader.of_layer(number, "self_attention.linear_qkv.weight")
        if qkv.shape[0] != (model.num_heads + 2 * model.num_kv_heads) * model.head_dim:
            raise UserError(
                f"layer {number}: queries, keys and values have {qkv.shape[0]} rows, which does not match --model"
            )
        groups = qkv.unflatten(0, (model.num_kv_heads, -1))
        sizes = [groups.shape[1] - 2 * model.head_dim, model.head_dim, model.head_dim]
        for one, part in zip("qkv", groups.split(sizes, 1), strict=True):
            yield f"{layer}self_attn.{one}_proj.weight", part.flatten(0, 1)
        yield f"{layer}self_attn.o_proj.weight", reader.of_layer(number, "self_attention.linear_proj.weight")
        for one, part in zip(("gate", "up"), reader.of_layer(number, "mlp.linear_fc1.weight").chunk(2), strict=True):
            yield f"{layer}mlp.{one}_proj.weight", part
        yield f"{layer}mlp.down_proj.weight", reader.of_layer(number, "mlp.linear_fc2.weight")
        for theirs, names in NORMS.items():
            yield f"{layer}{theirs}.weight", reader.of_layer(number, *names)


def _prefix(path: Path) -> str | None:
    held = SafeReader(path).read_metadata().state_dict_metadata
    return next((prefix for prefix in PREFIXES if prefix + EMBEDDING in held), None)
