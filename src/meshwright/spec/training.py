"""Training settings: batch, optimizer, schedule, precision, recomputation, policies."""

from math import sqrt
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError
from meshwright.spec.low_precision import CODED, LowPrecisionSpec
from meshwright.spec.plugins import Pluggable, PluginSpec
from meshwright.spec.precision import BF16, FP32, FP64, NARROW, Precision, PrecisionName, ReduceName
from meshwright.spec.recompute import Policy, RecomputeSpec
from meshwright.spec.tasks import TaskSpec

MOST_WARMUP = 100
"""Limit of the automatic number of warm-up steps."""


OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "muon"]
"""Our optimizers."""
Rounding = Literal["stochastic", "kahan", "nearest"]
"""Rounding of bf16 weights after an update."""


AttentionName = Literal["auto", "flash", "mem_efficient", "math", "cudnn", "flex", "varlen"]
"""Attention kernels."""
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
"""torch.compile's modes without CUDA graphs, because these need weights at fixed addresses and FSDP2 gathers weights
into new memory."""
CompileScope = Literal["block", "model"]
"""Unit of compilation."""


LrScaling = Literal["sqrt", "linear"]
"""How a learning rate grows with the batch."""


class OptimizerSpec(Spec):
    """The optimizer and its constants."""

    name: Annotated[OptimizerName, Pluggable("optimizers")] = "adamw"
    """adamw (Loshchilov and Hutter, 2019); adamw_8bit, with moments of one byte per number (Dettmers et al., 2022),
    which stay in fp32 where tp cuts a block of 256 and so round less than in one process; paged_adamw, whose moments
    are paged out when the GPU is full (bitsandbytes; one process on an NVIDIA GPU); or muon (Jordan et al., 2024):
    hidden matrices with orthogonalised momentum, everything else, including experts, with AdamW. Or an entry point of
    the group meshwright.optimizers, called with `lr` and `options`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a plug-in."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of AdamW's moments and Muon's momentum (fp64 under precision fp64). bf16: rounded stochastically."""
    rounding: Rounding = "stochastic"
    """Rounding of updates with master_dtype=bf16. stochastic: up or down at random, unbiased; kahan: the rounding
    error is kept in a second bf16 tensor (Zamirai et al., 2021); nearest: updates smaller than a weight's last bit
    are lost."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate. With `lr_base_batch`, the rate for a global batch of that size."""
    lr_base_batch: int | None = Field(default=None, ge=1)
    """Global batch that `lr` (and `muon_lr`) belongs to: a run with another one scales it by `lr_scaling`. null: the
    rate is used as it is."""
    lr_scaling: LrScaling = "sqrt"
    """Scaling by batch / lr_base_batch: sqrt, its square root, for Adam and its kin (Malladi et al., 2022), or linear
    (Goyal et al., 2017)."""
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

    def scaled(self, global_batch: int) -> "OptimizerSpec":
        """The optimizer with its learning rates for a global batch, and no base batch."""
        if self.lr_base_batch is None:
            return self
        ratio = global_batch / self.lr_base_batch
        match self.lr_scaling:
            case "sqrt":
                factor = sqrt(ratio)
            case "linear":
                factor = ratio
            case _:
                assert_never(self.lr_scaling)
        rates = {"lr": self.lr * factor, "muon_lr": self.muon_lr * factor}
        return self.model_copy(update={**rates, "lr_base_batch": None})


ScheduleName = Literal["cosine", "linear", "constant", "wsd", "one_cycle"]
"""Our learning-rate schedules."""


