"""Broken logs are caught, each with a sentence; logs of real runs have nothing wrong with them."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.invariants import INVARIANTS, Checker, Violation, violations
from groupstate.core.rules import RULES_VERSION, Rules
from groupstate.core.tracked import Tracked
from groupstate.log.memory import MemoryLog
from groupstate.simulate.loop import VirtualLoop, run_virtual

# Notation -----------------------------------------------------------------------------------------------


def log(*events: ev.AnyEvent | list[ev.AnyEvent], rules: Rules | None = None, version: int = 0) -> list[ev.Record]:
    """A log that begins with RunStarted; lists in it are flattened."""
    flat: list[ev.AnyEvent] = [ev.RunStarted("r", (rules or Rules()).to_dict(), RULES_VERSION, version)]
    for event in events:
        flat.extend(event if isinstance(event, list) else [event])
    return [ev.Record(seq, seq * 1_000, event) for seq, event in enumerate(flat, 1)]


def submit(name: str, n: int = 1, *, stamp: int = 0, val: bool = False, cause: ev.Cause = "submit") -> ev.AnyEvent:
    return ev.GroupSubmitted(name, n, ev.VALIDATION if val else ev.TRAIN, stamp, 1, cause)


def start(name: str, session: int = 0, attempt: int = 1) -> ev.AnyEvent:
    return ev.SessionStarted(name, session, attempt)


def rows(*versions: int, metrics: dict[str, float] | None = None) -> tuple[ev.TrajectoryRecord, ...]:
    spans = tuple(ev.VersionSpan(i, i + 1, version) for i, version in enumerate(versions))
    return (ev.TrajectoryRecord(0, metrics or {"acc": 1.0}, 1, len(versions), spans),)


def finish(name: str, session: int = 0, attempt: int = 1, *versions: int) -> ev.AnyEvent:
    return ev.SessionFinished(name, session, attempt, rows(*versions))


def fail(name: str, session: int = 0, attempt: int = 1, retry: float | None = None) -> ev.AnyEvent:
    return ev.SessionFailed(name, session, attempt, "error", "boom", retry)


def done(name: str) -> ev.AnyEvent:
    return ev.GroupFinished(name)


def whole(
    name: str, *versions: int, val: bool = False, stamp: int = 0, cause: ev.Cause = "submit"
) -> list[ev.AnyEvent]:
    """A group of one session, from its submission to its end."""
    return [submit(name, val=val, stamp=stamp, cause=cause), start(name), finish(name, 0, 1, *versions), done(name)]


def failed(name: str) -> list[ev.AnyEvent]:
    return [submit(name), start(name), fail(name), ev.GroupFailed(name)]


def evict(name: str, *reasons: ev.EvictReason, lag: int = 0, credit: int = 0) -> ev.AnyEvent:
    return ev.GroupEvicted(name, reasons or ("failed",), lag, credit)


def want(number: int = 1, size: int = 1, *, val: bool = False) -> ev.AnyEvent:
    return ev.BatchRequested(number, ev.VALIDATION if val else ev.TRAIN, size, 0)


def sampled(batch: int, *names: str, lags: tuple[int, ...] | None = None, val: bool = False) -> ev.AnyEvent:
    partition = ev.VALIDATION if val else ev.TRAIN
    return ev.BatchSampled(batch, batch, partition, names, 0, (0,) * len(names) if lags is None else lags)


def sample(batch: int, *names: str, lags: tuple[int, ...] | None = None, val: bool = False) -> list[ev.AnyEvent]:
    return [want(batch, len(names), val=val), sampled(batch, *names, lags=lags, val=val)]


def wrong(records: Iterable[ev.Record], invariant: int) -> list[str]:
    """What is wrong with the log under this invariant."""
    return [violation.text for violation in violations(records) if violation.invariant == invariant]


# Good logs ----------------------------------------------------------------------------------------------

RULES = {
    "async filter": Rules(filter_metric="reward", lag_max=1, batch_size=4),
    "async wait": Rules(lag_max=2, on_stale="wait", batch_size=4),
    "async oldest token": Rules(lag_max=5, basis="oldest_token", batch_size=4),
    "async retries": Rules(attempts_max=3, survivors_min=2, retry_delay_s=0.1),
    "async capacity": Rules(lag_max=1, batch_size=4, admission=gs.Capacity(lag_max=1)),
    "sync": Rules(mode="sync", batch_size=4),
    "sync filter": Rules(mode="sync", filter_metric="reward", batch_size=4, failure="refill"),
}


def real_log(rules: Rules, seed: int) -> MemoryLog:
    """Six trainer steps under `rules`, with failures, late versions, releases, validation and a second opening."""
    rng = random.Random(seed)
    records = MemoryLog()

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        await anyio.sleep(rng.random())
        if rng.random() < 0.1:
            raise gs.RetryableError("boom")
        version = rng.randrange(3)
        return gs.Trajectory(
            prompt_ids=(1,),
            response_ids=(2, 3),
            log_probs=(0.0, 0.0),
            reward=float(rng.randrange(2)),
            spans=(gs.VersionSpan(0, 1, version), gs.VersionSpan(1, 2, version + 1)),
        )

    async def main(loop: VirtualLoop) -> None:
        async with gs.open_run(
            rules=rules, source=range(300), session=session, group_size=3, clock_ns=loop.clock_ns, log=records
        ) as run:
            for step in range(6):
                batch = await run.sample(4, weight_version=step)
                await (run.release(batch) if rng.random() < 0.3 else run.commit(batch))
                await run.checkpoint()
            await run.validate(range(2))

    run_virtual(main)
    return records


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_the_log_of_a_real_run_has_nothing_wrong(name: str, seed: int) -> None:
    records = list(real_log(RULES[name], seed).read())

    assert len(records) > 100
    assert violations(records) == []


def rewound(*, evicts: bool = True) -> list[ev.AnyEvent]:
    """A group before a mark and two behind it, one of validation, and the run goes back."""
    return [
        *whole("before"), ev.CheckpointMarked(1, 0, 1), *whole("after"), *whole("val", val=True), submit("flying"),
        ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 2), ev.RunRewound(1, 6, 0, 2, evicts),
    ]  # fmt: skip


def test_a_run_that_goes_back_may_evict_what_ended_since() -> None:
    text = "group 'before' is evicted as stale under rules that drop nothing for its lag"

    assert violations(log(rewound(), evict("after", "stale", credit=1), ev.WeightsPublished(1, 2))) == []
    assert violations(log(rewound(evicts=False))) == []
    assert text in str(violations(log(rewound(), evict("before", "stale"), evict("after", "stale")))[0])
    assert "is evicted as stale under rules" in str(violations(log(rewound(evicts=False), evict("after", "stale")))[0])


def test_a_run_that_goes_back_and_evicts_leaves_nothing_over_but_to_the_next_opening() -> None:
    again = ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 3)
    (left,) = violations(log(rewound(), ev.GroupRequeued("flying", "recovery"), again))

    assert (left.invariant, left.group_id) == (6, "after")
    assert "group 'after' is still there at GroupRequeued" in left.text
    assert violations(log(rewound(), again)) == []


def test_a_recovered_and_rewound_log_has_nothing_wrong() -> None:
    records = log(
        whole("a"), whole("b", 4), submit("c"), start("c"), whole("v", val=True),
        sample(1, "a"), ev.CheckpointMarked(1, 0, 1), ev.BatchCommitted(1),
        ev.WeightsPublished(3), sample(2, "b", lags=(3,)), ev.BatchCommitted(2), submit("late", stamp=3),
        ev.RunRecovered({}, RULES_VERSION, 0, 2), ev.RunRewound(1, 18, 0, 2), ev.GroupRequeued("c", "recovery"),
        ev.WeightsPublished(1, 2), sample(3, "a", "b", lags=(0, 3)), ev.BatchReturned(3),
        start("c", 0, 2), ev.ResultFenced("c", 0, 1, "finished", "attempt"), finish("c", 0, 2), done("c"),
        sample(4, "c", lags=(1,)), ev.BatchCommitted(4), ev.ResultFenced("c", 0, 2, "finished", "gone"),
        ev.RunClosed(),
    )  # fmt: skip

    assert violations(records) == []


@pytest.mark.parametrize(
    ("basis", "lag"), [("dispatch", 9), ("first_token", 4), ("oldest_token", 6), ("newest_token", 2)]
)
def test_the_lag_is_counted_from_what_the_basis_says(basis: Any, lag: int) -> None:
    group = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0, 1, 5, 3, 7), finish("a", 1, 1, 6), done("a")]
    records = log(group, ev.WeightsPublished(9), sample(1, "a", lags=(lag,)), rules=Rules(basis=basis))

    assert violations(records) == []


def test_rows_without_spans_are_counted_from_the_submission() -> None:
    records = log(whole("a"), ev.WeightsPublished(2), sample(1, "a", lags=(2,)), rules=Rules(basis="first_token"))

    assert violations(records) == []


def test_without_a_first_token_the_oldest_one_counts() -> None:
    second = ev.TrajectoryRecord(1, {}, 1, 1, (ev.VersionSpan(0, 1, 2),))
    two = ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0), second))
    records = log(
        submit("a"), start("a"), two, done("a"), ev.WeightsPublished(3), sample(1, "a", lags=(1,)),
        rules=Rules(basis="first_token"),
    )  # fmt: skip

    assert violations(records) == []


def test_any_prefix_of_a_good_log_is_good() -> None:
    records = list(real_log(RULES["sync filter"], 5).read())
    checker = Checker()

    assert [checker.feed(record) for record in records] == [[]] * len(records)
    assert checker.finish() == []


# 1: the end after every session --------------------------------------------------------------------------


def test_a_group_that_ends_before_its_sessions_is_caught() -> None:
    records = log(submit("a", 2), start("a", 0), finish("a", 0), done("a"))

    assert violations(records)[0] == Violation(
        1, 5, "a", "group 'a' becomes finished although session 1 has not ended: attempt 1 is its latest", (2, 5)
    )
    assert str(violations(records)[0]).startswith("event 5: invariant 1: group 'a'")


def test_a_retry_that_is_due_has_not_ended() -> None:
    records = log(submit("a"), start("a"), fail("a", retry=1.0), ev.GroupFailed("a"))

    assert "attempt 2 is its latest" in wrong(records, 1)[0]


def test_a_group_that_was_started_over_waits_for_its_next_attempts() -> None:
    records = log(failed("a"), ev.GroupRequeued("a"), ev.GroupFailed("a"))

    assert "attempt 2 is its latest" in wrong(records, 1)[0]


def test_a_result_of_an_old_attempt_does_not_end_the_session() -> None:
    records = log(submit("a"), start("a"), fail("a", retry=1.0), start("a", 0, 2), finish("a", 0, 1), done("a"))

    assert "session 0 has not ended: attempt 2" in wrong(records, 1)[0]


def test_an_end_that_does_not_follow_its_last_session_is_caught() -> None:
    records = log(submit("a"), start("a"), finish("a"), ev.WeightsPublished(1), done("a"))

    assert wrong(records, 1) == [
        "the last session of group 'a' ended at event 4, and the next event is WeightsPublished instead of the "
        "group's end"
    ]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ev.GroupFinished("a"), "1 of its 2 sessions failed"),
        (ev.GroupFinished("a", partial=True), "1 sessions finished, and survivors_min is 2"),
    ],
)
def test_a_group_that_finished_although_sessions_failed_is_caught(end: ev.AnyEvent, text: str) -> None:
    two = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]

    assert text in wrong(log(two, end, rules=Rules(survivors_min=2)), 1)[0]


def test_enough_survivors_finish_a_group() -> None:
    two = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]

    assert violations(log(two, ev.GroupFinished("a", partial=True), rules=Rules(survivors_min=1))) == []


def test_a_group_that_failed_although_all_sessions_finished_is_caught() -> None:
    assert "all its sessions finished" in wrong(log(submit("a"), start("a"), finish("a"), ev.GroupFailed("a")), 1)[0]


def test_a_running_group_is_not_evicted() -> None:
    assert wrong(log(submit("a"), start("a"), evict("a")), 1) == ["group 'a' is evicted while it is running"]


# 2: nothing after the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [start("a"), finish("a"), fail("a"), done("a")])
def test_what_happens_to_a_group_after_its_end_is_caught(late: ev.AnyEvent) -> None:
    assert "after group 'a' was finished at event 5" in wrong(log(whole("a"), late), 2)[0]


def test_what_a_session_did_after_the_end_of_its_group_is_said() -> None:
    assert wrong(log(whole("a"), fail("a")), 2) == [
        "SessionFailed of session 0 comes after group 'a' was finished at event 5"
    ]


def test_a_failed_group_that_fails_again_is_caught() -> None:
    assert "GroupFailed comes after group 'a' was failed" in wrong(log(failed("a"), ev.GroupFailed("a")), 2)[0]


def test_a_group_that_is_with_the_trainer_is_not_requeued() -> None:
    assert wrong(log(whole("a"), sample(1, "a"), ev.GroupRequeued("a")), 2) == [
        "GroupRequeued comes after group 'a' was sampled at event 7"
    ]


# 3: conservation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        start("x"), fail("x"), done("x"), evict("x"), ev.GroupRequeued("x"),
        ev.ResultFenced("x", 0, 1, "finished", "gone"),
    ],
)  # fmt: skip
def test_an_event_of_a_group_that_was_never_submitted_is_caught(event: ev.AnyEvent) -> None:
    assert wrong(log(event), 3) == ["event 2 names group 'x', which was never submitted"]


def test_a_batch_with_a_group_that_was_never_submitted_is_caught() -> None:
    records = log(whole("a"), sample(1, "a", "x"), ev.BatchReturned(1), sample(2, "a"))

    assert wrong(records, 3) == ["event 7 names group 'x', which was never submitted"]


def test_a_group_submitted_twice_is_caught() -> None:
    assert wrong(log(submit("a"), submit("a")), 3) == ["group 'a' is submitted again; the first time was event 2"]


class Miscounting(Book):
    """A book with a fault in one of its numbers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def apply(self, record: ev.Record) -> None:
        super().apply(record)
        if self.fault == "phase" and isinstance(record.event, ev.SessionStarted):
            group = self.groups.pop(record.event.group_id)
            self.shelves[group.partition].remove(group)
        elif self.fault == "total" and isinstance(record.event, ev.GroupSubmitted):
            self.totals["submitted"] += 1
        elif self.fault == "phantom" and isinstance(record.event, ev.GroupFinished):
            self.groups["phantom"] = self.groups["b"]
        elif self.fault == "evicted" and isinstance(record.event, ev.GroupEvicted):
            self.totals["evicted"] -= 1
        elif self.fault == "committed" and isinstance(record.event, ev.GroupEvicted):
            self.totals["committed"] += 2
        elif self.fault == "credits" and isinstance(record.event, ev.GroupEvicted):
            self.credits.clear()
        elif self.fault == "window" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).evicted["stale"] += 1
        elif self.fault == "lag" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).stale_lags.append(3)
        elif self.fault == "filtered" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).filtered_values[0.5] += 1


