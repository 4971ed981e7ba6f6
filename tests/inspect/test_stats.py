"""What `stats` counts is what the book counts, whatever happened; and where the time and the tokens went."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from groupstate.cli import main
from groupstate.cli.stats import _durations
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.rules import RULES_VERSION
from groupstate.errors import BadInput, LogError
from groupstate.inspect import tally
from groupstate.inspect.stats import as_object, stats
from groupstate.inspect.tallies import UNDONE, UNTIMED, Fates, Stats, length_bucket, reward_bucket
from groupstate.simulate.loop import EPOCH_NS
from groupstate.testing import strategies

Kept = Callable[..., Path]
SECOND = 1_000_000_000
OWN = {"finished", "failure", "sampled", "requeued", UNDONE, UNTIMED}
"""Counts that the book has no totals of."""


def started(**rules: Any) -> ev.RunStarted:
    return ev.RunStarted("r", rules, RULES_VERSION, 0, library="0.1")


def at_seconds(*events: tuple[float, ev.AnyEvent]) -> list[ev.Record]:
    return [ev.Record(seq, EPOCH_NS + round(at * SECOND), event) for seq, (at, event) in enumerate(events, 1)]


def submit(name: str, n: int = 1, *, cause: ev.Cause = "submit", dataset: str = "", length: int = 0) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, n, ev.TRAIN, 0, 1, cause, dataset, prompt_length=length)


def finish(name: str, session: int = 0, *, tokens: int = 10, reward: float = 1.0, attempt: int = 1) -> ev.AnyEvent:
    return ev.SessionFinished(name, session, attempt, (ev.TrajectoryRecord(0, {"reward": reward}, 3, tokens),))


def counted(seen: Stats) -> dict[str, int]:
    return {name: count for name, count in seen.whole.totals.items() if count and name not in OWN}


def rounded(value: Any) -> Any:
    """Sums of seconds differ in the last digits by the order in which they are made."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def known(totals: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in totals.items() if count}


# Against the book ----------------------------------------------------------------------------------------


@given(strategies.logs())
def test_every_total_is_the_books(records: list[ev.Record]) -> None:
    seen, book = stats(records), replayed(records)

    assert counted(seen) == known(book.totals)
    assert dict(seen.live) == Counter(str(group.phase) for group in book.groups.values())
    assert seen.owed == len(book.credits)
    assert (seen.first_seq, seen.last_seq) == (1, len(records))


@given(strategies.logs())
def test_every_token_is_trained_on_or_thrown_away_or_held(records: list[ev.Record]) -> None:
    seen = stats(records)
    whole = seen.whole

    ended = whole.trained_tokens + whole.validation_tokens["committed"]
    thrown = whole.thrown_tokens.total() + whole.validation_tokens["requeued"]
    assert whole.totals["response_tokens"] == ended + thrown + seen.held_tokens


@given(strategies.logs())
def test_every_training_group_that_left_is_counted_under_one_of_each_kind(records: list[ev.Record]) -> None:
    seen, book = stats(records), replayed(records)
    evicted = sum(window for window in (use.evicted for use in book.uses.values()))

    for kinds in seen.survival.values():
        assert sum(fates.committed for fates in kinds.values()) == book.totals["committed/train"]
        assert sum(fates.evicted.total() for fates in kinds.values()) == evicted


@given(strategies.logs(), st.integers(1, 4))
def test_the_intervals_add_up_whatever_their_size(records: list[ev.Record], by: int) -> None:
    one, other = stats(records), stats(records, by=by)

    assert rounded(as_object(one)["whole"]) == rounded(as_object(other)["whole"])
    seqs = [(interval.first_seq, interval.last_seq) for interval in other.intervals]
    assert seqs[0][0] == 1
    assert seqs[-1][1] == len(records)
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(seqs))


