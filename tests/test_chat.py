"""`chat`: history, commands, two models, pipes; a model's output never controls the terminal."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.models.generate import Sampling
from meshwright.serve.chat import Partner
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.trained import Settings, open_trained
from meshwright.spec.errors import UserError
from served import CHATML, hf_directory, model_of, tokenizer_of

Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Hugging Face directories `tuned` and `other`, which have a chat template, and `base`."""
    folder = tmp_path_factory.mktemp("models")
    hf_directory(folder / "tuned", model_of("llama", max_positions=160), tokenizer_of(CHATML))
    hf_directory(folder / "other", model_of("gpt2", max_positions=160, seed=5), tokenizer_of(CHATML))
    hf_directory(folder / "base", model_of("llama", max_positions=160), tokenizer_of())
    return folder


@pytest.fixture
def talk(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """(status, answers, notes) of `meshwright chat` with these lines as its input."""

    def talk(lines: list[str], name: str = "tuned", *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", str(models / name), "--temperature", "0", "--max-tokens", "8", *words])
        return status, *capsys.readouterr()

    return talk


def expected(models: Path, *messages: str, name: str = "tuned", system: str | None = None, tokens: int = 8) -> str:
    """The answer to the last of these messages, which alternate between user and assistant."""
    trained = open_trained(models / name, device="cpu")
    partner = Partner(trained, name, system)
    roles = ("user", "assistant")
    history = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
    before = [{"role": "system", "content": system}] if system else []
    prompt = partner._prompts.conversation([*before, *history])
    request = Request(
        prompt=prompt, max_tokens=tokens, sampling=Sampling(temperature=0), ends=partner._prompts.answer_ends
    )
    return InferenceEngine(trained.model, decode=trained.tokenizer.decode_text).run([request])[0].text


def test_each_question_is_answered_with_the_conversation_before_it(talk: Talk, models: Path) -> None:
    status, answers, notes = talk(["def f", "return", ""])
    first = expected(models, "def f")
    second = expected(models, "def f", first, "return")
    assert (status, answers) == (0, f"{first}\n{second}\n")
    assert second != expected(models, "return")
    assert f"model     {models}/tuned (llama, Hugging Face directory)" in notes
    assert "<|im_end|>" in notes


def test_undo_clear_and_system(talk: Talk, models: Path) -> None:
    first, alone = expected(models, "def f"), expected(models, "return")
    told = expected(models, "return", system="Be brief.")
    lines = ["def f", "/undo", "return", "/clear", "return", "/clear", "/system Be brief.", "return", "/system"]
    status, answers, notes = talk(lines)
    assert answers == "".join(f"{text}\n" for text in (first, alone, alone, told))
    assert "removed: def f" in notes
    assert talk(["return"], "tuned", "--system", "Be brief.")[1] == f"{told}\n"
    assert status == 0


def test_settings_are_changed_and_refused(talk: Talk, models: Path) -> None:
    status, answers, notes = talk(
        ["/set max-tokens 3", "def f", "/set", "/set top_p 2", "/set top_k x", "/set colour 1"]
    )
    assert answers == expected(models, "def f", tokens=3) + "\n"
    assert status == 2
    assert "max_tokens 3\n" in notes
    assert "temperature 0.0" in notes
    assert "error: /set top_p: top_p=2.0 is not allowed: must be greater than 0 and at most 1" in notes
    assert "error: /set top_k: 'x' is not an integer" in notes
    assert "error: /set colour: unknown setting" in notes


def test_a_conversation_is_saved_as_a_record(talk: Talk, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    status, _, notes = talk(["/save", f"/save {file}", "def f", f"/save {file}", "/save /nowhere/x.jsonl", "/saev x"])
    (record,) = map(json.loads, file.read_text().splitlines())
    answer = expected(models, "def f")
    assert record["messages"] == [{"role": "user", "content": "def f"}, {"role": "assistant", "content": answer}]
    for message in ("/save needs a file", "nothing to save yet", "No such file", "did you mean '/save'?"):
        assert message in notes
    assert status == 2


def test_questions_cannot_be_saved_over_other_kinds_of_files(talk: Talk, tmp_path: Path) -> None:
    """Lines of a pipe may come from a stranger; they must not be appended to a shell's start-up file."""
    file = tmp_path / ".profile"
    status, _, notes = talk(["$(touch pwned)", f"/save {file}"])
    assert (status, file.exists()) == (2, False)
    assert "the name must end in .jsonl" in notes


def test_a_base_model_continues_texts(talk: Talk, models: Path) -> None:
    def continued(text: str) -> str:
        trained = open_trained(models / "base", device="cpu")
        ids = trained.tokenizer.encode_prompt(text)
        request = Request(prompt=ids, max_tokens=8, sampling=Sampling(temperature=0), ends={trained.tokenizer.eos_id})
        return InferenceEngine(trained.model, decode=trained.tokenizer.decode_text).run([request])[0].text

    status, answers, notes = talk(["def f", "return", "/more", "/help"], "base")
    first, second = continued("def f"), continued("return")
    third = continued("return" + second)
    assert (status, answers) == (0, "".join(f"{text}\n" for text in (first, second, third)))
    assert "template  none: a base model" in notes
    assert talk([], "base", "--system", "x")[0] == 2
    assert "/more continues the last text of a model without a chat template" in talk(["/more"])[2]


def test_two_models_answer_each_in_its_own_conversation(talk: Talk, models: Path) -> None:
    status, answers, _ = talk(["def f", "return"], "tuned", "--compare", str(models / "other"))
    said = ""
    ours, theirs = list[str](), list[str]()
    for question in ("def f", "return"):
        for name, history in (("tuned", ours), ("other", theirs)):
            history.append(question)
            history.append(expected(models, *history, name=name))
            said += f"--- {name}\n{history[-1]}\n"
    assert (status, answers) == (0, said)
    assert ours != theirs


def test_a_conversation_without_room_is_told_and_can_go_on(talk: Talk, models: Path) -> None:
    status, answers, notes = talk(["def f", "x" * 300, "/undo", "return"])
    assert "but the model supports 160; /undo removes the last turn" in notes
    assert answers == f"{expected(models, 'def f')}\n{expected(models, 'return')}\n"
    assert status == 2


def test_a_closed_answer_stays_in_the_history(models: Path) -> None:
    partner = Partner(open_trained(models / "tuned", device="cpu"), "tuned")
    settings = Settings(sampling=Sampling(temperature=0), max_tokens=30)
    parts = partner.say("def f", settings)
    heard = next(parts) + next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert partner.turns[0].answered == heard
    whole = expected(models, "def f", tokens=30)
    assert whole.startswith(heard)
    assert whole != heard
    rest = "".join(partner.say("return", settings))
    assert rest == expected(models, "def f", heard, "return", tokens=30)
    with pytest.raises(UserError, match="supports 160"):
        next(partner.say("x" * 300, settings))
    assert len(partner.turns) == 2


@pytest.mark.slow
def test_in_a_terminal_answers_are_streamed_and_ctrl_c_ends_one(models: Path) -> None:
    """A prompt, an interrupted answer, another one, and Ctrl-D."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "meshwright", "chat", str(models / "base"), "--max-tokens", "120"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    seen = ""

    def wait_for(pattern: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while not re.search(pattern, seen, re.DOTALL):
            assert time.monotonic() < end, seen
            seen += os.read(parent, 4096).decode(errors="replace")

    try:
        wait_for(r"/help lists.*> ")
        os.write(parent, b"def f\n")
        wait_for(r"> def f\r\n.+")
        process.send_signal(signal.SIGINT)
        wait_for(r"> def f\r\n.*> $")
        os.write(parent, b"/undo\n")
        wait_for(r"removed: def f.*> $")
        os.write(parent, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert "Traceback" not in seen


def test_generate_has_the_same_settings(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(models / "base"), "--prompt", "def f", "--max-tokens", "30", "--json"]

    def text(*more: str) -> Any:
        assert main([*words, *more]) == 0
        return json.loads(capsys.readouterr().out)["texts"][0]["continuation"]

    greedy = text("--temperature", "0")
    assert text("--min-p", "1") == greedy
    assert text("--temperature", "0", "--stop", greedy[3:5]) == greedy[: greedy.index(greedy[3:5])]
    assert text("--temperature", "0", "--repetition-penalty", "50") != greedy
