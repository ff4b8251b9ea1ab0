"""The chat page and the arena in a real browser (headless Chromium): a user's actions, and the page's permissions.

Needs `playwright` and a Chromium, playwright's own or the system's; skipped if one is missing.
"""

import json
import re
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


def rendered(page: Any, text: str) -> str:
    """The words that the page shows of Markdown."""
    return page.evaluate(
        "text => { const box = document.createElement('div'); box.append(...markdown(text)); return box.textContent }",
        text,
    )


def ask(page: Any, text: str) -> None:
    """Send a message, and wait for its whole answer."""
    answered = page.locator(".assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector(f".assistant .tools >> nth={answered}")


def turns(page: Any) -> list[dict[str, Any]]:
    """The turns of the newest conversation that the browser keeps."""
    return json.loads(page.evaluate("localStorage.getItem('meshwright-conversations')"))[0]["turns"]


def test_a_person_chats(page: Any, server: Running, tmp_path: Path) -> None:
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    assert not page.is_visible("#key"), "no key is wanted"
    page.fill("#temperature", "0")
    page.fill("#tokens", "16")
    page.select_option("#model", "tuned")
    ask(page, "<b>def</b> add_7(x):")
    assert page.inner_text(".user .body") == "<b>def</b> add_7(x):", "text, not markup"
    expected = server.client.chat.completions.create(
        model="tuned", messages=[{"role": "user", "content": "<b>def</b> add_7(x):"}], max_tokens=16, temperature=0
    )
    said = expected.choices[0].message.content
    assert turns(page)[1]["texts"] == [said]
    assert page.text_content(".assistant .body") == rendered(page, said)
    kept(page, "chat", tmp_path)
    page.click("#clear")
    assert page.locator(".message").count() == 0


class Scripted:
    """Answers of a server to chat completions, in turn, and what the page asked."""

    def __init__(self, page: Any, *texts: str) -> None:
        self.texts, self.asked = list(texts), list[dict[str, Any]]()
        page.route("**/v1/chat/completions", self)

    def __call__(self, route: Any) -> None:
        self.asked.append(route.request.post_data_json)
        pieces = re.findall(r".{1,7}", self.texts.pop(0), flags=re.DOTALL)
        events = "".join(
            f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n" for piece in (*pieces, "")
        )
        route.fulfill(content_type="text/event-stream", body=f"{events}data: [DONE]\n\n")

    def messages(self) -> list[tuple[str, str]]:
        """The messages of the newest request."""
        return [(one["role"], one["content"]) for one in self.asked[-1]["messages"]]


def test_an_answer_is_asked_again_and_a_question_edited(page: Any, server: Running) -> None:
    script = Scripted(page, "first", "second", "to two", "to three")
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    page.fill("#system", "be brief")
    ask(page, "one")
    assert script.messages() == [("system", "be brief"), ("user", "one")]
    page.click("text=Regenerate")
    page.wait_for_selector(".assistant .body p:text-is('second')")
    assert script.messages() == [("system", "be brief"), ("user", "one")], "not the earlier answer"
    page.click("[aria-label='Earlier answer']")
    assert page.inner_text(".assistant .body") == "first"
    ask(page, "two")
    assert script.messages()[1:] == [("user", "one"), ("assistant", "first"), ("user", "two")], "the answer shown"
    page.click("text=Edit >> nth=1")
    page.fill(".editor textarea", "three")
    page.click(".editor button:text-is('Send')")
    page.wait_for_selector(".assistant .body p:text-is('to three')")
    assert script.messages()[-2:] == [("assistant", "first"), ("user", "three")]
    assert [turn["texts"] for turn in turns(page)] == [["one"], ["first", "second"], ["three"], ["to three"]]


def test_conversations_are_kept_in_the_browser(page: Any, server: Running) -> None:
    Scripted(page, "an answer", "another")
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    page.fill("#system", "be brief")
    ask(page, "about cats")
    page.click("#clear")
    ask(page, "about dogs")
    page.reload()
    assert page.locator("#kept li").all_inner_texts() == ["about dogs\n×", "about cats\n×"]
    assert page.locator(".message").count() == 0
    page.fill("#system", "")
    page.click("text=about cats")
    assert page.locator(".body").all_inner_texts() == ["about cats", "an answer"]
    assert page.input_value("#system") == "be brief"
    assert page.get_attribute("#kept button >> nth=2", "class") == "on"
    page.click("[aria-label='Delete this conversation'] >> nth=1")
    assert page.locator("#kept li").all_inner_texts() == ["about dogs\n×"]
    assert page.locator(".message").count() == 0, "the deleted one was open"


MARKDOWN = """\
# Title
Some **bold *and italic***, `code <b>`, snake_case_name, [a link](https://example.org/x), <script>alert(1)</script>

- one
- two
  1. inner
  2. more

| a | b |
|---|--:|
| 1 | 2 \\| 3 |

> quoted

```python
def f(x):
    return "<b>" + x
```

~~~
unfinished"""


def test_answers_are_markdown(page: Any, server: Running) -> None:
    Scripted(page, MARKDOWN)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    ask(page, "show everything")
    body = ".assistant .body"
    for selector, text in (
        ("h3", "Title"),
        ("strong", "bold and italic"),
        ("strong em", "and italic"),
        ("p code", "code <b>"),
        ("a", "a link"),
        ("ul > li >> nth=0", "one"),
        ("ol li >> nth=1", "more"),
        ("td.right", "2 | 3"),
        ("blockquote p", "quoted"),
        (".code-box pre >> nth=0", 'def f(x):\n    return "<b>" + x'),
        (".code-head span >> nth=0", "python"),
        (".code-box pre >> nth=1", "unfinished"),
    ):
        assert page.inner_text(f"{body} {selector}") == text, selector
    assert "snake_case_name" in page.inner_text(f"{body} p >> nth=0")
    assert page.locator(f"{body} script, {body} b").count() == 0
    page.click(".copy-code >> nth=0")
    page.wait_for_selector(".copy-code:text-is('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" + x'
    page.click(".assistant .tools button:text-is('Copy')")
    page.wait_for_selector(".tools button:text-is('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


HOSTILE = (
    "<img src=x onerror='window.owned=1'><svg onload='window.owned=1'>",
    "[x](javascript:window.owned=1) [y](JaVaScRiPt:window.owned=1) [z](data:text/html,<script>window.owned=1</script>)",
    "![i](https://elsewhere.example/track.png) ![j](x' onerror='window.owned=1)",
    "```<b onclick='window.owned=1'>\n</code></pre><script>window.owned=1</script>\n```",
    "| <img src=x onerror=window.owned=1> |\n|---|\n| [q](vbscript:x) |",
    "# <iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "<style>*{display:none}</style><form action=https://elsewhere.example><meta http-equiv=refresh content=0>",
)


def test_no_answer_becomes_markup(page: Any, server: Running) -> None:
    Scripted(page, "\n\n".join(HOSTILE))
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    ask(page, "attack")
    within = ".assistant .body"
    names = page.evaluate(f"[...new Set([...document.querySelectorAll('{within} *')].map(one => one.tagName))].sort()")
    allowed = {*["A", "BUTTON", "CODE", "DIV", "H3", "P", "PRE", "SPAN", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR"]}
    assert set(names) <= allowed
    assert page.evaluate(f"[...document.querySelectorAll('{within} a')].map(one => one.href)") == [
        "https://elsewhere.example/track.png",
        "https://elsewhere.example/",
    ], "an image is a link that loads nothing"
    attributes = page.evaluate(f"[...document.querySelectorAll('{within} *')].flatMap(one => one.getAttributeNames())")
    assert set(attributes) <= {"href", "target", "rel", "title", "class", "type", "data-copy"}
    assert page.evaluate("window.owned") is None


@pytest.mark.parametrize(
    "letter", ["**a", "`a", "[a", "*a ", "_a ", "> ", "- ", "- a\n\n", "|", "#", "~~a", "(http://"]
)
def test_no_answer_stops_the_page(page: Any, server: Running, letter: str) -> None:
    """An answer of a hundred thousand letters is shown in seconds: no form of it costs its square."""
    page.goto(server.url)
    page.set_default_timeout(60_000)
    text = letter * (100_000 // len(letter))
    assert page.evaluate("text => { const made = markdown(text); return made.length > 0 }", text)


def test_images_are_refused_in_words(page: Any, server: Running) -> None:
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    for kind, field, words in (
        ("paste", "clipboardData", "Images cannot be sent: the models here read text alone."),
        ("drop", "dataTransfer", "Images cannot be sent: the models here read text alone."),
    ):
        page.evaluate("document.getElementById('note').textContent = ''")
        page.evaluate(
            """([kind, field]) => {
                const data = new DataTransfer();
                data.items.add(new File(["x"], "cat.png", {type: "image/png"}));
                const Kind = {paste: ClipboardEvent, drop: DragEvent}[kind];
                const event = new Kind(kind, {[field]: data, bubbles: true, cancelable: true});
                document.getElementById("text").dispatchEvent(event);
            }""",
            [kind, field],
        )
        assert page.inner_text("#note").startswith(words)
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "base",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
            ],
        },
    )
    assert answer.status_code == 400
    assert "read text alone, no images" in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_page_on_a_phone(page: Any, server: Running, scheme: str) -> None:
    Scripted(page, MARKDOWN + "\nwide " + "w" * 300)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(server.url)
    page.wait_for_selector("#model option >> nth=1", state="attached")
    assert not page.is_visible("#temperature"), "settings are folded away"
    page.click("summary:text-is('Settings')")
    assert page.is_visible("#temperature")
    page.click("summary:text-is('Settings')")
    ask(page, "show everything")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate("document.documentElement.scrollHeight") == 800, "only the conversation scrolls"
    assert page.is_visible("#send")


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
        shown_text = page.text_content(f"#{side} .assistant .body")
        assert shown_text == rendered(page, vote[f"conversation_{side}"][-1]["content"])
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
