"""The rendezvous of ranks: torch's store at one address, the shared secret, and the ranks that have arrived.

Ranks sign the objects that they send each other (`comm/objects.py`) with the run's secret. On one machine the launcher
passes it to the workers in their environment. On several, rank 0 writes it into the run directory, which every machine
sees and only this user can read.
"""

import array
import contextlib
import fcntl
import ipaddress
import secrets
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.comm.store import SignedStore, StrangerError
from meshwright.launch.status import StuckError
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably

SECRET_FILE, SECRET_BYTES = ".secret", 32
POLL_SECONDS = 0.05
SETTLE_SECONDS = 60.0
"""How long a network file system may show the secret of a previous run."""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def open_store(host: str, port: int, patience: timedelta, *, hosts: bool, machines: bool = False) -> dist.TCPStore:
    """The store at `host:port`; if it `hosts`, this process hosts it for all; port 0: any free port.

    It listens only at that address: torch would listen at every address of the machine, and its store does not
    authenticate clients. A run on one machine is therefore unreachable from outside. `machines`: other machines must be
    able to reach it.
    """
    await_name(host, patience)
    if not hosts:
        return dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
    try:
        if machines and host != "localhost" and ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
            raise OSError("a name that resolves to a loopback address only on this machine, as in Debian's /etc/hosts")
        listener = socket.create_server((host, port), backlog=1024)
    except OSError:  # or the address belongs to a host that forwards
        return dist.TCPStore(host, port, None, True, patience, wait_for_workers=False)
    port, handle = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, None, True, patience, wait_for_workers=False, master_listen_fd=handle)


def await_name(host: str, patience: timedelta) -> None:
    """Wait until the name service knows `host`: a pod's name may take some seconds.

    Raises `UserError` if it does not; torch would warn twice a second while waiting.
    """
    began = reported = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            now = time.monotonic()
            unknown = f"the rendezvous host {host!r} cannot be resolved ({error.strerror})"
            if now - began >= patience.total_seconds():
                raise UserError(f"{unknown}; use its IP address, or fix name resolution") from error
            if now - reported >= 10:
                print(f"waiting: {unknown}", file=sys.stderr, flush=True)
                reported = now
            time.sleep(0.5)


def new_secret() -> str:
    """A new secret, as text for an environment variable."""
    return secrets.token_hex(SECRET_BYTES)


def write_secret(run_dir: Path) -> None:
    """Write a new secret into the run directory, before any other rank can read it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(run_dir / SECRET_FILE, new_secret(), mode=0o600)


def read_secret(run_dir: Path) -> bytes:
    """The secret that rank 0 has written; raises `UserError` if this rank cannot read it."""
    try:
        return (run_dir / SECRET_FILE).read_bytes()
    except OSError as error:
        raise UserError(
            f"{run_dir / SECRET_FILE}, written by rank 0, cannot be read here ({error.strerror}); run_dir must be the "
            "same folder on every machine, and belong to the same user"
        ) from error


def share_secret(store: dist.Store, key: str, run_dir: Path, seconds: float, *, first: bool, where: str) -> bytes:
    """The secret of this rendezvous, which its first member writes into the run directory.

    The first member then signs `key` of the store. The others wait for it and verify with it that they have read the
    current secret. Raises `StuckError` if the first member does not arrive, `StrangerError` if its secret is another.
    """
    if first:
        write_secret(run_dir)
        secret = read_secret(run_dir)
        SignedStore(store, secret, where).set(key, socket.gethostname())
        return secret
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise StuckError(
                f"the first process of the rendezvous at {where} did not arrive within {seconds:g} s "
                "(guards.arrive_within)"
            )
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + min(seconds, SETTLE_SECONDS)
    while True:
        secret = read_secret(run_dir)
        try:
            SignedStore(store, secret, where).get(key)
            return secret
        except StrangerError:
            if time.monotonic() > deadline:
                raise
        time.sleep(10 * POLL_SECONDS)


def await_arrivals(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    """Wait until all ranks have arrived; in Python, so that signals are handled. Rank 0 checks each rank's
    signature."""
    store.set(arrival(rank), socket.gethostname())
    keys, deadline = {rank: arrival(rank) for rank in range(world_size)}, time.monotonic() + seconds
    wanted = list(keys.values()) if rank == 0 else [ALL]
    while not store.check(wanted):
        if time.monotonic() > deadline:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            raise StuckError(
                f"of {world_size} ranks, {', '.join(map(str, missing)) or 'the confirmation of rank 0'} did not "
                f"arrive within {seconds:g} s (guards.arrive_within)"
            )
        time.sleep(POLL_SECONDS)
    for key in wanted:
        store.get(key)
    if rank == 0:
        store.set(ALL, "")


ALL = "arrived/all"
"""Rank 0's message that all ranks have arrived."""


def arrival(rank: int) -> str:
    """The key that announces a rank's arrival."""
    return f"arrived/{rank}"


ELSEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), to look up the default route."""


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches `host`; None if it cannot be determined.

    Many systems give their own name an address that only they can reach (127.0.1.1 in /etc/hosts): then the interface
    of the default route.
    """
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        if address.startswith("127.") and host not in (address, "localhost"):
            address = ELSEWHERE
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, only looks up the route
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    request = array.array("B", struct.pack("256s", name.encode()))
                    fcntl.ioctl(probe, SIOCGIFADDR, request)
                    if socket.inet_ntoa(request[20:24].tobytes()) == mine:
                        return name
    return None


def loopback() -> str | None:
    """The loopback interface, which only this machine can reach."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
