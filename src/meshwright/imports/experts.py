"""The balance of experts in models that transformers computes: it adds the router's loss only where the model's
configuration has `output_router_logits`, and never changes the bias of an expert."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.families.registry import FAMILIES, PRESETS
from meshwright.families.resolve import pretrained_directory
from meshwright.imports.claims import Has, HasNot
from meshwright.imports.reading import Reading, Rule, joined
from meshwright.imports.rules import fact, without
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.model import ModelFields

COMPUTES = "transformers computes the model"
LOGITS, COEFFICIENT = "output_router_logits", "router_aux_loss_coef"
LOSS, RATE = "model.balance_loss", "model.balance_rate"
LOOKS_MIXED = re.compile(r"moe|mixtral|\d+x\d+b|-a\d+(\.\d+)?b\b|deepseek-v", flags=re.IGNORECASE)
"""Names of models that usually have experts."""


def override_rules(section: str) -> dict[str, Rule]:
    """The rules for a section of changes to the model's configuration."""
    return {
        f"{section}.{LOGITS}": fact(LOGITS),
        f"{section}.{COEFFICIENT}": fact(COEFFICIENT),
        f"{section}.*": without("the model's config.json is read as it is"),
    }


@dataclass(frozen=True)
class _Experts:
    """What is known of a model's experts."""

    balanced: bool
    """Whether the family's recipe balances them by a loss."""
    biased: bool
    """Whether it does so by a bias, too."""
    config: Mapping[str, Any]
    """Of config.json, where there is one."""


def settle_balance(reading: Reading, base_dir: Path) -> None:
    """Switch the balance loss off where transformers does not add it; `base_dir` is the folder of relative paths."""
    if COMPUTES not in reading.facts:
        return
    file, name = reading.known(COMPUTES), reading.value("model.name")
    logits, origin = reading.facts.get(LOGITS, (None, ""))
    coefficient, where = reading.facts.get(COEFFICIENT, (None, ""))
    default = f"{file} (transformers adds the balance loss only with {LOGITS})"
    experts = _experts(str(name), base_dir) if name else None
    if experts is None:
        if name and LOOKS_MIXED.search(str(name)) and LOSS not in reading.settings and logits is not True:
            reading.notes.append(f"{default}; if {name} has experts and its config.json lacks it, set {LOSS}=0")
        if logits is True:
            reading.claim(origin, HasNot(LOSS, 0.0))
        elif origin:
            reading.drop(origin, f"set {LOSS}=0 if the model has experts")
        return
    adds = logits if logits is not None else experts.config.get(LOGITS, False)
    if adds and coefficient is not None:
        reading.set(LOSS, coefficient, joined(where, origin))
    elif experts.balanced and not adds and LOSS not in reading.settings:
        reading.set(LOSS, 0.0, origin or default)
    elif origin:
        reading.claim(origin, HasNot(LOSS, 0.0) if adds else Has(LOSS, None))
    if experts.biased and RATE not in reading.settings:
        reading.set(RATE, 0.0, f"{file} (transformers does not change the experts' biases)")


def _experts(name: str, base_dir: Path) -> _Experts | None:
    """What is known of the experts of a model: a published name, a hub id that ends in one, or a directory; None if the
    model is unknown."""
    published = name if name in PRESETS else name.rpartition("/")[2].lower()
    config: Mapping[str, Any] = {}
    try:
        if directory := pretrained_directory(ModelFields(name=name), base_dir=base_dir):
            config = json.loads(regular(directory / "config.json").read_text(encoding="utf-8"))
    except (UserError, OSError, ValueError):
        pass  # which training will report
    family = config.get("model_type") if isinstance(config, Mapping) else None
    if family is None and published in PRESETS:
        family = PRESETS[published].family
    if family not in FAMILIES:
        return None
    defaults = FAMILIES[family].defaults
    return _Experts("balance_loss" in defaults, "balance_rate" in defaults, config)