@given(strategies.logs(), st.data())
def test_from_a_book_on_the_rest_is_counted(records: list[ev.Record], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(records) - 1) if len(records) > 1 else st.just(0))
    if not cut:
        return
    base, book = replayed(records[:cut]), replayed(records)
    before = Counter(base.totals)
    held = sum(row.response_tokens for g in base.groups.values() for s in g.sessions for row in s.trajectories)
    seen = stats(records[cut:], base)
    whole = seen.whole

    book.totals.subtract(before)
    assert counted(seen) == known(book.totals)
    assert dict(seen.live) == Counter(str(group.phase) for group in book.groups.values())
    assert seen.owed == len(book.credits)
    ended = whole.trained_tokens + whole.validation_tokens["committed"]
    thrown = whole.thrown_tokens.total() + whole.validation_tokens["requeued"]
    assert held + whole.totals["response_tokens"] == ended + thrown + seen.held_tokens


def test_times_of_sessions_that_were_only_observed_are_not_known() -> None:
    seen = stats(
        at_seconds(
            (0, started()), (0, submit("a", 2)),
            (3, ev.SessionStarted("a", 0, 1, observed=True)), (3, ev.SessionStarted("a", 1, 1, observed=True)),
            (3, ev.SessionFinished("a", 0, 1, observed=True)),
            (3, ev.SessionFailed("a", 1, 1, "lost", observed=True)), (3, ev.GroupFailed("a")),
        )
    )  # fmt: skip

    whole = seen.whole
    assert whole.totals[UNTIMED] == 2
    assert [h.count for h in (whole.sessions_s, whole.failed_sessions_s, whole.pending_s, whole.tails_s)] == [0] * 4
    assert (whole.groups_s.count, seen.slowest) == (1, ())
    rows = [row for row in stats_text(seen) if row[0] == "sessions that were only observed"]
    assert rows == [("sessions that were only observed", "2", *["not known"] * 5)]


def stats_text(seen: Stats) -> list[tuple[str, ...]]:
    return list(_durations(seen.whole))


def follow(records: list[ev.Record]) -> None:
    """What is counted is what the book has, after every event."""
    follower, book = tally.Tally(None, None, None), replayed([])
    for record in records:
        if follower.waiting:
            follower.wait_until(record.at_ns)
        follower.steps[type(record.event)](record.event, record)
        follower.last = record
        book.apply(record)

        assert (follower._ready, follower._in_flight) == (book.ready_count(), book.in_flight_count())
        assert follower.waiting == bool(book.waiting())
        running = [s for g in book.groups.values() if g.partition == ev.TRAIN for s in g.sessions if s.state == "open"]
        assert follower._open == len(running)


@given(strategies.logs())
def test_what_is_sampleable_and_in_flight_is_followed_as_the_book_does(records: list[ev.Record]) -> None:
    follow(records)


@pytest.mark.parametrize("empty", ["refill", "keep", "keep_finished", "keep_all"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_so_are_groups_without_a_trajectory_that_the_rules_keep(mode: str, empty: str) -> None:
    finished = [submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1), ev.GroupFinished("a")]
    failed = [submit("b"), ev.SessionFailed("b", 0, 1, "error"), ev.GroupFailed("b")]

    follow(at_seconds(*((0, event) for event in [started(mode=mode, empty=empty), *finished, *failed])))


# Time ----------------------------------------------------------------------------------------------------


def test_what_the_trainer_waited_for_is_told_apart() -> None:
    seen = stats(
        at_seconds(
            (0, started()),
            (1, ev.BatchRequested(1, ev.TRAIN, 1, 0)),
            (3, submit("a")),  # 2 s: none in flight
            (6, ev.SessionStarted("a", 0, 1)),  # 3 s: no session has begun
            (11, finish("a")),  # 5 s: under way
            (11, ev.GroupFinished("a")),
            (18, ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,))),  # 7 s: the rules
            (20, ev.BatchCommitted(1)),
            (29, ev.AdmissionHeld("full")),
            (30, ev.BatchRequested(2, ev.TRAIN, 1, 0)),
            (41, ev.AdmissionHeld("")),  # 11 s: held
            (41, ev.SourceExhausted("s", 1)),
            (54, ev.BatchRequestCancelled(2)),  # 13 s: exhausted
            (60, ev.RunClosed()),
            (90, ev.RunRecovered({}, RULES_VERSION, 0, 2)),
            (91, ev.RunClosed()),
        )
    )
    whole = seen.whole

    assert {cause: waited / SECOND for cause, waited in whole.waited_ns.items()} == {
        tally.NOTHING_WAIT: 2,
        tally.UNSTARTED_WAIT: 3,
        tally.SESSIONS_WAIT: 5,
        tally.RULES_WAIT: 7,
        tally.HELD_WAIT: 11,
        tally.EXHAUSTED_WAIT: 13,
    }
    assert whole.trainer_ns / SECOND == (30 - 18) + (60 - 54)
    assert whole.down_ns / SECOND == 30
    assert (whole.waits_s.count, whole.waits_s.total) == (1, 17.0)