@pytest.mark.parametrize(
    ("fault", "invariant", "text"),
    [
        ("phase", 3, "the book holds 0 running groups of 'train', the events make it 1"),
        ("total", 3, "the book counts 2 submitted groups, the events make it 1"),
        ("phantom", 3, "the book holds 2 groups, the events make it 1"),
        ("evicted", 3, "the book counts 0 evicted groups, the events make it 1"),
        ("committed", 3, "the book counts 2 committed groups, the events make it 0"),
        ("credits", 5, "the book owes 0 refills, the events make it 1"),
        ("window", 11, "the metrics of this batch count 1 evicted/stale, the log holds 0"),
        ("lag", 11, "the metrics of this batch count 1 evicted/stale with lag 3, the log holds 0"),
        ("filtered", 11, "the metrics of this batch count 1 evicted/zero_variance at 0.5, the log holds 0"),
    ],
)
def test_a_book_that_counts_wrong_is_caught(fault: str, invariant: int, text: str) -> None:
    checker = Checker(Miscounting(fault))
    for record in log(failed("a"), evict("a", credit=1), whole("b"), sample(1, "b"), whole("c"), sample(2, "c")):
        checker.feed(record)

    assert [(found.invariant, found.text) for found in checker.finish()] == [(invariant, text)]


