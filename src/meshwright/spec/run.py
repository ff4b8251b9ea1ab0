"""Runs: the recipe as an object, and with every default resolved."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError, field_validator, model_validator

from meshwright.spec.asynchronous import run_problems
from meshwright.spec.base import Spec
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.data import DataSpec
from meshwright.spec.document import dotted
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.guards import GuardSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.plugins import PluginSpec, known_plugins
from meshwright.spec.problems import RecipeError, explain
from meshwright.spec.recompute import Policy, RecomputeSpec, layer_policies
from meshwright.spec.training import TrainingSpec

DEFAULT_GLOBAL_BATCH = 64
"""Sequences per step if a recipe gives no batch size."""


@dataclass(frozen=True)
class RecipeFile:
    """Where a recipe was read; equal recipes may come from different files."""

    path: Path | None = field(default=None, compare=False)
    """None: the recipe was not read from a file."""
    overrides: tuple[str, ...] = field(default=(), compare=False)
    """What the command line, or the caller, set besides."""
    folder: Path = field(default=Path(), compare=False)
    """Where the recipe's relative paths start."""


class Run(Spec):
    """A recipe: the model, its data, the training, and the layout of ranks."""

    model: ModelFields
    """The model: a published name, a Hugging Face directory, or a family with sizes."""
    data: DataSpec = DataSpec()
    """The training data."""
    training: TrainingSpec = TrainingSpec()
    """Batch, optimizer, schedule, precision and policies."""
    finetune: FinetuneSpec | None = None
    """Fine-tuning instead of pretraining: method full, lora, qlora or ia3."""
    layout: LayoutSpec = LayoutSpec()
    """Parallel degrees, sharding and offloading."""
    cluster: str = "local"
    """Cluster for plans and `layout: auto`: local, a name such as 8xh100 or 64xa100-80g@400Gb/s, or a file."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When to save and what to keep."""
    guards: GuardSpec = GuardSpec()
    """Faults that a run detects: spikes, diverging replicas, hung ranks, crashes."""
    device: Literal["auto", "cpu", "cuda", "cuda_shared", "xpu", "mps"] = "auto"
    """auto uses NVIDIA's and AMD's GPUs if there are any, one for each rank. cuda_shared puts several ranks on each
    GPU, to try a layout without a cluster: their messages go through host memory, which is slow. xpu: Intel's GPUs;
    mps: Apple's, with one process and without fp64. Nobody has trained on these two yet."""
    run_dir: str = "runs/run"
    """Folder that receives everything the run writes."""
    trackers: tuple[str | PluginSpec, ...] = ()
    """Receivers of the records of metrics.jsonl: tensorboard, wandb, or an entry point of the group
    meshwright.trackers. With options, as in `[{name: wandb, options: {project: small, group: rates}}]`; wandb's are
    project, group and name (default: that of the run's folder)."""
    callbacks: tuple[PluginSpec, ...] = ()
    """Callbacks of the run: shipped ones by name, or entry points of the group meshwright.callbacks."""

    _file: RecipeFile = PrivateAttr(default=RecipeFile())

    def __init__(self, **settings: Any) -> None:
        """Raises `RecipeError`, with a line for every problem."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            problems = explain(error, Run, settings)
            raise RecipeError(
                [f"{dotted(path)}: {sentence}" if path else sentence for path, sentence in problems]
            ) from None

    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]  # not for nested validation

    @property
    def file(self) -> RecipeFile:
        """Where the recipe was read."""
        return self._file

    def read_from(self, path: Path, overrides: Sequence[str]) -> "Run":
        """The same recipe, which knows its file."""
        run = self.model_copy()
        run._file = RecipeFile(path, tuple(overrides), path.resolve().parent)
        return run

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """The names of the trackers, without their options."""
        return tuple(one if isinstance(one, str) else one.name for one in self.trackers)

    def sequences_per_step(self) -> int:
        """Sequences per optimizer step over all ranks. Raises `UserError` if the tokens do not fill whole sequences."""
        tokens, length = self.training.global_batch_tokens, self.data.sequence_length
        if tokens is None:
            return self.training.global_batch or DEFAULT_GLOBAL_BATCH
        if tokens % length:
            raise UserError(
                f"training.global_batch_tokens={tokens} is not a multiple of data.sequence_length={length}; "
                f"the nearest multiple is {max(1, round(tokens / length)) * length}"
            )
        return tokens // length

    def known_steps(self) -> int | None:
        """The run's optimizer steps, those of its tokens too; None if they are in epochs, which need the data."""
        training = self.training
        if training.tokens is not None:
            return ceil(training.tokens / (self.sequences_per_step() * self.data.sequence_length))
        return None if training.epochs is not None else training.steps

    def lasting(self, steps: int) -> "Run":
        """The same recipe with its length in steps. Raises `UserError` if its schedule needs more."""
        training = self.training.model_dump(exclude_unset=True, exclude={"epochs", "tokens"}) | {"steps": steps}
        try:
            return Run.model_validate(self.model_dump(exclude_unset=True) | {"training": training})
        except ValidationError as error:
            problems = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
            raise UserError(f"training.{problems}") from error

    @model_validator(mode="after")
    def _fits_together(self) -> "Run":
        for problem in self._problems():
            raise UserError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """The reasons why settings of different sections exclude each other, in sentences."""
        training, layout, verified = self.training, self.layout, self.guards.verify_every
        if "rewind" in (training.non_finite, self.guards.spikes) and not self.checkpoint.every:
            yield "rewind returns to the last checkpoint, but none is saved; set checkpoint.every=100"
        yield from run_problems(self)
        for name in ("quantized_weights", "quantized_gradients"):
            if verified and getattr(layout, name) != "none":
                yield (
                    "guards.verify_every: one process does not communicate, so it cannot reproduce the rounding of "
                    f"layout.{name}={getattr(layout, name)}; set it to 0, or use layout.{name}=none"
                )
        if verified and training.keeps_bf16:
            yield (
                f"guards.verify_every: under {training.keeps_bf16}, rounding may look like a fault; set it to "
                "0, or keep weights and moments in fp32"
            )
        recompute = training.recompute
        selective = recompute.selective if isinstance(recompute, RecomputeSpec) else recompute == "selective"
        if layout.tiers.activations == "host" and selective:
            yield (
                "layout.offload.activations=host: the tensors that selective recomputation keeps cannot be "
                "offloaded; use training.recompute=full or none, or numbers of layers with full only"
            )
        if training.compile and training.compile_scope == "model":
            for misfit in self._whole_program_misfits():
                yield f"training.compile_scope=model with {misfit}; use compile_scope=block"
        if verified and training.dtypes.recipe:
            yield (
                f"guards.verify_every: one process on a CPU cannot compute {training.precision} products; set "
                "it to 0, or use training.precision=bf16"
            )

    def _whole_program_misfits(self) -> Iterator[str]:
        """The settings that prevent compiling the model as one program, and the reasons."""
        layout = self.layout
        if layout.pp > 1:
            yield f"layout.pp={layout.pp}: a rank computes its stages separately"
        if layout.tiers.activations == "host":
            yield "layout.offload.activations=host: activations move between blocks"
        if layout.tiers.parameters == "disk":
            yield "layout.offload.parameters=disk: weights are read between blocks"

    @field_validator("model", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("layout", mode="before")
    @classmethod
    def _word_alone(cls, value: Any) -> Any:
        return {"choose": True} if value == "auto" else value

    @field_validator("callbacks", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return tuple({"name": each} if isinstance(each, str) else each for each in value)

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, value: tuple[str | PluginSpec, ...]) -> tuple[str | PluginSpec, ...]:
        known = known_plugins("trackers")
        for one in value:
            name = one if isinstance(one, str) else one.name
            if name not in known:
                raise UserError(f"unknown tracker {name!r}; there are {' and '.join(sorted(known))}")
        return value


class ResolvedRun(Spec):
    """A run with every setting decided: the trainer's input, saved as `resolved.yaml`."""

    run: Run
    """The recipe as given, overrides applied."""
    base_dir: str = "."
    """Folder that the recipe's relative paths start from."""
    model: ModelSpec
    """Every size of the model."""
    global_batch: int
    """Sequences per optimizer step over all ranks."""
    micro_batch: int
    """Sequences per rank per forward pass."""
    accumulation: int
    """Forward passes per rank per optimizer step."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty without a pipeline."""
    reasons: dict[str, str]
    """The reason for each value that was `auto`."""
    shrunk: bool = False
    """Whether this is a small run that proves a large one's layout."""
    given: Run | None = None
    """The recipe as given, if the planner chose its layout, recomputation or offloading was added, its learning rate
    was scaled, or it names plugged-in datasets."""
    plan: dict[str, Any] | None = None
    """The planner's report at that time, as in `plan.json`."""
    command: str = ""
    """The command line that started the run."""

    @property
    def recompute(self) -> tuple[Policy, ...]:
        """The recomputation policy of every layer of the model."""
        return layer_policies(self.run.training.recompute, self.stages)

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; without a pipeline, of the whole model."""
        return self.stage_layers or (self.model.num_layers,)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.global_batch * self.run.data.sequence_length