def test_two_waiting_calls_wait_once_and_validation_is_not_the_trainers() -> None:
    whole = stats(
        at_seconds(
            (0, started()),
            (1, ev.BatchRequested(1, ev.VALIDATION, 1, 0)),
            (2, ev.BatchRequested(2, ev.TRAIN, 1, 0)),
            (5, ev.BatchRequested(3, ev.TRAIN, 1, 0)),
            (9, ev.BatchRequestCancelled(2)),
            (10, ev.BatchRequestCancelled(3)),
            (12, ev.BatchRequestCancelled(1)),
        )
    ).whole

    assert whole.waited_ns.total() / SECOND == 8
    assert whole.trainer_ns / SECOND == 2


def test_nobody_waits_while_the_process_is_gone() -> None:
    whole = stats(
        at_seconds(
            (0, started()),
            (1, ev.BatchRequested(1, ev.TRAIN, 1, 0)),
            (4, submit("a")),
            (99, ev.RunRecovered({}, RULES_VERSION, 0, 2)),
            (100, ev.BatchRequested(2, ev.TRAIN, 1, 0)),
            (102, ev.BatchRequestCancelled(2)),
        )
    ).whole

    assert {cause: waited / SECOND for cause, waited in whole.waited_ns.items() if waited} == {
        tally.NOTHING_WAIT: 3, tally.UNSTARTED_WAIT: 2,
    }  # fmt: skip
    assert (whole.down_ns / SECOND, whole.trainer_ns) == (95, 0)


def test_time_goes_to_the_interval_in_which_it_passed() -> None:
    seen = stats(
        at_seconds(
            (0, started()),
            (1, ev.BatchRequested(1, ev.TRAIN, 1, 0)),
            (4, ev.WeightsPublished(1)),
            (9, ev.BatchRequestCancelled(1)),
            (10, ev.WeightsPublished(2)),
            (13, ev.RunClosed()),
        ),
        by=1,
    )

    assert [interval.waited_ns.total() / SECOND for interval in seen.intervals] == [3, 5, 0]
    assert [interval.trainer_ns / SECOND for interval in seen.intervals] == [0, 1, 3]
    assert [(i.first_at_ns - EPOCH_NS, i.last_at_ns - EPOCH_NS) for i in seen.intervals] == [
        (0, 4 * SECOND), (4 * SECOND, 10 * SECOND), (10 * SECOND, 13 * SECOND),
    ]  # fmt: skip


