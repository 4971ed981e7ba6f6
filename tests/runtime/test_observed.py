"""A system outside lists statuses, and the book is the same as if its sessions had told their own story."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.errors import (
    BadInput,
    BadSettings,
    EvictionStreak,
    LogFailed,
    SampleError,
    UnknownBatch,
    WeightVersionError,
)
from groupstate.log.codec import decode, join_items
from groupstate.log.commit import Commit
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import CANCELLED, Ledger
from groupstate.runtime.observed import Reported, ReportedRow, RowKey, StatusFeed, Steps
from groupstate.runtime.reported import split_key
from groupstate.runtime.sources import ListSource


@pytest.fixture(autouse=True)
def no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may start an event loop."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a status feed started an event loop")

    monkeypatch.setattr("asyncio.new_event_loop", never)


class Outside:
    """The system outside: what it lists, and a feed that looks at it."""

    def __init__(
        self,
        rules: gs.Rules | None = None,
        *,
        group_size: int = 2,
        log: Any = None,
        version: int = 0,
        restamps: bool = False,
    ) -> None:
        self.log = log or MemoryLog()
        self.restamps = restamps
        self.rules = rules or gs.Rules()
        self.group_size = group_size
        self.listing: dict[Any, Any] = {}
        self.feed = self._begin(version)

    def _begin(self, version: int | None = None) -> StatusFeed:
        clock = lambda: self.log.last_seq * 1_000  # noqa: E731
        return StatusFeed.begin(
            self.log,
            self.rules,
            group_size=self.group_size,
            weight_version=version,
            restamps=self.restamps,
            clock_ns=clock,
        )

    def again(self) -> None:
        """The process died and another goes on."""
        self.feed = self._begin()

    def report(self, group_id: Any, status: Any, /, *rewards: Any, **fields: Any) -> "Outside":
        """List a group and look; `rewards` are those of its sessions, one trajectory each, None for none."""
        rows = {
            (session, 0): ReportedRow(metrics={"reward": reward})
            for session, reward in enumerate(rewards)
            if reward is not None
        }
        self.listing[group_id] = Reported(**{"status": status, "stamp": 0, "rows": rows, **fields})
        return self.look()

    def remove(self, *group_ids: str) -> "Outside":
        for group_id in group_ids:
            del self.listing[group_id]
        return self.look()

    def look(self) -> "Outside":
        self.feed.observe(self.listing)
        return self

    @property
    def records(self) -> list[ev.Record]:
        return list(self.log.read())

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        return [record.event for record in self.records if isinstance(record.event, kinds or ev.Event)]

    def phase(self, group_id: str) -> str:
        live = self.feed.book.groups.get(group_id)
        return str(live.phase if live else self.feed.book.departed.get(group_id))

    def evicted(self) -> dict[str, tuple[str, ...]]:
        return {event.group_id: event.reasons for event in self.events(ev.GroupEvicted)}

    def check(self) -> None:
        assert [str(violation) for violation in violations(self.records)] == []
        assert replayed(self.records).state() == self.feed.book.state()


@pytest.fixture
def outside() -> Iterator[Callable[..., Outside]]:
    """Makes systems outside; at the end each log must be one that can be true, and replay to its book."""
    made: list[Outside] = []

    def make(rules: gs.Rules | None = None, **options: Any) -> Outside:
        made.append(Outside(rules, **options))
        return made[-1]

    yield make
    for system in made:
        system.check()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


Make = Callable[..., Outside]

# A group's life ------------------------------------------------------------------------------------------


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


# Sizes, partitions, versions -----------------------------------------------------------------------------


def test_a_reported_size_counts_before_the_configured_one(outside: Make) -> None:
    assert outside().report("g", "pending", size=3).feed.book.group("g").size == 3


@pytest.mark.parametrize(("fields", "rewards"), [({}, (0.0, 1.0, 0.5)), ({"size": 3}, (0.0, 1.0))])
def test_more_sessions_than_the_group_has_are_one_warning(
    outside: Make, caplog: Any, fields: dict[str, Any], rewards: tuple[float, ...]
) -> None:
    out = outside().report("g", "running")
    for _ in range(3):
        out.report("g", "finished", *rewards, **fields)

    assert len(warnings(caplog)) == 1
    assert (out.phase("g"), out.feed.book.group("g").trajectory_count) == ("finished", 2)


def test_validation_groups_are_sampled_as_they_are(outside: Make) -> None:
    out = outside(gs.Rules(filter_metric="reward")).report("v", "finished", 1.0, 1.0, partition="val")

    batch = out.feed.sample_now(1, partition="val")
    assert batch is not None
    assert batch.group_ids == ["v"]


@pytest.mark.parametrize(
    ("tokens", "versions", "spans"),
    [
        (4, (2, 5), [(0, 3, 2), (3, 4, 5)]),
        (4, (3, 3), [(0, 4, 3)]),
        (1, (2, 5), [(0, 1, 2)]),
        (0, (2, 5), []),
        (4, None, []),
    ],
)
def test_oldest_and_newest_version_stand_for_the_spans(
    outside: Make, tokens: int, versions: Any, spans: list[tuple[int, int, int]]
) -> None:
    row = ReportedRow(prompt_tokens=3, response_tokens=tokens, versions=versions)
    out = outside(group_size=1).report("g", "finished", rows={(0, 0): row})

    (kept,) = out.events(ev.SessionFinished)[0].trajectories
    assert [(span.start, span.stop, span.weight_version) for span in kept.spans] == spans
    assert (kept.prompt_tokens, kept.response_tokens) == (3, tokens)


def test_the_basis_reads_the_reported_versions(outside: Make) -> None:
    out = outside(gs.Rules(basis="oldest_token", lag_max=1), group_size=1, version=4)
    row = ReportedRow(response_tokens=2, versions=(2, 4))
    out.report("g", "finished", rows={(0, 0): row}, stamp=4)

    assert out.evicted() == {"g": ("stale",)}


@pytest.mark.parametrize(
    "row",
    [
        ReportedRow(metrics={"reward": float("nan")}),
        ReportedRow(metrics=[1.0]),  # type: ignore[arg-type]
        ReportedRow(prompt_tokens=-1),
        ReportedRow(response_tokens="6"),  # type: ignore[arg-type]
        ReportedRow(response_tokens=True),
        ReportedRow(response_tokens=2, spans=(ev.VersionSpan(0, 3, 1),)),
        ReportedRow(response_tokens=2, versions=(5, 2)),
        ReportedRow(response_tokens=2, versions=(5,)),  # type: ignore[arg-type]
        ReportedRow(response_tokens="2", versions=(2, 5)),  # type: ignore[arg-type]
        ReportedRow(response_tokens=2, versions=("2", 5)),  # type: ignore[arg-type]
        ReportedRow(prompt_tokens=2**70),
        {"reward": 1.0},
    ],
)
def test_an_unusable_trajectory_costs_its_session_and_no_other_group(outside: Make, caplog: Any, row: Any) -> None:
    out = outside(gs.Rules(mode="sync"))
    out.listing["h"] = Reported(status="finished", stamp=0, rows={(0, 0): ReportedRow(), (1, 0): row})
    out.report("g", "finished", 0.0, 1.0)

    assert [event.failure for event in out.events(ev.SessionFailed)] == ["refused"]
    assert (out.phase("h"), out.phase("g")) == ("failure", "finished")
    assert len(warnings(caplog)) == 1


def test_a_value_that_is_no_number_may_be_left_out_and_noted(outside: Make) -> None:
    rows = {(0, 0): ReportedRow(not_finite=("reward",)), (1, 0): ReportedRow(metrics={"reward": 1.0})}
    out = outside(gs.Rules(filter_metric="reward"))
    out.listing["g"] = Reported(status="finished", stamp=0, rows=rows)

    assert out.look().feed.sampleable() == ["g"]
    assert [row.not_finite for event in out.events(ev.SessionFinished) for row in event.trajectories] == [
        ("reward",),
        (),
    ]


def test_metrics_that_raise_are_unusable(outside: Make) -> None:
    class Broken(dict[str, float]):
        def keys(self) -> Any:
            raise ZeroDivisionError("a lazy value")

        def __iter__(self) -> Any:
            raise ZeroDivisionError("a lazy value")

    out = outside(group_size=1).report("g", "finished", rows={(0, 0): ReportedRow(metrics=Broken(reward=1.0))})

    assert "ZeroDivisionError: a lazy value" in out.events(ev.SessionFailed)[0].message


# What can't be true --------------------------------------------------------------------------------------


def test_a_status_that_goes_backwards_is_passed_over_with_one_warning(outside: Make, caplog: Any) -> None:
    out = outside().report("g", "running")
    for status in ("pending", "pending", "running"):
        out.report("g", status)
    out.report("g", "finished", 0.0, 1.0)
    for status in ("running", "running", "finished"):
        out.report("g", status, 0.0, 1.0)

    assert out.phase("g") == "finished"
    assert len(warnings(caplog)) == 2
    assert "was running" in warnings(caplog)[0]
    assert "it is finished" in warnings(caplog)[1]


@pytest.mark.parametrize("malformed", [None, Reported(status="running", stamp=0, rows=7)])  # type: ignore[arg-type]
def test_a_group_whose_report_loses_its_form_stays_as_it_is_until_it_has_one_again(
    outside: Make, malformed: Any
) -> None:
    out = outside().report("a", "running")
    before = out.records
    out.listing["a"] = malformed

    assert out.look().look().records == before
    assert out.report("a", "finished", 1.0, 0.0).phase("a") == "finished"


@pytest.mark.parametrize(
    ("group_id", "fields"),
    [
        ("g", {"status": "done"}),
        ("g", {"status": None}),
        ("g", {"stamp": "3"}),
        ("g", {"stamp": True}),
        ("g", {"stamp": 2**64}),
        ("g", {"size": 0}),
        ("g", {"size": "2"}),
        ("g", {"size": 10**9}),
        ("g", {"partition": "test"}),
        ("g", {"rows": [1]}),
        ("g", {"rows": {"g_0_0": ReportedRow()}}),
        ("g", {"rows": {(0, -1): ReportedRow()}}),
        ("g", {"rows": {(0,): ReportedRow()}}),
        ("", {}),
        (7, {}),
        ("half a pair \ud800", {}),
    ],
)
def test_what_is_malformed_is_passed_over_with_one_warning(
    outside: Make, caplog: Any, group_id: Any, fields: dict[str, Any]
) -> None:
    out = outside()
    for _ in range(3):
        out.report(group_id, "finished", 0.0, 1.0, **fields)
    out.report("other", "finished", 0.0, 1.0)

    assert list(out.feed.book.groups) == ["other"]
    assert len(warnings(caplog)) == 1
    assert out.remove(group_id).evicted() == {}


def test_what_is_no_report_at_all_is_passed_over(outside: Make, caplog: Any) -> None:
    out = outside()
    out.listing = {"g": ("finished", 3)}

    assert out.look().feed.book.groups == {}
    assert "must be a Reported" in warnings(caplog)[0]


def test_a_tag_that_is_put_right_is_taken(outside: Make) -> None:
    out = outside().report("g", "running").report("g", "finished", 0.0, 1.0, stamp=None)
    assert out.phase("g") == "running"

    assert out.report("g", "finished", 0.0, 1.0).phase("g") == "finished"


# What is removed, and what comes late ----------------------------------------------------------------------


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


def test_a_batch_of_another_feed_is_refused(outside: Make) -> None:
    one, other = outside().report("g", "finished", 0.0, 1.0), outside().report("g", "finished", 0.0, 1.0)
    mine, theirs = one.feed.sample_now(1), other.feed.sample_now(1)
    for call in (other.feed.commit, other.feed.release):
        with pytest.raises(UnknownBatch, match=f"batch 1: it is of run '{mine.run_id}', and this is run"):
            call(mine)
    one.feed.release(mine)
    other.feed.commit(theirs)

    assert (one.phase("g"), other.phase("g")) == ("finished", "committed")


def test_a_released_group_is_sampled_again_only_if_it_is_still_there(outside: Make) -> None:
    out = outside().report("g", "finished", 0.0, 1.0).report("h", "finished", 0.0, 1.0)
    batch = out.feed.sample_now(2)
    out.remove("g")
    out.feed.release(batch.batch)

    assert (out.phase("h"), out.evicted()) == ("finished", {"g": ("damaged",)})


# Batches -------------------------------------------------------------------------------------------------


def test_a_batch_is_claimed_with_its_lags_metrics_and_keys(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=2))
    rows = {(0, 0): ReportedRow(), (1, 0): ReportedRow(), (1, 3): ReportedRow()}
    out.report("a_1", "finished", rows=rows)

    batch = out.feed.sample_now(1, weight_version=2)

    assert (batch.group_ids, batch.lags, batch.weight_version) == (["a_1"], (2,), 2)
    assert [str(key) for key in batch.keys] == ["a_1_0_0", "a_1_1_0", "a_1_1_3"]
    assert [split_key(str(key)) for key in batch.keys] == list(batch.keys)
    assert batch.metrics
    assert out.feed.explanation is None


def test_a_batch_that_is_not_there_is_explained_and_asked_for_again_at_no_cost(outside: Make) -> None:
    out = outside().report("g", "running")

    assert out.feed.sample_now(1) is None
    before = out.log.last_seq
    assert [out.feed.sample_now(1) for _ in range(5)] == [None] * 5
    assert out.log.last_seq == before
    assert "0 of 1 groups are sampleable" in str(out.feed.explanation)
    assert not out.feed.book.requests

    out.report("g", "finished", 0.0, 1.0)
    assert out.feed.sample_now(1) is not None


def test_a_batch_that_can_t_come_is_an_error(outside: Make) -> None:
    out = outside(gs.Rules(eviction_streak_max=2))
    for name in "ab":
        out.report(name, "failure")

    text = r"empty 2 \(empty: it ended without any trajectory, finished or failed\)\. The last session to fail"
    with pytest.raises(EvictionStreak, match=text):
        out.feed.sample_now(1)
    assert out.feed.sample_now(1) is None


def test_what_keeps_groups_from_ever_being_sampleable_is_told_to_whoever_only_waits_for_them(outside: Make) -> None:
    for mode in ("async", "sync"):
        rules = gs.Rules(mode=mode, filter_metric="acc", batch_size=2, eviction_streak_max=1)  # type: ignore[arg-type]
        out = outside(rules).report("good", "finished", rows={(0, 0): ReportedRow(metrics={"acc": 1.0})}, size=1)
        assert out.feed.why_never(2) is None
        out.report("bad", "finished", 0.0, 1.0)
        assert "session 0 of group 'bad' has no metric 'acc'" in str(out.feed.why_never(2))
        assert out.feed.why_never(2, ev.VALIDATION) is None


def test_advice_is_for_whoever_has_no_run_to_submit_to_or_to_cancel_in(outside: Make) -> None:
    out = outside().report("b", "running")
    out.feed.ask(3)

    assert out.feed.explain().unblocked_by == (
        "groups in flight must be listed as ended, or not be listed any more, which gives them up",
        "only prompts that are dispatched outside can supply the missing 2 groups",
    )


def test_what_can_t_be_asked_for_is_refused(outside: Make) -> None:
    feed = outside(version=3).feed
    with pytest.raises(WeightVersionError):
        feed.sample_now(1, weight_version=2)
    with pytest.raises(gs.GroupstateError, match="batch_size is 0"):
        feed.sample_now(0)
    with pytest.raises(UnknownBatch):
        feed.commit(1)
    with pytest.raises(UnknownBatch):
        feed.release(1)


# Waiting while listings come in --------------------------------------------------------------------------


def test_one_that_asked_is_answered_by_a_later_listing(outside: Make) -> None:
    out = outside().report("a", "finished", 0.0, 1.0).report("b", "running")
    waiter = out.feed.ask(2, weight_version=3)
    assert out.feed.answer(waiter) is None
    assert out.feed.explain().blocked_by == "1 of 2 groups are sampleable"
    out.report("b", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter).group_ids == ["a", "b"]
    assert [
        type(event).__name__ for event in out.events(ev.BatchRequested, ev.BatchSampled, ev.BatchRequestCancelled)
    ] == [
        "BatchRequested",
        "BatchSampled",
    ]


def test_one_that_asked_is_answered_from_the_whole_listing(outside: Make) -> None:
    out = outside()
    waiter = out.feed.ask(1)
    out.listing = {name: Reported(status="finished", stamp=stamp, rows={(0, 0): ReportedRow(), (1, 0): ReportedRow()})
                   for name, stamp in (("new", 4), ("old", 1))}  # fmt: skip
    out.look()

    assert out.feed.answer(waiter).group_ids == ["old"]


def test_what_is_in_flight_in_the_same_listing_is_drained_too(outside: Make) -> None:
    rules = gs.Rules(mode="sync", filter_metric="reward", batch_size=1)
    out = outside(rules)
    waiter = out.feed.ask(1)
    out.listing["flying"] = Reported(status="running", stamp=0)
    out.listing = {"a": Reported(status="finished", stamp=0, rows={(s, 0): ReportedRow(metrics={"reward": s})
                                                                   for s in (0, 1)}), **out.listing}  # fmt: skip
    out.look()
    assert out.feed.answer(waiter) is None
    out.report("flying", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter).group_ids == ["a"]
    assert out.evicted() == {"flying": ("surplus",)}


def test_one_that_asked_and_can_t_be_served_is_told(outside: Make) -> None:
    out = outside(gs.Rules(filter_metric="reward")).report("a", "running")
    waiter = out.feed.ask(1)
    out.report("a", "finished", 0.0, 1.0, rows={(0, 0): ReportedRow(), (1, 0): ReportedRow()})

    with pytest.raises(gs.GroupstateError, match="no metric 'reward'"):
        out.feed.answer(waiter)


def test_one_that_asked_and_leaves_takes_nothing(outside: Make) -> None:
    out = outside().report("a", "running")
    waiter = out.feed.ask(1)
    out.feed.withdraw(waiter, "tired")
    out.report("a", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter) is None
    assert out.feed.sample_now(1).group_ids == ["a"]


def test_what_changed_is_enough(outside: Make) -> None:
    out = outside().report("a", "running").report("b", "finished", 0.0, 1.0)
    out.listing["a"] = attrs.evolve(out.listing["b"])
    out.feed.observe_changes({"a": out.listing["a"]}, ["b"])

    assert (out.phase("a"), out.phase("b")) == ("finished", "evicted")
    out.feed.observe_changes({})
    assert out.feed.sampleable() == ["a"]


def test_a_validation_group_that_is_removed_is_in_nobody_s_way(outside: Make) -> None:
    out = outside().report("gone", "finished", 0.0, 1.0, partition="val").report("lost", "running", partition="val")
    waiter = out.feed.ask(2, partition="val")
    out.report("there", "finished", 0.0, 1.0, partition="val")
    assert out.feed.answer(waiter).group_ids == ["gone", "there"]
    out.feed.release(out.feed.answer(waiter))
    out.remove("gone", "lost")

    assert out.feed.sampleable(partition="val") == ["there"]
    assert out.feed.sample_now(1, partition="val").group_ids == ["there"]


def test_one_that_was_never_listed_may_be_named_as_removed(outside: Make) -> None:
    out = outside().report("a", "finished", 0.0, 1.0)
    out.feed.observe_changes({}, ["nobody"])

    assert out.feed.sampleable() == ["a"]


def test_what_could_be_sampled_at_a_version_to_come_is_told_without_publishing_it(outside: Make) -> None:
    rules = gs.Rules(lag_max=1, filter_metric="reward")
    out = outside(rules, version=2)
    for name, stamp in (("old", 1), ("new", 2), ("newer", 4)):
        out.report(name, "finished", 0.0, 1.0, stamp=stamp)
    out.report("flying", "running").report("held out", "finished", 1.0, 1.0, partition="val")

    assert out.feed.sampleable() == ["old", "new", "newer"]
    assert [out.feed.sampleable(weight_version=v) for v in (1, 3, 4, 6)] == [
        ["old", "new", "newer"],
        ["new", "newer"],
        ["newer"],
        [],
    ]
    assert out.feed.sampleable(weight_version=99, partition="val") == ["held out"]
    assert out.feed.book.weight_version == 2


def test_a_group_of_a_batch_that_came_back_stays_as_old_as_it_was(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=1)).report("a", "finished", 0.0, 1.0)
    out.feed.release(out.feed.sample_now(1))

    assert out.feed.sampleable(weight_version=9) == ["a"]


def test_the_group_that_holds_everybody_is_named(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=1, on_stale="wait")).report("a", "running", stamp=0).report("b", "running", stamp=5)
    assert out.feed.held_by() is None
    out.feed.publish(1)

    assert (out.feed.held_by(), out.feed.held_by("val")) == ("a", None)
    assert outside(gs.Rules(lag_max=1)).report("a", "running", stamp=0).feed.held_by() is None


# One commit for one listing ------------------------------------------------------------------------------


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


# Refills -------------------------------------------------------------------------------------------------


def test_an_eviction_s_credit_is_taken_and_its_prompt_shows_up_as_a_refill(outside: Make) -> None:
    out = outside().report("a", "failure", size=3)

    assert (out.feed.take_refills(), out.feed.take_refills()) == (1, 0)
    out.report("v", "pending", partition="val").report("b", "pending").report("c", "pending")

    submitted = [(event.group_id, event.cause, event.size) for event in out.events(ev.GroupSubmitted)]
    assert submitted[1:] == [("v", "submit", 2), ("b", "refill", 3), ("c", "submit", 2)]
    assert not out.feed.book.credits


def test_credit_that_was_not_taken_is_still_owed(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert out.feed.take_refills() == 1


def test_a_refill_of_another_size_is_a_group_like_any_other(outside: Make) -> None:
    out = outside().report("a", "failure", size=3)
    out.feed.take_refills()
    out.report("b", "pending", size=2)

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert [event.count for event in out.events(ev.RefillForfeited)] == [1]


def test_a_refill_without_a_place_is_a_group_like_any_other(outside: Make) -> None:
    out = outside(gs.Rules(admission=gs.Slots(n=1))).report("a", "failure")
    assert out.feed.take_refills() == 1
    out.feed.ledger.record(ev.GroupSubmitted("by hand", 2, "train", 0, 1, "submit"))
    out.report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert not out.feed.book.credits


def test_refills_are_forfeited_when_there_are_no_more_prompts(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "failure")
    out.feed.take_refills()

    assert (out.feed.give_up_refills(), out.feed.give_up_refills()) == (2, 0)
    assert out.report("c", "pending").events(ev.GroupSubmitted)[-1].cause == "submit"


def test_refills_are_taken_in_whole_multiples(outside: Make) -> None:
    out = outside(gs.Rules(refill_multiple=2)).report("a", "failure")
    assert out.feed.take_refills() == 0
    out.report("b", "failure").report("c", "failure")

    assert (out.feed.take_refills(), out.feed.take_refills()) == (2, 0)


def test_refills_that_were_not_dispatched_are_owed_again(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "failure")
    assert out.feed.take_refills() == 2
    out.feed.return_refills(1)

    assert (out.feed.take_refills(), out.feed.take_refills()) == (1, 0)
    with pytest.raises(BadInput, match="count is 3"):
        out.feed.return_refills(3)


def test_an_id_that_can_t_be_recorded_leaves_the_refill_to_the_next_one(outside: Make) -> None:
    out = outside().report("a", "failure")
    out.feed.take_refills()
    out.report("half a pair \ud800", "pending").report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "refill"


def test_credit_outlives_the_polls_of_a_draining_sampler(outside: Make) -> None:
    """Sync mode with a filter: refills are earned while a batch is wanted, and dispatched between two looks."""
    rules = gs.Rules(mode="sync", filter_metric="reward", batch_size=2)
    out = outside(rules).report("a", "finished", 0.0, 1.0).report("b", "finished", 1.0, 1.0)

    assert out.feed.sample_now(2) is None
    assert out.feed.take_refills() == 2
    out.report("c", "running").report("d", "running").report("c", "finished", 0.0, 1.0)
    assert out.feed.sample_now(2) is None
    out.report("d", "finished", 0.0, 1.0)

    assert out.feed.sample_now(2).group_ids == ["a", "c"]
    assert out.evicted() == {"b": ("zero_variance",), "d": ("surplus",)}
    assert [event.cause for event in out.events(ev.GroupSubmitted)] == ["submit", "submit", "refill", "refill"]


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


# Logs and threads ----------------------------------------------------------------------------------------


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


# Keys ----------------------------------------------------------------------------------------------------


@given(st.text(min_size=1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_key_is_split_from_the_right(group_id: str, session: int, index: int) -> None:
    assert split_key(f"{group_id}_{session}_{index}") == RowKey(group_id, session, index)


@pytest.mark.parametrize(
    "text", ["", "a", "a_1", "_1_2", "a_b_1", "a_1_b", "a_-1_2", "a_1_", "a_²_1", "a_1_" + "9" * 99]
)
def test_what_is_no_key_is_an_error(text: str) -> None:
    with pytest.raises(BadInput, match="must be"):
        split_key(text)


# The same history told twice -----------------------------------------------------------------------------


RULES = [
    gs.Rules(lag_max=1),
    gs.Rules(lag_max=1, filter_metric="reward", survivors_min=1),
    gs.Rules(empty_session="allow", filter_metric="reward"),
    gs.Rules(mode="sync"),
    gs.Rules(mode="sync", failure="refill", empty_session="allow"),
    gs.Rules(mode="sync", filter_metric="reward", batch_size=2),
    gs.Rules(basis="oldest_token", lag_max=1),
    gs.Rules(lag_max=1, on_stale="wait"),
]


@attrs.define
class Pair:
    """One history, told by statuses (`out`) and by the sessions themselves (`direct`)."""

    out: Outside
    direct: StatusFeed
    names: Iterator[str] = attrs.field(factory=lambda: (f"g_{n}" for n in itertools.count()))

    def submit(self) -> None:
        """A new group; only what becomes of its sessions is told in two ways."""
        name = next(self.names)
        report = Reported(status="pending", stamp=self.direct.book.weight_version)
        self.direct._submit(name, report)
        self.direct.ledger.settle()
        self.out.listing[name] = report
        self.out.look()

    def start(self, name: str) -> None:
        for session in range(2):
            self.direct.ledger.start(name, session)
        self.out.report(name, "running", stamp=self.out.listing[name].stamp)

    def end(self, name: str, outcomes: list[Any], order: list[int]) -> None:
        """Each session's rewards, or None where it failed."""
        version = self.direct.book.weight_version
        rows = {
            (session, index): ReportedRow(metrics={"reward": reward}, response_tokens=2, versions=(version, version))
            for session, rewards in enumerate(outcomes)
            for index, reward in enumerate(rewards or ())
        }
        for session in order:
            rewards = outcomes[session]
            if rewards is None:
                self.direct.ledger.fail(name, session, 1, "error", "boom")
            else:
                span = (ev.VersionSpan(0, 2, version),)
                result = [gs.Trajectory(reward=r, response_ids=[1, 1], spans=span) for r in rewards]
                self.direct.ledger.finish(name, session, 1, result)
        status = "failure" if None in outcomes else "finished"
        self.out.report(name, status, stamp=self.out.listing[name].stamp, rows=rows)

    def sample(self, size: int) -> None:
        told = [self._sampled(feed, size) for feed in (self.direct, self.out.feed)]
        assert told[0] == told[1]

    @staticmethod
    def _sampled(feed: StatusFeed, size: int) -> Any:
        try:
            batch = feed.sample_now(size)
        except SampleError as error:
            return str(error)
        if batch is not None:
            feed.commit(batch)
        # Why a session of a failed group has no trajectory is not in a status.
        return batch and (batch.group_ids, batch.lags, {k: v for k, v in batch.metrics.items() if "failed" not in k})

    def take(self) -> None:
        assert self.direct.take_refills() == self.out.feed.take_refills()

    def compare(self) -> None:
        told = [
            (
                {name: str(group.phase) for name, group in book.groups.items()},
                book.departed,
                [group.group_id for group in book.ready()],
                [attrs.astuple(credit) for credit in book.credits],
            )
            for book in (self.direct.book, self.out.feed.book)
        ]
        assert told[0] == told[1]

    def evictions(self) -> tuple[list[Any], list[Any]]:
        kinds = (ev.GroupEvicted, ev.BatchSampled)
        records = self.direct.ledger.log.read()
        return [r.event for r in records if isinstance(r.event, kinds)], self.out.events(*kinds)


