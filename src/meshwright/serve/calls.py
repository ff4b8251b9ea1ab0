"""One client call: its answers as they are generated, whole or as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from meshwright.serve import engine
from meshwright.serve.api import ApiError
from meshwright.serve.incoming import left
from meshwright.serve.metrics import Metrics
from meshwright.serve.wording import Wording

Heard = tuple[int, engine.Answer, list[engine.Token], str, str | None]


class Call:
    """The answers to one request, as they are generated."""

    def __init__(
        self,
        metrics: Metrics,
        requests: Sequence[engine.Request],
        heard: "asyncio.Queue[Heard]",
        cancel: Callable[[], None],
        prompt_tokens: int,
    ) -> None:
        """`cancel`: ends unfinished answers."""
        self._metrics, self._requests, self._heard, self._cancel = metrics, requests, heard, cancel
        self.prompt_tokens, self._begun = prompt_tokens, time.monotonic()
        self._answers: dict[int, engine.Answer] = {}
        self._unfinished, self._closed = set(range(len(requests))), False

    async def answers(self, request: Request) -> list[engine.Answer]:
        """All answers, complete; cancelled if the client disconnects."""
        gone = asyncio.create_task(left(request))
        try:
            async for _ in self._progress(gone):
                pass
        finally:
            gone.cancel()
            self.close()
        for answer in self._answers.values():
            if answer.finish not in ("stop", "length"):
                raise _unfinished(answer)
        return [self._answers[number] for number in range(len(self._requests))]

    async def events(self, wording: Wording, *, begins: bool, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events."""
        if begins:
            for number in range(len(self._requests)):
                yield _event(wording.begin(number))
        opened = set[int]()
        async for number, answer, tokens, text, finish in self._progress(None):
            chunks = wording.echo(number, answer) if number not in opened else []
            opened.add(number)
            chunks += wording.parts(number, answer.request, tokens, text)
            if finish in ("stop", "length"):
                chunks += wording.ends(number, answer, finish)
            for chunk in chunks:
                yield _event(chunk)
            if finish not in (None, "stop", "length"):
                yield _event(_unfinished(answer).body())
        if with_usage:
            yield _event(wording.usage(list(self._answers.values()), self.prompt_tokens))
        yield "data: [DONE]\n\n"

    async def _progress(self, gone: "asyncio.Task[None] | None") -> AsyncIterator[Heard]:
        while self._unfinished:
            heard = await self._next(gone)
            number, answer, _, _, finish = heard
            if not self._answers:
                about = "Seconds until the first token."
                self._metrics.observe("meshwright_first_token_seconds", time.monotonic() - self._begun, about=about)
            self._answers[number] = answer
            if finish is not None:
                self._unfinished.discard(number)
            yield heard

    async def _next(self, gone: "asyncio.Task[None] | None") -> Heard:
        if gone is None:
            return await self._heard.get()
        waiting = asyncio.ensure_future(self._heard.get())
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        raise ClientDisconnect

    def close(self) -> None:
        """Call when the client has disconnected: cancels unfinished answers, and updates the counters."""
        if self._closed:
            return
        self._closed = True
        written = sum(len(answer.tokens) for answer in self._answers.values())
        metrics = self._metrics
        metrics.count("meshwright_prompt_tokens_total", self.prompt_tokens, about="Tokens of prompts.")
        metrics.count("meshwright_generated_tokens_total", written, about="Tokens of answers.")
        if self._unfinished:
            self._cancel()
            metrics.count("meshwright_cancelled_total", about="Requests whose client disconnected.")
        else:
            about = "Seconds until the answer was complete."
            metrics.observe("meshwright_request_seconds", time.monotonic() - self._begun, about=about)


class EventStream(StreamingResponse):
    """A call's events. The call is closed whenever sending ends, even before it starts."""

    def __init__(self, call: Call, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and close the call."""

        async def send_and_wait(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # a lost connection is noticed before more is written to it

        try:
            await super().__call__(scope, receive, send_and_wait)
        finally:
            self._call.close()


def _unfinished(answer: engine.Answer) -> ApiError:
    if answer.problem is not None:
        return ApiError(400, f"the answer cannot continue under its grammar: {answer.problem}")
    return ApiError(500, "the server could not finish this answer")


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
