"""Bad disks and networks: full and read-only file systems; two machines with a slow, lossy, interrupted or cut link.

Both need root: a tmpfs of limited size is mounted, and each machine is a network namespace with one end of a veth pair.
"""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.good import RESUME, TRAIN, Good, result_of
from attack.processes import LAST, PAIR_SLOWER, PHASES, Expected, end, job_folder, judge_last, start_pair
from attack.trial import SAID, Cell, Ended, Fate, Trial, judge, run
from meshwright.launch.status import STUCK

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MACHINES = ("meshwright-a", "meshwright-b")
LINKS = ("mw-a", "mw-b")
FAULTS = ("slow", "lossy", "interrupted", "cut")


def possible() -> str:
    """Why these attacks are impossible here; empty if they are possible."""
    missing = [tool for tool in ("ip", "tc", "mount") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "it needs root"
    return f"there is no {missing[0]}" if missing else ""


def faults() -> tuple[str, ...]:
    """The link faults that this kernel can simulate: slow and lossy links need its `netem`."""
    name = "meshwright-probe"
    _do("ip", "netns", "add", name)
    try:
        _do("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        return FAULTS
    except subprocess.CalledProcessError:
        return FAULTS[2:]
    finally:
        _do("ip", "netns", "del", name)


# ---- disks


@dataclass(frozen=True)
class Disk:
    """Runs on a file system without space, or that cannot be written."""

    good: Good
    place: Path
    name: str = "full or read-only disk"

    def cells(self) -> Sequence[Cell]:
        """Beginnings of a run by the room that the disk has."""
        return [(row, room) for row in BEGINNINGS for room in ROOM]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """A fresh or resumed run."""
        mounted = self.place / "disk"
        mounted.mkdir(exist_ok=True)
        _do("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(mounted))
        try:
            fate, said, done = self._run(cell, draw, mounted)
        finally:
            _do("umount", "-l", str(mounted))
        return Trial(self.name, seed, f"{cell[0]}, {done}", fate, said, cell)

    def _run(self, cell: Cell, draw: random.Random, mounted: Path) -> tuple[Fate, str, str]:
        attacked, words = mounted / "attacked", RESUME if cell[0] == BEGINNINGS[0] else TRAIN
        shutil.copytree(self.good.folder, attacked)
        if words is TRAIN:
            shutil.rmtree(attacked / "run")
        if cell[0] == BEGINNINGS[2]:
            shutil.rmtree(attacked / "cache")
        if ROOM[cell[1]] is None:
            done = cell[1]
            _do("mount", "-o", "remount,ro", str(mounted))
        else:
            used, room = shutil.disk_usage(mounted).used, draw.randrange(*ROOM[cell[1]])
            done = f"{room} bytes free"
            _do("mount", "-o", f"remount,size={(used + room) // 4096 * 4096 + 4096}", str(mounted))

        def make_room() -> None:
            _do("mount", "-o", "remount,rw,size=1g", str(mounted))

        # Its output goes elsewhere, because this disk is full. The last save waits for space, and gets it.
        ended = run(words, attacked, output=self.place, meanwhile=make_room)
        names = ("No space left on device", "no space left on device", "ead-only file system", "disk")
        same = ended.status == 0 and result_of(attacked) == self.good.trained
        fate, said = judge(ended, same=same, names=names)
        if fate == "named":
            make_room()
            again = run(RESUME, attacked, output=self.place)
            same = again.status == 0 and result_of(attacked) == self.good.trained
            fate, said = judge(again, same=same, names=("never",))
            said = said and f"after there was room again: {said}"
        return fate, said, done


BEGINNINGS = ("resumed", "fresh", "fresh, without a cache")
ROOM: Mapping[str, Any] = {
    "read-only": None,
    "no room": (0, 4096),
    "room for records": (4096, 300_000),
    "room for a checkpoint": (300_000, 2_500_000),
}


# ---- networks


@contextlib.contextmanager
def two_machines() -> Iterator[None]:
    """Two network namespaces, joined by one link."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _part()
    try:
        for machine in MACHINES:
            _do("ip", "netns", "add", machine)
        _do(
            "ip",
            "link",
            "add",
            LINKS[0],
            "netns",
            MACHINES[0],
            "type",
            "veth",
            "peer",
            "name",
            LINKS[1],
            "netns",
            MACHINES[1],
        )
        for machine, link, address in zip(MACHINES, LINKS, ADDRESSES, strict=True):
            _do("ip", "-n", machine, "addr", "add", f"{address}/24", "dev", link)
            for device in (link, "lo"):
                _do("ip", "-n", machine, "link", "set", device, "up")
        yield
    finally:
        _part()


@dataclass(frozen=True)
class Network:
    """Faults of the link between two machines."""

    good: Good
    place: Path
    expected: Callable[[], Expected]
    name: str = "network of two machines"

    def cells(self) -> Sequence[Cell]:
        """Faults by phase; a slow or lossy link is so all the time."""
        phases = {"slow": ("always",), "lossy": ("always",)}
        return [(fault, phase) for fault in faults() for phase in phases.get(fault, ("starting", "training"))]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One job, one fault of the link."""
        fault, phase = cell
        expected, here = self.expected(), job_folder(self.good, self.place / "attacked")
        with two_machines():
            done = _slow_down(fault, draw) if phase == "always" else fault
            jobs = start_pair(here, "first", address=ADDRESSES[0], machines=MACHINES)
            if phase != "always":
                moment = draw.uniform(*PHASES[phase]) * PAIR_SLOWER * expected.seconds
                time.sleep(moment)
                done = f"{fault} after {moment:.1f} s"
                _set_link("down")
            if fault == "interrupted":
                time.sleep(2)
                _set_link("up")
            ended = [end(job, here, f"first{rank}") for rank, job in enumerate(jobs)]
            fate, said = self._verdict(fault, ended, here, expected)
        return Trial(self.name, seed, done, fate, said, cell)

    def _verdict(self, fault: str, ended: Sequence[Ended], here: Path, expected: Expected) -> tuple[Fate, str]:
        statuses = [one.status for one in ended]
        said = "\n".join(_said(f"machine {rank}", one) for rank, one in enumerate(ended))
        if None in statuses:
            return "hang", said
        if any("Traceback (most recent call last)" in one.err for one in ended):
            return "trace", said
        if any(statuses) and not all(one.err.strip() for one in ended):
            return "vague", said
        if fault == "cut" and not set(statuses) <= {0, STUCK}:
            return "vague", f"another status than {STUCK}, which asks for a new start\n{said}"
        if any(statuses):
            _set_link("up")
            jobs = start_pair(here, "again", address=ADDRESSES[0], machines=MACHINES)
            again = [end(job, here, f"again{rank}") for rank, job in enumerate(jobs)]
            fate, more = judge_last(again, here, expected)
            return fate, more and f"{said}\n{more}"
        same = result_of(here, "job", LAST) == expected.result
        return ("survived", "") if same else ("silent", f"another result\n{said}")


def _slow_down(fault: str, draw: random.Random) -> str:
    """Make the link slow or lossy in both directions; returns a description."""
    kind = ("delay", f"{draw.choice((5, 20))}ms") if fault == "slow" else ("loss", f"{draw.choice((1, 3))}%")
    for machine, link in zip(MACHINES, LINKS, strict=True):
        _do("tc", "-n", machine, "qdisc", "add", "dev", link, "root", "netem", *kind)
    return f"{fault}: {' '.join(kind)} each way"


def _set_link(state: str) -> None:
    _do("ip", "-n", MACHINES[1], "link", "set", LINKS[1], state)


def _said(who: str, ended: Ended) -> str:
    return f"{who}: exit {ended.status}\n{ended.out[-SAID:]}{ended.err[-SAID:]}"


def _part() -> None:
    for machine in MACHINES:
        subprocess.run(["ip", "netns", "del", machine], check=False, capture_output=True)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