@pytest.mark.parametrize("fault", ["phase", "total", "phantom", "evicted", "committed", "credits"])
def test_a_book_that_others_drive_is_held_against_the_counts(fault: str) -> None:
    book, checker = Miscounting(fault), Checker(replays=False)
    found: list[Violation] = []
    for record in log(failed("a"), evict("a", credit=1), whole("b")):
        assert checker.feed(record) == []
        book.apply(record)
        found = checker.compare(book)
        if found:
            break

    assert len(found) == 1
    assert found[0].text.startswith("the book ")


def test_a_book_that_others_drive_is_right() -> None:
    book, checker = Book(), Checker(replays=False)
    for record in log(failed("a"), evict("a", credit=1), whole("b"), sample(1, "b"), whole("c"), sample(2, "c")):
        checker.feed(record)
        book.apply(record)

        assert checker.compare(book) == []


def test_feeding_gives_only_what_the_record_makes_wrong() -> None:
    checker = Checker()
    counts = [len(checker.feed(record)) for record in log(failed("a"), evict("a", lag=3), submit("b"))]

    assert counts == [0, 0, 0, 0, 0, 1, 0]


class Losing(Book):
    """A book that loses a group when weights are published."""

    def apply(self, record: ev.Record) -> None:
        super().apply(record)
        if isinstance(record.event, ev.WeightsPublished):
            group = self.groups.pop("a")
            self.shelves[group.partition].remove(group)


