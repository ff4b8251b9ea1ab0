"""The pages of verify, rehearse, data audit, judge and eval: their figures are the reports'; in a browser they are
looked at, pointed at, and printed."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.pages.proof import proof_page
from meshwright.pages.scores import checkpoints_page, judge_page
from meshwright.prove.compare import StepComparison
from meshwright.prove.difference import Difference
from meshwright.prove.locate import Location
from meshwright.prove.verify import Proof
from served import CHATML, tokenizer_of

NAMES = [
    "tok_embeddings.weight",
    *(f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("attention.wq", "feed_forward.w1")),
    "output.weight",
]
RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 2}
data: {sources: chat.jsonl, tokenizer: TOKENIZER, sequence_length: 256, packing: best_fit}
training: {steps: 2, global_batch: 4, precision: fp32}
layout: {dp_shard: 2}
device: cpu
run_dir: run
"""
LARGEST = 400_000
"""Bytes of a page."""


def proof(wrong: str | None = None, place: Location | None = None) -> Proof:
    """A proof of two steps; the gradient of `wrong` differs in the second."""
    steps = []
    for step in (1, 2):
        differs = wrong if step == 2 else None
        gradients = {name: Difference(3e-5 if name == differs else 1e-16, 1e-13, 1) for name in NAMES}
        one = StepComparison(step, Difference(0.0, 1e-12), {"loss": 4.5}, gradients=gradients)  # type: ignore[typeddict-item]
        if differs is None:
            one.updates = {name: Difference(0.0, 1e-16) for name in NAMES}
            one.state = {f"{name}.exp_avg": Difference(2e-20, 1e-18) for name in NAMES} | {"bias": Difference(0.0, 0.0)}
        steps.append(one)
    return Proof(steps, 1e-13, location=place)


def page_of(found: Proof) -> str:
    lines = ["layout     x", "equal: all" if found.equal else "different; first in <that>", "  by much"]
    return proof_page([({"strategy": "ZeRO-3 x 2", **found.as_data()}, lines)])


def tips(page: str) -> list[str]:
    return [unescape(tip) for tip in re.findall(r'data-tip="([^"]*)"', page)]


def test_a_proof_shows_every_tensor() -> None:
    page = page_of(proof())
    graph = tips(page[: page.index('class="plot"')])
    assert len(graph) == 2 * (3 * len(NAMES) + 1), "gradient, weight and moment of each in two steps, and a buffer"
    assert sorted(set(tips(page))) == sorted(set(graph)), "the picture has the same"
    assert f"{NAMES[1]}\ngradient, step 1: 1.00e-16 of 1.00e-13 allowed, worst on rank 1" in graph
    assert re.findall(r"<li class=\"\"><b>([^<]*)", page) == [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "output",
        "bias",
    ]
    assert "first difference" not in page


def test_the_first_wrong_tensor_is_marked() -> None:
    name = NAMES[3]
    found = proof(name, Location("reduction", name, Difference(3e-5, 1e-13, 1), (1,)))
    page = page_of(found)
    assert re.findall(r'class="tensor first"><span>([^<]*)<em>', page) == ["attention.wq"]
    assert len(re.findall(r'<i class="gradients wrong"', page)) == len(re.findall('class="dot wrong', page)) == 1
    assert "different; first in &lt;that&gt;" in page
    activation = Location("backward", "input of layers.1.feed_forward.w1", Difference(1.0, 1e-13))
    page = page_of(proof(NAMES[4], activation))
    assert re.findall(r'<li class="first"><b>([^<]*)<em>([^<]*)', page) == [
        ("layers.1", "first difference: backward of layers.1.feed_forward.w1")
    ]
    assert re.findall(r'class="tensor first"><span>([^<]*)<em>', page) == ["feed_forward.w1"]


JUDGED = {
    "judge": "gpt-x",
    "questions": 3,
    "ratings": {
        name: {"value": 1000.0 + 50 * n, "low": 980.0 + 50 * n, "high": 1040.0 + 50 * n} for n, name in enumerate("ab")
    },
    "pairs": [{"model_a": "a", "model_b": "b", "wins": 1, "ties": 0, "losses": 2, "rate": {}}],
    "mean_ratings": {"a": {"value": 7.25, "low": 6.0, "high": 8.0}},
    "by_category": {"maths": {"mean_ratings": {"a": {"value": 3.5, "low": 3.0, "high": 4.0}}}},
}


