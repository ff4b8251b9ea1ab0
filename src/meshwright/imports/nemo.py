"""Megatron-Bridge's ConfigContainer as YAML, and NeMo's YAML for Megatron models before it."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.megatron import settle
from meshwright.imports.megatron_combined import MegatronForm
from meshwright.imports.nemo_adapters import settle_adapters
from meshwright.imports.nemo_keys import NAMES, RULES, STATES
from meshwright.imports.nemo_precision import precision_rules, settle_formats
from meshwright.imports.reading import Reading, flat

FIRST = {"mixed_precision": 0, "train": 1, "trainer": 1}
"""Sections that count before the others: other settings depend on theirs."""
PLAIN = ("GPTModelProvider", "GPTModelConfig")
"""Classes of models with Megatron's own defaults."""


def is_nemo(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of a Megatron-Bridge or NeMo configuration."""
    model = values.get("model")
    known = isinstance(model, Mapping) and ("hidden_size" in model or "tensor_model_parallel_size" in model)
    return known and any(isinstance(values.get(part), Mapping) for part in ("train", "trainer"))


def read_nemo(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a NeMo or Megatron-Bridge configuration."""
    keys = {key: value for key, value in flat(values).items() if value is not None}
    ordered = dict(sorted(keys.items(), key=lambda pair: FIRST.get(pair[0].split(".")[0], 2)))
    reading.take(ordered, {**RULES, **precision_rules(keys)}, file)
    settle_formats(reading, keys, file)
    settle_adapters(reading, keys, file)
    _settle_sharding(reading)
    given = {flag for key, flag in STATES.items() if key in keys}
    if "swiglu" in reading.facts:
        given.add("swiglu")
    if "trainer" in values:
        _old_defaults(reading, keys, file)
    whole, plain = _is_whole(reading, keys, file), _is_plain(reading, keys, file)
    if whole and plain:
        _check_activation(reading, keys, file)
    settle(reading, given, file, _form(old="trainer" in values, defaults=whole and plain, whole=whole))
    _settle_gelu(reading)
    if "model.name" not in reading.settings and "data.sequence_length" in reading.settings:
        reading.default("model.max_positions", *reading.settings["data.sequence_length"])
    if reading.settings.get("training.lr_schedule.name", ("", ""))[0] == "wsd" and not any(
        key.startswith("scheduler.lr_wsd_decay_") and not key.endswith("style") for key in keys
    ):
        reading.drop(
            f"{file} (no scheduler.lr_wsd_decay_iters: the rate falls during the whole run)",
            "set training.lr_schedule.decay",
        )


def _settle_sharding(reading: Reading) -> None:
    """What data-parallel ranks share: `data_parallel_sharding_strategy` counts only for Megatron-FSDP."""
    stages = [reading.facts["distributed optimizer"]] if "distributed optimizer" in reading.facts else []
    if "sharding" in reading.facts:
        stage, where = reading.facts["sharding"]
        if "Megatron-FSDP" in reading.facts:
            stages.append((stage, f"{reading.facts['Megatron-FSDP'][1]}; {where}"))
        else:
            reading.no_effect.append((where, NoEffect.OFF))
    if stages:
        stage, where = max(stages, key=lambda pair: pair[0])
        reading.fact("zero", stage, where)
        for _, origin in stages:
            reading.claim(origin, Has("layout.zero", stage))


def _settle_gelu(reading: Reading) -> None:
    """The fused GELU is approximated; other activations do not have it."""
    if "fused GELU" not in reading.facts:
        return
    fused, origin = reading.facts["fused GELU"]
    if reading.value("model.family") != "gpt2":
        reading.no_effect.append((origin, NoEffect.OFF))
    elif fused:
        reading.claim(origin, Always("GELU is approximated by tanh"))
    else:
        reading.drop(origin, "GELU is approximated by tanh")


def _form(*, old: bool, defaults: bool, whole: bool) -> MegatronForm:
    """How the file writes settings: Megatron-Bridge's way, or NeMo's before it."""
    names = {**NAMES, "swiglu": "model.activation", "disable-bias-linear": "model.bias"} if old else NAMES
    return MegatronForm(
        key=lambda flag: names.get(flag, flag),
        groups_when_asked=False,
        gated_ffn=lambda hidden: 4 * hidden,
        defaults=defaults,
        whole=whole,
    )


def _old_defaults(reading: Reading, keys: Mapping[str, Any], file: str) -> None:
    """NeMo's defaults that are not Megatron's."""
    default = f"{file} (NeMo's default)"
    if "model.optim.weight_decay" not in keys:
        decay = 0.01 if keys.get("model.optim.name") in ("adam", "adamw") else 0.0  # Apex's optimizers have none
        reading.default("training.optimizer.weight_decay", decay, default)
    if not any(key.startswith("model.optim.sched.") for key in keys):
        reading.default("training.lr_schedule.name", "constant", f"{default}: no schedule")
    if "trainer.gradient_clip_val" not in keys:
        reading.default("training.clip", None, default)


def _is_whole(reading: Reading, keys: Mapping[str, Any], file: str) -> bool:
    """Whether the file sets a model itself; otherwise it changes a recipe in Python."""
    if "model.num_layers" in keys or "trainer.max_steps" in keys or "_target_" in keys:
        return True
    reading.notes.append(
        f"{file} has no model.num_layers, so it changes a recipe in Python, whose other settings are not known here; "
        "import the file that its to_yaml writes"
    )
    return False


def _is_plain(reading: Reading, keys: Mapping[str, Any], file: str) -> bool:
    """Whether the model has Megatron's own defaults for keys that the file omits."""
    kind = str(keys.get("model._target_", PLAIN[0]))
    if kind.split(".")[-1] not in PLAIN:
        reading.notes.append(
            f"{file}: model._target_={kind}: it has defaults of its own for keys that the file omits, which are not "
            "known here; write them in the file"
        )
        return False
    return "model.name" not in reading.settings


def _check_activation(reading: Reading, keys: Mapping[str, Any], file: str) -> None:
    """Gated layers are GEGLU without SiLU, and SiLU without gates is none of ours."""
    function, where = reading.facts.get("activation", ("gelu", f"{file} (no model.activation_func: gelu)"))
    gated = keys.get("model.gated_linear_unit") is True
    if gated and function != "silu":
        reading.drop(where, "gated layers are SwiGLU, not GEGLU")
    elif function == "silu" and not gated:
        reading.drop(where, "without model.gated_linear_unit=true it is no SwiGLU; ungated layers have GELU")
    else:
        reading.claim(where, Always("gated layers have SiLU, ungated ones GELU"))
