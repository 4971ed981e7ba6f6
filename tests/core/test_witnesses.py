"""Each thing that is wrong with a log names the two or three events that can't all be true, and no others: with any one
of them taken away, or made right, it isn't wrong any more."""

import re
from typing import Any

import attrs
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.invariants import INVARIANTS, Checker, Violation, violations
from groupstate.core.rules import RULES_VERSION, Rules

from .handmade_logs import (
    Miscounting,
    done,
    evict,
    fail,
    failed,
    finish,
    log,
    sample,
    sampled,
    start,
    submit,
    want,
    whole,
)

Events = list[ev.AnyEvent]
PUBLISHED = ev.WeightsPublished(1)


def begin(rules: Rules | None = None, version: int = 0) -> ev.AnyEvent:
    return ev.RunStarted("r", (rules or Rules()).to_dict(), RULES_VERSION, version)


@attrs.frozen
class Case:
    invariant: int
    text: str
    """Part of the sentence."""
    events: Events
    witness: dict[int, Any]
    """Each event by its number, and what is right in its place: None for nothing, an event, or several."""
    rules: Rules = attrs.Factory(Rules)
    gap: bool = False


def spare(name: str, size: int, oversample: int) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, size, ev.TRAIN, 0, 1, "submit", oversample=oversample)


def target(name: str, version: int) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit", target_version=version)


def by_rule(name: str) -> ev.AnyEvent:
    return ev.GroupRequeued(name, "", by_rule=True)


TWO: Events = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]
SPARE: Events = [spare("a", 2, 1), start("a", 0), start("a", 1), finish("a", 0), finish("a", 1), done("a")]
NO_SIGNAL = evict("a", "zero_variance", credit=2)
EXACT = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=4)
DROP = Rules(lag_max=1)
WAIT = Rules(lag_max=1, on_stale="wait")
ONE_BATCH = Rules(mode="sync", filter_metric="acc", batch_size=1, in_flight_batches_max=1)
CAPACITY = Rules(batch_size=1, admission=gs.Capacity(lag_max=1))
NARROW = Rules(batch_size=9, admission=gs.Capacity(lag_max=0, in_flight_max=1))
WIDE = Rules(batch_size=9, admission=gs.Capacity(lag_max=0, in_flight_max=2))
OPENED = ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 2)
BACK: Events = [ev.CheckpointMarked(1, 0, 1), *whole("a"), submit("b"), OPENED, ev.RunRewound(1, 2, 0, 2, True)]
BEGUN: Events = [submit("a", 2), start("a", 0), start("a", 1)]
WITH_TOKENS: Events = [*BEGUN, finish("a", 0, 1, 4), finish("a", 1, 1, 6), done("a")]
FAILS_AGAIN: Events = [start("a", 0, 2), fail("a", 0, 2), ev.GroupFailed("a")]

