"""The checker of logs knows the rules that a group is made, started over, given out and dropped by."""

import random
from typing import Any

import anyio
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.held import Window
from groupstate.core.invariants import Checker, violations
from groupstate.core.rules import PerDataset, Rules
from groupstate.log.memory import MemoryLog
from groupstate.simulate.loop import VirtualLoop, run_virtual

from .handmade_logs import evict, fail, failed, finish, log, sample, sampled, start, submit, want, whole

NARROW = Rules(batch_size=9, admission=gs.Capacity(lag_max=0, in_flight_max=1))
EXACT: dict[str, Any] = {"selection": "exact_version", "basis": "target_version", "lag_max": 0, "batch_size": 4}


def wrong(records: list[ev.Record], invariant: int) -> list[str]:
    return [found.text for found in violations(records) if found.invariant == invariant]


def spare(name: str, size: int, oversample: int) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, size, ev.TRAIN, 0, 1, "submit", oversample=oversample)


def made_for(version: int, name: str) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit", target_version=version)


# What is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [[], [want(1, 9)]], ids=["nobody waits", "a sampler waits"])
def test_more_groups_in_flight_than_capacity_allows_are_caught(waiting: list[ev.AnyEvent]) -> None:
    records = log(*waiting, submit("a", cause="admission"), submit("b", cause="admission"), rules=NARROW)

    assert wrong(records, 7) == ["admission 'b' takes the training groups in flight to 2, past 1"]
    assert wrong(log(submit("a"), submit("b"), rules=NARROW), 7) == []


def test_a_group_with_more_finished_sessions_than_it_needs_is_caught() -> None:
    records = log(
        spare("a", 2, 1), start("a", 0), start("a", 1), finish("a", 0), finish("a", 1), ev.GroupFinished("a")
    )  # fmt: skip

    assert wrong(records, 1) == ["group 'a' becomes finished although 2 of its sessions finished, and it needs 1"]


def test_a_group_that_has_all_that_it_needs_has_not_failed() -> None:
    ends = [spare("a", 2, 1), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]

    assert wrong(log(*ends, ev.GroupFailed("a")), 1) == ["group 'a' becomes failure although all its sessions finished"]
    assert violations(log(*ends, ev.GroupFinished("a"))) == []


def test_a_group_that_was_cancelled_may_have_all_that_it_needs_but_not_all_its_sessions() -> None:
    cancelled = ev.GroupFailed("a", cancelled=True)
    ends = [spare("a", 2, 1), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1), cancelled]

    assert violations(log(ends)) == []
    assert wrong(log(submit("a"), start("a"), finish("a"), cancelled), 1) == [
        "group 'a' becomes failure although all its sessions finished"
    ]


def test_the_rules_start_only_failed_groups_over_and_so_often() -> None:
    once = Rules(requeues_max=1)
    again = ev.GroupRequeued("a", "", by_rule=True)

    assert wrong(log(submit("a"), again, rules=once), 2) == ["the rules start group 'a' over while it is pending"]
    assert wrong(log(failed("a"), again), 2) == ["the rules start group 'a' over 1 times, and requeues_max is 0"]
    assert violations(log(failed("a"), again, rules=once)) == []


def test_a_batch_of_another_version_than_its_groups_are_made_for_is_caught() -> None:
    group = [made_for(1, "a"), start("a"), finish("a"), ev.GroupFinished("a")]

    assert wrong(log(group, sample(1, "a"), rules=Rules(**EXACT)), 6) == [
        "batch 1 of version 0 takes group 'a', which is made for version 1"
    ]


def test_a_refill_needs_as_many_sessions_as_what_it_replaces_whatever_is_to_spare() -> None:
    refill = ev.GroupSubmitted("r", 2, ev.TRAIN, 0, 1, "refill", oversample=1)
    records = log(failed("a"), evict("a", credit=1), refill)

    assert wrong(records, 5) == []
    assert wrong(log(failed("a"), evict("a", credit=1), submit("r", 2, cause="refill")), 5) != []


