"""Environments of engines: created once from a package on disk, reused without pip, with clear errors on failure."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from meshwright.engines import environments
from meshwright.engines.environments import environment, requirements
from meshwright.engines.registry import ENGINES
from meshwright.spec.errors import UserError


def wheel(folder: Path) -> Path:
    """A package of one empty module."""
    path, info = folder / "tiny_rival-1.0-py3-none-any.whl", "tiny_rival-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_rival.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-rival\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def rival(module: str = "tiny_rival") -> Any:
    return type("Rival", (type(ENGINES["bare"]),), {"name": "rival", "packages": {module: "rival"}})()


@pytest.mark.exhaustive
def test_an_environment_is_made_once_and_found_again_without_pip(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(environments, "requirements", lambda engine: [str(wheel(tmp_path))])
    said: list[str] = []
    python = environment(rival(), said.append, tmp_path / "cache")
    subprocess.run([python, "-c", "import tiny_rival, torch"], check=True, timeout=60)  # ours and its own
    assert len(said) == 2
    monkeypatch.setattr(environments.subprocess, "run", None)
    monkeypatch.setattr(environments, "check_installed", _missing)
    assert environment(rival(), said.append, tmp_path / "cache") == python
    assert len(said) == 2


def _missing(*words: object) -> None:
    raise environments.MissingPackageError("missing")


def test_what_cannot_be_installed_is_one_sentence(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for tiny-rival\n")
    monkeypatch.setattr(environments, "requirements", lambda engine: ["tiny-rival"])
    monkeypatch.setattr(environments, "check_installed", _missing)
    real = subprocess.run
    monkeypatch.setattr(
        environments.subprocess, "run", lambda words, **more: failed if "pip" in words else real(words, **more)
    )
    for _ in range(2):  # a failed environment is tried again
        with pytest.raises(
            UserError, match=r"rival: .*offline, or conflicting versions\): ERROR: No matching distribution"
        ):
            environment(rival(), lambda text: None, tmp_path)


def test_an_engine_that_is_here_needs_no_environment(tmp_path):
    assert environment(rival("json"), lambda text: None, tmp_path / "none").exists()
    assert not (tmp_path / "none").exists()


def test_extras_say_what_is_installed():
    assert any(word.startswith("deepspeed") for word in requirements(ENGINES["deepspeed"]))
    assert "transformers>=5.23" in requirements(ENGINES["hf_trainer"])
    with pytest.raises(UserError, match="has no extra"):
        requirements(rival())
