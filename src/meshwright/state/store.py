"""Master weights, gradients and optimizer state of one rank: their home, and their step.

Between steps every tensor is at home: on the device, in host memory, on disk. A step goes bucket by bucket:

    for bucket in store.buckets:
        store.fetch(bucket)    from home to where the optimizer steps
        bucket.optimizers.step()
        store.put(bucket)      home again, and the new weights to the model

`StateStore` is the store whose home is the compute device. Nothing moves, and one bucket holds everything: torch's
fused optimizers take all parameters at once. A subclass that moves state overrides `move_out`, `cut`, `fetch` and
`put`. `fetch` replaces each entry of `bucket.state` by a copy on the device of the step, and may begin to read the next
bucket, `self.buckets[bucket.index + 1]`. `put` writes the copy back and puts the home tensor back in the entry.
`state/tiered.py` does so by exchanging the tensors' memory. Checkpoints read and fill homes (`tensors`), so a tensor
mapped from a file works like any other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.devices import CPU, has_streams
from meshwright.models.dtypes import torch_dtype
from meshwright.optim.build import Builder, Optimizers, build_optimizers
from meshwright.optim.clip import scale_gradients
from meshwright.spec.model import Parameter
from meshwright.spec.training import TrainingSpec
from meshwright.state.tiers import Tier


@dataclass(frozen=True)
class Bucket:
    """Parameters that are fetched, stepped and put back together."""

    index: int
    """Its index among the store's buckets, which are stepped in this order."""
    parameters: dict[str, torch.Tensor]
    """Master weights by name; their gradients are `.grad`."""
    optimizers: Optimizers
    """The optimizers of exactly these parameters."""

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name of a parameter -> its optimizer's state by key; the inner dicts are the optimizer's own."""
        return {name: self.optimizers.state_of(parameter) for name, parameter in self.parameters.items()}


class StateStore:
    """State that never moves: a single process in full precision, or FSDP2's shards on their devices."""

    def __init__(
        self,
        model: nn.Module,
        rows: Iterable[Parameter],
        training: TrainingSpec,
        build: Builder | None = None,
        *,
        tier: Tier | None = None,
    ) -> None:
        """
        Args:
            model: this rank's part, with its weights.
            rows: the trained rows of its table.
            build: see `build_optimizers`.
            tier: the home of state that a step fetches; None if state does not move.
        """
        self.begin(model, tier)
        self.parameters = self.masters_of(model, training)
        """Master weights by name, as sharded on this rank, plain or DTensor."""
        self.buckets = tuple(
            Bucket(
                index,
                {row.name: self.parameters[row.name] for row in part},
                build_optimizers(training.optimizer, part, self.parameters, build, seed=training.seed),
            )
            for index, part in enumerate(self.cut(tuple(rows)))
        )
        self.optimizers = Optimizers.joined(bucket.optimizers for bucket in self.buckets)
        """The optimizers of all buckets."""
        self.move_out(model)

    def begin(self, model: nn.Module, tier: Tier | None) -> None:
        """Prepare for the master weights."""

    def move_out(self, model: nn.Module) -> None:
        """Give all state its home, if that is not where it was made."""

    @staticmethod
    def home(device: torch.device) -> torch.device:
        """The device of master weights, for a rank that computes on `device`."""
        return device

    @staticmethod
    def offload_policy(device_type: str) -> OffloadPolicy:
        """FSDP2's policy for the home of weights and gradients."""
        return OffloadPolicy()

    @staticmethod
    def allocate(model: nn.Module, device: torch.device, tier: Tier | None) -> None:
        """Give `model`, on the meta device, memory for its weights."""
        model.to_empty(device=device)

    def masters_of(self, model: nn.Module, training: TrainingSpec) -> dict[str, torch.Tensor]:
        """The master weights of trained parameters: here the model's own parameters."""
        masters: dict[str, torch.Tensor] = {}
        masters |= {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        dtypes = training.dtypes
        if dtypes.gradient != dtypes.master:
            for master in masters.values():
                master.grad_dtype = torch_dtype(dtypes.gradient)
        return masters

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """Parameters of the model that are persistent copies of masters, by name."""
        return {}

    @property
    def in_hand(self) -> Sequence[torch.Tensor]:
        """Buffers of the state that a step has fetched."""
        return ()

    @property
    def elsewhere(self) -> Sequence[torch.Tensor]:
        """Tensors that are in files and mapped into memory."""
        return ()

    @property
    def writes_at_once(self) -> bool:
        """Whether a checkpoint is written from the state's home while training waits, not from a copy."""
        return False

    @property
    def place(self) -> str:
        """The folder of files; empty if there are none."""
        return ""

    def complaint(self) -> str | None:
        """A warning to the user about the storage, once."""
        return None

    def each_parameter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Master weights by name, for access to gradients one after another."""
        yield from self.parameters.items()

    def cut(self, rows: tuple[Parameter, ...]) -> Iterable[tuple[Parameter, ...]]:
        """The rows of each bucket, in order; here one."""
        yield rows

    def fetch(self, bucket: Bucket) -> None:
        """Copy a bucket from home to the device of its step."""

    def put(self, bucket: Bucket) -> None:
        """Write a bucket home, and copy its weights to the model's copies."""

    @torch.no_grad()
    def step(self, lr_factor: float, gradient_factor: float = 1.0) -> None:
        """Update every parameter once, with `gradient_factor` times its gradient and `lr_factor` times its peak
        learning rate."""
        self.optimizers.set_lr(lr_factor)
        for bucket in self.buckets:
            self.fetch(bucket)
            if gradient_factor != 1:
                scale_gradients(bucket.parameters.values(), gradient_factor)
            bucket.optimizers.step()
            self.put(bucket)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters to the model after a change outside a step, such as loading a checkpoint."""
        for bucket in self.buckets:
            self.fetch(bucket)
            self.put(bucket)

    def here(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Master weights and the optimizer's tensors that are on the device, by name."""
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                yield name, parameter
                for key, tensor in self.optimizers.known_state(parameter).items():
                    yield f"{key} of {name}", tensor

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizers.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights at home as checkpoints name them: `model.NAME`. Call `refresh` after filling them."""
        return {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state in a checkpoint, at home: `model.NAME` and `optimizer.NAME.KEY`."""
        tensors = {}
        for bucket in self.buckets:
            for name, state in bucket.state.items():
                tensors[f"model.{name}"] = bucket.parameters[name].detach()
                tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
        return tensors


class HostStore(StateStore):
    """State in host memory (`layout.offload: cpu`), where the optimizer steps: FSDP2 copies weights to the device and
    gradients back."""

    @staticmethod
    def home(device: torch.device) -> torch.device:
        return CPU

    @staticmethod
    def offload_policy(device_type: str) -> OffloadPolicy:
        """See `StateStore`: pinned memory, which a GPU reads while it computes."""
        return CPUOffloadPolicy(pin_memory=has_streams(torch.device(device_type)))
