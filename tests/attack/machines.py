"""Bad disks and networks: full and read-only file systems; two machines with a slow, lossy, interrupted or cut link.

Both need root: a tmpfs of limited size is mounted, and each machine is a network namespace with one end of a veth pair.
"""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from attack.good import RESUME, TRAIN, Good, result_of
from attack.processes import COLD, LAST, Expected, end, job_folder, start
from attack.trial import SAID, Ended, Trial, judge, run

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MACHINES = ("meshwright-a", "meshwright-b")
LINKS = ("mw-a", "mw-b")
MEETING = {"PET_NNODES": "2", "PET_MASTER_ADDR": ADDRESSES[0], "PET_MASTER_PORT": "29577"}
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


def disk_trial(good: Good, folder: Path, seed: str) -> Trial:
    """A fresh or resumed run on a file system with little space."""
    draw = random.Random(seed)
    mounted = folder / "disk"
    mounted.mkdir(exist_ok=True)
    size = sum(path.stat().st_size for path in good.folder.rglob("*") if path.is_file())
    _do("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(mounted))
    try:
        attacked = mounted / "attacked"
        shutil.copytree(good.folder, attacked)
        words = draw.choice((TRAIN, RESUME))
        if words is TRAIN:
            shutil.rmtree(attacked / "run")
            if draw.random() < 0.5:
                shutil.rmtree(attacked / "cache")
        if draw.random() < 0.15:
            done = "read-only"
            _do("mount", "-o", "remount,ro", str(mounted))
        else:
            used = shutil.disk_usage(mounted).used
            room = draw.randrange(0, 2_500_000)
            done = f"{room} bytes free"
            _do("mount", "-o", f"remount,size={(used + room) // 4096 * 4096 + 4096}", str(mounted))

        def make_room() -> None:
            _do("mount", "-o", "remount,rw,size=1g", str(mounted))

        # Its output goes elsewhere, because this disk is full. The last save waits for space, and gets it.
        ended = run(words, attacked, output=folder, meanwhile=make_room)
        names = ("No space left on device", "no space left on device", "ead-only file system", "disk")
        fate, said = judge(ended, same=ended.status == 0 and result_of(attacked) == good.trained, names=names)
        if fate == "named":
            make_room()
            again = run(RESUME, attacked, output=folder)
            fate, said = judge(again, same=again.status == 0 and result_of(attacked) == good.trained, names=("never",))
            said = said and f"after there was room again: {said}"
    finally:
        _do("umount", "-l", str(mounted))
    return Trial("full or read-only disk", seed, f"{' '.join(words)}, {done} ({size} used)", fate, said)


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


def network_trial(good: Good, folder: Path, expected: Expected, seed: str) -> Trial:
    """One job, one fault of the link."""
    draw, fault = random.Random(seed), seed.rsplit("/", 1)[1]
    here = job_folder(good, folder / "attacked")
    with two_machines():
        done, moment = fault, draw.uniform(0, 1.5 * expected.seconds)
        if fault in ("slow", "lossy"):
            kind = ("delay", f"{draw.choice((5, 20))}ms") if fault == "slow" else ("loss", f"{draw.choice((1, 3))}%")
            for machine, link in zip(MACHINES, LINKS, strict=True):
                _do("tc", "-n", machine, "qdisc", "add", "dev", link, "root", "netem", *kind)
            done = f"{fault}: {' '.join(kind)} each way"
        cold = int(seed.rsplit("/", 2)[1]) // len(FAULTS) % COLD == COLD - 1
        jobs = _start(here, "first", cold=cold)
        if fault in ("interrupted", "cut"):
            time.sleep(moment)
            _do("ip", "-n", MACHINES[1], "link", "set", LINKS[1], "down")
            done = f"{fault} after {moment:.1f} s"
        if fault == "interrupted":
            time.sleep(2)
            _do("ip", "-n", MACHINES[1], "link", "set", LINKS[1], "up")
        ended = [end(job, here, f"first{rank}") for rank, job in enumerate(jobs)]
        status = max((one.status is None, abs(one.status or 0)) for one in ended)
        said = "\n".join(_said(f"machine {rank}", one) for rank, one in enumerate(ended))
        if status[0]:
            return Trial("network", seed, done, "hang", said)
        if any("Traceback (most recent call last)" in one.err for one in ended):
            return Trial("network", seed, done, "trace", said)
        if status[1] and not all(one.err.strip() for one in ended):
            return Trial("network", seed, done, "vague", said)
        if status[1]:
            _do("ip", "-n", MACHINES[1], "link", "set", LINKS[1], "up")
            for rank, job in enumerate(_start(here, "again")):
                again = end(job, here, f"again{rank}")
                if again.status != 0:
                    return Trial("network", seed, done, "vague", f"{said}\n{_said('then', again)}")
    same = result_of(here, "job", LAST) == expected.result
    return Trial("network", seed, done, "survived" if same else "silent", "" if same else f"another result\n{said}")


def _start(here: Path, name: str, *, cold: bool = False) -> list:
    return [
        start(
            here,
            f"{name}{rank}",
            {"PET_NODE_RANK": str(rank), **MEETING},
            MACHINES[rank],
            cold=cold,
        )
        for rank in range(2)
    ]  # fmt: skip


def _said(who: str, ended: Ended) -> str:
    return f"{who}: exit {ended.status}\n{ended.out[-SAID:]}{ended.err[-SAID:]}"


def _part() -> None:
    for machine in MACHINES:
        subprocess.run(["ip", "netns", "del", machine], check=False, capture_output=True)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
