"""The launcher: reads a process's rank from the environment of torchrun, Slurm, Kubeflow or our own launcher.

The command line starts one process. If the layout needs more and no other launcher started them, this process becomes
the parent of the local workers (`supervise.py`), each of which runs `meshwright.trainer.worker`.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.objects import gather_everywhere, sign_with, signing_secret
from meshwright.comm.staged import STAGED
from meshwright.comm.store import SignedStore
from meshwright.devices import backend_of, on_cpu
from meshwright.launch import forkserver
from meshwright.launch.meeting import await_arrivals, interface_towards, loopback, new_secret, open_store, share_secret
from meshwright.launch.sentry import Sentry
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import StuckError
from meshwright.launch.supervise import RestartPolicy, WorkerSpec, supervise
from meshwright.spec.errors import UserError
from meshwright.spec.guards import GuardSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import Run

WORKER = "meshwright.trainer.worker"
"""The module that a worker process runs."""
CHILD = "meshwright.launch.child"
"""The module that starts `WORKER`."""
LAUNCHER = "MESHWRIGHT_LAUNCHER"
"""The variable in which a worker finds the process id of our own launcher."""
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SECRET = "MESHWRIGHT_SECRET"
"""Environment variable with the run's secret (`meeting.py`), for workers of one machine."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """This process's rank and rendezvous."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    store: str = ""
    """`host:port` of the rendezvous; empty for a single process."""
    hosts_store: bool = False
    """Whether this rank hosts the store for all; only if no launcher does."""
    attempt: int = 0
    """Number of restarts so far."""
    parent: int = 0
    """The process that this one must exit with: our launcher or torchrun's agent; 0 if none."""
    shows_steps: bool = True
    """Whether rank 0 prints the steps; false where the launcher's notebook shows them."""


@dataclass(frozen=True)
class RankJob:
    """The common work of processes that train no `Run`."""

    layout: LayoutSpec
    """The number of processes."""
    guards: GuardSpec = field(default_factory=GuardSpec)
    """The time limits for waiting."""
    run_dir: str = "."
    """A folder that all machines share."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of the run; a launcher on each starts its share of the workers."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """0: any free port (one machine only)."""


def find_worker(environment: Mapping[str, str] = os.environ) -> Worker | None:
    """The rank that torchrun, or srun with one task per rank, gave this process; None if they gave none. Raises
    `UserError` if the variables are invalid."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        world_size = _integer(environment, "WORLD_SIZE")
        return Worker(
            rank=_integer(environment, "RANK"),
            local_rank=_integer(environment, "LOCAL_RANK", 0),
            world_size=world_size,
            local_world_size=_integer(environment, "LOCAL_WORLD_SIZE", world_size),
            store=f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{_integer(environment, 'MASTER_PORT', 29500)}",
            hosts_store=environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=_integer(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            parent=_integer(environment, LAUNCHER, os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0),
        )
    tasks, nodes = _integer(environment, "SLURM_NTASKS", 1), _integer(environment, "SLURM_NNODES", 1)
    if _started_by_srun(environment) and tasks > nodes:
        return Worker(
            rank=_integer(environment, "SLURM_PROCID"),
            local_rank=_integer(environment, "SLURM_LOCALID"),
            world_size=tasks,
            local_world_size=tasks // nodes,
            store=f"{_first_slurm_host(environment)}:{_slurm_port(environment)}",
            hosts_store=environment["SLURM_PROCID"] == "0",
        )
    return None


def find_nodes(environment: Mapping[str, str] = os.environ) -> Nodes:
    """The machines of this job: Kubeflow's `PET_*`, srun with one task per machine, or this machine alone."""
    count = _integer(environment, "PET_NNODES", 1)
    if count > 1:
        return Nodes(
            count=count,
            rank=_integer(environment, "PET_NODE_RANK"),
            address=environment.get("PET_MASTER_ADDR", "127.0.0.1"),
            port=_integer(environment, "PET_MASTER_PORT", 29500),
        )
    count = _integer(environment, "SLURM_NNODES", 1)
    if count > 1 and _started_by_srun(environment):
        return Nodes(
            count=count,
            rank=_integer(environment, "SLURM_NODEID"),
            address=_first_slurm_host(environment),
            port=_slurm_port(environment),
        )
    return Nodes()


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of srun, not the batch script itself, which has most of the same variables.

    Raises `UserError` if other copies were started, or should have been, that this one cannot communicate with.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if "SLURM_STEP_ID" not in environment and _integer(environment, name, 1) > 1:
            raise UserError(
                f"mpirun started {environment[name]} copies, each of which would train separately; start meshwright "
                "once, or with torchrun or srun (docs/clusters.md)"
            )
    if "SLURM_STEP_ID" in environment:
        return "SLURM_PROCID" in environment
    if _integer(environment, "SLURM_NNODES", 1) > 1:
        raise UserError(
            f"this Slurm job has {environment['SLURM_NNODES']} machines, but meshwright was started on one; start "
            "it with srun (docs/clusters.md)"
        )
    return False


def start_workers(
    run: Run | RankJob,
    nodes: Nodes,
    words: list[str],
    stop: StopRequest,
    policy: RestartPolicy,
    inherited: Sequence[int] = (),
) -> int:
    """Run `python -m WORDS` once per local rank until the run has ended, with restarts after crashes.

    Workers inherit the file descriptors `inherited`. Returns the exit status (`status.py`); errors have been printed,
    except for a stop.
    """
    layout = run.layout
    if layout.world_size % nodes.count:
        raise UserError(f"the layout's {layout.world_size} ranks cannot be split evenly over {nodes.count} machines")
    local = layout.world_size // nodes.count
    store, where, secret = _meeting_of_launchers(run, nodes)

    def environments(attempt: int) -> list[dict[str, str]]:
        shared = {
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": nodes.address,
            "MASTER_PORT": where.rpartition(":")[2],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            LAUNCHER: str(os.getpid()),
            SECRET: secret.decode(),
            **({} if nodes.count > 1 else _own_machine_only()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(local))),
        }
        first = nodes.rank * local
        return [
            {**os.environ, **shared, "RANK": str(first + index), "LOCAL_RANK": str(index)} for index in range(local)
        ]

    spec = WorkerSpec(
        # -P: nothing of the working directory is imported.
        command=[sys.executable, "-P", "-u", "-m", CHILD, str(os.getpid()), *words],
        environments=environments,
        policy=policy,
        store=SignedStore(store, secret, where),
        node=nodes.rank,
        nodes=nodes.count,
        inherited=tuple(inherited),
        start=forkserver.start,
    )
    return supervise(spec, stop)


