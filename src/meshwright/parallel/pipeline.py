"""Pipeline parallelism: the layers of each rank, and the execution of a schedule action by action.

A rank's part of the model is a `Decoder` with fewer layers; a stage is a contiguous run of these. Sharding and every
other transformation of a model's layers apply to a part unchanged, and parameters keep their names.

`spec/schedule.py` fixes the order. Every rank runs its own list of actions, which includes sending results to the next
or the previous stage's rank. Every pipeline rank has every microbatch's tokens, labels and documents, so only the
residual stream and its gradient are sent.

Shapes: B batch, T tokens of a sequence that this rank reads, D hidden; between layers it holds T / tp of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm import collectives
from meshwright.comm.collectives import Message
from meshwright.families.split import stage_copies
from meshwright.models import Decoder
from meshwright.models.batch import TensorBatch
from meshwright.models.decoder import Read
from meshwright.objectives import Objective
from meshwright.parallel.passes import GradientSync, Passes, Scale, evaluating, scale_of
from meshwright.parallel.weight_gradients import DeferredInputs, WeightGradients, add_weight_gradients
from meshwright.spec.actions import Action, Program, Schedule, Transfer, forward_only, with_transfers
from meshwright.spec.run import ResolvedRun
from meshwright.torch_internals import local_tensor

Key = tuple[bool, int, int]
"""(forward, stage, microbatch): a stage's output or the gradient of its input."""


@dataclass(frozen=True)
class Stages:
    """The layers of every stage, and the schedule."""

    schedule: Schedule
    layers: tuple[range, ...]
    """The layers of each stage."""

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.layers) - 1


@dataclass(frozen=True)
class Link:
    """The ranks of one pipeline, and the residual stream that they send one another."""

    group: dist.ProcessGroup
    """In the order of the schedule's ranks."""
    dtype: torch.dtype
    sequence_split: int
    """Ranks that share a microbatch's tokens between layers, tp."""


def plan_stages(resolved: ResolvedRun) -> Stages:
    """The stages of a run whose layout has several pipeline ranks."""
    schedule = resolved.run.layout.pipeline_schedule(
        microbatches=resolved.accumulation, base_dir=Path(resolved.base_dir)
    )
    cuts = accumulate(resolved.stage_layers, initial=0)
    return Stages(schedule, tuple(range(start, stop) for start, stop in pairwise(cuts)))


def apply_pipeline(model: Decoder, stages: Stages, rank: int) -> None:
    """Drop the modules that this rank's stages do not need."""
    model.keep_layers([stages.layers[stage] for stage in stages.schedule.stages_of(rank)])


