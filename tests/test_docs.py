"""The pages are correct: links resolve, commands parse, recipes load, generated pages are current."""

import importlib
import re
import shlex
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.common import presets
from meshwright.cli.parser import VERBS, Parser
from meshwright.cli.sweep import plan_trials
from meshwright.spec.recipe import dump_recipe, load_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
}

EVERYTHING_GIVEN = dump_recipe(load_recipe(presets()["demo"]), expanded=True)
"""The recipe that pages start from; any setting can be overridden in it."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language; an empty one is a terminal."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return [block for found, block in fenced if found == language]


def each(language: str) -> list[Any]:
    """Every block in this language on every page, as parameters of a test."""
    return [
        pytest.param(block, id=f"{page}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def commands() -> list[tuple[str, str, str]]:
    """(page, command, error) of every `meshwright ...` that a page tells users to type.

    In a terminal block with output, the lines after `$ `; without output, and in shell scripts, every line; and
    backquoted commands in the text. The error is the one that the page shows below the command, if any.
    """
    found = []
    for page, text in PAGES.items():
        for block in blocks(page, "") + blocks(page, "bash"):
            lines = [*block.splitlines(), ""]
            typed = [(line[2:], after) for line, after in pairwise(lines) if line.startswith("$ ")]
            for line, after in typed or [(line.strip(), "") for line in lines]:
                found.append((page, line, after.removeprefix("error: ") if after.startswith("error: ") else ""))
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        found += [(page, " ".join(code.split()), "") for code in re.findall(r"`([^`]+)`", prose)]
    return [found for found in found if re.search(r"^(.* -m )?meshwright( |$)", found[1])]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], f"{page} links to {target}"


def slug(heading: str) -> str:
    """GitHub's anchor for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(("page", "command", "error"), commands())
def test_commands_parse(page: str, command: str, error: str) -> None:
    """Up to the first shell character: a pipe, a redirection, a comment. Overrides load, or fail as shown."""
    words = shlex.split(re.split(r" [|>&;<#]", command, maxsplit=1)[0])
    verb, *words = words[words.index("meshwright") + 1 :] or ["--help"]
    if verb in ("--help", "--version", "VERB"):
        return
    assert verb in VERBS
    parser = Parser(verb)
    importlib.import_module(f"meshwright.cli.{verb}").add_arguments(parser)
    if not words or "--help" in words:
        return
    parsed = parser.parse(words)
    overrides = getattr(parsed, "overrides", [])
    if not overrides or overrides == ["a.b=c"]:
        return
    message = error.split(": ", 1)[-1]  # without the file's line
    with pytest.raises(ValueError, match=re.escape(message)) if error else nullcontext():
        sweep = plan_trials(overrides, parsed.random, parsed.seed) if verb == "sweep" else []
        for settings in [trial.settings for trial in sweep] or [overrides]:
            run = parse_spec(EVERYTHING_GIVEN, Run, settings)
            if error:
                resolve_run(run, base_dir=Path())


def test_every_verb_is_shown() -> None:
    """The test above covers it too."""
    words = [command.split() for _, command, _ in commands()]
    assert set(VERBS) <= {after for line in words for after in line[line.index("meshwright") + 1 :][:1]}


@pytest.mark.parametrize("block", each("yaml"))
def test_recipes_load(block: str) -> None:
    """A snippet may omit the model, which every recipe needs."""
    text = block if re.search(r"^model:", block, flags=re.MULTILINE) else f"model: gpt2\n{block}"
    parse_spec(text, Run, source="snippet")


@pytest.mark.parametrize("block", each("python"))
def test_python_compiles(block: str) -> None:
    compile(block, "snippet", "exec")


def test_every_page_has_its_four_pictures() -> None:
    """Of one size, and small: what `make screenshots` writes, all of it shown, and nothing else."""
    folder = ROOT / "docs" / "pictures"
    made = {path.name for path in folder.iterdir()}
    pages = {name.rsplit("-", 2)[0] for name in made}
    assert made == {
        f"{page}-{width}-{colours}.webp" for page in pages for width in (1280, 400) for colours in ("light", "dark")
    }
    assert set(re.findall(r"\(pictures/([^)]*)\)", PAGES["docs/pages.md"])) == made
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
