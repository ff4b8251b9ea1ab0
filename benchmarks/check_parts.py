"""The CPU time of each check by itself: `PYTHONPATH=src python -P benchmarks/check_parts.py`."""

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from meshwright.comm import objects
from meshwright.comm.store import SignedStore
from meshwright.data.checksums import BLOCK, BlockChecksums, write_sums
from meshwright.storage.lock import Lock

BLOCKS = 64
VALUE = {"loss": 1.0, "names": ["x"] * 100}


def cpu(work: Callable[[], object], times: int, rounds: int) -> str:
    """Microseconds of one call: median, least and largest over rounds."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times * 1e6)
    return f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    cost = partial(cpu, rounds=parser.parse_args().rounds)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokens.bin"
        path.write_bytes(os.urandom(BLOCKS * BLOCK))
        write_sums(path)
        known = BlockChecksums.beside(path, "")
        known.compare_all()
        checked = known.numbers(np.dtype("<u2"), 0, BLOCKS * BLOCK // 2)
        plain = np.memmap(path, "<u2", "r")
        objects.sign_with(b"k" * 64)
        store = dist.HashStore()
        signed = SignedStore(store, b"k", "here")

        def pickled() -> object:
            return pickle.loads(pickle.dumps(VALUE, protocol=pickle.HIGHEST_PROTOCOL))

        def compared() -> object:
            return BlockChecksums.beside(path, "").compare_all()

        def pulse(where: dist.Store) -> bytes:
            where.set("pulse", "7 host")
            return where.get("pulse")

        def sent() -> object:
            return objects._read(objects._signed(VALUE))

        def lock() -> None:
            with Lock(Path(name) / "lock"):
                pass

        for what, with_it, without in (
            (f"{BLOCKS} blocks of tokens, read first", cost(compared, 5), "-"),
            ("2048 tokens, read again", cost(lambda: checked[4096:6144], 2000), cost(lambda: plain[4096:6144], 2000)),
            ("an object of 1 KB, sent and read", cost(sent, 500), cost(pickled, 500)),
            ("a sign of life, written and read", cost(lambda: pulse(signed), 500), cost(lambda: pulse(store), 500)),
            ("the lock, taken and given back", cost(lock, 5), "-"),
        ):  # fmt: skip
            print(f"| {what} | {with_it} | {without} |", flush=True)


if __name__ == "__main__":
    main()
