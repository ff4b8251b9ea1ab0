"""Engine `meshwright`: the trainer as a user starts it, journal and display included."""

import json
import tempfile
from pathlib import Path

from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_arguments

from engine.journal import TellSteps
from meshwright import Run, train

workload, report, _ = read_arguments()
with tempfile.TemporaryDirectory() as folder:
    run = Run.model_validate(
        {
            "model": workload.fields,
            "data": workload.data,
            "training": {
                "steps": workload.steps,
                "global_batch": workload.batch,
                "micro_batch": workload.batch,
                "precision": workload.precision,
                "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
                "lr_schedule": {"name": "constant", "warmup": 0},
                "clip": CLIP,
                "compile": workload.compile,
                "evaluation": {"batches": 0},
            },
            "device": "cpu",
            "run_dir": folder,
        }
    )
    train(run, callbacks=[TellSteps(report)])
    found = json.loads((Path(folder) / "env.json").read_text())
report.end(
    f"torch {found['torch']}, {found['threads']} threads, {found['peak_flops'] / 1e9:.0f} GFLOP/s in a large product"
)
