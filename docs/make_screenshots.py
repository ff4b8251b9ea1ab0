"""The pictures of the pages in the documentation: real runs, drawn by a real browser.

    python docs/make_screenshots.py [RUNS]

RUNS is a folder of runs to show. Without one, it trains two small runs in a temporary folder, in some minutes on two
cores. It writes docs/view-*.png and docs/plan-*.png. Needs playwright and Chromium, as the browser tests do.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from meshwright import view
from meshwright.planner.server import serve_planner

HERE = Path(__file__).parent
RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 2, num_kv_heads: 1, tied_embeddings: true}
data:
  sources:
    - {path: STDLIB/json/*.py, name: json}
    - {path: STDLIB/email/*.py, name: email}
    - {path: STDLIB/asyncio/*.py, name: asyncio}
  tokenizer_vocab: 512
  sequence_length: 64
training:
  steps: 300
  global_batch: 4
  precision: fp32
  optimizer: {lr: 2e-3}
  lr_schedule: {name: wsd, warmup: 30, decay: 100}
  evaluation: {every: 50, batches: 4}
  samples: {prompts: ["def main(", "import "], every: 100, max_tokens: 40}
checkpoint: {every: 50}
guards: {spikes: skip}
callbacks: [memory]
device: cpu
run_dir: runs/first
"""
PLAN = ["llama-3-8b", "data.sequence_length=8192", "training.global_batch=128", "--cluster", "8xh100"]
PLANS = {"plan-page-light": (1280, "light"), "plan-phone-dark": (400, "dark")}
"""Picture -> width and colours."""
SHOTS = {
    "view-one-light": ("first", 1280, "light", 0),
    "view-one-dark": ("first", 1280, "dark", 0),
    "view-two-light": ("", 1280, "light", 0.55),
    "view-two-dark": ("", 1280, "dark", 0.55),
    "view-phone-light": ("", 400, "light", 0),
    "view-phone-dark": ("first", 400, "dark", 0),
}
"""Picture -> run (empty: all), width, colours, and the place in a chart to point at."""


def train_runs(folder: Path) -> Path:
    """Two runs; the first was stopped and continued from an earlier checkpoint."""
    recipe = folder / "run.yaml"
    recipe.write_text(RECIPE.replace("STDLIB", str(Path(subprocess.__file__).parent)))
    train = [sys.executable, "-m", "meshwright", "train", str(recipe)]
    for words in (
        ["training.steps=200"],
        ["--resume", "step-00000150"],
        ["run_dir=runs/second", "training.optimizer.lr=6e-3"],
    ):
        subprocess.run([*train, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs"


def picture(browser: Any, runs: Path, name: str) -> None:
    """One screenshot."""
    run, width, scheme, point = SHOTS[name]
    context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)
    page = context.new_page()
    with tempfile.TemporaryDirectory() as folder:
        page.goto(view(runs / run).save(Path(folder) / "page.html").as_uri())
        if point:
            box = page.locator(".u-over >> nth=0").bounding_box()
            page.mouse.move(box["x"] + point * box["width"], box["y"] + 30)
        page.wait_for_timeout(300)
        page.screenshot(path=HERE / f"{name}.png")
    context.close()


def planned(browser: Any, name: str) -> None:
    """One screenshot of a plan's page, in a file, or on a phone of the planner's page."""
    width, scheme = PLANS[name]
    context = browser.new_context(
        viewport={"width": width, "height": 860 if width > 600 else 1500}, color_scheme=scheme
    )
    page = context.new_page()
    if width > 600:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.html"
            command = [sys.executable, "-m", "meshwright", "plan", *PLAN, "--html", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            page.goto(path.as_uri())
    else:
        server = serve_planner(0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/#model=llama-3-8b&cluster=8xh100&sequence=8192&batch=128")
        page.wait_for_selector("#plan .tiles")
        server.shutdown()
    page.wait_for_timeout(300)
    page.screenshot(path=HERE / f"{name}.png")
    context.close()


def main() -> None:
    """Make every picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, metavar="RUNS")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = arguments.runs or train_runs(Path(folder))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in PLANS:
            planned(browser, name)
        for name in SHOTS:
            picture(browser, runs, name)
        browser.close()


if __name__ == "__main__":
    main()
