"""The `Engine` interface: translation of a recipe, setting by setting, into a program and its configuration."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from meshwright.engines.settings import Rule, Setting, settings_of
from meshwright.imports.names import Names
from meshwright.imports.program import with_recipe
from meshwright.launch.launcher import threads_per_rank
from meshwright.launch.programs import ProgramError
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("programs")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""The programs' templates, each compiled once."""


def _unknown(path: str, value: Any) -> NoReturn:
    raise UserError(f"{path}={value}: the program has no such setting")


TEMPLATES.globals["unknown"] = _unknown
"""What a template says behind its last `elif` about a value that it does not know."""

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "hybrid"]
"""Data-parallel strategy: ranks keep everything, or their share of optimizer state, gradients, parameters."""


class InexpressibleError(UserError):
    """An engine cannot express the recipe."""


@dataclass(frozen=True)
class Translation:
    """A recipe in an engine's terms."""

    engine: str
    settings: tuple[Setting, ...]
    """Every setting of the recipe, and its fate."""
    program: str
    """Name of the file that each rank runs."""
    files: Mapping[str, str]
    """Text of the program and of its configuration files, by name."""
    notes: tuple[str, ...] = ()
    """The engine's own behaviour that no setting of a recipe describes."""
    measure: str = ""
    """Text of the program that runs `program` and measures it; empty if it cannot run here."""

    @property
    def left_out(self) -> list[Setting]:
        """Requested settings that the program does not implement; they change no loss or weight."""
        return [setting for setting in self.settings if setting.fate == "left_out"]

    @property
    def lines(self) -> int:
        """Lines of program and configuration files, without blank lines and comments."""
        lines = (line.strip() for text in self.files.values() for line in text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    def write(self, folder: Path) -> Path:
        """Write the files into `folder`; returns the program's path."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder / self.program

    def write_measured(self, folder: Path) -> Path:
        """Write the files and `measure` beside them; returns its path."""
        self.write(folder)
        path = folder / "measure.py"
        path.write_text(self.measure, encoding="utf-8")
        return path


def reads_rows(data: DataSpec) -> bool:
    """Whether a program reads rows of tokens and labels, rather than pieces of one stream."""
    return data.packing != "concatenated" or data.separate_documents


def reads_places(data: DataSpec) -> bool:
    """Whether rows hold several documents, separated by their position ids."""
    return data.separate_documents and data.packing != "padded"


def strategy_of(layout: LayoutSpec) -> Strategy:
    """The data-parallel strategy of a layout."""
    if layout.data_parallel == 1:
        return "single"
    if layout.zero_stage and layout.dp_replicate > 1:
        return "hybrid"
    names: dict[int, Strategy] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    return names[layout.zero_stage]


def refused_axes(layout: LayoutSpec, *axes: str, reason: str) -> dict[str, str]:
    """The refusal of each of `axes` that the layout splits."""
    return {f"layout.{axis}": f"{reason}; set layout.{axis}=1" for axis in axes if getattr(layout, axis) > 1}


def refused_data(layout: LayoutSpec, *, reason: str) -> dict[str, str]:
    """The refusal of data parallelism."""
    return refused_axes(layout, "dp_shard" if layout.dp_shard > 1 else "dp_replicate", reason=reason)


class Engine(ABC):
    """A training engine."""

    name: ClassVar[str]
    """Its name in `--engines`."""
    about: ClassVar[str]
    """A description for people."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Modules that its program imports, each with the extra of this project that installs it."""
    oldest: ClassVar[Mapping[str, str]] = {}
    """The oldest tested versions of packages, where older ones lack something that its program uses."""
    rules: ClassVar[Mapping[str, Rule]] = {}
    """Its own rules of settings, before those of all engines."""
    choices: ClassVar[tuple[Names, ...]] = ()
    """The settings with a name as value, of which it can express the names that are listed. Others are refused."""
    checkout: ClassVar[str] = ""
    """Where to clone a program that is not a package; its program has an option --checkout for the folder."""

    gpu_only: ClassVar[str] = ""
    """What happens on a CPU to a program that is exported, but not run here; empty if it runs on CPUs."""
    reads_sources: ClassVar[bool] = False
    """Whether it reads the recipe's own model and data, and is written only, not run."""

    def remedy(self, error: ProgramError) -> str:
        """A possible cause or a remedy of a program's error; empty if none is known."""
        return ""

    def translate(self, resolved: ResolvedRun) -> Translation:
        """The recipe in this engine's terms.

        Raises `InexpressibleError` with every setting that it cannot express and that changes the training.
        """
        settings = tuple(self.settings(resolved))
        refused = [setting for setting in settings if setting.fate == "refused"]
        if refused:
            raise InexpressibleError(
                "; ".join(f"{setting.path}={setting.shown}: {setting.reason}" for setting in refused)
            )
        program, files = self.files(resolved)
        return Translation(self.name, settings, program, files, self.notes(resolved), self.measure(resolved, program))

    def settings(self, resolved: ResolvedRun) -> Iterable[Setting]:
        """Every setting of the run and its fate."""
        return settings_of(resolved, self.refused(resolved), self.leaves_out(resolved), self.rules)

    def refused(self, resolved: ResolvedRun) -> dict[str, str]:
        """Names that are not among its `choices`, and what else it `cannot` express, each with the reason."""
        by_choice = [choice.refused(resolved.run) for choice in self.choices]
        return {path: reason for each in (*by_choice, self.cannot(resolved)) for path, reason in each.items()}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Settings of this run that the engine cannot express and that change what is trained, each with the reason."""
        return {}

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """The engine's own behaviour that no setting of a recipe describes."""
        return ()

    def cannot_dump(self, resolved: ResolvedRun) -> str:
        """Why the program cannot dump whole gradients of a run; empty if it can."""
        return ""

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Settings of this run that its program lacks and that change no loss, each with the reason."""
        return {}

    def measure(self, resolved: ResolvedRun, program: str) -> str:
        """A program that runs `program`, beside it, and measures it; empty if the engine cannot run here."""
        return ""

    @abstractmethod
    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        """Name of the program, and the text of every file, of a run in which `cannot` found nothing."""


def explained(engine: Engine, error: ProgramError) -> ProgramError:
    """The error of a program, with a possible cause or a remedy."""
    known = engine.remedy(error)
    return type(error)(f"{error}; {known}") if known else error


SCHEDULES = Names.same("training.lr_schedule.name", "constant", "linear", "cosine", "wsd")
"""The schedules that the templates' `lr_factor` computes."""
DEVICES = Names.same("device", "auto", "cpu", "cuda")
NARROW = Names("training.precision", {FP32.name: False, BF16.name: True})
"""Whether a program computes in bf16."""
REDUCED = Names("training.reduce_dtype", {FP32.name: "float32", BF16.name: "bfloat16"})
"""PyTorch's name of the dtype in which gradients are reduced."""


class TemplateEngine(Engine):
    """An engine whose program is a Jinja template: one training loop for transformers' model, in the engine's API."""

    choices: ClassVar[tuple[Names, ...]] = (SCHEDULES, DEVICES, REDUCED)
    strategies: ClassVar[tuple[Strategy, ...]]
    """Its data-parallel strategies on more than one rank."""
    precisions: ClassVar[tuple[str, ...]] = (FP32.name, BF16.name)
    axes: ClassVar[tuple[str, ...]] = ()
    """The axes besides the data that its program splits."""
    recomputes: ClassVar[bool] = True
    """Whether its program can recompute activations."""
    more_transformers: ClassVar[str] = ""
    """Further names that the program imports from transformers."""

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Layouts that are not in `strategies`, and precisions that are not in `precisions`."""
        run, refusals = resolved.run, dict[str, str]()
        layout, strategy = run.layout, strategy_of(run.layout)
        for axis in ("pp", "cp", "tp", "ep"):
            if getattr(layout, axis) > 1 and axis not in self.axes:
                what = " and ".join(("the data", *self.axes)) if self.axes else "only the data"
                refusals[f"layout.{axis}"] = f"the program for {self.name} splits {what}; set layout.{axis}=1"
        if layout.tiers.words and (reason := self.cannot_offload(layout)):
            refusals["layout.offload"] = reason
        if strategy != "single" and strategy not in self.strategies:
            refusals["layout.zero"] = f"{self.name} supports {', '.join(self.strategies)}, not {layout.strategy}"
        if run.training.precision not in self.precisions:
            refusals["training.precision"] = f"the program for {self.name} supports {' and '.join(self.precisions)}"
        sharded = strategy in ("zero2", "zero3", "hybrid")
        if run.training.dtypes.narrow and run.training.reduce_dtype != FP32.name and not sharded:
            refusals["training.reduce_dtype"] = "under autocast, gradients stay in fp32; set training.reduce_dtype=fp32"
        return refusals

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Recomputation where the program has none."""
        left_out = not self.recomputes and set(resolved.recompute) != {"none"}
        return {"training.recompute": "no recomputation: the same losses, more memory"} if left_out else {}

    def needs_gpu(self, resolved: ResolvedRun) -> str:
        """Why the program refuses to start on a CPU; empty if it trains there."""
        return self.gpu_only

    def cannot_offload(self, layout: LayoutSpec) -> str:
        """Why the program cannot offload to host memory as the layout asks; empty if it can."""
        return f"the program for {self.name} does not support offloading"

    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        """The template, rendered, and `more_files`. Pipelines have a template of their own."""
        name = f"run_{self.name}_standalone.py"
        template = f"{self.name}_pipeline" if resolved.run.layout.pp > 1 else self.name
        text = TEMPLATES.get_template(f"{template}.py.jinja").render(**self.words(resolved, name))
        text = with_recipe(text, dump_recipe(resolved.run))
        return name, {name: text, **self.more_files(resolved)}

    def measure(self, resolved: ResolvedRun, program: str) -> str:
        """The template, rendered."""
        if self.needs_gpu(resolved):
            return ""
        return TEMPLATES.get_template("measure.py.jinja").render(**self.words(resolved, program))

    def more_files(self, resolved: ResolvedRun) -> dict[str, str]:
        """Configuration files."""
        return {}

    def words(self, resolved: ResolvedRun, program: str) -> dict[str, Any]:
        """The template's variables: the run and its sections, and what follows from them."""
        run, training, schedule = resolved.run, resolved.run.training, resolved.run.training.lr_schedule
        ranks, threads = run.layout.world_size, threads_per_rank(run.layout.world_size)
        start = "python" if ranks == 1 else f"OMP_NUM_THREADS={threads} torchrun --nproc-per-node {ranks}"
        warmup = schedule.warmup_steps(training.steps)
        falls = max(warmup, training.steps - schedule.decay_steps(training.steps))
        return {
            "name": self.name,
            "program": program,
            "resolved": resolved,
            "run": run,
            "training": training,
            "schedule": schedule,
            "layout": run.layout,
            "data": run.data,
            "title": f"{resolved.model.family} of {resolved.model.num_layers} layers, {run.layout.strategy}",
            "about": self.about,
            "command": f"{start} {program}",
            "more_transformers": self.more_transformers,
            "gpu_only": self.needs_gpu(resolved),
            "warmup": warmup,
            "decay_begin": falls if schedule.name == "wsd" else warmup,
            "recompute": set(resolved.recompute) == {"full"},
            "narrow": NARROW.write(training.precision),
            "reduce_dtype": REDUCED.write(training.reduce_dtype),
            "strategy": strategy_of(run.layout),
            "rows": reads_rows(run.data),
            "placed": reads_places(run.data),
            "adapters": isinstance(run.finetune, LoraSpec | Ia3Spec),
        }