def test_how_long_sessions_and_groups_took_and_what_the_stragglers_cost() -> None:
    seen = stats(
        at_seconds(
            (0, started()),
            (0, submit("a", 4)),
            (1, ev.SessionStarted("a", 0, 1)),
            (1, ev.SessionStarted("a", 1, 1)),
            (2, ev.SessionStarted("a", 2, 1)),
            (3, finish("a", 0)),
            (4, ev.SessionFailed("a", 1, 1, "error", "boom", 1.0)),
            (5, ev.SessionStarted("a", 1, 2)),
            (6, finish("a", 1, attempt=2)),  # half of them
            (7, ev.SessionFailed("a", 3, 1, "cancelled")),
            (20, finish("a", 2)),
            (20, ev.GroupFailed("a")),
            (21, ev.BatchRequested(1, ev.TRAIN, 1, 0)),
            (24, ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,))),
        )
    )
    whole = seen.whole

    assert (whole.sessions_s.count, whole.sessions_s.total) == (3, 2 + 1 + 18)
    assert (whole.failed_sessions_s.count, whole.failed_sessions_s.total) == (1, 3)
    assert whole.pending_s.total == 1
    assert whole.groups_s.total == 20
    assert whole.tails_s.total == 14
    assert whole.queued_s.total == 4
    assert [(s.group_id, s.session, s.attempt, s.seconds, s.seq) for s in seen.slowest][:2] == [
        ("a", 2, 1, 18, 11), ("a", 0, 1, 2, 6),
    ]  # fmt: skip


def test_only_the_slowest_sessions_are_named() -> None:
    events: list[tuple[float, ev.AnyEvent]] = [(0, started()), (0, submit("a", 30))]
    events += [(0, ev.SessionStarted("a", n, 1)) for n in range(30)]
    events += [(n + 1, finish("a", n)) for n in range(30)]

    assert [slow.session for slow in stats(at_seconds(*events)).slowest] == list(range(29, 19, -1))


# Lag, failures, kinds ------------------------------------------------------------------------------------


def test_lag_is_told_apart_in_flight_and_in_the_queue() -> None:
    whole = stats(
        at_seconds(
            (0, started()),
            (0, submit("a")),
            (0, ev.SessionStarted("a", 0, 1)),
            (0, ev.WeightsPublished(2)),
            (0, finish("a")),
            (0, ev.GroupFinished("a")),
            (0, ev.WeightsPublished(3)),
            (0, ev.BatchRequested(1, ev.TRAIN, 1, 3)),
            (0, ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 3, (3,))),
        )
    ).whole

    assert (whole.in_flight_lags, whole.queue_lags, whole.sampled_lags) == ({2: 1}, {1: 1}, {3: 1})


def test_one_that_was_dispatched_anew_counts_from_the_version_of_then() -> None:
    again = [ev.GroupRequeued("a", "anew", weight_version=1), ev.SessionStarted("a", 0, 2), finish("a", attempt=2)]
    events = [started(), submit("a"), ev.WeightsPublished(3), *again, ev.GroupFinished("a")]

    assert stats(at_seconds(*((0, event) for event in events))).whole.in_flight_lags == {2: 1}


def test_failures_are_counted_by_kind_and_message_with_numbers_left_out() -> None:
    seen = stats(
        at_seconds(
            (0, started()),
            (0, submit("a", 3)),
            (0, ev.SessionFailed("a", 0, 1, "error", "worker 17 died\n at 12")),
            (0, ev.SessionFailed("a", 1, 1, "error", "worker 4 died at 3", 1.0)),
            (0, ev.SessionFailed("a", 2, 1, "timeout")),
        )
    )

    assert [(f.kind, f.message, f.count, f.retried, f.last_seq) for f in seen.failures] == [
        ("error", "worker # died at #", 2, 1, 4),
        ("timeout", "", 1, 0, 5),
    ]


def test_of_very_many_messages_the_first_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MESSAGES_MAX", 2)
    events: list[tuple[float, ev.AnyEvent]] = [(0, started()), (0, submit("a", 4))]
    events += [(0, ev.SessionFailed("a", n, 1, "error", "x" * (n + 1))) for n in range(4)]
    found = stats(at_seconds(*events)).failures

    assert [(f.message, f.count) for f in found] == [(tally.OTHER_MESSAGES, 2), ("x", 1), ("xx", 1)]


