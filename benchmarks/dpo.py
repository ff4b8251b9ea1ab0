"""Our preference tuning compared with trl's DPOTrainer: the same pairs from the same base, the losses step by step.

    python benchmarks/dpo.py --trl FOLDER    # where trl was put: pip install --target FOLDER --no-deps trl

Everything is computed in fp32 and all parameters train, so any remaining difference is rounding. trl gets our recipe's
tokens of the pairs, and keeps a second model as its reference.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright import Run, train
from meshwright.checkpoint.hf import export_hf
from meshwright.data.loader import Loader
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import StartingModel, prepare_corpus
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.spec.model import ModelFields
from meshwright.trainer.metrics import read_journal

STEPS, BATCH, LR, EPS = 12, 4, 2e-4, 1e-3
BETA = 0.1


def main() -> int:
    """Train with both, print the losses, and fail where they differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="folder where trl is installed")
    sys.path.append(str(parser.parse_args().trl))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepare(folder)
        train(recipe)
        ours = [line["loss"] for line in read_journal(folder / "run/metrics.jsonl") if line["kind"] == "step"]
        theirs = trl_losses(folder, recipe)
    print("| step | ours | trl | difference |\n|---|---|---|---|")
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        print(f"| {step} | {mine:.7f} | {other:.7f} | {mine - other:.1e} |")
    worst = max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))
    print(f"\nlargest difference {worst:.1e}")
    return 0 if worst < 1e-5 else 1


def prepare(folder: Path) -> Run:
    """A base with random weights, pairs of answers, and a recipe that trains on them."""
    pairs = [
        {
            "prompt": f"What is {n} plus {n}?",
            "chosen": [{"role": "assistant", "content": f"It is {2 * n}."}],
            "rejected": [{"role": "assistant", "content": f"I think that it may be {2 * n + 1}, or more."}],
        }
        for n in range(STEPS * BATCH)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    train_tokenizer([json.dumps(pair) for pair in pairs], 320).save(folder / "tokenizer")
    spec = resolve_model(
        ModelFields(family="llama", hidden=64, num_layers=2, num_heads=4, vocab=320, max_positions=128, init_std=0.2),
        base_dir=folder,
    )
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    parameters = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    export_hf(parameters, spec, folder / "base", tokenizer_dir=folder / "tokenizer", dtype=torch.float32)
    return Run.model_validate(
        {
            "model": {"name": str(folder / "base"), "weights": "pretrained"},
            "data": {
                "sources": [str(folder / "pairs.jsonl")],
                "sequence_length": 128,
                "packing": "padded",
                "separate_documents": True,
                "held_out": 0,
                "chat": {"template": "plain"},
                "cache_dir": str(folder / "cache"),
            },
            "training": {
                "steps": STEPS,
                "global_batch": BATCH,
                "precision": "fp32",
                "optimizer": {"lr": LR, "eps": EPS, "weight_decay": 0.0, "betas": (0.9, 0.999)},
                "lr_schedule": {"name": "constant", "warmup": 0},
                "clip": 1.0,
                "preference": {"beta": BETA},
            },
            "device": "cpu",
            "run_dir": str(folder / "run"),
        }
    )


def pairs_of(recipe: Run) -> Iterator[dict[str, list[int]]]:
    """The pairs of every step in order, in trl's format."""
    corpus = prepare_corpus(recipe.data, base_dir=Path(), model=StartingModel(Path(recipe.model.name or "")))
    with Loader(training_samples(corpus, recipe.data), seed=0, global_batch=BATCH, micro_batch=BATCH) as loader:
        for step in range(STEPS):
            (batch,) = loader.microbatches(step)
            assert batch.document_ids is not None
            for inputs, labels, documents in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
                found = []
                for document in (0, 1):
                    here = documents == document
                    answer = np.flatnonzero(labels[here] != -100)
                    assert (np.diff(answer) == 1).all()
                    asked, answered = inputs[here][: answer[0] + 1], labels[here][answer]
                    found.append((asked.tolist(), answered.tolist()))
                (prompt, chosen), (same, rejected) = found
                assert prompt == same
                yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def trl_losses(folder: Path, recipe: Run) -> list[float]:
    """The losses that trl's trainer logs for the same pairs."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend(float(logs[key]) for key in ("loss",) if key in logs)

    class AsGiven(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.pad_token = tokenizer.eos_token
    trainer = AsGiven(
        model=AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            adam_epsilon=EPS,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            optim="adamw_torch",
            beta=BETA,
            max_length=None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(list(pairs_of(recipe))),
        processing_class=tokenizer,
        callbacks=[Listener()],
    )
    trainer.train()
    return losses


if __name__ == "__main__":
    sys.exit(main())
