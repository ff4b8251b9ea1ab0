"""GGUF files for llama.cpp, Ollama and LM Studio: tensors and sizes of our families under GGUF's names.

The names and keys are those of the specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and of
llama.cpp's own converter. The file format itself is written by the `gguf` package (`pip install 'meshwright[gguf]'`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, assert_never

import torch

from meshwright.data.tokenizer import TextTokenizer
from meshwright.devices import CPU
from meshwright.handover.gguf_tokenizer import Vocabulary, vocabulary_of
from meshwright.models.rope import rope_frequencies
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.layers import Rope, RopeScaling
from meshwright.spec.model import ModelSpec

ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""Our family -> llama.cpp's architecture."""

BLOCK = 32
"""Numbers of a row that a quantized format scales together."""

LLAMA_CPP_TOLERANCE = {"f32": 2e-3, "f16": 1e-2, "bf16": 2e-2}
"""By format: largest allowed difference of two log-probabilities, relative to the range from the smallest to the
largest. llama.cpp rounds activations to the format of the weights (and GELU to fp16), so differences grow with the
format's rounding. A tensor in the wrong place makes them as large as the range."""

QUANTIZED_TOLERANCE = 0.1
"""The same for quantized formats, under which activations have 8 bits."""

_NAMES = {
    "tok_embeddings": "token_embd",
    "pos_embeddings": "position_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
}
"""Our module -> GGUF's, inside a block and outside."""

_FUSED = ("attention.wq", "attention.wk", "attention.wv")
"""The parts of gpt2's attn_qkv, row after row."""


