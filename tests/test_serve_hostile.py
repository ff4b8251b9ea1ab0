"""The server and strangers: requests at the limits, bytes that are not a request, clients that stall."""

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from starlette.routing import Route

from meshwright.data.tokenizer import TextTokenizer
from meshwright.serve.api import ApiError, ChatRequest, CompletionRequest, parse
from meshwright.serve.browser import page
from meshwright.serve.calls import Call, EventStream
from meshwright.serve.connections import Connection
from meshwright.serve.http import Server, ServerLimits
from meshwright.serve.metrics import Metrics
from meshwright.serve.served import Capacity, serve_as
from meshwright.spec.errors import UserError
from served import model_of
from test_serve import QUESTION, SECONDS, Running, running, trained


@pytest.fixture(scope="module")
def base() -> Any:
    return model_of("llama", max_positions=256)


@pytest.fixture(scope="module")
def server(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    def load(name: str, path: str) -> Any:
        raise UserError("no adapter is here")

    votes = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    with running({"base": base}, max_queue=64, max_body=100_000, load=load, votes=votes) as found:
        yield found


def test_the_page_is_served_with_its_headers(server: Running) -> None:
    assert page("chat")[2].items() <= httpx.get(server.url).headers.items()


@pytest.mark.parametrize("name", ["chat", "arena"])
def test_a_browser_runs_the_pages_and_nothing_else(name: Any) -> None:
    """Their scripts and style are allowed by their hashes; no other page may show them in a frame."""
    text, _, headers = page(name)
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert set(policy) == {
        *("default-src", "script-src", "connect-src", "base-uri", "form-action", "style-src", "frame-ancestors")
    }
    for kind in ("script", "style"):
        parts = [part.split(f"</{kind}>")[0] for part in text.split(f"<{kind}>")[1:]]
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert " style=" not in text
    assert " on" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert headers["x-content-type-options"] == "nosniff"


ASKED = json.dumps({"model": "base", "messages": QUESTION}).encode()
EXTREME = {
    "seed": ({"seed": 10**30}, 400),
    "digits": (ASKED[:-1] + b', "seed": ' + b"9" * 90_000 + b"}", 400),
    "cold": ({"temperature": 1e-320}, 200),
    "hot": ({"temperature": 100, "presence_penalty": -2, "frequency_penalty": -2}, 200),
    "penalty": ({"repetition_penalty": 1e-300}, 400),
    "small penalty": ({"repetition_penalty": 1e-6}, 200),
    "no number": (ASKED[:-1] + b', "temperature": NaN}', 400),
    "half a character": (ASKED.replace(b"add_7", b"\\ud800"), 400),
    "nul": ({"messages": [{"role": "user", "content": "\0\x1b[2J<script>"}]}, 200),
    "deep": (b'{"model": "base", "messages": ' + b"[" * 49_000 + b"]" * 49_000 + b"}", 400),
    "deep tools": (ASKED[:-1] + b', "tools": [' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"]}", 400),
    "top": ({"top_k": 10**25}, 200),
    "long stop": ({"stop": "x" * 2000}, 400),
    "many tokens": ({"max_tokens": 10**30}, 400),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_requests_end_alone(server: Running, name: str) -> None:
    """Another client's answer in progress continues."""
    content, status = EXTREME[name]
    if not isinstance(content, bytes):
        content = json.dumps({"model": "base", "messages": QUESTION, "max_tokens": 4, **content}).encode()
    stream = server.client.chat.completions.create(model="base", messages=QUESTION, max_tokens=200, stream=True)  # type: ignore[arg-type]
    next(iter(stream))
    url, headers = f"{server.url}/v1/chat/completions", {"content-type": "application/json"}
    answer = httpx.post(url, content=content, headers=headers, timeout=SECONDS)
    assert answer.status_code == status, answer.text
    assert (status == 200) == ("choices" in answer.json())
    assert [choice.finish_reason for part in stream for choice in part.choices][-1] in ("stop", "length")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


LONG = {
    "spelled tokens": "<|im_end|>" * 390_000,
    "words": "def " * 975_000,
    "one word": "x" * 3_900_000,
    "spaces": " " * 3_900_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_prompt_is_refused_before_it_is_encoded(base: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTokenizer, "encode_prompt", None)
    monkeypatch.setattr(TextTokenizer, "encode_conversation", None)
    messages = [{"role": "user", "content": LONG[name]}]
    with running({"base": base}) as server:
        for path, body in (("completions", {"prompt": LONG[name]}), ("chat/completions", {"messages": messages})):
            answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "base", **body}, timeout=SECONDS)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert re.match(r"the prompt has at least \d{6} tokens, but the model supports 256", error["message"])


LISTS: dict[str, Any] = {
    "prompts": {"prompt": [{"a": 1}] * 300_000},
    "token ids": {"prompt": [[None]] * 300_000},
    "messages": {"messages": [None] * 600_000},
    "many messages": {"messages": [{"role": "user", "content": ""}] * 20_000},
}


@pytest.mark.parametrize("name", LISTS)
def test_a_long_list_is_refused_at_its_first_fault(name: str) -> None:
    """A million faults would take a minute and gigabytes."""
    kind = ChatRequest if "messages" in name else CompletionRequest
    body = json.dumps({"model": "base", **LISTS[name]}).encode()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body)
    assert caught.value.error_count() < 10
    with pytest.raises(ApiError):
        parse(kind, body)


