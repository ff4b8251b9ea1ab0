"""The one place that reads and writes adapters as the peft library keeps them: `adapter_config.json` and
`adapter_model.safetensors`.

A tensor's key is `base_model.model.`, the Hugging Face name of its module, and what peft calls the parameter.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from meshwright.checkpoint.tensor_files import DTYPES
from meshwright.families import FAMILIES, Adapter, find_adapters, finetuned_table, hf_tensors
from meshwright.families.tensor_headers import read_header
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.problems import did_you_mean

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "factors": "ia3_l",
}
EMBEDDING_NAMES = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
"""What peft calls our parameters."""

MUST_BE_FALSE = (
    *("layers_to_transform", "layer_replication", "alora_invocation_tokens", "target_parameters", "lora_bias"),
    *("trainable_token_indices", "use_qalora", "use_bdlora", "velora_config", "kasa_config", "monteclora_config"),
)
"""Keys of a configuration that would make an adapter compute what ours do not."""

BASE, DIGEST = "meshwright_base", "meshwright_sha256"
"""Keys of the file's metadata: which base the adapter was trained on, and the digest of its tensors."""

AdapterSpec = LoraSpec | Ia3Spec


class AdapterError(ValueError):
    """An adapter that cannot be used, with the file's name and what to do."""


@dataclass(frozen=True)
class Stored:
    """Where one of our parameters lies in an adapter's file."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False

    def to_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """Our tensor as it is stored."""
        return (tensor.t() if self.transposed else tensor).reshape(self.shape).contiguous()

    def from_file(self, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The stored tensor as ours, of `shape`."""
        return (stored.t() if self.transposed else stored).reshape(shape)


