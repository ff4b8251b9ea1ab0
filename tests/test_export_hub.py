"""`export --hub`: the files to push, and a push by huggingface_hub's own client to a local stub of the hub."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from launched import run_program
from meshwright import load_recipe, train
from meshwright.cli.main import main
from served import hf_directory, model_of, tokenizer_of


class Hub(ThreadingHTTPServer):
    """Accepts one commit of files that are sent whole."""

    daemon_threads = True
    refuses = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.made: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.keys: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Hub

    def do_POST(self) -> None:
        length = self.headers["Content-Length"]
        body = self.rfile.read(int(length)) if length else self.chunks()
        self.server.keys.add(self.headers["Authorization"])
        if self.server.refuses:
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path.endswith("/repos/create"):
            self.server.made.append(json.loads(body))
            self.answer(200, {"url": f"http://127.0.0.1:{self.server.server_port}/me/demo"})
        elif self.path.endswith("/validate-yaml"):
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            told = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer(200, {"files": told})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://127.0.0.1:{self.server.server_port}/me/demo/commit/{'0' * 40}"
            self.answer(200, {"commitUrl": url, "commitOid": "0" * 40, "hookOutput": ""})
        else:
            self.answer(404, {"error": "not here"})

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/demo", "sha": "0" * 40, "siblings": []})

    def chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        return found

    def answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pushed(hub: Hub, folder: Path, *words: str) -> tuple[int, str, str]:
    """Status, output and errors of `export` in a process whose hub is the stub."""
    home = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_secret", "HF_HOME": str(folder)}
    return run_program("export", *words, env={**os.environ, **home, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"})


def test_a_dry_run_shows_files_and_card_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"def get_{i}(self):\n    return {i}\n" for i in range(300)))
    (tmp_path / "run.yaml").write_text(
        "model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2}\n"
        "data: {sources: text.txt, tokenizer_vocab: 300, sequence_length: 32}\n"
        "training: {steps: 2, global_batch: 2, precision: fp32, evaluation: {batches: 1}}\n"
        "run_dir: run\n"
        "device: cpu\n"
    )
    train(load_recipe(tmp_path / "run.yaml"), base_dir=tmp_path)
    assert main(["export", "run", "--hub", "me/demo", "--license", "apache-2.0", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr().out
    told = json.loads(printed[printed.index('{\n  "model"') :])
    assert told["url"] is None
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "receipt.json"} <= set(told["files"])
    card = told["card"]
    head = '---\nlibrary_name: "transformers"\ntags: ["meshwright"]\nlicense: "apache-2.0"\n---\n\n# demo\n'
    assert card.startswith(head)
    for part in ("`text.txt`", "| training, step 2 | ", "| held out, step 2 | ", "global_batch: 2", "- transformers"):
        assert part in card, part
    assert not (tmp_path / "demo").exists()


@pytest.mark.exhaustive
def test_the_hubs_own_client_pushes_it(tmp_path, hub):
    model = hf_directory(tmp_path / "hf", model_of("llama", dtype=torch.float32), tokenizer_of())
    status, out, errors = pushed(hub, tmp_path, str(model), "--hub", "me/demo", "--private")
    assert status == 0, errors
    assert "pushed to " in out
    assert hub.made[0]["name"] == "demo"
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"
    assert hub.keys == {"Bearer hf_secret"}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "receipt.json"} <= set(hub.files)
    assert b"No license was given" in hub.files["README.md"]
    assert json.loads(hub.files["receipt.json"])["exported"] == "demo"
    hub.refuses = True
    status, out, errors = pushed(hub, tmp_path, str(model), "--hub", "me/demo")
    assert status == 2
    assert "error: --hub me/demo: the hub refuses (" in errors
    assert "hf_secret" not in errors + out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hub", "demo"), "give owner/name"),
        (("--hub", "me/a demo"), "give owner/name"),
        (("--hf", "x", "--license", "mit"), "go with --hub"),
        (("--hf", "x", "--dry-run"), "go with --hub"),
    ],
)
def test_misuse_is_told(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    model = hf_directory(tmp_path / "hf", model_of("llama", dtype=torch.float32), tokenizer_of())
    assert main(["export", str(model), *words]) == 2
    assert message in capsys.readouterr().err
