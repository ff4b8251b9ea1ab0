"""Engine `meshwright`: fine-tuning as a user starts it, journal and display included."""

import tempfile

from tuning import ALPHA, CLIP, LR, RANK, read_arguments

from engine.journal import TellSteps
from meshwright import Run, train
from meshwright.families import count_trained
from meshwright.trainer.resolve import resolve_run

work, report = read_arguments()
with tempfile.TemporaryDirectory() as folder:
    run = Run.model_validate(
        {
            "model": {"name": str(work.base), "weights": "pretrained"},
            "data": work.data,
            "finetune": {"method": work.method, "rank": RANK, "alpha": ALPHA},
            "training": {
                "steps": work.steps,
                "global_batch": work.batch,
                "micro_batch": work.batch,
                "precision": work.precision,
                "optimizer": {"lr": LR, "betas": (0.9, 0.999), "weight_decay": 0.0},
                "lr_schedule": {"name": "constant", "warmup": 0},
                "clip": CLIP,
                "evaluation": {"batches": 0},
            },
            "device": "cpu",
            "run_dir": folder,
        }
    )
    train(run, callbacks=[TellSteps(report)])
    trained, _ = count_trained(resolve_run(run, base_dir=work.base).model, run.finetune)
kept = f"{work.precision}, its matrices in four bits" if work.method == "qlora" else work.precision
report.end(f"{trained} parameters trained in fp32, the base in {kept}; {work.threads} threads")
