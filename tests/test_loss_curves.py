"""The picture of ten loss curves matches the numbers next to it, and the numbers match the page's text."""

import json
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_picture_shows_the_numbers() -> None:
    made = runpy.run_path(str(DOCS / "plot_loss_curves.py"))
    losses = json.loads(made["DATA"].read_text())
    assert losses.keys() == made["LAYOUTS"].keys()
    assert all(len(curve) == made["STEPS"] for curve in losses.values())
    assert made["PLOT"].read_text() == made["draw"](losses), "run: python docs/plot_loss_curves.py"
    distance, _ = made["page_facts"](losses)
    assert distance < 1e-5
    assert all(curve[-1] < curve[0] - 2 for curve in losses.values()), "it learns"
