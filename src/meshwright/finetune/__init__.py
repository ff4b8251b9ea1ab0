"""Fine-tuning applied to a model, and adapters merged back into it."""

from meshwright.finetune.apply import apply_finetune, merged_model

__all__ = ["apply_finetune", "merged_model"]
