"""The log behind a feed: one commit for one listing, a plain thread, a disk that is full, a mark to go back to."""

import threading
from pathlib import Path
from typing import Any

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.errors import BadSettings, LogFailed
from groupstate.log.codec import decode, join_items
from groupstate.log.commit import Commit
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed, Steps
from groupstate.runtime.sources import ListSource
from tests.runtime.outside import Make, Outside

pytestmark = pytest.mark.usefixtures("no_event_loop")


def test_what_one_listing_led_to_is_one_commit(tmp_path: Path) -> None:
    steps = Steps()
    log = FileLog.create(tmp_path / "run", later=steps)
    feed = StatusFeed.begin(log, gs.Rules(), group_size=2, steps=steps)
    before = log.durable_seq
    feed.observe({name: Reported(status="running", stamp=0) for name in "ab"})
    rows = {(session, 0): ReportedRow() for session in range(2)}
    waiter = feed.ask(1)
    written: list[int] = []
    keep = log._commit._write
    log._commit._write = lambda commit: (written.append(commit.count), keep(commit))[1]  # type: ignore[assignment, func-returns-value]
    feed.observe({"a": Reported(status="finished", stamp=0, rows=rows), "b": Reported(status="running", stamp=0)})

    assert feed.answer(waiter).group_ids == ["a"]
    assert before == 1
    assert written == [5]  # asked for, two ends, their group's, sampled
    feed.close()
    assert len(list(FileLog.open(tmp_path / "run", inline=True).read())) == log.last_seq


def test_a_batch_that_could_not_be_kept_is_not_given_out(tmp_path: Path) -> None:
    steps = Steps()
    log = FileLog.create(tmp_path / "run", later=steps)
    feed = StatusFeed.begin(log, gs.Rules(), group_size=1, steps=steps)
    feed.observe({"a": Reported(status="finished", stamp=0, rows={(0, 0): ReportedRow()})})

    def full(commit: Commit) -> None:
        raise OSError("no space left")

    log._commit._write = full  # type: ignore[method-assign]
    waiter = feed.ask(1)
    with pytest.raises(LogFailed, match="no space left"):
        feed.answer(waiter)


def test_a_plain_thread_and_a_log_in_files_are_enough(tmp_path: Path) -> None:
    found: list[Any] = []

    def poll() -> None:
        log = FileLog.create(tmp_path / "run", inline=True)
        out = Outside(log=log).report("g", "running").report("g", "finished", 0.0, 1.0).report("h", "running")
        found.append(out.feed.sample_now(1).group_ids)
        out.check()
        out.feed.close()
        log = FileLog.open(tmp_path / "run", inline=True)
        again = Outside(log=log)
        again.listing = {"h": Reported(status="running", stamp=0), "g": out.listing["g"]}
        found.append(again.look().feed.sample_now(1).group_ids)
        again.feed.commit(1 + 1)
        again.check()
        again.feed.close()

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()

    assert found == [["g"], ["g"]]


@pytest.mark.parametrize("kind", [ev.BatchRequested, ev.BatchSampled])
def test_a_batch_of_a_log_that_broke_is_given_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ev.Event]
) -> None:
    log = FileLog.create(tmp_path / "run", inline=True)
    out = Outside(log=log).report("g", "finished", 0.0, 1.0)
    write = log._commit._write

    def full(commit: Commit) -> None:
        records = decode(join_items(commit.items, commit.count), "the commit")
        if any(isinstance(record.event, kind) for record in records):
            raise OSError("no space left")
        write(commit)

    monkeypatch.setattr(log._commit, "_write", full)
    with pytest.raises(LogFailed):
        out.feed.sample_now(1)
    with pytest.raises(LogFailed):
        out.report("h", "running")


def test_a_log_that_breaks_at_an_end_is_no_session_s_failure(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True)
    out = Outside(log=log).report("g", "running")
    log._commit._closing = True

    with pytest.raises(LogFailed):
        out.report("g", "finished", 0.0, 1.0)


def test_what_a_feed_can_t_work_with_is_refused(tmp_path: Path) -> None:
    memory = Ledger(MemoryLog(), gs.Rules())
    with pytest.raises(BadSettings, match="group_size is 0"):
        StatusFeed(memory, Controller(memory, None, group_size=1), group_size=0)
    with pytest.raises(BadSettings, match="without a source"):
        StatusFeed(memory, Controller(memory, ListSource(["a"]), group_size=1), group_size=1)
    file = FileLog.create(tmp_path / "run")
    with pytest.raises(BadSettings, match="inline=True"):
        StatusFeed.begin(file, gs.Rules(), group_size=1)


def test_a_run_goes_back_to_a_mark(outside: Make) -> None:
    out = outside().report("a", "finished", 0.0, 1.0)
    out.feed.commit(out.feed.sample_now(1, weight_version=3))
    mark = out.feed.mark("checkpoint 3")
    out.report("b", "finished", 0.0, 1.0)
    out.feed.commit(out.feed.sample_now(1, weight_version=4))
    asked: list[Any] = []
    out.feed = StatusFeed.begin(
        out.log, out.rules, group_size=2, weight_version=9, resume=lambda ledger: asked.append(ledger.book) or mark
    )

    assert (out.feed.book.weight_version, out.phase("a"), out.phase("b")) == (3, "committed", "finished")
    assert [kept.name for kept in asked[0].marks] == ["checkpoint 3"]
