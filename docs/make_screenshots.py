"""The pictures of the pages in the documentation: what the verbs write, drawn by a real browser.

    python docs/make_screenshots.py [PAGE ...]        # or: make screenshots

Writes docs/pictures/PAGE-WIDTH-COLOURS.webp for every page, 1280 and 400 pixels wide, light and dark. Two small runs
are trained for them in a temporary folder; all pages take about 15 minutes on two cores. Needs playwright and Chromium,
as the browser tests do. Staged are the answers in the chat page, because so small a model writes none, the votes that
are counted, and the fault that `verify` finds, which is planted in a copy of the source.
"""

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, PICTURES = HERE.parent / "src", HERE / "pictures"
WIDTHS, COLOURS = {1280: 900, 400: 900}, ("light", "dark")
"""Widths with their heights, and colours."""
QUALITY = 0.82
"""Of the pictures in WebP."""
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
TALKS = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 2}
data:
  sources: talks.jsonl
  tokenizer: runs/first/tokenizer
  sequence_length: 512
  packing: best_fit
  separate_documents: true
  chat: {template: plain}
training: {steps: 4, global_batch: 4, precision: fp32}
device: cpu
run_dir: talks
"""
PLAN = ["llama-3-8b", "data.sequence_length=8192", "training.global_batch=128"]
FAULT = (
    "comm/collectives.py",
    "return _gather(grad_outputs[0], *ctx.arguments), None, None, None",
    "return _gather(grad_outputs[0], *ctx.arguments) / ctx.arguments[0], None, None, None",
)
"""The fault that `verify` finds: the gradient of a reduce-scatter is averaged."""
ANSWER = """\
DDP **copies the model** onto every rank; ZeRO-3 *shards* it.

| strategy | weights on a rank | collectives of a block |
|---|--:|--:|
| DDP | all | 1 |
| ZeRO-3 | 1 / N | 3 |

A block under ZeRO-3:

1. gather its weights just before it computes
2. free them after it
3. reduce-scatter its gradients

