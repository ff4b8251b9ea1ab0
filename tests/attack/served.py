"""Requests to `serve` by strangers: pages of other origins, bytes that are no request, values that do not belong there,
clients that stall. The server must answer each, and afterwards answer the others as before."""

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attack.good import Good
from attack.processes import end
from attack.trial import SAID, Cell, Fate, Trial, copy
from attack.warm import start_warm
from meshwright.launch.forkserver import Process

WORDS = ("serve", "hf", "--port", "0", "--device", "cpu", "--adapters-from", "adapters", "--votes", "votes.jsonl")
QUESTION = {"model": "hf", "prompt": "def", "max_tokens": 8, "temperature": 0}
"""What another client asks before and after every attack."""
ADAPTER = "known"
"""An adapter that is loaded before every attack."""
PATIENCE = 20.0
"""Seconds for an answer, and for the health of a server that is attacked."""
LONGEST_LOG = 100_000
"""Bytes that one attack may add to the server's log."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDPOINTS: Mapping[str, Any] = {
    "/v1/completions": QUESTION,
    "/v1/chat/completions": {"model": "hf", "messages": [{"role": "user", "content": "def"}], "max_tokens": 8},
    "/v1/embeddings": {"model": "hf", "input": "def"},
    "/tokenize": {"model": "hf", "prompt": "def"},
    "/detokenize": {"model": "hf", "tokens": [1, 2]},
    "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "adapter"},
    "/v1/unload_lora_adapter": {"lora_name": ADAPTER},
    "/arena/votes": {
        "model_a": "hf",
        "model_b": ADAPTER,
        "winner": "model_a",
        **{f"conversation_{which}": [{"role": "user", "content": which}] for which in "ab"},
    },
}
"""What a client may send to each path."""
FOREIGN = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@dataclass(frozen=True)
class Sent:
    """A request: its headers, beside the length, and its body."""

    headers: Mapping[str, str]
    body: bytes


JSON = {"Content-Type": "application/json"}


def _with(value: Any) -> Callable[[dict[str, Any], random.Random], Sent]:
    """Any field of a good request replaced."""

    def make(good: dict[str, Any], draw: random.Random) -> Sent:
        changed = {**good, draw.choice(list(good)): value}
        return Sent(JSON, json.dumps(changed).encode("utf-8", "surrogatepass"))

    return make


def _text(text: str) -> Callable[[dict[str, Any], random.Random], Sent]:
    """The longest text of a good request replaced."""

    def make(good: dict[str, Any], draw: random.Random) -> Sent:
        if "messages" in good:
            return Sent(JSON, json.dumps({**good, "messages": [{"role": "user", "content": text}]}).encode())
        names = [name for name, value in good.items() if isinstance(value, str) and value != "hf"]
        return Sent(JSON, json.dumps({**good, (names or list(good))[-1]: text}).encode())

    return make


def _body(body: bytes) -> Callable[[dict[str, Any], random.Random], Sent]:
    return lambda good, draw: Sent(JSON, body)


def _under(headers: Mapping[str, str]) -> Callable[[dict[str, Any], random.Random], Sent]:
    return lambda good, draw: Sent(headers, json.dumps(good).encode())


CROSS_SITE: Mapping[str, Callable[[dict[str, Any], random.Random], Sent]] = {
    "a page's plain text": _under({"Content-Type": "text/plain", **FOREIGN}),
    "plain text; json": _under({"Content-Type": "text/plain; json", **FOREIGN}),
    "a page's JSON": _under({**JSON, **FOREIGN}),
    "another host": _under({**JSON, "Host": "evil.example"}),
}
"""Requests of a web page in a browser of this machine: none may be obeyed."""
BODIES: Mapping[str, Callable[[dict[str, Any], random.Random], Sent]] = {
    "no JSON": _body(b"\xff\xfe{"),
    "a list": _body(b"[1]"),
    "deep JSON": _body(b"[" * 50_000 + b"]" * 50_000),
    "many digits": _body(b'{"model": ' + b"9" * 90_000 + b"}"),
    "null": _with(None),
    "a huge number": _with(10**30),
    "1e999": _body(b'{"model": "hf", "prompt": "def", "max_tokens": 1e999}'),
    "NaN": _with(float("nan")),
    "below zero": _with(-1),
    "an object": _with({"a": [{}]}),
    "many items": _with(["x"] * 50_000),
    "NUL": _text("a\0b"),
    "half a character": _with("\ud800"),
    "a path": _text("../../../../etc/passwd"),
    "special tokens": _text("<|endoftext|>" * 300_000),
    "a long word": _text("x" * 3_900_000),
    "a long text": _text("def f(x): return x\n" * 200_000),
    "too much": _text("x" * 5_000_000),
}
CONNECTION = "a connection"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
RAW: Mapping[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"\x16\x03\x01\x02\x00" + b"\0" * 512,
    "half a header": GET + b"X-Slow: ",
    "half a body": POST + b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    "endless headers": GET + b"X-Much: " + b"x" * 500_000,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "never read": (GET + b"\r\n") * 5000,
}
"""Bytes sent, after which nothing is read for a while."""


@dataclass
class ServedModel:
    """The attack on one server, which is started once and again after each failure."""

    good: Good
    place: Path
    name: str = "serve"
    _server: "_Server | None" = field(default=None, init=False)

    def cells(self) -> Sequence[Cell]:
        """Paths by requests, and connections."""
        posts = [(path, how) for path in ENDPOINTS for how in (*CROSS_SITE, *BODIES)]
        return [*posts, *((CONNECTION, how) for how in RAW)]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One request, and what another client sees meanwhile and afterwards."""
        if self._server is None:
            self._server = _Server(self.good, self.place / "served")
        server = self._server
        server.prepare()
        before, log = server.state(), server.log_size()
        with server.watched() as health:
            fate, said = self._send(server, cell, draw)
        if fate not in ("hang", "trace"):
            fate, said = server.after(cell, before, log, health, (fate, said))
        if fate in ("hang", "trace"):
            server.stop()
            self._server = None
        return Trial(self.name, seed, f"{cell[1]} to {cell[0]}", fate, said[-SAID:], cell)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    @staticmethod
    def _send(server: "_Server", cell: Cell, draw: random.Random) -> tuple[Fate, str]:
        path, how = cell
        if path == CONNECTION:
            server.connect(RAW[how])
            return "survived", ""
        sent = (CROSS_SITE.get(how) or BODIES[how])(dict(ENDPOINTS[path]), draw)
        try:
            status, answer = server.post(path, sent)
        except TimeoutError:
            return "hang", f"no answer for {PATIENCE:g} s"
        except OSError as error:
            return ("named", "") if how == "too much" else ("vague", f"the connection ended: {error}")
        if status >= 500:
            return "trace", f"status {status}: {answer}"
        if status < 400:
            return ("silent", f"obeyed: {answer}") if how in CROSS_SITE else ("survived", "")
        return ("named", "") if answer.strip() else ("vague", f"status {status} without a word")