def test_a_text_has_a_limited_number_of_answers(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "base", "prompt": ["x"] * 30, "n": 3})
    assert (answer.status_code, "at most 72 answers" in answer.text) == (400, True)


STATE = ("chat/completions", "completions", "embeddings", "load_lora_adapter", "unload_lora_adapter")
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", [*(f"/v1/{name}" for name in STATE), "/arena/votes", "/tokenize", "/detokenize"])
def test_pages_of_other_origins_are_refused(server: Running, path: str) -> None:
    """By the type of the body, which such a page cannot choose freely, and by the browser's own headers."""

    def status(**headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(server.url + path, content=ASKED, headers=given, timeout=SECONDS).status_code

    for kind in ("text/plain; json", "text/plain; application/json", "application/jsonp", "x/json", "", "*/*"):
        assert status(content_type=kind) == 415, kind
    here = f"127.0.0.1:{server.port}"
    refused: tuple[dict[str, str], ...] = (
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "same-site, same-origin"},
        {"origin": "http://evil.example"},
        {"origin": f"http://{here}.evil.example"},
        {"origin": f"http://evil@{here}"},
        {"origin": f"http://localhost:{server.port}"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": f"http://{here}", "sec_fetch_site": "cross-site"},
    )
    for headers in refused:
        assert status(content_type="application/json", **headers) == 403, headers
    allowed: tuple[dict[str, str], ...] = (
        {},
        {"origin": f"http://{here}"},
        {"origin": f"http://{here}", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    )
    for headers in allowed:
        for kind in ("application/json", "Application/JSON ; charset=utf-8"):
            assert status(content_type=kind, **headers) not in (403, 415)


def test_every_path_that_takes_a_body_is_among_them(base: Any) -> None:
    app = Server([serve_as(trained(base), "base", Capacity(max_batch=1))], ServerLimits()).app()
    posted = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    assert posted == {*(f"/v1/{name}" for name in STATE), "/arena/votes", "/tokenize", "/detokenize"}


def test_links_of_other_sites_may_show_the_page(server: Running) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models"):
        headers = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
        assert httpx.get(server.url + path, headers=headers).status_code == 200


def raw(server: Running, sent: bytes) -> bytes:
    """The response to a client that does not speak valid HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as client:
        heard = b""
        with contextlib.suppress(OSError):  # the server has closed the connection
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                heard += piece
    return heard


def said(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    """A request to this machine."""
    return b"\r\n".join((line + b" HTTP/1.1", b"Host: localhost", b"Connection: close", *headers, b"", body))


GET = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n"
POST = b"POST /v1/completions"
RAW = {
    "no name": (GET + b"Host: [\r\n\r\n", b"403"),
    "half a name": (GET + b"Host: [::1\r\n\r\n", b"403"),
    "a name behind another": (GET + b"Host: localhost.evil.example\r\n\r\n", b"403"),
    "no host": (GET + b"\r\n", b"400"),
    "two hosts": (said(b"GET /v1/models", b"Host: evil.example"), b"400"),
    "headers without end": (b"GET / HTTP/1.1\r\nX-Much: " + b"x" * 200_000, b"400"),
    "many headers": (said(b"GET /", *(b"X-%d: y" % number for number in range(20_000))), b"400"),
    "no HTTP": (b"\x16\x03\x01\x02\x00" + b"\0" * 512, b"400"),
    "two lengths": (said(POST, b"Content-Length: 2", b"Content-Length: 9", body=b"{}"), b"400"),
    "a path of dots": (said(b"GET /../../../../etc/passwd"), b"404"),
    "hidden dots": (said(b"GET /v1/models/..%2f..%2f..%2fetc%2fpasswd"), b"404"),
    "another protocol": (said(b"GET /", b"Upgrade: websocket", b"Connection: Upgrade"), b"200"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_request_is_refused(server: Running, name: str) -> None:
    sent, status = RAW[name]
    heard = raw(server, sent)
    assert len(sent) > 100_000 or heard.split(b" ")[1] == status, heard
    assert b" 200 " not in heard or status == b"200"
    assert b"root:x:" not in heard
    assert b"Traceback" not in heard
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


BEGUN = POST + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", BEGUN], ids=["silent", "headers", "body"]
)
def test_who_does_not_go_on_loses_the_connection(server: Running, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly it sends: the deadline is for the complete request."""
    monkeypatch.setattr(Connection, "request_seconds", 1.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as client:
        client.sendall(sent)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() - began < SECONDS:
                client.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    assert client.recv(100) == b""
                    break
                client.sendall(b"x" if sent else b"")
        assert 0.5 < time.monotonic() - began < SECONDS / 2


@pytest.mark.parametrize("reads", [0, 1], ids=["nothing", "a byte at a time"])
def test_who_does_not_read_loses_the_connection(server: Running, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelined requests whose answers fill every buffer."""
    monkeypatch.setattr(Connection, "reading_seconds", 0.5)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(0.05)
        waiting, end = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000, time.monotonic() + SECONDS
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    waiting = waiting[client.send(waiting) :] or b"GET "
                if reads:
                    client.recv(reads)
        assert time.monotonic() < end
    assert server.settles("meshwright_requests_running", 0)


def test_a_lost_connection_is_noticed_between_two_events() -> None:
    """asyncio complains about every event that is written after the loss."""
    sent, lost = list[str](), list[bool]()

    async def send(message: Any) -> None:
        if not sent:
            asyncio.get_running_loop().call_soon(lost.append, True)
        if not lost:
            sent.append(message["type"])

    async def events() -> AsyncIterator[str]:
        for _ in range(100):
            yield "data: x\n\n"

    async def receive() -> Any:
        await asyncio.sleep(SECONDS)

    call = Call(Metrics(), [], asyncio.Queue(), lambda: None, 0)
    asyncio.run(EventStream(call, events())({"type": "http"}, receive, send))
    assert sent == ["http.response.start"]


@pytest.mark.slow
def test_a_long_answer_outlasts_the_limit_of_requests(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "request_seconds", 0.2)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)) as client:
        for _ in range(2):  # on one connection
            body = json.dumps({"model": "base", "prompt": "def", "max_tokens": 200, "stream": True, "stop": None})
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            assert client.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_a_damaged_model_is_told_and_does_not_end_the_server(base: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = model_of("llama", max_positions=256)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with running({"broken": broken, "base": base}) as server:
        for name, status in (("broken", 500), ("base", 200)):
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": name, "prompt": "def"}, timeout=SECONDS)
            assert answer.status_code == status
    assert "the model's output is not finite" in caplog.text
    assert "Traceback" not in caplog.text