```python
for block in blocks:
    weights = all_gather(block.shard)
    x = block(x, weights)
```
"""
TO_WEBP = """async ([png, quality]) => {
    const image = new Image();
    image.src = "data:image/png;base64," + png;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), {width: image.width, height: image.height});
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/webp", quality).split(",")[1];
}"""


class Pages:
    """The pages, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def verb(self, *words: object, source: Path = SOURCE, status: int = 0) -> None:
        """Run a verb in the folder."""
        environment = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, "-m", "meshwright", *map(str, words)]
        done = subprocess.run(command, cwd=self.folder, env=environment, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == status, command

    @cached_property
    def runs(self) -> Path:
        """Two runs; the first was stopped and continued from an earlier checkpoint."""
        recipe = self.folder / "run.yaml"
        if (self.folder / "runs" / "second").exists():
            return self.folder / "runs"
        recipe.write_text(RECIPE.replace("STDLIB", str(Path(subprocess.__file__).parent)))
        for words in (
            ["training.steps=200"],
            ["--resume", "step-00000150"],
            ["run_dir=runs/second", "training.optimizer.lr=6e-3", "training.steps=150"],
        ):
            self.verb("train", recipe, *words)
        return self.folder / "runs"

    def written(self, name: str, *words: object, **options: Any) -> str:
        """The address of the page that a verb writes."""
        path = self.folder / f"{name}.html"
        self.verb(*words, "--html", path, **options)
        return path.as_uri()

    def view_one(self) -> str:
        return self.written("view-one", "view", self.runs / "first")

    def view_two(self) -> str:
        return self.written("view-two", "view", self.runs)

    def plan(self) -> str:
        return self.written("plan", "plan", *PLAN, "--cluster", "8xh100")

    def plan_two(self) -> str:
        return self.written("plan-two", "plan", *PLAN, "--cluster", "8xh100", "--cluster", "16xa100")

    def verify(self) -> str:
        """Of a copy of the source with a fault."""
        faulty = self.folder / "faulty"
        shutil.copytree(SOURCE, faulty)
        file, old, new = FAULT
        text = (faulty / "meshwright" / file).read_text()
        assert text.count(old) == 1
        (faulty / "meshwright" / file).write_text(text.replace(old, new))
        recipe = self.folder / "verify.yaml"
        recipe.write_text("model: {family: llama, hidden: 64, num_layers: 2, num_heads: 4}\nlayout: {tp: 2}\n")
        return self.written("verify", "verify", recipe, source=faulty, status=1)

    def rehearse(self) -> str:
        recipe = self.folder / "rehearse.yaml"
        recipe.write_text("model: llama-3.2-1b\ndata: {sequence_length: 4096}\ntraining: {global_batch: 32}\n")
        layout = ["layout.dp_shard=4", "layout.pp=2", "--cluster", "8xh100"]
        return self.written("rehearse", "rehearse", recipe, *layout)

    def audit(self) -> str:
        assert self.runs
        talks = ({"messages": list(talk(number))} for number in range(60))
        (self.folder / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talks))
        (self.folder / "talks.yaml").write_text(TALKS)
        return self.written("audit", "data", "audit", "talks.yaml")

    def memory(self) -> str:
        return next((self.runs / "first" / "memory").glob("*.html")).as_uri()

    def eval(self) -> str:
        return self.written(
            "eval", "eval", self.runs / "second", "--all-checkpoints", "--samples", 8, "--device", "cpu"
        )

    def judge(self) -> str:
        pairs = (("tuned", "base", 14), ("tuned", "distilled", 11), ("distilled", "base", 12))
        votes = (
            {"model_a": a, "model_b": b, "winner": "model_a" if number < wins else "model_b", "question": f"{number}"}
            for a, b, wins in pairs
            for number in range(20)
        )
        (self.folder / "votes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in votes))
        return self.written("judge", "judge", "--votes", "votes.jsonl")

    def compare(self) -> str:
        recipe = SOURCE / "meshwright" / "recipes" / "compare.yaml"
        small = ["training.global_batch=4", "--engines", "meshwright,bare,hf_trainer,accelerate", "--quick"]
        self.verb("compare", recipe, *small)
        return next((self.folder / "runs").rglob("compare.html")).as_uri()

    def accept(self) -> str:
        self.verb("accept", "--device", "cpu", "--steps", "machine", "--out", "accept")
        return (self.folder / "accept" / "report.html").as_uri()


def talk(number: int) -> Iterator[dict[str, str]]:
    """A conversation."""
    yield {"role": "user", "content": f"What is {number} times {number + 1}?"}
    yield {"role": "assistant", "content": f"{number} times {number + 1} is {number * (number + 1)}."}
    if number % 3:
        yield {"role": "user", "content": "And one more?"}
        yield {"role": "assistant", "content": f"{number * (number + 1) + 1}."}


FILES: dict[str, Callable[[Pages], str]] = {
    name.replace("_", "-"): getattr(Pages, name)
    for name in (
        *("view_one", "view_two", "memory", "eval", "plan", "plan_two", "verify", "rehearse", "audit", "judge"),
        *("compare", "accept"),
    )
}
SERVED = ("planner", "chat", "arena")


@contextmanager
def served(pages: Pages, *words: object) -> Iterator[str]:
    """The address that a verb serves at."""
    command = [sys.executable, "-u", "-m", "meshwright", *map(str, words)]
    with subprocess.Popen(command, cwd=pages.folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
        finally:
            process.terminate()


def scripted(route: Any) -> None:
    """Answer a request of the chat page."""
    pieces = re.findall(r".{1,9}", ANSWER, flags=re.DOTALL)
    choices = ({"text": piece, "delta": {"content": piece}} for piece in pieces)
    events = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices)
    route.fulfill(content_type="text/event-stream", body=f"{events}data: [DONE]\n\n")


def prepare(page: Any, name: str) -> None:
    """What a person does before the picture."""
    if name == "planner":
        page.wait_for_selector("#plan .tiles")
    if name == "view-two":
        box = page.locator(".u-over >> nth=0").bounding_box()
        page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 30)
    if name in ("chat", "arena"):
        page.wait_for_selector("#send:enabled")
        page.wait_for_selector("#model option", state="attached") if name == "chat" else None
        page.fill("#text", "How does ZeRO-3 differ from DDP?")
        page.press("#text", "Enter")
        page.wait_for_selector(".assistant .tools" if name == "chat" else "#votes button:enabled")
    page.wait_for_timeout(300)


def pictures(browser: Any, name: str, address: str) -> None:
    """The four pictures of a page."""
    tool = browser.new_page()
    for width, height in WIDTHS.items():
        for colours in COLOURS:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
            page = context.new_page()
            for path in ("**/v1/chat/completions", "**/v1/completions"):
                page.route(path, scripted)
            page.goto(address)
            prepare(page, name)
            assert page.evaluate("document.documentElement.scrollWidth") == width, f"{name} scrolls sideways"
            png = base64.b64encode(page.screenshot()).decode()
            webp = base64.b64decode(tool.evaluate(TO_WEBP, [png, QUALITY]))
            (PICTURES / f"{name}-{width}-{colours}.webp").write_bytes(webp)
            context.close()
    tool.close()
    print(name, flush=True)


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"one of {', '.join((*FILES, *SERVED))}; default: all")
    parser.add_argument("--work", metavar="DIR", type=Path, help="keep runs and pages here, and take runs from here")
    arguments = parser.parse_args()
    names = arguments.pages or [*FILES, *SERVED]
    warnings.simplefilter("ignore")
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = Pages(arguments.work or Path(folder))
        pages.folder.mkdir(exist_ok=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in names:
            if name in FILES:
                pictures(browser, name, FILES[name](pages))
        if "planner" in names:
            with served(pages, "plan", "--serve") as address:
                pictures(browser, "planner", f"{address}/#model=llama-3-8b&cluster=8xh100&sequence=8192&batch=128")
        if {"chat", "arena"} & set(names):
            models = [pages.runs / "first", "--beside", f"second={pages.runs / 'second'}", "--votes", "votes.jsonl"]
            with served(pages, "serve", *models, "--port", 0, "--device", "cpu") as address:
                for name in {"chat", "arena"} & set(names):
                    pictures(browser, name, f"{address}/{'arena' if name == 'arena' else ''}")
        browser.close()


if __name__ == "__main__":
    main()
