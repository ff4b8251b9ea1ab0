"""Replies of a hostile judge to `judge`: it must end with a result, or a message that names the judge."""

import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attack.good import Good
from attack.trial import Cell, Ended, Trial, copy, judge, run

WORDS = ("judge", "questions.jsonl", "--answers", "a=a.jsonl", "b=b.jsonl", "--json", "--judge")
LIMIT = 60.0
"""Seconds for the command; most replies are judged in a fraction of one."""
PATHS = ("/v1/models", "/v1/chat/completions")
GOOD = {
    PATHS[0]: {"data": [{"id": "judge"}]},
    PATHS[1]: {
        "choices": [{"message": {"role": "assistant", "content": "[[A]]"}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    },
}


def _reply(body: bytes | str, status: str = "200 OK", *headers: str) -> bytes:
    """A whole reply."""
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


def _usage(text: str) -> bytes:
    """A good reply with these figures, as JSON."""
    return _reply(json.dumps({**GOOD[PATHS[1]], "usage": 0}).replace('"usage": 0', f'"usage": {text}'))


def _content(text: str) -> bytes:
    """A good reply with this text, as JSON."""
    return _reply(f'{{"choices": [{{"message": {{"content": {text}}}}}]}}')


ANYWHERE: Mapping[str, bytes] = {
    "no JSON": _reply("<html>it works!</html>"),
    "nothing": _reply(""),
    "a list": _reply("[1]"),
    "a number": _reply("1e999"),
    "null": _reply("null"),
    "an empty object": _reply("{}"),
    "lists for objects": _reply('{"data": [[]], "choices": [[]]}'),
    "numbers for lists": _reply('{"data": 7, "choices": 7}'),
    "deep": _reply(b"[" * 300_000),
    "deep and whole": _reply(b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "not UTF-8": _reply(b'{"data": "\xff\xfe"}'),
    "NUL": _reply(b"\0" * 1000),
    "endless": _reply(b" " * 40_000_000),
    "another status": _reply("[" * 100_000, "400 Bad Request"),
    "a status that is none": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "escapes": _reply('{"error": {"message": "\\u001b[2J\\u0007"}}', "403 Forbidden"),
    "elsewhere": _reply("", "302 Found", "Location: http://127.0.0.1:9/v1/models"),
}
OF_A_VERDICT: Mapping[str, bytes] = {
    "no text": _content("null"),
    "a number as text": _content("7"),
    "a list as text": _content("[1]"),
    "half a character": _content('"[[A]] \\ud800"'),
    "a long text": _content(json.dumps("x" * 2_000_000)),
    "a list of figures": _usage("[1]"),
    "words for figures": _usage('{"prompt_tokens": "many", "completion_tokens": 3}'),
    "endless figures": _usage('{"prompt_tokens": 1e999, "completion_tokens": 3}'),
    "figures below zero": _usage('{"prompt_tokens": -7000000, "completion_tokens": -3}'),
    "huge figures": _usage('{"prompt_tokens": 1' + "0" * 400 + ', "completion_tokens": 3}'),
}
OBEYED: Collection[str] = ("no text", "a number as text", "a list as text", "half a character", "a long text")
"""Texts without a verdict, or with one: the judge may say what it likes."""
REPLIES = {**ANYWHERE, **OF_A_VERDICT}


@dataclass(frozen=True)
class Judged:
    """The attack on a command that asks a judge."""

    good: Good
    place: Path
    name: str = "judge"

    def cells(self) -> Sequence[Cell]:
        """Replies by the path that was asked."""
        return [(how, path) for how in REPLIES for path in PATHS if how in ANYWHERE or path == PATHS[1]]

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One command, whose judge replies badly to one of the paths."""
        how, path = cell
        good = self._run({})
        ended = self._run({path: REPLIES[how]})
        same = ended.out == good.out and ended.status == good.status == 0
        # A refusal names the option.
        fate, said = judge(ended, same=same, names=("--judge",), checked=how not in OBEYED)
        return Trial(self.name, seed, f"{how} from {path}", fate, said, cell)

    def _run(self, bad: Mapping[str, bytes]) -> Ended:
        attacked = copy(self.good.folder, self.place / "attacked")
        (attacked / "questions.jsonl").write_text('{"question": "1 + 1?"}\n')
        for name in "ab":
            (attacked / f"{name}.jsonl").write_text(json.dumps({"answer": name}) + "\n")
        replies = {path: _reply(json.dumps(good)) for path, good in GOOD.items()}
        with _judge_that_replies({**replies, **bad}) as url:
            return run((*WORDS, url), attacked, limit=LIMIT)


@contextlib.contextmanager
def _judge_that_replies(replies: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a judge, in a fork of this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        child = os.fork()
        if child == 0:
            try:
                while True:
                    _answer(listener, replies)
            finally:
                os._exit(1)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _answer(listener: socket.socket, replies: Mapping[str, bytes]) -> None:
    """One request."""
    client, _ = listener.accept()
    with client, contextlib.suppress(OSError):
        client.settimeout(10)
        head = b""
        while b"\r\n\r\n" not in head and (piece := client.recv(65536)):
            head += piece
        first, _, rest = head.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in first.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        while len(rest) < length and (piece := client.recv(65536)):
            rest += piece
        client.sendall(replies.get(first.split()[1].decode(), _reply("{}", "404 Not Found")))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
            client.recv(1)
