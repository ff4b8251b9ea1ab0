"""The engines by name, and a check that a Python has the modules of an engine's program."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshwright.engines.automodel import AutoModelConfig
from meshwright.engines.deepspeed import DeepSpeedEngine
from meshwright.engines.engine import Engine
from meshwright.engines.gpu_only import (
    AccelerateDeepSpeed,
    AccelerateFsdp,
    FabricDeepSpeed,
    FabricFsdp,
    HfTrainerFsdp,
    LightningDeepSpeed,
    LightningFsdp,
)
from meshwright.engines.llm_foundry import LlmFoundryConfig
from meshwright.engines.loops import (
    AccelerateEngine,
    Bare,
    FabricEngine,
    HfTrainer,
    LightningEngine,
    LitGpt,
    NanoGpt,
    TransformersEngine,
)
from meshwright.engines.megatron import MegatronEngine
from meshwright.engines.megatron_bridge import MegatronBridgeConfig
from meshwright.engines.megatron_lm import MegatronLmFlags
from meshwright.engines.nanotron import NanotronConfig
from meshwright.engines.ours import Ours
from meshwright.engines.torchtitan import TorchtitanConfig
from meshwright.engines.trainer_yaml import AxolotlConfig, LlamaFactoryConfig
from meshwright.engines.tuning import PeftEngine, TrlEngine
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install
from meshwright.spec.problems import did_you_mean

ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        *(Ours(), Bare(), TransformersEngine(), HfTrainer(), AccelerateEngine(), FabricEngine(), LightningEngine()),
        *(DeepSpeedEngine(), MegatronEngine(), NanoGpt(), LitGpt(), PeftEngine(), TrlEngine()),
    )
}
"""In the order in which comparisons list them."""
_LACKING = """\
import importlib.metadata, importlib.util, json, sys

def lacks(module):
    parts = module.split(".")
    packages = (".".join(parts[: length + 1]) for length in range(len(parts)))
    return any(importlib.util.find_spec(package) is None for package in packages)

modules, packages = json.loads(sys.argv[1])
lacking = [module for module in modules if lacks(module)]
print(json.dumps([lacking, {name: importlib.metadata.version(name) for name in packages if name not in lacking}]))
"""
"""The modules that a Python lacks, and versions of packages. A package is looked up before its submodules, whose lookup
raises without it."""
WRITTEN: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        *(HfTrainerFsdp(), AccelerateFsdp(), AccelerateDeepSpeed()),
        *(FabricFsdp(), FabricDeepSpeed(), LightningFsdp(), LightningDeepSpeed()),
        *(AxolotlConfig(), TorchtitanConfig(), MegatronLmFlags(), MegatronBridgeConfig(), NanotronConfig()),
        *(AutoModelConfig(), LlamaFactoryConfig(), LlmFoundryConfig()),
    )
}
"""Engines that `export` writes, but that cannot run here."""


class MissingPackageError(UserError):
    """An engine is not installed, or too old."""


def find_engine(name: str, *, written: bool = False) -> Engine:
    """The engine of a name, including export-only engines if `written`; raises `UserError` if there is none."""
    if name in WRITTEN and not written:
        reason = f" ({WRITTEN[name].gpu_only})" if WRITTEN[name].gpu_only else ""
        raise UserError(
            f"{name} can only be exported, not run here{reason}: meshwright export RUN --engine {name} --program DIR"
        )
    if name in WRITTEN:
        return WRITTEN[name]
    if name not in ENGINES:
        known = [*ENGINES, *(WRITTEN if written else ())]
        raise UserError(f"unknown engine '{name}'; known are {', '.join(known)}{did_you_mean(name, known)}")
    return ENGINES[name]


def check_installed(engine: Engine, python: Path, checkout: Path | None = None) -> None:
    """Raise `MissingPackageError`, with the command that installs it, where `python` lacks a module of the engine's
    program or has too old a package, or the engine's `checkout` is not given."""
    if engine.checkout and checkout is None:
        raise MissingPackageError(
            f"{engine.name} is not a package; git clone {engine.checkout}, and pass --checkout {engine.name}=FOLDER"
        )
    request = json.dumps([list(engine.packages), list(engine.oldest)])
    try:
        output = subprocess.run(
            [python, "-P", "-c", _LACKING, request], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{python} cannot run {engine.name}: {error}") from error
    lacking, versions = json.loads(output.stdout)
    own = str(python) == sys.executable
    there, other = ("", "") if own else (f" in {python}", str(python))
    for module in lacking:
        name, extra = re.sub(r"[._]", "-", module), engine.packages[module]
        raise MissingPackageError(
            f"{name} is not installed{there}: {install(extra, python=other)}, or run compare with --install"
        )
    for name, version in versions.items():
        if _parts(version) < _parts(engine.oldest[name]):
            raise MissingPackageError(
                f"{name} {version}{there} is too old: {engine.name} needs {engine.oldest[name]} or later; "
                f"{f'{other} -m ' if other else ''}pip install '{name}>={engine.oldest[name]}', or, if another package "
                "holds it back, run compare with --install"
            )


def _parts(version: str) -> list[int]:
    """The numbers of a release: 5.23.0.dev1 is [5, 23, 0]."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []
