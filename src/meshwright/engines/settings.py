"""The fate of every setting of a recipe in another engine's program."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal, get_args

from meshwright.spec.base import Spec
from meshwright.spec.finetune import FullSpec
from meshwright.spec.model import FamilyName
from meshwright.spec.run import ResolvedRun, Run

Fate = Literal["expressed", "left_out", "refused"]
"""expressed: the program implements it, or there is nothing to do; left_out: it does not, but neither losses nor
weights change; refused: without it the training would differ."""


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe."""

    path: str
    """The path as in an override, for example `training.clip`."""
    value: Any
    fate: Fate
    reason: str = ""

    @property
    def shown(self) -> str:
        """The value as in a recipe."""
        return as_in_a_recipe(self.value)


def as_in_a_recipe(value: Any) -> str:
    """One value of a recipe on one line of YAML; of a section, what differs from its defaults."""
    if isinstance(value, Spec):
        fields = value.model_dump(mode="json", exclude_defaults=True)
        inside = ", ".join(f"{name}: {as_in_a_recipe(field)}" for name, field in fields.items())
        return fields["path"] if set(fields) == {"path"} else f"{{{inside}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_in_a_recipe(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_in_a_recipe, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


Rule = Callable[[Any, ResolvedRun], tuple[Fate, str]]
"""(value, run) -> its fate, and the reason."""


def expressed(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    """The rule of settings that every program implements."""
    return "expressed", ""


def without(reason: str) -> Rule:
    """A rule for settings that a program lacks, and that no trained weight depends on."""
    return lambda value, resolved: ("left_out", reason)


def only(*accepted: Any, reason: str) -> Rule:
    """A rule for settings whose other values would change the training."""
    return lambda value, resolved: ("expressed", "") if value in accepted else ("refused", reason)


def _balance(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    model = resolved.model
    if model.num_experts and (model.balance_loss or model.balance_rate):
        return "refused", (
            "the program does not balance experts as Meshwright does; set model.balance_loss=0 and model.balance_rate=0"
        )
    return "expressed", ""


def _z_loss(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if resolved.model.router_z_loss:
        return "refused", "the program does not add the router's z-loss; set model.router_z_loss=0"
    return "expressed", ""


def _finetune(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    finetune = resolved.run.finetune
    if finetune is None or (isinstance(finetune, FullSpec) and not finetune.train and finetune.last_layers is None):
        return "expressed", ""
    return "refused", "the program trains every parameter"


def _start(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if value is None or resolved.run.finetune is not None:
        return "expressed", ""
    return "refused", "weights of a checkpoint are exported only for fine-tuning"


def _recompute(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if set(resolved.recompute) in ({"none"}, {"full"}):
        return "expressed", ""
    return "left_out", "no recomputation: the same losses, more memory"


RULES: Mapping[str, Rule] = {
    "model": expressed,
    "model.family": only(*get_args(FamilyName), None, reason="transformers does not have plug-in models"),
    "model.balance_loss": _balance,
    "model.router_z_loss": _z_loss,
    "data": expressed,
    "data.packing": only(
        "concatenated",
        reason=("the program reads one stream of tokens, cut into samples of equal length; set it to concatenated"),
    ),
    "data.separate_documents": only(False, reason="the program treats each sample as one document; set it to false"),
    "training": expressed,
    "training.recompute": _recompute,
    "training.attention": without("PyTorch chooses the kernel"),
    "training.compile_mode": without("the program compiles in the default mode"),
    "training.compile_scope": without("the program compiles its default scope"),
    "training.optimizer.name": only("adamw", reason="the program supports only adamw"),
    "training.optimizer.state_dtype": only("fp32", reason="the program supports only fp32 moments"),
    "training.master_dtype": only("fp32", reason="the program supports only fp32 master weights"),
    "training.non_finite": lambda value, resolved: (
        ("expressed", "") if value == "raise" else ("left_out", "the program stops if a loss is not finite")
    ),
    "training.objective": only(None, reason="the program supports only next-token prediction"),
    "training.preference": only(None, reason="the program supports only next-token prediction"),
    "training.evaluation": without("the program does not evaluate"),
    "training.samples": without("the program generates no samples"),
    "finetune": _finetune,
    "layout": expressed,
    "layout.quantized_weights": only("none", reason="the program does not quantize gathered weights"),
    "layout.quantized_gradients": only("none", reason="the program does not quantize reduced gradients"),
    "layout.gradient_error_feedback": only(False, reason="the program keeps no errors of reduced gradients"),
    "cluster": expressed,
    "checkpoint": expressed,
    "checkpoint.keep_every": without("the program keeps the newest checkpoints alone"),
    "checkpoint.keep_best": without("the program keeps the newest checkpoints alone"),
    "checkpoint.start_from": _start,
    "guards": without("the program has no guards"),
    "device": expressed,
    "run_dir": expressed,
    "trackers": without("the program has no trackers"),
    "callbacks": without("the program has no callbacks"),
}
"""The rule of a setting, or of all settings of a section without their own rule."""


def settings_of(
    resolved: ResolvedRun, cannot: Mapping[str, str], leaves_out: Mapping[str, str], rules: Mapping[str, Rule]
) -> Iterator[Setting]:
    """Every setting of a run and its fate; `cannot` are settings that an engine cannot express, `leaves_out` those that
    it lacks without effect on any loss, `rules` an engine's own, before `RULES`.

    Settings left out are listed only if the recipe differs from the default.
    """
    defaults, paths = dict(leaves(Run(model=resolved.run.model))), set[str]()
    for path, value in leaves(resolved.run):
        fate, reason = rule_of(path, rules)(value, resolved)
        paths.add(path)
        if path in cannot:
            fate, reason = "refused", cannot[path]
        elif path in leaves_out and fate == "expressed":
            fate, reason = "left_out", leaves_out[path]
        elif fate == "left_out" and path in defaults and defaults[path] == value:
            fate = "expressed"
        yield Setting(path, value, fate, reason if fate != "expressed" else "")
    for path in (path for path in cannot if path not in paths):  # a section as a whole, such as layout.offload
        section = reduce(getattr, path.split("."), resolved.run)
        value = section.model_dump(exclude_defaults=True) if isinstance(section, Spec) else section
        yield Setting(path, value, "refused", cannot[path])


def rule_of(path: str, rules: Mapping[str, Rule] = MappingProxyType({})) -> Rule:
    """The rule of the longest prefix of `path` that has one, in `rules` or else in `RULES`; raises `KeyError` if there
    is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if (rule := rules.get(prefix, RULES.get(prefix))) is not None:
            return rule
    raise KeyError(path)


def leaves(spec: Spec, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting, lists and mappings whole."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
