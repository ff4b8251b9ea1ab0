"""Engine `hf_trainer`: Hugging Face's Trainer over transformers' GPT-2, with every hyper-parameter explicit."""

import tempfile
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, describe, read_arguments

from engine.transformers_model import build

workload, report, _ = read_arguments()


class Clock(TrainerCallback):
    """Records the end of every step and the losses that the Trainer logs."""

    def on_step_end(self, args, state, control, **kwargs):
        report.step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            report.losses.append(float(logs["loss"]))


# `shift_labels` says that labels are already moved on by one: each token is trained, as by the other engines.
rows: Any = [
    {"input_ids": row, "labels": label, "shift_labels": label}
    for inputs, labels in workload.batches()
    for row, label in zip(inputs, labels, strict=True)
]
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        output_dir=folder,
        max_steps=workload.steps,
        per_device_train_batch_size=workload.batch,
        learning_rate=LR,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        bf16=workload.precision == "bf16",
        use_cpu=True,
        logging_steps=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        torch_compile=workload.compile,
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    model = build(workload)
    trainer = Trainer(model=model, args=options, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    assert trainer.optimizer is not None
    report.end(describe(model.parameters(), trainer.optimizer))  # pyright: ignore[reportArgumentType]
