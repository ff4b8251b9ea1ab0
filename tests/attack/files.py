"""Damage to every kind of file that is read: checkpoints, caches, tokenizers, run records, models, adapters, and other
systems' configurations and weights."""

import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from attack.damage import ALL, BYTES, CONTENT, HEADER, JSON
from attack.good import GENERATE, RESUME, START, TAKE, TRAIN, TUNED, Good, result_of
from attack.trial import Cell, Ended, Trial, copy, judge, run


@dataclass(frozen=True)
class Target:
    """Some files, their possible damage, and the command that reads them."""

    attack: str
    files: Sequence[str]
    """Patterns, relative to the folder."""
    words: Sequence[str]
    """`{file}` is the damaged file."""
    damages: Collection[str] = tuple(BYTES)
    obeyed: Collection[str] = ()
    """Damage that no checksum and no reader's check has to detect: the file is used as written."""
    names: Sequence[str] = ()
    """What a refusal may name besides the file."""
    fresh: bool = False
    """Whether the run directory is removed first, so that training starts from the beginning."""


CHECKPOINT = "run/checkpoints/step-00000004"
ANY_JSON = (*BYTES, *JSON)
MODEL = ("hf/config.json", "hf/generation_config.json", "hf/tokenizer_config.json", "hf/tokenizer.json")
USE = ("generate", "hf", *GENERATE)
WEIGHTS = (*BYTES, *HEADER)
ADAPTER = ("adapter/adapter_config.json",)

TARGETS = (
    Target("checkpoint, then resume", (f"{CHECKPOINT}/*", f"{CHECKPOINT}/.metadata"), RESUME),
    Target("checkpoint, then generate", (f"{CHECKPOINT}/*", f"{CHECKPOINT}/.metadata"), ("generate", "run", *GENERATE)),
    Target("manifest, then resume", (f"{CHECKPOINT}/manifest.json",), RESUME, tuple(JSON)),
    Target("run records, then resume", ("run/*.*", "run/checkpoints/latest", "run/tokenizer/*"), RESUME, obeyed=ALL),
    Target("run records, then generate", ("run/*.yaml", "run/tokenizer/*"), ("generate", "run", *GENERATE)),
    Target("token cache", ("cache/*/train.*", "cache/*/held_out.*"), TRAIN, fresh=True),
    Target("cached tokenizer", ("cache/*/tokenizer/*",), TRAIN, fresh=True),
    Target("recipe", ("recipe.yaml",), ("check", "recipe.yaml"), obeyed=ALL),
    Target("model's safetensors", ("hf/*.safetensors",), USE, WEIGHTS, obeyed=CONTENT),
    Target("model's JSON", MODEL, USE, ANY_JSON, obeyed=ALL),
    Target("adapter's safetensors", ("adapter/*.safetensors",), START, WEIGHTS, obeyed=CONTENT),
    Target("adapter's JSON", ADAPTER, START, ANY_JSON, obeyed=ALL),
    Target("import", ("foreign/*",), ("import", "{file}"), ANY_JSON, ALL, ("no file names the model",)),
    Target("import of weights", ("ckpt.pt",), TAKE, obeyed=ALL),
)  # fmt: skip


@dataclass(frozen=True)
class Damaged:
    """The attack on a target's files."""

    target: Target
    good: Good
    place: Path
    """A folder for trials."""

    @property
    def name(self) -> str:
        """Of the attack."""
        return self.target.attack

    def cells(self) -> Sequence[Cell]:
        """Every file with every damage that it can have."""
        return [
            (self._row(path), damage)
            for path in self._files(self.good.folder)
            for damage in self.target.damages
            if damage not in JSON or path.suffix == ".json"
        ]

    def _files(self, folder: Path) -> list[Path]:
        found = {path for pattern in self.target.files for path in folder.glob(pattern) if path.is_file()}
        return sorted(path for path in found if path.stat().st_size)

    @staticmethod
    def _row(path: Path) -> str:
        """The kind of a file: its name, with its folder if that says more."""
        return f"tokenizer/{path.name}" if path.parent.name == "tokenizer" else path.name

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One file, one damage, one command."""
        attacked = copy(self.good.folder, self.place / "attacked")
        if self.target.fresh:
            shutil.rmtree(attacked / "run")
        path = next(path for path in self._files(attacked) if self._row(path) == cell[0])
        file = str(path.relative_to(attacked))
        done = f"{file}: {ALL[cell[1]](path, draw)}"
        ended = run([word.format(file=file) for word in self.target.words], attacked)
        # A refusal names the file, or the directory that the damage makes unreadable.
        names = (path.name, path.parent.name, *self.target.names)
        checked = cell[1] not in self.target.obeyed
        fate, said = judge(ended, same=self._same(attacked, file, ended), names=names, checked=checked)
        return Trial(self.name, seed, done, fate, said, cell)

    def _same(self, attacked: Path, file: str, ended: Ended) -> bool:
        verb, words = self.target.words[0], self.target.words
        if ended.status != 0:
            return False
        if verb == "generate":
            return ended.out == self.good.texts[words[1]]
        if words == TAKE:
            return (attacked / TAKE[-1] / "model.safetensors").read_bytes() == self.good.taken
        if verb == "import":
            return ended.out == self.good.texts[file]
        if words == START:
            return result_of(attacked, "started", TUNED) == self.good.started
        return verb == "train" and result_of(attacked) == self.good.trained