def _meeting_of_launchers(run: Run | RankJob, nodes: Nodes) -> tuple[dist.Store, str, bytes]:
    """The store of all machines' launchers, its address, and the secret of the run.

    It is in this process and not in a worker, so that it outlives workers, and no worker meets one of another attempt.
    """
    seconds, first, several = run.guards.arrive_within, nodes.rank == 0, nodes.count > 1
    try:
        store = open_store(nodes.address, nodes.port, timedelta(seconds=seconds), hosts=first, machines=several)
    except dist.DistError as error:
        raise StuckError(
            f"the launcher of the first machine, {nodes.address}:{nodes.port}, did not answer within {seconds:g} s "
            "(guards.arrive_within)"
        ) from error
    where = f"{nodes.address}:{store.port}"
    if not several:
        return store, where, new_secret().encode()
    return store, where, share_secret(store, "launcher", Path(run.run_dir), seconds, first=first, where=where)


def _own_machine_only() -> dict[str, str]:
    """The loopback interface for gloo and NCCL, unless the environment sets another."""
    names, interface = (GLOO_INTERFACE, NCCL_INTERFACE), loopback()
    return {name: interface for name in names if interface and name not in os.environ}


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """The environment of every rank of a program on this machine, as torchrun sets it; for one rank, only its threads.

    Hugging Face's libraries are restricted to local files.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    alone = {"OMP_NUM_THREADS": str(threads_per_rank(ranks)), **os.environ, "HF_HUB_OFFLINE": "1"}
    if ranks == 1:
        return [alone]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        SECRET: new_secret(),
        **_own_machine_only(),
    }
    return [{**alone, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def join_group(worker: Worker, run: Run | RankJob, device: torch.device, *, shared: bool = False) -> None:
    """Make this process one rank of the default process group; gloo serves CPUs, nccl GPUs (gloo their host copies),
    and a `StagedGroup` GPUs that several ranks share.

    Raises `StuckError`, naming the missing ranks, if ranks have not arrived within `guards.arrive_within`.
    """
    if worker.world_size != run.layout.world_size:
        raise UserError(
            f"the layout needs {run.layout.world_size} processes, but {worker.world_size} were started; start "
            f"{run.layout.world_size}, or change the degrees under layout:"
        )
    backend = STAGED if shared else backend_of([device.type])
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder, which the watchdog reads
    store: dist.Store = dist.HashStore()  # for a single process, which only offloading needs
    if worker.store:
        plain, signed = _meet(worker, run)
        _choose_interface(worker)
        # On GPUs, NCCL's threads also use the store, and must never wait for Python.
        store = signed if on_cpu(device) else plain
        connection = watch_store(worker)
        assert connection is not None
        watched = connection, worker.store, worker.rank, worker.world_size
        _sentries.append(Sentry(*watched, run.guards.stuck_after).start())
    dist.init_process_group(
        backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=timedelta(minutes=30)
    )
    if worker.store:
        gather_everywhere("here")  # every rank here knows the secret


def _meet(worker: Worker, run: Run | RankJob) -> tuple[dist.Store, dist.Store]:
    """The store of this attempt, plain and signed, after all ranks have arrived; this rank's values are signed too."""
    seconds, opened = run.guards.arrive_within, _open_store(worker, run.guards.arrive_within)
    # A prefix for each attempt, so that no rank finds the address of a dead one.
    attempt, run_dir = f"attempt-{worker.attempt}", Path(run.run_dir)
    secret = os.environ.get(SECRET, "").encode()
    if not secret:
        key = f"{attempt}/secret"
        secret = share_secret(opened, key, run_dir, seconds, first=worker.rank == 0, where=worker.store)
    sign_with(secret)
    signed = SignedStore(opened, secret, worker.store, prefix=f"{attempt}/")
    await_arrivals(signed, worker.rank, worker.world_size, seconds)
    _kept_stores.append(signed)
    return dist.PrefixStore(attempt, opened), signed