@pytest.mark.parametrize(("before", "val"), [([], False), ([*failed("b"), evict("b")], True)], ids=["train", "val"])
def test_a_group_that_is_lost_at_an_event_of_no_group_is_caught_there(before: list[ev.AnyEvent], val: bool) -> None:
    checker = Checker(Losing())
    for record in log(before, submit("a", val=val), ev.WeightsPublished(1)):
        checker.feed(record)

    partition = ev.VALIDATION if val else ev.TRAIN
    assert [(found.seq, found.text) for found in checker.finish()] == [
        (len(before) + 3, f"the book holds 0 pending groups of {partition!r}, the events make it 1")
    ]


def test_a_checker_without_a_book_replays_nothing() -> None:
    checker = Checker(replays=False)
    for record in log(whole("a"), done("a")):
        checker.feed(record)

    assert [found.invariant for found in checker.finish()] == [2]


def test_a_log_without_a_beginning_is_followed_under_the_rules_by_default_and_from_version_0() -> None:
    records = [ev.Record(seq, seq, event) for seq, event in enumerate([*whole("a"), *sample(1, "a")], 1)]

    assert [found.invariant for found in violations(records)] == [9]


def test_a_comparison_gives_only_what_it_found_itself() -> None:
    book, checker = Book(), Checker(replays=False)
    for record in log(failed("a"), evict("a", lag=3)):
        checker.feed(record)
        book.apply(record)

    assert [found.invariant for found in checker.found] == [11]
    assert checker.compare(book) == []