CASES = {
    # 1: the end after every session
    "ended too early": Case(
        1, "session 1 has not ended", [submit("a", 2), start("a"), finish("a"), done("a")], {2: submit("a"), 5: None}
    ),
    "a retry is due": Case(
        1, "attempt 2 is its latest", [submit("a"), start("a"), fail("a", retry=1.0), ev.GroupFailed("a")],
        {4: fail("a"), 5: None},
    ),
    "its end doesn't follow": Case(
        1, "instead of the group's end", [submit("a"), start("a"), finish("a"), PUBLISHED, done("a")],
        {4: None, 5: None},
    ),
    "finished with a failed session": Case(
        1, "1 of its 2 sessions failed", [*TWO, done("a")], {6: finish("a", 1), 7: ev.GroupFailed("a")}
    ),
    "too few survivors": Case(
        1, "survivors_min is 2", [*TWO, ev.GroupFinished("a", partial=True)],
        {1: begin(Rules(survivors_min=1)), 6: finish("a", 1), 7: ev.GroupFailed("a")}, Rules(survivors_min=2),
    ),
    "more finished than needed": Case(
        1, "2 of its sessions finished, and it needs 1", SPARE, {2: submit("a", 2), 6: fail("a", 1), 7: None}
    ),
    "failed though all finished": Case(
        1, "all its sessions finished", [submit("a"), start("a"), finish("a"), ev.GroupFailed("a")],
        {4: fail("a"), 5: done("a")},
    ),
    "evicted while running": Case(
        1, "is evicted while it is running", [submit("a"), start("a"), evict("a")],
        {3: [start("a"), finish("a"), done("a")], 4: None},
    ),
    "evicted before its end": Case(
        1, "is evicted while it is running", [submit("a"), start("a"), finish("a"), evict("a")],
        {4: [finish("a"), done("a")], 5: None},
    ),
    # 2: nothing after the end
    "a session after the end": Case(2, "after group 'a' was finished", [*whole("a"), start("a")], {5: None, 6: None}),
    "ended twice": Case(2, "after group 'a' was finished", [*whole("a"), done("a")], {5: None, 6: None}),
    "requeued while sampled": Case(
        2, "after group 'a' was sampled", [*whole("a"), *sample(1, "a"), ev.GroupRequeued("a")], {7: None, 8: None}
    ),
    "the rules start what is pending over": Case(
        2, "over while it is pending", [submit("a"), by_rule("a")], {2: failed("a"), 3: None}, Rules(requeues_max=1)
    ),
    "the rules start what is finished over": Case(
        2, "over while it is finished", [*whole("a"), by_rule("a")], {5: ev.GroupFailed("a"), 6: None},
        Rules(requeues_max=1),
    ),
    "the rules start it over too often": Case(
        2, "over 2 times", [*failed("a"), by_rule("a"), *FAILS_AGAIN, by_rule("a")],
        {1: begin(Rules(requeues_max=2)), 6: ev.GroupRequeued("a"), 10: None}, Rules(requeues_max=1),
    ),
    # 3: conservation
    "never submitted": Case(3, "was never submitted", [start("x")], {2: None}),
    "submitted twice": Case(3, "is submitted again", [submit("a"), submit("a")], {2: None, 3: None}),
    # 4: batches
    "in two batches": Case(
        4, "which batch 1 holds", [*whole("a"), *sample(1, "a"), *sample(2, "a")], {7: None, 9: None}
    ),
    "sampled after its commit": Case(
        4, "was committed with batch 1", [*whole("a"), *sample(1, "a"), ev.BatchCommitted(1), *sample(2, "a")],
        {7: None, 8: ev.BatchReturned(1), 10: None},
    ),
    "sampled after its eviction": Case(
        4, "which was evicted", [*whole("a"), evict("a", "empty"), *sample(1, "a")], {6: None, 8: None}
    ),
    "sampled in flight": Case(
        4, "sessions [1] have not ended",
        [submit("a", 2), start("a", 0), finish("a", 0), start("a", 1), *sample(1, "a")],
        {5: [start("a", 1), finish("a", 1), done("a")], 7: None},
    ),
    "sampled without a row": Case(
        4, "which has no trajectory", [*failed("a"), *sample(1, "a")], {5: ev.GroupRequeued("a"), 7: None}
    ),
    "sampled for another partition": Case(
        4, "of partition 'val' for", [*whole("a", val=True), *sample(1, "a")], {2: submit("a"), 7: None}
    ),
    "evicted out of a batch": Case(
        4, "although it was sampled with batch 1", [*whole("a"), *sample(1, "a"), evict("a")], {7: None, 8: None}
    ),
    "committed twice": Case(
        4, "no such batch is out", [*whole("a"), *sample(1, "a"), ev.BatchCommitted(1), ev.BatchCommitted(1)],
        {8: None, 9: None},
    ),
    "committed and never sampled": Case(4, "no such batch is out", [ev.BatchCommitted(7)], {2: None}),
    # 5: credit
    "more refills than credit": Case(
        5, "no credit is left",
        [*failed("a"), evict("a", credit=1), submit("b", cause="refill"), submit("c", cause="refill")],
        {6: evict("a", credit=2), 7: None, 8: None},
    ),
    "a refill without any credit": Case(5, "no credit is left", [submit("b", cause="refill")], {2: None}),
    "forfeited more than is owed": Case(
        5, "2 refills are forfeited, and 1 are owed",
        [*failed("a"), evict("a", credit=1), ev.RefillForfeited(2, "full")],
        {6: evict("a", credit=2), 7: ev.RefillForfeited(1, "full")},
    ),
    "forfeited twice": Case(
        5, "1 refills are forfeited, and 0 are owed",
        [*failed("a"), evict("a", credit=1), ev.RefillForfeited(1, "full"), ev.RefillForfeited(1, "full")],
        {6: evict("a", credit=2), 7: None, 8: None},
    ),
    "evicted twice": Case(5, "is evicted again", [*failed("a"), evict("a"), evict("a")], {6: None, 7: None}),
    "too much credit": Case(
        5, "earns 3 refills", [*whole("a"), evict("a", "zero_variance", credit=3)], {6: evict("a", credit=1)}
    ),
    "credit of the other mode": Case(
        5, "earns 2 refills", [*whole("a"), NO_SIGNAL],
        {1: begin(Rules(mode="sync", batch_size=1)), 6: evict("a", credit=1)},
    ),
    "no reason": Case(5, "a reason is needed", [*failed("a"), ev.GroupEvicted("a", (), 0, 0)], {6: evict("a")}),
    "a refill of another size": Case(
        5, "needs 2 sessions", [*failed("a"), evict("a", credit=1), submit("b", 2, cause="refill")],
        {2: submit("a", 2), 6: None, 7: submit("b", cause="refill")},
    ),
    # 6: lag
    "sampled past the bound": Case(
        6, "past lag_max 1", [*whole("a"), ev.WeightsPublished(2), *sample(1, "a", lags=(2,))],
        {1: begin(Rules(lag_max=2)), 8: sampled(1, "a", lags=(1,))}, DROP,
    ),
    "evicted at the bound": Case(
        6, "lag_max 1 is kept", [*whole("a"), PUBLISHED, evict("a", "stale", lag=1, credit=1)],
        {1: begin(Rules(lag_max=0)), 7: None}, DROP,
    ),
    "evicted as stale without a bound": Case(
        6, "rules that drop nothing", [*whole("a"), PUBLISHED, evict("a", "stale", lag=1, credit=1)],
        {1: begin(Rules(lag_max=0)), 7: None},
    ),
    "sampled while one waits": Case(
        6, "group 'slow' in flight has lag 1", [*whole("a"), submit("slow"), PUBLISHED, *sample(1, "a", lags=(1,))],
        {6: None, 7: None, 9: None}, WAIT,
    ),
    "sampled at another version": Case(
        6, "which is made for version 1", [target("a", 1), start("a"), finish("a"), done("a"), *sample(1, "a")],
        {2: target("a", 0), 7: None}, EXACT,
    ),
    "left over by a way back": Case(
        6, "is still there at WeightsPublished", [*BACK, ev.WeightsPublished(1, 2)],
        {6: None, 9: ev.RunRewound(1, 2, 0, 2), 10: None},
    ),
    # 7: bounds
    "a refill past the batches in flight": Case(
        7, "in flight to 2, past 1",
        [*whole("a"), want(), NO_SIGNAL, submit("b", cause="refill"), submit("c", cause="refill")],
        {1: begin(ONE_BATCH.changed(in_flight_batches_max=2)), 8: None, 9: None}, ONE_BATCH,
    ),
    "admission past its slots": Case(
        7, "past slots of n 1", [submit("x", cause="admission"), submit("y", cause="admission")],
        {1: begin(Rules(admission=gs.Slots(n=2))), 2: None, 3: None}, Rules(admission=gs.Slots(n=1)),
    ),
    "admission past what may be ready": Case(
        7, "1 in flight and 1 sampleable", [*whole("x"), submit("y", cause="admission")],
        {1: begin(Rules(admission=gs.Slots(n=2))), 2: None, 6: None}, Rules(admission=gs.Slots(n=1)),
    ),
    "admission past the capacity": Case(
        7, "past the capacity of 2", [submit("u"), submit("x", cause="admission"), submit("y", cause="admission")],
        {1: begin(CAPACITY.changed(batch_size=2)), 3: None, 4: None}, CAPACITY,
    ),
    "capacity's own bound in flight": Case(
        7, "in flight to 2, past 1", [submit("x", cause="admission"), submit("y", cause="admission")],
        {1: begin(WIDE), 2: None, 3: None}, NARROW,
    ),
    # 8: validation
    "validation evicted": Case(
        8, "of partition 'val' is evicted", [*whole("v", val=True), evict("v", "empty")], {2: submit("v"), 6: None}
    ),
    "validation refilled": Case(
        8, "is submitted as a refill", [*failed("a"), evict("a", credit=1), submit("v", val=True, cause="refill")],
        {7: submit("v", val=True)},
    ),
    # 9: replay
    "a session that there isn't": Case(
        9, "there is no session 7", [submit("a"), start("a", 7)], {2: submit("a", 8), 3: None}
    ),
    "a session started twice": Case(
        9, "a replay stops here", [submit("a"), start("a"), start("a")], {3: None, 4: None}
    ),
    "a request out of turn": Case(9, "a replay stops here", [want(1), want(3)], {2: [want(1), want(2)], 3: want(2)}),
    "a request that is over": Case(
        9, "a replay stops here", [want(1), ev.BatchRequestCancelled(1), ev.BatchRequestCancelled(1)],
        {3: None, 4: None},
    ),
    "a batch out of turn": Case(
        9, "a replay stops here",
        [*whole("a"), *whole("b"), *sample(1, "a"), want(2), ev.BatchSampled(1, 2, "train", ("b",), 0, (0,))],
        {11: None, 13: None},
    ),
    "a batch for a request that is over": Case(
        9, "a replay stops here", [*whole("a"), want(1), ev.BatchRequestCancelled(1), sampled(1, "a")],
        {7: None, 8: None},
    ),
    "a way back with a batch out": Case(
        9, "a replay stops here",
        [*whole("a"), ev.CheckpointMarked(1, 0, 1), *sample(1, "a"), OPENED, ev.RunRewound(1, 6, 0, 2)],
        {8: None, 10: None},
    ),
    "a gap": Case(9, "what lies between", [submit("a"), submit("b"), start("a")], {2: None, 4: None}, gap=True),
    "RunStarted twice": Case(9, "is the first event, once", [begin()], {1: None, 2: None}),
    "no RunStarted": Case(9, "is the first event, once", [], {1: begin()}),
    # 11: numbers
    "evicted with another lag": Case(
        11, "its lag is 5", [*failed("a"), ev.WeightsPublished(5), evict("a", lag=3)],
        {2: submit("a", stamp=2), 6: ev.WeightsPublished(3), 7: evict("a", lag=5)},
    ),
    "sampled with another lag": Case(
        11, "its lag is 5", [*whole("a"), ev.WeightsPublished(5), *sample(1, "a", lags=(3,))],
        {2: submit("a", stamp=2), 6: ev.WeightsPublished(3), 8: sampled(1, "a", lags=(5,))},
    ),
    "the lag counts from a token": Case(
        11, "its lag is 3", [*WITH_TOKENS, ev.WeightsPublished(9), *sample(1, "a", lags=(5,))],
        {6: finish("a", 1, 1, 4), 8: ev.WeightsPublished(11), 10: sampled(1, "a", lags=(3,))},
        Rules(basis="newest_token"),
    ),
    "another lag than that of its first batch": Case(
        11, "its lag is 0", [*whole("a"), *sample(1, "a"), ev.BatchReturned(1), PUBLISHED, *sample(2, "a", lags=(1,))],
        {7: [sampled(1), PUBLISHED], 11: sampled(2, "a", lags=(0,))},
    ),
    "lags are missing": Case(
        11, "1 groups and 0 lags", [*whole("a"), want(), sampled(1, "a", lags=())], {7: sampled(1, "a")}
    ),
}  # fmt: skip


