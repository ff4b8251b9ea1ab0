"""The verb `doctor`: reports what this machine has for training, what is missing, and how to install it."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshwright.cli.output import add_json_argument, print_result
from meshwright.machine import find_machine
from meshwright.spec.extras import install

PYTHON = (3, 11)
ROOM = 10 * 10**9
"""Free bytes on disk below which `doctor` warns that checkpoints may not fit."""
EXTRAS = {
    "tensorboard": ("tensorboard", "trackers: [tensorboard]"),
    "wandb": ("wandb", "trackers: [wandb]"),
    "transformers": ("transformers", "comparing an exported model with Hugging Face's own code, and for other engines"),
    "accelerate": ("compare", "comparing with Accelerate and the Trainer"),
    "lightning-fabric": ("compare", "comparing with Lightning Fabric"),
    "deepspeed": ("deepspeed", "comparing with DeepSpeed"),
    "starlette": ("serve", "serve"),
    "uvicorn": ("serve", "serve"),
    "llguidance": ("serve", "answers to a JSON schema"),
    "gguf": ("gguf", "export --gguf"),
    "lm-eval": ("eval", "tasks of lm-evaluation-harness"),
    "peft": ("peft", "reading exported adapters back"),
    "pyarrow": ("arrow", "parquet and arrow files"),
    "datasets": ("hub", "data on the Hugging Face hub"),
}
"""Optional packages, the extra that installs each, and its purpose."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: Literal["ok", "optional", "missing"]
    """optional: not installed, and only some settings need it. missing: training fails without it."""
    detail: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_json_argument(parser)
    parser.epilog = "exit status: 0 ready to train, 1 something required is missing\n\nexample:\n  meshwright doctor"


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine and report."""
    findings = list(examine())
    missing = [finding.name for finding in findings if finding.state == "missing"]
    width, lines = max(len(finding.name) for finding in findings) + 2, []
    for finding in findings:
        lines.append(f"{finding.state:<9}{finding.name:<{width}}{finding.detail}")
        lines += [f"{'':<9}{'':<{width}}-> {finding.fix}"] if finding.fix else []
    lines.append(f"\nnot ready: {', '.join(missing)} missing" if missing else "\nready to train")
    facts = {"ready": not missing, "findings": [asdict(finding) for finding in findings]}
    print_result(arguments, facts, lines)
    return 1 if missing else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are printed."""
    yield _python()
    yield from _requirements()
    yield from _host()
    if importlib.util.find_spec("torch"):
        yield from _torch()
        yield from _kernels()
    yield _compiler()
    for package, (extra, purpose) in EXTRAS.items():
        yield _extra(package, extra, purpose)


def _python() -> Finding:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if sys.version_info >= PYTHON:
        return Finding("python", "ok", f"{version}, {system}")
    return Finding("python", "missing", f"{version}, {system}", "install Python {}.{} or newer".format(*PYTHON))


def _requirements() -> Iterator[Finding]:
    """The packages that meshwright requires, at the required versions."""
    for requirement in importlib.metadata.requires("meshwright") or []:
        if "extra ==" in requirement:
            continue
        name, bounds = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement).groups()  # type: ignore[union-attr]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", f"pip install '{requirement}'")
            continue
        if _satisfies(version, bounds):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "missing", f"{version} is outside {bounds}", f"pip install '{requirement}'")


def _satisfies(version: str, bounds: str) -> bool:
    """Whether a release is within bounds such as `>=2.11,<2.14`; other operators are not used."""
    release = _release(version)
    for bound in filter(None, bounds.split(",")):
        sign, limit = bound[:1], _release(bound.lstrip("<>="))
        if (sign == ">" and release < limit) or (sign == "<" and release >= limit):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))  # type: ignore[index]


def _host() -> Iterator[Finding]:
    machine = find_machine("cpu")
    yield Finding("cpu", "ok", f"{machine.devices} cores for this process")
    yield Finding("memory", "ok", f"{machine.memory_bytes / 2**30:.1f} GiB")
    folder = Path("runs") if Path("runs").is_dir() else Path()
    free = shutil.disk_usage(folder).free
    detail = f"{free / 10**9:.0f} GB free in {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "missing", f"{folder.resolve()} is not writable", "start in a writable folder")
    elif free < ROOM:
        yield Finding("disk", "optional", detail, "free space, or set run_dir to a larger disk: checkpoints are large")
    else:
        yield Finding("disk", "ok", detail)


def _torch() -> Iterator[Finding]:
    """The devices and backends that torch can use; imports torch."""
    import torch
    import torch.distributed as dist

    from meshwright.devices import accelerator_is_here, built_for, device_count

    machine = find_machine("auto")
    if machine.kind == "cpu":
        yield Finding("gpus", "optional", f"{machine.note or 'none'}; training runs on the CPU")
    elif accelerator_is_here():
        gpus = f"{device_count()} x {machine.name}, {machine.memory_bytes / 2**30:.0f} GiB each"
        yield Finding("gpus", "ok", f"{gpus}, {built_for()}")
    else:
        yield Finding(
            "gpus",
            "missing",
            f"{machine.devices} x {machine.name}, which torch {torch.__version__} cannot use",
            "install a CUDA build of torch that this driver supports, or train with device=cpu",
        )
    needed = ["gloo"] if machine.kind == "cpu" else ["gloo", "nccl"]
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    absent = [name for name in needed if name not in backends]
    if absent:
        fix = "install a build of torch with torch.distributed; without it, only one process can train"
        yield Finding("distributed", "missing", f"no {' and no '.join(absent)}", fix)
    else:
        yield Finding("distributed", "ok", ", ".join(backends))


def _kernels() -> Iterator[Finding]:
    """The kernels that runs on this processor choose, for the sizes of a small GPT-2; imports torch."""
    import torch

    from meshwright.models.kernel_choice import Shapes, here, measure

    for dtype in (torch.float32, torch.bfloat16):
        shapes = Shapes(tokens=512, into=384, out=1536, heads=48, shared=48, length=256, width=64, dtype=dtype)
        if (measured := measure(shapes)).milliseconds:
            yield Finding("kernels", "ok", f"{measured.chosen} for {shapes} ({measured})")
    yield Finding("processor", "ok", here())


def _compiler() -> Finding:
    """The C++ compiler: torch.compile generates C++ on the CPU, and Triton on GPUs needs a C compiler."""
    compiler = next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler and header.is_file():
        return Finding("compiler", "ok", f"{compiler}, for training.compile: true")
    if compiler:
        fix = "for training.compile: true, install Python's headers (apt install python3-dev)"
        return Finding("compiler", "optional", f"{compiler}, but no {header}", fix)
    return Finding("compiler", "optional", "no C++ compiler", "for training.compile: true, install g++")


def _extra(package: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "optional", "not installed", f"for {purpose}: {install(extra)}")