class Pipeline(Passes):
    """Runs microbatches through the stages of all ranks of a pipeline, by a schedule.

    Gradients are summed, as everywhere; nothing is averaged over microbatches.
    """

    def __init__(
        self,
        model: Decoder,
        objective: Objective,
        stages: Stages,
        link: Link,
        sync: GradientSync,
        weights: WeightGradients | None = None,
    ) -> None:
        """This rank's part of a pipeline.

        Args:
            model: this rank's part, after all other strategies.
            sync: is called around backward passes.
            weights: defers weight gradients, where the schedule splits backward passes.
        """
        super().__init__(model, objective)
        self.stage_plan, self.link, self.sync, self.weights = stages, link, sync, weights
        self.stages, self.rank = link.group, dist.get_rank(link.group)
        self.here = stages.schedule.stages_of(self.rank)
        self.has_loss = stages.last in self.here

    def use_schedule(self, stages: Stages) -> None:
        """Use another schedule of the same stages from now on."""
        self.stage_plan = stages
        for name in ("training_program", "completing", "completes_ends"):
            if name in vars(self):
                delattr(self, name)

    @cached_property
    def training_program(self) -> Program:
        """This rank's actions in a step."""
        return with_transfers(self.stage_plan.schedule)[self.rank]

    @lru_cache(maxsize=4)  # noqa: B019  (a trainer lives as long as its process)
    def evaluation_program(self, microbatches: int) -> Program:
        """This rank's actions to evaluate a few microbatches."""
        return with_transfers(forward_only(self.stage_plan.schedule.placement, microbatches))[self.rank]

    @property
    def copied(self) -> tuple[str, ...]:
        """The parameters, as a tied embedding, of which the first and the last stage hold copies on different ranks, on
        those."""
        ends = {self.stage_plan.schedule.placement[0], self.stage_plan.schedule.placement[-1]}
        return stage_copies(self.model.spec) if len(ends) == 2 and self.rank in ends else ()

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """See `Passes`: the last stage's copy of a tied embedding."""
        return frozenset(self.copied if self.has_loss else ())

    def train(self, batches: Sequence[TensorBatch], scale: Scale) -> torch.Tensor:
        """See `Passes`; takes one batch for each microbatch of the schedule."""
        assert len(batches) == self.stage_plan.schedule.num_microbatches
        self.sync.announce(self.model.modules(), False)  # later backward passes go through the other stages' modules
        running = PipelineRun(self, self.loss, scale)
        running.run(self.training_program, enumerate(batches))
        self.sync.release()
        self.sum_copies()
        return running.loss

    @torch.no_grad()
    def read(self, batches: Iterable[TensorBatch], read: Read) -> Iterator[Any]:
        rest = iter(batches)
        with evaluating(self.model):
            while some := tuple(islice(rest, self.stage_plan.schedule.num_microbatches)):
                running = PipelineRun(self, read, None)
                running.run(self.evaluation_program(len(some)), enumerate(some))
                yield from (result for _, result in sorted(running.outputs.items()))

    def modules_of(self, stage: int) -> list[nn.Module]:
        """The modules of a backward pass through a stage; the model itself represents embeddings, norm and head."""
        ends = [self.model] if stage in self.ends else []
        blocks = (self.model.layers[str(i)] for i in self.stage_plan.layers[stage])
        return [module for block in blocks for module in block.modules()] + ends

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """This rank's stages that have an embedding or a head."""
        return tuple(stage for stage in self.here if stage in (0, self.stage_plan.last))

    @cached_property
    def completing(self) -> dict[Action, bool]:
        """For each action that completes weight gradients: whether it is the last one of its stage.

        The first and the last stage may be on one rank; then the later one completes their common modules.
        """
        actions = [action for action in self.stage_plan.schedule.ranks[self.rank] if action.kind in "BW"]
        return {action: action == [a for a in actions if a.stage == action.stage][-1] for action in actions}

    @cached_property
    def completes_ends(self) -> Action | None:
        """The last action that completes gradients of the embedding or the head on this rank."""
        return next((action for action in reversed(list(self.completing)) if action.stage in self.ends), None)

    def announce(self, action: Action, notify: Callable[[Iterable[nn.Module], bool], None]) -> None:
        """Call `notify` for the modules of an action's stage, with whether this is their last backward pass."""
        modules = self.modules_of(action.stage)
        notify([module for module in modules if module is not self.model], self.completing[action])
        if action.stage in self.ends:
            notify([self.model], action == self.completes_ends)

    def sum_copies(self) -> None:
        """Add the gradients of the two copies of a tied embedding, so that both take the same step.

        The sum of two numbers does not depend on their order, so the copies stay equal bit for bit.
        """
        placement = self.stage_plan.schedule.placement
        peer = placement[-1] if self.rank == placement[0] else placement[0]
        for name in self.copied:
            weight = self.model.get_parameter(name)
            if not weight.requires_grad:
                continue
            assert weight.grad is not None
            local = local_tensor(weight.grad)
            local += collectives.exchange(local.contiguous(), peer, self.link.group)


