"""The launchers of several machines: the first that sees a failure decides for all, and all meet before a restart.

A launcher that ends early writes the decision that the others would wait for. One that cannot, because its cable was
cut or it was killed, does not come to the meeting, and the others end instead of waiting for its ranks.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from meshwright.launch.status import MISUSE, STUCK
from meshwright.spec.errors import UserError

T = TypeVar("T")

POLL_SECONDS = 0.1
ANSWER_SECONDS = 10.0
"""Timeout for the first machine's launcher."""
FAREWELL_SECONDS = 1.0
"""The same for a launcher that must end at once."""
MEET_SECONDS = 30.0
"""Time for the launchers of all machines to be ready for a restart, and to read the last verdict."""


@dataclass(frozen=True)
class RestartDecision:
    """The decision after a failed attempt, for every machine."""

    status: int
    """Exit status, unless `again`."""
    message: str = ""
    """What failed."""
    again: str = ""
    """The message about the restart; empty if there is none."""
    fruitless: int = 0
    """Attempts in a row without a new checkpoint."""
    reached: int = 0
    """Step of the newest checkpoint."""


class Launchers:
    """The launchers of all machines, reached through the store of the first; on one machine, this one alone."""

    def __init__(self, store: dist.Store, node: int = 0, nodes: int = 1) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._alone = nodes == 1
        """Whether there is no other launcher, or none that answers."""
        self._absent: list[int] = []
        if not self._alone:
            with contextlib.suppress(dist.DistError, TimeoutError):
                within(ANSWER_SECONDS, lambda: store.set(_host(node), socket.gethostname()))

    def decide(self, attempt: int, mine: RestartDecision) -> RestartDecision:
        """The verdict on a failed attempt of the first launcher to decide; if the store does not answer, ours, without
        a restart."""
        return self._agreed(_verdict(attempt), mine, ANSWER_SECONDS)

    def watch(self, attempt: int) -> "VerdictWatch":
        """Whether another launcher has decided about an attempt that runs here."""
        return VerdictWatch(self._store, _verdict(attempt))

    def meet(self, attempt: int, verdict: RestartDecision) -> RestartDecision:
        """`verdict`, after the launchers of all machines are ready for this attempt; without a restart if one of them
        has ended, or does not come."""
        if self._alone:
            return verdict
        planned = replace(verdict, message="")  # it has been printed
        try:
            self._absent = within(MEET_SECONDS + ANSWER_SECONDS, lambda: self._await(attempt))
        except (dist.DistError, TimeoutError):
            return self._without_first(planned)
        return self._agreed(_start(attempt), self._refusal() if self._absent else planned, ANSWER_SECONDS)

    def withdraw(self, attempt: int) -> None:
        """Decide for all that the run ends, because this launcher ends while an attempt runs or before the next."""
        if self._alone:
            return
        here = f"machine {self._node} on {socket.gethostname()}"
        ended = RestartDecision(STUCK, f"error: the launcher of {here} has ended; there is no restart without it")
        for key in (_verdict(attempt), _start(attempt + 1)):
            self._agreed(key, ended, FAREWELL_SECONDS)

    def leave(self, attempt: int, *, at_once: bool = False) -> None:
        """Wait, unless `at_once`, until the launchers of all machines have read the verdict: a scheduler may kill the
        others after the first one exits, and the store ends with the first machine's launcher."""
        if self._alone:
            return
        with contextlib.suppress(dist.DistError, TimeoutError):
            deadline, gone = time.monotonic() + (0 if at_once else MEET_SECONDS), f"gone-{attempt}"
            left = within(ANSWER_SECONDS, lambda: self._store.add(gone, 1))
            while left < self._nodes - len(self._absent) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                left = within(ANSWER_SECONDS, lambda: self._store.add(gone, 0))
            time.sleep(2 * POLL_SECONDS)  # so that every launcher's last message is read

    def _await(self, attempt: int) -> list[int]:
        """The launchers that are not ready for an attempt in time, or when another one has decided about it."""
        self._store.set(_ready(attempt, self._node), "")
        absent, deadline = list(range(self._nodes)), time.monotonic() + MEET_SECONDS
        while absent := [node for node in absent if not self._store.check([_ready(attempt, node)])]:
            if self._store.check([_start(attempt)]) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return absent

    def _refusal(self) -> RestartDecision:
        names = ", ".join(map(self._name, self._absent))
        message = f"error: the launcher of machine {names} has ended, or has not answered for {MEET_SECONDS:g} s"
        return RestartDecision(STUCK, f"{message}; there is no restart without it")

    def _name(self, node: int) -> str:
        with contextlib.suppress(dist.DistError, UserError):
            if self._store.check([_host(node)]):
                return f"{node} ({self._store.get(_host(node)).decode()})"
        return str(node)

    def _agreed(self, key: str, mine: RestartDecision, seconds: float) -> RestartDecision:
        try:
            answer = within(seconds, lambda: self._store.compare_set(key, "", json.dumps(asdict(mine))))
            return RestartDecision(**json.loads(answer))
        except UserError as error:  # written by a stranger, which is why our workers were ended
            return RestartDecision(MISUSE, f"error: {error}")
        except (dist.DistError, TimeoutError):
            return self._without_first(mine)

    def _without_first(self, mine: RestartDecision) -> RestartDecision:
        """Our decision if the store does not answer, because the first machine's launcher has ended: no restart."""
        self._alone = True
        lost = "error: the launcher of the first machine does not answer; this machine's processes end"
        status = STUCK if mine.again else mine.status
        return replace(mine, status=status, again="", message=f"{mine.message}\n{lost}".strip())


class VerdictWatch:
    """Whether a verdict has been written. A thread polls, because without network the call hangs."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self.given = self.over = False
        threading.Thread(target=self._ask, args=(store, key), name="meshwright-verdict", daemon=True).start()

    def _ask(self, store: dist.Store, key: str) -> None:
        with contextlib.suppress(dist.DistError):  # the workers detect that too and report it
            while not self.over and not self.given:
                self.given = store.check([key])
                time.sleep(POLL_SECONDS)


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`; raises `TimeoutError` if it takes longer, and leaves it running."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="meshwright-ask", daemon=True).start()
    if not wait([answer], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


def _verdict(attempt: int) -> str:
    return f"verdict-{attempt}"


def _start(attempt: int) -> str:
    return f"start-{attempt}"


def _ready(attempt: int, node: int) -> str:
    return f"ready-{attempt}/{node}"


def _host(node: int) -> str:
    return f"launcher-{node}"
