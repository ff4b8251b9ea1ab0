"""Commands in messages can be pasted into a shell: paths with spaces and settings with braces are quoted."""

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import export
from meshwright.cli.common import check_folder_of
from meshwright.cli.demo import _whats_next
from meshwright.cli.main import main
from meshwright.cli.parser import VERBS
from meshwright.cli.train import whats_next
from meshwright.families import resolve_model
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields
from meshwright.spec.run import Run
from meshwright.spec.text import command

SOURCE = Path(meshwright.__file__).parent
UNQUOTED = re.compile(rf"""\bf["'][^"'\n]*meshwright (?:{"|".join(VERBS)}) (?:[^"'{{\n]* )?\{{(?!command|quoted)""")
"""A command in a message with a value between its words."""
NAMES = ("--engine {name}", "{preset.stem}", "model={name}", "init {path} >")
"""Values that are names of engines, presets and models, which need no quotes."""


def test_a_command_is_words_of_a_shell() -> None:
    words = ["check", "my run.yaml", "finetune={method: lora}", "a=$HOME"]
    assert shlex.split(command(*words)) == ["meshwright", *words]
    assert command("check", Path("run.yaml"), "a.b=1") == "meshwright check run.yaml a.b=1"


def test_no_message_has_a_command_of_its_own() -> None:
    unquoted = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if UNQUOTED.search(line) and not any(name in line for name in NAMES)
    ]
    assert unquoted == [], "use meshwright.spec.text.command"


def lines_of(text: str) -> list[list[str]]:
    """The words of every command in a text."""
    return [shlex.split(line[line.index("meshwright ") :]) for line in text.splitlines() if "meshwright " in line]


def test_next_commands_name_a_folder_with_spaces() -> None:
    run = Run.model_validate({"model": "gpt2", "run_dir": "my runs/one"})
    for words in lines_of(whats_next(run, has_template=False)):
        assert words[2] == "my runs/one"
    for words in lines_of(_whats_next(Path("my runs/one")))[:3]:
        assert words[2] == "my runs/one"
    for line in export._next(
        Namespace(gguf=None, ollama=None, vllm=None, hf=Path("my runs/hf")), context=9, chats=False
    ):
        assert "my runs/hf" in shlex.split(line)
    for line in (Namespace(gguf=Path("my m.gguf"), ollama=None), Namespace(gguf=None, ollama=Path("my m"))):
        (shown,) = export._next(line, context=9, chats=False)
        assert any("my m" in word for word in shlex.split(shown))


def test_checks_name_the_recipe_as_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words of a text\n" * 99)
    tiny = "{family: llama, hidden: 16, num_layers: 1, num_heads: 2}"
    (tmp_path / "my run.yaml").write_text(f"model: {tiny}\ndata: {{sources: a.txt, sequence_length: 8}}\n")
    words = ["my run.yaml", "device=cpu", "training={steps: 1, precision: fp32}"]
    assert main(["check", *words]) == 0
    shown = lines_of(capsys.readouterr().out)
    assert shown == [["meshwright", "train", *words]]
    (tmp_path / "my ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    assert main(["check", "my ds.json"]) == 2
    assert lines_of(capsys.readouterr().err) == [["meshwright", "import", "my ds.json", "--write", "run.yaml"]]
    with pytest.raises(UserError, match=r"mkdir -p 'my pages'$"):
        check_folder_of("--html", Path("my pages/a.html"))
    (tmp_path / "my run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="meshwright export '") as error:
        resolve_model(ModelFields(name="my run"), base_dir=tmp_path)
    assert str(tmp_path / "my run") in lines_of(str(error.value))[0]
