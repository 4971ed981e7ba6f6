"""Groups of a system outside: from status to status, ended whole, and over restarts."""

from typing import Any

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.runtime.observed import Reported, ReportedRow
from tests.runtime.outside import Make, warnings

pytestmark = pytest.mark.usefixtures("no_event_loop")


def test_a_group_goes_from_status_to_status(outside: Make) -> None:
    out = outside()

    phases = [out.report("g", status, *rewards, stamp=3).phase("g")
              for status, *rewards in (["pending"], ["running"], ["finished", 0.0, 1.0])]  # fmt: skip

    assert phases == ["pending", "running", "finished"]
    assert out.events(ev.GroupSubmitted) == [ev.GroupSubmitted("g", 2, "train", 3, 1, "submit")]
    row = ev.TrajectoryRecord(0, {"reward": 1.0})
    assert out.events()[2:] == [
        ev.SessionStarted("g", 0, 1, observed=True),
        ev.SessionStarted("g", 1, 1, observed=True),
        ev.SessionFinished("g", 0, 1, (ev.TrajectoryRecord(0, {"reward": 0.0}),), observed=True),
        ev.SessionFinished("g", 1, 1, (row,), observed=True),
        ev.GroupFinished("g"),
    ]


def test_a_group_that_is_first_seen_when_it_has_ended_is_told_whole(outside: Make) -> None:
    out = outside().report("g", "finished", 0.0, 1.0)

    assert out.phase("g") == "finished"
    assert len(out.events(ev.SessionStarted)) == 2


def test_a_listing_that_says_the_same_writes_nothing(outside: Make) -> None:
    out = outside()
    for status in ("pending", "running", "finished"):
        out.report("g", status, 0.0, 1.0)
        before = out.log.last_seq
        assert out.look().log.last_seq == before


def test_trajectories_of_a_group_that_is_under_way_wait_for_its_end(outside: Make) -> None:
    out = outside().report("g", "running", 0.5).report("g", "running", 0.5, 1.0)

    assert out.events(ev.SessionFinished) == []


def test_only_what_changed_is_looked_into(outside: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    out = outside()
    for number in range(50):
        out.listing[f"g{number}"] = Reported(status="running", stamp=0)
    out.look()
    taken: list[str] = []
    take = out.feed._take
    monkeypatch.setattr(out.feed, "_take", lambda name, *rest: (taken.append(name), take(name, *rest)))

    out.report("g7", "finished", 0.0, 1.0)

    assert taken == ["g7"]


def test_the_rows_of_a_session_are_recorded_in_the_order_of_their_index(outside: Make) -> None:
    rows = {place: ReportedRow(metrics={"reward": sum(place)}) for place in ((1, 2), (0, 1), (1, 0), (0, 0))}
    out = outside().report("g", "finished", rows=rows)

    indices = [[row.index for row in event.trajectories] for event in out.events(ev.SessionFinished)]
    assert indices == [[0, 1], [0, 2]]


def test_a_session_without_trajectories_failed_in_a_failed_group(outside: Make) -> None:
    out = outside(gs.Rules(mode="sync")).report("g", "failure", 0.5, None)

    assert [event.failure for event in out.events(ev.SessionFailed)] == ["error"]
    assert out.phase("g") == "failure"


def test_a_failed_group_with_every_session_s_trajectories_fails_by_its_last(outside: Make, caplog: Any) -> None:
    out = outside(gs.Rules(mode="sync")).report("g", "failure", 0.5, 0.7)

    assert [event.session for event in out.events(ev.SessionFailed)] == [1]
    assert out.phase("g") == "failure"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("rule", "phase"), [("fail", "failure"), ("allow", "finished")])
def test_an_empty_session_of_a_finished_group_is_judged_by_the_rules(outside: Make, rule: Any, phase: str) -> None:
    out = outside(gs.Rules(mode="sync", empty_session=rule)).report("g", "finished", 0.5, None)

    assert out.phase("g") == phase


