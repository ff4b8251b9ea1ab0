"""`judge` and its surroundings: proxies, replies that no judge would give, servers that stall; one line each."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.judge import transport
from meshwright.judge.client import Client
from meshwright.judge.questions import read_questions
from meshwright.spec.errors import UserError

SECONDS = 20


class Line:
    """A server on a plain socket: it records the beginning of each request and answers with given bytes."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self.heard, self._answer = list[bytes](), answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._ended = False

    def _serve(self) -> None:
        while True:
            client, _ = self._socket.accept()
            if self._ended:
                client.close()
                return
            with client, suppress(OSError):
                client.settimeout(SECONDS)
                self.heard.append(_request(client))
                self._answer(client)

    @contextmanager
    def __call__(self) -> Iterator["Line"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended = True
            socket.create_connection(("127.0.0.1", self.port)).close()
            self._thread.join()
            self._socket.close()


def _request(client: socket.socket) -> bytes:
    """A whole request: else closing the connection would reset it."""
    heard = b""
    while b"\r\n\r\n" not in heard and (piece := client.recv(65536)):
        heard += piece
    head, _, body = heard.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    while length and len(body) < int(length[1]) and (piece := client.recv(65536)):
        body += piece
    return head + b"\r\n\r\n"


def http(content: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(content)) + content


GOOD = json.dumps({"choices": [{"message": {"content": "[[A]]"}}]}).encode()


def replying(content: bytes, status: str = "200 OK") -> Callable[[socket.socket], object]:
    return lambda client: client.sendall(http(content, status))


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_nothing_for_this_machine_goes_through_a_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Line(replying(GOOD))() as proxy, Line(replying(GOOD))() as judge:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        client = Client(f"http://{host}:{judge.port}/v1", "m", key="secret", attempts=1)
        with suppress(UserError):  # nobody listens at 127.0.0.2
            assert client.ask("?", max_tokens=1).text == "[[A]]"
        assert proxy.heard == []
        assert len(judge.heard) == (host != "127.0.0.2")


def test_a_proxy_is_used_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without encryption only if there is no key; with it, the proxy sees the host's name."""
    with Line(replying(GOOD))() as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
        assert Client("http://judge.example/v1", "m", attempts=1).ask("?", max_tokens=1).text == "[[A]]"
        with pytest.raises(UserError, match="1 attempts"):  # this proxy does not let the encryption begin
            Client("https://judge.example:444/v1", "m", key="secret", attempts=1).ask("?", max_tokens=1)
        monkeypatch.setenv("no_proxy", "judge.example")
        with pytest.raises(UserError, match="1 attempts"):
            Client("http://judge.example/v1", "m", attempts=1).ask("?", max_tokens=1)
        plain, tunnel = proxy.heard
    assert plain.startswith(b"POST http://judge.example/v1/chat/completions HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in plain
    assert tunnel.startswith(b"CONNECT judge.example:444 HTTP/1.")
    assert b"secret" not in tunnel
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("https_proxy", "socks5://x:y:z")
    with pytest.raises(UserError, match="https_proxy: is not the address of an HTTP proxy"):
        Client("https://judge.example/v1", "m").ask("?", max_tokens=1)


def counted(**usage: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": "[[A]]"}}], "usage": usage}).encode()


REPLIES: dict[str, tuple[bytes, str]] = {
    "deep": (b"[" * 300_000 + b"]" * 300_000, "does not answer with JSON"),
    "deep inside": (GOOD[:-1] + b', "x": ' + b"[" * 300_000 + b"]" * 300_000 + b"}", "does not answer with JSON"),
    "a list of tokens": (GOOD[:-1] + b', "usage": [1]}', "format (usage: "),
    "infinite": (GOOD[:-1] + b', "usage": {"prompt_tokens": 1e999}}', "format (usage.prompt_tokens: "),
    "not a number": (GOOD[:-1] + b', "usage": {"prompt_tokens": NaN}}', "format (usage.prompt_tokens: "),
    "negative": (counted(prompt_tokens=-5), "format (usage.prompt_tokens: "),
    "too many": (counted(completion_tokens=10**30), "format (usage.completion_tokens: "),
    "a word": (counted(completion_tokens="ten"), "format (usage.completion_tokens: "),
    "half a character": (GOOD.replace(b"[[A]]", b"\\ud800"), "does not answer with JSON"),
    "no UTF-8": (GOOD.replace(b"[[A]]", b"\xff"), "does not answer with JSON"),
    "nothing": (b"", "does not answer with JSON"),
    "no choices": (b'{"choices": []}', "format (choices: "),
    "a list": (b"[]", "format (the response: "),
    "parts": (b'{"choices": [{"message": {"content": [1]}}]}', "format (choices.0.message.content: "),
}


@pytest.mark.parametrize("name", REPLIES)
def test_what_no_judge_would_reply_is_told_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = REPLIES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("q.jsonl").write_text('{"question": "?"}\n')
    Path("a.jsonl").write_text('{"answer": "x"}\n')
    with Line(replying(content))() as judge:
        words = ["judge", "q.jsonl", "--answers", "a.jsonl", "--mode", "single", "--judge-model", "m"]
        assert main([*words, "--judge", f"http://127.0.0.1:{judge.port}/v1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert Path("judged/verdicts.jsonl").exists() is False


@pytest.mark.parametrize("status", ["400 No", "503 Busy"])
def test_errors_can_be_anything(status: str) -> None:
    waits: list[float] = []
    for content in (b"[" * 300_000, b'{"error": [1]}', b'{"error": {"message": "\\ud800"}}', b"\xff\0"):
        with Line(replying(content, f"{status}\r\nRetry-After: nan"))() as judge:
            client = Client(f"http://127.0.0.1:{judge.port}/v1", "m", attempts=2, sleep=waits.append)
            with pytest.raises(UserError, match=f"status {status[:3]}: "):
                client.ask("?", max_tokens=1)
    assert set(waits) <= {1.0}


def dripping(sent: bytes) -> Callable[[socket.socket], object]:
    """A byte at a time, without end."""

    def answer(client: socket.socket) -> None:
        end = time.monotonic() + SECONDS
        client.sendall(sent)
        while time.monotonic() < end:
            client.sendall(b"1")
            time.sleep(0.02)

    return answer


STALLS = {
    "in the status": b"HTTP/1.1 2",
    "in a header": b"HTTP/1.1 200 OK\r\nX: ",
    "in the body": b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n",
    "in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
}


@pytest.mark.parametrize("place", STALLS)
def test_a_judge_that_answers_a_byte_at_a_time_is_left(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "TIMEOUT", 0.3)
    with Line(dripping(STALLS[place]))() as judge:
        client = Client(f"http://127.0.0.1:{judge.port}/v1", "m", attempts=2, sleep=lambda seconds: None)
        with pytest.raises(UserError, match=r"no complete response within 0 s \(2 attempts\)"):
            client.ask("?", max_tokens=1)
        assert len(judge.heard) == 2


def test_a_response_that_is_too_long_or_cut_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LARGEST_REPLY", 1000)
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + GOOD
    for sent, message in ((http(b"x" * 2000), "more than 1000 bytes"), (cut, "IncompleteRead.* more expected")):
        with Line(lambda client, sent=sent: client.sendall(sent))() as judge, pytest.raises(UserError, match=message):
            Client(f"http://127.0.0.1:{judge.port}/v1", "m", attempts=1).ask("?", max_tokens=1)


@pytest.mark.parametrize(
    "url",
    [
        *("http://localhost:abc/v1", "http://localhost:99999/v1", "http://a b/v1", "http://[::1/v1", "http://x/\n"),
        *("http://ä/", "http://user:secret@localhost/v1", "http://localhost/v1?key=x", "ftp://localhost/v1"),
        "http:///v1",
    ],
)
def test_addresses_that_are_none_are_told_at_once(url: str) -> None:
    with pytest.raises(UserError, match="is not a URL; give the server's"):
        Client(url, "m")


def test_a_key_with_a_line_break_is_no_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text('{"question": "?"}\n')
    Path("a.jsonl").write_text('{"answer": "x"}\n')
    words = ["judge", "q.jsonl", "--answers", "a.jsonl", "--mode", "single", "--judge-model", "m", "--judge"]
    with Line(replying(GOOD))() as judge:
        url = f"http://127.0.0.1:{judge.port}/v1"
        monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
        assert main([*words, url]) == 2
        told = capsys.readouterr().err
        assert "$OPENAI_API_KEY: contains no key" in told
        assert "ret" not in told
        monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
        assert main([*words, url]) == 0
    assert b"Authorization: Bearer secret\r\n" in judge.heard[0]


def test_half_a_character_in_a_question_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "\\ud83d\\ude42"}\n{"question": "\\ud83d?"}\n')
    with pytest.raises(UserError, match=r"q\.jsonl:2: is not JSON"):
        read_questions(tmp_path / "q.jsonl")