def _choose_interface(worker: Worker) -> None:
    """Make gloo listen on the one interface that leads to the others, unless the environment sets another."""
    alone = worker.local_world_size == worker.world_size
    interface = loopback() if alone else interface_towards(worker.store.rpartition(":")[0])
    if interface:
        os.environ.setdefault(GLOO_INTERFACE, interface)


def watch_store(worker: Worker) -> dist.Store | None:
    """A second connection to the ranks' store; None for a single process."""
    if not worker.store:
        return None
    host, _, port = worker.store.rpartition(":")
    store = dist.TCPStore(host, int(port), None, False)
    return SignedStore(store, signing_secret(), worker.store, prefix=f"watch-{worker.attempt}/")


_kept_stores: list[SignedStore] = []
"""Stores that torch refers to."""
_sentries: list[Sentry] = []
"""This process's sentry, from start to exit."""


def _open_store(worker: Worker, seconds: float) -> dist.Store:
    host, _, port = worker.store.rpartition(":")
    patience = timedelta(seconds=seconds)
    try:
        several = worker.local_world_size < worker.world_size
        return open_store(host, int(port), patience, hosts=worker.hosts_store, machines=several)
    except dist.DistError as error:
        raise StuckError(
            f"rank {worker.rank} on {socket.gethostname()} could not connect to {worker.store} within {seconds:g} "
            "s: the first rank or the launcher has not started, or a firewall blocks the connection"
        ) from error


def join_all() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def leave_group() -> None:
    """Leave the group together: a rank that closes gloo while others still communicate makes them abort."""
    if dist.is_initialized():
        dist.barrier()
        while _sentries:
            _sentries.pop().stop()
        dist.destroy_process_group()


def make_cublas_deterministic() -> None:
    """Give cuBLAS a workspace of fixed size; otherwise its results may differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads of one worker when `local_ranks` share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise UserError(
                f"the environment variable {name} is missing, although the launcher's other variables are set"
            )
        return default
    if not re.fullmatch(r"\d+", text):
        raise UserError(f"the environment variable {name}={text!r} is not a number")
    return int(text)


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """First host of a Slurm node list such as `gpu[003-010,012],login1`."""
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "127.0.0.1")
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise UserError(f"the environment variable SLURM_JOB_NODELIST={nodes!r} names no host")
    return match[1] + (match[2] or "")


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port that all tasks of one job agree on and two jobs on one machine rarely share."""
    return 20000 + _integer(environment, "SLURM_JOB_ID", 0) % 20000
