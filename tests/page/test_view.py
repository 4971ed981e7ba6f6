"""The page of a run that goes on: it keeps up by itself, and says when it can't any more."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from playwright.sync_api import Page, expect

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.inspect.report_live import LiveReport
from groupstate.inspect.report_server import serving
from groupstate.log.file import FileLog
from tests.page.made_runs import MadeRun, new_log, records
from tests.page.seen import go_to, legend, phases_at, settle

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


def test_a_metric_that_comes_later_is_lacking_before(tmp_path: Path, show: Callable[..., Page]) -> None:
    log = new_log(tmp_path / "run")
    events: list[ev.AnyEvent] = [ev.RunStarted("r", {}, RULES_VERSION, 0)]
    for name, metrics in (("a", {"reward": 1.0}), ("b", {"reward": 0.0, "late": 7.0})):
        row = (ev.TrajectoryRecord(0, metrics),)
        events += [
            ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit"),
            ev.SessionStarted(name, 0, 1),
            ev.SessionFinished(name, 0, 1, row),
            ev.GroupFinished(name),
        ]
    kept = [ev.Record(seq, seq * 1_000_000, event) for seq, event in enumerate(events, 1)]
    log.post(kept[:5])
    live = LiveReport(log.path)
    with ThreadPoolExecutor(1) as thread, serving(live) as address:
        following = thread.submit(anyio.run, _followed_for, live, 8.0)
        page = show(address)
        wait_for(page, 5)
        log.post(kept[5:])
        wait_for(page, 9)
        values = page.evaluate("Array.from(document.groupstate.run.tables.attempts.of('metric 1').slice(0, 2), String)")
        following.result()

    assert values == ["NaN", "7"]


async def _followed_for(live: LiveReport, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await live.follow()