def test_lags_and_filtered_values_are_counted_by_both_sides_alike() -> None:
    stale = ev.GroupEvicted("a", ("stale", "zero_variance"), 2, 0, -0.0, "acc")
    flat = ev.GroupEvicted("b", ("zero_variance",), 2, 0, 0.0, "acc")
    records = log(
        whole("a"), whole("b"), whole("c"), ev.WeightsPublished(2), stale, flat, want(), sampled(1, "c", lags=(2,)),
        rules=Rules(lag_max=1, filter_metric="acc"),
    )  # fmt: skip

    assert wrong(records, 11) == []


# 4: one batch, whole, with a trajectory ------------------------------------------------------------------


def test_a_group_in_two_batches_is_caught() -> None:
    records = log(whole("a"), sample(1, "a"), sample(2, "a"))

    assert wrong(records, 4) == ["batch 2 takes group 'a', which batch 1 holds since event 7"]


def test_a_committed_group_is_not_sampled_again() -> None:
    records = log(whole("a"), sample(1, "a"), ev.BatchCommitted(1), sample(2, "a"))

    assert wrong(records, 4) == ["batch 2 takes group 'a', which was committed with batch 1 at event 8"]


def test_an_evicted_group_is_not_sampled() -> None:
    records = log(failed("a"), evict("a"), sample(1, "a"))

    assert wrong(records, 4) == ["batch 1 takes group 'a', which was evicted at event 6"]


def test_a_group_in_flight_is_not_sampled() -> None:
    records = log(submit("a", 2), start("a", 0), finish("a", 0), sample(1, "a"), ev.BatchReturned(1))

    assert wrong(records, 4) == ["batch 1 takes group 'a', which is running: sessions [1] have not ended"]


def test_a_group_without_a_trajectory_is_sampled_in_validation_only() -> None:
    empty: list[ev.AnyEvent] = [
        submit("a"),
        submit("v", val=True),
        fail("a"),
        ev.GroupFailed("a"),
        fail("v"),
        ev.GroupFailed("v"),
    ]

    assert violations(log(empty, sample(1, "v", val=True))) == []
    assert wrong(log(empty, sample(1, "a")), 4) == ["batch 1 takes group 'a', which has no trajectory"]


