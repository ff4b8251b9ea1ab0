"""The one place that makes a model one that is fine-tuned."""

from meshwright.finetune.apply import apply_finetune

__all__ = ["apply_finetune"]