def records_of(case: Case, changes: dict[int, Any] | None = None) -> list[ev.Record]:
    """The log, with some of its events replaced by what is right."""
    first: Events = [] if case.text == "is the first event, once" and not case.events else [begin(case.rules)]
    events: Events = [*first, *case.events] or [submit("a")]
    flat: list[tuple[int, ev.AnyEvent]] = []
    for seq, event in enumerate(events, 1):
        right = (changes or {}).get(seq, event)
        several = right if isinstance(right, list) else [] if right is None else [right]
        flat += [(seq, one) for one in several]
    if case.gap and not changes:
        return [ev.Record(seq, seq, event) for seq, event in flat if seq != 3]
    return [ev.Record(seq, seq, event) for seq, (_, event) in enumerate(flat, 1)]


def found(records: list[ev.Record], case: Case) -> list[Violation]:
    return [one for one in violations(records) if one.invariant == case.invariant and case.text in one.text]


@pytest.mark.parametrize("name", CASES)
def test_the_witness_is_the_events_that_cannot_all_be_true(name: str) -> None:
    case = CASES[name]
    one = found(records_of(case), case)[0]

    assert one.witness == tuple(case.witness)
    assert one.seq == one.witness[-1]


@pytest.mark.parametrize(("name", "seq"), [(name, seq) for name, case in CASES.items() for seq in case.witness])
def test_without_any_one_of_them_it_is_not_wrong(name: str, seq: int) -> None:
    case = CASES[name]

    assert found(records_of(case, {seq: case.witness[seq]}), case) == []


