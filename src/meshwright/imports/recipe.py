"""Conversion of other systems' files to one recipe, with the origin of every line in a comment."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.families import PRESETS
from meshwright.imports.claims import Has, NoEffect
from meshwright.imports.deepspeed_schedules import settle_what_no_file_gives
from meshwright.imports.experts import settle_balance
from meshwright.imports.hf_schedules import settle_shares
from meshwright.imports.llama_factory import name_sources
from meshwright.imports.llama_factory_v1 import name_v1_sources
from meshwright.imports.reading import Reading, check_count, check_number, joined
from meshwright.imports.schedules import settle_lost_schedule
from meshwright.imports.systems import read_files
from meshwright.spec.document import write_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.problems import RecipeError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run
from meshwright.terminal import printable

COUNTED = {f"layout.{axis}" for axis in ("tp", "pp", "cp")} | {
    f"training.{name}" for name in ("steps", "micro_batch", "global_batch")
}
"""Settings that others are worked out from."""
COLUMN = 44
"""Column of the origin comments."""


def import_files(
    paths: Sequence[Path], *, ranks: int | None = None, model: str | None = None, base_dir: Path | None = None
) -> tuple[str, Reading]:
    """The recipe that the files describe together, as text, and the reading; `ranks` and `model` are used if no file
    gives them, `base_dir` is the folder of a model's relative path (default: the first file's).

    Raises `UserError` for unknown files, and if the recipe is incomplete or inconsistent.
    """
    reading = Reading()
    if ranks is not None:
        reading.fact("ranks", ranks, f"--ranks {ranks}")
    if model is not None:
        reading.set("model.name", model, f"--model {model}")
    read_files(reading, paths)
    _finish(reading)
    for path, (value, origin) in reading.defaults.items():
        if path not in reading.settings:
            reading.set(path, value, origin)
    settle_what_no_file_gives(reading)
    settle_lost_schedule(reading)
    settle_shares(reading)
    _check_warmup(reading)
    settle_balance(reading, base_dir or paths[0].parent)
    _note_what_no_file_names(reading)
    recipe, files = _recipe(reading), ", ".join(path.name for path in paths)
    reading.conclude(check_recipe(recipe, reading.settings, files))
    return _comments(reading, files) + recipe, reading


def _note_what_no_file_names(reading: Reading) -> None:
    """Data, weights and tokenizer that the recipe takes by default. A job that trains on other data, or from random
    weights, is not the one of the files."""
    if reading.is_whole:
        return
    name = reading.settings.get("model.name", ("", ""))[0]
    has_files = not name or str(name).lower() not in PRESETS
    if "data.sources" not in reading.settings:
        reading.notes.append(
            "no file names data that can be read: the recipe trains on the standard library of Python; set data.sources"
        )
    if not has_files and "model.weights" not in reading.settings:
        reading.notes.append(
            f"{name} is a published size without weights: they are random; to start from trained ones, set model.name "
            "to the Hugging Face directory or the hub's id"
        )
    if not has_files and "data.tokenizer" not in reading.settings:
        reading.notes.append("no file names a tokenizer: one is trained on the data; set data.tokenizer")


def _finish(reading: Reading) -> None:
    """Settings that follow from several facts."""
    name_sources(reading)
    name_v1_sources(reading)
    ranks, origin = reading.facts.get("ranks", (None, ""))
    settings = reading.settings
    for path in COUNTED & settings.keys():
        check_count(*settings[path])
    if "training.optimizer.lr" in settings:
        check_number(*settings["training.optimizer.lr"])
    degrees = [settings.get(f"layout.{axis}", (1, ""))[0] for axis in ("tp", "pp", "cp")]
    split = degrees[0] * degrees[1] * degrees[2]
    stage, stage_origin = reading.facts.get("zero", (0, origin))
    if ranks is None and stage:
        reading.drop(stage_origin, "the number of ranks is unknown; give --ranks N")
    elif ranks is not None:
        if ranks % split:
            raise UserError(f"{origin}: tp x pp x cp = {split} does not divide {ranks} ranks; give another --ranks")
        _data_parallel(
            reading, ranks // split, stage, f"{origin}; {stage_origin}" if stage_origin != origin else origin
        )
    replicas = (ranks or split) // split
    if replicas == 1:
        reading.claim(origin, Has("layout.dp_shard", 1), Has("layout.dp_replicate", 1))
        if "layout.zero" not in settings and "zero" in reading.facts:
            reading.no_effect.append((stage_origin, NoEffect.ALONE))
    _batch(reading, replicas)
    betas = {name: reading.facts.get(name) for name in ("beta1", "beta2")}
    if any(betas.values()):
        values = [fact[0] if fact else default for fact, default in zip(betas.values(), (0.9, 0.95), strict=True)]
        reading.set("training.optimizer.betas", values, joined(*(fact[1] for fact in betas.values() if fact)))
    steps = settings.get("training.steps", (None, ""))[0]
    if "warmup_ratio" in reading.facts:
        ratio, origin = reading.facts["warmup_ratio"]
        if steps:
            reading.set("training.lr_schedule.warmup", int(ratio * steps), origin)
        else:
            reading.drop(origin, "the number of steps is unknown; set training.lr_schedule.warmup")
    if "min_lr" in reading.facts:
        _floor(reading, *reading.facts["min_lr"])
    if "decay steps" in reading.facts:
        length, origin = reading.facts["decay steps"]
        if length == steps:
            reading.claim(origin, Has("training.steps", steps))
        else:
            reading.drop(origin, "schedules always end at the last step")
    if "samples" in reading.facts:
        reading.drop(reading.facts["samples"][1], "set training.steps to the samples divided by the global batch")
    if "epochs" in reading.facts and steps:
        if (origin := reading.facts["epochs"][1]) in reading.seen:
            reading.no_effect.append((origin, NoEffect.OVERRULED))
    elif "epochs" in reading.facts:
        check_number(*reading.facts["epochs"])
        reading.set("training.epochs", *reading.facts["epochs"])


def _floor(reading: Reading, floor: float, origin: str) -> None:
    """The final rate, relative to the peak."""
    path = "training.optimizer.lr"
    lr, where = reading.settings.get(path) or reading.defaults.get(path) or (None, "")
    if lr is None:
        reading.drop(origin, "the peak rate is unknown; set training.lr_schedule.final")
        return
    check_number(lr, where)
    if lr <= 0:
        raise UserError(f"{where}: a learning rate must be above 0")
    reading.set("training.lr_schedule.final", float(f"{floor / lr:.6g}"), f"{origin}, relative to the peak {lr}")


def _check_warmup(reading: Reading) -> None:
    """Report a warm-up that is longer than the run, given or by default."""
    path = "training.lr_schedule.warmup"
    steps, (warmup, origin) = reading.settings.get("training.steps", (0, ""))[0], reading.settings.get(path, (0, ""))
    if steps and isinstance(warmup, int) and warmup > steps:
        del reading.settings[path]
        reading.drop(
            origin if str(warmup) in origin else f"{origin}: a warm-up of {warmup} steps",
            f"exceeds the {steps} steps of training; set {path}",
        )


def _data_parallel(reading: Reading, replicas: int, stage: int, origin: str) -> None:
    shard = reading.known("shard") or replicas
    if stage and replicas % shard:
        where = reading.facts["shard"][1]
        raise UserError(f"{where}: {shard} does not divide {replicas} data-parallel ranks; give another --ranks")
    if replicas == 1:
        if (
            stage and reading.settings.get("layout.cp", (1, ""))[0] > 1
        ):  # state is sharded over the ranks that share a sequence, too
            reading.set("layout.zero", stage, origin)
        return
    if not stage:
        reading.set("layout.dp_replicate", replicas, origin)
        return
    where = reading.facts.get("shard", (0, ""))[1]
    reading.set("layout.dp_shard", shard, joined(origin, where))
    reading.set("layout.zero", stage, origin)
    if shard < replicas:
        reading.set("layout.dp_replicate", replicas // shard, where)


def _batch(reading: Reading, replicas: int) -> None:
    """The global batch from micro batch, accumulation and ranks, if no file gives it."""
    settings = reading.settings
    micro, origin = settings.get("training.micro_batch", (None, ""))
    accumulation, accumulation_origin = reading.facts.get("accumulation", (None, ""))
    if "accumulation of all ranks" in reading.facts:
        whole, accumulation_origin = reading.facts["accumulation of all ranks"]
        if whole % replicas:
            reading.drop(accumulation_origin, f"{replicas} data-parallel ranks do not divide {whole} microbatches")
            return
        accumulation = whole // replicas
    if micro is None and accumulation is not None:
        _micro_batch(reading, replicas, accumulation, accumulation_origin)
    elif micro is not None and not settings.keys() & {"training.global_batch", "training.global_batch_tokens"}:
        made = micro * (accumulation or 1) * replicas
        reading.set(
            "training.global_batch",
            made,
            f"{origin}; {accumulation_origin or 'no accumulation'}; {replicas} data-parallel ranks",
        )
    elif micro is not None and accumulation is not None and "training.global_batch" in settings:
        batch = settings["training.global_batch"]
        if batch[0] == micro * accumulation * replicas:
            reading.claim(accumulation_origin, Has("training.global_batch", micro * accumulation * replicas))
        else:
            reading.drop(
                accumulation_origin,
                (f"{batch[1]} with micro batch {micro} and {replicas} data-parallel ranks gives another accumulation"),
            )


def _micro_batch(reading: Reading, replicas: int, accumulation: int, origin: str) -> None:
    """The micro batch from the global batch and accumulation, if no file gives it."""
    whole, where = reading.settings.get("training.global_batch", (None, ""))
    if whole is not None and whole % (accumulation * replicas) == 0:
        made = whole // (accumulation * replicas)
        reading.set("training.micro_batch", made, f"{where}; {origin}; {replicas} data-parallel ranks")
    elif accumulation > 1:
        reading.drop(origin, "the micro batch is unknown; set training.micro_batch and training.global_batch")


def _recipe(reading: Reading) -> str:
    """The recipe as text, with the origin of every line."""
    if not any(path.startswith("model.") for path in reading.settings):
        raise UserError("no file names the model; give --model: a published name or a Hugging Face directory")
    tree: dict[str, Any] = {}
    for path, (value, origin) in reading.settings.items():
        *around, last = path.split(".")
        place = tree
        for part in around:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UserError(f"{origin}: {part} is not a section, because {place[1]} sets it")
        if last in place:
            raise UserError(f"{origin}: sets a section that has settings")
        place[last] = (value, origin)
    order = {name: number for number, name in enumerate(Run.model_fields)}
    names = sorted(tree, key=lambda name: order.get(name, len(order)))
    return "".join(f"{line}\n" for name in names for line in _lines(name, tree[name], ""))


def _comments(reading: Reading, files: str) -> str:
    """What became of the keys without a line in the recipe."""
    comments = [f"Imported from {files}"]
    comments += [f"assumed: {note}" for note in reading.notes]
    comments += [f"no counterpart: {origin}: {reason}" for origin, reason in reading.without]
    comments += [f"no effect on training: {origin}: {reason}" for origin, reason in reading.no_effect]
    comments += [f"already so: {text}" for text in reading.already_so]
    return "".join(f"# {_one_line(comment)}\n" for comment in comments)


def _lines(name: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield f"{indent}{name}:"
        for inner, content in value.items():
            yield from _lines(inner, content, f"{indent}  ")
    else:
        setting, origin = value
        entry = f"{indent}{name}: {_flow(setting)}"
        yield f"{entry:<{COLUMN}}  # {_one_line(origin)}"


def _one_line(text: str) -> str:
    """Text of a file as a comment: a line break in it would start a setting."""
    return printable(" ".join(text.split()))


def _flow(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else write_yaml([value]).strip()[1:-1]


SOURCE = "the imported recipe"
PLACE = re.compile(rf"{SOURCE}:\d+: (?:([a-z_][\w.]*): )?(.*)", flags=re.DOTALL)


def check_recipe(text: str, settings: Mapping[str, tuple[Any, str]], files: str) -> Run:
    """The imported recipe. Raises `UserError` with all its errors, each with the origin of the setting."""
    try:
        return parse_spec(text, Run, source=SOURCE)
    except RecipeError as error:
        raise UserError("\n".join(_cited(problem, settings, files) for problem in error.problems)) from error


def _cited(problem: str, settings: Mapping[str, tuple[Any, str]], files: str) -> str:
    match = PLACE.fullmatch(problem)
    if match is None:
        return problem
    setting, message = match[1] or "", match[2]
    origins = [origin for path, (_, origin) in settings.items() if _concerns(path, setting, message)]
    text = f"{setting}: {message}" if setting else message
    return f"{'; '.join(dict.fromkeys(origins)) or files}: {text}"


def _concerns(path: str, setting: str, message: str) -> bool:
    """Whether an error about a setting, or its section, is about the setting at `path`."""
    if f"{setting}.".startswith(f"{path}."):
        return True
    inside = path.removeprefix(f"{setting}.") if path.startswith(f"{setting}.") else ""
    return bool(inside) and re.search(rf"(?<![\w.]){re.escape(inside)}(?![\w.])", message) is not None
