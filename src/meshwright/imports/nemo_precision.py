"""The precision of Megatron-Bridge and NeMo: its names, the section `mixed_precision`, and the model's own keys."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.names import DTYPES as TORCH
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import cases, either, fact, last_name, only, unsupported, when, without
from meshwright.spec.errors import UserError

PATH, REDUCED = "training.precision", "training.reduce_dtype"
SECTION = "mixed_precision"
DELAYED = {"fp8 format": "hybrid", "fp8 recipe": "delayed", "fp8 history": 1024, "fp8 algorithm": "max"}
CURRENT = {"fp8 format": "hybrid", "fp8 recipe": "tensorwise", "fp8 ends": True, "fp8 first": 1, "fp8 last": 1}
SUBCHANNEL = {"fp8 format": "hybrid", "fp8 recipe": "blockwise"}
MX = {"fp8 format": "e4m3", "fp8 recipe": "mxfp8", "fp8 weights": True}
FP4 = {"fp4 format": "e2m1"}
LAST_FOURTEEN = {"fp8 ends": True, "fp8 first": 0, "fp8 last": 14}
NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("bf16", "bf16_mixed", "bfloat16"), ("bf16", {})),
    **dict.fromkeys(("16", "fp16", "16_mixed", "fp16_mixed", "float16"), ("fp16", {})),
    **dict.fromkeys(("32", "32_true", "fp32", "float32"), ("fp32", {})),
    "bf16_with_fp8_mixed": ("bf16", {**DELAYED, "fp8 weights": True}),
    **{
        f"{wide}_with_{name}_mixed": (wide, facts)
        for wide in ("bf16", "fp16")
        for name, facts in {
            "fp8_delayed_scaling": {**DELAYED, "fp8 weights": True},
            "fp8_current_scaling": {**CURRENT, "fp8 weights": True},
            "fp8_subchannel_scaling": SUBCHANNEL,
            "mxfp8": MX,
        }.items()
    },
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": (
        "bf16",
        {**CURRENT, "fp8 first": 2, "fp8 last": 2, "fp8 weights": True},
    ),
    "nanov2_bf16_with_fp8_current_scaling_mixed": (
        "bf16",
        {**CURRENT, "fp8 recipe": "blockwise", "fp8 first": 2, "fp8 last": 2, "fp8 weights": True},
    ),
    "bf16_with_nvfp4_mixed": ("bf16", FP4),
    "nemotron_3_super_bf16_with_nvfp4_mixed": ("bf16", {**FP4, **LAST_FOURTEEN}),
}
"""Name -> the precision of everything but products, and what else it states (Megatron-Bridge's
`training/mixed_precision.py`, NeMo's before it)."""
PRODUCTS = {
    "fp8": ("fp8 format", None),
    "fp8_recipe": ("fp8 recipe", "delayed"),
    "fp8_margin": ("fp8 margin", 0),
    "fp8_amax_history_len": ("fp8 history", 1),
    "fp8_amax_compute_algo": ("fp8 algorithm", "most_recent"),
    "fp8_param": ("fp8 weights", False),
    "fp8_param_gather": ("fp8 weights", False),
    "first_last_layers_bf16": ("fp8 ends", False),
    "num_layers_at_start_in_bf16": ("fp8 first", None),
    "num_layers_at_end_in_bf16": ("fp8 last", None),
    "fp4": ("fp4 format", None),
    "fp4_recipe": ("fp4 recipe", "nvfp4"),
}
"""Key -> the fact that it states, and its value where that is the default."""
WORDS = ("fp8 format", "fp8 recipe", "fp8 algorithm", "fp4 format", "fp4 recipe")
"""Facts that are words."""
BOTH = {
    "fp8_dot_product_attention": "attention is computed in bf16",
    "fp8_multi_head_attention": "attention is computed in bf16",
    "fp4_param": "weights stay in bf16, and are rounded to fp4 for each product",
    "fp4_param_gather": "weights stay in bf16, and are rounded to fp4 for each product",
}
OLD_KINDS = ("e4m3", "hybrid")
DECIDED = "training.precision decides it"
DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
reduced = either(REDUCED, "fp32", "bf16")
"""The rule of whether gradients are reduced in fp32."""
LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def named(reading: Reading, value: Any, origin: str) -> None:
    """A precision by its name, with everything that the name states; a section's keys are read one by one."""
    if isinstance(value, Mapping):
        return
    word = str(value).lower().replace("-", "_")
    if word not in NAMES:
        reading.drop(origin, f"supported: {', '.join(sorted(NAMES))}")
        return
    wide, facts = NAMES[word]
    reading.set(PATH, wide, origin)
    for name, stated in facts.items():
        reading.fact(name, stated, origin)


def named_for_all(reading: Reading, value: Any, origin: str) -> None:
    """Megatron-Bridge's `mixed_precision`, which decides about gradients too."""
    named(reading, value, origin)
    wide = reading.settings.get(PATH, ("", ""))
    if wide[1] != origin or wide[0] == "fp32":
        return
    if wide[0] == "bf16":
        reading.set(REDUCED, "fp32", origin)
    else:
        reading.notes.append(f"{origin}: gradients are reduced in fp16; a recipe reduces them in fp32")


def _stated(name: str, usual: Any) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value == usual or (usual is None and value is False):
            reading.claim(origin, USUAL)
            return
        if name in WORDS and not isinstance(value, str):
            raise UserError(f"{origin}: must be a word, as in hybrid, delayed or max")
        reading.fact(name, value, origin)

    return rule


USUAL = Always("it is Megatron's default, as in recipes")


def _overruled(name: str, usual: Any) -> Rule:
    """A key of the model that `mixed_precision` replaces."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value != usual and reading.known(name) != value and name not in ("fp8 first", "fp8 last"):
            reading.drop(origin, f"{SECTION} decides")
        else:
            reading.no_effect.append((origin, NoEffect.OVERRULED))

    return rule


_weight_gradients = cases(
    {False: fact("fp8 weight gradients", True)}, Always("fp8 layers compute weight gradients in fp8, too")
)
_old_format = cases({True: fact("old fp8", True)}, _stated("fp8 format", None))
"""NeMo's switch, beside which two others name the format; Megatron-Bridge names it here."""
_same_dtype = cases({theirs: Has(PATH, ours) for theirs, ours in TORCH.items()}, DECIDED, last_name)
"""A dtype that a recipe's precision implies."""


def dtypes_of(section: str) -> dict[str, Rule]:
    """The rules of a section's dtypes."""
    keys = [f"{section}.{dtype}" for dtype in DTYPES]
    plain: dict[str, Rule] = dict.fromkeys([*keys, *(f"{key}._target_" for key in keys)], _same_dtype)
    calls: dict[str, Rule] = dict.fromkeys([f"{key}._call_" for key in keys], NoEffect.CLASS)
    return plain | calls | dict.fromkeys([f"{key}.*" for key in keys], without(DECIDED))


SECTION_RULES: Mapping[str, Rule] = {
    **{f"{SECTION}.{key}": _stated(name, usual) for key, (name, usual) in PRODUCTS.items()},
    f"{SECTION}.fp8_recipe": _stated("fp8 recipe", "tensorwise"),
    f"{SECTION}.fp8_wgrad": _weight_gradients,
    f"{SECTION}.bf16": when(PATH, "bf16"),
    f"{SECTION}.fp16": when(PATH, "fp16"),
    f"{SECTION}.fp32": when(PATH, "fp32"),
    f"{SECTION}.grad_reduce_in_fp32": reduced,
    **{f"{SECTION}.{key}": unsupported(reason) for key, reason in BOTH.items()},
    f"{SECTION}.fp8_interval": only(1, "scales are computed at every step"),
    f"{SECTION}.autocast_enabled": unsupported(DECIDED),
    **dtypes_of(SECTION),
    f"{SECTION}._target_": NoEffect.CLASS,
    f"{SECTION}.reuse_grad_buf_for_mxfp8_param_ag": NoEffect.MEMORY,
}
MODEL_RULES: Mapping[str, Rule] = {
    **{f"model.{key}": _stated(name, usual) for key, (name, usual) in PRODUCTS.items()},
    "model.fp8": _old_format,
    **{f"model.fp8_{kind}": fact(f"old {kind}") for kind in OLD_KINDS},
    "model.fp8_wgrad": _weight_gradients,
    **{f"model.{key}": unsupported(reason) for key, reason in BOTH.items()},
    "model.fp8_interval": only(1, "scales are computed at every step"),
}


def precision_rules(values: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules for the precision of a file with these dotted keys."""
    rules = {**SECTION_RULES, **MODEL_RULES, SECTION: named_for_all}
    if any(key.split(".")[0] == SECTION and value is not None for key, value in values.items()):
        rules |= {f"model.{key}": _overruled(name, usual) for key, (name, usual) in PRODUCTS.items()}
    ours = without("fp16's loss scale is dynamic, with fixed constants")
    in_fp16 = any(values.get(f"{part}.fp16") is True for part in (SECTION, "optimizer", "model"))
    return rules | {
        f"{part}.{key}": ours if in_fp16 else NoEffect.OFF for part in (SECTION, "optimizer") for key in LOSS_SCALE
    }


def settle_formats(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """What the keys of the precision state together: NeMo's format, the section's defaults, layers in bf16."""
    kinds = {kind: reading.facts[f"old {kind}"] for kind in OLD_KINDS if f"old {kind}" in reading.facts}
    on = next((kind for kind, (value, _) in kinds.items() if value is True), "")
    if "old fp8" not in reading.facts:
        reading.ignore(*(f"old {kind}" for kind in kinds))
    elif on:
        origins = "; ".join([reading.facts["old fp8"][1], *(where for _, where in kinds.values())])
        reading.fact("fp8 format", on, origins)
    else:
        reading.drop(reading.facts["old fp8"][1], "neither model.fp8_e4m3 nor model.fp8_hybrid is true")
    in_section = any(key.startswith(f"{SECTION}.") for key in values)
    default = f"{file} (Megatron-Bridge's default)"
    if in_section and "fp8 format" in reading.facts and "fp8 recipe" not in reading.facts:
        reading.fact("fp8 recipe", "tensorwise", default)
    for name in ("fp8 first", "fp8 last"):
        if "fp8 ends" not in reading.facts:
            reading.facts.pop(name, None)
        elif in_section and name not in reading.facts:
            reading.fact(name, 0, default)
