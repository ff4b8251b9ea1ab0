"""LLaMA-Factory's YAML configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.accelerate_fp8 import FP8_RULES, settle_fp8
from meshwright.imports.axolotl_data import TEMPLATES
from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.experts import COMPUTES
from meshwright.imports.hf_arguments import RULES as HF_RULES
from meshwright.imports.hf_arguments import deepspeed_first, take_defaults, take_length
from meshwright.imports.hf_schedules import settle_intervals
from meshwright.imports.reading import NARROW, Reading, Rule, check_count, check_number, joined
from meshwright.imports.rules import (
    by_sign,
    cases,
    choice,
    dotted,
    fact,
    held_out,
    in_turn,
    no_effects,
    one_of,
    only,
    peft,
    sets,
    split_words,
    targets,
    unsupported,
    when,
    without,
)
from meshwright.spec.errors import UserError

MARKS = ("finetuning_type", "cutoff_len", "dataset_dir", "stage")
TABLE = "dataset_info.json"
SPOKEN = {f"{name}_tag": name for name in ("role", "content", "user", "assistant", "system")}
RECORDS: Mapping[str, Mapping[str, Any]] = {
    "alpaca": {"formatting": "alpaca"},
    "sharegpt": {"formatting": "sharegpt"},
    "messages": {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": SPOKEN},
    "prompt_completion": {"formatting": "alpaca", "columns": {"prompt": "prompt", "response": "completion"}},
    "preference": {
        "formatting": "alpaca",
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    "text": {"formatting": "alpaca", "columns": {"prompt": "text"}},
}
"""A source's format -> its description in dataset_info.json."""
METHOD = "finetune.method"
FIRST = "finetune.last_layers trains the last layers; list the first ones in finetune.train"
OF_ADAPTERS = dotted(
    {"finetune": "rank alpha dropout targets train dora rslora b_lr_ratio base double_quantization start_from"}
)
"""Settings of adapters, which full fine-tuning does not have."""


def _chances(reading: Reading, value: Any, origin: str) -> None:
    """A chance of an example for each data set, as words or numbers."""
    chances = [float(part) for part in split_words(value)] if isinstance(value, str) else list(value)
    for chance in chances:
        check_number(chance, origin)
    reading.fact("chances", chances, origin)


def adapter(reading: Reading, value: Any, origin: str) -> None:
    """The adapter to start from, alone or as a list of one."""
    first, *others = split_words(value)
    if others:
        reading.drop(origin, "only one adapter; merge the others into the model first")
    else:
        reading.set("finetune.start_from", first, origin)


def _settle_fp8(reading: Reading) -> None:
    """fp8 products; `bf16: true` beside them is everything else's dtype, as in a recipe."""
    if "fp8" not in reading.facts:
        return
    path, origin = "training.precision", reading.facts["fp8"][1]
    before, where = reading.settings.get(path, ("bf16", ""))
    if before == "bf16":
        reading.settings[path] = ("fp8", joined(origin, where))
    else:
        reading.set(path, "fp8", origin)
    settle_fp8(reading, origin)


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.READS: {"": "preprocessing_num_workers preprocessing_batch_size overwrite_cache"},
    NoEffect.CACHE: {"": "cache_dir tokenized_path"},
    NoEffect.LOGS: {"": "plot_loss print_param_status"},
    NoEffect.KERNEL: {"": "flash_attn enable_liger_kernel use_unsloth"},
    NoEffect.MEMORY: {"": "low_cpu_mem_usage use_reentrant_gc use_unsloth_gc"},
    NoEffect.CODE: {"": "trust_remote_code"},
    NoEffect.LAUNCH: {"": "ray_num_workers ray_run_name ray_storage_path placement_strategy resources_per_worker"},
    NoEffect.HUB: {"": "hf_hub_token ms_hub_token om_hub_token"},
    NoEffect.GENERATES: {"": "predict_with_generate max_new_tokens temperature top_p top_k num_beams"},
    NoEffect.EVALUATES: {"": "eval_num_beams compute_accuracy"},
}

