"""The page docs/from-text-to-chat.md, run literally on small data: the chat model wins its comparison."""

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from meshwright.cli.main import main
from meshwright.serve.served import Capacity, open_served
from meshwright.serve.trained import open_trained
from test_judge import answers_in, judging
from test_serve import serving

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "from-text-to-chat.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


def materials(folder: Path) -> None:
    """Small text, conversations and questions, and the page's recipes."""
    (folder / "texts").mkdir()
    for part in range(2):
        lines = [f"def get_{number}(self):\n    return {number}\n" for number in range(part * 150, part * 150 + 150)]
        (folder / "texts" / f"{part}.txt").write_text("".join(lines))
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What does get_{number} return?"},
                {"role": "assistant", "content": "It returns a number."},
            ]
        }
        for number in range(200)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    questions = [{"question": f"What returns get_{number} there?"} for number in range(300, 304)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    verb = {"question": "Which is a verb?", "choices": ["return", "self"], "answer": 0}
    (folder / "verbs.jsonl").write_text(json.dumps(verb) + "\n")
    base, chat = (block for kind, block in BLOCKS if kind == "yaml")
    (folder / "base.yaml").write_text(base)
    (folder / "chat.yaml").write_text(chat)


def knows(prompt: str, _: int) -> tuple[int, str]:
    """A judge that wants an answer of the trained kind."""
    first, second = (said.startswith("It returns") for said in answers_in(prompt))
    return 200, "[[A]]" if first > second else "[[B]]" if second > first else "[[C]]"


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    materials(tmp_path)
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] == "serve":
            serve(words)
            continue
        with judging(knows) as stub:
            words = [stub.url if word.startswith("http://localhost") else word for word in words]
            if "votes.jsonl" in words and words[0] == "judge":
                assert (tmp_path / "votes.jsonl").exists(), "the arena has written it"
            assert main(words) == 0, (command, capsys.readouterr())
    report = json.loads((tmp_path / "judged" / "report.json").read_text())
    (pair,) = report["pairs"]
    assert (pair["model_a"], pair["model_b"], pair["losses"]) == ("base", "chat", 4), (
        "the chat model wins every question"
    )
    assert list(report["ratings"]) == ["chat", "base"]
    assert (tmp_path / "chat-hf" / "receipt.json").exists()


def serve(words: list[str]) -> None:
    """The models of the page's `serve`, queried once each, and a vote."""
    options = dict(zip(words[2::2], words[3::2], strict=True))
    name, path = options["--adapter"].split("=")
    trained = open_trained(Path(words[1]), device="cpu")
    models = open_served(trained, options["--name"], {name: Path(path)}, Capacity(max_batch=4))
    with serving(models, votes=Path(options["--votes"])) as server:
        question = [{"role": "user", "content": "What does get_7 return?"}]
        said = server.client.chat.completions.create(model=name, messages=question, temperature=0, max_tokens=16)
        assert said.choices[0].message.content == "It returns a number."
        written = server.client.completions.create(model=options["--name"], prompt="def get_7(", max_tokens=4)
        assert written.choices[0].text
        talk = [*question, {"role": "assistant", "content": "x"}]
        vote = {"model_a": "base", "model_b": name, "winner": "model_b", "conversation_a": talk, "conversation_b": talk}
        assert httpx.post(f"{server.url}/arena/votes", json=vote).status_code == 200