class PipelineRun:
    """One run of a rank's list of actions, and the results, computed or received, that are still needed."""

    def __init__(self, pipeline: Pipeline, read: Read, scale: Scale | None) -> None:
        """`read` of the last hidden states returns losses, which are multiplied by `scale` before backward passes. If
        `scale` is None, it may return anything, and there are no backward passes."""
        self.pipeline, self.read, self.scale = pipeline, read, scale
        self.loss = torch.zeros((), dtype=torch.float64)
        """The sum of the losses."""
        self.outputs: dict[int, Any] = {}
        """The result of `read` for each microbatch, if there are no backward passes."""
        self.microbatches: dict[int, TensorBatch] = {}
        self.results: dict[Key, torch.Tensor] = {}
        self.arriving: dict[Key, Message] = {}
        self.sent: list[Message] = []
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.deferred: dict[tuple[int, int], list[DeferredInputs]] = {}

    def run(self, program: Program, microbatches: Iterable[tuple[int, TensorBatch]]) -> None:
        """Run all actions."""
        self.go_on(program, microbatches)
        left = (self.results, self.graphs, self.deferred)
        assert not any(left)

    def go_on(self, program: Program, microbatches: Iterable[tuple[int, TensorBatch]]) -> None:
        """Run some actions with new `microbatches`, by their numbers."""
        self.microbatches.update(microbatches)
        do = {"F": self.forward, "B": self.backward, "I": self._backward_input, "W": self._backward_weight}
        for item in program:
            if isinstance(item, Transfer):
                self._transfer(item)
            else:
                do[item.kind](item)
        for message in self.sent:
            message.wait()
        self.sent.clear()

    def forward(self, action: Action) -> None:
        """The forward pass of a stage."""
        _, stage, m = action
        x_BTD = self._take((True, stage - 1, m)) if stage else None
        if x_BTD is not None and self.scale is not None:
            x_BTD.requires_grad_()
        pipeline, batch = self.pipeline, self.microbatches[m]
        apart = pipeline.ends and stage not in pipeline.ends
        compute = pipeline.sync.inside() if apart else pipeline.model
        y = compute(batch, self.read, layers=pipeline.stage_plan.layers[stage], x_BTD=x_BTD)
        if stage < pipeline.stage_plan.last:
            self.results[True, stage, m] = y.detach()
        elif self.scale is None:
            self.outputs[m] = y
        else:
            self.loss = self.loss.to(y.device) + y.detach()
        if self.scale is not None:
            self.graphs[stage, m] = x_BTD, y if stage < pipeline.stage_plan.last else y * scale_of(self.scale, m)

    def backward(self, action: Action) -> None:
        """The whole backward pass of a stage."""
        if self.pipeline.weights is not None:
            self._backward_input(action)
            self._backward_weight(action)
        else:
            self.pipeline.announce(action, self.pipeline.sync.announce)
            self._through(action)

    def _backward_input(self, action: Action) -> None:
        assert self.pipeline.weights is not None
        self.pipeline.sync.hold(self.pipeline.modules_of(action.stage))
        self._through(action)
        self.deferred[action.stage, action.microbatch] = self.pipeline.weights.take()

    def _backward_weight(self, action: Action) -> None:
        add_weight_gradients(self.deferred.pop((action.stage, action.microbatch)))
        self.pipeline.announce(action, self.pipeline.sync.reduce)

    def _through(self, action: Action) -> None:
        """The backward pass of a stage."""
        _, stage, m = action
        x_BTD, y = self.graphs.pop((stage, m))
        gradient = None if stage == self.pipeline.stage_plan.last else self._take((False, stage + 1, m))
        self.pipeline.model.tell_draws(self.microbatches[m])  # other microbatches' passes come before recomputation
        if y.requires_grad:  # false in a first stage without trained parameters
            torch.autograd.backward(y, gradient)
        if x_BTD is not None:
            assert x_BTD.grad is not None
            self.results[False, stage, m] = x_BTD.grad

    def _transfer(self, transfer: Transfer) -> None:
        key = transfer[:3]
        if transfer.source == self.pipeline.rank:
            tensor = self.results.pop(key).contiguous()
            self.sent = [message for message in self.sent if not message.has_gone()]
            self.sent.append(collectives.send(tensor, transfer.target, self.pipeline.link.group))
        else:
            self.results[key] = self._room(transfer.microbatch)
            self.arriving[key] = collectives.receive(self.results[key], transfer.source, self.pipeline.link.group)

    def _take(self, key: Key) -> torch.Tensor:
        """A result for this rank, once it has arrived."""
        message = self.arriving.pop(key, None)
        if message is not None:
            message.wait()
        return self.results.pop(key)

    def _room(self, microbatch: int) -> torch.Tensor:
        """An empty tensor to receive a microbatch's residual stream."""
        batch, link = self.microbatches[microbatch], self.pipeline.link
        like = torch.empty((), dtype=link.dtype, device=batch.tokens.device)
        return like.new_empty(self.pipeline.model.sent_shape(batch, like, link.sequence_split))