def test_a_group_of_another_partition_is_caught() -> None:
    records = log(whole("v", val=True), sample(1, "v"))

    assert wrong(records, 4) == ["batch 1 takes group 'v' of partition 'val' for partition 'train'"]


@pytest.mark.parametrize("again", [ev.BatchCommitted(1), ev.BatchReturned(1)])
def test_a_batch_that_is_not_out_is_caught(again: ev.AnyEvent) -> None:
    records = log(whole("a"), sample(1, "a"), ev.BatchCommitted(1), again)

    assert "and no such batch is out" in wrong(records, 4)[0]


def test_a_sampled_group_is_not_evicted() -> None:
    records = log(whole("a"), sample(1, "a"), evict("a"), ev.BatchCommitted(1))

    assert wrong(records, 4) == ["group 'a' is evicted although it was sampled with batch 1"]


# 5: credits ----------------------------------------------------------------------------------------------


def test_credit_is_spent_once() -> None:
    records = log(failed("a"), evict("a", credit=1), submit("b", cause="refill"), submit("c", cause="refill"))

    assert wrong(records, 5) == ["group 'c' is submitted as a refill, and no credit is left"]


def test_more_forfeited_than_owed_is_caught() -> None:
    records = log(failed("a"), evict("a", credit=1), ev.RefillForfeited(2, "batch full"))

    assert wrong(records, 5)[0] == "2 refills are forfeited, and 1 are owed"


def test_a_group_is_evicted_once() -> None:
    records = log(failed("a"), evict("a", credit=1), evict("a", credit=1))

    assert wrong(records, 5) == ["group 'a' is evicted again; the first time was event 6"]


@pytest.mark.parametrize(
    ("mode", "reasons", "credit", "text"),
    [
        ("async", ("failed", "stale"), 2, "earns 2 refills; failed and stale in async mode earns 1"),
        ("sync", ("zero_variance",), 3, "earns 3 refills; zero_variance in sync mode earns 2"),
        ("sync", ("surplus",), 1, "surplus in sync mode earns 0"),
        ("async", ("failed", "failed"), 1, "a reason is needed, and each counts once"),
        ("async", ("failed",), -1, "earns -1 refills"),
    ],
)
def test_credit_beyond_what_the_reasons_earn_is_caught(mode: Any, reasons: Any, credit: int, text: str) -> None:
    rules = Rules(mode=mode, lag_max=0 if mode == "async" else None, batch_size=1)
    records = log(failed("a"), ev.WeightsPublished(1), evict("a", *reasons, lag=1, credit=credit), rules=rules)

    assert text in wrong(records, 5)[0]


def test_an_eviction_without_a_reason_is_caught() -> None:
    assert "a reason is needed" in wrong(log(failed("a"), ev.GroupEvicted("a", (), 0, 0)), 5)[0]


def test_a_refill_has_the_size_of_the_group_that_it_replaces() -> None:
    records = log(failed("a"), evict("a", credit=1), submit("b", 2, cause="refill"))

    assert wrong(records, 5) == ["refill 'b' needs 2 sessions, and group 'a', which it replaces, needed 1"]


# 6: lag --------------------------------------------------------------------------------------------------

DROP = Rules(lag_max=1)
WAIT = Rules(lag_max=1, on_stale="wait")


def test_a_stale_group_is_not_sampled() -> None:
    records = log(whole("a"), ev.WeightsPublished(2), sample(1, "a", lags=(2,)), rules=DROP)

    assert wrong(records, 6) == ["batch 1 takes group 'a' with lag 2, past lag_max 1"]


def test_the_bound_itself_is_kept() -> None:
    records = log(whole("a"), ev.WeightsPublished(1), sample(1, "a", lags=(1,)), rules=DROP)
    evicted = log(whole("a"), ev.WeightsPublished(1), evict("a", "stale", lag=1, credit=1), rules=DROP)

    assert violations(records) == []
    assert wrong(evicted, 6) == ["group 'a' is evicted as stale with lag 1, and lag_max 1 is kept"]


def test_past_the_bound_a_group_is_evicted() -> None:
    records = log(whole("a"), ev.WeightsPublished(2), evict("a", "stale", lag=2, credit=1), rules=DROP)

    assert violations(records) == []


def test_rules_without_a_bound_evict_nothing_as_stale() -> None:
    records = log(whole("a"), ev.WeightsPublished(2), evict("a", "stale", lag=2, credit=1), rules=WAIT)

    assert "under rules that drop nothing" in wrong(records, 6)[0]


