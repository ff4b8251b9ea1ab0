"""The recipe's schema in an editor: a YAML language server completes settings and marks mistakes, over stdio.

`make test-editors` fetches the server; without it or node these tests are skipped.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.cli.init import FOR_EDITORS
from meshwright.cli.main import main
from meshwright.spec.schema import SCHEMA, recipe_schema

SERVER = Path(__file__).resolve().parents[1] / ".yamlls/node_modules/.bin/yaml-language-server"
CAPABILITIES = {"textDocument": {"completion": {"completionItem": {}}, "publishDiagnostics": {}, "hover": {}}}


def test_the_shipped_schema_is_that_of_recipes():
    assert json.loads(SCHEMA.read_text()) == recipe_schema(), "run python docs/make_schema.py"


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_a_printed_recipe_names_the_schema(options, capsys):
    assert main(["init", "demo", *options]) == 0
    assert capsys.readouterr().out.splitlines()[0] == FOR_EDITORS
    assert f"# yaml-language-server: $schema={SCHEMA}" == FOR_EDITORS
    assert SCHEMA.is_file()


class Server:
    """A language server and one open document."""

    def __init__(self, folder: Path, text: str):
        self._process = subprocess.Popen([SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self._uri, self._last = (folder / "run.yaml").as_uri(), 0
        self.request("initialize", {"processId": None, "rootUri": folder.as_uri(), "capabilities": CAPABILITIES})
        self._send({"method": "initialized", "params": {}})
        document = {"uri": self._uri, "languageId": "yaml", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def request(self, method, params):
        """The result of a request."""
        self._last += 1
        self._send({"id": self._last, "method": method, "params": params})
        return self._next(lambda message: message.get("id") == self._last and "method" not in message)["result"]

    def at(self, method, line, character):
        """The result of a request about a place of the document, counted from 0."""
        return self.request(
            method, {"textDocument": {"uri": self._uri}, "position": {"line": line, "character": character}}
        )

    def problems(self):
        """The problems that the server marks in the document."""
        message = self._next(lambda message: message.get("method") == "textDocument/publishDiagnostics")
        return message["params"]["diagnostics"]

    def _send(self, message):
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        self._process.stdin.flush()

    def _next(self, wanted):
        while True:
            length = 0
            while (line := self._process.stdout.readline().strip()) or not length:
                assert self._process.poll() is None or line
                name, _, value = line.partition(b":")
                length = int(value) if name == b"Content-Length" else length
            message = json.loads(self._process.stdout.read(length))
            if wanted(message):
                return message
            if "id" in message and "method" in message:  # the server asks for settings: it has the defaults
                items = message["params"].get("items", []) if isinstance(message.get("params"), dict) else []
                self._send({"id": message["id"], "result": [None for _ in items] or None})


RECIPE = """\
model: gpt2
training:
  precision: bf17
  optimizer: {lr: high}
  
layot: {dp_shard: 2}
"""


@pytest.mark.skipif(not SERVER.exists(), reason="no YAML language server here: make test-editors fetches it")
@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_a_language_server_completes_and_marks_mistakes(tmp_path):
    with Server(tmp_path, f"{FOR_EDITORS}\n{RECIPE}") as server:
        marked = {(one["range"]["start"]["line"], one["message"]) for one in server.problems()}
        assert {line for line, _ in marked} == {3, 4, 6}
        texts = dict(marked)
        assert '"bf16"' in texts[3]
        assert "number" in texts[4]
        assert "layot" in texts[6]
        settings = {one["label"] for one in server.at("textDocument/completion", 5, 2)["items"]}
        assert {"steps", "global_batch", "lr_schedule"} <= settings
        values = {one["label"] for one in server.at("textDocument/completion", 3, 13)["items"]}
        assert {"bf16", "fp32", "fp8"} <= values
        meaning = server.at("textDocument/hover", 3, 4)["contents"]
        assert "Compute dtype" in json.dumps(meaning)
