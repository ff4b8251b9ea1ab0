"""The one place for mixed precision: what dtype parameters, gradients and reductions have.

Under bf16 and fp16 the optimizer sees fp32 weights and gradients, and the model computes with low-precision copies. On
several ranks FSDP2 keeps both; on one process `MasterWeights` does the same without a process group.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.spec.training import TrainingSpec

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: TrainingSpec) -> torch.dtype:
    """Dtype of activations and matrix products."""
    return DTYPES[training.precision]


def stored_dtype(training: TrainingSpec) -> torch.dtype:
    """Dtype of the weights that the optimizer updates."""
    return torch.float64 if training.precision == "fp64" else torch.float32


def reduce_dtype(training: TrainingSpec) -> torch.dtype:
    """Dtype in which gradients are added up, over microbatches and ranks."""
    return DTYPES[training.reduce_dtype if training.precision in ("bf16", "fp16") else training.precision]


def build_fsdp_policy(training: TrainingSpec) -> MixedPrecisionPolicy:
    """FSDP2's policy: gather in the compute dtype, reduce gradients in `reduce_dtype`."""
    low = training.precision in ("bf16", "fp16")
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(training) if low else None,
        reduce_dtype=reduce_dtype(training) if low else None,
        cast_forward_inputs=False,
    )


class MasterWeights:
    """Full-precision weights beside a low-precision model, on one process.

    The model's parameters become low-precision copies; their gradients are added to the masters' in `reduce_dtype`
    as soon as autograd has them, so that accumulation over microbatches does not round to bf16 at each. Parameters that
    do not train have no master.
    """

    def __init__(self, model: nn.Module, training: TrainingSpec) -> None:
        self.reduce_dtype = reduce_dtype(training)
        self.parameters: dict[str, torch.Tensor] = {}
        self._copies: list[torch.Tensor] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = nn.Parameter(parameter.detach().clone())
            parameter.data = parameter.data.to(compute_dtype(training))
            self.parameters[name] = master
            self._copies.append(parameter)
            parameter.register_post_accumulate_grad_hook(self._accumulate_into(master))

    def _accumulate_into(self, master: torch.Tensor):
        def accumulate(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is None:
                master.grad = gradient.to(self.reduce_dtype).to(master.dtype)
            elif self.reduce_dtype == master.dtype:
                master.grad.add_(gradient)
            else:
                master.grad.copy_(master.grad.to(self.reduce_dtype).add_(gradient))

        return accumulate

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the model; call it after whatever changed them (optimizer step, checkpoint load)."""
        torch._foreach_copy_(self._copies, list(self.parameters.values()))
