"""Engine `accelerate`: a loop of Hugging Face Accelerate."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine


class AccelerateEngine(TemplateEngine):
    """Accelerate's `Accelerator`. On a CPU its plug-ins for FSDP and DeepSpeed are silently ignored, so the program has
    only data parallelism."""

    name = "accelerate"
    about = "a loop of Hugging Face Accelerate"
    packages: ClassVar = {"transformers": "compare", "accelerate": "compare"}
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}
