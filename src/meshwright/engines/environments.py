"""An environment for each engine that is not installed: made once, with this Python's packages beside its own."""

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from venv import EnvBuilder

from meshwright.engines.engine import Engine
from meshwright.engines.registry import MissingPackageError, check_installed
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably
from meshwright.storage.lock import Lock

CACHE = Path.home() / ".cache" / "meshwright" / "engines"
"""Folder of the environments; it may be deleted."""
READY = "ready.json"
"""The marker file of a complete environment: the list of installed packages."""
PATIENCE = 1800.0
"""Seconds after which an installation is ended."""


def environment(engine: Engine, say: Callable[[str], None], cache: Path = CACHE) -> Path:
    """The Python of an environment with the engine: this one if it has the engine, else one in `cache`, created if
    necessary. An existing one is used without network access.

    Raises `UserError` if the packages cannot be installed.
    """
    here = Path(sys.executable)
    try:
        check_installed(engine, here, Path())
    except MissingPackageError:
        pass
    else:
        return here
    wanted = [f"torch=={version('torch')}", *requirements(engine)]
    key = hashlib.sha256(json.dumps([sys.version, sys.prefix, wanted]).encode()).hexdigest()[:12]
    folder = cache / f"{engine.name}-{key}"
    python = folder / "bin" / "python"
    if (folder / READY).is_file():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    with Lock(folder / "lock", wait=PATIENCE, say=say):
        if not (folder / READY).is_file():
            say(f"{engine.name}: installing {', '.join(wanted[1:])} into {folder}")
            _make(folder, python, wanted, say, engine.name)
    return python


def requirements(engine: Engine) -> list[str]:
    """The packages of the engine's extra, and the oldest versions that its program can use, for pip. Raises `UserError`
    if it has no extra."""
    extras = set(engine.packages.values())
    try:
        stated = requires("meshwright") or []
    except PackageNotFoundError as error:
        raise UserError(
            "meshwright is not installed as a package, so its extras are unknown; pip install -e ."
        ) from error
    packages = []
    for requirement in stated:
        package, _, marker = requirement.partition(";")
        if any(f'extra == "{extra}"' in marker.replace("'", '"') for extra in extras):
            packages.append(package.strip())
    if not packages:
        raise UserError(
            f"this installation of meshwright has no extra for {engine.name}; reinstall meshwright (pip install -e "
            ".), or install the engine yourself and pass --python"
        )
    return packages + [f"{name}>={version}" for name, version in engine.oldest.items()]


def _make(folder: Path, python: Path, wanted: list[str], say: Callable[[str], None], name: str) -> None:
    """Create the environment. torch is pinned to this Python's build, so that no installation replaces it."""
    EnvBuilder(clear=False, symlinks=True, with_pip=False).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    shared = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (own / "shared.pth").write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{name}: pip failed: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        message = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
        raise UserError(f"{name}: pip failed (offline, or conflicting versions): {message}")
    write_durably(folder / READY, json.dumps(wanted) + "\n")
    say(f"{name}: installed")
