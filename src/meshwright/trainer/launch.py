"""The one place that reads the environment and starts processes: torchrun's, Slurm's and Kubeflow's, or its own.

A rank's life: the command line starts one process; where the layout needs more and nobody else started them, it becomes
the parent of the local workers (torch's elastic launcher), each of which runs `meshwright.trainer.worker`.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.spec.layout import LayoutSpec

MISUSE = 2
"""Exit status of a worker that met a user's mistake and has left its message for the parent."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """This process's place among all ranks."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    rendezvous: str | None = None
    """`tcp://host:port` where torchrun's variables do not already say it."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines over which this launcher, once on each, spreads the workers."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """0: any free port (one machine only)."""


def find_worker(environment: Mapping[str, str] = os.environ) -> Worker | None:
    """The place that torchrun, or srun with one task per rank, gave this process; None where nobody did.

    Raises `ValueError` where the variables are there but make no sense.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        world_size = _integer(environment, "WORLD_SIZE")
        return Worker(
            rank=_integer(environment, "RANK"),
            local_rank=_integer(environment, "LOCAL_RANK", 0),
            world_size=world_size,
            local_world_size=_integer(environment, "LOCAL_WORLD_SIZE", world_size),
        )
    tasks, nodes = _integer(environment, "SLURM_NTASKS", 1), _integer(environment, "SLURM_NNODES", 1)
    if "SLURM_PROCID" in environment and tasks > nodes:
        return Worker(
            rank=_integer(environment, "SLURM_PROCID"),
            local_rank=_integer(environment, "SLURM_LOCALID"),
            world_size=tasks,
            local_world_size=tasks // nodes,
            rendezvous=f"tcp://{_first_slurm_host(environment)}:{_slurm_port(environment)}",
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
    if count > 1 and "SLURM_PROCID" in environment:
        return Nodes(
            count=count,
            rank=_integer(environment, "SLURM_NODEID"),
            address=_first_slurm_host(environment),
            port=_slurm_port(environment),
        )
    return Nodes()


def start_workers(
    layout: LayoutSpec, nodes: Nodes, arguments: list[str], *, module: str = "meshwright.trainer.worker"
) -> int:
    """Run `python -m MODULE ARGUMENTS` once per local rank; returns the exit status.

    0 where all succeeded; a worker's own status where one failed, its message being printed already.
    """
    if layout.world_size % nodes.count:
        raise ValueError(f"the layout's {layout.world_size} ranks cannot be split evenly over {nodes.count} machines")
    # Workers of a restarted group must not meet at the address of the one before.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(layout.world_size // nodes.count)))
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=layout.world_size // nodes.count,
        rdzv_backend="c10d" if nodes.count == 1 else "static",
        rdzv_endpoint=f"{'localhost' if nodes.count == 1 else nodes.address}:{nodes.port}",
        rdzv_configs={"rank": nodes.rank, "timeout": 900},
        run_id="meshwright",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(redirects=Std.NONE, tee=Std.NONE),
    )
    for name in ("agent.server.api", "multiprocessing.api"):  # else they repeat at length what is said here in a line
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == MISUSE:
            print(f"error: {failure.message}", file=sys.stderr)
        else:
            print(
                f"error: rank {rank} ended with status {failure.exitcode}; its messages stand above",
                file=sys.stderr,
            )
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stop:  # the workers have been ended
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + stop.sigval
    return 0


def join_group(worker: Worker, layout: LayoutSpec, device: torch.device) -> None:
    """Make this process one rank of the default process group; gloo serves CPUs, nccl GPUs (gloo their host copies)."""
    if worker.world_size != layout.world_size:
        raise ValueError(
            f"the layout needs {layout.world_size} processes but {worker.world_size} were started; "
            f"start {layout.world_size}, or change the degrees under layout:"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if worker.rendezvous is None and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()  # one process alone, which only offloading needs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    dist.init_process_group(
        backend,
        init_method=worker.rendezvous or "env://",
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(minutes=30),
    )


def join_all() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def leave_group() -> None:
    """Leave together: a rank that tears gloo down while others still talk makes them abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def make_cublas_deterministic() -> None:
    """Give cuBLAS a workspace of fixed size, without which its results may differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads of one worker when `local_ranks` share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"the environment has no {name}, which its other variables promise")
        return default
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"the environment's {name}={text!r} is not a number")
    return int(text)


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """First host of a Slurm node list such as `gpu[003-010,012],login1`."""
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "127.0.0.1")
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ValueError(f"the environment's SLURM_JOB_NODELIST={nodes!r} names no host")
    return match[1] + (match[2] or "")


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port that all tasks of one job agree on and two jobs on one machine rarely share."""
    return 20000 + _integer(environment, "SLURM_JOB_ID", 0) % 20000
