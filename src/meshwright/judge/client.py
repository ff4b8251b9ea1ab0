"""A judge behind OpenAI's API: one chat completion per prompt, retried if the server is busy."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from meshwright.spec.errors import UserError

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts."""
TIMEOUT = 300.0
"""Seconds to wait for a response."""
LARGEST_REPLY = 2**24
"""Bytes of a response."""
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Reply:
    """The judge's reply, and the numbers of tokens read and written."""

    text: str
    prompt_tokens: int
    completion_tokens: int


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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--judge {url}: is not a URL; give the server's, such as http://localhost:8000/v1")
        if key is not None and parts.scheme == "http" and parts.hostname not in LOCAL:
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
        found = self._call("/chat/completions", body)
        try:
            text = found["choices"][0]["message"]["content"] or ""
            usage = found.get("usage") or {}
            return Reply(str(text), int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"--judge {self.url}: does not answer in the format of OpenAI's chat completions"
            ) from error

    def _only_model(self) -> str:
        found = self._call("/models", None)
        try:
            names = [str(one["id"]) for one in found["data"]]
        except (KeyError, TypeError) as error:
            raise UserError(f"--judge {self.url}: lists no models; name one with --judge-model") from error
        if len(names) != 1:
            told = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
            raise UserError(f"--judge {self.url}: has {len(names)} models ({told}); name one with --judge-model")
        return names[0]

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "meshwright"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        problem = "no attempt"
        for attempt in range(self._attempts):
            request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers)
            asked_to_wait = None
            try:
                with _opener.open(request, timeout=TIMEOUT) as response:
                    return json.loads(response.read(LARGEST_REPLY))
            except urllib.error.HTTPError as error:
                with error:
                    problem = f"status {error.code}: {_message(error.read(LARGEST_REPLY))}"
                    asked_to_wait = error.headers.get("Retry-After")
                if error.code not in BUSY:
                    raise UserError(f"--judge {self.url}{path}: {problem}") from None
            except (OSError, HTTPException) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                raise UserError(f"--judge {self.url}{path}: does not answer with JSON ({error})") from error
            if attempt < self._attempts - 1:
                self._sleep(_wait(attempt, asked_to_wait))
        raise UserError(f"--judge {self.url}{path}: {problem} ({self._attempts} attempts)")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another server."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """See urllib."""


_opener = urllib.request.build_opener(_NoRedirects)


def _wait(attempt: int, asked: str | None) -> float:
    seconds = 2.0**attempt
    with contextlib.suppress(TypeError, ValueError):
        seconds = max(seconds, float(asked or 0))
    return min(seconds, LONGEST_WAIT)


def _message(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])[:300]
    return body.decode(errors="replace").strip()[:300] or "no explanation"