class _Server:
    """One `meshwright serve`."""

    def __init__(self, good: Good, folder: Path) -> None:
        self._folder = copy(good.folder, folder)
        for name in ("adapter", ADAPTER):
            copy(good.folder / "adapter", folder / "adapters" / name)
        config = json.loads((folder / "hf/tokenizer_config.json").read_text())
        (folder / "hf/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
        out, self._err = folder / "serve.out", folder / "serve.err"
        self._process: Process = start_warm(WORDS, cwd=folder, out=out, err=self._err, env={"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while (
            found := re.search(r"serving +http://127\.0\.0\.1:(\d+)/", out.read_text() if out.exists() else "")
        ) is None:
            assert time.monotonic() < deadline, self._err.read_text()
            assert self._process.poll() is None, self._err.read_text()
            time.sleep(0.05)
        self._port = int(found[1])
        while not self._listens():
            assert time.monotonic() < deadline, self._err.read_text()
            time.sleep(0.05)
        self._answer = self._ask()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def post(self, path: str, sent: Sent) -> tuple[int, str]:
        """Status and text of the answer. Raises `OSError`, of which `TimeoutError` means that there is none."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)) as client:
            client.request("POST", path, sent.body, dict(sent.headers))
            response = client.getresponse()
            return response.status, response.read().decode(errors="replace")

    def connect(self, content: bytes) -> None:
        """Send bytes and read nothing."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=2) as client:
            with contextlib.suppress(OSError):
                client.sendall(content)
            time.sleep(0.5)

    def prepare(self) -> None:
        """Load the known adapter, if an attack has unloaded it."""
        known = {"lora_name": ADAPTER, "lora_path": ADAPTER}
        self.post("/v1/load_lora_adapter", Sent(JSON, json.dumps(known).encode()))

    def state(self) -> Any:
        """What a request may change: the adapters and the votes."""
        votes = self._folder / "votes.jsonl"
        return self._get("/v1/models"), votes.read_bytes() if votes.exists() else b""

    def log_size(self) -> int:
        """Bytes of the server's log."""
        return self._err.stat().st_size

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[float]]:
        """The times, in seconds, in which the server told its health meanwhile."""
        times, over = list[float](), threading.Event()

        def watch() -> None:
            while not over.wait(0.2):
                began = time.monotonic()
                with contextlib.suppress(OSError):
                    self._get("/health")
                times.append(time.monotonic() - began)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield times
        finally:
            over.set()
            thread.join()

    def after(
        self, cell: Cell, before: Any, log: int, health: Sequence[float], verdict: tuple[Fate, str]
    ) -> tuple[Fate, str]:
        """The verdict on the server after an attack."""
        new = self._err.read_bytes()[log:].decode(errors="replace")
        if "Traceback (most recent call last)" in new:
            return "trace", new
        if len(new) > LONGEST_LOG:
            return "vague", f"the log grew by {len(new)} bytes: {new[:500]}"
        if health and max(health) > PATIENCE / 2:
            return "hang", f"/health took {max(health):.1f} s"
        try:
            answer, state = self._ask(), self.state()
        except OSError as error:
            return "hang", f"afterwards: {error}"
        if answer != self._answer:
            return "silent", f"afterwards another answer: {answer}"
        if cell[1] in CROSS_SITE and state != before:
            return "silent", f"changed: {before} to {state}"
        return verdict

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        end(self._process, self._folder, "serve", 5)

    def _ask(self) -> str:
        status, answer = self.post("/v1/completions", Sent(JSON, json.dumps(QUESTION).encode()))
        return json.loads(answer)["choices"][0]["text"] if status == 200 else f"status {status}: {answer}"

    def _get(self, path: str) -> str:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)) as client:
            client.request("GET", path)
            return client.getresponse().read().decode(errors="replace")
