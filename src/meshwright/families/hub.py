"""Models in this machine's Hugging Face cache; never connects."""

import re
from pathlib import Path

from meshwright.spec.errors import UserError

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
"""A hub id, such as meta-llama/Llama-3.2-1B."""


def cached_snapshot(name: str, *needs: str) -> Path | None:
    """The directory of the hub's model `name` in the local cache, whose location HF_HOME and HF_HUB_CACHE set.

    `needs` are patterns; each must match a file there. None if `name` is not written as an id.

    Raises:
        UserError: the model is missing or incomplete; the message gives the command that downloads it.
    """
    if not HUB_ID.fullmatch(name) or name.endswith(".json"):  # a file name
        return None
    # Heavy to import, so imported only if the model may be there.
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json") or try_to_load_from_cache(name, "tokenizer.json")
    directory = Path(cached).parent if isinstance(cached, str) else None
    missing = [pattern for pattern in needs if directory is None or not any(directory.glob(pattern))]
    if directory is None or missing:
        lacks = f"without {' and '.join(missing)}" if directory else "not"
        raise UserError(
            f"{name!r} is not a directory, and as a model of the Hugging Face hub it is {lacks} in the cache "
            f"{constants.HF_HUB_CACHE}; download it: hf download {name}"
        )
    return directory


def hub_id(directory: Path) -> str | None:
    """The hub id of a directory in the cache; None for any other directory."""
    match = re.fullmatch(r"models--(.+?)--(.+)", directory.parent.parent.name)
    return f"{match[1]}/{match[2]}" if match and directory.parent.name == "snapshots" else None
