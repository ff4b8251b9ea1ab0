"""Damage to every kind of file that is read: checkpoints, caches, tokenizers, run records, models, adapters."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attack import damage
from attack.good import GENERATE, RESUME, START, TRAIN, TUNED, Good, result_of
from attack.trial import Ended, Trial, copy, judge, run


@dataclass(frozen=True)
class Target:
    """Some files, their possible damage, and the command that reads them."""

    attack: str
    files: Sequence[str]
    """Patterns, relative to the folder."""
    words: Sequence[str]
    damages: Sequence[damage.Damage] = damage.ANY
    checked: bool = True
    """Whether every change must be detected, by a checksum or by the reader's checks."""
    fresh: bool = False
    """Whether the run directory is removed first, so that training starts from the beginning."""


CHECKPOINT = "run/checkpoints/step-00000004"
MODEL = ("hf/config.json", "hf/generation_config.json", "hf/tokenizer_config.json", "hf/tokenizer.json")
USE = ("generate", "hf", *GENERATE)
ADAPTER = ("adapter/adapter_config.json",)

TARGETS = (
    Target("checkpoint, then resume", (f"{CHECKPOINT}/*", f"{CHECKPOINT}/.metadata"), RESUME),
    Target("checkpoint, then generate", (f"{CHECKPOINT}/*", f"{CHECKPOINT}/.metadata"), ("generate", "run", *GENERATE)),
    Target("manifest, then resume", (f"{CHECKPOINT}/manifest.json",), RESUME, (*damage.ANY, damage.absurd)),
    Target("run records, then resume", ("run/*.*", "run/checkpoints/latest", "run/tokenizer/*"), RESUME, checked=False),
    Target("run records, then generate", ("run/*.yaml", "run/tokenizer/*"), ("generate", "run", *GENERATE)),
    Target("token cache", ("cache/*/train.*", "cache/*/held_out.*"), TRAIN, fresh=True),
    Target("cached tokenizer", ("cache/*/tokenizer/*",), TRAIN, fresh=True),
    Target("recipe's bytes", ("recipe.yaml",), ("check", "recipe.yaml"), checked=False),
    Target("model's safetensors", ("hf/*.safetensors",), USE, (damage.header, damage.cut, damage.grow)),
    Target("model's JSON", MODEL, USE, (*damage.ANY, damage.absurd, damage.absurd), checked=False),
    Target("adapter's safetensors", ("adapter/*.safetensors",), START, (damage.header, damage.cut)),
    Target("adapter's JSON", ADAPTER, START, (*damage.ANY, damage.absurd), checked=False),
)  # fmt: skip


def damage_trial(good: Good, folder: Path, target: Target, seed: str) -> Trial:
    """One file, one damage, one command."""
    draw = random.Random(seed)
    attacked = copy(good.folder, folder / "attacked")
    if target.fresh:
        shutil.rmtree(attacked / "run")
    files = sorted({path for pattern in target.files for path in attacked.glob(pattern) if path.is_file()})
    path = draw.choice([path for path in files if path.stat().st_size])
    how = draw.choice(target.damages)
    if how is damage.absurd and path.suffix != ".json":
        how = damage.flip
    done = f"{path.relative_to(attacked)}: {how(path, draw)}"
    ended = run(target.words, attacked)
    # A refusal names the file, or the directory that the damage makes unreadable.
    names = (path.name, path.parent.name)
    fate, said = judge(ended, same=_same(good, attacked, target, ended), names=names, checked=target.checked)
    return Trial(target.attack, seed, done, fate, said)


def _same(good: Good, attacked: Path, target: Target, ended: Ended) -> bool:
    if ended.status != 0:
        return False
    if target.words[0] == "generate":
        return ended.out == good.texts[target.words[1]]
    if target.words == START:
        return result_of(attacked, "started", TUNED) == good.started
    return target.words[0] == "train" and result_of(attacked) == good.trained
