"""The server: OpenAI's API, a chat page, health and metrics, as a Starlette application."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshwright.data.tokenizer import TextTokenizer
from meshwright.models.generate import check_room
from meshwright.serve import engine
from meshwright.serve.api import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    LoadAdapter,
    UnloadAdapter,
    Wording,
    parse,
)
from meshwright.serve.arena import Vote, add_vote
from meshwright.serve.browser import ARENA, CHAT, called, is_from_another_site, is_json, page
from meshwright.serve.calls import Call, EventStream, Heard
from meshwright.serve.conversation import PromptEncoder
from meshwright.serve.grammar import Grammar, Grammars
from meshwright.serve.metrics import Metrics
from meshwright.serve.worker import BusyError, EngineThread
from meshwright.spec.errors import UserError

MAX_BODY = 4 * 2**20
"""Default limit for the bytes of a request."""
SMALL_BODY = 2**16
"""Bytes that are parsed in about a millisecond."""
DISCARDED = 64 * 2**20
"""Bytes of an oversized request that are read and discarded, so that the client can receive the error."""
MAX_LOADED = 32
"""Most adapters that clients may have loaded at a time."""
LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")
"""Local names of this machine."""


@dataclass(frozen=True)
class Served:
    """A model and its name."""

    name: str
    engine: engine.InferenceEngine
    tokenizer: TextTokenizer
    prompts: PromptEncoder
    grammars: Grammars
    about: str
    """Its origin, as text."""


Load = Callable[[str, str], Served]
"""(name, path) of an adapter to its model; raises `UserError` if it does not exist."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of a server."""

    max_body: int = MAX_BODY
    max_queue: int = 64
    api_key: str | None = None
    """Without a key, only requests for a local host name are answered, so that no web page in a local browser can reach
    the server under its own name (DNS rebinding)."""
    votes: Path | None = None
    """The file for the arena's votes; None: no arena."""