def left() -> list[ev.Record]:
    """Long right answers are trained on, short wrong ones thrown away; one group never answers."""
    return at_seconds(
        (0, started(filter_metric="acc")),
        (0, submit("a", 2, dataset="math", length=70)),
        (0, submit("b", 1, cause="admission", length=3)),
        (0, submit("c", 1)),
        *((0, ev.SessionStarted(name, n, 1)) for name, n in (("a", 0), ("a", 1), ("b", 0))),
        (0, ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0, {"acc": 0.25}, 3, 100),))),
        (0, ev.SessionFinished("a", 1, 1, (ev.TrajectoryRecord(0, {"acc": 0.75}, 3, 200),))),
        (0, ev.GroupFinished("a")),
        (0, ev.SessionFinished("b", 0, 1, (ev.TrajectoryRecord(0, {"acc": -20.0}, 3, 7),))),
        (0, ev.GroupFinished("b")),
        (0, ev.GroupEvicted("b", ("stale", "zero_variance"), 1, 2)),
        (0, ev.SessionFailed("c", 0, 1, "error")),
        (0, ev.GroupFailed("c")),
        (0, ev.GroupEvicted("c", ("failed",), 1, 1)),
        (0, ev.BatchRequested(1, ev.TRAIN, 1, 0)),
        (0, ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,))),
        (0, ev.BatchCommitted(1)),
        (0, submit("d", cause="refill")),
        (0, ev.RefillForfeited(1, "drained")),
        (0, ev.ResultFenced("c", 0, 1, "finished", "gone")),
    )


def test_what_the_rules_let_through_is_told_by_kind() -> None:
    seen = stats(left())
    a, b, c = Fates(1), Fates(0, Counter({"stale, zero_variance": 1})), Fates(0, Counter(failed=1))

    assert seen.metric == "acc"
    assert seen.survival == {
        "dataset": {"math": a, "": Fates(0, b.evicted + c.evicted)},
        "cause": {"submit": Fates(1, c.evicted), "admission": b},
        "prompt_length": {(64, 128): a, (2, 4): b, (0, 1): c},
        "answer_tokens": {(128, 256): a, (4, 8): b, (0, 1): c},
        "reward": {(0.5, 0.6): a, (-32.0, -16.0): b, reward_bucket(None): c},
    }
    assert (a.survival, c.survival, Fates().survival, a.count) == (1.0, 0.0, 0.0, 1)
    assert seen.whole.thrown_tokens == {"stale, zero_variance": 7, "failed": 0}
    assert (seen.whole.trained_tokens, seen.owed) == (300, 1)
    assert (seen.whole.fenced, seen.whole.forfeited) == ({"gone": 1}, {"drained": 1})


def test_more_refills_forfeited_than_are_owed_leave_none_owed() -> None:
    seen = stats(
        [*left(), *at_seconds(*[(0, started())] * 22, (0, ev.RefillForfeited(5, "the source is exhausted")))[22:]]
    )

    assert (seen.owed, seen.whole.totals["forfeited"]) == (0, 2)
    assert seen.whole.forfeited == {"drained": 1, "the source is exhausted": 5}


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ((finish("a"), ev.GroupFinished("a")), tally.RULES_WAIT),
        ((), tally.SESSIONS_WAIT),
        ((ev.GroupRequeued("a"),), tally.UNSTARTED_WAIT),
        ((ev.SessionFailed("a", 0, 1, "error"), ev.GroupFailed("a"), ev.AdmissionHeld("full")), tally.HELD_WAIT),
    ],
)
def test_a_wait_is_told_from_a_book_on(before: tuple[ev.AnyEvent, ...], cause: str) -> None:
    begin = (started(), submit("a"), ev.SessionStarted("a", 0, 1), *before, ev.BatchRequested(1, ev.TRAIN, 1, 0))
    records = at_seconds(*((number, event) for number, event in enumerate((*begin, ev.WeightsPublished(1)))))
    base = replayed(records[:-1])

    assert stats(records[-1:], base).whole.waited_ns == {cause: SECOND}


