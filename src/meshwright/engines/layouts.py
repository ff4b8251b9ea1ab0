"""Layouts by short names, as `--layouts` takes them: ddp, zero2, fsdp:4, tp2, pp2+ddp:2."""

import re
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec

FORMS = (
    "single, ddp, zero1, zero2, zero3 (or fsdp), each also as ddp:4; tp2, pp2, cp2, ep2; joined by +, as in tp2+ddp:2"
)
DATA = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
"""The ZeRO stage of each word."""


def layout_called(name: str, ranks: int = 2) -> LayoutSpec:
    """The layout of a short name; `ranks` is the degree of data parallelism where the name gives none.

    Raises `UserError` if the name or the layout is invalid.
    """
    given: dict[str, Any] = {}
    for word in name.split("+"):
        data = re.fullmatch(r"(ddp|zero[123]|fsdp)(?::?(\d+))?", word)
        other = re.fullmatch(r"(tp|pp|cp|ep)(\d+)", word)
        if data:
            degree, stage = int(data[2] or ranks), DATA[data[1]]
            given |= {"dp_shard": degree, "zero": stage} if stage else {"dp_replicate": degree}
        elif other:
            given[other[1]] = int(other[2])
        elif word != "single":
            raise UserError(f"unknown layout '{name}'; known are {FORMS}")
    try:
        return LayoutSpec(**given)
    except ValueError as error:
        raise UserError(f"layout {name}: {_reason(error)}") from error


def _reason(error: ValueError) -> str:
    """The validator's own message, without pydantic's wrapping."""
    errors = getattr(error, "errors", None)
    return str(errors()[0]["msg"]).removeprefix("Value error, ") if errors else str(error)
