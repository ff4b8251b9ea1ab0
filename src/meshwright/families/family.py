"""The one place that says what a family is: its switches, sizes and map to Hugging Face, all as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.model import ModelFields, ModelSpec

GATED_MULTIPLE = 256

EXPERT_FIELDS = frozenset({"num_experts", "experts_per_token", "expert_ffn", "balance_loss"})
"""Fields of `ModelFields` that only families of experts have."""


def gated_ffn(hidden: int) -> int:
    """Default width of a SwiGLU layer: 8/3 of the hidden width, rounded up to a multiple of 256, so that
    three matrices cost what two of width 4 * hidden do (Shazeer, "GLU Variants Improve Transformer", 2020;
    LLaMA's rounding)."""
    return -(-(8 * hidden // 3) // GATED_MULTIPLE) * GATED_MULTIPLE


def four_times(hidden: int) -> int:
    """Default width of GPT-2's feed-forward layer."""
    return 4 * hidden


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as data, so that a family of known layers is one file and one row in the registry."""

    name: str
    """Name in recipes, equal to Hugging Face's `model_type`."""
    switches: Mapping[str, Any]
    """Fields of `ModelSpec` that make the family what it is; no recipe changes them."""
    defaults: Mapping[str, Any]
    """Fields of `ModelSpec` that a recipe may change and need not give."""
    default_ffn: Callable[[int], int]
    """Width of the feed-forward layer from the hidden width."""
    unavailable: frozenset[str] = EXPERT_FIELDS
    """Fields of `ModelFields` that this family does not have."""
    presets: Mapping[str, ModelFields]
    """Published sizes by lower-case name. What a preset leaves out follows from the rest of it."""

    hf_architecture: str
    """`architectures` in config.json: the causal language model's class."""
    hf_fields: Mapping[str, str]
    """Field of `ModelSpec` -> key in config.json."""
    hf_aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that transformers 4 and 5 spell differently: the spelling of 4 -> that of 5."""
    hf_absent: Mapping[str, Any]
    """What a key means that config.json does not give (a key absent here as well is required)."""
    hf_accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that must have one of these values where they are given; the first is what is written."""
    hf_modules: Mapping[str, str]
    """Our module -> the module that holds it in a checkpoint, `{i}` for the layer. Modules that share one are stacked
    there, rows below rows, in the parameter table's order. With `{e}` each expert has a module of its own there."""
    hf_prefix: str
    """What a checkpoint saved from the model without its head leaves out of its names."""
    hf_transposed: frozenset[str] = frozenset()
    """Modules whose weight is stored (in, out): the last part of their name in a checkpoint."""
    hf_ignored: tuple[str, ...] = ()
    """Ends of the names of stored tensors that are no parameters: masks and tables that old versions saved."""

    def model(self, given: Mapping[str, Any]) -> ModelSpec:
        """The complete model of the given fields: at least hidden, num_layers, num_heads and vocab.

        Raises:
            ValueError: sizes that do not fit together, or (pydantic's `ValidationError`) a value of the wrong type.
        """
        hidden, num_heads = given["hidden"], given["num_heads"]
        if "head_dim" not in given and hidden % num_heads:
            raise ValueError(f"hidden={hidden} is not a multiple of num_heads={num_heads}")
        follows = {
            "num_kv_heads": num_heads,
            "head_dim": hidden // num_heads,
            "ffn": self.default_ffn(hidden),
        }
        if "num_experts" in self.defaults:
            follows["expert_ffn"] = given.get("ffn", follows["ffn"])
            if "expert_ffn" in self.unavailable:  # because experts are always as wide as ffn says
                given = {**given, "expert_ffn": follows["expert_ffn"]}
        spec = ModelSpec.model_validate({"family": self.name, **follows, **self.switches, **self.defaults, **given})
        if spec.num_heads % spec.num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}")
        if spec.positions == "rope" and spec.head_dim % 2:
            raise ValueError(f"head_dim={spec.head_dim} is odd, but rotary embeddings turn pairs")
        if spec.experts_per_token > spec.num_experts:
            raise ValueError(f"experts_per_token={spec.experts_per_token} of num_experts={spec.num_experts}: too many")
        return spec
