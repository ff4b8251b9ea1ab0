"""The planner's page: requests and their answers, the folder for a browser tab, and the local server with its guards.

In a browser: needs `playwright` and a Chromium, skipped without. In Pyodide (`make test-site`): needs node too.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.pages.live import LocalHandler
from meshwright.planner.answer import respond
from meshwright.planner.app import device_names
from meshwright.planner.server import serve_planner
from meshwright.planner.site import COMPILED, RUNTIME, fetching, find_pyodide, packed_planner, write_site
from meshwright.predict.hardware import find_device
from meshwright.spec.errors import UserError

SMALL = {"model": "gpt2", "words": ["data.sequence_length=512"], "clusters": ["4xa100"], "page": False}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
NANOGPT = "n_layer = 4\nn_head = 4\nn_embd = 128\nbatch_size = 8\nblock_size = 256\nmax_iters = 100\n"


def asked(**request: Any) -> dict[str, Any]:
    return json.loads(respond(json.dumps(request)))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The plan, or the errors."""
    status = main(["plan", *words, "--json", "--no-methods"])
    captured = capsys.readouterr()
    return captured.err if status == 2 else captured.out


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SMALL, ["gpt2", "data.sequence_length=512", "--cluster", "4xa100"]),
        (SMALL | {"words": [], "clusters": ["1xt4", "2xl4"]}, ["gpt2", "--cluster", "1xt4", "--cluster", "2xl4"]),
        (SMALL | {"words": ["training.optimizr=1"]}, ["gpt2", "training.optimizr=1", "--cluster", "4xa100"]),
        (SMALL | {"model": "gpt9"}, ["gpt9", "data.sequence_length=512", "--cluster", "4xa100"]),
        (SMALL | {"clusters": ["4xa101"]}, ["gpt2", "data.sequence_length=512", "--cluster", "4xa101"]),
        (SMALL | {"margin": 1}, ["gpt2", "data.sequence_length=512", "--cluster", "4xa100", "--margin", "1"]),
        (SMALL | {"consider": "fp9"}, ["gpt2", "data.sequence_length=512", "--cluster", "4xa100", "--consider", "fp9"]),
    ],
    ids=["one", "two clusters", "setting", "model", "device", "margin", "change"],
)  # fmt: skip
def test_the_page_is_answered_as_the_command_line(
    request_: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(**request_)
    expected = printed(capsys, *words)
    if "problems" in found:
        assert "".join(f"error: {line}\n" for line in found["problems"]) == expected
    else:
        assert found["json"] + "\n" == expected


def test_a_page_has_the_plan_and_its_progress() -> None:
    told = list[tuple[float, str]]()
    found = json.loads(respond(json.dumps(SMALL | {"page": True}), lambda share, what: told.append((share, what))))
    assert found["title"] == "gpt2 on 4 x A100-SXM-80GB"
    assert "<h2>Strategies</h2>" in found["body"]
    assert (found["sequence"], found["batch"], found["precision"]) == (512, 64, "bf16")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert told[-1][0] > 0.9


def test_files_are_dropped_onto_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's config.json, a recipe, and another tool's file give what the command line gives for them."""
    words = ["data.sequence_length=512"]
    (tmp_path / "llama-config").mkdir()
    (tmp_path / "llama-config" / "config.json").write_text(json.dumps(CONFIG))
    found = asked(model="", files={"config.json": json.dumps(CONFIG)}, words=words, clusters=["2xa100"], page=False)
    plan = json.loads(found["json"])
    assert (plan["model"], plan["parameters"]) == ("llama-config", 44569088)
    recipe = "model: gpt2\ndata: {sequence_length: 256}\ntraining: {global_batch: 16}\ncluster: 2xl4\n"
    (tmp_path / "mine.yaml").write_text(recipe)
    found = asked(files={"mine.yaml": recipe}, page=False)
    assert found["json"] + "\n" == printed(capsys, str(tmp_path / "mine.yaml"))
    (tmp_path / "train.py").write_text(NANOGPT)
    found = asked(files={"train.py": NANOGPT}, clusters=["1xa100"], page=False)
    assert main(["import", str(tmp_path / "train.py"), "--write", str(tmp_path / "imported.yaml")]) == 0
    noted = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert found["json"] + "\n" == printed(capsys, str(tmp_path / "imported.yaml"), "--cluster", "1xa100")
    assert set(found["notes"]) == set(noted)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"model": "/etc/passwd.yaml"}, "the page reads no file of this machine"),
        ({"model": "../run.yaml"}, "the page reads no file of this machine"),
        (SMALL | {"clusters": ["mine.yaml"]}, "the page reads no file of this machine"),
        (SMALL | {"files": {"a.yaml": "x: 1"}}, "a.yaml: unknown format"),
        (SMALL | {"files": {"../../a.yaml": "model: [\n"}}, "a.yaml:2: cannot be read as YAML"),
        (SMALL | {"files": {str(n): "" for n in range(9)}}, "9 files"),
        (SMALL | {"evil": 1}, "a request is an object with model, words"),
        (SMALL | {"words": "a"}, "words: 'a' is of another kind"),
        (SMALL | {"margin": 10**400}, "--margin inf is not allowed"),
        (SMALL | {"model": "\ud800"}, "the request is not JSON"),
        (SMALL | {"model": ""}, "no model; name one"),
        (SMALL | {"model": ".."}, "the page reads no file of this machine"),
        (SMALL | {"model": "a" * 5000}, "more than 200 bytes"),
        (SMALL | {"files": {"..": "x"}}, "'..' is no name of a file"),
        (SMALL | {"files": {"": "x"}}, "'' is no name of a file"),
        (SMALL | {"files": {"a\0.yaml": "x"}}, "is no name of a file"),
        (SMALL | {"files": {"a" * 300 + ".yaml": "x"}}, "is no name of a file"),
        (SMALL | {"files": {"a/x.yaml": "", "b/x.yaml": ""}}, "two of the files have the same name"),
        (SMALL | {"files": {"config.json": json.dumps({"model_type": "a\0" * 200})}}, "is not supported"),
        (SMALL | {"words": ["layout=" + "[" * 100_000]}, "more than 10,000 characters"),
        (SMALL | {"words": ["model.name=/etc"]}, "the page reads no file of this machine"),
        (SMALL | {"words": ["cluster=/etc/x.yaml"], "clusters": []}, "the page reads no file of this machine"),
        (SMALL | {"words": ["layout.schedule=/etc/x.csv"]}, "the page reads no file of this machine"),
        (SMALL | {"words": ["training.global_batch=1" + "0" * 30]}, "plan supports 16,777,216"),
        (SMALL | {"clusters": ["1" + "0" * 20 + "xa100"]}, "plan supports 1,048,576"),
        (SMALL | {"clusters": ["1" + "0" * 5000 + "xa100"]}, "more than 200 bytes"),
        (SMALL | {"clusters": ["16xa100@0Gb/s"]}, "the rate must be above 0"),
        (SMALL | {"clusters": ["4xa100"] * 17}, "17 clusters; compare at most 16"),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_problem(request_: dict[str, Any], problem: str) -> None:
    (found,) = asked(**request_)["problems"]
    assert problem in found
    assert "/tmp" not in found


def test_no_json_is_a_problem() -> None:
    assert json.loads(respond("{"))["problems"] == ["the request is not JSON"]
    assert json.loads(respond("[" * 100_000))["problems"] == ["the request is nested too deeply"]


def test_every_device_of_the_form_is_the_one_it_says() -> None:
    names = device_names()
    assert len({find_device(name)["name"] for name in names}) == len(names)
    assert {"h100", "a100-pcie", "rtx 4090"} <= set(names)


@pytest.fixture
def pyodide(tmp_path: Path) -> Path:
    """A folder that looks as `make site` leaves it."""
    from importlib.metadata import version

    folder = tmp_path / ".pyodide"
    runtime = folder / "node_modules" / "pyodide"
    runtime.mkdir(parents=True)
    for name in RUNTIME:
        (runtime / name).write_text(name)
    name = f"{COMPILED}-{version(COMPILED)}-cp314-cp314-pyemscripten_2026_0_wasm32.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("pydantic_core/compiled.so", "")
    return folder


def test_what_is_missing_is_said_with_the_commands(tmp_path: Path, pyodide: Path) -> None:
    with pytest.raises(UserError, match=r"lacks pyodide.mjs, .*run 'make site' in a checkout, or: npm install "):
        write_site(tmp_path / "site", tmp_path / "none")
    (wheel,) = pyodide.glob("*.whl")
    wheel.rename(wheel.with_name("pydantic_core-1.0-cp314-cp314-pyemscripten_2026_0_wasm32.whl"))
    with pytest.raises(UserError, match=rf"lacks {COMPILED} \S+; run .*pip download .*pydantic-core=="):
        find_pyodide(pyodide)
    assert not (tmp_path / "site").exists()
    assert "://" not in " ".join(fetching(pyodide)), "no address of a registry"


@pytest.mark.slow
def test_the_packed_planner_needs_nothing_else(
    tmp_path: Path, pyodide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run by an interpreter without this environment, but for pydantic's compiled part, which the archive has for
    browsers."""
    assert main(["plan", "--site", str(tmp_path / "site"), "--pyodide", str(pyodide)]) == 0
    assert "python -m http.server" in capsys.readouterr().out
    site = tmp_path / "site"
    assert {path.name for path in site.iterdir()} == {"index.html", "planner-worker.js", "planner.zip", "pyodide"}
    assert {path.name for path in (site / "pyodide").iterdir()} == set(RUNTIME)
    with zipfile.ZipFile(site / "planner.zip") as archive:
        rooms = {name.split("/")[1] for name in archive.namelist() if name.startswith("meshwright/")}
        archive.extractall(tmp_path / "packed")
    assert not rooms & {"cli", "trainer", "models", "serve", "validate"}
    (tmp_path / "packed" / "pydantic_core" / "compiled.so").unlink()
    (tmp_path / "packed" / "pydantic_core").rmdir()
    import pydantic_core

    (tmp_path / "packed" / "pydantic_core").symlink_to(Path(pydantic_core.__file__).parent)
    code = (
        "import sys; sys.path.append(sys.argv[1]); from meshwright.planner.answer import respond; "
        "print(respond(sys.argv[2])); assert 'numpy' not in sys.modules"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "packed"), json.dumps(SMALL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["json"] == asked(**SMALL)["json"]
    (wheel,) = pyodide.glob("*.whl")
    assert packed_planner(wheel) == (site / "planner.zip").read_bytes(), "the same archive again"


def test_options_of_the_page_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert main(["plan", "gpt2", "--serve"]) == 2
    assert main(["plan", "--site", str(tmp_path / "site"), "--pyodide", str(tmp_path)]) == 2
    assert main(["plan", "--site", "x", "--serve"]) == 2
    assert main(["plan", "--serve", "--json"]) == 2
    errors = capsys.readouterr().err.splitlines()
    expected = ["plan needs", "the page of --serve asks", f"{tmp_path} lacks", "--site writes", "--json is for"]
    assert all(line.startswith(f"error: {words}") for line, words in zip(errors, expected, strict=True)), errors


def test_a_site_overwrites_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    for folder in (tmp_path, tmp_path / "index.html"):
        with pytest.raises(UserError, match=f"--site {folder} has other files, or is one"):
            write_site(folder, tmp_path)
    assert (tmp_path / "index.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (["--html", "no/plan.html"], "--html no/plan.html: there is no folder no"),
        (["--html", "."], "--html . is a folder"),
        (["--html", "mine.yaml"], "--html mine.yaml exists and is not a page"),
        (["--write", "no/plan.yaml"], "--write no/plan.yaml: there is no folder no"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_the_search(
    option: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("mine")
    assert main(["plan", "gpt2", "--cluster", "1xa100", *option]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {problem}")
    assert not captured.out
    assert Path("mine.yaml").read_text() == "mine"


@contextlib.contextmanager
def running_server() -> Iterator[ThreadingHTTPServer]:
    server = serve_planner(0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with running_server() as server:
        yield server


def sent(server: ThreadingHTTPServer, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


JSON = "application/json"


def test_the_server_answers_its_own_page(server: ThreadingHTTPServer) -> None:
    status, page = sent(server, "GET", "/")
    assert status == 200
    assert '"mode":"server"' in page
    here = f"http://127.0.0.1:{server.server_port}"
    status, answer = sent(server, "POST", "/plan", json.dumps(SMALL), Content_Type=JSON, Origin=here)
    assert status == 200
    assert json.loads(answer) == asked(**SMALL)
    assert sent(server, "GET", "/etc/passwd")[0] == 404
    assert sent(server, "POST", "/other", "{}", Content_Type=JSON)[0] == 404
    with pytest.raises(UserError, match="choose another"):
        serve_planner(server.server_port)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "text/plain; application/json"}, 415),
        ({}, 415),
        ({"Content_Type": JSON, "Origin": "http://evil.example"}, 403),
        ({"Content_Type": JSON, "Origin": "null"}, 403),
        ({"Content_Type": JSON, "Sec_Fetch_Site": "cross-site"}, 403),
        ({"Content_Type": JSON, "Sec_Fetch_Site": "same-site"}, 403),
        ({"Content_Type": JSON, "Host": "evil.example"}, 403),
        ({"Content_Type": JSON, "Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403),
        ({"Content_Type": JSON, "Content_Length": str(2**40)}, 413),
        ({"Content_Type": JSON, "Content_Length": "-1"}, 413),
        ({"Content_Type": JSON, "Content_Length": "\xb2"}, 413),
    ],
)
def test_no_other_page_can_drive_the_server(
    server: ThreadingHTTPServer, headers: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list[object]()
    monkeypatch.setattr("meshwright.planner.server.respond", lambda body: planned.append(body) or "{}")
    assert sent(server, "POST", "/plan", json.dumps(SMALL), **headers)[0] == status
    assert not planned


def test_a_body_that_never_comes_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds up nobody else before."""
    monkeypatch.setattr(LocalHandler, "timeout", 1.0)
    with running_server() as server, socket.create_connection(server.server_address[:2], timeout=30) as slow:
        head = f"POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: 9\r\n\r\n"
        slow.sendall(head.encode() + b"{")
        assert sent(server, "GET", "/")[0] == 200
        assert "problems" in json.loads(sent(server, "POST", "/plan", "[]", Content_Type=JSON)[1])
        assert slow.recv(1) == b""


@pytest.mark.slow
def test_the_browser_runs_nothing_that_a_plan_holds(browser: Any, server: ThreadingHTTPServer) -> None:
    """Should a text ever reach the page unescaped, its policy refuses it: scripts, handlers and other hosts."""
    context = browser.new_context()
    page, refused = context.new_page(), list[str]()
    page.on("console", lambda message: refused.append(message.text))
    page.goto(f"http://127.0.0.1:{server.server_port}/#model=gpt2&cluster=4xa100")
    settled(page, "64 x 1,024 tokens")
    assert not [line for line in refused if "favicon" not in line and "404" not in line]
    page.evaluate("plan.innerHTML = '<img src=/x onerror=\"window.hurt = 1\">'")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hurt = 1'}))")
    page.evaluate("fetch('http://127.0.0.2:1/').catch(() => 0)")
    page.wait_for_selector("#plan img", state="attached")
    for what in ("event handler", "inline script", "127.0.0.2"):
        assert any(what in line and "Content Security Policy" in line for line in refused), (what, refused)
    assert page.evaluate("window.hurt") is None
    context.close()


def settled(page: Any, text: str) -> None:
    """Wait until the newest plan is drawn."""
    page.wait_for_selector("#plan:not(.old)")
    page.wait_for_selector(f"#about:has-text('{text}')")


@pytest.mark.slow
def test_a_person_plans_on_the_page(page: Any, server: ThreadingHTTPServer, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{server.server_port}/"
    page.goto(f"{address}#model=gpt2&cluster=4xa100")
    settled(page, "64 x 1,024 tokens")
    assert page.inner_text("h1") == "gpt2 on 4 x A100-SXM-80GB"
    assert page.inner_text("#command") == "meshwright plan gpt2 --cluster 4xa100 --no-methods"
    page.eval_on_selector(
        "[name=sequence]", "e => { e.value = 9; e.dispatchEvent(new Event('input', {bubbles: true})) }"
    )
    settled(page, "64 x 512 tokens")
    page.select_option("[name=device]", "t4")
    page.wait_for_selector("h1:has-text('4 x T4')")
    assert "sequence=512" in page.url
    assert "cluster=4xt4" in page.url
    page.reload()
    page.wait_for_selector("h1:has-text('4 x T4')")
    settled(page, "64 x 512 tokens")
    page.fill("[name=more]", "training.optimizr=1")
    page.press("[name=more]", "Enter")
    page.wait_for_selector('#problems:has-text("training.optimizr=1: unknown key")')
    page.fill("[name=more]", "")
    page.press("[name=more]", "Enter")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page.set_input_files("#pick", tmp_path / "config.json")
    page.wait_for_selector("h1:has-text('llama-config on 4 x T4')")
    assert "files=" in page.url, "a link has the file too"
    page.reload()
    page.wait_for_selector("h1:has-text('llama-config on 4 x T4')")
    page.click("#files button")
    page.wait_for_selector("h1:has-text('gpt2 on 4 x T4')")
    page.click("[data-of=sequence]")
    settled(page, "64 x 1,024 tokens")
    page.fill("[name=beside]", "4xl4")
    page.press("[name=beside]", "Enter")
    page.wait_for_selector("h1:has-text('gpt2 on 2 clusters')")
    assert page.locator("details.plan").count() == 2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_down(page: Any, server: ThreadingHTTPServer, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"http://127.0.0.1:{server.server_port}/#model=gpt2&cluster=16xa100-40g&beside=4xl4")
    page.wait_for_selector("h1:has-text('gpt2 on 2 clusters')")
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.locator(".machines [data-rank='3'] >> nth=0").hover()
    assert page.locator(".machines .self").count() == 1
    assert page.locator(".machines .peer").count() >= 7
    assert "rank 3" in page.inner_text(".tip")


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_site(folder, Path(request.config.getoption("--pyodide")))
    return folder


@pytest.mark.pyodide
def test_a_tab_answers_as_the_command_line(site: Path) -> None:
    """A few of the queries that `make test-site` compares."""
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "planner_tab.py"
    done = subprocess.run([sys.executable, script, site, "--queries", "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 queries (seed 0): " in done.stdout
    assert "0 answers differ" in done.stdout


@pytest.mark.pyodide
def test_the_page_plans_in_a_browser_tab(page: Any, site: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=files.serve_forever, args=(0.02,))
    thread.start()
    try:
        page.set_default_timeout(120_000)
        page.goto(f"http://127.0.0.1:{files.server_port}/#model=gpt2&cluster=4xa100&sequence=512")
        settled(page, "64 x 512 tokens")
        answer = page.evaluate(f"backend.ask({json.dumps(json.dumps(SMALL))})")
        assert json.loads(answer)["json"] == asked(**SMALL)["json"]
        problem = json.loads(page.evaluate('backend.ask(\'{"model": "gpt2", "clusters": ["local"]}\')'))
        assert "a browser tab does not know its machine" in problem["problems"][0]
    finally:
        files.shutdown()
        thread.join()
        files.server_close()
