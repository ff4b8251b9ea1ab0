"""NCCL's rules: what all ranks of a job send, run against each other as NCCL would run it.

- Operations of one communicator run in the order in which each rank queued them, one at a time.
- Members of a collective have queued the same kind, with the same dtype, size and root.
- A single message goes through a communicator of its two ranks, in order with the messages the other way. A batch of
  messages goes through its group's, and its messages arrive in any order.
- A queued message does not hold up the host, but what is queued after its wait waits for it. A collective is waited for
  at once: a rule stricter than FSDP2's overlap, which only removes waits, and without a wait only more can complete.
- The first use of a communicator holds up the host until all its members use it.
- What the host sends over gloo holds up the host. So does a synchronisation, until everything queued is complete.

Every operation has one counterpart, so the order in which ranks are run decides nothing, and time is linear in events.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Size = tuple[str, int]
"""Dtype and number of elements."""


@dataclass
class RankEvent:
    """One action of a rank, in words that are the same for all ranks with its part of the work."""

    what: str
    """The kind of a collective, `send`, `receive`, `batch`, `wait` or `synchronize`."""
    place: str
    """`file:line`; a file of this package by its path there."""
    group: str = ""
    """The name of a process group of the rank."""
    size: Size = ("", 0)
    peers: list[tuple[str, int, Size]] = field(default_factory=list)
    """Of messages: send or receive, how many places the other rank comes later in the group, size."""
    rows: tuple[list[int], list[int]] | None = None
    """Of an all-to-all of runs of rows: how many come from each member, and go to each."""
    of: int = -1
    """Of a wait: the index of the message that is waited for."""
    host: bool = False
    """Whether it travels over gloo."""


@dataclass
class RankRecord:
    """What a rank does, in order."""

    events: list[RankEvent]
    groups: dict[str, tuple[int, ...]]
    """The ranks of its process groups, in order, by the groups' names."""


@dataclass(frozen=True)
class _Queue:
    """A communicator."""

    group: str
    members: tuple[int, ...]
    joined: set[int] = field(default_factory=set)
    """The members that have used it."""
    meeting: dict[int, RankEvent] = field(default_factory=dict)
    """The members whose turn has come to the same collective."""
    posted: dict[tuple[int, int], deque[tuple[str, int, RankEvent, Size]]] = field(default_factory=dict)
    """(source, target) -> halves of messages whose turn has come: send or receive, its number, its event, its size."""
    lines: dict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """The numbers of each member's events, in their order."""


def check(records: Sequence[RankRecord], *, pairs: bool = True) -> list[str]:
    """What would go wrong with these records of all ranks: one mistake, or a deadlock, a line for each rank of its
    cycle; empty if nothing.

    Without `pairs`, as in a process group that is bound to its device: communicators are made at the start, and single
    messages too go through their group's.
    """
    world = _World(records, pairs=pairs)
    world.run()
    return world.mistakes or world.deadlock()


