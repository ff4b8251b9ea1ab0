"""Engine `trl`: trl's SFTTrainer over the same model, adapters and rows."""

import tempfile
from importlib import import_module

from datasets import Dataset
from transformers import AutoTokenizer
from tuning import read_arguments

from engine.peft_model import Clock, about, build, options_for, rows_of, stacked

work, report = read_arguments()
trl = import_module("trl")
rows, model = rows_of(work), build(work)
with tempfile.TemporaryDirectory() as folder:
    options = trl.SFTConfig(
        **options_for(work, folder), max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True}
    )
    dataset = Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in rows])
    trainer = trl.SFTTrainer(
        model=model,
        args=options,
        train_dataset=dataset.with_format("torch"),
        data_collator=stacked,
        processing_class=AutoTokenizer.from_pretrained(work.base),
        callbacks=[Clock(report)],
    )
    trainer.train()
    report.end(about(model))