@pytest.mark.parametrize("name", CASES)
def test_a_finding_is_of_the_group_that_its_sentence_is_about(name: str) -> None:
    case = CASES[name]
    one = found(records_of(case), case)[0]
    named = re.search(r"(?:group|refill|admission) '(\w+)'", one.text)

    assert one.group_id == (named[1] if named else "")


def test_every_invariant_has_a_case() -> None:
    assert {case.invariant for case in CASES.values()} == set(INVARIANTS)


def test_a_fault_of_the_book_has_the_event_at_which_it_shows() -> None:
    checker = Checker(Miscounting("total"))
    for record in log(submit("a"), submit("b")):
        checker.feed(record)

    assert [one.witness for one in checker.finish()] == [(2,)]


def test_what_also_stops_the_replay_has_the_same_witness() -> None:
    both = violations(log(whole("a"), sample(1, "a"), sample(2, "a")))

    assert [(one.invariant, one.witness) for one in both] == [(4, (7, 9)), (9, (7, 9))]


def test_work_of_a_line_that_was_abandoned_counts_from_the_way_back() -> None:
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(3), submit("a", stamp=3), OPENED, ev.RunRewound(1, 2, 0, 2),
        ev.GroupRequeued("a", "recovery"), start("a", 0, 2), finish("a", 0, 2), done("a"), ev.WeightsPublished(2, 2),
        sample(1, "a", lags=(7,)),
    )  # fmt: skip
    (one,) = violations(records)

    assert (one.invariant, one.witness) == (11, (6, 11, 13))


