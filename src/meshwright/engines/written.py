"""`WrittenEngine`: a configuration of a system that does not run here, checked by importing it again."""

import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.engine import Engine, InexpressibleError
from meshwright.engines.settings import (
    Fate,
    Rule,
    Setting,
    as_in_a_recipe,
    expressed,
    leaves,
    rule_of,
    settings_of,
    without,
)
from meshwright.families.resolve import SIZES, pretrained_directory, resolve_model, starting_weights
from meshwright.imports.claims import value_at
from meshwright.imports.reading import Get
from meshwright.imports.reading import Rule as ReadingRule
from meshwright.imports.recipe import import_files
from meshwright.imports.rules import write
from meshwright.spec.data import HUB, SourceSpec
from meshwright.spec.document import write_yaml
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import LrScheduleSpec

HERE = ("device", "cluster", "data.cache_dir", "data.tokenizer_vocab")
"""Settings of the machine, and of a tokenizer that is trained."""
NO_EFFECT = "it does not affect training"


def _whole(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    """Without `finetune` everything is trained, which a system may call full fine-tuning."""
    if resolved.run.finetune is None:
        return "left_out", "the file calls this full fine-tuning: the same parameters are trained"
    return "expressed", ""


ARRANGED: Mapping[str, Rule] = {
    "finetune": _whole,
    "checkpoint": without("it saves in its own way"),
    "layout.stage_layers": without("it splits the layers into stages itself: the same losses"),
    "layout.cp_method": without("it exchanges keys and values differently: the same losses"),
    "training.compile": without("no compilation: the same losses, slower steps"),
    "layout.quantized_weights": expressed,
    "layout.quantized_gradients": expressed,
    "layout.gradient_error_feedback": expressed,
}
"""Settings that only arrange the same computation. Quantized communication is expressed, or found to be missing."""


class WrittenEngine(Engine):
    """A system that reads one configuration file. A setting is expressed if the imported file has it too."""

    reads_sources: ClassVar = True
    file: ClassVar[str]
    """The name of the file."""

    @abstractmethod
    def text(self, resolved: ResolvedRun) -> str:
        """The file, with every constant explicit, because defaults differ; unsupported settings come back different."""

    def left_to_it(self, run: Run) -> Run:
        """The recipe, without settings that the system detects itself."""
        return run

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """Text of further files, by name; our importer reads them beside the configuration."""
        return {}

    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        """The configuration, and what it refers to."""
        return self.file, {self.file: self.text(resolved), **self.more_files(resolved)}

    def settings(self, resolved: ResolvedRun) -> Iterator[Setting]:
        """Every setting: expressed if the recipe that `meshwright import` makes of the files has it, else left out
        where nothing trained depends on it, else refused."""
        cannot, own = self.refused(resolved), {**ARRANGED, **self.rules}
        try:
            imported = self._read_back(resolved)
        except UserError as error:
            if not cannot:
                raise InexpressibleError(f"{self.name}'s {self.file} cannot express this recipe: {error}") from error
            return settings_of(resolved, cannot, {}, own)
        base_dir, rules = Path(resolved.base_dir), dict(own)
        ours, theirs = self.left_to_it(decided(resolved)), dict(leaves(self.left_to_it(_plain(imported, base_dir))))
        if theirs["layout.stage_layers"] == resolved.stage_layers:  # the cut that auto has made
            theirs["layout.stage_layers"] = ours.layout.stage_layers
        for path, value in leaves(ours):
            fate, reason = rule_of(path, rules)(value, resolved)
            if path.startswith("model.") or path in HERE or (path in theirs and theirs[path] == value):
                rules[path] = expressed
            elif fate == "left_out":
                rules[path] = without(reason if path in own else f"{self.file} has no such setting; {NO_EFFECT}")
            else:
                cannot.setdefault(path, f"{self.file} can express only {_shown(theirs.get(path))}")
        for path, reason in _other_model(resolved, imported, self.file):
            cannot.setdefault(path, reason)
        return settings_of(resolved, cannot, {}, rules)

    def _read_back(self, resolved: ResolvedRun) -> Run:
        """The imported recipe."""
        _, files = self.files(resolved)
        with tempfile.TemporaryDirectory(prefix="meshwright-written-") as folder:
            paths = [Path(folder) / name for name in files]
            for path in paths:
                path.write_text(files[path.name], encoding="utf-8")
            ranks, base_dir = resolved.run.layout.world_size, Path(resolved.base_dir)
            recipe, _ = import_files(paths, ranks=ranks, base_dir=base_dir)
        return parse_spec(recipe, Run, source=self.file)


class YamlEngine(WrittenEngine):
    """A system whose file is YAML."""

    def text(self, resolved: ResolvedRun) -> str:
        """The file."""
        return write_yaml(nested(self.config(resolved)))

    @abstractmethod
    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The file's keys, which may be dotted, and values; a key whose value is None is left out."""


def written(rules: Mapping[str, ReadingRule], keys: Iterable[str], resolved: ResolvedRun) -> dict[str, Any]:
    """Keys with the values that the run has for them, by the rules with which they are read."""
    get = values_of(resolved)
    return stated({key: write(rules[key], get) for key in keys})


def values_of(resolved: ResolvedRun) -> Get:
    """Every setting's value, automatic ones resolved, and the model's sizes."""
    run = decided(resolved)

    def get(path: str) -> Any:
        section, _, name = path.partition(".")
        sizes = section == "model" and name in SIZES
        return value_at(resolved.model, name) if sizes else value_at(run, path)

    return get


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections in sections; those whose value is None are left out."""
    top: dict[str, Any] = {}
    for key, value in stated(values).items():
        section = top
        *outer, last = key.split(".")
        for part in outer:
            section = section.setdefault(part, {})
        section[last] = value
    return top


def stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def rounded(number: float) -> float:
    """The number without the last digits of a product of decimal fractions."""
    return float(f"{number:.12g}")


def tokenizer_of(resolved: ResolvedRun) -> str | None:
    """The tokenizer that the recipe names, or its model's directory; None where one would be trained."""
    run = resolved.run
    if run.data.tokenizer != "auto":
        return run.data.tokenizer
    named = run.model.name and pretrained_directory(run.model, base_dir=Path(resolved.base_dir))
    return run.model.name if named else None


def refused_model(resolved: ResolvedRun, system: str) -> dict[str, str]:
    """The refusal of a model that is no directory."""
    if (resolved.run.model.name or "").startswith((".", "/")):
        return {}
    return {"model.name": f"{system} loads a Hugging Face directory; write its path, starting with ./ or /"}


def refused_tokenizer(resolved: ResolvedRun, system: str) -> dict[str, str]:
    """The refusal of a tokenizer that would be trained."""
    return {} if tokenizer_of(resolved) else {"data.tokenizer": f"{system} loads a tokenizer; give its folder"}


def unless(value: Any, default: Any) -> Any:
    """The value; None, which is left out, where it is the default."""
    return None if value == default else value


def named_data(source: SourceSpec, path: str, subset: str, split: str | None = None) -> dict[str, Any]:
    """A source's path without the mark of the hub, its subset, and its split unless it is `train`, under these keys."""
    more = {} if split is None else {split: unless(source.split, "train")}
    return {path: source.path.removeprefix(HUB), subset: source.subset, **more}


def is_remote(source: SourceSpec) -> bool:
    """Whether a source is a data set on the hub."""
    return source.path.startswith(HUB)


def fully(resolved: ResolvedRun) -> bool:
    """Whether every layer recomputes everything."""
    return set(resolved.recompute) == {"full"}


def decided(resolved: ResolvedRun) -> Run:
    """The recipe with all resolved settings explicit."""
    training, layout = resolved.run.training, resolved.run.layout
    update: dict[str, Any] = {"micro_batch": resolved.micro_batch, "global_batch": resolved.global_batch}
    update["global_batch_tokens"] = None
    if set(resolved.recompute) <= {"full", "none"} and len(set(resolved.recompute)) == 1:
        update["recompute"] = resolved.recompute[0]
    run = resolved.run.model_copy(update={"training": training.model_copy(update=update), "layout": layout})
    return _plain(run, Path(resolved.base_dir))


def _plain(run: Run, base_dir: Path) -> Run:
    """The recipe with every unambiguous `auto` replaced by its value."""
    training, layout, data = run.training, run.layout, run.data
    training = training.model_copy(update={"lr_schedule": _plain_schedule(training.lr_schedule, training.steps)})
    ways: dict[str, Any] = {"zero": layout.zero_stage, "cp_method": layout.cp_method if layout.cp > 1 else "auto"}
    if layout.pp > 1:
        ways["stages_per_rank"] = layout.virtual_stages
    else:
        ways["schedule"] = LayoutSpec().schedule
    if data.tokenizer == "auto" and run.model.name and pretrained_directory(run.model, base_dir=base_dir):
        data = data.model_copy(update={"tokenizer": run.model.name})
    return run.model_copy(update={"training": training, "layout": layout.model_copy(update=ways), "data": data})


def _plain_schedule(schedule: LrScheduleSpec, steps: int) -> LrScheduleSpec:
    update: dict[str, Any] = {"warmup": schedule.warmup_steps(steps)}
    update["decay"] = schedule.decay_steps(steps) if schedule.name == "wsd" else 0
    if schedule.name == "constant":
        update["final"] = LrScheduleSpec().final
    return schedule.model_copy(update=update)


def _other_model(resolved: ResolvedRun, imported: Run, file: str) -> Iterator[tuple[str, str]]:
    """(setting, reason) where the imported recipe has another model, or starts from other weights."""
    base_dir = Path(resolved.base_dir)
    theirs = resolve_model(imported.model, base_dir=base_dir, vocab=resolved.run.data.tokenizer_vocab)
    for field in type(theirs).model_fields:
        ours, other = getattr(resolved.model, field), getattr(theirs, field)
        if field == "max_positions" and theirs.positions == "rope" and other >= resolved.run.data.sequence_length:
            continue  # nothing that is trained depends on it
        if ours != other:
            path = field if field in SIZES else "family"
            yield f"model.{path}", f"{file} has {field} {_shown(other)}, the model {_shown(ours)}"
    weights = starting_weights(imported.model, base_dir=base_dir)
    if weights != resolved.run.model.weights:
        yield "model.weights", f"{file} starts from {weights} weights"


def _shown(value: Any) -> str:
    return "nothing" if value is None else as_in_a_recipe(value)
