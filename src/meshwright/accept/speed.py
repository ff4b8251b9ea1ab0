"""Step `speed`: our engine beside a bare loop and other engines, in turns (`meshwright compare`)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.accept.check import Check, Place, meshwright
from meshwright.accept.runs import SMALL, write_recipe

BARE, RIVAL = 0.97, 1.0
"""Least speed of our engine, relative to the bare loop over our model and to nanoGPT."""
PACE = ("--rounds", 3, "--turn", 4, "--warm-up", 3)


def checks(place: Place) -> Iterator[Check]:
    """A model of 124M beside others, then one of 1.2B in several formats beside itself."""
    gpt2, rows = ({"name": "gpt2"}, 32) if place.on_gpu else ({**SMALL, "family": "gpt2"}, 4)
    if not place.on_gpu:
        del gpt2["num_kv_heads"]
    training = {"global_batch": rows, "micro_batch": rows, "precision": "bf16"}
    shape = {"model": gpt2, "data": {"sequence_length": 1024 if place.on_gpu else 64}, "training": training}
    engines = ["meshwright", "bare", "hf_trainer", *(["nanogpt"] if place.nanogpt else [])]
    checkout = ("--checkout", f"nanogpt={place.nanogpt}") if place.nanogpt else ()
    recipe = write_recipe(place, "speed-gpt2", _compiled(shape, place))
    yield from _engines(place, recipe, "--engines", ",".join(engines), *checkout)
    if not place.on_gpu:
        return
    training = {"global_batch": 4, "micro_batch": 4, "precision": "bf16", "recompute": "selective"}
    shape = {"model": "llama-3.2-1b", "data": {"sequence_length": 2048}, "training": training}
    recipes = []
    for precision in ("bf16", "fp8"):
        for compiled in (True, False):
            changed = {**shape, "training": {**training, "precision": precision, "compile": compiled}}
            recipes.append(write_recipe(place, f"speed-{precision}-{'compiled' if compiled else 'eager'}", changed))
    yield from _engines(place, *recipes, "--engines", "meshwright")


def _compiled(shape: dict[str, Any], place: Place) -> dict[str, Any]:
    return {**shape, "training": {**shape["training"], "compile": place.on_gpu}}


def _engines(place: Place, *words: object) -> Iterator[Check]:
    """The rows of a comparison; those beside our engine are tests."""
    out = place.work / f"{Path(str(words[0])).stem}-compared"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier acceptance
    ended = meshwright("compare", *words, *PACE, "--out", out, "--json")
    file = out / "compare.json"
    rows = json.loads(file.read_text())["engines"] if file.exists() else []
    speeds = {row["name"]: row["tokens_per_second"] for row in rows if not row["error"]}
    if not speeds:
        yield ended.check("comparison")
        return
    ours = next((speed for name, speed in speeds.items() if name.startswith("meshwright")), None)
    for row in rows:
        name, speed = row["name"], row["tokens_per_second"]
        if row["error"]:
            yield Check(f"speed of {name}", None, f"not measured: {row['error'][-400:]}")
            continue
        least = {"bare": BARE, "nanogpt": RIVAL}.get(row["engine"])
        detail = f"{speed:,.0f} tokens/s"
        if ours and speed != ours:
            detail += f"; {ours / speed:.2f} x with our engine"
        passed = None if least is None or ours is None or not place.on_gpu else ours / speed >= least
        figures = {"tokens_per_second": speed, "peak_bytes": row["peak_bytes"]}
        yield Check(f"speed of {name}", passed, detail + (f", at least {least}" if passed is not None else ""), figures)
