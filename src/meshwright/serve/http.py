"""The server: OpenAI's API, a chat page, health and metrics, as a Starlette application."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meshwright.data.tokenizer import TextTokenizer
from meshwright.models.generate import check_room
from meshwright.serve import engine
from meshwright.serve.api import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    Wording,
    parse,
)
from meshwright.serve.browser import called, page
from meshwright.serve.conversation import Prompts
from meshwright.serve.metrics import Metrics
from meshwright.serve.worker import BusyError, Worker
from meshwright.spec.errors import UserError

MAX_BODY = 4 * 2**20
"""Bytes of a request, where nobody says."""
SMALL_BODY = 2**16
"""Bytes that are parsed within a millisecond or so."""
DISCARDED = 64 * 2**20
"""Bytes of a too large request that are read and discarded, so that the client can receive the error."""
LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")
"""Local names of this machine."""


@dataclass(frozen=True)
class Served:
    """A model and its name."""

    name: str
    engine: engine.Engine
    tokenizer: TextTokenizer
    prompts: Prompts
    about: str
    """Its origin, as text."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server."""

    max_body: int = MAX_BODY
    max_queue: int = 64
    api_key: str | None = None
    """Without a key only requests for a local host name are answered, so that no web page in a local browser can reach
    the server under its own name (DNS rebinding)."""