def test_stale_is_what_a_rule_of_the_users_own_says() -> None:
    records = [*whole("a"), evict("a", "stale", credit=1)]

    assert wrong(log(*records, rules=Rules(selection="pkg.mod:fn")), 6) == []
    assert wrong(log(*records), 6) != []


def test_committed_work_of_an_abandoned_line_counts_from_the_mark() -> None:
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(3), whole("a", stamp=3), sample(1, "a"), ev.BatchCommitted(1),
        ev.RunRecovered(Rules(basis="newest_token").to_dict(), 1, 0, 2), ev.RunRewound(1, 2, 0, 2),
        ev.WeightsPublished(1, 2), sample(2, "a"), rules=Rules(),
    )  # fmt: skip

    assert wrong(records, 9) == []


def test_a_run_that_goes_back_makes_only_newer_groups_count_from_there() -> None:
    records = log(
        whole("old"), whole("dropped", stamp=0), ev.WeightsPublished(1), ev.CheckpointMarked(1, 1, 1),
        ev.WeightsPublished(3), whole("new", stamp=3), evict("dropped", lag=3),
        ev.RunRecovered(Rules().to_dict(), 1, 1, 2), ev.RunRewound(1, 11, 1, 2),
        ev.WeightsPublished(2, 2), sample(1, "old", "new", lags=(2, 1)), ev.BatchCommitted(1),
    )  # fmt: skip

    assert violations(records) == []


def test_what_is_made_for_a_version_counts_from_it_wherever_the_run_goes_back_to() -> None:
    rules = Rules(**EXACT)
    records = log(
        ev.CheckpointMarked(1, 0, 1), made_for(1, "a"), start("a"), finish("a"), ev.GroupFinished("a"),
        ev.RunRecovered(rules.to_dict(), 1, 0, 2), ev.RunRewound(1, 2, 0, 2), ev.WeightsPublished(1, 2),
        ev.BatchRequested(1, ev.TRAIN, 1, 1), ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 1, (0,)), rules=rules,
    )  # fmt: skip

    assert violations(records) == []


def test_a_group_that_counts_from_the_version_gone_back_to_still_counts_from_its_submission() -> None:
    records = log(
        submit("a"), ev.CheckpointMarked(1, 0, 1), ev.RunRecovered(Rules().to_dict(), 1, 0, 2),
        ev.RunRewound(1, 3, 0, 2), start("a"), finish("a"), ev.GroupFinished("a"), sample(1, "a", lags=(1,)),
    )  # fmt: skip

    assert [found.witness for found in violations(records)] == [(2, 5, 10)]


def test_a_batch_moves_only_the_groups_that_it_still_holds() -> None:
    records = log(whole("a"), sample(1, "a"), sample(2, "a"), ev.BatchCommitted(1), sample(3, "a"))

    assert wrong(records, 4)[1:] == ["batch 3 takes group 'a', which batch 2 holds since event 9"]


@pytest.mark.parametrize(("event", "done"), [(ev.BatchCommitted(7), "committed"), (ev.BatchReturned(7), "returned")])
def test_what_is_done_to_a_batch_that_is_not_out_is_said(event: ev.AnyEvent, done: str) -> None:
    assert wrong(log(event), 4) == [f"batch 7 is {done}, and no such batch is out"]


def test_what_comes_back_has_the_lag_of_its_batch_but_not_where_it_is_made_for_a_version() -> None:
    again = [ev.BatchReturned(1), ev.WeightsPublished(1)]
    group = [made_for(0, "a"), start("a"), finish("a"), ev.GroupFinished("a"), *sample(1, "a"), *again]

    assert wrong(log(group, sample(2, "a", lags=(1,)), rules=Rules(**EXACT)), 11) == []
    assert wrong(log(group, sample(2, "a", lags=(0,))), 11) == []


def of_dataset(dataset: str, name: str) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit", dataset=dataset)


NEAR = {"near": PerDataset(lag_max=1)}


def test_a_dataset_has_its_own_bound_of_the_lag() -> None:
    group = [of_dataset("near", "a"), start("a"), finish("a"), ev.GroupFinished("a"), ev.WeightsPublished(2)]
    records = log(group, sample(1, "a", lags=(2,)), rules=Rules(lag_max=3, datasets=NEAR))

    assert wrong(records, 6) == ["batch 1 takes group 'a' with lag 2, past lag_max 1"]


