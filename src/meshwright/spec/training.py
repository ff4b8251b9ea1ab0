"""Training settings: batch, optimizer, schedule, precision, recomputation, policies."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError
from meshwright.spec.low_precision import LowPrecisionSpec
from meshwright.spec.plugins import Pluggable, PluginSpec
from meshwright.spec.precision import NARROW, Precision, PrecisionName, ReduceName
from meshwright.spec.recompute import Policy, RecomputeSpec
from meshwright.spec.tasks import TaskSpec

MOST_WARMUP = 100
"""Steps of warm-up that are enough for a run of any length, where the recipe leaves them open."""


OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "muon"]
"""The optimizers of ours."""


class OptimizerSpec(Spec):
    """The optimizer and its constants."""

    name: Annotated[OptimizerName, Pluggable("optimizers")] = "adamw"
    """adamw (Loshchilov and Hutter, 2019); adamw_8bit, whose moments take a byte a number (Dettmers et al., 2022),
    but fp32 where tp cuts a block of 256: there it rounds less than in one process; paged_adamw, whose moments leave a
    GPU that is full (bitsandbytes; one process on an NVIDIA GPU); or muon (Jordan et al., 2024): hidden matrices by
    orthogonalised momentum, everything else, experts too, by AdamW. Or an entry point of
    the group meshwright.optimizers, made with `lr` and `options`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a plug-in."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices and embeddings only (never on norms and biases)."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Muon's peak learning rate for hidden matrices (scaled per matrix by sqrt(max(1, rows / columns)))."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's Nesterov momentum."""


ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
"""The schedules of ours."""


class LrScheduleSpec(Spec):
    """How the learning rate moves from step to step, as a factor of the optimizer's peak."""

    name: Annotated[ScheduleName, Pluggable("lr_schedules")] = "cosine"
    """cosine, linear, constant, wsd (warmup-stable-decay, Hu et al., 2024), or an entry point of the group
    meshwright.lr_schedules."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a plug-in."""
    warmup: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Steps of linear warm-up from 0. auto: a tenth of all steps, but not more than 100; none for a plug-in, which is
    the whole schedule."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Factor reached at the last step (not for constant)."""
    decay: int = Field(default=0, ge=0)
    """wsd only: steps of the linear decay at the end; 0 means a fifth of all steps."""

    def warmup_steps(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`, `auto` resolved."""
        automatic = min(MOST_WARMUP, steps // 10) if self.name in get_args(ScheduleName) else 0
        return automatic if self.warmup == "auto" else self.warmup


class EvaluationSpec(Spec):
    """Loss on held-out text, and tasks, during training."""

    every: int = Field(default=0, ge=0)
    """Evaluate every this many steps; 0 means only after the last step."""
    batches: int = Field(default=16, ge=0)
    """Global batches per evaluation; 0 switches the loss on held-out text off."""
    tasks: tuple[TaskSpec, ...] = ()
    """Tasks that the model is asked as often: names of tasks and files of questions, or sections."""


class SampleSpec(Spec):
    """What the model writes while it is trained."""

    prompts: tuple[str, ...] = Field(min_length=1)
    """Texts to continue."""
    chat: bool = False
    """Whether each prompt is a user's message, rendered by the chat template."""
    every: int = Field(default=0, ge=0)
    """Every this many steps; before the first and after the last in any case."""
    max_tokens: int = Field(default=64, ge=1)
    """New tokens at most; always the likeliest."""


class PreferenceSpec(Spec):
    """Learning from pairs of answers by direct preference optimisation (Rafailov et al., 2023)."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs that are taken to be the wrong way round (conservative DPO)."""
    reference: Literal["start", "none"] = "start"
    """What the model is held to: itself as training starts (its adapters, which add nothing then, switched off), or
    nothing."""


class TrainingSpec(Spec):
    """One training run's arithmetic. Batch sizes say their unit: `global_batch` in sequences or in tokens."""

    steps: int = Field(default=1000, ge=1, le=10**12)
    """Optimizer steps."""
    global_batch: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks (default 64 where global_batch_tokens is not given either)."""
    global_batch_tokens: int | None = Field(default=None, ge=1)
    """The same in tokens: a multiple of data.sequence_length. Give one of the two."""
    micro_batch: int | Literal["auto"] = "auto"
    """Sequences that a rank runs at a time; the rest of its share of the global batch becomes gradient accumulation.
    auto: the largest divisor whose estimated activations fit in memory."""
    precision: PrecisionName = "bf16"
    """Compute dtype. bf16 and fp16 keep fp32 master weights and optimizer state; fp16 scales its loss dynamically;
    fp64 is for proofs. fp8, mxfp8 and nvfp4 are bf16 with the products of blocks' linear layers in eight or four
    bits."""
    low_precision: LowPrecisionSpec = LowPrecisionSpec()
    """Of precision fp8, mxfp8 and nvfp4: how operands are scaled, and which layers stay in bf16."""
    reduce_dtype: ReduceName = "fp32"
    """Dtype in which gradients accumulate and are reduced over ranks under bf16 and fp16."""
    recompute: Policy | RecomputeSpec = "none"
    """Activation recomputation per block: none, selective (keeps matrix products and attention, recomputes the rest)
    or full (keeps only the block's input); or how many layers do which, as {full: 12} or {full: 4, selective: 20}."""
    compile: bool = False
    """Compile every block with torch.compile."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    lr_schedule: LrScheduleSpec = LrScheduleSpec()
    """The learning rate's schedule."""
    clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; null switches clipping off."""
    non_finite: Literal["raise", "skip", "rewind"] = "raise"
    """What to do when a loss or gradient is not finite: stop before the weights are touched, skip that step, or go back
    to the last checkpoint and pass over the batches since."""
    objective: PluginSpec | None = None
    """An objective of a user's in the place of next-token prediction: the name of an entry point of the group
    meshwright.objectives, or its name and its options."""
    preference: PreferenceSpec | None = None
    """Learn from pairs of answers (sources of the format preference) instead of predicting every token."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out evaluation."""
    samples: SampleSpec | None = None
    """Texts that the model continues now and then, printed and logged."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights, of the data's order, of dropout, and of PyTorch's own generator on every rank."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a repeated run is equal bit for bit."""

    @property
    def dtypes(self) -> Precision:
        """What `precision` and `reduce_dtype` stand for."""
        return Precision.of(self.precision, self.reduce_dtype, self.low_precision.compute)

    @property
    def product_recipe(self) -> str | None:
        """How operands of blocks' matrix products are brought to few bits; None: they are not."""
        if self.precision not in NARROW:
            return None
        return self.low_precision.recipe if self.precision == "fp8" else self.precision

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are rounded up or down at random."""
        return self.product_recipe == "nvfp4"

    @property
    def arithmetic(self) -> str:
        """What is computed in which format, in words."""
        if self.product_recipe is None:
            return self.precision
        recipe = "" if self.product_recipe == self.precision else f" ({self.product_recipe})"
        return f"{self.precision}{recipe} beside {self.low_precision.compute}"

    def computing_in(self, dtype: str) -> "TrainingSpec":
        """The same training with everything in `dtype` but what is in few bits, gradients reduced in fp32."""
        changes: dict[str, Any] = {"precision": dtype, "reduce_dtype": "fp32"}
        if self.product_recipe is not None:
            low_precision = self.low_precision.model_copy(update={"compute": dtype})
            changes |= {"precision": self.precision, "low_precision": low_precision}
        return self.model_copy(update=changes)

    def without_low_precision(self) -> "TrainingSpec":
        """The same training with all products in the dtype of everything else."""
        if self.product_recipe is None:
            return self
        changes = {"precision": self.low_precision.compute, "low_precision": LowPrecisionSpec()}
        return self.model_copy(update=changes)

    @field_validator("objective", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingSpec":
        if self.objective is not None and self.preference is not None:
            raise UserError("objective and preference both set the training loss; give one of the two")
        if self.global_batch is not None and self.global_batch_tokens is not None:
            raise UserError("global_batch and global_batch_tokens both set the batch size; give one of the two")
        low, usual = self.low_precision, LowPrecisionSpec()
        given = {name for name in LowPrecisionSpec.model_fields if getattr(low, name) != getattr(usual, name)}
        if given and self.precision not in NARROW:
            raise UserError(
                f"low_precision is of precision {', '.join(NARROW)}, not of {self.precision}; leave it out, or set "
                "precision=fp8"
            )
        if "recipe" in given and self.precision != "fp8":
            raise UserError(
                f"low_precision.recipe={low.recipe} is a recipe of fp8, and {self.precision} has its own; leave it "
                "out, or set precision=fp8"
            )
        for name in ("amax_history", "margin"):
            if name in given and self.product_recipe != "delayed":
                raise UserError(f"low_precision.{name} is of recipe=delayed alone; leave it out")
        warmup = self.lr_schedule.warmup_steps(self.steps)
        if warmup > self.steps:
            raise UserError(
                f"lr_schedule.warmup={warmup} is longer than steps={self.steps}; with warmup=auto it is a tenth of them"
            )
        return self
