"""peft's `adapter_config.json`: written, and compared with a recipe. No torch here."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.families import Adapter, family_of, find_adapters, finetuned_table, hf_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.problems import read_foreign
from meshwright.storage.jsonl import distinct_keys

CONFIG = "adapter_config.json"

COMPARED = frozenset(
    {"peft_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "feedforward_modules"}
    | {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights", "bias"}
    | {"modules_to_save", "ensure_weight_tying"}
)
"""Keys of a configuration that are compared with the recipe, or with the adapter's tensors."""

WITHOUT_EFFECT = frozenset(
    {"base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "inference_mode"}
    | {"fan_in_fan_out", "lora_dropout", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size"}
    | {"init_ia3_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config"}
)
"""Keys without effect on the computation with saved tensors: initialization, training, storage. Any other key that is
set is refused by name."""

LORA_KEYS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "ranks": "rank_pattern",
    "alphas": "alpha_pattern",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "train": "modules_to_save",
}
"""Field of `LoraSpec` -> peft's key."""

INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` for which peft leaves the base unchanged."""
CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga")
"""Initializations that change the base and that peft can convert to plain LoRA."""

AdapterSpec = LoraSpec | Ia3Spec


class AdapterError(UserError):
    """An adapter that cannot be used, with the file's name and what to do."""


def adapter_config(model: ModelSpec, finetune: AdapterSpec, base: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    adapters = find_adapters(model, finetune)
    modules = {adapter: hf_module(model, adapter) for adapter in adapters}
    config: dict[str, Any] = {
        "base_model_name_or_path": base,
        "revision": None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "fan_in_fan_out": model.foreign is None and bool(family_of(model).hf_transposed),
        "target_modules": sorted(_shortened(model, list(modules.values()))),
    }
    if isinstance(finetune, Ia3Spec):
        inputs = [module for adapter, module in modules.items() if adapter.scales_input]
        more = {"peft_type": "IA3", "feedforward_modules": sorted(_shortened(model, inputs)), "modules_to_save": None}
        return config | more
    saved = {
        row.name.rpartition(".")[0]: hf_tensors(model)[row.name].key.rpartition(".")[0]
        for row in finetuned_table(model, finetune)
        if row.trained and not row.adapter
    }
    head = tied_head(model, finetune)
    return config | {
        "peft_type": "LORA",
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": finetune.dropout,
        "bias": "none",
        "use_rslora": finetune.rslora,
        "use_dora": finetune.dora,
        "init_lora_weights": True,
        "modules_to_save": sorted({*saved.values(), *([head] if head else [])}) or None,
        "rank_pattern": {modules[a]: a.rank for a in adapters if a.rank != finetune.rank},
        "alpha_pattern": {modules[a]: a.alpha for a in adapters if a.alpha != finetune.alpha},
    }


def tied_head(model: ModelSpec, finetune: AdapterSpec) -> str | None:
    """Hugging Face's name of the head, if it is tied to the embedding and trained; else None.

    peft gives each trained module its own copy, so files must hold such a matrix under both names.
    """
    trained = (row for row in finetuned_table(model, finetune) if row.trained and not row.adapter)
    if not model.tied_embeddings or not any(row.dims[0] == "vocab" for row in trained):
        return None
    if model.wrapper is not None:
        return model.wrapper.modules[-1][1].removesuffix(".")
    return "lm_head" if model.foreign else family_of(model).hf_modules["output"]


def unread_by_vllm(directory: Path) -> list[str]:
    """The parts of a written adapter that vLLM does not support: it reads LoRA on linear layers with a single scale."""
    config = json.loads((directory / CONFIG).read_text())
    reasons = {
        "IA3": config["peft_type"] == "IA3",
        "DoRA": config.get("use_dora"),
        "fully trained modules": config.get("modules_to_save"),
        "ranks or alphas by pattern": config.get("rank_pattern") or config.get("alpha_pattern"),
        "an embedding adapter": "embed_tokens" in config["target_modules"],
    }
    return [reason for reason, applies in reasons.items() if applies]


def lora_of(directory: Path) -> LoraSpec:
    """The recipe's settings for a LoRA adapter of peft's. `read_adapter` then compares it, tensor for tensor.

    Raises `AdapterError` if it is of another kind, or names its modules by a pattern.
    """
    file = directory / CONFIG
    try:
        config = json.loads(regular(file).read_text(encoding="utf-8"), object_pairs_hook=distinct_keys)
        if config["peft_type"] != "LORA":
            raise AdapterError(f"{file}: peft_type is {config['peft_type']}; only LORA can be served")
        if not isinstance(config["target_modules"], list):
            raise AdapterError(f"{file}: target_modules is a pattern; save the adapter with a list of module names")
        values = {ours: config.get(theirs) for ours, theirs in LORA_KEYS.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{file} is not an adapter's configuration: {error}") from error
    given = {"method": "lora", **{name: value for name, value in values.items() if value is not None}}
    return read_foreign(LoraSpec, given, where=str(file), names=LORA_KEYS)


def check_adapter_config(directory: Path, model: ModelSpec, finetune: AdapterSpec) -> None:
    """Raise `AdapterError` if the configuration describes another adapter than the recipe."""
    file = directory / CONFIG
    try:
        config = json.loads(regular(file).read_text(encoding="utf-8"), object_pairs_hook=distinct_keys)
        kind = config["peft_type"]
        _check_kinds(config)
    except FileNotFoundError as error:
        raise AdapterError(f"{directory} is not a peft adapter: it has no {CONFIG}") from error
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, re.error) as error:
        raise AdapterError(f"{file} is not an adapter's configuration: {error}") from error
    if kind != ("IA3" if isinstance(finetune, Ia3Spec) else "LORA"):
        raise AdapterError(f"{directory} has peft_type={kind}, but the recipe has finetune.method={finetune.method}")
    _check_keys(config, file)
    differences = list(_differences(config, model, finetune))
    if differences:
        raise AdapterError(f"{directory} does not fit the recipe: {'; '.join(differences)}")


def _check_keys(config: dict[str, Any], file: Path) -> None:
    """Raise `AdapterError` if a key needs a feature that adapters here do not have."""
    for key, value in config.items():
        given = not (value is None or value is False or value in ([], {}, ""))
        if given and key not in COMPARED | WITHOUT_EFFECT:
            raise AdapterError(
                f"{file}: {key} is set, which Meshwright's adapters do not support; merge the adapter in peft"
            )
    if config.get("bias") not in (None, "none"):
        raise AdapterError(f"{file}: bias is {config['bias']!r}, but only none is supported; merge the adapter in peft")
    init = config.get("init_lora_weights", True)
    if init in INITS:
        return
    if isinstance(init, str) and init.startswith(CONVERTIBLE):
        raise AdapterError(
            f"{file}: init_lora_weights is {init!r}, so the adapter belongs to a base that peft changed, not to "
            "model.name; convert it to plain LoRA in peft: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
    raise AdapterError(
        f"{file}: init_lora_weights is {init!r}, which only peft can compute; merge the adapter in peft "
        "(merge_and_unload) and set model.name to the merged model"
    )


def _check_kinds(config: dict[str, Any]) -> None:
    """Raise `TypeError` or `re.error` if a value does not have the type that peft writes."""
    for key in ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern"):
        value = config.get(key)
        if isinstance(value, str):
            re.compile(value)
        elif not isinstance(value, list | None) or not all(isinstance(name, str) for name in value or ()):
            raise TypeError(f"{key} is {value!r}, neither a pattern nor a list of names")
    for key in ("rank_pattern", "alpha_pattern"):
        value = {} if config.get(key) is None else config[key]
        if not isinstance(value, dict) or not all(type(number) in (int, float) for number in value.values()):
            raise TypeError(f"{key} is {value!r}, not a mapping from pattern to number")
        for pattern in value:
            re.compile(pattern)
    layers = config.get("layers_to_transform")
    if not all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers or 0])):
        raise TypeError(f"layers_to_transform is {layers!r}, neither a number nor a list of numbers")
    for key in ("r", "lora_alpha"):
        if type(config.get(key, 8)) not in (int, float):
            raise TypeError(f"{key} is {config[key]!r}, not a number")


def hf_module(model: ModelSpec, adapter: Adapter) -> str:
    """Hugging Face's name of the module that an adapter belongs to.

    Raises `UserError` if several of our modules correspond to one of theirs.
    """
    place = hf_tensors(model)[adapter.weight.name]
    if sorted(place.shape) != sorted(adapter.weight.shape) or place.offset:
        raise UserError(
            f"{adapter.module} is part of {place.key} in Hugging Face's {model.family}, for which peft has a single "
            "adapter; write the merged model instead (export --hf DIR --merge)"
        )
    return place.key.removesuffix(".weight")


def _shortened(model: ModelSpec, modules: list[str]) -> list[str]:
    """The last parts of the names (`q_proj`) if all modules with them are meant, else the whole names."""
    ends: dict[str, set[str]] = {}
    for place in hf_tensors(model).values():
        module = place.key.rpartition(".")[0]
        ends.setdefault(module.rpartition(".")[2], set()).add(module)
    given, short = set(modules), set()
    for module in modules:
        end = module.rpartition(".")[2]
        short.add(end if ends[end] <= given else module)
    return list(short)


def _differences(config: dict[str, Any], model: ModelSpec, finetune: AdapterSpec) -> Iterator[str]:
    adapters = find_adapters(model, finetune)
    modules = [hf_module(model, adapter) for adapter in adapters]
    known = {place.key.rpartition(".")[0] for place in hf_tensors(model).values()}
    given = config.get("target_modules")
    targets = [module for module in known if _targeted(module, given) and not _left_out(module, config)]
    if not targets and given != "all-linear":
        named = given if isinstance(given, str) else ", ".join(given or [])
        yield f"its modules ({named}) are not in {model.family}, so it was trained on another base"
        return
    if given != "all-linear" and set(targets) != set(modules):
        wanted = ", ".join(sorted(_shortened(model, targets)))
        yield f"its modules differ from finetune.targets; set finetune.targets=[{wanted}]"
        return
    if isinstance(finetune, Ia3Spec):
        inputs = {module for module in targets if _targeted(module, config.get("feedforward_modules"))}
        if inputs != {m for a, m in zip(adapters, modules, strict=True) if a.scales_input}:
            yield "its feedforward_modules, whose inputs are scaled, differ from the recipe's"
        return
    for key, ours in (("use_dora", finetune.dora), ("use_rslora", finetune.rslora)):
        if bool(config.get(key)) != ours:
            yield f"{key} is {str(bool(config.get(key))).lower()}; set finetune.{key[4:]}={str(not ours).lower()}"
    for adapter, module in zip(adapters, modules, strict=True):
        rank = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
        alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
        if (rank, alpha) != (adapter.rank, adapter.alpha):
            yield (
                f"for {module} it has rank {rank} and alpha {alpha:g}, the recipe {adapter.rank} and "
                f"{adapter.alpha:g}; set finetune.rank={rank}, finetune.alpha={alpha:g} (or finetune.ranks, .alphas)"
            )
            return


def _targeted(module: str, targets: Any) -> bool:
    """Whether peft's targets include this module: by a regular expression, or by names and their last parts."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or [])


def _left_out(module: str, config: dict[str, Any]) -> bool:
    """Whether peft excludes a module of `target_modules`: by name, or because of its layer."""
    if _targeted(module, config.get("exclude_modules")):
        return True
    wanted, lists = config.get("layers_to_transform"), config.get("layers_pattern")
    if wanted is None or wanted == []:
        return False
    for name in [lists] if isinstance(lists, str) else lists or [r"[^.]*"]:
        if match := re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module):
            return int(match[1]) not in (wanted if isinstance(wanted, list) else [wanted])
    return True


def _by_pattern(patterns: Any, module: str, default: float) -> float:
    """peft's rule: the first pattern that matches the end of the name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