RULES: Mapping[str, Rule] = {
    **HF_RULES,
    "model_name_or_path": "model.name",
    "adapter_name_or_path": adapter,
    "pure_bf16": cases(
        {True: sets({"training.precision": "bf16", "training.reduce_dtype": "bf16", **NARROW})},
        Has("training.master_dtype", "fp32"),
    ),
    "fp8": when(fact("fp8"), True, HasNot("training.precision", "fp8")),
    **{f"fp8_{key}": FP8_RULES[key] for key in ("backend", "enable_fsdp_float8_all_gather")},
    "shift_attn": unsupported(
        "shifted sparse attention (LongLoRA) is not supported; every token attends to all before it"
    ),
    "resize_vocab": unsupported("the model keeps its vocabulary"),
    "quantization_method": one_of(("bnb", "bitsandbytes"), "quantized bases are as in bitsandbytes: nf4, int8"),
    "interleave_probs": _chances,
    "mix_strategy": cases(  # one after the other, then shuffled (as a recipe does without weights), or in turns
        {"interleave": fact("in turns"), "concat": Always("without weights, all data sets are joined")},
        "supported: concat, interleave_under, interleave_over, interleave_once",
        lambda value: str(value).partition("_")[0],
    ),
    "stage": cases({"dpo": fact("preferences", True), ("sft", "pt"): fact("stage")}, "supported: pt, sft, dpo"),
    "finetuning_type": cases(
        {("lora", "full"): METHOD, "freeze": in_turn(sets({METHOD: "full"}), fact("freeze", True))},
        "supported: full, freeze, lora",
    ),
    "freeze_trainable_layers": by_sign(fact("freeze layers"), in_turn(fact("first layers", True), without(FIRST))),
    "lora_rank": "finetune.rank",
    **peft("", "lora_alpha", "lora_dropout", "use_dora", "use_rslora"),
    "lora_target": targets("all"),
    "additional_target": lambda reading, value, origin: reading.set("finetune.train", split_words(value), origin),
    "upcast_layernorm": unsupported("norms compute in fp32, on weights in the dtype of the others"),
    "use_fast_tokenizer": only(True, "the tokenizer's fast form is always read"),
    "moe_aux_loss_coef": "model.balance_loss",
    "loraplus_lr_ratio": "finetune.b_lr_ratio",
    "quantization_bit": choice("finetune.base", {4: "nf4", 8: "int8"}, "4, 8"),
    "double_quantization": "finetune.double_quantization",
    "pref_beta": "training.preference.beta",
    "pref_loss": only("sigmoid", "the loss of preferences is DPO's (sigmoid)"),
    "dpo_label_smoothing": "training.preference.label_smoothing",
    "pref_ftx": unsupported("the loss has no supervised term"),
    "dataset": lambda reading, value, origin: reading.fact("datasets", split_words(value), origin),
    "dataset_dir": fact("dataset folder"),
    "eval_dataset": without("evaluation data is a fraction of the training data; set data.held_out"),
    "template": cases({TEMPLATES: "data.chat.template"}, "the tokenizer's template is used"),
    "cutoff_len": "data.sequence_length",
    "max_samples": without("all data is read"),
    "packing": fact("packing"),
    "train_from_scratch": when("model.weights", "random"),
    "disable_shuffling": when("data.order", "given"),
    "disable_gradient_checkpointing": when("training.recompute", "none", Has("training.recompute", "full")),
    "neat_packing": cases(
        {True: sets({"data.packing": "best_fit", "data.separate_documents": True})},
        Has("data.separate_documents", False),
    ),
    "val_size": held_out,
    "train_on_prompt": when("data.chat.train_on", "all"),
    "mask_history": when("data.chat.train_on", "last"),
    "rope_scaling": unsupported("the model's config.json sets it"),
    "use_galore": unsupported("GaLore is not supported"),
    "use_apollo": unsupported("APOLLO is not supported"),
    "use_badam": unsupported("BAdam is not supported"),
    "use_llama_pro": unsupported("adding layers is not supported"),
    "pissa_init": unsupported("adapters always start at zero"),
    **no_effects(NO_EFFECT),
}


