"""The checker catches batches, refills and evictions that can't be, and what is sampled or admitted past its bound."""

from typing import Any

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.core.rules import Rules

from .handmade_logs import evict, fail, failed, finish, log, sample, start, submit, want, whole, wrong

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