def test_a_judges_report_and_checkpoints_show_their_figures() -> None:
    page = judge_page(JUDGED, ["rating <a>"])
    assert {"b: 1050, from 1030 to 1090", "a: 7.25, from 6.00 to 8.00", "a: 3.50, from 3.00 to 4.00"} <= set(tips(page))
    assert {"won: 1", "lost: 2"} <= set(tips(page))
    assert "Mean ratings, category maths" in page
    assert "rating &lt;a&gt;" in page
    page = checkpoints_page("run", [(5, {"loss": 3.25, "acc": 0.5}), (10, {"loss": 3.0, "acc": 0.75})])
    assert {"step 5: loss 3.2500", "step 10: acc 0.7500"} <= set(tips(page))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages as the verbs write them."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer_of(CHATML).save(folder / "tokenizer")
    (folder / "run.yaml").write_text(RECIPE.replace("TOKENIZER", str(folder / "tokenizer")))
    talk = [{"role": "user", "content": "What is <b>{}</b> + 1?"}, {"role": "assistant", "content": "It is {}."}]
    rows = ({"messages": [{**one, "content": one["content"].format(n)} for one in talk]} for n in range(40))
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    votes = ({"model_a": "x", "model_b": "y", "winner": f"model_{'aab'[n % 3]}", "question": str(n)} for n in range(9))
    (folder / "votes.jsonl").write_text("".join(json.dumps(vote) + "\n" for vote in votes))
    recipe = str(folder / "run.yaml")
    names = {name: folder / f"{name}.html" for name in ("verify", "rehearse", "audit", "judge", "eval", "wrong")}
    assert main(["verify", recipe, "layout.dp_shard=1", "--steps", "1", "--html", str(names["verify"])]) == 0
    assert main(["rehearse", recipe, "--ranks", "0,1", "--html", str(names["rehearse"])]) == 0
    assert main(["data", "audit", recipe, "--html", str(names["audit"])]) == 0
    assert main(["judge", "--votes", str(folder / "votes.jsonl"), "--html", str(names["judge"])]) == 0
    names["eval"].write_text(checkpoints_page("run", [(5, {"loss": 3.25}), (10, {"loss": 3.0})]))
    place = Location("reduction", NAMES[3], Difference(3e-5, 1e-13, 1), (1,))
    names["wrong"].write_text(page_of(proof(NAMES[3], place)))
    return names


@pytest.mark.slow
def test_pages_are_small_and_load_nothing(pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        text = path.read_text()
        assert len(text) < LARGEST, name
        assert not re.search(r"<link|src=|href=|url\(|@import", text), name
        assert "default-src 'none'" in text


@pytest.mark.slow
def test_the_audits_page_has_the_rows_of_the_run(pages: dict[str, Path]) -> None:
    text = pages["audit"].read_text()
    rows = re.findall(r"row (\d), sample \d+ of [^:,]*, document (\d+): (\d+) tokens, (\d+) trained", text)
    assert {row[0] for row in rows} == set("01234567"), "the eight samples of two steps"
    assert all(0 < int(trained) < int(tokens) for _, _, tokens, trained in rows)
    assert re.findall(r'class="trained">It is \d+\.', text)
    assert re.findall(r'class="context">[^<]*What is &lt;b&gt;\d+&lt;/b&gt; \+ 1\?', text), "text, not markup"
    packed = sum(int(tokens) for row, _, tokens, _ in rows if row == "0")
    padding = re.search(r"(\d+) positions of padding", text)
    assert packed + (int(padding[1]) if padding else 0) == 256


@pytest.mark.slow
def test_the_rehearsals_page_has_a_timeline_of_each_rank(
    pages: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = pages["rehearse"].read_text()
    assert re.findall(r"Memory of (rank \d)", text) == ["rank 0", "rank 1"]
    folder = pages["rehearse"].parent
    assert main(["rehearse", str(folder / "run.yaml"), "--ranks", "0,1", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)["ranks"]
    assert "timeline" not in reports[0]
    for report in reports:
        assert f"<td>peak</td><td>{report['peak'] / 1e6:.3g} MB, in the {report['peak_phase']}</td>" in text
    totals = re.findall(r": (\S+ MB)\nweights", text.replace("&#x27;", "'"))
    assert f"{reports[0]['peak'] / 1e6:.3g} MB" in totals, "the curve reaches the peak"
    assert "exp_avg of layers.0.feed_forward.w1.weight" in text, "tensors are named"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_on_a_phone(page: Any, pages: dict[str, Path], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    for name, path in pages.items():
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 400, name
        sizes = page.evaluate(
            "[...document.querySelectorAll('body *')].filter(one => one.offsetParent && one.textContent.trim() && "
            "!one.children.length).map(one => parseFloat(getComputedStyle(one).fontSize))"
        )
        assert min(sizes) >= 11, name


@pytest.mark.slow
def test_pointing_at_a_page_and_printing_it(page: Any, pages: dict[str, Path]) -> None:
    page.goto(pages["wrong"].as_uri())
    page.hover(".graph .tensor.first i.wrong")
    assert page.inner_text(".tip") == f"{NAMES[3]}\ngradient, step 2: 3.00e-05 of 1.00e-13 allowed, worst on rank 1"
    page.hover(".dot.wrong")
    assert page.inner_text(".tip").startswith(NAMES[3])
    assert page.inner_text(".graph li.first, .graph .first em >> nth=0") == "first difference"
    page.goto(pages["rehearse"].as_uri())
    page.click("summary >> nth=0")
    assert page.is_visible("text=layers.0.feed_forward >> nth=0")
    page.hover("svg rect.at >> nth=20")
    assert "weights" in page.inner_text(".tip")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible("#theme")


def test_options_that_make_no_page_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {family: llama, hidden: 32, num_layers: 2, num_heads: 2, vocab: 64}\n")
    for words, reason in (
        (["data", "show", "run.yaml", "--html", "x.html"], "--html applies only to data audit"),
        (["rehearse", "run.yaml", "--deadlocks", "--html", "x.html"], "which --deadlocks does not measure"),
        (["verify", "run.yaml", "--engine", "bare", "--html", "x.html"], "leave it out with --engine"),
        (["eval", "run", "--html", "x.html"], "add --all-checkpoints"),
        (["judge", "q.jsonl", "--dry-run", "--html", "x.html"], "--dry-run judges nothing"),
        (["verify", "run.yaml", "--html", "no/x.html"], "there is no folder no"),
        (["rehearse", "run.yaml", "--html", "."], "is a folder"),
    ):
        assert main(words) == 2, words
        assert reason in capsys.readouterr().err
