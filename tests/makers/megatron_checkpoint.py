"""Saves a Llama of a Hugging Face directory as Megatron-core's distributed checkpoint, split over the ranks: MODEL OUT.

Megatron-core saves only from a GPU; here the CPU replaces it.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state  # pyright: ignore[reportMissingImports]
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # pyright: ignore[reportMissingImports]
from megatron.core.models.gpt.gpt_model import GPTModel  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig


class OnCpu(TorchFunctionMode):
    """Tensors created on a GPU, or moved to it, are on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args)
        return args[0] if getattr(func, "__name__", "") == "cuda" else func(*args, **kwargs)


def split(name: str, whole: dict[str, torch.Tensor], groups: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of one of Megatron-core's parameters."""
    if name.startswith("decoder.layers."):
        _, _, number, *rest = name.split(".")
        layer, rest = f"model.layers.{number}.", ".".join(rest)
        if rest.endswith("linear_qkv.weight"):
            parts = [whole[f"{layer}self_attn.{one}_proj.weight"].unflatten(0, (groups, -1)) for one in "qkv"]
            return torch.cat(parts, 1).flatten(0, 1).chunk(ranks)[rank]
        if rest.endswith("linear_fc1.weight"):
            return torch.cat([whole[f"{layer}mlp.{one}_proj.weight"].chunk(ranks)[rank] for one in ("gate", "up")])
        if rest.endswith("linear_fc2.weight"):
            return whole[f"{layer}mlp.down_proj.weight"].chunk(ranks, 1)[rank]
        if rest.endswith("linear_proj.weight"):
            return whole[f"{layer}self_attn.o_proj.weight"].chunk(ranks, 1)[rank]
        norm = "input_layernorm" if rest.startswith("input") else "post_attention_layernorm"
        return whole[f"{layer}{norm}.weight"]
    if name.startswith("decoder.final"):
        return whole["model.norm.weight"]
    return whole["model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"].chunk(ranks)[rank]


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *ignored: None
    dist.init_process_group("gloo")
    start, out = map(Path, sys.argv[1:])
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), AutoConfig.from_pretrained(start)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    whole = load_file(start / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(split(name, whole, shape.num_key_value_heads, rank, ranks))
    with OnCpu():
        dist_checkpointing.save(model.sharded_state_dict(), str(out))
    dist.barrier()
    for writer in multiprocessing.active_children():  # else they would outlive this process
        writer.kill()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process during an orderly teardown


if __name__ == "__main__":  # Megatron-core starts processes that import this file
    main()
