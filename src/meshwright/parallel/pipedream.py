"""Asynchronous pipelines: steps overlap, and every backward pass uses the weights of its forward pass.

PipeDream-2BW (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021; after "PipeDream", 2019): the
pipeline never empties, so there is no bubble, and the optimizer steps with the gradient of the previous step,

    W(t + 1) = W(t) - step(gradient of batch t - 1 at W(t - 1)),

on all stages. A rank keeps two versions of the weights for computation: one for the batch in its forward passes, and
one for the previous batch until its last backward pass. The optimizer's own weights are a third copy.

Results differ from one process's: gradients are a step late.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.comm import collectives
from meshwright.models import Decoder
from meshwright.models.batch import TensorBatch
from meshwright.models.decoder import Read
from meshwright.objectives import Objective
from meshwright.parallel.passes import GradientSync, Scale
from meshwright.parallel.pipeline import Link, Pipeline, PipelineRun, Stages
from meshwright.spec.actions import Action, Program
from meshwright.spec.stream import cut_stream
from meshwright.torch_internals import copy_all_, keep_gradient_as_made, local_tensor


class Pipedream(Pipeline):
    """A pipeline that stays full between steps; only `flush` empties it."""

    late = True

    def __init__(
        self,
        model: Decoder,
        objective: Objective,
        stages: Stages,
        link: Link,
        replicas: DeviceMesh,
        reduce_dtype: torch.dtype,
    ) -> None:
        """This rank's part of an asynchronous pipeline. Makes the model's parameters DTensors on `replicas`.

        Args:
            model: this rank's part, on the meta device.
            replicas: the ranks with the same stage; gradients are summed over them.
            reduce_dtype: of gradient accumulation.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in made:
                    whole = DTensor.from_local(weight.detach(), replicas, [Replicate()], run_check=False)
                    made[weight] = nn.Parameter(whole, requires_grad=weight.requires_grad)
                module.register_parameter(name, made[weight])
        super().__init__(model, objective, stages, link, GradientSync(model))
        self.replicas, self.reduce_dtype = replicas.get_group(), reduce_dtype
        self.stream = cut_stream(stages.schedule)
        self.under_way: _StreamPass | None = None

    @cached_property
    def versions(self) -> list["Version"]:
        """The weights of the newest batch, and the version that no pass needs any longer."""
        return [Version(self.model, self.link.dtype, self.reduce_dtype) for _ in range(2)]

    def train(self, batches: Sequence[TensorBatch], scale: Scale) -> torch.Tensor:
        """See `Passes`: forward passes of these batches, and the remaining backward passes of the previous ones."""
        size = self.stage_plan.schedule.num_microbatches
        assert len(batches) == size
        self.versions.reverse()
        newest, before = self.versions
        newest.refresh()
        if self.under_way is None:
            self.under_way = _StreamPass(self)
            return self.under_way.step(self.stream.fill[self.rank], enumerate(batches), newest, scale)
        loss = self.under_way.step(self.stream.steady[self.rank], enumerate(batches, size), newest, scale)
        self.under_way.renumber(size)
        self._leave_gradient(before)
        return loss

    def flush(self) -> None:
        """See `Passes`: the remaining backward passes of the last batches."""
        assert self.under_way is not None
        self.under_way.run(self.stream.drain[self.rank], ())
        self.under_way = None
        self._leave_gradient(self.versions[0])

    @torch.no_grad()
    def read(self, batches: Iterable[TensorBatch], read: Read) -> Iterator[Any]:
        """See `Passes`; uses the optimizer's weights, in place of a version that is not needed."""
        free = self.versions[1]
        free.refresh()
        with free.used():
            yield from super().read(batches, read)

    def working_copies(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """See `Passes`: the versions, once they exist."""
        versions = self.versions if "versions" in vars(self) else []
        return {
            "weights": [weight for version in versions for weight in version.weights],
            "gradients": [gradient for version in versions for gradient in version.gradients.values()],
        }

    def announce(self, action: Action, notify: object) -> None:
        """Does nothing: gradients are summed over replicas when a batch is done."""

    def _leave_gradient(self, version: "Version") -> None:
        """Give the optimizer's weights the gradient of a batch, summed over replicas and over the copies of a tied
        embedding."""
        version.take_gradients(self.replicas)
        self.sum_copies()


class _StreamPass(PipelineRun):
    """The passes in flight on a rank; every microbatch keeps the weights of its forward pass."""

    def __init__(self, pipeline: Pipedream) -> None:
        super().__init__(pipeline, pipeline.loss, 1.0)
        self.newest: Version | None = None
        self.stash: dict[int, Version] = {}

    def step(
        self, program: Program, microbatches: Iterable[tuple[int, TensorBatch]], newest: "Version", scale: Scale
    ) -> torch.Tensor:
        """Run a step's part of the stream; returns the sum of its losses."""
        self.newest, self.scale, self.loss = newest, scale, torch.zeros((), dtype=torch.float64)
        self.go_on(program, microbatches)
        return self.loss

    def forward(self, action: Action) -> None:
        """The forward pass with the newest weights."""
        assert self.newest is not None
        version = self.stash[action.microbatch] = self.newest
        with version.used():
            super().forward(action)

    def backward(self, action: Action) -> None:
        """The backward pass with the weights of the forward pass; recomputation reads them again."""
        with self.stash.pop(action.microbatch).used():
            super().backward(action)
        del self.microbatches[action.microbatch]

    def renumber(self, size: int) -> None:
        """Make the newest batch the previous one: its microbatches, numbered from `size`, are now numbered from 0."""
        self.stash = {m - size: version for m, version in self.stash.items()}
        self.microbatches = {m - size: batch for m, batch in self.microbatches.items()}
        self.graphs = {(stage, m - size): graph for (stage, m), graph in self.graphs.items()}
        self.results = {(forward, stage, m - size): x for (forward, stage, m), x in self.results.items()}
        self.arriving = {(forward, stage, m - size): x for (forward, stage, m), x in self.arriving.items()}


class Version:
    """One version of the weights, and the gradient accumulated by its backward passes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self.places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.parameters = list(dict.fromkeys(parameter for _, _, parameter in self.places))
        """Each once, though several modules may share it."""
        self.reduce_dtype = reduce_dtype
        self.weights = [
            nn.Parameter(torch.empty_like(local_tensor(parameter), dtype=dtype), requires_grad=parameter.requires_grad)
            for parameter in self.parameters
        ]
        self.gradients: dict[int, torch.Tensor] = {}
        for index, weight in enumerate(self.weights):
            if weight.requires_grad:
                keep_gradient_as_made(weight)
                weight.register_post_accumulate_grad_hook(self._adder(index))

    def _adder(self, index: int) -> Callable[[torch.Tensor], None]:
        def add(weight: torch.Tensor) -> None:
            gradient, weight.grad = weight.grad, None
            assert gradient is not None
            if index in self.gradients:
                self.gradients[index] += gradient
            else:
                self.gradients[index] = gradient.to(self.reduce_dtype)

        return add

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the optimizer's weights."""
        copy_all_(self.weights, [local_tensor(parameter) for parameter in self.parameters])

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model computes with this version."""
        weights = dict(zip(self.parameters, self.weights, strict=True))
        for module, name, parameter in self.places:
            module.register_parameter(name, weights[parameter])
        try:
            yield
        finally:
            for module, name, parameter in self.places:
                module.register_parameter(name, parameter)

    @torch.no_grad()
    def take_gradients(self, replicas: dist.ProcessGroup) -> None:
        """Move the gradient to the optimizer's weights, summed over `replicas`."""
        for index, gradient in self.gradients.items():
            parameter = self.parameters[index]
            assert isinstance(parameter, DTensor)
            if replicas.size() > 1:
                collectives.all_reduce_(gradient, replicas)
            whole = gradient.to(parameter.dtype)
            parameter.grad = DTensor.from_local(whole, parameter.device_mesh, parameter.placements, run_check=False)
        self.gradients.clear()
