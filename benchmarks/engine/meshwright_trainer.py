"""Engine `meshwright`: the trainer as a user starts it, journal and display included."""

import tempfile
from pathlib import Path

from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_arguments

from meshwright.spec.run import Run
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.run import train

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
                "evaluation": {"batches": 0},
            },
            "device": "cpu",
            "run_dir": folder,
        }
    )
    train(run)
    for record in read_journal(Path(folder) / "metrics.jsonl"):
        if record["kind"] == "step":
            report.step(record["loss"], at=record["time"])
report.print()
