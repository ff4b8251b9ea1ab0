"""torchtitan's configuration: Python since 0.3, TOML before, or the JSON that it prints of its dataclasses."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.names import DTYPES
from meshwright.imports.reading import Reading, check_count, flat, joined
from meshwright.imports.titan_python import read_titan_python
from meshwright.imports.torchtitan_keys import (
    ASSETS,
    DEFAULTS,
    FLAVORS,
    IN_HF,
    MICROBATCHES,
    RULES,
    SCALED,
    TOKENS,
    WARMUP,
    read_data_set,
)
from meshwright.spec.errors import UserError


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of a torchtitan configuration."""
    sections = [name for name in ("job", "training", "parallelism", "lr_scheduler", "activation_checkpoint", "metrics")
                if isinstance(values.get(name), Mapping)]  # fmt: skip
    return "training" in sections and len(sections) > 1


def read_torchtitan(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a torchtitan configuration."""
    keys = flat(values)
    _take(reading, _without_what_is_off(reading, keys, file), file)


def read_torchtitan_python(reading: Reading, text: str, file: str, package: str = "") -> None:
    """Read a torchtitan configuration in Python, of a module in the folder `package`; it keeps documents apart."""
    known = package if package in {module for module, _ in FLAVORS} else ""
    keys = read_titan_python(text, file, known)
    keys = _without_what_is_off(reading, keys, file)
    last = ("dataset.table",)  # names are looked up in it
    _take(reading, dict(sorted(keys.items(), key=lambda pair: pair[0] in last)), file)
    if "data set" in reading.facts and "dataset.table" not in keys:
        read_data_set(reading, *reading.facts["data set"])
    reading.default("data.separate_documents", True, f"{file} (torchtitan masks attention between documents)")


def _in_microbatches(reading: Reading, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Read a pipeline's microbatch, one sequence by default, and return the other keys; all keys without a pipeline."""
    pipelined = keys.get("parallelism.pipeline_parallel_degree", 1) != 1
    if not pipelined or not keys.keys().isdisjoint(BUDGET):
        return dict(keys)
    key, name = "training.local_batch_size", "pipeline_parallel_microbatch_size"
    rest = {other: value for other, value in keys.items() if other != f"parallelism.{name}"}
    local, micro = keys.get(key, 8), keys.get(f"parallelism.{name}", 1)
    check_count(local, f"{file}: {key}={local}")
    check_count(micro, f"{file}: {name}={micro}")
    reading.set("training.micro_batch", micro, f"{file}: {name}={micro}")
    if keys.get("training.global_batch_size", -1) == -1:  # else the accumulation follows from it
        reading.fact("accumulation", max(1, local // micro), f"{file}: {key}={local}")
    return {other: value for other, value in rest.items() if other != key}


BUDGET = ("training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length")
"""Keys of releases since mid-2026, which count a microbatch in tokens."""


def _in_tokens(reading: Reading, keys: Mapping[str, Any], file: str) -> None:
    """Set the micro batch, and a pipeline's microbatches, where the file counts in tokens."""
    pipelined, default = "layout.pp" in reading.settings, f"{file} (torchtitan's default)"
    many, where = reading.facts.get(MICROBATCHES, (1, ""))
    if where and not pipelined:
        reading.no_effect.append((where, NoEffect.OFF))
    elif where and "training.global_batch_tokens" not in reading.settings:
        reading.fact("accumulation", many, where)
    if keys.keys().isdisjoint(BUDGET):
        return
    tokens, origin = reading.facts.get(TOKENS, (16384, f"{default}: num_tokens_per_microbatch_per_dp_rank=16384"))
    length, length_origin = reading.settings.get("data.sequence_length", (2048, f"{default}: max_context_length=2048"))
    check_count(tokens, origin)
    check_count(length, length_origin)
    if tokens % length:
        reading.drop(origin, f"{length_origin} does not divide it; set training.micro_batch")
    else:
        reading.set("training.micro_batch", tokens // length, f"{origin}; {length_origin}")


def _take(reading: Reading, keys: Mapping[str, Any], file: str) -> None:
    reading.take(_in_microbatches(reading, keys, file), RULES, file)
    _in_tokens(reading, keys, file)
    if "training.steps" in reading.settings:
        steps, origin = reading.settings["training.steps"]
        check_count(steps, origin)
        reading.default(WARMUP, min(steps, DEFAULTS[WARMUP]), f"{file} (torchtitan's default, at most all steps)")
    for path, value in DEFAULTS.items():
        if path == "training.micro_batch" and path not in reading.settings:  # the global batch is worked out of it
            reading.set(path, value, f"{file} (torchtitan's default)")
        elif path != "training.optimizer.betas" or not ({"beta1", "beta2"} & reading.facts.keys()):
            reading.default(path, value, f"{file} (torchtitan's default)")
    _start(reading)
    _model(reading)
    _decay(reading)
    _ranks(reading, file)
    compute, origin = reading.facts.get("compute", ("bfloat16", f"{file} (torchtitan's default)"))
    if "training.precision" not in reading.settings:
        if str(compute) not in DTYPES:
            raise UserError(f"{origin}: must be one of {', '.join(DTYPES)}")
        reading.set("training.precision", DTYPES[str(compute)], origin)
    steps = reading.settings.get("training.steps", (DEFAULTS["training.steps"], ""))[0]
    saves, where = reading.facts.get("saves", (None, ""))
    if saves is True:
        every, every_origin = reading.facts.get("save interval", (500, f"{file} (torchtitan's default)"))
        reading.set("checkpoint.every", every if every < steps else 0, f"{every_origin}; {where}")
    else:
        reading.claim(where, Has("checkpoint.every", 0))
        reading.ignore("save interval")
    if "schedule" in reading.facts and "layout.pp" in reading.settings:
        reading.set("layout.schedule", *reading.facts["schedule"])


SWITCHED = {"validation": "enable", "fault_tolerance": "enable", "memory_estimation": "enable"}
"""Sections, and the key that switches each on."""


def _without_what_is_off(reading: Reading, given: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The keys without those of sections that are switched off, which are listed as without effect."""
    left = dict(given)
    if other := [section for section in SWITCHED if left.get(section)]:
        raise UserError(f"{file}: {other[0]}={left[other[0]]}: must be a section")
    for section, switch in SWITCHED.items():
        keys = [key for key in left if key.startswith(f"{section}.") and key != f"{section}.{switch}"]
        for key in keys if not left.get(f"{section}.{switch}") else ():
            if (value := left.pop(key)) is not None:
                reading.no_effect.append((reading.read(file, key, value), NoEffect.OFF))
    return left


def _start(reading: Reading) -> None:
    """Weights of a Hugging Face directory: the path of the checkpoint, or the folder of assets."""
    loads, where = reading.facts.get(IN_HF, (False, ""))
    assets = reading.facts.get(ASSETS)
    if assets:
        reading.set("data.tokenizer", *assets)
    if loads is not True:
        if where:
            reading.claim(where, HasNot("model.weights", "pretrained"))
        return
    place = reading.settings.pop("checkpoint.start_from", None) or assets
    if reading.known("saves") is not True:
        reading.drop(where, "torchtitan loads weights only with checkpoint.enable")
    elif place is None:
        reading.drop(where, "the folder of the weights is not given; set model.name to it")
    elif "model.name" in reading.settings:
        name_origin = reading.settings["model.name"][1]
        reading.drop(where, f"{name_origin} names the model; give --model {place[0]} to start from these weights")
    else:
        reading.set("model.name", place[0], f"{place[1]}; {where}")
        reading.set("model.weights", "pretrained", where)


def _model(reading: Reading) -> None:
    name, origin = reading.facts.get("model", (None, ""))
    flavor, flavor_origin = reading.facts.get("flavor", ("", ""))
    published = FLAVORS.get((str(name).lower(), str(flavor).lower()))
    named = joined(origin, flavor_origin)
    if named and reading.value("model.weights") == "pretrained":
        reading.drop(named, "its sizes are in the directory's config.json")
    elif published and "model.name" not in reading.settings:
        reading.set("model.name", published, named)
        factor, factor_origin = reading.facts.get("rope factor", (8.0, flavor_origin))
        if str(flavor) in SCALED and factor != 32.0:
            reading.set("model.rope_scaling", {"factor": factor}, f"{factor_origin}: torchtitan's factor is {factor}")
        elif "rope factor" in reading.facts:
            reading.claim(factor_origin, Has("model.rope_scaling", None))
    elif published:
        reading.claim(origin, Has("model.name", published))
        reading.claim(flavor_origin, Has("model.name", published))
    elif named and "model.name" in reading.settings:
        reading.drop(named, f"{reading.settings['model.name'][1]} names the model")
    elif named:
        reading.drop(named, "this size is defined in torchtitan's code; give --model")


def _decay(reading: Reading) -> None:
    """The rate is flat between warm-up and a last part that is `decay_ratio` of all steps."""
    steps = reading.settings.get("training.steps", (DEFAULTS["training.steps"], ""))[0]
    end, where = reading.facts.get("decay end", (steps, ""))
    check_count(end, where)
    if steps - 1 <= end <= steps:
        reading.claim(where, Always("schedules end at the last step"))
    else:
        reading.drop(where, "schedules always end at the last step")
    kind, kind_origin = reading.settings.get("training.lr_schedule.name", ("linear", ""))
    if reading.settings.get("training.lr_schedule.final", (0, ""))[0] == 1:
        _, origin = reading.settings.pop("training.lr_schedule.final")
        reading.settings["training.lr_schedule.name"] = "constant", joined(origin, kind_origin)
        return
    if "decay_ratio" not in reading.facts:
        return
    ratio, origin = reading.facts["decay_ratio"]
    if kind == "linear":
        reading.settings["training.lr_schedule.name"] = "wsd", joined(origin, kind_origin)
        reading.set("training.lr_schedule.decay", max(1, round(float(ratio) * end)), origin)
    else:
        reading.drop(origin, "a cosine always decays from the end of warm-up")


def _ranks(reading: Reading, file: str) -> None:
    """Of how many ranks: where every degree is given, their product; FSDP is over all that no other axis takes."""
    replicate, origin = reading.facts.get("replicate", (1, ""))
    shard, where = reading.facts.get("shard", (None, f"{file} (torchtitan's default: data_parallel_shard_degree=-1)"))
    if shard is None:  # all that are left
        reading.replicate(replicate, origin)
    else:
        reading.fact("ranks", replicate * shard * reading.model_ranks(), joined(origin, where))
    if (shard is None or shard > 1) and "zero" not in reading.facts:
        stages = reading.settings.get("layout.pp", (1, ""))[0]  # in a pipeline, weights stay gathered by default
        reading.fact("zero", 2 if stages > 1 else 3, reading.facts.get("all shard", (None, where))[1])
    elif shard == 1 and "layout.cp" in reading.settings:  # FSDP is over the ranks that share a sequence, too
        reading.facts.setdefault("zero", (3, reading.settings["layout.cp"][1]))
    elif shard == 1 and "zero" in reading.facts:
        reading.claim(reading.facts.pop("zero")[1], Always("nothing is sharded that could be gathered"))