def test_nothing_is_sampled_while_a_group_in_flight_is_at_the_bound() -> None:
    busy: list[ev.AnyEvent] = [
        submit("v", val=True),
        *whole("a"),
        submit("new", stamp=1),
        submit("slow"),
        ev.WeightsPublished(1),
    ]
    records = log(busy, sample(1, "a", lags=(1,)), rules=WAIT)

    assert wrong(records, 6) == [
        "batch 1 is sampled while group 'slow' in flight has lag 1, and at lag_max 1 sampling waits"
    ]


def test_groups_in_flight_below_the_bound_hold_nothing() -> None:
    records = log(whole("a"), submit("new", stamp=1), ev.WeightsPublished(1), sample(1, "a", lags=(1,)), rules=WAIT)

    assert violations(records) == []


# 7: bounds -----------------------------------------------------------------------------------------------


def test_a_refill_past_the_batches_in_flight_is_caught() -> None:
    rules = Rules(mode="sync", filter_metric="acc", batch_size=1, in_flight_batches_max=1)
    records = log(
        whole("a"), want(), evict("a", "zero_variance", credit=2),
        submit("b", cause="refill"), submit("c", cause="refill"), rules=rules,
    )  # fmt: skip

    assert wrong(records, 7) == ["refill 'c' takes the training groups in flight to 2, past 1"]


@pytest.mark.parametrize("ready_max", [0, 1])
def test_admission_past_the_slots_is_caught(ready_max: int) -> None:
    rules = Rules(admission=gs.Slots(n=2, ready_max=ready_max))
    three: list[ev.AnyEvent] = [
        submit("a", cause="admission"),
        *whole("b", cause="admission"),
        submit("c", cause="admission"),
    ]
    texts = wrong(log(three, submit("d", cause="admission"), rules=rules), 7)

    assert ["past slots of n 2" in text for text in texts] == [True] * (2 - ready_max)


def test_admission_past_the_capacity_is_caught() -> None:
    rules = Rules(batch_size=1, admission=gs.Capacity(lag_max=1))
    two = [submit("user"), submit("a", cause="admission")]

    assert violations(log(two, rules=rules)) == []
    assert wrong(log(two, submit("b", cause="admission"), rules=rules), 7) == [
        "admission 'b' makes 3 training groups, past the capacity of 2"
    ]


def test_a_waiting_sample_gets_its_groups_whatever_admission_keeps_ahead() -> None:
    rules = Rules(admission=gs.Slots(n=1))
    records = log(want(1, 2), submit("a", cause="admission"), submit("b", cause="admission"), rules=rules)

    assert violations(records) == []
    assert wrong([*records[:2], *renumbered(ev.BatchRequestCancelled(1), *(r.event for r in records[2:]))], 7)


def renumbered(*events: ev.AnyEvent) -> list[ev.Record]:
    return [ev.Record(seq, seq, event) for seq, event in enumerate(events, 3)]


# 8: validation -------------------------------------------------------------------------------------------


def test_a_validation_group_is_not_evicted() -> None:
    records = log(whole("v", val=True), evict("v", "zero_variance"))

    assert wrong(records, 8) == ["group 'v' of partition 'val' is evicted"]


def test_a_validation_group_is_no_refill() -> None:
    records = log(failed("a"), evict("a", credit=1), submit("v", val=True, cause="refill"))

    assert wrong(records, 8) == ["group 'v' of partition 'val' is submitted as a refill"]


# 9: replay -----------------------------------------------------------------------------------------------


def test_a_session_that_the_group_does_not_have_stops_the_replay() -> None:
    records = log(submit("a"), ev.SessionStarted("a", 7, 1), ev.SessionFailed("a", -1, 1, "error"))

    assert wrong(records, 9) == ["a replay stops here: group 'a' has sessions 0 to 0, so there is no session 7"]


def test_a_fault_without_a_text_is_named_by_its_kind() -> None:
    records = log(whole("a"), sampled(1, "a"))

    assert wrong(records, 9) == ["a replay stops here: AssertionError"]


def test_a_gap_is_caught() -> None:
    records = log(submit("a"), submit("b"), start("a"))

    assert wrong(records[:2] + records[3:], 9) == [
        "event 4 comes after event 2, so what lies between can't be replayed"
    ]


