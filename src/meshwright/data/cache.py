"""The folders of a cache of tokens and tokenizers: each built once, by one process, then reused."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.data.build import HELD_OUT, TRAIN, remove_scaffolding
from meshwright.data.checksums import BlockChecksums
from meshwright.data.token_file import MASK
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.durable import own_folder
from meshwright.storage.lock import Lock

CACHE_FORMAT = 4
"""Incremented when a change makes the same corpus give different files."""


def cached(cache: Path, about: Any, build: Callable[[Path], None]) -> Path:
    """The cache's folder for the data that `about` describes; built if it is missing."""
    fingerprint = hashlib.sha256(json.dumps([CACHE_FORMAT, about]).encode()).hexdigest()[:16]
    directory, unfinished = cache / fingerprint, cache / f".{fingerprint}"
    if directory.is_dir():
        return directory
    try:
        with Lock(cache / f".{fingerprint}.lock", wait=math.inf):
            if directory.is_dir():  # another process has built it
                shutil.rmtree(unfinished, ignore_errors=True)
            else:
                build(own_folder(unfinished))
                unfinished.rename(directory)
        remove_scaffolding(directory)
    except OSError as error:
        raise UserError(f"data.cache_dir={cache} cannot be written: {error}") from error
    except ValueError:
        shutil.rmtree(unfinished, ignore_errors=True)  # a corrected corpus gets another folder
        raise
    return directory


def damage_of(directory: Path) -> str:
    """The damage in a folder of the cache; empty if there is none."""
    names = [TRAIN, HELD_OUT] if (directory / HELD_OUT).exists() else [TRAIN]
    try:
        for path in (directory / name for name in names):
            beside = [path.with_suffix(ending) for ending in (".idx", MASK)]
            for checked in [path, *(one for one in beside if one.exists())]:
                BlockChecksums.beside(checked, "").compare_all()
            json.loads(regular(path.with_suffix(".json")).read_bytes())
    except (OSError, ValueError) as error:
        return str(error)
    return ""
