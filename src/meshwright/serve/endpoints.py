"""OpenAI's API as requests to a model's engine: conversations and texts to be answered."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from meshwright.data.tokenizer import TextTokenizer
from meshwright.data.tools import tools_of
from meshwright.models.generate import Sampling, check_room
from meshwright.serve import engine
from meshwright.serve.api import (
    AnswerFormat,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Generation,
    NamedTool,
    TokenizeRequest,
)
from meshwright.serve.calls import Call, EventStream, Heard
from meshwright.serve.conversation import EncodingLimits, PromptEncoder
from meshwright.serve.grammar import Grammar, Grammars
from meshwright.serve.incoming import checked, encoded, read_request
from meshwright.serve.metrics import Metrics
from meshwright.serve.wording import ToolChoice, Wording, embeddings
from meshwright.serve.worker import BusyError, EngineThread
from meshwright.spec.errors import UserError

MAX_BODY = 4 * 2**20
"""Default limit for the bytes of a request."""
GREEDY = Sampling(temperature=0)
ENCODERS = 2
"""Threads that encode prompts, apart from those for all other work."""


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


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of one request."""

    ids: Sequence[Sequence[int]]
    ends: frozenset[int]
    """Tokens that end their answers."""
    tools: ToolChoice | None = None
    """The tools that answers may call."""


