"""Run directories written by hand, so that every number in them is known."""

import json
from pathlib import Path
from typing import Any

RECIPE = "model: {family: llama, hidden: 16}\ntraining: {steps: 12, optimizer: {lr: 0.01}}\nrun_dir: RUN\n"


def step(number: int, seconds: float, *, loss: float | None = None, **more: Any) -> dict[str, Any]:
    """A record of kind `step`, of a run with 100 tokens in a step."""
    fields = {
        "step": number,
        "loss": 5.0 - 0.1 * number if loss is None else loss,
        "gnorm": 1.0 / number,
        "lr": 0.01 * number,
        "tokens": 100 * number,
        "step_time": None if number == 1 else 0.5,
        "data_time": None if number == 1 else 0.1,
        "tokens_per_s_per_rank": None if number == 1 else 100.0,
        "trained_per_s_per_rank": None if number == 1 else 90.0,
        "mfu": None if number == 1 else 0.25,
        "mem": 1000 + number,
        "eta": 1.0,
        "skipped": 0,
        "spikes": 0,
        "rewinds": 0,
        "expert_load": None,
    }
    return {"kind": "step", "time": seconds, **fields, **more}


def at(kind: str, number: int, seconds: float, **fields: Any) -> dict[str, Any]:
    """A record of another kind."""
    return {"kind": kind, "time": seconds, "step": number, **fields}


def evaluation(number: int, seconds: float) -> dict[str, Any]:
    """A held-out loss, of two sources."""
    losses = {"loss": 4.5 - 0.1 * number, "loss/books": 4.0 - 0.1 * number, "loss/code": 5.0 - 0.1 * number}
    return at("evaluation", number, seconds, **losses, perplexity=90.0, tokens=50)


def run_of_all_kinds() -> list[dict[str, Any]]:
    """A run of 12 steps that was killed after step 8, continued from step 6, and went back once to step 10.

    Losses of steps that were repeated differ by 0.5.
    """
    before = [
        at("start", 0, 1000.0, world_size=2, strategy="ZeRO-3 x 2"),
        at("sample", 0, 1000.5, prompt="<b>One", text=" & two"),
        *(step(number, 1000.5 + number) for number in range(1, 7)),
        evaluation(6, 1007.0),
        at("tasks", 6, 1007.5, **{"quiz/acc": 0.5, "quiz/acc_stderr": 0.1}),
        at(
            "checkpoint", 6, 1008.0, path="RUN/checkpoints/step-00000006", bytes=9, blocked_seconds=0.2, total_seconds=1
        ),
        *(step(number, 1002.0 + number, loss=5.5 - 0.1 * number) for number in (7, 8)),
    ]
    after = [
        at("start", 6, 5000.0, world_size=2, strategy="ZeRO-3 x 2"),
        *(step(number, 4994.0 + number) for number in range(7, 11)),
        at(
            "checkpoint",
            10,
            5004.5,
            path="RUN/checkpoints/step-00000010",
            bytes=9,
            blocked_seconds=0.1,
            total_seconds=1,
        ),
        step(11, 5005.0, loss=float("nan"), spikes=1, skipped=1),
        at("rewind", 10, 5005.5, why="step 11: back to step-00000010"),
        *(step(number, 4995.5 + number, rewinds=1) for number in (11, 12)),
        evaluation(12, 5008.0),
        at("tasks", 12, 5008.5, **{"quiz/acc": 0.75, "quiz/acc_stderr": 0.1}),
        at("sample", 12, 5008.6, prompt="<b>One", text=" & three"),
        at("end", 12, 5009.0),
    ]
    return before + after


PLANNED = {
    "devices": "2 x cpu",
    "step_time": {"value": 0.4, "low": 0.3, "high": 0.6},
    "tokens_per_s": {"value": 250.0, "low": 150.0, "high": 300.0},
    "memory": {"value": 1100.0, "low": 900.0, "high": 1300.0},
    "step_parts": {"compute": 0.3, "tensor": 0.0, "update": 0.1},
    "memory_kinds": {"weights": 600.0, "gradients": 0.0, "optimizer": 500.0},
}


def write_run(folder: Path, records: list[dict[str, Any]] | None = None, *, lr: float = 0.01) -> Path:
    """A run directory with these records."""
    folder.mkdir(parents=True)
    lines = [json.dumps(record) for record in (run_of_all_kinds() if records is None else records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.replace("RUN", str(folder)))
    settings = f"{{model: {{hidden: 16}}, training: {{steps: 12, optimizer: {{lr: {lr}}}}}, run_dir: {folder}}}"
    (folder / "resolved.yaml").write_text(f"run: {settings}\nreasons: {{training.micro_batch: all of it}}\n")
    origin = {
        "meshwright": "0.1.0",
        "packages": {"torch": "2.13.0"},
        "data": {"text": "abc"},
        "command": "meshwright train",
    }
    environment = {"peak_flops": 1e9, "world_size": 2, "origin": origin, "planned": PLANNED}
    (folder / "env.json").write_text(json.dumps(environment))
    return folder
