"""Export of a run to another engine: program, configuration, weights, tokens, and a list of what is left out."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from meshwright.engines.engine import Engine, Translation
from meshwright.engines.materials import DATA, TOKENS, write_materials
from meshwright.engines.ours import Ours
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.storage.durable import complete_folder
from meshwright.trainer.corpus import check_vocabulary, corpus_of
from meshwright.trainer.folder import RESOLVED, read_resolved
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.start import check_start

LEFT_OUT = "left-out.md"
"""The file that lists what the program leaves out."""


def run_at(path: Path, overrides: Sequence[str] = ()) -> ResolvedRun:
    """The run of a run directory, or of a recipe file with overrides (`a.b=c`).

    Raises `UserError` if `path` is neither, and for overrides of a run directory.
    """
    if (path / RESOLVED).is_file():
        if overrides:
            raise UserError(f"{path} is a run, whose settings are fixed; give a recipe to override {overrides[0]}")
        return read_resolved(path / RESOLVED)
    if path.is_file():
        return resolve_run(load_recipe(path, overrides), base_dir=path.parent.resolve())
    raise UserError(f"{path}: is neither a run directory nor a recipe")


def hand_over(resolved: ResolvedRun, engine: Engine, folder: Path) -> Translation:
    """Write the whole run as `engine`'s program into `folder`, which appears when it is complete.

    start/ holds the weights that the run starts from and its tokenizer, data/ the tokens and the order of the samples
    of all its steps, so the folder can be moved. An engine that reads the recipe's own model and data gets its
    configuration alone. Raises `UserError` if the engine cannot express the run or `folder` exists.
    """
    translation = engine.translate(resolved)
    corpus = None
    if not engine.reads_sources:
        check_start(resolved)
        corpus = corpus_of(resolved)
        check_vocabulary(resolved.run, resolved.model, corpus.tokenizer.vocab_size, Path(resolved.base_dir))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with complete_folder(folder) as staging:
        translation.write(staging)
        if corpus is not None and engine.name != Ours.name:
            write_materials(resolved, corpus, staging, steps=resolved.run.training.steps)
            _bring_tokens(staging / DATA)
        lines = [f"- `{setting.path}={setting.shown}`: {setting.reason}" for setting in translation.left_out]
        about = f"# Settings that {translation.program} leaves out\n\n"
        own = ["", f"# Differences in {engine.name}", "", *(f"- {note}" for note in translation.notes)]
        lines = [*(lines or ["Nothing."]), *(own if translation.notes else [])]
        (staging / LEFT_OUT).write_text(about + "\n".join(lines) + "\n", encoding="utf-8")
    return translation


def _bring_tokens(folder: Path) -> None:
    """Copy the token files that `folder` refers to into it, and refer to the copies by relative paths."""
    about = folder / TOKENS
    if not about.is_file():  # rows and pairs are whole
        return
    files = json.loads(about.read_text(encoding="utf-8"))
    for number, file in enumerate(files):
        name = f"tokens-{number}.bin"
        shutil.copyfile(file["path"], folder / name)
        file["path"] = name
    about.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
