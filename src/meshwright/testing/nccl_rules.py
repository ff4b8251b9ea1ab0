"""NCCL's rules on a CPU: what every rank sends is recorded on gloo, and checked as NCCL would run it.

`record` notes each collective and message of this rank, with the line that made it. `check` runs the records of all
ranks against each other under these rules:

- operations of one communicator run in the order in which each rank queued them, and one at a time;
- members of a collective must have queued the same kind with the same dtype and size;
- a single message goes through a communicator of its two ranks, in order with the messages the other way; a batch of
  messages goes through the group's, and completes as a whole;
- a queued operation does not hold up the host, but what is queued after its wait waits for it;
- the first use of a communicator holds up the host until all its members use it;
- tensors of the host travel over gloo, whose operations hold up the host.

Assumed: FSDP2's collectives are waited for at once. It overlaps them, which only removes dependencies, and in the same
order on all ranks of a group. Not seen: the device of a tensor, since here all are on the CPU.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.parallel.traffic import KINDS, ranks_of
from meshwright.torch_internals import DispatchMode, leaves, process_group_of

PACKAGE = Path(__file__).resolve().parents[1]
HOST = ("comm/objects.py", "trainer/agreement.py", "trainer/step.py:accumulate")
"""Places whose tensors are the host's."""


@dataclass
class RankEvent:
    """One action of a rank."""

    what: str
    """A kind of `KINDS`, `batch`, `wait` or `host wait`."""
    place: str
    """`file:function:line` of this package."""
    communicator: str = ""
    members: tuple[int, ...] = ()
    """Its ranks."""
    size: tuple[str, int] = ("", 0)
    """Dtype and number of elements."""
    peers: list[tuple[str, int, tuple[str, int]]] = field(default_factory=list)
    """Of messages: (send or receive, rank, size) each."""
    rows: tuple[list[int], list[int]] | None = None
    """Of an all-to-all of runs of rows: how many come from each member, and go to each."""
    of: int = -1
    """Of a wait: the index of the operation that is waited for."""
    host: bool = False
    """Whether it travels over gloo."""

    def __str__(self) -> str:
        to = "".join(f" {'to' if kind == 'send' else 'from'} {rank}" for kind, rank, _ in self.peers)
        return f"{self.what}{to} at {self.place}"


@contextmanager
def record() -> Iterator[list[RankEvent]]:
    """This rank's events while the context lasts."""
    events: list[RankEvent] = []
    recorder = _Recorder(events)
    message, swap = collectives.Message.wait, collectives.Swap.wait

    def waited(original: Any) -> Any:
        def wait(self: Any) -> torch.Tensor:
            tensor = self.tensor if isinstance(self, collectives.Message) else self.received
            recorder.waits(tensor)
            return original(self)

        return wait

    with (
        mock.patch.object(collectives.Message, "wait", waited(message)),
        mock.patch.object(collectives.Swap, "wait", waited(swap)),
        recorder,
    ):
        yield events


class _Recorder(DispatchMode):
    def __init__(self, events: list[RankEvent]) -> None:
        super().__init__()
        self.events = events
        self._batch: tuple[FrameType, RankEvent, int] | None = None
        self._messages: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        result = function(*args, **(kwargs or {}))
        if namespace in ("c10d", "_c10d_functional") and name in KINDS:
            group = process_group_of(function, args, kwargs or {}) or dist.group.WORLD
            assert group is not None
            tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
            self._note(KINDS[name], group, tensors, args)
        elif namespace == "aten" and name.partition(".")[0] == "_local_scalar_dense":
            self.events.append(RankEvent("host wait", place()))
        return result

    def _note(self, kind: str, group: Any, tensors: list[torch.Tensor], args: Any) -> None:
        members, size = ranks_of(group), (str(tensors[0].dtype), tensors[0].numel())
        where = place()
        host = where.startswith(HOST)
        if kind in ("send", "receive"):
            peer = members[next(leaf for leaf in args[1:] if isinstance(leaf, int))]
            self._message(kind, peer, size, tensors[0], group, where)
            return
        name = f"{'gloo ' if host else ''}{group.group_name}"
        rows = [leaf for leaf in args if isinstance(leaf, list) and leaf and all(isinstance(one, int) for one in leaf)]
        if kind == "all-to-all" and len(rows) == 2:
            self.events.append(RankEvent(kind, where, name, members, (size[0], 0), rows=(rows[0], rows[1]), host=host))
        else:
            self.events.append(RankEvent(kind, where, name, members, size, host=host))

    def _message(
        self, kind: str, peer: int, size: tuple[str, int], tensor: torch.Tensor, group: Any, where: str
    ) -> None:
        batch = frame_of("batch_isend_irecv")
        number = len(self.events)
        if batch is not None and self._batch is not None and self._batch[0] is batch:
            _, event, number = self._batch
            event.peers.append((kind, peer, size))
        elif batch is not None:
            event = RankEvent("batch", where, group.group_name, ranks_of(group), peers=[(kind, peer, size)])
            self._batch = batch, event, number
            self.events.append(event)
        else:
            me = dist.get_rank()
            pair = tuple(sorted((me, peer)))
            self.events.append(RankEvent(kind, where, f"{group.group_name} {pair}", pair, peers=[(kind, peer, size)]))
        self._messages[tensor.data_ptr()] = number

    def waits(self, tensor: torch.Tensor) -> None:
        """A message of this tensor is waited for."""
        number = self._messages.get(tensor.data_ptr())
        if number is not None:
            self.events.append(RankEvent("wait", place(), of=number))


