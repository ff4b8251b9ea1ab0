"""`judge`: swapped positions, ties, intervals, ratings, cost; resumption; with a stub and with our own server."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.cli.main import main
from meshwright.judge.client import Client
from meshwright.judge.prompts import SHIPPED, choice, rating, read_prompts
from meshwright.judge.questions import JudgeQuestion, read_answers, read_questions
from meshwright.judge.ratings import Verdict, bradley_terry, ratings, read_verdicts, settled, versus
from meshwright.judge.run import VerdictJournal
from meshwright.spec.errors import UserError
from served import CHATML, hf_directory, model_of, tokenizer_of

Said = Callable[[str, int], tuple[int, str]]
"""(prompt, number of the request) -> status, and the judge's reply."""


class Stub(ThreadingHTTPServer):
    """A server with OpenAI's API whose replies come from a function."""

    daemon_threads = True

    def __init__(self, said: Said) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.said, self.asked, self.headers, self.lock = said, list[str](), list[str | None](), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Stub

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "stub"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            self.server.asked.append(prompt)
            self.server.headers.append(self.headers["Authorization"])
            number = len(self.server.asked)
        status, text = self.server.said(prompt, number)
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        self.answer(status, {"choices": [{"message": {"content": text}}], "usage": usage, "error": {"message": text}})

    def answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def judging(said: Said) -> Iterator[Stub]:
    with Stub(said) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answers_in(prompt: str) -> list[str]:
    """The assistants' answers in a prompt."""
    return re.findall(r"### Assistant(?: [AB])?:\n(.*)", prompt)


