"""Engine `hf_trainer`: Hugging Face's Trainer over transformers' GPT-2, every hyper-parameter said."""

import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_arguments

from engine.transformers_model import build

workload, report, _ = read_arguments()


class Clock(TrainerCallback):
    """Notes the end of every step and the losses that the Trainer logs."""

    def on_step_end(self, args, state, control, **kwargs):
        report.step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            report.losses.append(float(logs["loss"]))


rows = [
    {"input_ids": row, "labels": row} for inputs, _ in workload.batches() for row in inputs
]  # the model moves labels on by one itself, so a row carries one label less
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
        logging_steps=workload.steps - 1,
        logging_first_step=True,
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=build(workload), args=options, train_dataset=rows, callbacks=[Clock()])
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(  # the order of the other engines
        rows, batch_size=workload.batch, shuffle=False, collate_fn=trainer.data_collator
    )
    trainer.train()
report.print()