def frame_of(function: str) -> FrameType | None:
    """The innermost call of a function of this name."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def place() -> str:
    """`file:function:line` of the innermost call in this package, without its tests' helpers."""
    frame = inspect.currentframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.parent.name != "testing" and file.name not in OURS:
            return f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


OURS = ("torch_internals.py", "collectives.py")
"""Files whose callers are the places that matter."""


class _World:
    """All ranks' records, as far as they have run."""

    def __init__(self, records: Sequence[Sequence[RankEvent]]) -> None:
        self.records = records
        self.at = [0] * len(records)
        self.done: list[set[int]] = [set() for _ in records]
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.reached: dict[str, set[int]] = defaultdict(set)
        self.queued: list[set[int]] = [set() for _ in records]

    def current(self, rank: int) -> RankEvent | None:
        """The event at which a rank's host is; None after its last."""
        return self.records[rank][self.at[rank]] if self.at[rank] < len(self.records[rank]) else None

    def head(self, rank: int, communicator: str) -> tuple[int, RankEvent] | None:
        """The operation of a communicator whose turn it is on a rank."""
        queue = self.queues[rank, communicator]
        return (queue[0], self.records[rank][queue[0]]) if queue else None

    def advance(self, rank: int) -> bool:
        """Let a rank's host go on by one event, if it can."""
        event, number = self.current(rank), self.at[rank]
        if event is None:
            return False
        if event.communicator and number not in self.queued[rank]:
            self.queued[rank].add(number)
            self.queues[rank, event.communicator].append(number)
            self.reached[event.communicator].add(rank)
            return True
        if not self._goes_on(rank, number, event):
            return False
        self.at[rank] += 1
        return True

    def _goes_on(self, rank: int, number: int, event: RankEvent) -> bool:
        if event.what == "wait":
            return event.of in self.done[rank]
        if event.what == "host wait":
            return not any(queue for (owner, _), queue in self.queues.items() if owner == rank)
        if not self.reached[event.communicator] >= set(event.members):
            return False  # the communicator is being made
        return bool(event.peers) or number in self.done[rank]  # a collective's result is used at once

    def complete(self) -> Iterator[str]:
        """Complete every operation that can be; yields the mistakes among these."""
        for (rank, communicator), queue in list(self.queues.items()):
            if not queue:
                continue
            event = self.records[rank][queue[0]]
            others = sorted({peer for _, peer, _ in event.peers}) if event.peers else list(event.members)
            heads = {other: self.head(other, communicator) for other in {rank, *others}}
            if any(head is None for head in heads.values()):
                continue
            if event.peers and not all(_answers(rank, event, other, heads[other]) for other in others):
                continue
            if not event.peers:
                yield from _differences(heads)
            if event.what == "batch" and not self._closed(heads, communicator):
                continue
            for other, head in heads.items():
                assert head is not None
                self.queues[other, communicator].pop(0)
                self.done[other].add(head[0])
            yield ""

    def _closed(self, heads: dict[int, Any], communicator: str) -> bool:
        """Extend the heads of a batch by its peers' peers, all of which complete together."""
        waiting = list(heads)
        while waiting:
            rank = waiting.pop()
            for _, peer, _ in heads[rank][1].peers:
                head = self.head(peer, communicator)
                if head is None or not _answers(rank, heads[rank][1], peer, head):
                    return False
                if peer not in heads:
                    heads[peer] = head
                    waiting.append(peer)
        return True


def _answers(rank: int, event: RankEvent, other: int, head: Any) -> bool:
    """Whether the operation at another rank's head has the other half of each message between the two."""
    mine = sorted(("receive" if kind == "send" else "send", size) for kind, peer, size in event.peers if peer == other)
    theirs = sorted((kind, size) for kind, peer, size in head[1].peers if peer == rank)
    return mine == theirs


def _differences(heads: dict[int, Any]) -> Iterator[str]:
    """A collective that is not the same on all of its members."""
    first = min(heads)
    for rank, (_, event) in sorted(heads.items()):
        one = heads[first][1]
        if (event.what, event.size) != (one.what, one.size):
            yield f"rank {first}: {one} of {one.size}; rank {rank}: {event} of {event.size}"
            return
        for other, (_, theirs) in heads.items():
            if event.rows is None or theirs.rows is None:
                continue
            sent, received = event.rows[1][event.members.index(other)], theirs.rows[0][event.members.index(rank)]
            if sent != received:
                yield f"rank {rank} sends {sent} rows to rank {other}, which receives {received}: {event}"
                return


def check(records: Sequence[Sequence[RankEvent]]) -> list[str]:
    """What would go wrong under NCCL with these records of all ranks; empty if nothing."""
    world, mistakes = _World(records), []
    while True:
        moved = [rank for rank in range(len(records)) if world.advance(rank)]
        completed = list(world.complete())
        mistakes += [text for text in completed if text]
        if mistakes or not (moved or completed):
            break
    if mistakes:
        return mistakes
    stuck = [rank for rank in range(len(records)) if world.current(rank) is not None]
    left = [rank for rank in range(len(records)) if any(q for (owner, _), q in world.queues.items() if owner == rank)]
    return [_described(world, rank) for rank in sorted({*stuck, *left})]


def _described(world: _World, rank: int) -> str:
    """What a rank that cannot go on waits for."""
    event = world.current(rank)
    at = "its end" if event is None else str(event)
    if event is not None and event.what == "wait":
        at = f"a wait at {event.place} for {world.records[rank][event.of]}"
    queue = [world.records[rank][q[0]] for (owner, _), q in world.queues.items() if owner == rank and q]
    first = "; ".join(map(str, queue))
    return f"rank {rank} waits at {at}; not complete: {first or 'nothing'}"
