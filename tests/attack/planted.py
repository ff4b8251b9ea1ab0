"""Faults planted in the program, which a round of the attack must notice: checks that find damage, taken out."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attack.trial import FAILURES, Kind, Trial, trial_of
from meshwright.checkpoint import verify
from meshwright.data.checksums import BlockChecksums


def compare_sizes(checkpoint: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """`verify_files` without checksums."""
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise verify.CheckpointError(f"{path}: missing or of another size")


PLANTED: Mapping[str, tuple[tuple[str, str], Any, str, Any]] = {
    "no checksum of shards": (("checkpoint, then resume", "__0_0.distcp"), verify, "verify_files", compare_sizes),
    "no checksum of tokens": (("token cache", "train.bin"), BlockChecksums, "_compare", lambda sums, first, last: None),
}
"""Name -> the kind of attack and the row that must notice it, and the check that is replaced."""


def noticed(kind_called: Callable[[str], Kind], name: str, seed: int = 0) -> Iterator[Trial]:
    """The trials of the round of a kind, `seed` its own, that fail because of a planted fault."""
    (kind, row), owner, check, without = PLANTED[name]
    attack = kind_called(kind)
    with patch.object(owner, check, without):
        for number, cell in enumerate(attack.cells()):
            if cell[0] == row and (trial := trial_of(attack, f"{kind}/{seed}/{number}")).fate in FAILURES:
                yield trial
