"""The Modelfile's TEMPLATE: run by Go itself, it renders conversations as the model's chat template does."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from meshwright.data.chat import TEMPLATES
from meshwright.data.tokenizer import TextTokenizer
from meshwright.handover.ollama import modelfile
from meshwright.handover.receipt import CONVERSATIONS, ProgramReading, Receipt
from meshwright.serve.conversation import PromptEncoder
from served import CHATML, PLAIN
from templates import FAMILIES
from test_serve_tools import tokenizer_with

GO = shutil.which("go")
PROGRAM = """
package main

import (
    "encoding/json"
    "os"
    "text/template"
)

type message struct{ Role, Content string }

func main() {
    var given struct {
        Template      string
        Conversations [][]message
    }
    if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
        panic(err)
    }
    parsed := template.Must(template.New("").Option("missingkey=zero").Parse(given.Template))
    for _, messages := range given.Conversations {
        values := map[string]any{"Messages": messages, "System": "unused", "Response": ""}
        if err := parsed.Execute(os.Stdout, values); err != nil {
            panic(err)
        }
        os.Stdout.WriteString("\\x00")
    }
}
"""
NAMED = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
WRITABLE = {**NAMED, "own chatml": CHATML, "own plain": PLAIN, "gemma": FAMILIES["takes turns"]}
QUOTED = """{{- '\"\"\" {{ x }} %' -}}""" + CHATML.replace("m.role + '\\n'", 'm.role + \'"""\'')
WRITABLE |= {"phi": FAMILIES["ends the text"], "quotes": QUOTED}
HARD = 'Say """{{ .Content }}""" \\ \u2026 \U0001f642\n\ttwice'


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    if GO is None:
        pytest.skip("Go is not installed")
    folder = tmp_path_factory.mktemp("go")
    (folder / "main.go").write_text(PROGRAM)
    subprocess.run([GO, "build", "-o", "render", "main.go"], cwd=folder, check=True)
    return folder / "render"


def template_of(content: str) -> str:
    """The TEMPLATE of a Modelfile, as Ollama reads it."""
    before, template, after = content.split('"""')
    assert before.endswith("TEMPLATE ")
    assert after == "\n"
    return template


@pytest.mark.parametrize("name", WRITABLE)
def test_go_renders_what_the_chat_template_renders(go: Path, name: str) -> None:
    tokenizer = tokenizer_with(WRITABLE[name])
    content, _ = modelfile(tokenizer, "model.gguf", 64, ["<|end|>"])
    template = PromptEncoder(tokenizer)._template
    assert template is not None
    conversations = [list(messages) for messages in CONVERSATIONS]
    for system, turns in itertools.product((False, True), (1, 3, 5, 7)):
        said = [{"role": ("user", "assistant")[n % 2], "content": f"{HARD}{n}"} for n in range(turns)]
        conversations.append([{"role": "system", "content": HARD}] * system + said)
    if name == "gemma":  # it refuses system messages
        conversations = [messages for messages in conversations if messages[0]["role"] == "user"]
    given = json.dumps({"template": template_of(content), "conversations": conversations})
    found = subprocess.run([go], input=given, capture_output=True, text=True, check=True).stdout
    expected = [template.render(messages, answer=True) for messages in conversations]
    assert found.split("\0") == [*expected, ""]


def test_what_ollama_does_otherwise_is_told() -> None:
    told = {name: modelfile(tokenizer_with(source), "x.gguf", 64, [])[1] for name, source in WRITABLE.items()}
    without = {"own plain", "phi", "gemma"}
    assert {
        name for name, notes in told.items() if any("no tools" in note for note in notes)
    } == WRITABLE.keys() - without
    assert {name for name, notes in told.items() if any("trims" in note for note in notes)} == {"llama3", "gemma"}
    assert {name for name, notes in told.items() if any("refuses system" in note for note in notes)} == {"gemma"}


DATED = "{{- strftime_now('%Y') -}}" + CHATML
LAST = CHATML.replace("m.role + '\\n'", "m.role + ('!' if loop.last else '') + '\\n'")
COUNTED = CHATML.replace("m.role + '\\n'", "m.role + '\\n' + loop.index|string")
SHOUTING = CHATML.replace("(m.content or '')", "m.content|upper")
LONG = CHATML.replace("m.role + '\\n'", "m.role + ('!' if loop.index > 3 else '') + '\\n'")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (DATED, "writes the date"),
        (LAST, "depend on more than the roles"),
        (COUNTED, "depend on more than the roles"),
        (LONG, "depend on more than the roles"),
        (SHOUTING, "leaves out or changes messages"),
    ],
    ids=["date", "last", "counted", "long", "changed"],
)
def test_a_template_that_go_cannot_render_is_not_written_and_this_is_told(source: str, reason: str) -> None:
    content, notes = modelfile(tokenizer_with(source), "x.gguf", 64, ["<|im_end|>"])
    assert 'TEMPLATE "' not in content
    (note,) = notes
    assert note.startswith("warning: the Modelfile has no TEMPLATE, because the chat template")
    assert reason in note
    assert content.startswith(f'# {note}\nFROM ./x.gguf\nPARAMETER num_ctx 64\nPARAMETER stop "<|im_end|>"\n')


def test_a_base_model_needs_no_template() -> None:
    files = {name: file for name, file in tokenizer_with(CHATML).files.items() if name != "chat_template.jinja"}
    assert modelfile(TextTokenizer(files, where="test"), "x.gguf", 9, []) == (
        "FROM ./x.gguf\nPARAMETER num_ctx 9\n",
        [],
    )


def test_the_token_that_llama_cpp_adds_itself_is_left_to_it() -> None:
    files = dict(tokenizer_with(NAMED["llama3"]).files)
    inner = Tokenizer.from_str(files["tokenizer.json"].decode())
    begin = [("<|begin_of_text|>", inner.token_to_id("<|begin_of_text|>"))]
    inner.post_processor = TemplateProcessing("<|begin_of_text|> $A", special_tokens=begin)
    adding = TextTokenizer({**files, "tokenizer.json": inner.to_str().encode()}, where="test")
    assert modelfile(tokenizer_with(NAMED["llama3"]), "x", 9, [])[0].count("begin_of_text") > 0
    assert modelfile(adding, "x", 9, [])[0].count("begin_of_text") == 0
    content, notes = modelfile(adding.with_chat_template(CHATML), "x", 9, [])
    assert any("Ollama puts <|begin_of_text|> before the prompt" in note for note in notes)
    assert 'TEMPLATE """' in content


def test_a_receipt_says_what_is_proved_and_what_is_not() -> None:
    reading = ProgramReading(program="transformers", version="5", largest_difference=1e-6, tolerance=1e-4, positions=9)
    shared = {"exported": "x", "dtype": "f32", "source": "run", "readings": (reading,)}
    receipt = Receipt(**shared, claims=("numbers", "tokens", "chat template"))
    assert receipt.proved == {"numbers": ["transformers"], "tokens": [], "chat template": []}
    assert receipt.lines()[1:] == [
        "proved: numbers by transformers",
        "not proved: tokens; no program that compares them is installed",
        "not proved: chat template; no program that compares them is installed",
    ]
    assert receipt.as_json()["proved"] == receipt.proved
    assert Receipt(**shared).lines()[1:] == ["proved: numbers by transformers"]