class _World:
    """All ranks, as far as they have run."""

    def __init__(self, records: Sequence[RankRecord], *, pairs: bool) -> None:
        self.records, self.pairs = records, pairs
        self.at = [0] * len(records)
        self.mistakes: list[str] = []
        self._pending: list[dict[int, _Queue]] = [{} for _ in records]
        """Of each rank, the queued events that are not complete, and where they are queued."""
        self._queued = [-1] * len(records)
        """The last event that each rank has queued."""
        self._halves: dict[tuple[int, int], int] = {}
        """(rank, number) -> messages of the event that have not arrived."""
        self._communicators: dict[tuple[str, tuple[int, ...]], _Queue] = {}
        self._of_group: list[dict[str, tuple[_Queue, int]]] = [{} for _ in records]
        self._ready = deque(range(len(records)))
        self._turns: deque[tuple[int, _Queue]] = deque()

    def run(self) -> None:
        """Let every rank go as far as it can."""
        while (self._turns or self._ready) and not self.mistakes:
            if self._turns:
                self._take_turn(*self._turns.popleft())
            else:
                self._go_on(self._ready.popleft())

    def _go_on(self, rank: int) -> None:
        events, pending = self.records[rank].events, self._pending[rank]
        while self.at[rank] < len(events):
            number = self.at[rank]
            event = events[number]
            if event.what == "wait":
                blocked = event.of in pending
            elif event.what == "synchronize":
                blocked = bool(pending)
            else:
                queue = self._enqueue(rank, number, event)
                blocked = self._is_being_made(queue, event) or (not event.peers and number in pending)
            if blocked:
                return
            self.at[rank] += 1

    def _is_being_made(self, queue: _Queue, event: RankEvent) -> bool:
        return self.pairs and not event.host and len(queue.joined) < len(queue.members)

    def _enqueue(self, rank: int, number: int, event: RankEvent) -> _Queue:
        queue = self._queue_of(rank, event)
        if number > self._queued[rank]:
            self._queued[rank] = number
            self._pending[rank][number] = queue
            if rank not in queue.joined:
                queue.joined.add(rank)
                if len(queue.joined) == len(queue.members):
                    self._ready.extend(queue.members)
            line = queue.lines[rank]
            line.append(number)
            if len(line) == 1:
                self._turns.append((rank, queue))
            while self._turns:
                self._take_turn(*self._turns.popleft())
        return queue

    def _queue_of(self, rank: int, event: RankEvent) -> _Queue:
        name = f"gloo {event.group}" if event.host else event.group
        known = self._of_group[rank]
        if name not in known:
            members = self.records[rank].groups[event.group]
            known[name] = self._communicator(name, members), members.index(rank)
        queue, _ = known[name]
        if not event.peers or event.what == "batch" or not self.pairs:
            return queue
        return self._communicator(name, tuple(sorted((rank, self.peer(rank, event, 0)))))

    def _communicator(self, name: str, members: tuple[int, ...]) -> _Queue:
        key = name, members
        if key not in self._communicators:
            self._communicators[key] = _Queue(name, members)
        return self._communicators[key]

    def peer(self, rank: int, event: RankEvent, index: int) -> int:
        """The other rank of a message."""
        queue, place = self._of_group[rank][event.group]
        return queue.members[(place + event.peers[index][1]) % len(queue.members)]

    def _take_turn(self, rank: int, queue: _Queue) -> None:
        """An event is now the first of its line."""
        number = queue.lines[rank][0]
        event = self.records[rank].events[number]
        if event.peers:
            self._halves[rank, number] = len(event.peers)
            for index in range(len(event.peers)):
                self._post(rank, number, queue, index)
            return
        queue.meeting[rank] = event
        first = next(iter(queue.meeting))
        if (event.what, event.size) != (queue.meeting[first].what, queue.meeting[first].size):
            self.mistakes.append(f"{_called(first, queue.meeting[first])}, but {_called(rank, event)}{_within(queue)}")
        elif len(queue.meeting) == len(queue.members):
            self.mistakes += _different_rows(queue)
            queue.meeting.clear()
            for member in queue.members:
                self._complete(member, queue)

    def _post(self, rank: int, number: int, queue: _Queue, index: int) -> None:
        """A half of a message meets the other half, or waits for it."""
        event = self.records[rank].events[number]
        kind, _, size = event.peers[index]
        other = self.peer(rank, event, index)
        halves = queue.posted.setdefault((rank, other) if kind == "send" else (other, rank), deque())
        if not halves or halves[0][0] == kind:
            halves.append((kind, number, event, size))
            return
        _, matched, theirs, expected = halves.popleft()
        if size != expected:
            ours, other_half = self._described(rank, event), self._described(other, theirs)
            self.mistakes.append(
                f"rank {rank}: {ours}, {_sized(size)}, but rank {other}: {other_half}, {_sized(expected)}"
            )
        for one, of in ((rank, number), (other, matched)):
            self._halves[one, of] -= 1
            if not self._halves[one, of]:
                self._complete(one, queue)

    def _complete(self, rank: int, queue: _Queue) -> None:
        line = queue.lines[rank]
        del self._pending[rank][line.popleft()]
        self._ready.append(rank)
        if line:
            self._turns.append((rank, queue))

    def deadlock(self) -> list[str]:
        """The cycle of ranks that wait for each other, or the ranks up to one that has ended; empty if all have."""
        ends = enumerate(zip(self.at, self.records, self._pending, strict=True))
        waiting = next((rank for rank, (at, one, pending) in ends if pending or at < len(one.events)), None)
        chain: dict[int, str] = {}
        while waiting is not None and waiting not in chain:
            rank = waiting
            chain[rank], waiting = self._blocked(rank)
        lines = list(chain.values())
        return lines if waiting is None else lines[list(chain).index(waiting) :]

    def _blocked(self, rank: int) -> tuple[str, int | None]:
        """What a rank waits for, and which other rank; None if it has ended."""
        pending, events, number = self._pending[rank], self.records[rank].events, self.at[rank]
        here = events[number] if number < len(events) else None
        if here is None and not pending:
            return f"rank {rank} has ended", None
        if here is not None and here.group and self._is_being_made(queue := self._queue_of(rank, here), here):
            event, others = here, [member for member in queue.members if member not in queue.joined]
        else:
            number = here.of if here is not None and here.what == "wait" else number
            queue = pending[number if number in pending else next(iter(pending))]
            number = queue.lines[rank][0]
            event = events[number]
            others = list(self._missing(rank, queue, number, event))
        at = f", at {here.place}," if here is not None and here is not event else ""
        return f"rank {rank}{at} waits for rank {others[0]}: {self._described(rank, event)}{_within(queue)}", others[0]

    def _missing(self, rank: int, queue: _Queue, number: int, event: RankEvent) -> Iterator[int]:
        """The ranks without which an event whose turn it is cannot complete."""
        if not event.peers:
            yield from (member for member in queue.members if member not in queue.meeting)
        for index, (kind, _, _) in enumerate(event.peers):
            other = self.peer(rank, event, index)
            halves = queue.posted.get((rank, other) if kind == "send" else (other, rank), ())
            if any(half[:2] == (kind, number) for half in halves):
                yield other

    def _described(self, rank: int, event: RankEvent) -> str:
        """An event with the numbers of the ranks that it names."""
        parts = [
            f"{kind} {'to' if kind == 'send' else 'from'} rank {self.peer(rank, event, index)}"
            for index, (kind, _, _) in enumerate(event.peers)
        ]
        return f"{' and '.join(parts) or event.what} at {event.place}"


def _called(rank: int, event: RankEvent) -> str:
    size = f" of {_sized(event.size)}" if event.rows is None and not event.peers else ""
    return f"rank {rank} calls {event.what}{size} at {event.place}"


def _sized(size: Size) -> str:
    return f"{size[1]} x {size[0].removeprefix('torch.')}"


def _within(queue: _Queue) -> str:
    shown = ", ".join(map(str, queue.members[:8]))
    return f" ({queue.group} of ranks {shown}{', ...' if len(queue.members) > 8 else ''})"


def _different_rows(queue: _Queue) -> Iterator[str]:
    """Members of an all-to-all that do not expect the rows that they are sent."""
    for place, (rank, event) in enumerate(sorted(queue.meeting.items())):
        if event.rows is None:
            return
        for other, (sender, theirs) in enumerate(sorted(queue.meeting.items())):
            assert theirs.rows is not None
            sent, received = theirs.rows[1][place], event.rows[0][other]
            if sent != received:
                yield f"{_called(sender, theirs)}: {sent} rows for rank {rank}, which receives {received}"
                return
