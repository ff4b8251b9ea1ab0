"""TRL's arguments beside the Trainer's: the model and its adapters (`ModelConfig`), and those of SFT and DPO."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import (
    cases,
    choice,
    claims_value,
    counted,
    fact,
    no_effects,
    only,
    peft,
    place,
    sets,
    when,
    without,
)

LORA: Mapping[str, Any] = {"finetune.rank": 16, "finetune.alpha": 32, "finetune.dropout": 0.05}
"""Defaults of `ModelConfig`."""
PEFT, DATA, SUBSET, SPLIT = "use_peft", "trl data", "trl subset", "trl split"
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.KERNEL: {"": "attn_implementation"},
    NoEffect.CODE: {"": "trust_remote_code"},
    NoEffect.READS: {"": "dataset_num_proc"},
    NoEffect.MEMORY: {"": "padding_free pad_to_multiple_of activation_offloading precompute_ref_log_probs"},
    NoEffect.CLASS: {"": "lora_task_type"},
}


RULES: Mapping[str, Rule] = {
    "model_name_or_path": "model.name",
    "model_revision": without("the newest version of the model is read"),
    **dict.fromkeys(("torch_dtype", "dtype"), without("set training.master_dtype; by default weights are in fp32")),
    "use_peft": fact(PEFT),
    **peft("lora_", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save"),
    **peft("", "use_dora", "use_rslora"),
    "load_in_4bit": when("finetune.base", "nf4"),
    "load_in_8bit": when("finetune.base", "int8"),
    "use_bnb_nested_quant": "finetune.double_quantization",
    "bnb_4bit_quant_type": only("nf4", "four bits are nf4"),
    "dataset_name": fact(DATA),
    "dataset_config": fact(SUBSET),
    "dataset_train_split": fact(SPLIT),
    "dataset_test_split": without("evaluation data is a fraction of the training data; set data.held_out"),
    **dict.fromkeys(("max_length", "max_seq_length"), counted("data.sequence_length")),
    "packing": cases(
        {True: sets({"data.packing": "best_fit", "data.separate_documents": True})}, sets({"data.packing": "padded"})
    ),
    "packing_strategy": only("bfd", "whole records are packed into the fullest sample with room (bfd)"),
    "eval_packing": claims_value("data.separate_documents"),
    "assistant_only_loss": choice("data.chat.train_on", {True: "assistant", False: "all"}, "true, false"),
    "completion_only_loss": when("data.chat.train_on", "assistant"),
    "chat_template_path": without("set data.chat.template to a file"),
    "chat_template": without("write the template to a file and set data.chat.template to it"),
    **dict.fromkeys(
        ("beta", "loss_type", "label_smoothing"),
        without("the file does not name its trainer; for DPO, set training.preference"),
    ),
    **no_effects(NO_EFFECT),
}


def settle_trl(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Adapters where `use_peft` says so, and the data set; without it the settings of adapters have no effect."""
    default = f"{file} (TRL's default)"
    uses, origin = reading.facts.get(PEFT, (False, ""))
    if uses is True:
        reading.set("finetune.method", "lora", origin)
        reading.default_all(LORA, default)
    else:
        reading.claim(origin, Has("finetune.rank", None))
        adapters = [path for path in reading.settings if path.startswith("finetune.") and path != "finetune.method"]
        reading.take_back("it has no effect without use_peft", *adapters)
    if DATA in reading.facts:
        name, where = reading.facts[DATA]
        parts = {"subset": reading.facts.get(SUBSET), "split": reading.facts.get(SPLIT)}
        given = {key: part[0] for key, part in parts.items() if part and (key, part[0]) != ("split", "train")}
        origins = [where, *(part[1] for part in parts.values() if part)]
        reading.set("data.sources", [{"path": place(name), **given}], "; ".join(origins))
        if "packing" not in values:
            reading.set("data.packing", "padded", f"{default}: packing=false")
    elif SPLIT in reading.facts:
        reading.claim(reading.facts[SPLIT][1], Always("no data set is named"))
