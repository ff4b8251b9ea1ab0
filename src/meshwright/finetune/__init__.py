"""The one place that makes a model one that is fine-tuned, and back."""

from meshwright.finetune.apply import apply_finetune
from meshwright.finetune.merge import merged_model

__all__ = ["apply_finetune", "merged_model"]
