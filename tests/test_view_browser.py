"""The pages of runs, comparisons and memory in a real browser (headless Chromium): clicks, zoom, narrow, dark.

Needs `playwright` and a Chromium, playwright's own or the system's; skipped if one is missing.
"""

import csv
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import meshwright
from journals import at, run_of_all_kinds, step, write_run
from meshwright.pages.live import serve_page

pytestmark = pytest.mark.slow

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Addresses of the page of one run and of the page of two."""
    runs = [write_run(tmp_path / "runs" / "a"), write_run(tmp_path / "runs" / "b", lr=0.02)]
    return {
        "one": meshwright.view(runs[0]).save(tmp_path / "one.html").as_uri(),
        "two": meshwright.view(tmp_path / "runs").save(tmp_path / "two.html").as_uri(),
    }


def plot(page: Any, title: str, what: str) -> Any:
    """A value of a chart's plot."""
    return page.evaluate(f"board.charts.find(chart => chart.spec.title === '{title}').plot.{what}")


def drag(page: Any, card: str, start: float, end: float) -> None:
    """Drag over a chart from one share of its width to another."""
    over = page.locator(f"{card} .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()


def test_smoothing_changes_what_is_drawn_not_what_is_kept(page: Any, files: dict[str, str]) -> None:
    page.goto(files["one"])
    page.fill("#smoothing", "0")
    assert plot(page, "Loss", "data.length") == 3, "x, training, held out"
    page.fill("#smoothing", "0.5")
    x, raw, smooth, _ = plot(page, "Loss", "data")
    weight, bias, expected = 0.0, 0.0, []
    for value in raw:
        weight, bias = 0.5 * weight + 0.5 * value, 0.5 * bias + 0.5
        expected.append(weight / bias)
    assert x == list(range(1, 13))
    assert raw == pytest.approx([5.0 - 0.1 * number for number in range(1, 13)], rel=1e-15)
    assert smooth == pytest.approx(expected, rel=1e-12)
    assert page.inner_text("#smoothing-value") == "0.5"


def test_the_x_axis_is_steps_tokens_time_or_flops(page: Any, files: dict[str, str]) -> None:
    page.goto(files["one"])
    for axis, first, last in (("tokens", 100, 1200), ("time", 1.5, 18.0 - 0.5), ("flops", 2.5e8, 3e9), ("step", 1, 12)):
        page.click(f"#x-{axis}")
        xs = plot(page, "Learning rate", "data[0]")
        assert (xs[0], xs[-1]) == pytest.approx((first, last))
        assert page.get_attribute(f"#x-{axis}", "aria-pressed") == "true"


def test_log_axes(page: Any, files: dict[str, str]) -> None:
    page.goto(files["one"])
    assert plot(page, "Loss", "scales.y.distr") == 1
    page.check("#logy")
    page.check("#logx")
    assert (plot(page, "Loss", "scales.y.distr"), plot(page, "Loss", "scales.x.distr")) == (3, 3)
    page.click("#chart-0 .tools button:text-is('log')")
    assert (plot(page, "Loss", "scales.y.distr"), plot(page, "Gradient norm", "scales.y.distr")) == (1, 3)


def test_zoom_and_hover_reach_every_chart(page: Any, files: dict[str, str]) -> None:
    page.set_viewport_size(WIDE)
    page.goto(files["two"])
    assert not page.is_visible("#reset")
    drag(page, "#chart-0", 0.25, 0.75)
    expected = (1 + 0.25 * 11, 1 + 0.75 * 11)
    for title in ("Loss", "Learning rate", "Step time", "Peak memory of a rank"):
        found = plot(page, title, "scales.x")
        assert (found["min"], found["max"]) == pytest.approx(expected, abs=0.1), title
    page.reload()
    assert plot(page, "Step time", "scales.x.min") == pytest.approx(expected[0], abs=0.1), "the address keeps it"
    box = page.locator("#chart-0 .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    at_middle = plot(page, "Loss", "cursor.left") / plot(page, "Loss", "over.clientWidth")
    elsewhere = plot(page, "Gradient norm", "cursor.left") / plot(page, "Gradient norm", "over.clientWidth")
    assert elsewhere == pytest.approx(at_middle, abs=0.02)
    assert "a, training" in page.inner_text(".tip")
    page.click("#reset")
    assert plot(page, "Step time", "scales.x.max") == 12
    assert not page.is_visible("#reset")


def test_a_run_is_hidden_and_shown(page: Any, files: dict[str, str]) -> None:
    page.goto(files["two"])
    page.fill("#smoothing", "0")
    assert plot(page, "Learning rate", "data.length") == 3
    page.click(".chip:has-text('b')")
    assert plot(page, "Learning rate", "data.length") == 2
    page.click(".chip:has-text('b')")
    assert plot(page, "Learning rate", "data.length") == 3
    assert page.inner_text("#recipes table >> nth=0").split("\n")[-1].split() == [
        "training.optimizer.lr",
        "0.01",
        "0.02",
    ]


def test_downloads(page: Any, files: dict[str, str]) -> None:
    page.goto(files["two"])
    with page.expect_download() as waiting:
        page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    lr = [row for row in rows if (row["run"], row["figure"]) == ("b", "step/lr")]
    assert [float(row["value"]) for row in lr] == [0.01 * number for number in range(1, 13)]
    assert (lr[-1]["step"], lr[-1]["tokens"], lr[-1]["seconds"]) == ("12", "1200", "17.5")
    page.hover("#chart-0")
    with page.expect_download() as waiting:
        page.click("#chart-0 .tools button:text-is('PNG')")
    assert waiting.value.suggested_filename == "loss.png"
    assert Path(waiting.value.path()).read_bytes()[:4] == b"\x89PNG"


def test_samples_over_time(page: Any, files: dict[str, str]) -> None:
    page.goto(files["one"])
    assert page.inner_text("#samples pre") == "<b>One & three"
    page.fill("#sample-step", "0")
    assert page.inner_text("#samples pre") == "<b>One & two", "text, not markup"


@pytest.mark.parametrize("which", ["one", "two"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_down(page: Any, files: dict[str, str], which: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(NARROW)
    page.goto(files[which])
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(one => one.offsetParent && one.textContent.trim() && "
        "!one.children.length).map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 12


def brightness(page: Any) -> int:
    """Of the page's background, 0 to 765."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


def test_light_and_dark(page: Any, files: dict[str, str]) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(files["one"])
    dark = plot(page, "Loss", "series[1].stroke()")
    assert brightness(page) < 150
    page.click("#theme")
    assert brightness(page) > 600
    assert plot(page, "Loss", "series[1].stroke()") != dark, "the curves are drawn again"
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.is_visible("#x-step")


def test_a_finger_moves_the_cursor(browser: Any, files: dict[str, str]) -> None:
    context = browser.new_context(viewport=NARROW, has_touch=True, is_mobile=True)
    try:
        page = context.new_page()
        page.goto(files["one"])
        page.evaluate(
            """() => {
                const over = document.querySelector("#chart-0 .u-over"), box = over.getBoundingClientRect();
                const place = {clientX: box.left + box.width / 2, clientY: box.top + 20};
                const touch = new Touch({identifier: 1, target: over, ...place});
                over.dispatchEvent(new TouchEvent("touchmove", {touches: [touch], bubbles: true, cancelable: true}));
            }"""
        )
        assert "training" in page.inner_text(".tip")
        assert plot(page, "Step time", "cursor.left") > 0
    finally:
        context.close()


def test_a_live_page_draws_new_steps(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path / "run", [at("start", 0, 0.0, world_size=1), *(step(n, float(n)) for n in range(1, 4))]
    )
    server = serve_page([run_dir], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        assert plot(page, "Learning rate", "data[0]") == [1, 2, 3]
        assert page.locator(".chart:visible").count() == 7
        with (run_dir / "metrics.jsonl").open("a") as journal:
            journal.writelines(json.dumps(record) + "\n" for record in run_of_all_kinds()[10:] if record["step"] > 3)
        page.wait_for_selector(".chart:visible >> nth=7")
        assert plot(page, "Learning rate", "data[0]")[-1] == 12
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
