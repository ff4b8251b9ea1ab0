"""Engine `peft`: Hugging Face's Trainer over transformers' llama with peft's adapters."""

import tempfile

from transformers import Trainer, TrainingArguments
from tuning import read_arguments

from engine.peft_model import Clock, about, build, options_for, rows_of, stacked

work, report = read_arguments()
rows, model = rows_of(work), build(work)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**options_for(work, folder)),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        data_collator=stacked,
        callbacks=[Clock(report)],
    )
    trainer.train()
    report.end(about(model))
