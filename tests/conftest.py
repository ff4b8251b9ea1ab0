"""Fixtures and options for all tests: worker processes, started once, the choice of a tier, and the order of files."""

import functools
import gc
import importlib.util
import os
import shutil
import ssl
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks of a test share two cores
# Programs that tests start compute with a thread per core. On a busy machine, threads that spin while they wait keep
# the core from those they wait for: a run of 5 seconds takes 15.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:  # the process that distributes tests loads no torch
    from meshwright.testing.ranks import RankPool


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def compute_with_one_thread() -> None:
    """From now on, runs in this process and its forks compute with one thread, as ranks do.

    By default they use one thread per core. If tests run in parallel, those threads spin while they wait for each
    other: a run of seconds took minutes on a busy machine.
    """
    from meshwright.launch import launcher

    launcher.threads_per_rank = lambda local_ranks: 1


def pytest_configure(config: pytest.Config) -> None:
    if runs_tests(config):
        gc.disable()  # until the tests are collected
        compute_with_one_thread()  # before anything imports the function by name


def pytest_collection_finish(session: pytest.Session) -> None:
    if runs_tests(session.config):
        gc.freeze()  # what was imported stays: no collection visits it again
        gc.enable()
    modules = {item.module.__name__ for item in session.items if over_ranks(item)}
    if modules and runs_tests(session.config):
        from meshwright.testing import ranks

        # Before Python 3.13, multiprocessing does not pass the module path to the process that ranks are forked from.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            ranks.preload(modules)


def runs_tests(config: pytest.Config) -> bool:
    """Whether this process runs tests itself, rather than distributing them."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


@pytest.fixture(autouse=True)
def _poison() -> None:
    """Uninitialised memory is NaN in every test that computes here; ranks do the same themselves."""
    if "torch" in sys.modules:
        from meshwright.testing.poison import fill_uninitialized_memory

        fill_uninitialized_memory()


@pytest.fixture(scope="session", autouse=True)
def _tests_leave_the_checkout_as_it_was() -> Iterator[None]:
    """What a test writes there by a relative path would be committed with the next change."""
    before = set(os.listdir(ROOT))
    yield
    new = {name for name in set(os.listdir(ROOT)) - before if not name.startswith(".")}
    assert not new - {"runs", "site"}, f"a test wrote {', '.join(sorted(new))} into {ROOT}"


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """httpx reads all of this machine's for each request outside a client, in a tenth of a second."""
    with mock.patch("ssl.create_default_context", functools.cache(ssl.create_default_context)):
        yield


@pytest.fixture(scope="session")
def ranks() -> "Iterator[RankPool]":
    """Gloo ranks in any number, kept for the whole session."""
    from meshwright.testing.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER_SECONDS = 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
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
    found.set_default_timeout(BROWSER_SECONDS * 1000)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("request", lambda one: None if local(one.url) else problems.append(one.url))
    yield found
    context.close()
    assert [problem for problem in problems if "favicon" not in problem and "status of 404" not in problem] == []


def local(url: str) -> bool:
    """Whether a page may ask for this: from a server of this machine, or from itself."""
    return "//127.0.0.1:" in url or url.startswith(("file:", "blob:", "data:"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="what `make test-fast` runs")
    parser.addoption("--all", action="store_true", help="what `make test-all` runs: every case of every test")
    parser.addoption("--engines", action="store_true", help="what `make test-engines` runs as well")
    parser.addoption("--nanogpt", metavar="DIR", help="folder of karpathy/nanoGPT, to train it with --engines")
    parser.addoption("--megatron-lm", metavar="DIR", help="folder of NVIDIA/Megatron-LM, whose parser --engines asks")
    parser.addoption("--megatron-bridge", metavar="DIR", help="folder of NVIDIA-NeMo/Megatron-Bridge, likewise")
    parser.addoption("--checkouts", metavar="DIR", help="folder of clones of other systems, with their names")
    parser.addoption(
        "--pyodide", metavar="DIR", help="folder that `make site` fills: what `make test-site` runs as well"
    )
    parser.addoption("--slurm", action="store_true", help="what `make test-slurm` runs: it starts Slurm's daemons")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tier. Slow files come first, so that on several cores none is left running alone at the end."""
    kept, left_out, cases = [], [], Counter()
    for item in items:
        test = item.nodeid.split("[")[0]
        (kept if in_tier(config, item, cases[test]) else left_out).append(item)
        cases[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    seconds = Counter()
    for item in kept:
        seconds[item.path] += 2.0 if is_slow(item) else 0.7 if over_ranks(item) else 0.05
    items[:] = sorted(kept, key=lambda item: -seconds[item.path])


def in_tier(config: pytest.Config, item: pytest.Item, case: int) -> bool:
    """Whether this case of its test, counted from 0, belongs to the chosen tier.

    --all: every case. Without it, no test that is marked `exhaustive`, and each nth case of one marked `every(n)`.
    --fast: of these, no test that is marked `slow`, and only the first case of one that is marked `every` or runs on
    several processes. Without --engines, no test that trains in other engines;
    without --pyodide, none that runs the planner in a browser tab.
    """
    if item.get_closest_marker("pyodide") and not config.getoption("--pyodide"):
        return False
    if item.get_closest_marker("engines") and not config.getoption("--engines"):
        return False
    if config.getoption("--all"):
        return True
    every = item.get_closest_marker("every")
    if item.get_closest_marker("exhaustive") or (every and case % every.args[0]):
        return False
    return not config.getoption("--fast") or not (is_slow(item) or (case and (every or over_ranks(item))))


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def over_ranks(item: pytest.Item) -> bool:
    """Whether the test runs on several processes."""
    return "ranks" in getattr(item, "fixturenames", ())