def test_a_later_opening_has_the_rules_that_are_broken() -> None:
    opened = ev.RunRecovered(Rules(lag_max=0).to_dict(), RULES_VERSION, 1, 2)
    records = log(whole("a"), opened, sample(1, "a", lags=(1,)))

    assert [(one.invariant, one.witness) for one in violations(records)] == [(6, (6, 8))]


def test_a_group_without_sessions_ends_no_check() -> None:
    found = [(one.text, one.witness) for one in violations(log(submit("a", 0), ev.GroupFailed("a")))]

    assert ("group 'a' becomes failure although all its sessions finished", (3,)) in found
    assert violations(log(submit("b", 0), evict("b")))[-1].witness == (2, 3)


def witnesses(records: list[ev.Record]) -> list[tuple[int, ...]]:
    return [one.witness for one in violations(records)]


def test_a_second_beginning_stands_beside_the_first_however_late_it_comes() -> None:
    assert witnesses(log(submit("a"), begin())) == [(1, 3)]


def test_a_way_back_with_several_batches_out_stands_beside_the_first_of_them() -> None:
    out = [*sample(1, "a"), *sample(2, "b")]
    records = log(whole("a"), whole("b"), ev.CheckpointMarked(1, 0, 1), out, OPENED, ev.RunRewound(1, 10, 0, 2))

    assert witnesses(records) == [(12, 16)]