def test_another_metric_is_told_where_it_is_named() -> None:
    events = [started(filter_metric="acc"), submit("a"), finish("a", reward=0.5), ev.GroupFinished("a")]
    seen = stats(
        at_seconds(*((0, event) for event in [*events, ev.GroupEvicted("a", ("stale",), 1, 1)])), metric="reward"
    )

    assert (seen.metric, list(seen.survival["reward"])) == ("reward", [reward_bucket(0.5)])


def ended_with(*names: str) -> list[ev.Record]:
    """A session that ended with these metrics; the last event is a publication."""
    row = ev.TrajectoryRecord(0, dict.fromkeys(names, 1.0), 3, 10)
    events = [started(), submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, (row,))]
    return at_seconds(*((0, event) for event in [*events, ev.GroupFinished("a"), ev.WeightsPublished(1)]))


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        (["acc", "reward"], "rewrad", "metric 'rewrad'; there are 'acc' and 'reward' (did you mean 'reward'?)"),
        (["reward"], "x", "metric 'x'; there is 'reward'"),
        (["reward"], "", "metric ''; there is 'reward'"),
        ([], "reward", "metric 'reward', or with any other"),
        ([f"m{n:02}" for n in range(23)], "x", "'m19' and 3 more"),
    ],
)
def test_a_metric_that_no_session_has_is_refused_with_those_that_there_are(
    there: list[str], asked: str, said: str
) -> None:
    with pytest.raises(BadInput, match="no session ended with a") as caught:
        stats(ended_with(*there), metric=asked)
    assert str(caught.value).endswith(said)


def test_groups_from_before_the_first_event_say_which_metrics_there_are() -> None:
    records = ended_with("acc")
    rest, base = records[-1:], replayed(records[:-1])

    assert stats(rest, base, metric="acc").metric == "acc"
    with pytest.raises(BadInput, match="there is 'acc'"):
        stats(rest, base, metric="x")


def test_before_a_session_has_ended_no_metric_is_refused() -> None:
    assert stats(ended_with("reward")[:3], metric="acc").metric == "acc"


def test_the_rules_metric_is_not_refused_where_no_session_has_it() -> None:
    records = [*at_seconds((0, started(filter_metric="acc"))), *ended_with("reward")[1:]]

    assert stats(records).metric == "acc"


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(0, (0, 1)), (0.5, (0, 1)), (1, (1, 2)), (63.9, (32, 64)), (64, (64, 128)), (1e6, (524288, 1048576))],
)
def test_lengths_go_into_powers_of_two(length: float, bucket: tuple[int, int]) -> None:
    assert length_bucket(length) == bucket


@pytest.mark.parametrize(
    ("value", "bucket"),
    [
        (0.0, (0.0, 0.1)), (0.3, (0.3, 0.4)), (0.1 + 0.2, (0.3, 0.4)), (0.7, (0.7, 0.8)), (1.0, (1.0, 1.1)),
        (-0.05, (-0.1, 0.0)), (-1.0, (-1.0, -0.9)), (10.0, (8.0, 16.0)), (-10.0, (-16.0, -8.0)),
        (1e300, (2.0**996, 2.0**997)),
    ],
)  # fmt: skip
def test_rewards_go_into_tenths_and_far_ones_into_powers_of_two(value: float, bucket: tuple[float, float]) -> None:
    assert reward_bucket(value) == bucket


# Intervals -----------------------------------------------------------------------------------------------


def versions(count: int, *, lineages: int = 1) -> list[ev.Record]:
    events: list[tuple[float, ev.AnyEvent]] = [(0, started())]
    for lineage in range(1, lineages + 1):
        if lineage > 1:
            events.append((0, ev.RunRecovered({}, RULES_VERSION, 0, lineage)))
        events += [(version, ev.WeightsPublished(version, lineage)) for version in range(1, count)]
    return at_seconds(*events)


