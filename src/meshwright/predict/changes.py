"""The table of named changes of a recipe that a plan can compare with it: `plan --consider`, and what-ifs."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshwright.spec.errors import UserError
from meshwright.spec.offload import CPU, OffloadSpec
from meshwright.spec.problems import did_you_mean
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import Run

Settings = tuple[tuple[str, str], ...]
"""(dotted name of a setting, its value)."""
OFFLOAD, TRAINING = "layout.offload.", "training."


@dataclass(frozen=True)
class Change:
    """Settings that a layout is compared with and without."""

    name: str
    settings: Settings
    exact: bool = True
    """Whether the arithmetic stays the same, wherever it is done."""
    emulated: bool = False
    """Whether this version computes it without the device's own kernels, slower than without the change."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as the command line takes them."""
        if dict(self.settings) == {f"{OFFLOAD}optimizer": "host", f"{OFFLOAD}parameters": "host"}:
            return ("layout.offload=cpu",)
        return tuple(f"{name}={value}" for name, value in self.settings)

    @property
    def layout(self) -> dict[str, Any]:
        """The changed fields of a layout."""
        moved = {name.removeprefix(OFFLOAD): value for name, value in self.settings if name.startswith(OFFLOAD)}
        tiers = OffloadSpec.model_validate(moved)
        fields = {
            name.removeprefix("layout."): value == "true" or value
            for name, value in self.settings
            if name.startswith("layout.") and not name.startswith(OFFLOAD)
        }
        return fields | ({"offload": "cpu" if tiers == CPU else tiers} if moved else {})

    @property
    def training(self) -> tuple[str, ...]:
        """The changes of training settings, as the command line takes them."""
        return tuple(override for override in self.overrides if override.startswith(TRAINING))

    @property
    def moves_activations(self) -> bool:
        """Whether activations leave the device."""
        return (f"{OFFLOAD}activations", "host") in self.settings

    def of(self, run: Run) -> Run:
        """The recipe with the changed training settings. Raises `UserError` if it cannot have them."""
        if not self.training:
            return run
        try:
            return parse_spec(dump_recipe(run), Run, self.training)
        except UserError as error:
            raise UserError(f"--consider {self.name}: {error}") from error

    def __add__(self, other: "Change") -> "Change":
        """Both changes. Raises `UserError` if they set the same differently."""
        mine, theirs = dict(self.settings), dict(other.settings)
        for name in mine:
            if theirs.get(name, mine[name]) != mine[name]:
                raise UserError(f"--consider {self.name}+{other.name}: both set {name}; use one of the two")
        return Change(
            f"{self.name}+{other.name}",
            tuple((mine | theirs).items()),
            self.exact and other.exact,
            self.emulated or other.emulated,
        )


CHANGES = {
    change.name: change
    for change in (
        Change("activations", ((f"{OFFLOAD}activations", "host"),)),
        Change("optimizer", ((f"{OFFLOAD}optimizer", "host"),)),
        Change("parameters", ((f"{OFFLOAD}optimizer", "host"), (f"{OFFLOAD}parameters", "host"))),
        Change("disk", ((f"{OFFLOAD}optimizer", "disk"),)),
        Change("disk_parameters", ((f"{OFFLOAD}optimizer", "disk"), (f"{OFFLOAD}parameters", "disk"))),
        Change("fp8", (("training.precision", "fp8"),), exact=False),
        Change("mxfp8", (("training.precision", "mxfp8"),), exact=False, emulated=True),
        Change("nvfp4", (("training.precision", "nvfp4"),), exact=False, emulated=True),
        Change("int8_weights", (("layout.quantized_weights", "int8"),), exact=False),
        Change(
            "fp8_weights", (("training.precision", "fp8"), ("layout.quantized_weights", "fp8")), exact=False
        ),  # exact beside fp8
        Change("int8_gradients", (("layout.quantized_gradients", "int8"),), exact=False),
        Change("int4_gradients", (("layout.quantized_gradients", "int4"),), exact=False),
        Change(
            "int4_gradients_with_feedback",
            (("layout.quantized_gradients", "int4"), ("layout.gradient_error_feedback", "true")),
            exact=False,
        ),
        Change("bf16_states", (("training.optimizer.state_dtype", "bf16"),), exact=False),
        Change("8bit_states", (("training.optimizer.name", "adamw_8bit"),), exact=False),
    )
}
"""Single changes by name; `+` joins them."""

GROUPS = {
    "offload": ("activations", "optimizer", "parameters+activations", "disk", "disk_parameters"),
    "precision": ("fp8",),
    "quantized": ("int8_weights", "int4_gradients", "int8_weights+int4_gradients"),
    "states": ("bf16_states", "8bit_states"),
}
"""Names for several changes, each considered by itself. (Every search tries parameters alone, as offload=cpu.)"""


def named(name: str) -> Change:
    """A change, or several joined by `+`. Raises `UserError` with the known names."""
    parts = name.split("+")
    for part in parts:
        if part not in CHANGES:
            known = ", ".join((*GROUPS, *CHANGES))
            hint = did_you_mean(part, (*GROUPS, *CHANGES))
            raise UserError(f"--consider {name}: known changes are {known}; + combines changes{hint}")
    return functools.reduce(operator.add, (CHANGES[part] for part in parts))


def asked_changes(words: str) -> tuple[Change, ...]:
    """The changes in a list separated by commas. Raises `UserError` with the known names."""
    names = [name for word in words.split(",") for name in GROUPS.get(word.strip(), (word.strip(),))]
    return tuple(named(name) for name in cast(Sequence[str], dict.fromkeys(names)))


LAST_RESORT = tuple(map(named, ("activations", "optimizer", "parameters+activations", "optimizer+activations")))
"""Exact changes that a plan tries by itself where no layout fits without them. Not the disk, which wears out and whose
folder the recipe has to name."""
