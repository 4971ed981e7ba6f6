"""The verdict by processes of their own: what `checked` says, and where it can't be had that way, by `checked`."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from groupstate.core import book_changes
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.inspect import checking_apart
from groupstate.inspect.checking import checked
from groupstate.inspect.checking_apart import PARTS, Said, checking
from groupstate.inspect.report_page import report
from groupstate.log.file import FileLog
from groupstate.testing import strategies
from tests.broken_runs.make import HERE
from tests.histories import make

RUNS = [*make.golden_logs(), *sorted(marker.parent for marker in HERE.glob("*/run.json"))]

END = 10**9


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """However short a log is and however few processors there are, two processes check it. Those that were started."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(checking_apart, "APART_FROM_EVENTS", 1)
    monkeypatch.setattr(checking_apart, "_processors", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def told(path: Path, *, stop: int | None = None) -> Any:
    with checking(path, stop=stop) as result:
        return result()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_parts_say_well_where_nothing_is_wrong_and_count_alike(path: Path) -> None:
    seen = checked(path)
    said = [PARTS[name](str(path), END) for name in (PARTS if seen.first_seq == 1 else ("replayed",))]

    assert all(part.well for part in said) is not bool(seen.violations)
    if not seen.violations:
        assert {part.counted for part in said} == {(seen.first_seq, seen.first_seq + seen.events - 1, said[0].standing)}
        assert (said[0].snapshots, said[0].waypoints) == (seen.snapshots, seen.waypoints)


@given(strategies.logs(moves_max=40), st.data())
def test_of_any_history_and_any_that_was_changed_the_parts_say_what_the_checker_says(
    tmp_path_factory: pytest.TempPathFactory, records: list[ev.Record], data: st.DataObject
) -> None:
    events = [record.event for record in records]
    for _ in range(data.draw(st.integers(0, 1)) if len(events) > 1 else 0):
        place = data.draw(st.integers(1, len(events) - 1))
        event = events[place]
        change = data.draw(st.sampled_from(["gone", "twice", "swapped", "lag"]))
        if change == "gone":
            del events[place]
        elif change == "twice":
            events.insert(place, event)
        elif change == "swapped":
            events[place - 1 : place + 1] = [event, events[place - 1]]
        elif isinstance(event, ev.BatchSampled):
            events[place] = replace(event, lags=tuple(lag + 1 for lag in event.lags))
    path = tmp_path_factory.mktemp("run") / "run"
    written(path, events)

    seen = checked(path)
    said = [part(str(path), END) for part in PARTS.values()]

    well = all(part.well for part in said) and said[0].counted == said[1].counted
    assert well is not bool(seen.violations)


def written(path: Path, events: list[ev.AnyEvent]) -> Path:
    async def write() -> None:
        log = FileLog.create(path, inline=True, durability="os")
        log.post([ev.Record(seq, 1_000 + seq, event) for seq, event in enumerate(events, 1)])
        await log.aclose()

    anyio.run(write)
    return path


def test_two_processes_give_the_result_that_one_gives(driven: Path, apart: list[Any]) -> None:
    assert told(driven) == checked(driven)
    assert len(apart) == 2
    assert [process.returncode for process in apart] == [0, 0]


def test_of_a_run_whose_beginning_is_gone_the_replay_alone_is_asked(apart: list[Any]) -> None:
    (path,) = [path for path in make.golden_logs() if path.name == "compacted"]

    assert told(path) == checked(path)
    assert len(apart) == 1


def test_what_is_wrong_is_told_with_its_witnesses(apart: list[Any]) -> None:
    seen = told(HERE / "double_sample")

    assert seen == checked(HERE / "double_sample")
    assert seen.violations
    assert seen.cited


def test_an_event_behind_the_end_is_not_looked_at(apart: list[Any]) -> None:
    broken = HERE / "double_sample"
    wrong_seq = checked(broken).violations[0].seq

    assert told(broken, stop=wrong_seq).violations == ()
    assert told(broken, stop=wrong_seq).events == wrong_seq - 1


def test_a_part_that_dies_is_told_and_the_log_is_checked_all_the_same(
    driven: Path, apart: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with checking(driven) as result:
        apart[0].kill()
        seen = result()

    assert seen == checked(driven)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "groupstate.checking"]
    assert "a part of a check failed" in line
    assert "replayed" in line
    assert f"returncode={-signal.SIGKILL}" in line


def test_parts_that_count_differently_are_not_believed(
    driven: Path, apart: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([Said(True, 1, 9, 1), Said(True, 1, 9, 2)])
    monkeypatch.setattr(checking_apart, "_answer", lambda name, process: next(answers))

    assert told(driven) == checked(driven)


def test_no_process_is_left_where_nobody_waits_for_the_result(driven: Path, apart: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), checking(driven):
        raise KeyboardInterrupt

    assert [process.poll() is not None for process in apart] == [True, True]


@pytest.mark.parametrize(("events", "processors"), [(250_000, 2), (1, 1)])
def test_a_short_log_and_a_single_processor_are_checked_here(
    driven: Path, apart: list[Any], monkeypatch: pytest.MonkeyPatch, events: int, processors: int
) -> None:
    monkeypatch.setattr(checking_apart, "APART_FROM_EVENTS", events)
    monkeypatch.setattr(checking_apart, "_processors", lambda: processors)

    assert told(driven) == checked(driven)
    assert apart == []


def test_the_processors_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert checking_apart._processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_page_has_the_verdict_of_the_parts(driven: Path, apart: list[Any]) -> None:
    assert report(driven).verdict == report(driven, check=True).verdict
    assert report(driven).verdict.text == f"{checked(driven).verdict}."
    assert len(apart) == 6


def test_a_book_that_holds_other_counts_is_found_out(driven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miscount of the library's own, which no single part can see."""
    right = book_changes._used_more
    one = PARTS["counted"](str(driven), END)

    def miscounted(book: Book, group: Group) -> None:
        right(book, group)
        book.totals["evicted"] += 1

    monkeypatch.setattr(book_changes, "_used_more", miscounted)

    assert PARTS["replayed"](str(driven), END).well
    assert PARTS["replayed"](str(driven), END).counted != one.counted
