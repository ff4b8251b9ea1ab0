"""LitGPT's `lit_model.pth` and its `model_config.yaml`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.takeover.weights import ForeignWeights, load_plain
from meshwright.families import resolve_model
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.problems import foreign_problems, read_foreign
from meshwright.storage.opening import read_data, read_text

WEIGHTS, CONFIG = "lit_model.pth", "model_config.yaml"

WANTED: Mapping[str, Any] = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
    "shared_attention_norm": False,
    "rotary_percentage": 1.0,
    "bias": False,
    "attn_bias": False,
    "lm_head_bias": False,
    "norm_qk": False,
    "post_attention_norm": False,
    "post_mlp_norm": False,
    "scale_embeddings": False,
    "rope_interleave": False,
    "rope_condense_ratio": 1,
    "rope_adjustments": None,
    "sliding_window_size": None,
    "attention_logit_softcapping": None,
    "final_logit_softcapping": None,
    "latent_attention": None,
}
"""The settings for which LitGPT's model is a Llama; other models are refused."""

SIZES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_query_groups": "num_kv_heads",
    "head_size": "head_dim",
    "n_embd": "hidden",
    "intermediate_size": "ffn",
    "block_size": "max_positions",
    "padded_vocab_size": "vocab",
    "rope_base": "rope_theta",
    "norm_eps": "norm_eps",
}
ABSENT = {"rope_theta": 10000.0, "norm_eps": 1e-5}
"""LitGPT's defaults that are not ours."""

NAMES = {
    "norm_1.weight": "input_layernorm.weight",
    "norm_2.weight": "post_attention_layernorm.weight",
    "attn.proj.weight": "self_attn.o_proj.weight",
    "mlp.fc_1.weight": "mlp.gate_proj.weight",
    "mlp.fc_2.weight": "mlp.up_proj.weight",
    "mlp.proj.weight": "mlp.down_proj.weight",
}
OUTSIDE = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""LitGPT's names -> Hugging Face's, in a layer and outside."""


def read_litgpt(path: Path) -> ForeignWeights:
    """The weights of a LitGPT checkpoint, as written by `litgpt pretrain`, `finetune` and `download`.

    Raises `UserError` if the configuration next to the file is missing, or not of a Llama.
    """
    config_file = path.with_name(CONFIG)
    if not config_file.is_file():
        raise UserError(f"{path}: has no {CONFIG} beside it, so the model's sizes are unknown")
    config = read_data(config_file, read_text(config_file))
    if not isinstance(config, dict):
        raise UserError(f"{config_file}: is not a LitGPT configuration")
    for key, value in WANTED.items():
        if config.get(key, value) != value:
            raise UserError(
                f"{config_file}: {key} is {config[key]}; only LitGPT's Llama models are supported ({key}: {value})"
            )
    spec = _model(config, config_file)
    state = load_plain(path)
    state = state["model"] if isinstance(state.get("model"), Mapping) else state
    if attached := [name for name in state if "lora_" in name or "adapter" in name]:
        raise UserError(f"{path}: {attached[0]} belongs to an adapter; merge it first (litgpt merge_lora)")
    tensors = dict(_stored({str(name): tensor for name, tensor in state.items()}, spec))
    head = tensors.get("lm_head.weight")
    tied = head is None or torch.equal(head, tensors.get("model.embed_tokens.weight", torch.empty(0)))
    notes = ("the head equals the embedding, so they are tied",) if tied and head is not None else ()
    return ForeignWeights(spec.model_copy(update={"tied_embeddings": tied}), tensors, notes)


def _model(config: Mapping[str, Any], file: Path) -> ModelSpec:
    sizes = {ours: config[theirs] for theirs, ours in SIZES.items() if config.get(theirs) is not None}
    values, names = {"family": "llama", **ABSENT, **sizes}, {ours: theirs for theirs, ours in SIZES.items()}
    fields = read_foreign(ModelFields, values, where=str(file), names=names)
    with foreign_problems(ModelFields, values, where=str(file), names=names):
        return resolve_model(fields, base_dir=Path())


def _stored(state: Mapping[str, torch.Tensor], model: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's tensors; in LitGPT's files queries, keys and values are concatenated in one tensor."""
    heads, groups = model.num_heads, model.num_kv_heads
    for name, tensor in state.items():
        before, _, after = name.removeprefix("transformer.h.").partition(".")
        if name in OUTSIDE:
            yield OUTSIDE[name], tensor
        elif after == "attn.qkv.weight":
            size = tensor.shape[0] // (heads + 2 * groups)
            parts = tensor.split([heads * size, groups * size, groups * size])
            for one, part in zip("qkv", parts, strict=True):
                yield f"model.layers.{before}.self_attn.{one}_proj.weight", part
        elif after in NAMES:
            yield f"model.layers.{before}.{NAMES[after]}", tensor
        else:
            yield name, tensor  # unknown; the writer reports it
