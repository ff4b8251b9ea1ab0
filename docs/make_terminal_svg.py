"""The picture of the README: a recording of `plan`, `verify` and `train`, as an SVG that plays, made from real runs.

    python docs/make_terminal_svg.py

Runs the three commands in a temporary folder (a minute on two cores) and writes docs/terminal.svg. Lines that a panel
leaves out are marked by an ellipsis, and pauses are at most `LONGEST` seconds; nothing else is edited. Where motion is
unwanted (`prefers-reduced-motion`), and on paper, all of it is shown at once.
"""

import argparse
import html
import os
import re
import subprocess
import sys
import tempfile
import time
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

LONGEST, LETTERS_A_SECOND = 1.5, 28
"""The longest pause in seconds, and how fast a command is typed."""
COLUMNS, FONT, LINE, PADDING, BAR = 128, 13, 18, 16, 34
WIDTH = int(COLUMNS * FONT * 0.602) + 2 * PADDING
BACKGROUND, TEXT, DIM, PROMPT, GOOD = "#11151c", "#d5dbe5", "#7f8a9c", "#7cc7ff", "#8fd694"


Timed = tuple[float, str]
"""Seconds since the start of the command, and a line."""


def output(command: str, folder: Path) -> list[Timed]:
    """The lines that a command prints, and when."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
    words, lines, began = [sys.executable, "-m", *command.split()], list[Timed](), time.monotonic()
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                lines.append((time.monotonic() - began, line.rstrip()))
    return lines


def shown(lines: list[Timed], patterns: list[str]) -> list[Timed]:
    """The lines that match a pattern, in their order, an ellipsis where others were left out between them."""
    found, gap = list[Timed](), False
    for seconds, line in lines:
        if any(re.search(pattern, line) for pattern in patterns):
            found += [(seconds, "...")] if gap and found else []
            found.append((seconds, line))
            gap = False
        else:
            gap = True
    return found


def schedule(panels: list[tuple[str, list[Timed]]]) -> list[Timed]:
    """All lines of the picture, and when they appear: commands are typed, and no pause is longer than `LONGEST`."""
    now, lines = 0.4, list[Timed]()
    for command, printed in panels:
        lines.append((now, f"$ {command}"))
        now, before = now + len(command) / LETTERS_A_SECOND, 0.0
        for seconds, line in printed:
            now, before = now + min(LONGEST, seconds - before), seconds
            lines.append((now, line))
        lines.append((now, ""))
        now += LONGEST
    return lines[:-1]


def colour(line: str) -> str:
    """The colour of a line: prompts, what is good, what was left out, the rest."""
    if line.startswith("$ "):
        return PROMPT
    if line == "..." or line.lstrip().startswith(("strategies", "weights")):
        return DIM
    return GOOD if line.startswith(("*", "equal", "saved")) else TEXT


def row(number: int, seconds: float, line: str) -> str:
    """A line of the picture, which appears after some seconds."""
    typed = line.startswith("$ ")
    motion = (
        f"t {len(line) / LETTERS_A_SECOND:.1f}s steps({len(line)}) {seconds:.2f}s" if typed else f"l 1ms {seconds:.2f}s"
    )
    text = html.escape(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…")
    place = f'x="{PADDING}" y="{BAR + LINE * (number + 1) - 5}"'
    return (
        f'<text {place} fill="{colour(line)}" xml:space="preserve" style="animation:{motion} backwards">{text}</text>'
    )


def picture(lines: list[Timed]) -> str:
    """The SVG of a terminal in which the lines appear."""
    height = BAR + len(lines) * LINE + PADDING
    rows = "\n".join(row(number, seconds, line) for number, (seconds, line) in enumerate(lines) if line)
    dots = "".join(
        f'<circle cx="{PADDING + 5 + 18 * number}" cy="{BAR // 2}" r="5.5" fill="{fill}"/>'
        for number, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="meshwright plan, verify and train in a terminal" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{FONT}">\n'
        "<style>@keyframes l{from{opacity:0}}@keyframes t{from{clip-path:inset(0 100% 0 0)}to{clip-path:inset(0)}}"
        "@media print,(prefers-reduced-motion:reduce){text{animation:none!important}}</style>\n"
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
    panels: list[tuple[str, list[Timed]]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "8b.yaml").write_text(RECIPE_8B)
        (Path(folder) / "run.yaml").write_text(RECIPE_SMALL)
        for command, patterns in PANELS:
            panels.append((command, shown(output(command, Path(folder)), patterns)))
    PICTURE.write_text(picture(schedule(panels)), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
