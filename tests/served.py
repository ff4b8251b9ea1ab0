"""Tiny models to serve: fresh weights large enough for clear preferences, a tokenizer, a chat template."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.data.tokenizer import TextTokenizer, train_tokenizer
from meshwright.families import parameter_table, resolve_model
from meshwright.finetune import apply_finetune
from meshwright.models import Decoder, build_model, draw_rows, initialize, named_tensors
from meshwright.models.generate import Sampling, check_room
from meshwright.serve.engine import InferenceEngine, requests_of
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.model import ModelFields, ModelSpec
from tiny import DELTA

SIZES: dict[str, Any] = {"hidden": 32, "num_layers": 2, "num_heads": 4, "max_positions": 96, "init_std": 0.3}
VOCAB = 300

CHATML = """\
{%- if tools -%}{{- '<|im_start|>tools\\n' + tools|tojson + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
PLAIN = """\
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""


def spec_of(family: str, vocab: int = VOCAB, *, switches: Mapping[str, Any] | None = None, **more: Any) -> ModelSpec:
    """A tiny model's spec, with shared key heads and a sliding window if the family has them.
    `switches`: fields of the spec that the family does not have."""
    sizes = SIZES | {"family": family, "vocab": vocab}
    if family not in ("gpt2", "deepseek_v3"):
        sizes["num_kv_heads"] = 2
    if family in ("mistral", "gemma3", "olmo3", "smollm3", "gpt_oss"):
        sizes["sliding_window"] = 9
    if family in ("gemma3", "olmo3", "smollm3"):
        sizes["num_layers"] = 6 if family == "gemma3" else 4  # one of each kind
    if family in ("glm4_moe", "minimax_m2", "gpt_oss"):
        sizes |= {"num_experts": 4, "experts_per_token": 2, "ffn": 48}
    if family in DELTA:
        sizes |= {"num_layers": 4, "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 6}
    if family in ("qwen3_next", "qwen3_5_moe"):
        sizes |= {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 24, "shared_ffn": 16}
    if family == "qwen3_5_moe":
        del sizes["ffn"]
    if family == "deepseek_v3":
        sizes |= {"kv_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8, "num_experts": 16}
    spec = resolve_model(ModelFields(**sizes | more), base_dir=Path())
    return ModelSpec.model_validate(spec.model_dump() | dict(switches or {}))


def model_of(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 1, **more: Any) -> Decoder:
    """A tiny model with weights; norms and biases differ from their initial values too."""
    spec = spec_of(family, **more)
    model = build_model(spec, device="cpu", dtype=dtype)
    initialize(model, parameter_table(spec), seed=seed)
    with torch.no_grad():
        for row in parameter_table(spec):
            if row.init in ("ones", "zeros"):
                noise = draw_rows(dataclasses.replace(row, init="normal", init_std=0.2), seed, 0, row.shape[0])
                model.get_parameter(row.name).add_(noise)
    return model.eval()


def adapted(base: Decoder, seed: int = 2, **more: Any) -> Decoder:
    """The base with a LoRA adapter that changes its answers."""
    dtype = base.like.dtype
    model = build_model(base.spec, dtype=dtype)
    apply_finetune(model, LoraSpec(method="lora", rank=4, alpha=8.0, **more), dtype)
    model.to_empty(device="cpu")
    tensors = named_tensors(base)
    with torch.no_grad():
        for row in model.table:
            parameter = model.get_parameter(row.name)
            if row.name in tensors:
                parameter.copy_(tensors[row.name])
            else:
                drawn = draw_rows(dataclasses.replace(row, init="normal", init_std=0.2), seed, 0, row.shape[0])
                parameter.copy_(drawn)
    return model.eval()


def tokenizer_of(template: str | None = None) -> TextTokenizer:
    """A byte-level tokenizer; with a template, it has ChatML's special tokens."""
    text = "".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(50))
    tokenizer = train_tokenizer([text], VOCAB - 3)
    if template is None:
        return tokenizer
    inner = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    files = {**tokenizer.files, "tokenizer.json": inner.to_str().encode()}
    return TextTokenizer(files, where="test").with_chat_template(template)


def hf_directory(folder: Path, model: Decoder, tokenizer: TextTokenizer) -> Path:
    """The model as a Hugging Face directory, in fp32."""
    tokenizer.save(folder.parent / f"{folder.name}-tokenizer")
    export_hf(
        named_tensors(model).items(),
        model.spec,
        folder,
        HfForm(
            tokenizer_dir=folder.parent / f"{folder.name}-tokenizer",
            dtype=torch.float32,
            token_ids={"eos_token_id": tokenizer.eos_id},
        ),
        prove=False,
    )
    return folder


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int | Collection[int],
    sampling: Sampling,
) -> list[list[int]]:
    """Up to `max_tokens` new token ids for each prompt, ending before `eos_id` (or any of several) if it occurs.

    Raises `UserError` for an empty prompt, or more positions than the model has.
    """
    check_room(prompts, max_tokens, model.spec.max_positions)
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id)
    requests = requests_of(prompts, ends, max_tokens=max_tokens, sampling=sampling)
    return [answer.ids for answer in InferenceEngine(model).run(requests)]
