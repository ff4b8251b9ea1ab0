"""Full-precision weights of a low-precision model, on one process; on several, FSDP2 keeps both."""

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.models.dtypes import torch_dtype
from meshwright.spec.training import TrainingSpec
from meshwright.state.store import Bucket, StateStore
from meshwright.torch_internals import copy_all_, keep_gradient_as_made


class MasterWeights(StateStore):
    """Master weights; the model's parameters become copies in `store`.

    Gradients are added to the masters' gradients in `reduce` as soon as autograd has computed them, so that
    accumulation over microbatches does not round to bf16 each time. Frozen parameters have no master.
    """

    def masters_of(self, model: nn.Module, training: TrainingSpec) -> dict[str, torch.Tensor]:
        """See `StateStore`: the model's tensors, replaced by copies in the model."""
        self.reduce_dtype = torch_dtype(training.dtypes.reduce)
        self._copies: dict[str, torch.Tensor] = {}
        masters: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = nn.Parameter(parameter.detach())
            parameter.data = self.copied(parameter.data, torch_dtype(training.dtypes.store))
            keep_gradient_as_made(parameter)
            masters[name], self._copies[name] = master, parameter
            parameter.register_post_accumulate_grad_hook(self._accumulate_into(master))
        return masters

    def copied(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The model's copy of a master."""
        return parameter.to(dtype)

    def _accumulate_into(self, master: torch.Tensor):
        def accumulate(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is None:
                master.grad = self.first_gradient(master, gradient.to(self.reduce_dtype).to(master.dtype))
                self.arrived(master)
                return
            gradient = gradient.to(master.grad.device)  # the home of offloaded gradients
            if self.reduce_dtype == master.dtype:
                master.grad.add_(gradient)
            else:
                master.grad.copy_(master.grad.to(self.reduce_dtype).add_(gradient))
            self.arrived(master)

        return accumulate

    def first_gradient(self, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor that accumulates a master's gradient; it holds the first microbatch's gradient."""
        return gradient

    def arrived(self, parameter: torch.Tensor) -> None:
        """Called when a microbatch's gradient has been added to a master's."""

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """See `StateStore`: the model's copies of the trained parameters."""
        return self._copies

    @torch.no_grad()
    def put(self, bucket: Bucket) -> None:
        copy_all_([self._copies[name] for name in bucket.parameters], list(bucket.parameters.values()))