class Server:
    """The routes and their shared state."""

    def __init__(self, models: Sequence[Served], limits: Limits) -> None:
        self._models = {model.name: model for model in models}
        self._limits, self._metrics, self._started = limits, Metrics(), int(time.time())
        self._worker = Worker({model.name: model.engine for model in models}, max_queue=limits.max_queue)

    def app(self) -> Starlette:
        """The application; it starts and stops the worker."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._worker.start()
            yield
            await asyncio.to_thread(self._worker.stop)

        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._show_metrics)),
            Route("/v1/models", self._guarded(self._list)),
            Route("/v1/models/{name:path}", self._guarded(self._one)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _not_here})

    def _guarded(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The handler with key check, errors in OpenAI's format, and counters."""

        async def answer(request: Request) -> Response:
            try:
                self._admit(request)
                response = await handle(request)
            except ApiError as error:
                headers = {"retry-after": "1"} if error.status == 429 else None
                response = JSONResponse(error.body(), error.status, headers=headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            self._metrics.count(
                "meshwright_requests_total",
                about="Requests by path and status.",
                path=request.scope["route"].path,
                status=str(response.status_code),
            )
            return response

        return answer

    def _admit(self, request: Request) -> None:
        key = self._limits.api_key
        if key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(
                    401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
                )
        elif (name := called(request)) not in LOCAL:
            raise ApiError(403, f"this server answers at localhost only, not as {name}")

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(*page())

    async def _health(self, _: Request) -> Response:
        alive = self._worker.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _show_metrics(self, _: Request) -> Response:
        load = self._worker.load()
        gauges = {
            "meshwright_requests_running": ("Answers being written.", {name: run for name, (run, _) in load.items()}),
            "meshwright_requests_waiting": ("Answers that wait.", {name: wait for name, (_, wait) in load.items()}),
        }
        return PlainTextResponse(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._told(model) for model in self._models.values()]})

    async def _one(self, request: Request) -> Response:
        return JSONResponse(self._told(self._find(request.path_params["name"])))

    def _told(self, model: Served) -> dict[str, Any]:
        facts = {"max_context": model.engine.max_context, "chat": model.prompts.chats}
        told = {"id": model.name, "object": "model", "created": self._started, "owned_by": "meshwright"}
        return {**told, **facts, "source": model.about}

    def _find(self, name: str) -> Served:
        if name not in self._models:
            known = ", ".join(self._models)
            message = f"the model {name!r} does not exist; the models are {known}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self._models[name]

    async def _chat(self, request: Request) -> Response:
        asked: ChatRequest = await _parsed(ChatRequest, await self._body(request))
        model = self._find(asked.model)
        if not model.prompts.chats:
            raise ApiError(400, f"{model.name} has no chat template; use /v1/completions", param="messages")
        messages = [message.plain() for message in asked.messages]
        tools = asked.tools if asked.tool_choice != "none" else None
        prompt = await _checked(model.prompts.conversation, messages, tools)
        return await self._generate(request, model, asked, [prompt], model.prompts.answer_ends)

    async def _complete(self, request: Request) -> Response:
        asked: CompletionRequest = await _parsed(CompletionRequest, await self._body(request))
        model, prompts = self._find(asked.model), list[list[int]]()
        if len(asked.prompts) * asked.n > (most := model.engine.max_batch + self._limits.max_queue):
            raise ApiError(400, f"prompt: this server writes at most {most} answers to one request", param="prompt")
        for given in asked.prompts:
            ids = await _checked(model.prompts.text, given) if isinstance(given, str) else given
            if any(not 0 <= token < model.engine.model.spec.vocab for token in ids):
                raise ApiError(
                    400, f"prompt: token ids go from 0 to {model.engine.model.spec.vocab - 1}", param="prompt"
                )
            prompts.append(ids)
        return await self._generate(request, model, asked, prompts, model.prompts.text_ends)

    async def _body(self, request: Request) -> bytes:
        if "json" not in request.headers.get("content-type", ""):  # forms of other web pages can send other types
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        body, size = bytearray(), 0
        async for piece in request.stream():
            size += len(piece)
            if size <= self._limits.max_body:
                body += piece
            elif size > DISCARDED:
                break
        if size > self._limits.max_body:
            raise ApiError(413, f"the body is larger than this server's limit of {self._limits.max_body} bytes")
        return bytes(body)

    async def _generate(
        self, request: Request, model: Served, asked: Generation, prompts: Sequence[Sequence[int]], ends: Any
    ) -> Response:
        sampling = asked.sampling()
        requests = [
            engine.Request(
                prompt=prompt,
                max_tokens=_room(prompt, asked.wanted_tokens, model.engine.max_context),
                sampling=sampling,
                row=row,
                ends=ends,
                stops=asked.stops,
                logprobs=asked.wanted_logprobs,
            )
            for prompt in prompts
            for row in range(asked.n)
        ]
        heard: asyncio.Queue[Heard] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(number: int, answer: engine.Answer, tokens: list[engine.Token], text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(heard.put_nowait, (number, answer, tokens, text, answer.finish))

        try:
            cancel = self._worker.submit(model.name, requests, listen)
        except BusyError:
            message = "too many requests are waiting; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded") from None
        wording = Wording(model.name, chat=isinstance(asked, ChatRequest), decode=model.tokenizer.decode)
        call = Call(self._metrics, requests, heard, cancel, sum(map(len, prompts)))
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = call.events(wording, begins=isinstance(asked, ChatRequest), with_usage=with_usage)
            return EventStream(call, events)
        answers = await call.answers(request)
        return JSONResponse(wording.whole(answers, call.prompt_tokens))


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
        gone = asyncio.create_task(_gone(request))
        try:
            async for _ in self._progress(gone):
                pass
        finally:
            gone.cancel()
            self.close()
        if any(answer.finish not in ("stop", "length") for answer in self._answers.values()):
            raise ApiError(500, "the server could not finish this answer")
        return [self._answers[number] for number in range(len(self._requests))]

    async def events(self, wording: Wording, *, begins: bool, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events."""
        if begins:
            for number in range(len(self._requests)):
                yield _event(wording.begin(number))
        async for number, answer, tokens, text, finish in self._progress(None):
            if text or (tokens and answer.request.logprobs is not None):
                yield _event(wording.part(number, answer.request, tokens, text))
            if finish in ("stop", "length"):
                yield _event(wording.end(number, finish))
            elif finish is not None:
                yield _event(ApiError(500, "the server could not finish this answer").body())
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
        """Call when the client has gone: cancels unfinished answers, and updates the counters."""
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
    """A call's events. The call is closed however sending ends, even before it starts."""

    def __init__(self, call: Call, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _checked(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a thread; a `UserError` becomes the client's error."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except UserError as error:
        raise ApiError(400, str(error)) from error


async def _parsed(kind: type[Generation], body: bytes) -> Any:
    """A request; a large one is read in a thread, while others are answered."""
    return await asyncio.to_thread(parse, kind, body) if len(body) > SMALL_BODY else parse(kind, body)


def _room(prompt: Sequence[int], wanted: int | None, room: int) -> int:
    """Most new tokens. Raises `ApiError` if the context has no room."""
    tokens = max(1, room - len(prompt)) if wanted is None else wanted
    try:
        check_room([prompt], tokens, room)
    except UserError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
    return tokens


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)
