"""The thread that runs the engines, and its bounded queue."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from meshwright.serve.engine import Answer, InferenceEngine, Request, Token
from meshwright.spec.errors import UserError

log = logging.getLogger(__name__)

Listener = Callable[[int, Answer, list[Token], str], None]
"""(number of the answer, the answer, its new tokens, its new text), called in the worker's thread."""


class BusyError(Exception):
    """The queue is full."""


class EngineThread:
    """One thread for all engines, by the names of their models."""

    def __init__(self, engines: Mapping[str, InferenceEngine], *, max_queue: int) -> None:
        """`max_queue`: requests of one model that may wait for a place in its batch."""
        self._engines, self._max_queue = dict(engines), max_queue
        self._leaving: list[InferenceEngine] = []
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._unfinished = dict.fromkeys(engines, 0)
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="meshwright-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all answers and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive()

    def load(self) -> dict[str, tuple[int, int]]:
        """The numbers of running and waiting requests of each model."""
        counts = {}
        for name, engine in list(self._engines.items()):
            unfinished, running = self._unfinished[name], engine.running
            counts[name] = (min(running, unfinished), max(0, unfinished - running))
        return counts

    def add(self, model: str, engine: InferenceEngine) -> None:
        """Start serving another engine."""
        with self._wake:
            self._unfinished[model] = 0
            self._engines[model] = engine

    def remove(self, model: str) -> None:
        """Remove an engine when its answers are complete."""
        with self._wake:
            self._leaving.append(self._engines.pop(model))
            del self._unfinished[model]
            self._wake.notify()

    def submit(self, model: str, requests: Sequence[Request], listener: Listener) -> Callable[[], None]:
        """Queue checked requests, all or none; returns a function that cancels them.

        Raises `BusyError` if the queue is full, `KeyError` if the model was removed.
        """
        answers = list[Answer]()
        with self._wake:
            engine = self._engines[model]
            room = engine.max_batch + self._max_queue - self._unfinished[model]
            if len(requests) > room or self._stopping:
                raise BusyError
            self._unfinished[model] += len(requests)

        def hear(number: int) -> Callable[[Answer, list[Token], str], None]:
            def report(answer: Answer, tokens: list[Token], text: str) -> None:
                listener(number, answer, tokens, text)
                if answer.finish is not None:
                    self._finished(model, engine)

            return report

        def begin() -> None:
            for number, request in enumerate(requests):
                try:
                    answers.append(engine.submit(request, hear(number)))
                except Exception:  # one request's fault must not affect others
                    log.exception("a request could not start and was ended")
                    _end([Answer(request, hear(number))], "error")

        def cancel() -> None:
            for answer in answers:
                if answer.finish is None:
                    engine.cancel(answer)
                    self._finished(model, engine)

        self._do(begin)
        return lambda: self._do(cancel)

    def _do(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _finished(self, model: str, engine: InferenceEngine) -> None:
        with self._wake:
            if self._engines.get(model) is engine:  # not removed in the meantime
                self._unfinished[model] -= 1

    def _work(self) -> None:
        busy = False
        while True:
            with self._wake:
                while not (busy or self._commands or self._stopping):
                    self._wake.wait()
                commands, stopping = list(self._commands), self._stopping
                self._commands.clear()
            for command in commands:
                command()
            if stopping:
                for engine in (*self._engines.values(), *self._leaving):
                    _end(engine.reset(), "cancelled")
                return
            stepped = [self._step(engine) for engine in list(self._engines.values())]
            leaving = [(engine, self._step(engine)) for engine in list(self._leaving)]
            for engine, worked in leaving:
                if not worked:
                    self._leaving.remove(engine)
            busy = any(stepped) or bool(self._leaving)

    def _step(self, engine: InferenceEngine) -> bool:
        try:
            return engine.step()
        except Exception as error:  # for example out of memory: the requests are lost, the server continues
            if isinstance(error, UserError):
                log.error("%s; the requests in this step were ended", error)
            else:
                log.exception("a step failed; its requests were ended")
            _end(engine.reset(), "error")
            return False


def _end(answers: Sequence[Answer], finish: str) -> None:
    for answer in answers:
        answer.finish = finish
        if answer.listener is not None:
            answer.listener(answer, [], "")
