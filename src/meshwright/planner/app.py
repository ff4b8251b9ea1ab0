"""The planner's page: a form whose answer is the plan's page, in a browser tab by itself or from a local server."""

from typing import Any, Literal

from meshwright.families import PRESETS
from meshwright.pages.shell import header, page, static
from meshwright.planner.page import PARTS, foot
from meshwright.predict.candidate import MARGIN
from meshwright.predict.changes import GROUPS
from meshwright.predict.hardware import find_device, hardware_table
from meshwright.version import __version__

STARTS_WITH = {"model": "llama-3.1-8b", "cluster": "8xh100"}
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")


def app_page(mode: Literal["tab", "server"]) -> str:
    """The page. `mode`: whether a worker of the page answers, or the server that sent it."""
    body = [
        header("Meshwright planner", f'<span id="about">Meshwright {__version__}</span>'),
        static("planner.html"),
        '<main id="plan"></main>',
        foot(),
    ]
    return page("Planner - meshwright", body, data=app_data(mode), parts=(*PARTS, "planner.css", "planner.js"))


def app_data(mode: str) -> dict[str, Any]:
    """What the form offers."""
    return {
        "mode": mode,
        "models": sorted(PRESETS),
        "devices": device_names(),
        "precisions": PRECISIONS,
        "changes": list(GROUPS),
        "margin": MARGIN,
        "start": STARTS_WITH,
    }


def device_names() -> list[str]:
    """The devices of the table, each by the shortest name that a cluster's name may give it."""
    return [_short(row["name"].lower()) for row in hardware_table() if "(" not in row["name"]]


def _short(name: str) -> str:
    parts = name.split("-")
    names = ("-".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(one for one in names if find_device(one) is find_device(name))