class Server:
    """The routes and their shared state."""

    def __init__(self, models: Sequence[Served], limits: ServerLimits, load: Load | None = None) -> None:
        """`load` opens an adapter by its name and path; None if clients may not load any."""
        self._load_adapter, self._loaded, self._changing = load, set[str](), asyncio.Lock()
        self._models = {model.name: model for model in models}
        self._limits, self._metrics, self._started = limits, Metrics(), int(time.time())
        self._compiler = ThreadPoolExecutor(1, "meshwright-grammars")
        self._worker = EngineThread({model.name: model.engine for model in models}, max_queue=limits.max_queue)

    def app(self) -> Starlette:
        """The application; it starts and stops the worker."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._worker.start()
            yield
            await asyncio.to_thread(self._worker.stop)
            self._compiler.shutdown()

        routes = [
            Route("/", self._page),
            Route("/arena", self._arena),
            Route("/arena/votes", self._guarded(self._vote), methods=["POST"]),
            Route("/v1/load_lora_adapter", self._guarded(self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._guarded(self._unload), methods=["POST"]),
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
            raise ApiError(403, f"this server answers only as localhost, not as {name}")
        if request.method == "POST" and is_from_another_site(request):
            raise ApiError(403, "this server answers no web page of another origin; use the page at /")

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(*page(CHAT))

    async def _arena(self, _: Request) -> Response:
        if self._limits.votes is None:
            return PlainTextResponse("this server has no arena: serve two or more models with --votes FILE\n", 404)
        return HTMLResponse(*page(ARENA))

    async def _vote(self, request: Request) -> Response:
        if self._limits.votes is None:
            raise ApiError(404, "this server does not collect votes: serve with --votes FILE")
        vote: Vote = parse(Vote, await self._body(request))
        await asyncio.to_thread(add_vote, self._limits.votes, vote)
        return JSONResponse({"status": "ok"})

    async def _load(self, request: Request) -> Response:
        if self._load_adapter is None:
            raise ApiError(403, "this server does not load adapters: serve with --adapters-from DIR")
        asked: LoadAdapter = parse(LoadAdapter, await self._body(request))
        async with self._changing:
            if asked.lora_name in self._models:
                raise ApiError(400, f"model {asked.lora_name!r} already exists; unload it first", param="lora_name")
            if len(self._loaded) >= MAX_LOADED:
                raise ApiError(400, f"the limit of {MAX_LOADED} loaded adapters is reached; unload one first")
            served = await _checked(self._load_adapter, asked.lora_name, asked.lora_path)
            self._worker.add(served.name, served.engine)
            self._models[served.name] = served
            self._loaded.add(served.name)
        return PlainTextResponse(f"Success: LoRA adapter '{served.name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = parse(UnloadAdapter, await self._body(request)).lora_name
        async with self._changing:
            if name not in self._loaded:
                message = f"adapter {name!r} is not loaded; loaded are: {', '.join(sorted(self._loaded)) or 'none'}"
                raise ApiError(404, message, code="model_not_found", param="lora_name")
            self._loaded.remove(name)
            del self._models[name]
            self._worker.remove(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

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
            message = f"model {name!r} does not exist; available are {known}"
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
            raise ApiError(400, f"prompt: this server generates at most {most} answers per request", param="prompt")
        for given in asked.prompts:
            ids = await _checked(model.prompts.text, given) if isinstance(given, str) else given
            if any(not 0 <= token < model.engine.model.spec.vocab for token in ids):
                raise ApiError(
                    400, f"prompt: token ids must be from 0 to {model.engine.model.spec.vocab - 1}", param="prompt"
                )
            prompts.append(ids)
        return await self._generate(request, model, asked, prompts, model.prompts.text_ends)

    async def _body(self, request: Request) -> bytes:
        if not is_json(request):
            raise ApiError(415, "send JSON with the header Content-Type: application/json")
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
        echoes = isinstance(asked, CompletionRequest) and bool(asked.echo)
        biases = asked.biases(model.engine.model.spec.vocab)
        sampling, grammar = asked.sampling(), await self._grammar(model, asked, ends)
        requests = [
            engine.Request(
                prompt=prompt,
                max_tokens=_room(prompt, asked.wanted_tokens, model.engine.max_context),
                sampling=sampling,
                row=row,
                ends=ends,
                stops=asked.stops,
                logprobs=asked.wanted_logprobs,
                scores_prompt=echoes,
                bias=biases,
                grammar=grammar,
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
        except KeyError:
            raise ApiError(404, f"the model {model.name!r} was unloaded", code="model_not_found") from None
        except BusyError:
            message = "too many requests are waiting; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded") from None
        decode = model.tokenizer.decode
        texts = [decode(request.prompt) for request in requests] if echoes else []
        wording = Wording(model.name, chat=isinstance(asked, ChatRequest), decode=decode, echoes=texts)
        call = Call(self._metrics, requests, heard, cancel, sum(map(len, prompts)))
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = call.events(wording, begins=isinstance(asked, ChatRequest), with_usage=with_usage)
            return EventStream(call, events)
        answers = await call.answers(request)
        return JSONResponse(wording.whole(answers, call.prompt_tokens))

    async def _grammar(self, model: Served, asked: Generation, ends: Any) -> Grammar | None:
        """The grammar that answers must follow; compiled in a thread, one at a time, while other requests are
        answered."""
        if (form := asked.form) is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compiler, model.grammars.compile, form.kind, form.text, ends)
        except UserError as error:
            raise ApiError(400, f"{form.param}: {error}", param=form.param) from error


async def _checked(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a thread; a `UserError` becomes the client's error."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except UserError as error:
        raise ApiError(400, str(error)) from error


async def _parsed(kind: type[Generation], body: bytes) -> Any:
    """A request; a large one is parsed in a thread while other requests are answered."""
    return await asyncio.to_thread(parse, kind, body) if len(body) > SMALL_BODY else parse(kind, body)


def _room(prompt: Sequence[int], wanted: int | None, room: int) -> int:
    """Most new tokens. Raises `ApiError` if the context has no room."""
    tokens = max(1, room - len(prompt)) if wanted is None else wanted
    try:
        check_room([prompt], max(1, tokens), room)
    except UserError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
    return tokens


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)
