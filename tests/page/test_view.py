"""The page of a run that goes on: it keeps up by itself, and says when it can't any more."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from groupstate.core import events as ev
from groupstate.log.file import FileLog
from tests.page.made_runs import MadeRun, new_log, records
from tests.page.test_page import go_to, legend, phases_at, settle

WAIT_MS = 20_000


class Growing:
    """A run that is written piece by piece, and the process that shows it."""

    def __init__(self, folder: Path) -> None:
        self.kept = records(MadeRun(300))
        self.log: FileLog = new_log(folder / "run")
        self.written = 0
        self.grow(1_000)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "groupstate", "view", str(folder / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def grow(self, count: int) -> int:
        """Write so many events more; gives the last one's number."""
        some = self.kept[self.written : self.written + count]
        for begin in range(0, len(some), 100):
            self.log.post(some[begin : begin + 100])
        self.written += len(some)
        return self.written

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=20)


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    made = Growing(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def wait_for(page: Page, seq: int) -> None:
    page.wait_for_function("(seq) => document.groupstate.run.lastSeq === seq", arg=seq, timeout=WAIT_MS)
    settle(page)


def test_the_page_keeps_up_with_the_run(growing: Growing, show: Callable[..., Page]) -> None:
    page = show(growing.address)
    wait_for(page, 1_000)
    first = legend(page)
    for count in (700, 1, len(growing.kept)):
        last = growing.grow(count)
        wait_for(page, last)

        assert page.evaluate("document.groupstate.seq") == last
        assert legend(page) == phases_at(growing.kept, last)
    expect(page.locator("#state")).to_have_text("ended")
    expect(page.locator("#verdict-chip")).to_have_text("\u2713 log is sound", timeout=WAIT_MS)
    assert first == phases_at(growing.kept, 1_000)


def test_a_slider_that_was_moved_back_stays_where_it_is(growing: Growing, show: Callable[..., Page]) -> None:
    page = show(growing.address)
    wait_for(page, 1_000)
    go_to(page, 400)
    page.evaluate("document.groupstate.choose(3)")
    before = legend(page)
    wait_for(page, growing.grow(1_500))

    assert page.evaluate("document.groupstate.seq") == 400
    assert legend(page) == before == phases_at(growing.kept, 400)
    assert page.evaluate("document.groupstate.chosen") == 3


def test_what_came_in_pieces_is_what_comes_at_once(growing: Growing, show: Callable[..., Page]) -> None:
    page = show(growing.address)
    for count in (1, 333, 50, 2_000, len(growing.kept)):
        wait_for(page, growing.grow(count))
    other = show(growing.address)
    wait_for(other, len(growing.kept))
    state = """JSON.stringify((() => { const run = document.groupstate.run, out = {};
        for (const [name, table] of Object.entries(run.tables)) {
            out[name] = [table.n, ...Object.entries(table.columns).map(([key, column]) =>
                [key, Array.from(column.a.subarray(0, column.n))])];
        }
        return [out, run.ids, run.texts, run.prompts, Array.from(run.phaseLast.a.subarray(0, run.n)),
            Array.from(run.attemptPrev.a.subarray(0, run.attemptPrev.n)), Array.from(run.counts)]; })())"""

    assert page.evaluate(state) == other.evaluate(state)


def test_a_page_whose_server_has_gone_says_so(growing: Growing, show: Callable[..., Page], may_complain: None) -> None:
    page = show(growing.address)
    wait_for(page, 1_000)
    expect(page.locator("#state")).to_have_text("live")
    growing.end()
    expect(page.locator("#state")).to_have_text("server gone", timeout=WAIT_MS)
    go_to(page, 500)

    assert growing.process.returncode == 0
    assert legend(page) == phases_at(growing.kept, 500)


def test_events_of_a_session_that_runs_are_there(growing: Growing, show: Callable[..., Page]) -> None:
    page = show(growing.address)
    wait_for(page, 1_000)
    open_ = {r.event.group_id for r in growing.kept[:1_000] if isinstance(r.event, ev.SessionStarted)}
    ended = {r.event.group_id for r in growing.kept[:1_000] if isinstance(r.event, ev.GroupFinished | ev.GroupFailed)}
    group = sorted(open_ - ended)[0]
    page.fill("#search", group)
    settle(page)
    page.locator("#rows .row:not([hidden])").first.click()
    settle(page)

    assert "still open" in page.locator("#group .legend").inner_text()
