"""Answers in the format of OpenAI's API, whole or in chunks."""

import base64
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.serve.engine import Answer, Request, Token
from meshwright.serve.tool_calls import CallForm, CallReader, ToolCall


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the answers to one request may call."""

    form: CallForm
    names: tuple[str, ...]
    named: bool
    """Whether the request demands a call of one function by its name."""
    grammar: str | None = None
    """llguidance's grammar of answers, if the request demands calls."""


class Wording:
    """The answers to one request, in the format of one of the two kinds."""

    def __init__(
        self,
        model: str,
        *,
        chat: bool,
        decode: Callable[[Sequence[int]], str],
        echoes: Sequence[str] = (),
        tools: ToolChoice | None = None,
    ) -> None:
        """`echoes`: the prompts' texts, which precede the answers. `tools`: those that answers may call."""
        self._model, self._chat, self._decode, self._echoes, self._tools = model, chat, decode, echoes, tools
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        self._readers: dict[int, CallReader] = {}

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """All answers, complete."""
        choices = []
        for number, answer in enumerate(answers):
            content = {"text": "".join(self._echoes[number : number + 1]) + answer.text}
            if self._chat:
                content = {"message": self._message(number, answer)}
            logprobs = self._logprobs(number, answer.request, [*answer.prompt, *answer.tokens, *self._ended(answer)])
            reason = self._reason(number, answer.finish)
            choices.append({"index": number, **content, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": usage(answers, prompt_tokens)}

    def _message(self, number: int, answer: Answer) -> dict[str, Any]:
        if self._tools is None:
            return {"role": "assistant", "content": answer.text, "refusal": None}
        reader = self._reader(number)
        parts = [*reader.add(answer.text), *reader.finish()]
        text = "".join(one for one in parts if isinstance(one, str))
        calls = [call.as_json() for call in reader.calls]
        message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _reader(self, number: int) -> CallReader:
        assert self._tools is not None
        return self._readers.setdefault(number, CallReader(self._tools.form, self._tools.names))

    def _reason(self, number: int, finish: str | None) -> str | None:
        """Why an answer has ended, in OpenAI's words: a call that names the one function wanted is no reason."""
        if self._tools is None or self._tools.named or finish != "stop" or not self._reader(number).calls:
            return finish
        return "tool_calls"

    def _deltas(self, number: int, parts: Sequence[str | ToolCall]) -> list[dict[str, Any]]:
        """Words and calls as changes of a message; a call comes whole."""
        deltas, place = [], len(self._reader(number).calls) if self._tools else 0
        place -= sum(isinstance(one, ToolCall) for one in parts)
        for one in parts:
            if isinstance(one, ToolCall):
                deltas.append({"delta": {"tool_calls": [{"index": place, **one.as_json()}]}})
                place += 1
            elif one:
                deltas.append({"delta": {"content": one}})
        return deltas

    def _chunks(self, number: int, deltas: Sequence[dict[str, Any]], logprobs: Any = None) -> list[dict[str, Any]]:
        """Chunks of an answer; the first has the log-probabilities."""
        shared = {"index": number, "finish_reason": None}
        return [
            self._chunk({**shared, **one, "logprobs": logprobs if first else None})
            for one, first in zip(deltas, [True, *[False] * len(deltas)], strict=False)
        ]

    def begin(self, number: int) -> dict[str, Any]:
        """The first chunk of an answer to a conversation."""
        return self._chunk({"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def echo(self, number: int, answer: Answer) -> list[dict[str, Any]]:
        """The prompt, before the first part of the answer, if it is wanted."""
        return self.parts(number, answer.request, answer.prompt, self._echoes[number]) if self._echoes else []

    def parts(self, number: int, request: Request, tokens: Sequence[Token], text: str) -> list[dict[str, Any]]:
        """New tokens and text of an answer, as chunks."""
        logprobs = self._logprobs(number, request, tokens) if tokens else None
        if not self._chat:
            deltas = [{"text": text}] if text or logprobs else []
        else:
            parts = [text] if self._tools is None else self._reader(number).add(text)
            deltas = self._deltas(number, parts) or ([{"delta": {"content": ""}}] if logprobs else [])
        return self._chunks(number, deltas, logprobs)

    def ends(self, number: int, answer: Answer, finish: str) -> list[dict[str, Any]]:
        """The rest of an answer, and the reason why it has ended."""
        deltas = [] if self._tools is None else self._deltas(number, self._reader(number).finish())
        ended = self._ended(answer)
        logprobs = self._logprobs(number, answer.request, ended) if ended else None
        last = {"index": number, **({"delta": {}} if self._chat else {"text": ""}), "logprobs": logprobs}
        return [*self._chunks(number, deltas), self._chunk({**last, "finish_reason": self._reason(number, finish)})]

    def usage(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """The last chunk, if requested."""
        return {**self._chunk(), "usage": usage(answers, prompt_tokens)}

    def _ended(self, answer: Answer) -> list[Token]:
        """The token that ended the answer, listed with the prompt's: evaluators count one token after the prompt."""
        return [answer.end] if answer.end is not None and answer.prompt else []

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk" if self._chat else "text_completion", list(choices))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _logprobs(self, number: int, request: Request, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if request.logprobs is None:
            return None
        if self._chat:
            return {"content": [self._token(token) for token in tokens], "refusal": None}
        texts = [self._decode([token.id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(text)
        top = [  # of tokens with the same text, such as parts of characters, the likeliest
            None if token.logprob is None else {self._decode([other]): value for other, value in reversed(token.top)}
            for token in tokens
        ]
        values = [token.logprob for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._one(other, value) for other, value in token.top]
        return {**self._one(token.id, token.logprob), "top_logprobs": top}

    def _one(self, number: int, logprob: float | None) -> dict[str, Any]:
        text = self._decode([number])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(answers: Sequence[Answer], prompt_tokens: int) -> dict[str, int]:
    """Tokens read and written."""
    written = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }


def embeddings(model: str, vectors: Sequence[torch.Tensor], form: str, prompt_tokens: int) -> dict[str, Any]:
    """Embeddings, scaled to length 1: lists of numbers, or the bytes of fp32 (`base64`)."""
    data = []
    for number, vector_D in enumerate(vectors):
        unit_D = F.normalize(vector_D.double(), dim=0).float().cpu()
        shown = unit_D.tolist() if form == "float" else base64.b64encode(unit_D.numpy().tobytes()).decode()
        data.append({"object": "embedding", "index": number, "embedding": shown})
    spent = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": spent}
