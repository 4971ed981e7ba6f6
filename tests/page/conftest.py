"""The page in a real browser, in `make test-page` alone: elsewhere nothing of this folder is collected.

Rule: a page must load nothing but itself and say nothing on the console; every test holds it to that.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from groupstate.core import events as ev
from groupstate.inspect.report_page import report
from tests.page.made_runs import MadeRun, records, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
READY_MS = 60_000


def executable() -> str:
    """Chromium, by $CHROMIUM or where it is on the PATH."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, "these tests need Chromium: apt-get install chromium, or CHROMIUM=/path/to/chrome"
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable())
        yield browser
        browser.close()


@pytest.fixture
def show(browser: "Browser", request: pytest.FixtureRequest) -> Iterator[Callable[..., "Page"]]:
    """Opens an address, and waits until the page is there."""
    contexts, told = [], list[str]()

    def opened(
        address: str, *, allowed: tuple[str, ...] = (), size: tuple[int, int] = (1440, 1000), **how: Any
    ) -> "Page":
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **how)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: told.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: told.append(f"error: {error}"))
        page.on("dialog", lambda dialog: told.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: (
                told.append(f"request: {asked.url}") if not asked.url.startswith((address, *allowed)) else None
            ),
        )
        page.goto(address)
        page.wait_for_selector("body[data-ready=yes]", timeout=READY_MS)
        return page

    yield opened
    for context in contexts:
        context.close()
    if "may_complain" not in request.fixturenames:
        assert told == []


@pytest.fixture
def may_complain() -> None:
    """For tests that make the page complain on purpose."""


@pytest.fixture
def show_run(show: Callable[..., "Page"], tmp_path: Path) -> Callable[..., "Page"]:
    """Opens the report of a run directory, from a file."""

    def opened(run: Path, name: str = "a run", **how: Any) -> "Page":
        file = tmp_path / "report.html"
        file.write_text(report(run).html(name), encoding="utf-8")
        return show(file.as_uri(), **how)

    return opened


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ev.Record]]:
    """A run of 600 groups, and its records."""
    kept = records(MadeRun(600))
    return write(tmp_path_factory.mktemp("made") / "run", kept), kept