class LrScheduleSpec(Spec):
    """The learning rate over the steps, as a factor of the optimizer's peak."""

    name: Annotated[ScheduleName, Pluggable("lr_schedules")] = "cosine"
    """cosine, linear, constant, wsd (warmup-stable-decay, Hu et al., 2024), one_cycle (Smith and Topin, 2017; as
    PyTorch's OneCycleLR in two phases), or an entry point of the group meshwright.lr_schedules."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a plug-in."""
    warmup: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Steps of linear warm-up from 0 (one_cycle: of a cosine from `initial`). auto: a tenth of all steps, at most 100;
    for one_cycle three tenths; none for a plug-in, which defines the whole schedule."""
    initial: float = Field(default=0.04, ge=0, le=1)
    """one_cycle only: factor of the first step."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Factor reached at the last step (not for constant)."""
    decay: int = Field(default=0, ge=0)
    """wsd only: steps of the linear decay at the end; 0 means a fifth of all steps."""

    def warmup_steps(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`, `auto` resolved."""
        if self.warmup != "auto":
            return self.warmup
        match self.name:
            case "cosine" | "linear" | "constant" | "wsd":
                return min(MOST_WARMUP, steps // 10)
            case "one_cycle":
                return 3 * steps // 10
            case _:
                return 0  # a plug-in's

    def decay_steps(self, steps: int) -> int:
        """Steps of wsd's decay in a run of `steps`."""
        return self.decay or max(1, steps // 5)


class EvaluationSpec(Spec):
    """Loss on held-out text, and tasks, during training."""

    every: int = Field(default=0, ge=0)
    """Evaluate every this many steps; 0 means only after the last step."""
    batches: int = Field(default=16, ge=0)
    """Global batches per evaluation; 0 disables the held-out loss."""
    tasks: tuple[TaskSpec, ...] = ()
    """Tasks to evaluate at the same steps: names of tasks, files of questions, or sections."""


class SampleSpec(Spec):
    """Texts that the model generates during training."""

    prompts: tuple[str, ...] = Field(min_length=1)
    """Texts to continue."""
    chat: bool = False
    """Whether each prompt is a user's message, rendered by the chat template."""
    every: int = Field(default=0, ge=0)
    """Generate every this many steps, and always before the first and after the last."""
    max_tokens: int = Field(default=64, ge=1)
    """Maximum number of new tokens, decoded greedily."""


class PreferenceSpec(Spec):
    """Training on preference pairs by direct preference optimisation (DPO, Rafailov et al., 2023)."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels (conservative DPO)."""
    reference: Literal["start", "none"] = "start"
    """The reference: the model at the start of training, or none. (New adapters start at zero, so with adapters it is
    the base.)"""


class TrainingSpec(Spec):
    """The arithmetic of a training run. The global batch is set in sequences or in tokens."""

    steps: int = Field(default=1000, ge=1, le=10**12)
    """Optimizer steps. Set one of steps, epochs and tokens."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """Passes over the training data: this many times the samples of all sources together, rounded up to whole steps.
    They are counted when the data are prepared."""
    tokens: int | None = Field(default=None, ge=1, le=10**18)
    """Tokens through the model, padding included, rounded up to whole steps."""
    global_batch: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks (default 64, unless global_batch_tokens is set)."""
    global_batch_tokens: int | None = Field(default=None, ge=1)
    """The same in tokens: a multiple of data.sequence_length. Set one of the two."""
    micro_batch: int | Literal["auto"] = "auto"
    """Sequences that a rank runs at a time; the rest of its share of the global batch becomes gradient accumulation.
    auto: the largest divisor whose estimated activations fit in memory."""
    precision: PrecisionName = "bf16"
    """Compute dtype. bf16 and fp16 keep fp32 master weights and optimizer state; fp16 scales its loss dynamically; fp64
    is for proofs. fp8, mxfp8 and nvfp4 are bf16 in which the blocks' linear layers multiply in eight or four bits."""
    low_precision: LowPrecisionSpec = LowPrecisionSpec()
    """For precision fp8, mxfp8 and nvfp4: the scaling of operands, and the layers that stay in bf16."""
    reduce_dtype: ReduceName = "fp32"
    """Dtype in which gradients accumulate and are reduced over ranks under bf16 and fp16."""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights that the optimizer updates and checkpoints hold, if the model computes in bf16. bf16: no
    fp32 copy is kept, and optimizer.rounding sets how updates are rounded."""
    recompute: Policy | RecomputeSpec = "none"
    """Activation recomputation per block: none, selective (keeps matrix products and attention, recomputes the rest) or
    full (keeps only the block's input); or numbers of layers, as {full: 12} or {full: 4, selective: 20}."""
    compile: bool = False
    """Compile the model with torch.compile."""
    compile_scope: CompileScope = "block"
    """Unit of compilation, with compile=true. block: each block separately, so that one compilation serves all; model:
    embeddings, all blocks and the final norm as one program, whose compile time grows with the number of blocks."""
    compile_mode: CompileMode = "default"
    """torch.compile's mode, with compile=true. max-autotune-no-cudagraphs tries several kernels for each matrix
    product."""
    attention: AttentionName = "auto"
    """Attention kernel: flash, mem_efficient, math or cudnn of torch's SDPA; flex (FlexAttention); varlen (the flash
    kernel for packed documents); or auto, the fastest that supports the run. A kernel that the device lacks is
    refused."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    lr_schedule: LrScheduleSpec = LrScheduleSpec()
    """The learning rate's schedule."""
    clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; null disables clipping."""
    non_finite: Literal["raise", "skip", "rewind"] = "raise"
    """Reaction to a loss or gradient that is not finite: stop before the weights change, skip the step, or go back to
    the last checkpoint and skip the batches since."""
    objective: PluginSpec | None = None
    """Your own objective instead of next-token prediction: the name of an entry point of the group
    meshwright.objectives, or its name and options."""
    preference: PreferenceSpec | None = None
    """Train on preference pairs (sources of format preference) instead of predicting every token."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out evaluation."""
    samples: SampleSpec | None = None
    """Prompts that the model continues during training; the texts are printed and logged."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights, the data order, dropout, and PyTorch's generator on every rank."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a repeated run is bit-identical."""

    @property
    def dtypes(self) -> Precision:
        """The dtypes for `precision`, `reduce_dtype` and `master_dtype`."""
        return Precision.of(self.precision, self.reduce_dtype, self.low_precision.compute, self.master_dtype)

    @property
    def product_recipe(self) -> str | None:
        """The quantization recipe of the blocks' matrix products; None: no quantization."""
        if self.precision not in NARROW:
            return None
        return self.low_precision.recipe if self.precision == "fp8" else self.precision

    @property
    def keeps_codes(self) -> bool:
        """Whether low-precision layers save the quantized codes of their input instead of the input."""
        low, least = self.low_precision, CODED.get(self.product_recipe or "")
        return least is not None and low.saved_inputs in (least, "codes")

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are rounded stochastically."""
        return self.product_recipe == "nvfp4"

    @property
    def arithmetic(self) -> str:
        """The formats of the computation, in words."""
        recipe = "" if self.product_recipe in (self.precision, None) else f" ({self.product_recipe})"
        beside = "" if self.product_recipe is None else f" beside {self.low_precision.compute}"
        weights = f", weights kept in bf16 ({self.optimizer.rounding})" if self.master_dtype == BF16.name else ""
        moments = ", moments in bf16" if self.optimizer.state_dtype == BF16.name else ""
        return f"{self.precision}{recipe}{beside}{weights}{moments}"

    def computing_in(self, dtype: str) -> "TrainingSpec":
        """The same training with everything but low-precision products in `dtype`, and gradients reduced in fp32."""
        changes: dict[str, Any] = {"precision": dtype, "reduce_dtype": "fp32"}
        if self.product_recipe is not None:
            low_precision = self.low_precision.model_copy(update={"compute": dtype})
            changes |= {"precision": self.precision, "low_precision": low_precision}
        return self.with_wide_state().model_copy(update=changes)

    @property
    def keeps_bf16(self) -> str | None:
        """The first setting that keeps weights or moments in bf16; None if nothing is."""
        if self.master_dtype == BF16.name:
            return "training.master_dtype=bf16"
        return "training.optimizer.state_dtype=bf16" if self.optimizer.state_dtype == BF16.name else None

    def with_wide_state(self) -> "TrainingSpec":
        """The same training without bf16 in the optimizer's state and weights."""
        usual = OptimizerSpec()
        changes = {"state_dtype": usual.state_dtype, "rounding": usual.rounding}
        optimizer = self.optimizer.model_copy(update=changes)
        return self.model_copy(update={"master_dtype": FP32.name, "optimizer": optimizer})

    def without_low_precision(self) -> "TrainingSpec":
        """The same training with all products in the dtype of the other computation."""
        if self.product_recipe is None:
            return self
        changes = {"precision": self.low_precision.compute, "low_precision": LowPrecisionSpec()}
        return self.model_copy(update=changes)

    @model_serializer(mode="wrap")
    def _one_length(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default number of steps if the length is in epochs or tokens."""
        fields = write(self)
        if self.epochs is not None or self.tokens is not None:
            fields.pop("steps", None)
        return fields

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
        lengths = [name for name in ("epochs", "tokens") if getattr(self, name) is not None]
        lengths += ["steps"] * ("steps" in self.model_fields_set)
        if len(lengths) > 1:
            raise UserError(f"{' and '.join(lengths)} all set the length of the run; give one of them")
        low, usual = self.low_precision, LowPrecisionSpec()
        given = {name for name in LowPrecisionSpec.model_fields if getattr(low, name) != getattr(usual, name)}
        if given and self.precision not in NARROW:
            raise UserError(
                f"low_precision needs precision {', '.join(NARROW)}, not {self.precision}; leave it out, or set "
                "precision=fp8"
            )
        if "recipe" in given and self.precision != "fp8":
            raise UserError(
                f"low_precision.recipe={low.recipe} is a recipe of fp8, and {self.precision} has its own; leave it "
                "out, or set precision=fp8"
            )
        for name in ("amax_history", "margin"):
            if name in given and self.product_recipe != "delayed":
                raise UserError(f"low_precision.{name} only applies to recipe=delayed; leave it out")
        if low.saved_inputs == "codes" and self.product_recipe not in CODED:
            raise UserError(
                f"low_precision.saved_inputs=codes: the weight gradients of {self.product_recipe} quantize the input "
                f"again, in another direction; leave it out, or use precision=fp8 with a recipe of {', '.join(CODED)}"
            )
        self._check_bf16()
        for field in ("compile_mode", "compile_scope"):
            if (value := getattr(self, field)) != TrainingSpec.model_fields[field].default and not self.compile:
                raise UserError(f"{field}={value} only applies to compilation; set compile=true, or leave it out")
        warmup = self.lr_schedule.warmup_steps(self.steps)
        if warmup > self.steps and lengths in ([], ["steps"]):
            raise UserError(
                f"lr_schedule.warmup={warmup} exceeds steps={self.steps}; warmup=auto is a tenth of the steps"
            )
        return self

    def _check_bf16(self) -> None:
        """Raise `UserError` if weights or moments cannot be in bf16."""
        optimizer, weights = self.optimizer, self.master_dtype == BF16.name
        if weights and self.dtypes.compute != BF16:
            raise UserError(
                "master_dtype=bf16 needs a model that computes in bf16, but this one computes in "
                f"{self.dtypes.compute}; set precision=bf16, or leave it out"
            )
        if optimizer.rounding != OptimizerSpec.model_fields["rounding"].default and not weights:
            raise UserError(
                f"optimizer.rounding={optimizer.rounding} only applies to master weights in bf16, but these are in "
                f"{self.dtypes.master}; set master_dtype=bf16, or leave it out"
            )
        if not weights and optimizer.state_dtype == FP32.name:
            return
        given = "master_dtype=bf16" if weights else "optimizer.state_dtype=bf16"
        if optimizer.name not in ("adamw", "adamw_8bit", "muon"):
            raise UserError(
                f"{given} with optimizer.name={optimizer.name}, which rounds by itself; leave it out, or use adamw"
            )
        if optimizer.state_dtype == BF16.name and optimizer.name == "adamw_8bit":
            raise UserError(
                "optimizer.state_dtype=bf16 with optimizer.name=adamw_8bit, whose moments are 8-bit; use adamw"
            )
        if optimizer.state_dtype == BF16.name and self.dtypes.compute == FP64:
            raise UserError(
                "optimizer.state_dtype=bf16 with precision=fp64, which is for proofs; leave one of them out"
            )
