"""Where a run stands, as a value."""

from pathlib import Path

import pytest

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION, Rules
from groupstate.errors import BadInput
from groupstate.inspect.overview import overview, overview_of
from groupstate.inspect.replay import book_at
from groupstate.log.reading import read_log


def records(*events: ev.AnyEvent, rules: Rules | None = None) -> list[ev.Record]:
    first = ev.RunStarted("r", (rules or Rules()).to_dict(), RULES_VERSION, 0, library="0.1")
    return [ev.Record(seq, seq * 1_000_000_000, event) for seq, event in enumerate([first, *events], 1)]


def test_the_end_of_a_run_that_was_driven(driven: Path) -> None:
    seen = overview(read_log(driven))

    assert (seen.header.closed, seen.header.openings, seen.header.weight_version) == (True, 1, 1)
    assert seen.header.rules == {"filter_metric": "reward", "lag_max": 1, "batch_size": 3}
    assert seen.totals["evicted/zero_variance"] == seen.totals["evicted/failed"] == 1
    assert [mark.name for mark in seen.marks] == ["first"]
    assert seen.partitions[0].sampleable == seen.partitions[0].phases["finished"] == 6


def test_a_run_in_the_middle() -> None:
    row = (ev.TrajectoryRecord(0, {"reward": 1.0}),)
    seen = overview(
        records(
            ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "admission", "math", 0),
            ev.SessionStarted("a", 0, 1),
            ev.SessionFinished("a", 0, 1, row),
            ev.GroupFinished("a"),
            ev.BatchRequested(1, ev.TRAIN, 1, 0),
            ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)),
            ev.GroupSubmitted("b", 2, ev.TRAIN, 0, 1, "admission", "code", 1),
            ev.SessionFailed("b", 0, 1, "error"),
            ev.SessionFailed("b", 1, 1, "error"),
            ev.GroupFailed("b"),
            ev.GroupEvicted("b", ("empty",), 0, 1),
            ev.GroupSubmitted("c", 2, ev.TRAIN, 0, 1, "admission", "code", 2),
            ev.SessionStarted("c", 1, 1),
            ev.AdmissionHeld("full"),
            ev.BatchRequested(2, ev.TRAIN, 2, 0),
            ev.WeightsPublished(1),
        )
    )

    assert [(batch.batch, batch.group_ids) for batch in seen.batches] == [(1, ("a",))]
    assert [(credit.evicted, credit.size) for credit in seen.credits] == [("b", 2)]
    assert seen.requests == ((2, "train", 2, 1.0),)
    assert seen.waits[0].blocked_by == "0 of 2 groups are sampleable"
    assert [(g.group_id, g.lag, g.age_s, g.open_sessions) for g in seen.waits[0].in_flight] == [("c", 1, 4.0, (1,))]
    assert seen.header.admission_held == "full"
    assert seen.windows == {"train": {"submitted": 2, "evicted": 1, "evicted/empty": 1, "session_failed/error": 2}}
    assert seen.datasets == {"code": {"evicted": 1, "submitted": 2}, "math": {"sampled": 1, "submitted": 1}}


def test_an_earlier_event_and_one_that_is_not_there() -> None:
    log = records(ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit"), ev.SessionStarted("a", 0, 1))

    assert overview(log, 2).partitions[0].phases["pending"] == 1
    assert overview(log).partitions[0].phases["running"] == 1
    with pytest.raises(BadInput, match="there is no event 9: the log has events 1 to 3"):
        overview(log, 9)


@pytest.mark.parametrize("reason", ["NotEnoughGroups", "closed"])
def test_a_closed_run_says_what_it_was_closed_with(reason: str) -> None:
    closed = records(ev.RunClosed(reason))

    assert overview(closed).header.closed_for == reason
    assert overview(closed, 1).header.closed_for == ""
    assert overview_of(book_at(closed)).header.closed_for == ""
