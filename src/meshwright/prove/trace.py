"""A trace of a model's computation: every module's activations, their gradients, and each microbatch's loss."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.models.batch import TensorBatch
from meshwright.models.head import Head
from meshwright.objectives import Objective, Sums
from meshwright.parallel import Passes
from meshwright.spec.batch import Batch
from meshwright.torch_internals import in_backward_pass, waited_for

Visit = Callable[[str, str, int, torch.Tensor], None]
"""(`forward` or `backward`, name, microbatch, activation or its gradient). Names are `MODULE` for a module's output and
`input of MODULE` for its input."""


class Tracer:
    """While entered, shows `visit` every floating-point activation [b, T, ...] of a model's modules, and its gradient.

    An activation that several modules pass on is shown once, unless `names` selects the names to show.
    """

    def __init__(self, model: nn.Module, visit: Visit, names: set[str] | None = None) -> None:
        self.model, self.visit, self.names = model, visit, names
        self._calls: Counter[str] = Counter()
        self._shown: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "Tracer":
        for name, module in self.model.named_modules():
            if name:
                self._hooks.append(module.register_forward_hook(self._watcher(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._shown.clear()

    def _watcher(self, module_name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if in_backward_pass():
                return  # recomputed in the backward pass
            microbatch = self._calls[module_name]
            self._calls[module_name] += 1
            self._show(f"input of {module_name}", microbatch, inputs[0] if inputs else None)
            self._show(module_name, microbatch, output)

        return watch

    def _show(self, name: str, microbatch: int, activation: Any) -> None:
        if not isinstance(activation, torch.Tensor) or activation.dim() < 3 or not activation.is_floating_point():
            return
        if self.names is None:
            if any(activation is shown for shown in self._shown):
                return
            self._shown = [*self._shown[-100:], activation]
        elif name not in self.names:
            return
        self.visit("forward", name, microbatch, _plain(activation))
        if activation.requires_grad:
            activation.register_hook(lambda gradient: self.visit("backward", name, microbatch, _plain(gradient)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return waited_for(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()


class Recorded(Objective):
    """An objective that records the loss and the number of terms of each microbatch."""

    def __init__(self, inner: Objective) -> None:
        self.inner = inner
        self.term, self.over, self.metrics = inner.term, inner.over, inner.metrics  # type: ignore[misc]
        self.needs_pairs = inner.needs_pairs  # type: ignore[misc]
        self.microbatches: list[tuple[torch.Tensor, int]] = []

    def count(self, batch: Batch[Any]) -> int:
        return self.inner.count(batch)

    def sums(self, hidden_BTD: torch.Tensor, head: Head, batch: TensorBatch) -> Sums:
        sums = self.inner.sums(hidden_BTD, head, batch)
        self.microbatches.append((sums.loss.detach(), self.inner.count(batch)))
        return sums

    def terms(self) -> list[tuple[float, int]]:
        """(summed loss, number of terms) of each microbatch so far."""
        return [(loss.item(), count) for loss, count in self.microbatches]


@contextmanager
def recorded(passes: Passes) -> Iterator[Recorded]:
    """Records the losses of `passes` inside the context."""
    objective = passes.objective
    passes.objective = Recorded(objective)
    try:
        yield passes.objective
    finally:
        passes.objective = objective