def test_a_bound_that_has_no_place_at_all_stands_alone_beside_the_group() -> None:
    opened = ev.RunRecovered(NARROW.to_dict(), RULES_VERSION, -1, 2)

    assert witnesses(log(opened, submit("a", cause="admission"), version=-1)) == [(2, 3)]


@pytest.mark.parametrize(
    "events",
    [
        [ev.BatchRequestCancelled(7)],
        [want(3)],
        [*whole("a"), sampled(1, "a")],
        [*whole("a"), want(1), ev.BatchSampled(2, 1, "train", ("a",), 0, (0,))],
    ],
    ids=["cancelled", "asked out of turn", "never asked for", "first batch out of turn"],
)
def test_what_goes_on_from_nothing_stands_alone(events: Events) -> None:
    assert witnesses(log(events)) == [(len(events) + 1,)]


def test_a_second_batch_for_a_request_stands_beside_the_first() -> None:
    again = ev.BatchSampled(2, 1, "train", ("b",), 0, (0,))

    assert witnesses(log(whole("a"), whole("b"), sample(1, "a"), again)) == [(11, 12)]


def test_a_group_started_over_counts_from_its_submission_where_the_way_back_is_no_earlier() -> None:
    basis = Rules(basis="newest_token")
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(3), BEGUN, finish("a", 0, 1, 3), fail("a", 1),
        ev.GroupFailed("a"), ev.RunRecovered(basis.to_dict(), RULES_VERSION, 0, 2), ev.RunRewound(1, 2, 0, 2),
        ev.GroupRequeued("a"), start("a", 0, 2), fail("a", 0, 2), start("a", 1, 2), finish("a", 1, 2),
        ev.GroupFailed("a"), evict("a", lag=1), rules=basis,
    )  # fmt: skip

    assert witnesses(records) == [(4, 11, 18)]


@pytest.mark.parametrize("last", [whole("b"), [*whole("b"), *sample(1, "b")]], ids=["sampleable", "sampled"])
def test_a_capacity_is_used_up_by_the_last_group_of_any_phase(last: Events) -> None:
    records = log(submit("a"), last, submit("x", cause="admission"), rules=CAPACITY)

    assert witnesses(records) == [(1, 3, len(records))]


def test_an_eviction_after_the_commit_stands_beside_both_the_sampling_and_the_commit() -> None:
    assert witnesses(log(whole("a"), sample(1, "a"), ev.BatchCommitted(1), evict("a")))[0] == (7, 8, 9)


def test_a_replay_that_stops_at_something_wrong_has_its_witness_although_the_event_goes_on_from_nothing() -> None:
    both = violations(log(whole("a"), done("a")))

    assert [(one.invariant, one.witness) for one in both] == [(2, (5, 6)), (9, (5, 6))]


def test_the_first_session_that_there_is_not_stands_beside_the_submission() -> None:
    assert witnesses(log(submit("a"), start("a", 1))) == [(2, 3)]


def test_a_request_that_an_opening_closed_stands_beside_it() -> None:
    assert witnesses(log(want(1), OPENED, ev.BatchRequestCancelled(1))) == [(3, 4)]


def test_an_opening_under_the_same_rules_leaves_them_with_the_event_that_they_came_with() -> None:
    opened = ev.RunRecovered(DROP.to_dict(), RULES_VERSION, 2, 2)

    assert witnesses(log(whole("a"), opened, sample(1, "a", lags=(2,)), rules=DROP)) == [(1, 8)]


@pytest.mark.parametrize(
    ("last", "witness"),
    [(sample(1, "a", lags=(1,)), (2, 7)), ([evict("a", "stale")], (6,))],
    ids=["version", "rules"],
)
def test_what_no_event_said_is_no_witness(last: Events, witness: tuple[int, ...]) -> None:
    records = [ev.Record(seq, seq, event) for seq, event in enumerate([submit("x"), *whole("a"), *last], 1)]

    assert witnesses(records) == [(1,), witness]
