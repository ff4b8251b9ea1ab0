"""A family as data: its switches, sizes and map to Hugging Face."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.families.hf_layers import HfLayers
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec

GATED_MULTIPLE = 256

DEEPSEEK_FIELDS = frozenset(
    {"balance_rate", "shared_experts", "dense_layers", "router_groups", "router_top_groups", "router_scale"}
    | {"q_rank", "kv_rank", "nope_head_dim", "rope_head_dim", "v_head_dim"}
)
"""Fields of `ModelFields` that only deepseek_v3 has."""

DELTA_FIELDS = frozenset({"delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim"})
"""Fields of `ModelFields` of layers with the gated delta rule."""

RARE_FIELDS = DELTA_FIELDS | {"window_theta", "query_scalar", "qk_norm", "shared_ffn"}
"""Fields of `ModelFields` that only families with a default for them have."""

EXPERT_FIELDS = DEEPSEEK_FIELDS | {"num_experts", "experts_per_token", "expert_ffn", "balance_loss", "router_z_loss"}
"""Fields of `ModelFields` that only families of experts have."""


def gated_ffn(hidden: int) -> int:
    """Default width of a SwiGLU layer: 8/3 of the hidden width, rounded up to a multiple of 256, so that three matrices
    cost as much as two of width 4 * hidden (Shazeer, "GLU Variants Improve Transformer", 2020; LLaMA's rounding)."""
    return -(-(8 * hidden // 3) // GATED_MULTIPLE) * GATED_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as data, so that a family of known layers is one file and one row in the registry."""

    name: str
    """Name in recipes, equal to Hugging Face's `model_type`."""
    switches: Mapping[str, Any]
    """Fields of `ModelSpec` that define the family; no recipe changes them."""
    defaults: Mapping[str, Any]
    """Fields of `ModelSpec` that a recipe may change, with defaults; None: it follows from other sizes."""
    default_ffn: Callable[[int], int]
    """Width of the feed-forward layer from the hidden width."""
    unavailable: frozenset[str] = EXPERT_FIELDS
    """Fields of `ModelFields` that this family does not have."""
    presets: Mapping[str, ModelFields]
    """Published sizes by lower-case name. Sizes that a preset omits follow from the others."""

    hf_architecture: str
    """`architectures` in config.json: the causal language model's class."""
    hf_fields: Mapping[str, str]
    """Field of `ModelSpec` -> key in config.json."""
    hf_aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that transformers 4 and 5 spell differently: spelling in 4 -> spelling in 5."""
    hf_absent: Mapping[str, Any]
    """Values of keys that config.json omits (a key that is missing here too is required)."""
    hf_accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that must have one of these values if present; the first is written."""
    hf_tokens: bool = False
    """Whether transformers has defaults for the ids of special tokens, so that config.json says null for missing ones.
    """
    hf_type: str | None = None
    """`model_type` in config.json, if it is not the name."""
    hf_layers: HfLayers | None = None
    """How config.json says what differs between layers; None: the sliding window applies to all, if it is given."""
    hf_window_theta: str | None = None
    """Key of the rotary base of layers with a window, in families where they have their own table; None: all layers
    have one."""
    hf_rotated: float | None = None
    """The part of each head that is rotated if config.json does not say it; None: always the whole head."""
    hf_rotary_dim: bool = False
    """Whether config.json may give the rotated part's width as rotary_dim."""
    hf_modules: Mapping[str, str]
    """Our module -> the module that contains it in a checkpoint, `{i}` for the layer. Modules with the same entry are
    stacked row-wise in one stored module, in the parameter table's order. With `{e}` each expert has its own stored
    module. A tensor with a different name has its own entry."""
    hf_prefix: str
    """The part of names that a checkpoint of the model without its head omits."""
    hf_transposed: frozenset[str] = frozenset()
    """Modules whose weight is stored (in, out): the last part of their name in a checkpoint."""
    hf_more_layers: bool = False
    """Checkpoints may hold layers after the last one, for multi-token prediction; they are left out."""
    hf_left_out: tuple[str, ...] = ()
    """Prefixes of the names of stored tensors that are parts of another model, such as heads that predict several
    tokens; they are left out."""
    hf_ignored: tuple[str, ...] = ()
    """Suffixes of the names of stored tensors that are not parameters: masks and tables from old versions."""

    def lacks(self, field: str) -> bool:
        """Whether recipes cannot set a field of `ModelFields`."""
        return field in self.unavailable or (field in RARE_FIELDS and field not in self.defaults)

    def model(self, given: Mapping[str, Any]) -> ModelSpec:
        """The complete model with the given fields: at least hidden, num_layers, num_heads and vocab.

        Raises:
            UserError: sizes that do not fit together, or (pydantic's `ValidationError`) a value of the wrong type.
        """
        defaults = {field: value for field, value in self.defaults.items() if value is not None}
        follows = self._follows({**defaults, **given})
        forced = {field: value for field, value in follows.items() if field in self.unavailable}
        fields = {**follows, **self.switches, **defaults, **given, **forced}
        spec = ModelSpec.model_validate({**fields, "family": self.name})
        multiples = [("num_heads", "num_kv_heads"), ("num_experts", "router_groups")]
        multiples += [("delta_heads", "delta_key_heads")] if any(spec.delta_layers) else []
        for larger, smaller in multiples:
            number, of = getattr(spec, larger), getattr(spec, smaller)
            if number % of:
                raise UserError(f"{larger}={number} is not a multiple of {smaller}={of}")
        if spec.positions == "rope" and spec.rotated_dim % 2:
            name = "rope_head_dim" if spec.rope_head_dim else "head_dim"
            raise UserError(f"{name}={spec.rotated_dim} is odd, but rotary embeddings rotate pairs")
        if spec.rotated_dim > spec.head_dim:
            raise UserError(f"rope_head_dim={spec.rope_head_dim} is more than head_dim={spec.head_dim}")
        if spec.router_top_groups > spec.router_groups:
            raise UserError(
                f"router_top_groups={spec.router_top_groups} of router_groups={spec.router_groups}: too many"
            )
        choice = spec.num_experts // spec.router_groups * spec.router_top_groups
        if spec.experts_per_token > choice:
            raise UserError(f"experts_per_token={spec.experts_per_token} of {choice} experts to choose from: too many")
        if spec.router_groups > 1 and spec.num_experts < 2 * spec.router_groups:
            raise UserError(f"router_groups={spec.router_groups} of {spec.num_experts} experts: a group needs two")
        return spec

    def _follows(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Derives missing sizes from the given ones."""
        hidden, num_heads = known["hidden"], known["num_heads"]
        follows = {"num_kv_heads": num_heads, "ffn": self.default_ffn(hidden)}
        if "kv_rank" in self.defaults:
            follows["head_dim"] = known["nope_head_dim"] + known["rope_head_dim"]
        elif "head_dim" in known or hidden % num_heads == 0:
            follows["head_dim"] = hidden // num_heads
        else:
            raise UserError(f"hidden={hidden} is not a multiple of num_heads={num_heads}")
        if "query_scalar" in self.defaults:
            follows["query_scalar"] = known.get("head_dim", follows.get("head_dim"))
        if self.hf_rotated is not None:
            follows["rope_head_dim"] = int(known.get("head_dim", follows.get("head_dim")) * self.hf_rotated)
        if "num_experts" in self.defaults:
            follows["expert_ffn"] = known.get("ffn", follows["ffn"])
        return follows