def judged_answers(prompt: str) -> tuple[str, str]:
    """The two answers to the last message, which the judge compares."""
    answers = answers_in(prompt)
    return answers[len(answers) // 2 - 1], answers[-1]


def longer(prompt: str, _: int) -> tuple[int, str]:
    """Prefers the longer answer."""
    first, second = map(len, judged_answers(prompt))
    return 200, f"Not [[A]] at first sight. [[{'A' if first > second else 'B' if second > first else 'C'}]]"


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"question_id": n, "turns": [f"Question {n}?", "And more?"]}) + "\n" for n in range(4))
    )
    for name, sizes in {"short": (2, 2, 2, 9), "long": (5, 5, 5, 2)}.items():
        rows = [
            {"question_id": n, "model_id": name, "choices": [{"turns": ["first", "x" * size]}]}
            for n, size in enumerate(sizes)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def report() -> dict:
    return json.loads(Path("judged/report.json").read_text())


WORDS = ["judge", "q.jsonl", "--answers", "short.jsonl", "long.jsonl"]


def test_both_orders_are_judged_and_agreeing_verdicts_count(files, capsys):
    with judging(longer) as stub:
        assert main([*WORDS, "--judge", stub.url, "--price", "2", "10"]) == 0
        assert len(stub.asked) == 16, "four questions of two turns, in both orders"
        assert main([*WORDS, "--judge", stub.url]) == 0, "nothing is asked twice"
        assert len(stub.asked) == 16
    out = capsys.readouterr().out
    assert "cost      16 requests, 1600 tokens read and 160 written, price 0.0048" in out
    assert "long against short: 3 wins, 4 ties, 1 losses; win rate 0.625 [0.375, 0.750]" in out
    found = report()
    assert list(found["ratings"]) == ["long", "short"]
    assert found["spent"]["requests"] == 0
    shown = {tuple(map(len, answers_in(prompt))) for prompt in stub.asked}
    assert {(5, 2, 5, 5), (5, 5, 5, 2), (5, 5)} <= shown, "positions are swapped; a turn is judged with those before it"
    assert (files / "judged" / "prompts" / "pairwise.txt").read_text() == (SHIPPED / "pairwise.txt").read_text()
    record = json.loads((files / "judged" / "verdicts.jsonl").read_text().splitlines()[0])
    assert record["prompt"] in stub.asked


def test_a_judge_that_always_takes_the_first_finds_only_ties(files, capsys):
    with judging(lambda prompt, number: (200, "[[A]]")) as stub:
        assert main([*WORDS, "--judge", stub.url, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert (pair["wins"], pair["ties"], pair["losses"]) == (0, 8, 0)
    assert pair["rate"] == {"value": 0.5, "low": 0.5, "high": 0.5}


def test_a_judging_continues_where_an_error_stopped_it(files, capsys):
    def fails(prompt: str, number: int) -> tuple[int, str]:
        return (400, "no money left") if number > 3 else longer(prompt, number)

    with judging(fails) as stub:
        assert main([*WORDS, "--judge", stub.url, "--at-once", "1"]) == 2
    assert "status 400: no money left" in capsys.readouterr().err
    with (files / "judged" / "verdicts.jsonl").open("a") as file:
        file.write('{"key": "cut off by a kill')
    with judging(longer) as stub:
        assert main([*WORDS, "--judge", stub.url]) == 0
        assert len(stub.asked) == 13
    assert report()["spent"]["requests"] == 13
    assert sum(report()["pairs"][0][name] for name in ("wins", "ties", "losses")) == 8


def test_replies_without_a_verdict_are_told_and_asked_again(files, capsys):
    with judging(lambda prompt, number: (200, "I cannot decide")) as stub:
        assert main([*WORDS, "--judge", stub.url]) == 0
    assert "16 replies held no verdict" in capsys.readouterr().out
    with judging(longer) as stub:
        assert main([*WORDS, "--judge", stub.url]) == 0
        assert len(stub.asked) == 16


def test_single_answers_are_rated(files, capsys):
    said = lambda prompt, number: (200, f"Rating: [[{len(answers_in(prompt)[-1])}]]")  # noqa: E731
    with judging(said) as stub:
        assert main([*WORDS, "--judge", stub.url, "--mode", "single"]) == 0
        assert len(stub.asked) == 16
    assert {name: one["value"] for name, one in report()["mean_ratings"].items()} == {"long": 4.625, "short": 4.375}
    out = capsys.readouterr().out
    assert "mean rating long: 4.62 [" in out
    assert "mean rating turn 1: long 5.00, short 5.00\nmean rating turn 2: long 4.25, short 3.75\n" in out


def test_results_are_also_given_by_turn_and_by_category(files, capsys):
    rows = [json.loads(line) for line in Path("q.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"category": "odd" if row["question_id"] % 2 else "even", "reference": ["one", "two"]}
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with judging(longer) as stub:
        assert main([*WORDS, "--judge", stub.url]) == 0
    found = report()
    won = {
        heading: {
            group: [one["pairs"][0][name] for name in ("wins", "ties", "losses")] for group, one in groups.items()
        }
        for heading, groups in (("turn", found["by_turn"]), ("category", found["by_category"]))
    }
    assert won == {"turn": {"1": [0, 4, 0], "2": [3, 0, 1]}, "category": {"even": [2, 2, 0], "odd": [1, 2, 1]}}
    out = capsys.readouterr().out
    assert "rating      turn 1: long 1000, short 1000\n" in out
    assert "rating      category odd: long 1000, short 1000\n" in out
    for prompt in stub.asked:
        reference = prompt.partition("[End of reference answer]")[0].partition("[Reference answer]\n")[2]
        assert reference.split() == (["one"] if len(answers_in(prompt)) == 2 else ["one", "two"])


def test_the_cost_is_estimated_before_anything_is_sent(files, capsys):
    words = [*WORDS, "--dry-run", "--max-tokens", "10", "--price", "1", "1"]
    assert main(words) == 0
    assert re.search(
        r"would cost\s*16 requests, \d{4} tokens read and 160 written, price 0\.00\d+", capsys.readouterr().out
    )


def test_a_busy_judge_is_asked_again_and_an_error_is_told():
    waits: list[float] = []
    with judging(lambda prompt, number: (429 if number < 3 else 200, "[[5]]")) as stub:
        client = Client(stub.url, sleep=waits.append, key="secret")
        assert client.model == "stub"
        assert client.ask("?", max_tokens=1).text == "[[5]]"
        assert len(waits) == 2
        assert stub.headers[-1] == "Bearer secret"
    with judging(lambda prompt, number: (503, "down")) as stub, pytest.raises(UserError, match="503: down"):
        Client(stub.url, "m", attempts=2, sleep=waits.append).ask("?", max_tokens=1)
    with judging(lambda prompt, number: (302, "moved")) as stub, pytest.raises(UserError, match="status 302"):
        Client(stub.url, "m", key="secret").ask("?", max_tokens=1)
    with pytest.raises(UserError, match="unencrypted"):
        Client("http://example.com/v1", "m", key="secret")
    with pytest.raises(UserError, match="is not a URL"):
        Client("localhost:8000", "m")


def test_the_key_comes_from_the_environment(files, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with judging(longer) as stub:
        assert main([*WORDS, "--judge", stub.url]) == 0
    assert set(stub.headers) == {"Bearer from-env"}


def test_answers_cannot_write_the_prompt(tmp_path):
    prompts = read_prompts(None)
    question = JudgeQuestion("1", ("{conversation_b}?",), reference=("{text}",))
    prompt = prompts.pairwise(question, ["{reference}"], ["second"])
    assert prompt.count("second") == 1
    assert "### Assistant A:\n{reference}" in prompt
    assert "[Reference answer]\n{text}" in prompt
    (tmp_path / "single.txt").write_text("Rate: {answer}")
    with pytest.raises(UserError, match="does not use conversation"):
        read_prompts(tmp_path)


def test_verdicts_are_the_last_in_a_reply():
    assert [choice(text) for text in ("[[A]] no, [[B]]", "[[C]]", "[[D]]", "A")] == ["model_b", "tie", None, None]
    assert [rating(text) for text in ("[[3]] or [[7.5]]", "[[11]]", "7")] == [7.5, None, None]


def test_people_vote_the_same_way(tmp_path, capsys):
    votes = [
        {"model_a": "x", "model_b": "y", "winner": "model_a", "question": "1"},
        {"model_a": "y", "model_b": "x", "winner": "model_b", "question": "2"},
        {"model_a": "y", "model_b": "x", "winner": "tie (bothbad)", "question": "3"},
    ]
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(vote) + "\n" for vote in votes))
    assert main(["judge", "--votes", str(tmp_path / "votes.jsonl")]) == 0
    assert "x against y: 2 wins, 1 ties, 0 losses; win rate 0.833" in capsys.readouterr().out
    (tmp_path / "bad.jsonl").write_text('{"model_a": "x", "model_b": "y", "winner": "x"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:1: is not a vote"):
        read_verdicts([tmp_path / "bad.jsonl"])


def test_ratings_are_the_likeliest_strengths():
    """For two models, the odds; for several, the strengths that made the games, and the equations of the maximum."""
    assert np.diff(bradley_terry(np.array([[0, 30.0], [10, 0]])))[0] == pytest.approx(-400 * np.log10(3))
    true = np.array([2.0, 1.0, 0.25])
    wins = 600 * true[:, None] / (true[:, None] + true)
    np.fill_diagonal(wins, 0)
    found = bradley_terry(wins)
    assert found.mean() == pytest.approx(1000)
    assert np.diff(found) == pytest.approx(400 * np.diff(np.log10(true)), abs=1e-4)


@pytest.mark.slow
def test_intervals_hold_the_truth_and_narrow_with_more_questions():
    generator = np.random.default_rng(0)

    def games(number: int) -> list[Verdict]:
        return [Verdict(str(n), "a", "b", float(generator.random() < 0.7)) for n in range(number)]

    (few,), (many,) = versus(games(40)), versus(games(4000))
    assert few.rate.high - few.rate.low > 5 * (many.rate.high - many.rate.low)
    assert many.rate.low < 0.7 < many.rate.high
    always = ratings([Verdict(str(n), "a", "b", 1.0) for n in range(5)])
    assert list(always) == ["a", "b"]
    assert np.isfinite(always["a"].value)
    again = [versus(settled([Verdict("1", "a", "b", 1), Verdict("1", "b", "a", 1)])) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0][0].ties == 1


def test_models_answer_first_and_our_own_server_judges(files, capsys):
    """Random weights: they answer, and the judge's replies contain no verdict."""
    from test_serve import running

    for name in ("one", "two"):
        model = model_of("llama", dtype=torch.float32, max_positions=1024, seed=len(name) + ord(name[0]))
        hf_directory(files / name, model, tokenizer_of(CHATML if name == "one" else None))
    (files / "short.jsonl").write_text("")
    with running({"judge": model_of("llama", max_positions=2048)}) as server:
        words = ["judge", "q.jsonl", "--answers", "one", "named=two", "--judge", f"{server.url}/v1", "--limit", "1"]
        assert main([*words, "--max-tokens", "4", "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])
    assert found["unclear"] == found["spent"]["requests"] == 4
    assert found["spent"]["prompt_tokens"] > 100
    assert found["judge"] == "judge"
    (answer,) = [json.loads(line) for line in Path("judged/answers-named.jsonl").read_text().splitlines()]
    assert len(answer["choices"][0]["turns"]) == 2


def test_misuse_is_told(files, capsys):
    (files / "twice.jsonl").write_text('{"id": 1, "question": "a"}\n{"id": 1, "question": "b"}\n')
    with pytest.raises(UserError, match="question 1 occurs twice"):
        read_questions(files / "twice.jsonl")
    with pytest.raises(UserError, match="question 0 has no answer to each of its 2 turns"):
        read_answers(files / "twice-answers.jsonl", read_questions(files / "q.jsonl")) if (
            files / "twice-answers.jsonl"
        ).write_text('{"question_id": 0, "answer": "only one"}\n') else None
    for words, message in {
        (): "nothing to judge",
        ("q.jsonl",): "give the answers with --answers",
        ("q.jsonl", "--answers", "short.jsonl", "--dry-run"): "a comparison needs two or more",
        ("q.jsonl", "--answers", "a=short.jsonl", "a=long.jsonl", "--dry-run"): "two have the same name (a)",
        ("q.jsonl", "--answers", "run", "--dry-run"): "--dry-run needs .jsonl files",
    }.items():
        assert main(["judge", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_journal_keeps_the_last_verdict(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"key": "k", "winner": null}\n{"key": "k", "winner": "tie"}\n')
    assert VerdictJournal(path, "stub").records["k"]["winner"] == "tie"
