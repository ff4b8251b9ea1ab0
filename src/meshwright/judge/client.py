"""A judge behind OpenAI's API: one chat completion per prompt, retried if the server is busy."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from meshwright.judge.transport import exchange, is_this_machine, server_at
from meshwright.spec.errors import UserError

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts."""
MOST_TOKENS = 10**9
"""Tokens of a request that a server can claim."""


@dataclass(frozen=True)
class Reply:
    """The judge's reply, and the numbers of tokens read and written."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _TokenCounts(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    completion_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _TokenCounts | None = None


class _ListedModel(BaseModel):
    id: str


class _ModelList(BaseModel):
    data: list[_ListedModel]


class _Fault(BaseModel):
    message: str


class _Refusal(BaseModel):
    error: _Fault


ResponseT = TypeVar("ResponseT", bound=BaseModel)


class Client:
    """One model of one server. Thread-safe."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        attempts: int = 6,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`url`: for example http://localhost:8000/v1. `model`: its name there; None if the server has only one. Raises
        `UserError` if the address is invalid, the key would be sent unencrypted, or the model must be named."""
        self._server = server_at(url)
        if key is not None and self._server.scheme == "http" and not is_this_machine(self._server):
            raise UserError(f"--judge {url}: the API key would be sent unencrypted; give an https URL")
        self.url, self._key, self._attempts, self._sleep = url.rstrip("/"), key, attempts, sleep
        self.model = model or self._only_model()

    def ask(self, prompt: str, *, max_tokens: int) -> Reply:
        """The reply to one prompt, at temperature 0. Raises `UserError` if the server refuses, or stays busy."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        completion = self._call("/chat/completions", body, _Completion)
        usage = completion.usage or _TokenCounts()
        return Reply(completion.choices[0].message.content or "", usage.prompt_tokens, usage.completion_tokens)

    def _only_model(self) -> str:
        names = [one.id for one in self._call("/models", None, _ModelList).data]
        if len(names) != 1:
            listed = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
            raise UserError(f"--judge {self.url}: has {len(names)} models ({listed}); name one with --judge-model")
        return names[0]

    def _call(self, path: str, body: dict[str, Any] | None, kind: type[ResponseT]) -> ResponseT:
        headers = {"Content-Type": "application/json", "User-Agent": "meshwright"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        problem = "no attempt"
        for attempt in range(self._attempts):
            wanted_wait = None
            try:
                status, wanted_wait, content = exchange(self._server, path, data, headers)
                if status == 200:
                    return _parsed(kind, content, f"--judge {self.url}{path}")
                problem = f"status {status}: {_message(content)}"
                if status not in BUSY:
                    raise UserError(f"--judge {self.url}{path}: {problem}")
            except (OSError, HTTPException) as error:
                problem = str(error) or type(error).__name__
            if attempt < self._attempts - 1:
                self._sleep(_wait(attempt, wanted_wait))
        raise UserError(f"--judge {self.url}{path}: {problem} ({self._attempts} attempts)")


def _parsed(kind: type[ResponseT], content: bytes, where: str) -> ResponseT:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise UserError(f"{where}: does not answer with JSON ({first['msg'].removeprefix('Invalid JSON: ')})")
    place = ".".join(map(str, first["loc"])) or "the response"
    raise UserError(f"{where}: does not answer in OpenAI's format ({place}: {first['msg'].lower()})")


def _wait(attempt: int, wanted: str | None) -> float:
    seconds = 2.0**attempt
    with contextlib.suppress(TypeError, ValueError):
        seconds = max(seconds, float(wanted or 0))
    return min(seconds, LONGEST_WAIT)


def _message(content: bytes) -> str:
    with contextlib.suppress(ValidationError):
        return _Refusal.model_validate_json(content).error.message[:300]
    return content[:2000].decode(errors="replace").strip()[:300] or "no explanation"