def check_gguf(spec: ModelSpec) -> None:
    """Raise `UserError` if llama.cpp would compute a model other than `spec`, or if the gguf package is missing."""
    if spec.family not in ARCHITECTURES:
        raise UserError(f"GGUF: {spec.family} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if find_spec("gguf") is None:
        raise UserError(f"GGUF needs the package gguf: {install('gguf')}")
    if spec.num_experts and not spec.router_normalised:
        raise UserError(
            "GGUF: llama.cpp always normalizes the experts' scores (norm_topk_prob), but this model does not"
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        given = scaling.model_dump(include={"beta_fast", "beta_slow", "mscale", "attention_factor", "truncate"})
        if any(value != RopeScaling.model_fields[field].default for field, value in given.items()):
            raise UserError("GGUF: yarn is supported only with its published constants (beta 32 and 1, no mscale)")


def context_length(spec: ModelSpec) -> int:
    """The longest context that llama.cpp computes like the model: it has no sliding window for these families, so at
    most the window."""
    return min(spec.max_positions, spec.sliding_window or spec.max_positions)


class StoredModel:
    """A model's tensors in the form of a GGUF file, with the rounding of that form."""

    def __init__(self, spec: ModelSpec, form: str) -> None:
        """`form` is a `GgufName`, for matrices; norms, biases, routers and learned positions stay in fp32."""
        check_gguf(spec)
        self.spec, self.form = spec, form
        self.kept_wide: list[str] = []
        """Matrices whose rows are not whole blocks; stored in f16."""

    def tensors(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any, Any]]:
        """(GGUF's name, array as stored, its type) of every tensor, from our names and whole tensors."""
        from gguf.quants import quantize

        for name, tensor in self._named(parameters):
            kind = self._kind(name, tensor)
            yield name, quantize(tensor.detach().float().contiguous().numpy(), kind), kind

    def rounded(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Our names and tensors, fp32, after the file's rounding."""
        from gguf.quants import dequantize, quantize

        for name, tensor in parameters:
            kind = self._kind(self._name(name)[0], tensor)
            values = dequantize(quantize(tensor.detach().float().contiguous().numpy(), kind), kind)
            yield name, torch.from_numpy(values.copy()).view(tensor.shape)

    def _kind(self, name: str, tensor: torch.Tensor) -> Any:
        from gguf import GGMLQuantizationType

        precise = tensor.dim() == 1 or "ffn_gate_inp" in name or name.startswith("position_embd")
        form = "f32" if precise else self.form
        if form.startswith("q") and tensor.shape[-1] % BLOCK:
            if name not in self.kept_wide:
                self.kept_wide.append(name)
            form = "f16"
        return GGMLQuantizationType[form.upper()]

    def _named(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for ours, tensor in parameters:
            name, part = self._name(ours)
            if part is None:
                yield name, self._interleaved(name, tensor)
                continue
            parts = waiting.setdefault(name, {})
            parts[part] = tensor
            if len(parts) == len(_FUSED):
                yield name, torch.cat([waiting[name][part] for part in _FUSED])
                del waiting[name]
        if self.spec.rope_scaling is not None and self.spec.rope_scaling.kind == "llama3":
            width, plain = self.spec.rotated_dim, Rope(theta=self.spec.rope_theta)
            scaled = rope_frequencies(self.spec.rope, width, CPU)
            yield "rope_freqs.weight", rope_frequencies(plain, width, CPU) / scaled

    def _name(self, ours: str) -> tuple[str, str | None]:
        """GGUF's name of a parameter, and its part of that tensor, if several share one."""
        module, _, kind = ours.rpartition(".")
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        block, inside = (f"blk.{match[1]}.", match[2]) if match else ("", module)
        if self.spec.family == "gpt2" and inside in _FUSED:
            return f"{block}attn_qkv.{kind}", inside
        if not self.spec.gated and inside == "feed_forward.w1":
            return f"{block}ffn_up.{kind}", None
        if inside not in _NAMES:
            raise UserError(f"GGUF: llama.cpp has no name for the parameter {ours}")
        return f"{block}{_NAMES[inside]}.{kind}", None

    def _interleaved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Queries and keys in the order of llama.cpp's architecture `llama`, which rotates adjacent pairs; we and
        Hugging Face rotate a head's first half with its second."""
        if ARCHITECTURES[self.spec.family] != "llama" or not re.search(r"attn_[qk]\.", name):
            return tensor
        heads = self.spec.num_heads if "attn_q." in name else self.spec.num_kv_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    stored: StoredModel,
    parameters: Iterable[tuple[str, torch.Tensor]],
    tokenizer: TextTokenizer,
    *,
    name: str,
    token_ids: Mapping[str, int | list[int] | None],
) -> None:
    """Write one file with weights, sizes, tokenizer and chat template.

    Args:
        parameters: our names with whole tensors, each once.
        name: of the model, as programs show it.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`, if they exist.

    Raises:
        UserError: llama.cpp does not support this kind of tokenizer.
    """
    from gguf import GGUFWriter, LlamaFileType

    spec = stored.spec
    vocabulary = vocabulary_of(tokenizer, spec.vocab)
    writer = GGUFWriter(path, ARCHITECTURES[spec.family], use_temp_file=True)
    try:
        writer.add_name(name)
        code = "ALL_F32" if stored.form == "f32" else f"MOSTLY_{stored.form.upper()}"
        writer.add_file_type(LlamaFileType[code])
        if stored.form.startswith("q"):
            writer.add_quantization_version(2)
        _add_sizes(writer, spec)
        _add_vocabulary(writer, vocabulary, tokenizer, token_ids)
        for tensor_name, array, kind in stored.tensors(parameters):
            writer.add_tensor(tensor_name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_sizes(writer: Any, spec: ModelSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(context_length(spec))
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_vocab_size(spec.vocab)
    match spec.norm:
        case "rmsnorm" | "offset_rmsnorm":
            writer.add_layer_norm_rms_eps(spec.norm_eps)
        case "layernorm":
            writer.add_layer_norm_eps(spec.norm_eps)
        case _:
            assert_never(spec.norm)
    if spec.positions == "rope":
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
        writer.add_rope_dimension_count(spec.head_dim)
        writer.add_rope_freq_base(spec.rope_theta)
    if spec.num_experts:
        writer.add_expert_count(spec.num_experts)
        writer.add_expert_used_count(spec.experts_per_token)
        writer.add_expert_feed_forward_length(spec.expert_ffn)
    if spec.rope_scaling is not None:
        _add_scaling(writer, spec.rope_scaling)


def _add_scaling(writer: Any, scaling: RopeScaling) -> None:
    from gguf import RopeScalingType

    match scaling.kind:
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_positions)
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling.factor)
        case "llama3":
            pass  # a tensor has the factors
        case _:
            assert_never(scaling.kind)


def _add_vocabulary(
    writer: Any, vocabulary: Vocabulary, tokenizer: TextTokenizer, token_ids: Mapping[str, int | list[int] | None]
) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges is not None:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores is not None:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.space_prefix)
    first = tokenizer.encode_prompt("")
    writer.add_add_bos_token(bool(first))
    writer.add_add_eos_token(False)
    ends = token_ids.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) else ends
    begin, padding = token_ids.get("bos_token_id"), token_ids.get("pad_token_id")
    writer.add_eos_token_id(tokenizer.eos_id if end is None else end)
    begin = first[0] if first else begin
    if isinstance(begin, int):
        writer.add_bos_token_id(begin)
    if isinstance(padding, int):
        writer.add_pad_token_id(padding)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
