"""Fine-tuning settings: which parameters train, and which adapters are added."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError

Patterns = Annotated[tuple[str, ...], Field(min_length=1)]
"""Patterns of module names: `wq`, `attention.wq` and `layers.0.*` match names of the parameter table, and `q_proj`
matches Hugging Face's."""


class FullSpec(Spec):
    """Fine-tuning of the model's own parameters: all of them, or some."""

    method: Literal["full"] = "full"
    """The parameters that train."""
    train: tuple[str, ...] = ()
    """Only the parameters of these modules train, as in [output, norm, "layers.3?"]; the others keep their values.
    Default all."""
    last_layers: int | None = Field(default=None, ge=1)
    """Train only this many last layers, with the last norm and the head (unless it is tied to the embedding)."""

    @model_validator(mode="after")
    def _said_once(self) -> "FullSpec":
        if self.train and self.last_layers is not None:
            raise UserError("train and last_layers both select the trained parameters; give one of the two")
        return self


class LoraSpec(Spec):
    """Low-rank adapters beside frozen matrices (Hu et al., "LoRA", 2021): y = W x + alpha / rank B A x."""

    method: Literal["lora", "qlora"]
    """What is trained. qlora is lora with `base: nf4`."""
    base: Literal["plain", "nf4", "int8"] = "plain"
    """Storage of the frozen matrices of linear layers: plain (in training.precision), nf4 (four bits, Dettmers et al.,
    "QLoRA", 2023) or int8 (eight bits, one scale per row). Head, embeddings, norms and experts stay plain."""
    double_quantization: bool = True
    """nf4 only: quantize the scales of its blocks to eight bits."""
    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | Patterns = "all-linear"
    """Modules that get an adapter: all-linear (every matrix of attention and dense feed-forward layers), or a list of
    patterns of names, ours or Hugging Face's, as in [wq, wv] or [q_proj, "layers.0.*"]. Also output and
    tok_embeddings."""
    ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    """Another rank for the modules of a pattern, as in {wq: 4, "layers.1*": 8}; the first matching pattern applies."""
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Another alpha for the modules of a pattern."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of A's inputs. The mask is the same on every layout."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski, "rsLoRA", 2023), so that high ranks learn as fast."""
    dora: bool = False
    """Train each row's magnitude separately from its direction (Liu et al., "DoRA", 2024)."""
    b_lr_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of B as a multiple of A's (Hayou et al., "LoRA+", 2024, who use 16)."""
    train: tuple[str, ...] = ()
    """Modules that also train in full, as in [output, tok_embeddings]; saved with the adapter."""
    start_from: str | None = None
    """PEFT adapter, or a run or checkpoint with adapters, from which training starts, relative to the recipe; default:
    new adapters."""

    @model_validator(mode="before")
    @classmethod
    def _qlora_is_lora(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # After this validator pydantic no longer parses JSON, so it would not turn lists into tuples.
        value = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        if value.get("method") != "qlora":
            return value
        if value.get("base") == "plain":
            raise UserError("method: qlora quantizes its base; set base: nf4 or int8, or method: lora")
        return {"base": "nf4", **value, "method": "lora"}


class Ia3Spec(Spec):
    """Trained factors of activations (Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning", 2022): one for each
    output of a matrix, or for each input of the last matrix of a layer (wo, w2)."""

    method: Literal["ia3"]
    """What is trained."""
    targets: Literal["auto", "all-linear"] | Patterns = "auto"
    """Modules that get factors, as for lora. auto: keys, values and the outputs of dense feed-forward layers (wk, wv,
    w2)."""
    start_from: str | None = None
    """PEFT adapter, or a run or checkpoint with adapters, from which training starts; default: all factors are one."""


FinetuneSpec = Annotated[FullSpec | LoraSpec | Ia3Spec, Field(discriminator="method")]