def test_intervals_are_put_together_where_there_would_be_many() -> None:
    seen = stats(versions(1_000))

    assert seen.by == 32
    assert [(i.first_version, i.last_version) for i in seen.intervals] == [
        (first, min(first + 31, 999)) for first in range(0, 1_000, 32)
    ]
    assert len(stats(versions(40)).intervals) == 40


def test_a_size_that_is_asked_for_is_kept() -> None:
    seen = stats(versions(1_000), by=10)

    assert (seen.by, len(seen.intervals)) == (10, 100)
    assert len(stats(versions(100), by=1).intervals) == 100


def test_lineages_are_never_put_together() -> None:
    seen = stats(versions(10, lineages=50))

    assert [interval.lineage for interval in seen.intervals] == list(range(1, 51))
    assert (seen.whole.lineage, seen.whole.first_version, seen.whole.last_version) == (50, 0, 9)


# What can't be counted -----------------------------------------------------------------------------------


def test_a_run_without_events_is_refused() -> None:
    with pytest.raises(BadInput, match="there is no event"):
        stats([])


@pytest.mark.parametrize("by", [0, -1, "many"])
def test_a_size_of_intervals_that_cannot_be_is_refused(by: Any) -> None:
    with pytest.raises(BadInput, match="by"):
        stats(versions(3), by=by)


def test_a_log_that_no_run_wrote_is_refused() -> None:
    with pytest.raises(LogError, match=r"event 2 \(GroupFinished\) can't follow what the log says before it"):
        stats(at_seconds((0, started()), (0, ev.GroupFinished("nobody"))))


# The command ---------------------------------------------------------------------------------------------


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, ["stats", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_command_tells_it_in_sections(kept: Kept) -> None:
    run = kept(*(record.event for record in left()), ev.SessionFailed("d", 0, 1, "error", "boom 7", 1.0))
    out = call(run).stdout.splitlines()

    for line in (
        "groups\tsubmitted\t4",
        "groups\ttrained on\t1 (25.0%)",
        "groups\tthrown away\t2 (50.0%)",
        "groups\t... zero_variance\t1",
        "groups\tlive, pending\t1",
        "tokens\tgenerated\t307\t100.0%",
        "tokens\t... stale, zero_variance\t7\t2.3%",
        "lag\t0\t3\t1\t1",
        "failures\terror\tboom #\t1\t1\t23",
        "late results\tgone\t1",
        "credits\tearned by evictions\t3",
        "credits\tspent on refills\t1",
        "credits\t... drained\t1",
        "credits\towed\t1",
        "survival by dataset\tmath\t1\t1\t100%\t",
        "survival by prompt length\t2 to 4\t1\t0\t0%\t1 stale, zero_variance",
        "survival by acc\tnone\t1\t0\t0%\t1 failed",
    ):
        assert line in out
    assert "# survival by acc\tmean acc\tgroups that left\ttrained on\tshare\tthrown away" in out
    assert next(line for line in out if line.startswith("intervals\t")).split("\t")[1:4] == ["0", "1", "1-23"]


def test_the_command_gives_json_and_takes_a_size_and_a_metric(driven: Path) -> None:
    found = json.loads(call(driven, "--json", "--by", "1", "--metric", "reward").stdout)

    assert (found["by"], found["metric"], len(found["intervals"])) == (1, "reward", 2)
    assert found["whole"]["totals"]["evicted/zero_variance"] == 1
    assert [kind["kind"] for kind in found["survival"]["reward"]] == [[0.0, 0.1], [0.5, 0.6], [0.7, 0.8]]
    assert found["whole"]["sessions_s"].keys() == {"count", "total", "p50", "p90", "p99", "most"}
    assert call(driven, "--by", "0").exit_code == 2


def test_the_command_refuses_a_metric_that_the_run_does_not_have(driven: Path) -> None:
    result = call(driven, "--metric", "rewrad")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "groupstate: no session ended with a metric 'rewrad'; there is 'reward' (did you mean 'reward'?)\n"
    )


