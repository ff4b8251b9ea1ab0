"""The picture of the README: what `plan`, `verify` and `train` print, as an SVG made from real runs of them.

    python docs/make_terminal_svg.py

Runs the three commands in a temporary folder (a minute on two cores) and writes docs/terminal.svg. Lines that a panel
leaves out are marked by an ellipsis; nothing else is edited.
"""

import argparse
import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("terminal.svg")

RECIPE_8B = "model: llama-3.1-8b\ndata: {sequence_length: 8192}\ntraining: {steps: 1000, global_batch: 64}\n"
RECIPE_SMALL = """\
model: {family: llama, hidden: 128, num_layers: 4, num_heads: 4, num_kv_heads: 2}
data: {sources: stdlib, tokenizer_vocab: 1024, sequence_length: 128}
training: {steps: 12, global_batch: 8, lr_schedule: {warmup: 2}}
layout: {dp_shard: 2}
device: cpu
run_dir: run
"""

COLUMNS, FONT, LINE, PADDING, BAR = 128, 13, 18, 16, 34
WIDTH = int(COLUMNS * FONT * 0.602) + 2 * PADDING
BACKGROUND, TEXT, DIM, PROMPT, GOOD = "#11151c", "#d5dbe5", "#7f8a9c", "#7cc7ff", "#8fd694"


def output(command: str, folder: Path) -> list[str]:
    """The lines that a command prints."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def shown(lines: list[str], patterns: list[str]) -> list[str]:
    """The lines that match a pattern, in their order, an ellipsis where others were left out between them."""
    found, gap = [], False
    for line in lines:
        if any(re.search(pattern, line) for pattern in patterns):
            found += ["..."] if gap and found else []
            found.append(line)
            gap = False
        else:
            gap = True
    return found


def colour(line: str) -> str:
    """The colour of a line: prompts, what is good, what was left out, the rest."""
    if line.startswith("$ "):
        return PROMPT
    if line == "..." or line.lstrip().startswith(("strategies", "weights")):
        return DIM
    return GOOD if line.startswith(("*", "equal", "saved")) else TEXT


def picture(lines: list[str]) -> str:
    """The SVG of a terminal that shows the lines."""
    height = BAR + len(lines) * LINE + PADDING
    rows = "\n".join(
        f'<text x="{PADDING}" y="{BAR + LINE * (number + 1) - 5}" fill="{colour(line)}" xml:space="preserve">'
        f"{html.escape(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + '…')}</text>"
        for number, line in enumerate(lines)
    )
    dots = "".join(
        f'<circle cx="{PADDING + 5 + 18 * number}" cy="{BAR // 2}" r="5.5" fill="{fill}"/>'
        for number, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="meshwright plan, verify and train in a terminal" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{FONT}">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="9" fill="{BACKGROUND}"/>\n{dots}\n{rows}\n</svg>\n'
    )


PANELS = (
    (
        "meshwright plan 8b.yaml --cluster 8xh100 --top 3",
        [r"^8 x H100", r"^ +step ", r"^\*", r"^ +[\d.]+ s \(", r"^(memory|run|strategies)", r"^  (ZeRO-3|TP|DDP)  "],
    ),
    (
        "meshwright verify 8b.yaml layout.dp_shard=2 layout.tp=2 --steps 1",
        [r"^layout", r"^against", r"^step", r"^  loss", r"^  norm", r"^  gradients", r"^  updates", r"^equal"],
    ),
    (
        "meshwright train run.yaml",
        [r"^model", r"^batch", r"^strategy", r"^step 1/", r"^step 12  held", r"^saved"],
    ),
)


def main() -> None:
    """Run the commands and write the picture."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "8b.yaml").write_text(RECIPE_8B)
        (Path(folder) / "run.yaml").write_text(RECIPE_SMALL)
        for command, patterns in PANELS:
            lines += [f"$ {command}", *shown(output(command, Path(folder)), patterns), ""]
    PICTURE.write_text(picture(lines[:-1]), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
