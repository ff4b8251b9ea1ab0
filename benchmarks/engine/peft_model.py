"""Shared by the engines over peft: base, adapters, rows, and the options of their trainers."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from tuning import ALPHA, CLIP, LR, RANK, Tuning, used
from workload import Report

MULTIPLE = 8
"""Rows are padded to a multiple of so many tokens, as trl does."""


def build(work: Tuning) -> Any:
    """The base in the precision of computation or in four bits, adapters in fp32."""
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "use_cache": False}
    if work.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(work.base, **options)
    if work.method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = LoraConfig(
        r=RANK, lora_alpha=round(ALPHA), lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, adapters)


def rows_of(work: Tuning) -> list[dict[str, torch.Tensor]]:
    """Every row of the run: packed ones with each record's own positions, by which transformers separates them; the
    others as long as the longest of their batch."""
    rows = []
    for batch in work.batches():
        assert batch.labels is not None
        assert batch.document_ids is not None
        length = -(-max(map(used, batch.labels)) // MULTIPLE) * MULTIPLE
        for inputs, labels, documents in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
            moved = torch.from_numpy(labels)
            row = {"input_ids": torch.from_numpy(inputs), "labels": moved, "shift_labels": moved}
            if work.packed:
                starts = [0, *(i for i in range(1, len(inputs)) if documents[i] != documents[i - 1])]
                places = [torch.arange(b - a) for a, b in zip(starts, [*starts[1:], len(inputs)], strict=True)]
                row["position_ids"] = torch.cat(places)
            else:
                row = {key: value[:length] for key, value in row.items()}
                row["attention_mask"] = (torch.arange(length) < used(labels)).long()
            rows.append(row)
    return rows


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def options_for(work: Tuning, folder: str) -> dict[str, Any]:
    """The common options of TrainingArguments and SFTConfig."""
    return {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": work.batch,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "bf16": work.precision == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


class Clock(TrainerCallback):
    """Records the end of every step and the losses that the trainer logs."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_step_end(self, args, state, control, **kwargs):
        """A step has ended."""
        self.report.step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Something was logged."""
        if logs and "loss" in logs:
            self.report.losses.append(float(logs["loss"]))


def about(model: Any) -> str:
    """What was trained, read from the trained model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad})
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    return (
        f"{sum(p.numel() for p in trained)} parameters trained in {'/'.join(dtypes)}, the base in {'/'.join(kept)}; "
        f"{torch.get_num_threads()} threads"
    )
