"""Groups that are removed outside, and what comes late: lost, damaged, fenced, to be cleared."""

from typing import Any

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.runtime.ledger import CANCELLED
from groupstate.runtime.observed import ReportedRow
from tests.runtime.outside import Make, warnings

pytestmark = pytest.mark.usefixtures("no_event_loop")


@pytest.mark.parametrize("status", ["pending", "running"])
def test_a_group_that_is_removed_before_it_ended_is_lost_and_evicted(outside: Make, status: str, caplog: Any) -> None:
    out = outside().report("g", status).remove("g")

    assert {event.failure for event in out.events(ev.SessionFailed)} == {"lost"}
    assert out.evicted() == {"g": ("empty",)}
    assert out.feed.take_evicted() == ["g"]
    assert len(warnings(caplog)) == 1


def test_a_group_that_comes_back_after_it_was_lost_is_to_be_cleared(outside: Make) -> None:
    out = outside().report("g", "running").remove("g")
    out.feed.take_evicted()
    out.report("g", "finished", 0.0, 1.0)

    assert (out.phase("g"), out.feed.take_evicted()) == ("evicted", ["g"])


def test_trajectories_after_the_end_are_fenced(outside: Make) -> None:
    out = outside().report("g", "finished", 0.0, 1.0)
    rows = {**out.listing["g"].rows, (1, 1): ReportedRow(), (1, 2): ReportedRow(), (4, 0): ReportedRow()}
    for _ in range(2):
        out.report("g", "finished", rows=rows)

    assert [(event.session, event.reason) for event in out.events(ev.ResultFenced)] == [
        (1, "terminal"),
        (4, "terminal"),
    ]
    assert out.feed.book.group("g").trajectory_count == 2


def test_trajectories_of_an_evicted_group_are_fenced_and_to_be_cleared_again(outside: Make) -> None:
    out = outside().report("g", "failure", 0.5, None)
    assert out.feed.take_evicted() == ["g"]
    out.report("g", "failure", 0.5, 0.7)

    assert [event.reason for event in out.events(ev.ResultFenced)] == ["gone"]
    assert out.feed.take_evicted() == ["g"]


def test_the_end_of_a_group_that_was_cancelled_here_comes_too_late(outside: Make) -> None:
    out = outside().report("g", "running")
    out.feed.ledger.end("g", CANCELLED)
    out.feed.take_evicted()
    out.report("g", "finished", 0.0, 1.0)

    assert out.evicted() == {"g": ("cancelled",)}
    assert [(event.session, event.reason) for event in out.events(ev.ResultFenced)] == [(0, "gone"), (1, "gone")]
    assert out.feed.take_evicted() == ["g"]


def test_what_an_earlier_process_evicted_and_is_still_listed_is_to_be_cleared(outside: Make) -> None:
    out = outside().report("g", "failure", 0.5, None)
    out.again()

    assert out.look().feed.take_evicted() == ["g"]
    assert out.events(ev.ResultFenced) == []


def test_a_sampleable_group_whose_rows_are_removed_is_evicted_as_damaged(outside: Make, caplog: Any) -> None:
    out = outside().report("g", "finished", 0.0, 1.0).report("h", "finished", 0.0, 1.0)
    out.remove("g").report("h", "finished", 0.0)

    assert out.evicted() == {"g": ("damaged",), "h": ("damaged",)}
    assert len(warnings(caplog)) == 2


def test_in_sync_mode_it_is_evicted_when_a_batch_is_wanted(outside: Make, caplog: Any) -> None:
    out = outside(gs.Rules(mode="sync")).report("g", "finished", 0.0, 1.0)
    assert out.feed.sample_now(2) is None
    out.report("g", "finished", 0.0).remove("g")
    assert out.evicted() == {}

    assert out.feed.sample_now(2) is None
    assert out.evicted() == {"g": ("damaged",)}
    assert len(warnings(caplog)) == 1


def test_what_is_in_a_batch_may_be_removed(outside: Make, caplog: Any) -> None:
    out = outside().report("g", "finished", 0.0, 1.0)
    batch = out.feed.sample_now(1)
    out.remove("g")
    out.feed.commit(batch)

    assert (out.phase("g"), out.evicted(), warnings(caplog)) == ("committed", {}, [])
    assert out.report("g", "finished", 0.0, 1.0).feed.take_evicted() == []
