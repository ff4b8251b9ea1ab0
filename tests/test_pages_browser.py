"""The chat page and the arena in a real browser (headless Chromium): a user's actions, and the page's permissions.

Needs `playwright` and a Chromium, playwright's own or the system's; skipped if one is missing.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from served import adapted, model_of
from test_serve import Running, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = model_of("llama", max_positions=256)
    votes = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    with running({"base": base, "tuned": adapted(base)}, votes=votes) as found:
        found.votes = votes  # type: ignore[attr-defined]
        yield found


def kept(page: Any, name: str, tmp_path: Path) -> None:
    """A screenshot, to look at."""
    page.screenshot(path=tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_a_person_chats(page: Any, server: Running, tmp_path: Path) -> None:
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    assert not page.is_visible("#key"), "no key is wanted"
    page.fill("#temperature", "0")
    page.fill("#tokens", "16")
    page.select_option("#model", "tuned")
    page.fill("#text", "<b>def</b> add_7(x):")
    page.press("#text", "Enter")
    page.wait_for_selector(".message.assistant")
    page.wait_for_selector("#send:text-is('Send')")
    assert page.inner_text(".message.user") == "<b>def</b> add_7(x):", "text, not markup"
    expected = server.client.chat.completions.create(
        model="tuned", messages=[{"role": "user", "content": "<b>def</b> add_7(x):"}], max_tokens=16, temperature=0
    )
    assert (
        page.evaluate("document.querySelector('.message.assistant').textContent") == expected.choices[0].message.content
    )
    kept(page, "chat", tmp_path)
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_a_person_stops_an_answer(page: Any, server: Running) -> None:
    slow, engine = threading.Event(), server.models["base"].engine
    step = engine.step

    def slowly() -> bool:
        slow.wait(0.05)
        return step()

    engine.step = slowly  # type: ignore[method-assign]
    try:
        page.goto(server.url)
        page.wait_for_selector("#model option", state="attached")
        page.fill("#tokens", "200")
        page.fill("#text", "def add_7(x):")
        page.click("#send")
        page.wait_for_selector("#send:text-is('Stop')")
        page.wait_for_selector(".message.assistant")
        page.click("#send")
        page.wait_for_selector("#send:text-is('Send')")
        assert server.settles("meshwright_requests_running", 0)
    finally:
        slow.set()
        engine.step = step  # type: ignore[method-assign]


def test_a_person_votes(page: Any, server: Running, tmp_path: Path) -> None:
    page.goto(f"{server.url}/arena")
    page.wait_for_selector("#send:enabled")
    assert not page.is_visible("#key"), "no key is wanted"
    assert page.locator("#votes button:enabled").count() == 0, "nobody votes before the answers"
    page.fill("#temperature", "0")
    page.fill("#tokens", "16")
    page.fill("#text", "def add_7(x):")
    page.press("#text", "Enter")
    page.wait_for_selector("#votes button:enabled")
    assert "base" not in page.inner_text("main")
    assert "tuned" not in page.inner_text("main"), "names are hidden before the vote"
    kept(page, "arena-before", tmp_path)
    page.click("text=B is better")
    page.wait_for_selector("#note:has-text('Thank you')")
    kept(page, "arena-after", tmp_path)
    (vote,) = [json.loads(line) for line in server.votes.read_text().splitlines()]  # type: ignore[attr-defined]
    assert vote["winner"] == "model_b"
    shown = {side: page.inner_text(f"#{side} h2") for side in "ab"}
    assert shown == {"a": f"Model A: {vote['model_a']}", "b": f"Model B: {vote['model_b']}"}
    for side in "ab":
        said = page.evaluate(f"document.querySelector('#{side} .assistant').textContent")
        assert vote[f"conversation_{side}"][-1]["content"] == said
    page.click("#again")
    assert page.inner_text("#a") == "Model A"


ATTACK = """
async ([url, bodies]) => {
    for (const [path, body] of Object.entries(bodies)) {
        for (const type of ["text/plain; json", "text/plain", "application/x-www-form-urlencoded; json", null]) {
            const headers = type === null ? {} : {"content-type": type};
            await fetch(url + path, {method: "POST", mode: "no-cors", headers, body});
            navigator.sendBeacon(url + path, type === null ? body : new Blob([body], {type}));
        }
        for (const mode of ["cors", "no-cors"])
            await fetch(url + path, {method: "POST", mode, headers: {"content-type": "application/json"}, body})
                .catch(() => null);
        const form = document.createElement("form"), field = document.createElement("input"), frame = "f" + path;
        Object.assign(document.body.appendChild(document.createElement("iframe")), {name: frame});
        Object.assign(form, {method: "post", action: url + path, enctype: "text/plain", target: frame});
        Object.assign(field, {name: body.slice(0, -1) + ', "user": "', value: '"}'});
        form.append(field);
        document.body.append(form);
        form.submit();
        const script = document.body.appendChild(document.createElement("script"));
        script.src = url + path;
        await new Promise(done => script.onerror = script.onload = done);
    }
    await new Promise(done => setTimeout(done, 300));
}
"""


class EmptyPage(BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body></body>")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"], ids=["another site", "another port"])
def test_a_page_of_another_origin_cannot_drive_the_server(browser: Any, server: Running, name: str) -> None:
    """Requests that a browser sends without asking the server first, a form and a script among them."""
    said = [{"role": "user", "content": "x"}]
    vote = {"model_a": "base", "model_b": "tuned", "winner": "tie", "conversation_a": said, "conversation_b": said}
    answers = {"model": "base", "max_tokens": 1}
    bodies = {
        "/v1/chat/completions": {**answers, "messages": said},
        "/v1/completions": {**answers, "prompt": "def"},
        "/v1/embeddings": {"model": "base", "input": "def"},
        "/tokenize": {"prompt": "def"},
        "/detokenize": {"tokens": [5]},
        "/v1/load_lora_adapter": {"lora_name": "evil", "lora_path": "evil"},
        "/v1/unload_lora_adapter": {"lora_name": "tuned"},
        "/arena/votes": vote,
    }
    sent = {path: json.dumps(body) for path, body in bodies.items()}
    votes = server.votes.read_text() if server.votes.exists() else None  # type: ignore[attr-defined]
    before = {path: succeeded(server, path) for path in sent}
    elsewhere = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage)
    thread = threading.Thread(target=elsewhere.serve_forever, args=(0.02,))
    thread.start()
    context = browser.new_context()
    try:
        page = context.new_page()
        arrived = list[str]()
        page.on("requestfinished", lambda one: arrived.append(one.url) if one.method == "POST" else None)
        page.goto(f"http://{name}:{elsewhere.server_port}/")
        page.evaluate(ATTACK, [server.url, sent])
    finally:
        context.close()
        elsewhere.shutdown()
        thread.join()
        elsewhere.server_close()
    assert {url.removeprefix(server.url) for url in arrived} == set(sent), "the requests arrived"
    assert {path: succeeded(server, path) for path in sent} == before
    assert votes == (server.votes.read_text() if server.votes.exists() else None)  # type: ignore[attr-defined]


def succeeded(server: Running, path: str) -> float:
    """Requests to a path that the server did not refuse at once: with any status but 403 and 415."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith(f'meshwright_requests_total{{path="{path}"')]
    return sum(float(line.split()[-1]) for line in counted if not any(f'"{status}"' in line for status in (403, 415)))
