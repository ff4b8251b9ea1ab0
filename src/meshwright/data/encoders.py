"""Text encoding on all cores, in worker processes.

Threads in one process would be slowed by the GIL, which they hold while building lists of token ids. Each worker
process reads lists of texts from its standard input and writes their tokens to its standard output. It ends when its
input closes, and so also when its parent is killed.
"""

import marshal
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from meshwright.data.examples import EncodedText, Encoder, build_encoder

ItemT = TypeVar("ItemT")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Encoders:
    """Encodes chunks of texts, in order; with 0 worker processes, in this one. Use it in `with`."""

    def __init__(self, encoder: Encoder, processes: int):
        self._encoder = encoder
        self._processes = [_start() for _ in range(processes)]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(max(1, processes), thread_name_prefix="meshwright-encoders")
        for process in self._processes:
            self._threads.submit(self._introduce, process)

    def map(self, chunks: Iterable[tuple[ItemT, Sequence[str]]]) -> Iterator[tuple[ItemT, list[EncodedText]]]:
        """Each chunk's item with the tokens of its texts. At most two chunks per process are in memory."""
        if not self._processes:
            yield from ((item, self._encoder.encode(texts)) for item, texts in chunks)
            return
        ahead: deque[tuple[ItemT, Future[list[EncodedText]]]] = deque()
        for item, texts in chunks:
            ahead.append((item, self._threads.submit(self._ask, texts)))
            if len(ahead) > 2 * len(self._processes):
                first, future = ahead.popleft()
                yield first, future.result()
        yield from ((item, future.result()) for item, future in ahead)

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # its remaining work is not needed
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def _introduce(self, process: subprocess.Popen[bytes]) -> None:
        """Send a process its encoder. This waits until the process has started; all start at the same time."""
        with suppress(OSError):  # a dead process is noticed at the first request
            _send(self._encoder.settings, process.stdin)
        self._idle.put(process)

    def _ask(self, texts: Sequence[str]) -> list[EncodedText]:
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send(list(texts), process.stdin)
            answer = marshal.load(process.stdout)
        except (OSError, EOFError) as error:
            raise RuntimeError(f"an encoding process ended with status {process.wait()}") from error
        finally:
            self._idle.put(process)
        return _unpacked(*answer)


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    # In a new session, so that Ctrl-C ends it by closing its input, without a stack trace.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _send(value: Any, stream: Any) -> None:
    marshal.dump(value, stream)
    stream.flush()


def _packed(encoded: Sequence[EncodedText]) -> tuple[bytes, bytes, bytes, list[tuple[str, str]]]:
    """As bytes: the number of documents of each text, the number of tokens of each document, all tokens; and each
    text's note and error, empty if there is none."""
    documents = [ids for text in encoded for ids in text.documents]
    counts = np.array([len(text.documents) for text in encoded], np.int32)
    lengths = np.array([len(ids) for ids in documents], np.int32)
    messages = [(text.note, text.error) for text in encoded]
    ids = np.concatenate([np.zeros(0, np.int32), *documents])
    return counts.tobytes(), lengths.tobytes(), ids.tobytes(), messages if any(map(any, messages)) else []


def _unpacked(counts: bytes, lengths: bytes, ids: bytes, messages: list[Any]) -> list[EncodedText]:
    borders = np.cumsum(np.frombuffer(lengths, np.int32))
    documents = iter(np.split(np.frombuffer(ids, np.int32), borders))
    numbers = np.frombuffer(counts, np.int32)
    return [
        EncodedText(tuple(islice(documents, count)), note, error)
        for count, (note, error) in zip(numbers, messages or [("", "")] * len(numbers), strict=True)
    ]


def serve() -> None:
    """Serve requests until the input ends, or the output is closed."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # one core each
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError):
        encoder = build_encoder(marshal.load(requests))
        while True:
            _send(_packed(encoder.encode(marshal.load(requests))), answers)
    os._exit(0)  # an ordinary exit would try to flush the closed output