def write_adapter(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    model: ModelSpec,
    finetune: AdapterSpec,
    *,
    base: str | None,
    fingerprint: str,
) -> None:
    """Write everything that trains as an adapter that peft loads; the directory appears complete or not at all.

    Args:
        tensors: every row of the table that trains, by our names, whole.
        base: what `base_model_name_or_path` says.
        fingerprint: of the base, so that the adapter is not continued on another one.

    Raises `ValueError` where the directory exists or peft has no names for this adapter.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already; export to another directory or remove it")
    places = stored_places(model, finetune)
    config = adapter_config(model, finetune, base)
    stored = {place.key: place.to_file(tensors[name].detach().cpu()) for name, place in places.items()}
    staging = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        metadata = {"format": "pt", BASE: fingerprint, DIGEST: _digest(stored)}
        save_file(stored, staging / WEIGHTS, metadata=metadata)
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def read_adapter(
    directory: Path, model: ModelSpec, finetune: AdapterSpec, *, fingerprint: str
) -> dict[str, torch.Tensor]:
    """The tensors of a peft adapter by our names, whole, on the CPU.

    Raises `AdapterError` where a file is missing or damaged, where the adapter is of another kind than the recipe's,
    or where it was made for another base.
    """
    _check_config(directory, model, finetune)
    file = directory / WEIGHTS
    header = read_header(file)
    places, shapes = stored_places(model, finetune), {row.name: row.shape for row in finetuned_table(model, finetune)}
    keys = {place.key for place in places.values()}
    strange = [key for key in header if key not in keys and not key.endswith(".base_layer.weight")]
    for key in strange:
        raise AdapterError(f"{file}: tensor {key} has no place in the recipe's adapter{did_you_mean(key, keys)}")
    for name, place in places.items():
        if place.key not in header:
            raise AdapterError(f"{file} has no tensor {place.key}, which the recipe's adapter needs for {name}")
        if header[place.key].shape != place.shape:
            raise AdapterError(
                f"{file}: tensor {place.key} has shape {list(header[place.key].shape)}, but this base and recipe ask "
                f"for {list(place.shape)}; the adapter is of another base"
            )
        if header[place.key].dtype not in DTYPES:
            raise AdapterError(f"{file}: tensor {place.key} is {header[place.key].dtype}, no floating-point type")
    with safe_open(file, framework="pt") as stored:
        found = {key: stored.get_tensor(key) for key in keys}
        metadata = stored.metadata() or {}
    if metadata.get(DIGEST, digest := _digest(found)) != digest:
        raise AdapterError(f"{file} is damaged: its tensors are not those that were written")
    if metadata.get(BASE, fingerprint) != fingerprint:
        raise AdapterError(
            f"{directory} was trained on another base ({metadata[BASE]}) than the recipe's ({fingerprint})"
        )
    return {name: place.from_file(found[place.key], shapes[name]) for name, place in places.items()}


def adapter_config(model: ModelSpec, finetune: AdapterSpec, base: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    adapters = find_adapters(model, finetune)
    modules = {adapter: hf_module(model, adapter) for adapter in adapters}
    config: dict[str, Any] = {
        "base_model_name_or_path": base,
        "revision": None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "fan_in_fan_out": model.foreign is None and bool(FAMILIES[model.family].hf_transposed),
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
    return config | {
        "peft_type": "LORA",
        "r": finetune.rank,
        "lora_alpha": finetune.alpha,
        "lora_dropout": finetune.dropout,
        "bias": "none",
        "use_rslora": finetune.rslora,
        "use_dora": finetune.dora,
        "init_lora_weights": True,
        "modules_to_save": sorted(set(saved.values())) or None,
        "rank_pattern": {modules[a]: a.rank for a in adapters if a.rank != finetune.rank},
        "alpha_pattern": {modules[a]: a.alpha for a in adapters if a.alpha != finetune.alpha},
    }


def unread_by_vllm(directory: Path) -> list[str]:
    """What of a written adapter vLLM does not read: it takes LoRA of linear layers, with one scale for all of them."""
    config = json.loads((directory / CONFIG).read_text())
    reasons = {
        "IA3": config["peft_type"] == "IA3",
        "DoRA": config.get("use_dora"),
        "modules that train in full": config.get("modules_to_save"),
        "ranks or alphas of their own": config.get("rank_pattern") or config.get("alpha_pattern"),
        "an adapter of the embedding": "embed_tokens" in config["target_modules"],
    }
    return [reason for reason, applies in reasons.items() if applies]


def stored_places(model: ModelSpec, finetune: AdapterSpec) -> dict[str, Stored]:
    """Our parameter's name -> where it lies in an adapter's file, for everything that trains."""
    found: dict[str, Stored] = {}
    for adapter in find_adapters(model, finetune):
        module = hf_module(model, adapter)
        for row in adapter.rows():
            found[row.name] = _place(adapter, row, module)
    for row in finetuned_table(model, finetune):
        if row.trained and not row.adapter:
            place = hf_tensors(model)[row.name]
            if place.experts is not None or place.offset or len(place.shape) != len(row.shape):
                raise ValueError(f"{row.name} has no place in an adapter of peft's; leave it out of finetune.train")
            found[row.name] = Stored(PREFIX + place.key, place.shape, place.transposed)
    return found


def hf_module(model: ModelSpec, adapter: Adapter) -> str:
    """Hugging Face's name of the module that an adapter belongs to.

    Raises `ValueError` where several of our modules are one of theirs.
    """
    place = hf_tensors(model)[adapter.weight.name]
    if sorted(place.shape) != sorted(adapter.weight.shape) or place.offset:
        raise ValueError(
            f"{adapter.module} is a part of {place.key} in Hugging Face's {model.family}, for which peft has one "
            "adapter; such adapters can be merged (export --hf DIR --merge), but not be written or read as peft's"
        )
    return place.key.removesuffix(".weight")


def _place(adapter: Adapter, row: Parameter, module: str) -> Stored:
    name = row.name.rpartition(".")[2]
    if "vocab" in adapter.weight.dims[:1] and row.dims[-1] == "rank" and adapter.module == "tok_embeddings":
        transposed = name == "lora_a"
        shape = row.shape[::-1] if transposed else row.shape
        return Stored(f"{PREFIX}{module}.{EMBEDDING_NAMES[name]}", shape, transposed)
    shape = row.shape
    if name == "factors":
        shape = (1, *row.shape) if adapter.scales_input else (*row.shape, 1)
    return Stored(f"{PREFIX}{module}.{NAMES[name]}", shape)


def _shortened(model: ModelSpec, modules: list[str]) -> list[str]:
    """Ends of names (`q_proj`) where all modules of that end are meant, else whole names."""
    ends: dict[str, set[str]] = {}
    for place in hf_tensors(model).values():
        module = place.key.rpartition(".")[0]
        ends.setdefault(module.rpartition(".")[2], set()).add(module)
    given, short = set(modules), set()
    for module in modules:
        end = module.rpartition(".")[2]
        short.add(end if ends[end] <= given else module)
    return list(short)


def _check_config(directory: Path, model: ModelSpec, finetune: AdapterSpec) -> None:
    """Raise where the configuration describes another adapter than the recipe does."""
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except FileNotFoundError as error:
        raise AdapterError(f"{directory} is no adapter of peft's: it has no {CONFIG}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"{file} is no configuration of an adapter: {error}") from error
    if kind != ("IA3" if isinstance(finetune, Ia3Spec) else "LORA"):
        raise AdapterError(f"{directory} is an adapter of the kind {kind}, the recipe's finetune.method another one")
    for key in MUST_BE_FALSE:
        if config.get(key):
            raise AdapterError(f"{file}: {key} is set, which this adapter cannot be continued with")
    differences = list(_differences(config, model, finetune))
    if differences:
        raise AdapterError(f"{directory} does not fit the recipe: {'; '.join(differences)}")


def _differences(config: dict[str, Any], model: ModelSpec, finetune: AdapterSpec) -> Iterator[str]:
    adapters = find_adapters(model, finetune)
    modules = [hf_module(model, adapter) for adapter in adapters]
    known = {place.key.rpartition(".")[0] for place in hf_tensors(model).values()}
    given = config.get("target_modules")
    targets = [module for module in known if _targeted(module, given)]
    if not targets and given != "all-linear":
        named = given if isinstance(given, str) else ", ".join(given or [])
        yield f"its modules ({named}) are not in {model.family}, so it is of another base"
        return
    if given != "all-linear" and set(targets) != set(modules):
        wanted = ", ".join(sorted(_shortened(model, targets)))
        yield f"its modules are others than finetune.targets; set finetune.targets=[{wanted}]"
        return
    if isinstance(finetune, Ia3Spec):
        inputs = {module for module in targets if _targeted(module, config.get("feedforward_modules"))}
        if inputs != {m for a, m in zip(adapters, modules, strict=True) if a.scales_input}:
            yield "it scales inputs (feedforward_modules) where this one scales outputs, or the other way round"
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
    """Whether peft means this module: by a regular expression, or by names and ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or [])


def _by_pattern(patterns: Any, module: str, default: float) -> float:
    """peft's rule: the first pattern that matches the end of the name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _digest(stored: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for key in sorted(stored):
        found.update(key.encode())
        found.update(stored[key].contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
