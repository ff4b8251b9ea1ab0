"""Tiny multimodal models with random weights, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright.data.tokenizer import train_tokenizer

TEXTS = [f"{n} and {n + 1} and" for n in range(400)]
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
QWEN_VISION: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16}
QWEN_VISION |= {"mlp_ratio": 1, "patch_size": 14, "out_hidden_size": 32, "num_position_embeddings": 4}
QWEN_VISION |= {"fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": SIZES | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": SIZES
        | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0},
        "vision_config": VISION
        | {"head_dim": 8, "num_key_value_heads": 2, "default_output_length": 4, "position_embedding_size": 16},
        "audio_config": None,
    },
    "qwen3_5": {
        "text_config": SIZES
        | LINEAR
        | _rope(mrope_section=[1, 1, 0], partial_rotary_factor=0.5, mrope_interleaved=True),
        "vision_config": QWEN_VISION,
    },
    "qwen3_5_moe": {
        "text_config": SIZES
        | LINEAR
        | EXPERTS
        | {"shared_expert_intermediate_size": 16}
        | _rope(mrope_section=[1, 1, 0], partial_rotary_factor=0.5, mrope_interleaved=True),
        "vision_config": QWEN_VISION,
    },
    "mistral3": {
        "text_config": SIZES | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": SIZES
        | {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8}
        | {"interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"]},
        "vision_config": VISION
        | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "pixel_shuffle_ratio": 1.0},
    },
    "qwen2_vl": {"text_config": SIZES | _rope(mrope_section=[1, 1, 2]), "vision_config": QWEN_VISION},
    "qwen2_5_vl": {"text_config": SIZES | _rope(mrope_section=[1, 1, 2]), "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": SIZES | _rope(mrope_section=[2, 1, 1], mrope_interleaved=True),
        "vision_config": QWEN_VISION,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "text_config": SIZES | EXPERTS | _rope(mrope_section=[2, 1, 1], mrope_interleaved=True),
        "vision_config": QWEN_VISION,
    },
    "llava": {
        "text_config": SIZES | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
    },
}
PROCESSOR = {"processor_config.json": {"image_seq_length": 4}, "preprocessor_config.json": {"size": 28}}


def save_multimodal(folder: Path) -> None:
    """Write each of `MODELS` into its directory, in fp32, with a tokenizer and a processor's files."""
    generator = torch.Generator().manual_seed(0)
    for name, fields in MODELS.items():
        config = CONFIG_MAPPING[name](**json.loads(json.dumps(fields)), dtype="float32")
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2, generator=generator)
        model.save_pretrained(folder / name)
        train_tokenizer(TEXTS, 280).save(folder / name)
        for file, content in PROCESSOR.items():
            (folder / name / file).write_text(json.dumps(content))


def open_whole(directory: Path) -> torch.nn.Module:
    """transformers' whole model, in float64 with constants from fp32."""
    config = json.loads((directory / "config.json").read_text())
    return (
        getattr(transformers, config["architectures"][0])
        .from_pretrained(directory, experts_implementation="eager")
        .double()
        .eval()
    )


class _Norm(torch.nn.Module):
    """An RMS norm in the dtype of its input; transformers computes norms in fp32, whatever the model's dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, getattr(norm, "variance_epsilon", None) or norm.eps
        self.offset = 1 if type(norm).__name__ == "Gemma3RMSNorm" else 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.offset + self.weight, self.eps)


def with_norms_in_float64(whole: torch.nn.Module) -> torch.nn.Module:
    """The model with the norms of Llama's and Gemma's kind in float64, like everything else in it."""
    for part in list(whole.modules()):
        for name, norm in list(part.named_children()):
            if hasattr(norm, "variance_epsilon") or type(norm).__name__ == "Gemma3RMSNorm":
                setattr(part, name, _Norm(norm))
    return whole


@torch.no_grad()
def logits_of_text(whole: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits of the whole model for text alone; Llama 4's cannot compute them, but the model in it can."""
    part = whole.language_model if type(whole).__name__.startswith("Llama4") else whole
    return part(tokens_BT).logits
