"""The one place for asynchronous pipelines: steps overlap, and every backward pass has its forward pass's weights.

PipeDream-2BW (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021; after "PipeDream", 2019): the
pipeline never empties, so there is no bubble, and the optimizer steps with the gradient of the step before,

    W(t + 1) = W(t) - step(gradient of batch t - 1 at W(t - 1)),

on all stages alike. A rank keeps two versions of its weights to compute with: that of the batch whose forward passes
run, and that of the batch before, until its last backward pass. The optimizer's own weights are a third, as everywhere.

It is another training than one process's: gradients are a step late.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.models import Decoder
from meshwright.parallel.passes import Arguments, GradientSync
from meshwright.parallel.pipeline import Pass, Pipeline, Stages
from meshwright.spec.actions import Action, Program
from meshwright.spec.stream import cut_stream


def apply_pipedream(
    model: Decoder,
    stages: Stages,
    group: dist.ProcessGroup,
    replicas: DeviceMesh,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> "Pipedream":
    """Make `model`, this rank's part on the meta device, one of an asynchronous pipeline.

    Args:
        group: the ranks of one pipeline.
        replicas: the ranks that have the same stage, over which gradients are summed.
        dtypes: of computation, and of gradients while they are added up.
    """
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(weight.detach(), replicas, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=weight.requires_grad))
    return Pipedream(model, stages, group, replicas.get_group(), dtypes)


class Pipedream(Pipeline):
    """A pipeline that is never empty between two steps, unless it is drained."""

    def __init__(
        self,
        model: Decoder,
        stages: Stages,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        def nothing(*_: object) -> None:
            """There is nothing sharded to be told."""

        super().__init__(
            model,
            stages,
            group,
            dtype=dtypes[0],
            sequence_split=1,
            sync=nothing,
            hold=nothing,
            reduce=nothing,
            release=nothing,
            inside=lambda: model,
            weights=None,
        )
        self.replicas, self.dtypes = replicas, dtypes
        self.has_gradient = False
        self.stream = cut_stream(stages.schedule)
        self.under_way: _StreamPass | None = None

    @cached_property
    def versions(self) -> list["Version"]:
        """The weights of the newest batch, and those that no pass needs any more."""
        return [Version(self.model, *self.dtypes) for _ in range(2)]

    def backward(self, microbatches: Sequence[Arguments], scale: float) -> torch.Tensor:
        """See `Passes`: forward passes of these microbatches, and the backward passes that the batch before lacked."""
        size = self.stage_plan.schedule.num_microbatches
        assert len(microbatches) == size
        self.versions.reverse()
        newest, before = self.versions
        newest.refresh()
        self.has_gradient = self.under_way is not None
        if self.under_way is None:
            self.under_way, program, first = _StreamPass(self), self.stream.fill, 0
        else:
            program, first = self.stream.steady, size
        loss = self.under_way.step(program[self.rank], enumerate(microbatches, first), newest, scale)
        if self.has_gradient:
            self.under_way.renumber(size)
            self._leave_gradient(before)
        return loss

    def drain(self) -> bool:
        """See `Passes`: the backward passes that the last batch lacks."""
        under_way, self.under_way = self.under_way, None
        self.has_gradient = under_way is not None
        if under_way is not None:
            under_way.run(self.stream.drain[self.rank], ())
            self._leave_gradient(self.versions[0])
        return self.has_gradient

    @torch.no_grad()
    def losses(self, microbatches: Iterable[Arguments]) -> torch.Tensor:
        """See `Passes`; with the optimizer's weights, in the place of a version that is not needed."""
        free = self.versions[1]
        free.refresh()
        with free.used():
            return super().losses(microbatches)

    def announce(self, action: Action, sync: GradientSync) -> None:
        """Nobody waits for it: gradients are summed over replicas when a batch is done."""

    def _leave_gradient(self, version: "Version") -> None:
        """Give the optimizer's weights the gradient of a batch, summed over replicas and a tied embedding's copies."""
        version.take_gradients(self.replicas)
        self.sum_copies()


class _StreamPass(Pass):
    """What a rank has begun; every microbatch keeps the version of the weights that its forward pass had."""

    def __init__(self, pipeline: Pipedream) -> None:
        super().__init__(pipeline, 1.0)
        self.newest: Version | None = None
        self.stash: dict[int, Version] = {}

    def step(
        self, program: Program, microbatches: Iterable[tuple[int, Arguments]], newest: "Version", scale: float
    ) -> torch.Tensor:
        """Do a step's part of the stream; the sum of the losses computed in it."""
        self.newest, self.scale, self.total = newest, scale, torch.zeros((), dtype=torch.float64)
        self.go_on(program, microbatches)
        return self.total

    def forward(self, action: Action) -> None:
        """With the newest weights."""
        assert self.newest is not None
        version = self.stash[action.microbatch] = self.newest
        with version.used():
            super().forward(action)

    def backward(self, action: Action) -> None:
        """With those of the forward pass; recomputation reads them again."""
        with self.stash.pop(action.microbatch).used():
            super().backward(action)
        del self.microbatches[action.microbatch]

    def renumber(self, size: int) -> None:
        """The newest batch is now the one before: its microbatches, so far from `size` on, count from 0."""
        self.stash = {m - size: version for m, version in self.stash.items()}
        self.microbatches = {m - size: arguments for m, arguments in self.microbatches.items()}
        self.graphs = {(stage, m - size): graph for (stage, m), graph in self.graphs.items()}
        self.results = {(forward, stage, m - size): x for (forward, stage, m), x in self.results.items()}
        self.arriving = {(forward, stage, m - size): work for (forward, stage, m), work in self.arriving.items()}


class Version:
    """One set of weights to compute with, and the gradient that backward passes through it have added up."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self.places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.reduce_dtype = reduce_dtype
        self.weights = [
            nn.Parameter(torch.empty_like(_local(parameter), dtype=dtype), requires_grad=parameter.requires_grad)
            for _, _, parameter in self.places
        ]
        self.gradients: dict[int, torch.Tensor] = {}
        for index, weight in enumerate(self.weights):
            if weight.requires_grad:
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
        """Take the optimizer's weights."""
        torch._foreach_copy_([*self.weights], [_local(parameter) for _, _, parameter in self.places])

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model computes with this version."""
        for (module, name, _), weight in zip(self.places, self.weights, strict=True):
            module._parameters[name] = weight
        try:
            yield
        finally:
            for module, name, parameter in self.places:
                module._parameters[name] = parameter

    @torch.no_grad()
    def take_gradients(self, replicas: dist.ProcessGroup) -> None:
        """Move the gradient to the optimizer's weights, summed over `replicas`."""
        for index, gradient in self.gradients.items():
            parameter = self.places[index][2]
            assert isinstance(parameter, DTensor)
            if replicas.size() > 1:
                dist.all_reduce(gradient, group=replicas)
            whole = gradient.to(parameter.dtype)
            parameter.grad = DTensor.from_local(whole, parameter.device_mesh, parameter.placements, run_check=False)
        self.gradients.clear()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