def test_refills_say_how_many_of_them_were_trained_on(kept: Kept) -> None:
    run = kept(
        started(), submit("a"), ev.SessionFailed("a", 0, 1, "error"), ev.GroupFailed("a"),
        ev.GroupEvicted("a", ("failed",), 0, 1), submit("b", cause="refill"), ev.SessionStarted("b", 0, 1),
        finish("b"), ev.GroupFinished("b"), ev.BatchRequested(1, ev.TRAIN, 1, 0),
        ev.BatchSampled(1, 1, ev.TRAIN, ("b",), 0, (0,)), ev.BatchCommitted(1),
    )  # fmt: skip

    assert "credits\t... of which trained on\t1 (100.0%) of those that left" in call(run).stdout


def test_long_tables_are_cut_in_text(kept: Kept) -> None:
    events = [submit(f"g{n}", dataset=f"d{n:02}") for n in range(30)]
    events += [event for n in range(30) for event in (
        ev.SessionFailed(f"g{n}", 0, 1, "error", "x" * (n + 1)), ev.GroupFailed(f"g{n}"),
        ev.GroupEvicted(f"g{n}", ("failed",), 0, 0), ev.WeightsPublished(n + 1),
    )]  # fmt: skip
    out = call(kept(started(), *events)).stdout.splitlines()

    assert "survival by dataset\tand 5 more, see --json\t\t\t\t" in out
    assert "failures\tand 15 more, see --json\t\t\t\t" in out
    assert "lag\t20 to 29\t10\t0\t0" in out


def test_going_back_to_a_mark_is_told(kept: Kept) -> None:
    run = kept(
        started(), ev.CheckpointMarked(1, 0, 1), submit("a"), ev.SessionStarted("a", 0, 1), finish("a"),
        ev.GroupFinished("a"), ev.BatchRequested(1, ev.TRAIN, 1, 0), ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)),
        ev.BatchCommitted(1), ev.RunRecovered({}, RULES_VERSION, 0, 2), ev.RunRewound(1, 2, 0, 3),
        ev.GroupSubmitted("b", 1, ev.TRAIN, 0, 3, "submit"), ev.GroupRequeued("b", "why not"),
    )  # fmt: skip
    out = call(run).stdout.splitlines()

    assert "groups\tcommits undone by going back\t1" in out
    assert "tokens\ttrained on\t" not in "\n".join(out)
    assert "tokens\tof live groups\t10\t100.0%" in out
    assert "groups\ttrained on\t0 (0.0%)" in out
    assert "groups\tstarted over\t1" in out
    assert "trainer\tno process had the run open\t1.000 s\t8.3%" in out


def test_the_trainers_time_adds_up_from_the_first_event_to_the_last(kept: Kept) -> None:
    run = kept(
        started(), submit("a"), ev.SessionStarted("a", 0, 1), finish("a"), ev.GroupFinished("a"),
        ev.BatchRequested(1, ev.TRAIN, 1, 0), ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)), ev.BatchCommitted(1),
        ev.RunRecovered({}, RULES_VERSION, 0, 2), submit("b"), ev.BatchRequested(2, ev.TRAIN, 1, 0),
    )  # fmt: skip
    rows = [line.split("\t")[1:3] for line in call(run).stdout.splitlines() if line.startswith("trainer\t")]

    assert rows == [
        ["waited", "1.000 s"],
        ["... for the rules or the call itself: enough groups are sampleable", "1.000 s"],
        ["worked, or asked for nothing", "1.000 s"],
        ["until its first request after an opening", "7.000 s"],
        ["no process had the run open", "1.000 s"],
        ["from the first event to the last", "10.000 s"],
    ]