class Endpoints:
    """The endpoints of several models."""

    def __init__(
        self, models: Mapping[str, Served], worker: EngineThread, metrics: Metrics, limits: ServerLimits
    ) -> None:
        """`models`: by name; clients may add and remove some."""
        self._models, self._worker, self._metrics, self._limits = models, worker, metrics, limits
        self._compiler = ThreadPoolExecutor(1, "meshwright-grammars")
        self._encoders = ThreadPoolExecutor(ENCODERS, "meshwright-prompts")

    def close(self) -> None:
        """End the threads."""
        self._compiler.shutdown()
        self._encoders.shutdown(cancel_futures=True)

    def find(self, name: str) -> Served:
        """The model of this name. Raises `ApiError` if there is none."""
        if name not in self._models:
            known = ", ".join(self._models)
            message = f"model {name!r} does not exist; available are {known}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self._models[name]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await read_request(ChatRequest, request, self._limits.max_body)
        model = self.find(body.model)
        if not model.prompts.chats:
            raise ApiError(400, f"{model.name} has no chat template; use /v1/completions", param="messages")
        tools = body.tools if body.tool_choice != "none" else None

        def work(limits: EncodingLimits) -> tuple[list[int], ToolChoice | None]:
            messages = [message.plain() for message in body.messages]
            arguments = body.chat_template_kwargs
            return model.prompts.conversation(messages, tools, limits, arguments=arguments), _tools(model, body)

        prompt, choice = await encoded(request, self._encoders, work, model.engine.max_context)
        return await self._generate(request, model, body, EncodedPrompts([prompt], model.prompts.answer_ends, choice))

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        body = await read_request(CompletionRequest, request, self._limits.max_body)
        model = self.find(body.model)
        if len(body.prompts) * body.n > (most := model.engine.max_batch + self._limits.max_queue):
            raise ApiError(400, f"prompt: this server generates at most {most} answers per request", param="prompt")
        prompts = await encoded(
            request, self._encoders, lambda limits: _ids(model, body.prompts, limits), model.engine.max_context
        )
        return await self._generate(request, model, body, EncodedPrompts(prompts, model.prompts.text_ends))

    async def _generate(self, request: Request, model: Served, body: Generation, prompts: EncodedPrompts) -> Response:
        echoes = isinstance(body, CompletionRequest) and bool(body.echo)
        biases = body.biases(model.engine.model.spec.vocab)
        sampling, grammar = body.sampling(), await self._grammar(model, body, prompts)
        requests = [
            engine.Request(
                prompt=prompt,
                max_tokens=_room(prompt, body.wanted_tokens, model.engine.max_context),
                sampling=sampling,
                row=row,
                ends=prompts.ends,
                stops=body.stops,
                logprobs=body.wanted_logprobs,
                scores_prompt=echoes,
                bias=biases,
                grammar=grammar,
                decode=model.prompts.decode_calls if prompts.tools else None,
            )
            for prompt in prompts.ids
            for row in range(body.n)
        ]
        call = self._submit(model, requests, sum(map(len, prompts.ids)))
        decode = model.tokenizer.decode
        texts = [decode(request.prompt) for request in requests] if echoes else []
        chats = isinstance(body, ChatRequest)
        wording = Wording(model.name, chat=chats, decode=decode, echoes=texts, tools=prompts.tools)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(call, call.events(wording, begins=chats, with_usage=with_usage))
        answers = await call.answers(request)
        return JSONResponse(wording.whole(answers, call.prompt_tokens))

    def _submit(self, model: Served, requests: Sequence[engine.Request], prompt_tokens: int) -> Call:
        """Queue requests. Raises `ApiError` if the queue is full, or the model is no longer there."""
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
        return Call(self._metrics, requests, heard, cancel, prompt_tokens)

    async def embed(self, request: Request) -> Response:
        """Embed texts: the last hidden state of each one's last token, with length 1."""
        body = await read_request(EmbeddingRequest, request, self._limits.max_body)
        model = self.find(body.model)
        if not model.engine.embeds:
            raise ApiError(400, "embeddings need one process: serve without layout.tp", param="model")
        prompts = await encoded(
            request, self._encoders, lambda limits: _ids(model, body.prompts, limits), model.engine.max_context
        )
        vectors: list[torch.Tensor] = []
        for begin in range(0, len(prompts), model.engine.max_batch):
            some = prompts[begin : begin + model.engine.max_batch]
            for prompt in some:
                _room(prompt, 1, model.engine.max_context)
            requests = [engine.Request(prompt=ids, max_tokens=0, sampling=GREEDY, embeds=True) for ids in some]
            answers = await self._submit(model, requests, sum(map(len, some))).answers(request)
            vectors += [answer.embedding for answer in answers if answer.embedding is not None]
        content = embeddings(model.name, vectors, body.encoding_format, sum(map(len, prompts)))
        return JSONResponse(content)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation, of any length."""
        body = await read_request(TokenizeRequest, request, self._limits.max_body)
        model = self._first(body.model)

        def work(limits: EncodingLimits) -> list[int]:
            if body.messages is None:
                return model.prompts.tokens(body.prompt or "", limits, around=body.add_special_tokens)
            messages, arguments = [message.plain() for message in body.messages], body.chat_template_kwargs
            return model.prompts.conversation(
                messages, body.tools, limits, arguments=arguments, answer=body.add_generation_prompt
            )

        ids = await encoded(request, self._encoders, work)
        texts = [model.tokenizer.token(number) for number in ids] if body.return_token_strs else None
        content = {"count": len(ids), "max_model_len": model.engine.max_context, "tokens": ids, "token_strs": texts}
        return JSONResponse(content)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await read_request(DetokenizeRequest, request, self._limits.max_body)
        model = self._first(body.model)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < model.engine.model.spec.vocab:
            message = f"tokens: token ids must be from 0 to {model.engine.model.spec.vocab - 1}"
            raise ApiError(400, message, param="tokens")
        return JSONResponse({"prompt": await checked(model.tokenizer.decode, body.tokens)})

    def _first(self, name: str | None) -> Served:
        """The model of this name; without one, the first."""
        return next(iter(self._models.values())) if name is None else self.find(name)

    async def _grammar(self, model: Served, body: Generation, prompts: EncodedPrompts) -> Grammar | None:
        """The grammar that answers must follow; compiled in a thread, one at a time, while other requests are
        answered."""
        form = body.form
        if prompts.tools is not None and prompts.tools.grammar is not None:
            if form is not None:
                raise ApiError(400, f"{form.param}: goes with tool_choice auto or none only", param=form.param)
            form = AnswerFormat("tools", "lark", prompts.tools.grammar)
        if form is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._compiler, model.grammars.compile, form.kind, form.text, prompts.ends
            )
        except UserError as error:
            raise ApiError(400, f"{form.param}: {error}", param=form.param) from error


def _tools(model: Served, body: ChatRequest) -> ToolChoice | None:
    """The tools that answers may or must call. Raises `ApiError` if the request demands calls that are not possible."""
    choice, form = body.tool_choice, model.prompts.calls
    tools = tools_of(body.tools or [], "tools") if choice != "none" else []
    names = tuple(tool["function"]["name"] for tool in tools)
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in names:
        raise ApiError(400, f"tool_choice: tools has no function {named!r}", param="tool_choice")
    demands = named is not None or choice == "required"
    if demands and not tools:
        raise ApiError(400, "tool_choice: required needs tools", param="tool_choice")
    if demands and form is None:
        message = "tool_choice: the model's chat template writes calls in no form that this server knows"
        raise ApiError(400, message, param="tool_choice")
    if form is None or not tools:
        return None
    grammar = None
    if demands:
        wanted = [tool for tool in tools if named in (None, tool["function"]["name"])]
        many = named is None and body.parallel_tool_calls is not False
        grammar = form.lark(wanted, model.tokenizer.token_id, many=many)
    return ToolChoice(form, names, named is not None, grammar)


def _ids(model: Served, given: Sequence[str | list[int]], limits: EncodingLimits) -> list[list[int]]:
    """The token ids of texts and of token ids. Raises like `EncodingLimits.check`, and `ApiError` for an id that is no
    token."""
    ids = []
    for one in given:
        if isinstance(one, str):
            ids.append(model.prompts.text(one, limits))
            continue
        limits.check(len(one))
        if min(one) < 0 or max(one) >= model.engine.model.spec.vocab:
            message = f"prompt: token ids must be from 0 to {model.engine.model.spec.vocab - 1}"
            raise ApiError(400, message, param="prompt")
        ids.append(one)
    return ids


def _room(prompt: Sequence[int], wanted: int | None, room: int) -> int:
    """Most new tokens. Raises `ApiError` if the context has no room."""
    tokens = max(1, room - len(prompt)) if wanted is None else wanted
    try:
        check_room([prompt], max(1, tokens), room)
    except UserError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
    return tokens
