"""`Names`: other systems' names for the values of one of our settings, stated once for reading and writing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.imports.claims import shown, value_at
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.run import Run


def _always(run: Run) -> bool:
    return True


def pipelined(run: Run) -> bool:
    """Whether a pipeline's schedule counts."""
    return run.layout.pp > 1


def lora(run: Run) -> bool:
    """Whether settings of adapters count."""
    return isinstance(run.finetune, LoraSpec)


@dataclass(frozen=True)
class Names:
    """Another system's names for the values of one of our settings. What has no name there cannot be written."""

    path: str
    written: Mapping[Any, Any]
    """Our value -> the name that is written. Several values may share a name, which other keys distinguish."""
    also_read: Mapping[Any, Any] = field(default_factory=dict)
    """Further names -> our value."""
    counts: Callable[[Run], bool] = _always
    """Whether the setting has an effect in a run."""

    @classmethod
    def same(cls, path: str, *values: str, counts: Callable[[Run], bool] = _always) -> "Names":
        """The names are ours."""
        return cls(path, dict(zip(values, values, strict=True)), counts=counts)

    @property
    def read(self) -> dict[Any, Any]:
        """Name -> our value."""
        assert len(set(self.written.values())) == len(self.written), f"{self.path}: two values have one name"
        return {theirs: ours for ours, theirs in self.written.items()} | dict(self.also_read)

    def write(self, value: Any) -> Any:
        """The name of our value. Raises `UserError` if it has none."""
        if value not in self.written:
            raise UserError(f"{self.path}={shown(value)}: {self.supported}")
        return self.written[value]

    @property
    def supported(self) -> str:
        """Why another value is refused."""
        return f"this export supports {', '.join(map(shown, self.written))}"

    def refused(self, run: Run) -> dict[str, str]:
        """The setting with the reason, if the run has a value without a name."""
        lacks = self.counts(run) and value_at(run, self.path) not in self.written
        return {self.path: self.supported} if lacks else {}


DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""PyTorch's names of dtypes -> ours."""
PRECISIONS = Names("training.precision", {"fp32": "float32", "bf16": "bfloat16"})
"""PyTorch's names, in systems without fp16."""
SCHEDULES = Names(
    "training.lr_schedule.name", {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
)
"""Megatron's names, which AutoModel has, too."""
FALLS = Names(
    "training.lr_schedule.name", {"cosine": "cosine", "linear": "linear", "wsd": "linear", "constant": "linear"}
)
"""Names of the fall alone, in systems where other keys say when it begins and where it ends."""
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The ending of a file -> the builder of `datasets` that reads it."""


def reader_of(path: str) -> str:
    """The builder of `datasets` that reads a file, by its ending; empty if none does."""
    bare = path.lower().removesuffix(".gz").removesuffix(".zst")
    return next((reader for ending, reader in READERS.items() if bare.endswith(ending)), "")