def test_sampling_waits_for_whichever_dataset_is_at_its_own_bound() -> None:
    rules = Rules(lag_max=3, on_stale="wait", wait_gates="each", datasets=NEAR)
    flying = [of_dataset("far", "f"), of_dataset("near", "n"), ev.WeightsPublished(1)]

    assert wrong(log(whole("a"), flying, sample(1, "a", lags=(1,)), rules=rules), 6) == [
        "batch 1 is sampled while group 'n' in flight has lag 1, and at lag_max 1 sampling waits"
    ]


def test_only_a_failed_group_is_kept_without_a_trajectory() -> None:
    keep = Rules(mode="sync", empty="keep")
    finished = [submit("b"), start("b"), ev.SessionFinished("b", 0, 1, ()), ev.GroupFinished("b")]

    assert wrong(log(failed("a"), sample(1, "a"), rules=keep), 4) == []
    assert wrong(log(finished, sample(1, "b"), rules=keep), 4) == ["batch 1 takes group 'b', which has no trajectory"]


@pytest.mark.parametrize(("stamp", "lag", "from_seq"), [(None, 3, 2), (2, 1, 5), (0, 3, 5)])
def test_a_group_that_was_dispatched_anew_is_as_old_as_that(stamp: int | None, lag: int, from_seq: int) -> None:
    begun = [submit("a"), start("a"), ev.WeightsPublished(3), ev.GroupRequeued("a", weight_version=stamp)]
    ended = [start("a", attempt=2), finish("a", 0, 2), ev.GroupFinished("a")]

    assert violations(log(begun, ended, sample(1, "a", lags=(lag,)))) == []
    assert [found.witness for found in violations(log(begun, ended, sample(1, "a", lags=(9,))))] == [
        tuple(sorted((from_seq, 4, 10)))
    ]


def test_it_stays_so_when_it_starts_over_and_whatever_the_run_went_back_to() -> None:
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(4), submit("a", stamp=4),
        ev.RunRecovered(Rules().to_dict(), 1, 0, 2), ev.RunRewound(1, 2, 0, 2), ev.WeightsPublished(2, 2),
        ev.GroupRequeued("a", weight_version=1), ev.GroupRequeued("a"), start("a", attempt=3), finish("a", 0, 3),
        ev.GroupFinished("a"), sample(1, "a", lags=(1,)),
    )  # fmt: skip

    assert violations(records) == []


@pytest.mark.parametrize("rules", [Rules(mode="sync", empty="keep_all"), Rules(empty="keep_finished")])
def test_a_finished_one_is_under_other_rules(rules: Rules) -> None:
    finished = [submit("b"), start("b"), ev.SessionFinished("b", 0, 1, ()), ev.GroupFinished("b")]

    assert wrong(log(finished, sample(1, "b"), rules=rules), 4) == []


def test_a_session_without_spans_has_the_version_that_it_was_started_with() -> None:
    started = [submit("a"), ev.WeightsPublished(2), ev.SessionStarted("a", 0, 1, weight_version=2)]
    records = log(started, finish("a"), ev.GroupFinished("a"), sample(1, "a"), rules=Rules(basis="first_token"))

    assert violations(records) == []


def test_slots_count_all_that_is_ready() -> None:
    records = log(
        whole("a"), whole("b"), submit("x", cause="admission"), rules=Rules(admission=gs.Slots(n=1, ready_max=1))
    )

    assert wrong(records, 7) == [
        "admission 'x' takes the training groups to 1 in flight and 2 sampleable, past slots of n 1 and ready_max 1"
    ]


def test_capacity_counts_every_training_group_that_was_not_evicted() -> None:
    rules = Rules(batch_size=1, admission=gs.Capacity(lag_max=4))
    five = [
        *whole("committed"), *sample(1, "committed"), ev.BatchCommitted(1), *whole("sampled"), *sample(2, "sampled"),
        *whole("ready"), submit("running"), start("running"), submit("pending"),
    ]  # fmt: skip

    assert wrong(log(five, rules=rules), 7) == []
    assert wrong(log(five, submit("x", cause="admission"), rules=rules), 7) == [
        "admission 'x' makes 6 training groups, past the capacity of 5"
    ]