def is_llama_factory(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a LLaMA-Factory configuration."""
    return "model_name_or_path" in values and any(mark in values for mark in MARKS)


def read_llama_factory(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a LLaMA-Factory configuration."""
    reading.facts.setdefault(COMPUTES, (file, file))
    reading.take(deepspeed_first(values), RULES, file)
    settle_intervals(reading, values, f"{file} (the Trainer's default)")
    take_length(reading, values, f"{file} (the Trainer's default)")
    take_defaults(reading, values, f"{file} (the Trainer's default)", "linear")
    reading.default("training.precision", "fp32", f"{file} (neither bf16 nor fp16)")
    preferences = reading.known("preferences", False)
    if preferences and "pref_beta" not in values:
        reading.set("training.preference.beta", 0.1, f"{reading.facts['preferences'][1]} (LLaMA-Factory's default)")
    if preferences:
        reading.set("data.separate_documents", True, reading.facts["preferences"][1])
    _settle_fp8(reading)
    if "finetuning_type" not in values:
        reading.set("finetune.method", "lora", f"{file} (LLaMA-Factory's default)")
    _settle_method(reading, file)
    default = f"{file} (LLaMA-Factory's default)"
    if reading.value("finetune.method") == "lora":
        rank, origin = reading.settings.get("finetune.rank", (8, default))
        check_count(rank, origin)
        reading.default("finetune.rank", rank, origin)
        reading.default("finetune.alpha", 2 * rank, default)
    _packing(reading, values, default)
    reading.default_all({"data.sequence_length": 2048, "data.held_out": 0.0, "training.recompute": "full"}, default)


def _settle_method(reading: Reading, file: str) -> None:
    """The layers of `freeze`, two by default; LoRA's settings have no effect on other methods."""
    default = f"{file} (LLaMA-Factory's default: freeze_trainable_layers=2)"
    if "freeze" not in reading.facts:
        reading.ignore("freeze layers", reason="it has no effect without finetuning_type=freeze")
    elif "first layers" not in reading.facts:
        train_last_layers(reading, reading.facts["freeze"][1], default)
    if reading.value(METHOD) != "lora":
        reading.take_back("it has no effect without finetuning_type=lora", *OF_ADAPTERS)


def train_last_layers(reading: Reading, origin: str, default: str) -> None:
    """Train the last layers, two by default."""
    reading.set("finetune.last_layers", *reading.facts.get("freeze layers", (2, default)))
    reading.notes.append(
        f"{origin}: the last norm and an untied head train in a recipe, too; list the layers in finetune.train "
        "instead if they should not"
    )


def is_dataset_info(values: Mapping[str, Any]) -> bool:
    """Whether this is the table of LLaMA-Factory's data sets."""
    places = {"file_name", "hf_hub_url", "ms_hub_url", "script_url"}
    return bool(values) and all(isinstance(entry, Mapping) and places & entry.keys() for entry in values.values())


def read_dataset_info(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read the table of data sets; the configuration beside it names some of them."""
    reading.fact("dataset table", values, file)


def _packing(reading: Reading, values: Mapping[str, Any], default: str) -> None:
    """Texts (stage pt) are joined and cut, answers have a row each, unless a key says otherwise."""
    texts = values.get("stage") == "pt"
    packed, where = reading.facts.get("packing", (texts, f"{default}: packing={texts}"))
    where = joined(where, reading.facts.get("stage", (0, ""))[1])
    if values.get("neat_packing"):  # its rule has set it
        if values.get("packing") is not False:
            reading.set("data.packing", "best_fit", where)
        return
    words = {True: "concatenated" if texts else "best_fit", False: "padded"}
    reading.set("data.packing", words[packed is True], where)


def name_sources(reading: Reading) -> None:
    """The data sets as sources: as the table describes them, or else by the names of their files."""
    if "datasets" not in reading.facts:
        return
    names, origin = reading.facts["datasets"]
    folder, preferences = reading.known("dataset folder", "data"), reading.known("preferences", False)
    table, where = reading.facts.get("dataset table", ({}, ""))
    form = {"format": "preference"} if preferences else {}
    sources = [
        _described(reading, table[name], folder, f"{where}: {name}")
        if name in table
        else {"path": f"{folder}/{name}.json", **form}
        for name in names
    ]
    weights = _weigh(reading, names, sources)
    folder_origin = reading.facts.get("dataset folder", (0, ""))[1]
    reading.set("data.sources", sources, joined(origin, folder_origin, where, weights))
    if missing := [name for name in names if name not in table]:
        note = f"the files and columns of {', '.join(missing)} are in {folder}/{TABLE}, which was not given"
        reading.notes.append(f"{origin}: {note}; pass that file too")


def _weigh(reading: Reading, names: list[str], sources: list[dict[str, Any]]) -> str:
    """Give the sources the weights of data sets that are read in turns; returns the origin of the weights."""
    chances, where = reading.facts.get("chances", (None, ""))
    turns, mixed = reading.facts.get("in turns", ("", ""))
    if not turns:
        reading.ignore(
            "chances", reason="it has no effect without mix_strategy=interleave_under or another interleave_*"
        )
        return ""
    if chances and len(chances) != len(names):
        raise UserError(f"{where}: {len(chances)} chances for {len(names)} data sets; give each one")
    for source, chance in zip(sources, chances or [1.0] * len(names), strict=True):
        source["weight"] = chance
    reading.notes.append(
        f"{where or mixed}: set as weights, which are shares of tokens, not chances of an example; they differ where "
        "examples of one data set are longer"
    )
    reading.drop(mixed, "the run ends after training.steps, whichever data set is used up; used-up ones start again")
    return where


def _described(reading: Reading, entry: Mapping[str, Any], folder: str, where: str) -> dict[str, Any]:
    """An entry of the table as a source."""
    left = dict(entry)
    remote, local = left.pop("hf_hub_url", None), left.pop("file_name", None)
    path = f"hub:{remote}" if remote else str(local) if folder == "." else f"{folder}/{local}"
    source = {"path": path, "split": left.pop("split", None), "subset": left.pop("subset", None)}
    form = {key: left.pop(key) for key in ("formatting", "ranking", "columns", "tags") if key in left}
    form = {"formatting": "alpaca", **{key: value for key, value in form.items() if value}}
    columns = form.get("columns", {})
    if form["formatting"] == "alpaca" and set(columns) == {"prompt"} and "ranking" not in form:
        source |= {"format": "text", "text_key": columns["prompt"] if columns["prompt"] != "text" else None}
    elif known := [name for name, described in RECORDS.items() if described == form]:
        source["format"] = known[0]
    else:
        reading.drop(
            f"{where}: {form}", f"set format and columns under data.sources; known formats: {', '.join(RECORDS)}"
        )
    for key, value in left.items():
        reading.drop(f"{where}: {key}={value}", "set it under data.sources")
    return {key: value for key, value in source.items() if value is not None}