def test_survivors_make_a_failed_group_a_finished_one(outside: Make) -> None:
    assert outside(gs.Rules(survivors_min=1)).report("g", "failure", 0.5, None).phase("g") == "finished"


def test_a_session_that_somebody_else_ended_stays_as_it_is(outside: Make, caplog: Any) -> None:
    out = outside(gs.Rules(mode="sync")).report("g", "running")
    out.feed.ledger.fail("g", 0, 1, "error", "seen here")
    out.report("g", "failure", 0.5, 0.7)

    assert [event.observed for event in out.events(ev.SessionFailed)] == [False]
    assert warnings(caplog) == []


def test_a_session_that_somebody_else_ended_is_not_lost_again(outside: Make) -> None:
    out = outside(gs.Rules(mode="sync")).report("g", "running")
    out.feed.ledger.fail("g", 0, 1, "error", "seen here")
    out.remove("g")

    assert [event.failure for event in out.events(ev.SessionFailed)] == ["error", "lost"]


def test_a_group_that_was_running_outside_over_a_restart_ends_in_its_second_attempt(outside: Make) -> None:
    out = outside().report("g", "running")
    out.again()
    assert out.phase("g") == "pending"

    out.look()
    assert (out.phase("g"), out.feed.book.group("g").sessions[0].attempt) == ("running", 2)
    assert out.report("g", "finished", 0.0, 1.0).phase("g") == "finished"


@pytest.mark.parametrize(("restamps", "evicted"), [(False, {"g": ("stale",)}), (True, {})])
@pytest.mark.parametrize("status", ["pending", "running"])
def test_one_that_is_dispatched_anew_is_as_old_as_it_was_or_as_its_stamp_says(
    outside: Make, restamps: bool, evicted: dict[str, Any], status: str
) -> None:
    out = outside(gs.Rules(lag_max=1), restamps=restamps).report("g", status, stamp=0)
    out.again()
    out.feed.publish(5)
    out.report("g", "pending", stamp=5).report("g", "running", stamp=5)
    attempt = out.feed.book.group("g").sessions[0].attempt
    out.report("g", "finished", 0.0, 1.0, stamp=5)

    assert (out.evicted(), attempt) == (evicted, 1 + restamps + (status == "running"))
    assert [event.weight_version for event in out.events(ev.GroupRequeued) if "anew" in event.reason] == [5] * restamps


def test_one_that_ended_before_anybody_looked_again_is_too(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=1), restamps=True).report("g", "running")
    out.feed.publish(5)

    assert out.report("g", "finished", 0.0, 1.0, stamp=5).feed.sampleable() == ["g"]
    assert out.report("g", "finished", 0.0, 1.0, stamp=9).evicted() == {}


def test_a_sampler_that_waits_for_an_old_group_gets_its_batch_when_that_is_dispatched_anew(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=2, on_stale="wait"), restamps=True).report("old", "running")
    out.report("new", "finished", 0.0, 1.0, stamp=5)
    waiter = out.feed.ask(1, weight_version=5)
    held = out.feed.held_by()
    assert out.feed.answer(waiter) is None
    out.report("old", "running", stamp=5)
    sampled = out.feed.answer(waiter)

    assert (held, out.feed.held_by()) == ("old", None)
    assert sampled is not None
    assert sampled.group_ids == ["new"]


def test_a_group_that_was_removed_while_nobody_looked_is_lost(outside: Make) -> None:
    out = outside().report("g", "running")
    out.again()
    del out.listing["g"]
    out.look()

    assert out.evicted() == {"g": ("empty",)}


def test_an_ended_group_is_known_again_after_a_restart(outside: Make) -> None:
    out = outside().report("g", "finished", 0.0, 1.0)
    out.again()
    before = out.log.last_seq

    assert out.look().log.last_seq == before