@pytest.mark.parametrize(
    ("waiting", "version", "caught"),
    [([want(1, 1)], 0, False), ([want(1, 1)], 1, True), ([], 0, True)],
    ids=["awaited", "for a later version", "nobody waits"],
)
def test_admission_may_make_what_a_sampler_of_this_version_waits_for(
    waiting: list[ev.AnyEvent], version: int, caught: bool
) -> None:
    rules = Rules(**EXACT, admission=gs.Slots(n=1))
    admitted = ev.GroupSubmitted("x", 1, ev.TRAIN, 0, 1, "admission", target_version=version)

    found = wrong(log(made_for(1, "a"), made_for(1, "b"), waiting, admitted, rules=rules), 7)
    assert bool(found) is caught


def twice_of_each() -> list[ev.AnyEvent]:
    """Whatever is counted between two batches, two times or more."""
    names = ("a", "b", "c", "d")
    events: list[ev.AnyEvent] = [
        ev.GroupSubmitted("of d", 1, ev.TRAIN, 0, 1, "submit", dataset="d"),
        *(ev.DatasetStarved("d", versions) for versions in (1, 2)),
    ]
    for name in names:
        events += [*failed(name), ev.GroupRequeued(name, "", by_rule=True), start(name, 0, 2), fail(name, 0, 2)]
        events += [ev.GroupFailed(name), ev.ResultFenced(name, 0, 1, "finished", "attempt"), evict(name, credit=1)]
        events += [ev.ResultFenced(name, 0, 2, "finished", "gone")]
    events += [submit("r", cause="refill"), submit("s", cause="refill")]
    events += [ev.RefillForfeited(1, "full"), ev.RefillForfeited(1, "full")]
    events += [*whole("e"), *whole("f"), *whole("z"), ev.WeightsPublished(2)]
    return [*events, *(ev.GroupEvicted(name, ("stale", "zero_variance"), 2, 0, 0.5, "acc") for name in ("e", "f"))]


SEVERAL = Rules(lag_max=1, filter_metric="acc", requeues_max=1)


@pytest.mark.parametrize("reason", ["", "damaged"])
def test_what_happens_several_times_before_a_batch_is_counted_by_both_sides_alike(reason: str) -> None:
    records = log(
        twice_of_each(), want(1), sampled(1, "z", lags=(2,)), ev.BatchReturned(1, reason),
        want(2), sampled(2, "z", lags=(2,)), rules=SEVERAL,
    )  # fmt: skip

    assert [found for found in violations(records) if found.invariant != 6] == []


