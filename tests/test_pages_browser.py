"""The chat page and the arena in a real browser (headless Chromium): a user's actions, and the page's permissions.

Needs `playwright` and a Chromium, playwright's own or the system's; skipped if one is missing.
"""

import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from served import adapted, model_of
from test_serve import Running, running

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = model_of("llama", max_positions=256)
    votes = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    with running({"base": base, "tuned": adapted(base)}, votes=votes) as found:
        found.votes = votes  # type: ignore[attr-defined]
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from playwright.sync_api import Error, sync_playwright

        with sync_playwright() as playwright:
            try:
                found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            except Error as error:
                pytest.skip(f"no Chromium starts here: {str(error).splitlines()[0]}")
            yield found
            found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; a script error, a refused resource or a request to another host fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    found, problems = context.new_page(), list[str]()
    found.set_default_timeout(SECONDS * 1000)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("request", lambda one: None if "//127.0.0.1:" in one.url else problems.append(one.url))
    yield found
    context.close()
    assert [problem for problem in problems if "favicon" not in problem and "status of 404" not in problem] == []


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