OUTCOMES = st.none() | st.lists(st.sampled_from([0.0, 1.0]), max_size=2)


@given(st.data())
def test_statuses_and_sessions_tell_the_same(data: st.DataObject) -> None:
    rules = data.draw(st.sampled_from(RULES))
    direct = StatusFeed.begin(MemoryLog(), rules, group_size=2)
    pair = Pair(Outside(rules), direct)
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        listing, groups = pair.out.listing, direct.book.groups
        waiting = [name for name in listing if listing[name].status == "pending"]
        running = [name for name in listing if listing[name].status == "running" and name in groups]
        step = data.draw(st.sampled_from(["submit", "start", "end", "end", "sample", "publish", "take"]), "step")
        if step == "submit":
            pair.submit()
        elif step == "start" and waiting:
            pair.start(data.draw(st.sampled_from(waiting)))
        elif step == "end" and running:
            outcomes = data.draw(st.lists(OUTCOMES, min_size=2, max_size=2), "outcomes")
            order = data.draw(st.permutations([0, 1]), "order")
            pair.end(data.draw(st.sampled_from(running)), outcomes, order)
        elif step == "sample":
            pair.sample(data.draw(st.integers(1, 2)))
        elif step == "publish":
            for feed in (direct, pair.out.feed):
                feed.ledger.publish(feed.book.weight_version + 1)
        elif step == "take":
            pair.take()
        pair.compare()
    told, observed = pair.evictions()
    assert told == observed
    pair.out.check()
