"""The server: OpenAI's API, a chat page, health and metrics, as a Starlette application."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshwright.serve.api import ApiError, LoadAdapter, UnloadAdapter
from meshwright.serve.arena import Vote, add_vote
from meshwright.serve.browser import called, is_from_another_site, page
from meshwright.serve.endpoints import Endpoints, Served, ServerLimits
from meshwright.serve.incoming import checked, read_request
from meshwright.serve.metrics import Metrics
from meshwright.serve.worker import EngineThread

MAX_LOADED = 32
"""Most adapters that clients may have loaded at a time."""
LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")
"""Local names of this machine."""


Load = Callable[[str, str], Served]
"""(name, path) of an adapter to its model; raises `UserError` if it does not exist."""


class Server:
    """The routes and their shared state."""

    def __init__(self, models: Sequence[Served], limits: ServerLimits, load: Load | None = None) -> None:
        """`load` opens an adapter by its name and path; None if clients may not load any."""
        self._load_adapter, self._loaded, self._changing = load, set[str](), asyncio.Lock()
        self._models = {model.name: model for model in models}
        self._limits, self._metrics, self._started = limits, Metrics(), int(time.time())
        self._worker = EngineThread({model.name: model.engine for model in models}, max_queue=limits.max_queue)
        self._endpoints = Endpoints(self._models, self._worker, self._metrics, limits)

    def app(self) -> Starlette:
        """The application; it starts and stops the worker."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._worker.start()
            yield
            await asyncio.to_thread(self._worker.stop)
            self._endpoints.close()

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
            Route("/v1/chat/completions", self._guarded(self._endpoints.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._endpoints.complete), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self._endpoints.embed), methods=["POST"]),
            Route("/tokenize", self._guarded(self._endpoints.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self._endpoints.detokenize), methods=["POST"]),
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
        return HTMLResponse(*page("chat"))

    async def _arena(self, _: Request) -> Response:
        if self._limits.votes is None:
            return PlainTextResponse("this server has no arena: serve two or more models with --votes FILE\n", 404)
        return HTMLResponse(*page("arena"))

    async def _vote(self, request: Request) -> Response:
        if self._limits.votes is None:
            raise ApiError(404, "this server does not collect votes: serve with --votes FILE")
        vote = await read_request(Vote, request, self._limits.max_body)
        await asyncio.to_thread(add_vote, self._limits.votes, vote)
        return JSONResponse({"status": "ok"})

    async def _load(self, request: Request) -> Response:
        if self._load_adapter is None:
            raise ApiError(403, "this server does not load adapters: serve with --adapters-from DIR")
        body = await read_request(LoadAdapter, request, self._limits.max_body)
        async with self._changing:
            if body.lora_name in self._models:
                raise ApiError(400, f"model {body.lora_name!r} already exists; unload it first", param="lora_name")
            if len(self._loaded) >= MAX_LOADED:
                raise ApiError(400, f"the limit of {MAX_LOADED} loaded adapters is reached; unload one first")
            served = await checked(self._load_adapter, body.lora_name, body.lora_path)
            self._worker.add(served.name, served.engine)
            self._models[served.name] = served
            self._loaded.add(served.name)
        return PlainTextResponse(f"Success: LoRA adapter '{served.name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = (await read_request(UnloadAdapter, request, self._limits.max_body)).lora_name
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
        return JSONResponse({"object": "list", "data": [self._description(model) for model in self._models.values()]})

    async def _one(self, request: Request) -> Response:
        return JSONResponse(self._description(self._endpoints.find(request.path_params["name"])))

    def _description(self, model: Served) -> dict[str, Any]:
        facts = {"max_context": model.engine.max_context, "chat": model.prompts.chats}
        fields = {"id": model.name, "object": "model", "created": self._started, "owned_by": "meshwright"}
        return {**fields, **facts, "source": model.about}


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)