class Forgetful(Book):
    """A book whose metrics leave out one of the numbers."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    def apply(self, record: ev.Record) -> None:
        if isinstance(record.event, ev.BatchRequested):
            setattr(self.window(ev.TRAIN), self.field, getattr(Window(), self.field))
        super().apply(record)


FORGOTTEN = {
    "evicted_groups": ["0 evicted_groups, the log holds 6"],
    "evicted": [
        "0 evicted/failed, the log holds 4", "0 evicted/stale, the log holds 2",
        "0 evicted/zero_variance, the log holds 2",
    ],
    "stale_lags": ["0 evicted/stale with lag 2, the log holds 2"],
    "filtered_values": ["0 evicted/zero_variance at 0.5, the log holds 2"],
    "submitted": ["0 submitted, the log holds 10"],
    "refills": ["0 refills, the log holds 2"],
    "forfeited": ["0 forfeited, the log holds 2"],
    "fenced": ["0 fenced, the log holds 4"],
    "requeued": ["0 requeued, the log holds 4"],
    "sessions_failed": ["0 failed/error, the log holds 8"],
    "starved": ["0 starved/d, the log holds 2"],
}  # fmt: skip


@pytest.mark.parametrize("field", FORGOTTEN)
def test_a_number_that_the_metrics_leave_out_is_caught(field: str) -> None:
    checker = Checker(Forgetful(field))
    for record in log(twice_of_each(), want(1), sampled(1, "z", lags=(2,)), rules=SEVERAL):
        checker.feed(record)

    texts = [found.text for found in checker.finish() if found.invariant == 11]
    assert texts == [f"the metrics of this batch count {text}" for text in FORGOTTEN[field]]


class Windowless(Book):
    """A book that has counted nothing for any batch."""

    def apply(self, record: ev.Record) -> None:
        super().apply(record)
        if isinstance(record.event, ev.BatchRequested):
            self.windows.clear()


def test_a_book_that_has_counted_nothing_is_caught() -> None:
    checker = Checker(Windowless())
    for record in log(whole("a"), sample(1, "a")):
        checker.feed(record)

    assert [found.text for found in checker.finish()] == [
        "the metrics of this batch count 0 submitted, the log holds 1"
    ]


# Real runs -------------------------------------------------------------------------------------------

RULES = {
    "freshest first": Rules(lag_max=2, selection="freshest_first", batch_size=4),
    "exact version": Rules(**EXACT, admission=gs.PerBatch(warmup=2)),
    "exact version, doomed": Rules(**EXACT, cancel_doomed=True, requeues_max=1),
    "oversample": Rules(oversample=2, survivors_min=2, batch_size=4, filter_metric="reward", spread="std"),
    "requeues": Rules(requeues_max=2, batch_size=4, lag_max=1, cancel_doomed=True),
    "deadlines": Rules(session_deadline_s=0.8, group_deadline_s=1.5, attempts_max=2, retry_delay_s=0.1, batch_size=4),
    "multiples": Rules(refill_multiple=3, batch_size=4, filter_metric="reward", admission=gs.Slots(n=6, ready_max=4)),
    "narrow": Rules(batch_size=4, admission=gs.Capacity(lag_max=2, in_flight_max=3), requeues_max=1),
    "datasets": Rules(
        batch_size=4, lag_max=2, starvation_versions=2, datasets={"a": PerDataset(share=0.7, lag_max=0, tolerance=1.0)}
    ),
    "wait by dataset": Rules(
        batch_size=4, lag_max=3, on_stale="wait", wait_gates="each", datasets={"a": PerDataset(lag_max=1)}
    ),
    "sync, kept empty": Rules(mode="sync", empty="keep", batch_size=4, requeues_max=1),
    "sync, all kept empty": Rules(mode="sync", empty="keep_all", empty_session="allow", batch_size=4),
    "async, finished ones kept empty": Rules(empty="keep_finished", empty_session="allow", lag_max=1),
    "sync, lost": Rules(
        mode="sync", failure="refill", cancel_doomed=True, filter_metric="reward", batch_size=4, refill_multiple=2,
        oversample=1,
    ),
}  # fmt: skip


def real_log(rules: Rules, seed: int) -> MemoryLog:
    """Three trainer steps with failures, slow sessions, releases, marks and validation."""
    rng = random.Random(seed)
    records = MemoryLog()
    source = {"a": range(900), "b": range(900)}

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        await anyio.sleep(rng.random())
        if rng.random() < 0.15:
            raise gs.RetryableError("boom")
        return gs.Trajectory(reward=float(rng.randrange(2)))

    async def steps(loop: VirtualLoop, first: int) -> None:
        async with gs.open_run(
            rules=rules, source=source, session=session, group_size=3, clock_ns=loop.clock_ns, log=records
        ) as run:
            for step in range(first, first + 3):
                batch = await run.sample(4, weight_version=step, timeout_s=1_000)
                await (run.release(batch) if rng.random() < 0.3 else run.commit(batch))
                await run.checkpoint()
            await run.validate(range(2))

    run_virtual(lambda loop: steps(loop, 0))
    return records


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
def test_the_log_of_a_real_run_under_these_rules_has_nothing_wrong(name: str, seed: int) -> None:
    records = list(real_log(RULES[name], seed).read())

    assert len(records) > 50
    assert violations(records) == []