def test_run_started_is_the_first_event_and_no_other() -> None:
    started = log()[0].event

    assert "RunStarted is the first event" in wrong([ev.Record(1, 0, submit("a"))], 9)[0]
    assert "event 2 is RunStarted" in wrong(log(started), 9)[0]


def test_rules_that_cannot_be_read_are_named() -> None:
    records = [ev.Record(1, 0, ev.RunStarted("r", {"lag_maxx": 1}, RULES_VERSION, 0))]

    assert "did you mean 'lag_max'?" in wrong(records, 9)[0]


# 11: numbers ---------------------------------------------------------------------------------------------


def test_a_lag_that_is_not_what_the_versions_say_is_caught() -> None:
    evicted = log(failed("a"), evict("a", lag=3))

    assert wrong(evicted, 11) == ["group 'a' is evicted with lag 3, and its lag is 0"]
    assert wrong(log(whole("a"), sample(1, "a", lags=(3,))), 11) == [
        "batch 1 gives group 'a' with lag 3, and its lag is 0"
    ]


def test_a_lag_is_given_for_each_group() -> None:
    records = log(whole("a"), whole("b"), want(), sampled(1, "a", "b", lags=(0,)), want(2), sampled(2, "b"))

    assert wrong(records, 11) == ["batch 1 has 2 groups and 1 lags"]


def test_the_page_on_debugging_lists_the_invariants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")

    assert "".join(f"| {number} | {sentence} |\n" for number, sentence in INVARIANTS.items()) in page


# What the checker knows of a group -------------------------------------------------------------------


def test_the_checker_counts_rows_and_takes_the_version_of_the_start_where_a_session_has_no_spans() -> None:
    group = Tracked("g", 2, "train", 5, 3, 5, kept_empty=True)
    group.begin([1, 1], 3)
    group.starts[0] = 7
    group.take_rows(0, (ev.TrajectoryRecord(0),), 4)
    alone = (group.first_version, group.oldest_version, group.newest_version)
    group.starts[1] = 2
    group.take_rows(1, (ev.TrajectoryRecord(0, spans=(ev.VersionSpan(0, 1, 9),)), ev.TrajectoryRecord(1)), 5)

    assert (alone, group.rows, group.kept_empty) == ((7, 7, 7), 3, False)
    assert (group.first_version, group.oldest_version, group.newest_version) == (7, 7, 9)


def test_a_session_without_a_trajectory_has_no_version_though_one_is_known_of_its_start() -> None:
    group = Tracked("g", 1, "train", 5, 3, 5)
    group.begin([1], 3)
    group.starts[0] = 7
    group.take_rows(0, (), 4)

    assert (group.rows, group.first_version, group.version_seqs) == (0, None, {})


def test_a_trajectory_of_which_no_version_is_known_has_none() -> None:
    group = Tracked("g", 1, "train", 5, 3, 5)
    group.begin([1], 3)
    group.starts[0] = None
    group.take_rows(0, (ev.TrajectoryRecord(0),), 4)

    assert (group.rows, group.first_version, group.version_seqs) == (1, None, {})


@pytest.mark.parametrize("versions", [(4, 6), (6, 4)])
def test_of_two_versions_the_event_with_each_that_is_the_oldest_the_newest_or_the_first_is_known(
    versions: tuple[int, int],
) -> None:
    group = Tracked("g", 2, "train", 5, 3, 5)
    group.begin([1, 1], 3)
    row = ev.TrajectoryRecord(0, spans=tuple(ev.VersionSpan(n, n + 1, version) for n, version in enumerate(versions)))
    group.take_rows(0, (row,), 8)
    group.take_rows(1, (row,), 9)

    assert (group.first_version, group.oldest_version, group.newest_version) == (versions[0], 4, 6)
    assert group.version_seqs == {"first_token": 8, "oldest_token": 8, "newest_token": 8}


def test_a_session_that_starts_in_a_later_attempt_is_followed() -> None:
    """The replay says that it can't; the counts go on from what the log says."""
    row = (ev.TrajectoryRecord(0, {"reward": 1.0}),)
    records = log(submit("a"), ev.SessionStarted("a", 0, 2), ev.SessionFinished("a", 0, 2, row), ev.GroupFinished("a"))
    checker = Checker(replays=False)
    for record in records:
        checker.take(record)

    assert checker.found == []
    assert [found.invariant for found in violations(records)] == [9]
