"""Engine `accelerate`: a loop of Hugging Face Accelerate."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine


class AccelerateEngine(TemplateEngine):
    """Accelerate's `Accelerator`. On a CPU its plug-ins for FSDP and DeepSpeed are ignored in silence, so the program
    has data parallelism alone."""

    name = "accelerate"
    about = "a loop of Hugging Face Accelerate"
    packages: ClassVar = {"transformers": "compare", "accelerate": "compare"}
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}
