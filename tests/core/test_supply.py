"""How many groups are started: refills, shortages, admission."""

import pytest
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.rules import Admission, Capacity, PerBatch, Rules, Slots
from groupstate.core.supply import admissible, draining, forfeits, refills_now, shortage
from groupstate.testing.notation import play

from .scenes import SYNC, owing, sync_story

# Refills ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owed", "running", "in_flight_batches_max", "refills"),
    [(3, 0, 1, 3), (6, 0, 1, 4), (6, 3, 1, 1), (6, 4, 1, 0), (6, 5, 1, 0), (6, 5, 2, 3), (0, 0, 1, 0)],
)
def test_refills_never_take_what_is_in_flight_past_its_bound(
    owed: int, running: int, in_flight_batches_max: int, refills: int
) -> None:
    rules = replace(SYNC, in_flight_batches_max=in_flight_batches_max)
    story = owing(sync_story("sample 4", running=running), owed)

    assert refills_now(story.book, rules) == refills


def test_without_a_sampler_the_credit_of_sync_mode_waits() -> None:
    story = owing(sync_story(), 3)

    assert refills_now(story.book, SYNC) == 0
    assert refills_now(story.book, Rules(mode="sync", batch_size=4)) == 3
    assert refills_now(story.book, Rules(batch_size=4, filter_metric="acc")) == 3


def test_once_the_demand_is_met_nothing_is_refilled() -> None:
    story = owing(sync_story("sample 2", good=1, running=1), 3)
    unmet = refills_now(story.book, SYNC)
    story.tell("finish run0.0 acc=0", "finish run0.1 acc=1")

    assert (unmet, refills_now(story.book, SYNC)) == (3, 0)


@pytest.mark.parametrize(("running", "free"), [(0, 3), (1, 2), (3, 0)])
def test_a_capacity_keeps_to_its_own_bound_in_flight(running: int, free: int) -> None:
    rules = Rules(batch_size=4, admission=Capacity(lag_max=9, in_flight_max=3))
    story = sync_story("sample 9", running=running)

    assert shortage(story.book, rules) == free
    assert admissible(story.book, rules) == free
    assert refills_now(owing(story, 9).book, rules) == free


@pytest.mark.parametrize(("limit", "left"), [(2, 0), (3, 0), (4, 1), (5, 2)])
def test_what_may_yet_be_generated_for_the_batch_bounds_all_that_is_started(limit: int, left: int) -> None:
    story = owing(sync_story("submit v/1 partition=val", running=2), 4)
    story.record(ev.BatchRequested(1, "train", 9, 0))
    rules = Rules(generated_groups_max=limit, admission=Slots(n=99))

    assert refills_now(story.book, rules) == left
    assert shortage(story.book, rules) == left
    assert admissible(story.book, rules) == left


@pytest.mark.parametrize(("good", "demand", "drains"), [(1, 2, False), (2, 2, True), (3, 2, True)])
def test_a_run_drains_once_as_many_are_sampleable_as_are_wanted(good: int, demand: int, drains: bool) -> None:
    story = sync_story(good=good)
    story.record(ev.BatchRequested(1, "train", demand, 0))

    assert draining(story.book, SYNC) is drains
    assert not draining(story.book, Rules(mode="sync"))
    assert not draining(story.book, Rules(filter_metric="acc"))


def test_without_a_sampler_nothing_drains() -> None:
    assert not draining(sync_story(good=3).book, SYNC)


def test_credit_is_forfeited_when_the_batch_is_full_or_the_source_is_empty() -> None:
    full = owing(sync_story(good=1), 3)
    open_before = forfeits(full.book, SYNC)
    full.record(ev.BatchRequested(1, "train", 1, 0))
    empty = owing(sync_story("exhausted"), 2)

    assert open_before is None
    assert forfeits(full.book, SYNC) == (3, "batch full")
    assert forfeits(empty.book, SYNC) == (2, "source exhausted")
    assert forfeits(empty.book, Rules()) == (2, "source exhausted")


def test_credit_that_takes_the_last_place_of_a_capacity_is_not_forfeited() -> None:
    rules = Rules(batch_size=4, admission=Capacity(lag_max=0))
    story = owing(sync_story(), 4)

    assert refills_now(story.book, rules) == 4
    assert forfeits(story.book, rules) is None


def test_without_credit_nothing_is_forfeited() -> None:
    story = sync_story("exhausted", good=1)
    story.record(ev.BatchRequested(1, "train", 1, 0))

    assert forfeits(story.book, SYNC) is None


def test_credit_without_a_source_is_forfeited() -> None:
    story = play("submit g/1", "start g", "fail g", rules=Rules())

    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(1, "no source")]
    assert not story.book.credits


def test_the_credit_of_a_full_batch_is_not_carried_into_the_next() -> None:
    story = play(
        "submit flat/2", "submit good/2", "start flat", "start good", "sample 1", "finish flat acc=1",
        "finish good.0 acc=0", "finish good.1 acc=1",
        rules=replace(SYNC, batch_size=1), source=["r1", "r2", "r3"],
    )  # fmt: skip

    assert story.refills() == []
    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(2, "batch full")]
    assert story.batches() == [("good",)]


def test_under_capacity_credit_beyond_the_free_capacity_is_forfeited() -> None:
    rules = Rules(batch_size=1, admission=Capacity(lag_max=0))
    story = play("submit a/1", "submit b/1", "start a", "fail a", rules=rules, source=["r1"])

    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(1, "admission")]
    assert story.refills() == []


# (rule, batch_size, (sampleable, in flight, owed), refills)
ROOMS: list[tuple[Admission, int, tuple[int, int, int], int]] = [
    (PerBatch(), 4, (0, 9, 3), 3),
    (Slots(n=4), 4, (0, 0, 3), 3),
    (Slots(n=4), 4, (0, 2, 3), 2),
    (Slots(n=4), 4, (0, 4, 3), 0),
    (Slots(n=4), 4, (0, 5, 3), 0),
    (Slots(n=4), 4, (2, 1, 3), 1),
    (Slots(n=4, ready_max=2), 4, (2, 1, 3), 3),
    (Slots(n=4, ready_max=2), 4, (4, 1, 3), 1),
    (Capacity(lag_max=0), 4, (0, 0, 3), 3),
    (Capacity(lag_max=0), 4, (1, 1, 3), 2),
    (Capacity(lag_max=0), 4, (2, 2, 3), 0),
    (Capacity(lag_max=0), 4, (3, 3, 3), 0),
    (Capacity(lag_max=1), 4, (3, 3, 3), 2),
]


@pytest.mark.parametrize(("rule", "batch_size", "counts", "refills"), ROOMS)
def test_refills_take_the_places_that_admission_has(
    rule: Admission, batch_size: int, counts: tuple[int, int, int], refills: int
) -> None:
    good, running, owed = counts
    story = owing(sync_story(good=good, running=running), owed)
    rules = Rules(batch_size=batch_size, admission=rule)
    beyond = owed - refills

    assert refills_now(story.book, rules) == refills
    assert forfeits(story.book, rules) == ((beyond, "admission") if isinstance(rule, Capacity) and beyond else None)


@pytest.mark.parametrize(("demand", "refills"), [(1, 0), (2, 0), (3, 1), (4, 2), (9, 3)])
def test_what_samplers_wait_for_has_a_place_beside_what_is_ready(demand: int, refills: int) -> None:
    story = owing(sync_story(good=2), 4)
    story.record(ev.BatchRequested(1, "train", demand, 0))

    assert refills_now(story.book, Rules(admission=Slots(n=1, ready_max=1))) == min(refills, 1)
    assert refills_now(story.book, Rules(admission=Slots(n=3))) == max(1, refills)


@pytest.mark.parametrize(
    ("rule", "refills"),
    [(None, 2), (Slots(n=3), 1), (Slots(n=9), 2), (Capacity(lag_max=0), 2), (Capacity(lag_max=9), 2)],
)
def test_in_sync_mode_the_tighter_bound_holds(rule: Admission | None, refills: int) -> None:
    story = owing(sync_story("sample 4", running=2), 5)

    assert refills_now(story.book, replace(SYNC, admission=rule)) == refills


def test_under_capacity_credit_of_sync_mode_still_waits_for_slots() -> None:
    rules = replace(SYNC, batch_size=2, admission=Capacity(lag_max=9))
    story = play(
        "submit same/2", "submit slow/2", "start same", "start slow", "sample 2", "finish same acc=0",
        rules=rules, source=["r1", "r2"],
    )  # fmt: skip

    assert story.events(ev.RefillForfeited) == []
    assert len(story.book.credits) == 1


def test_under_slots_a_sampler_is_not_kept_waiting_by_credit_that_finds_no_slot() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "sample 2", "finish a acc=1", "fail b",
        rules=Rules(admission=Slots(n=1)), source=["r1", "r2"],
    )  # fmt: skip

    assert story.book.in_flight_count() == 1


def test_credit_that_finds_no_place_for_its_multiple_keeps_no_sampler_waiting() -> None:
    story = play(
        *(f"submit {name}/1" for name in "abcdef"), *(f"start {name}" for name in "abc"), "sample 5",
        *(f"finish {name} reward=1" for name in "abc"), "fail d", "fail e", "fail f",
        rules=Rules(admission=Slots(n=3), refill_multiple=3), source=["x", "y"],
    )  # fmt: skip
    story.tell("start x", "finish x reward=1")

    assert len(story.book.credits) == 3  # 4 are sampleable: there is room for one
    assert story.phase("y") == "pending"


def test_under_slots_a_refill_takes_no_more_than_the_slots() -> None:
    rules = Rules(lag_max=0, admission=Slots(n=1, ready_max=1))
    story = play(
        "submit a/1", "start a", "finish a acc=1", "submit b/1 stamp=1", "publish 1", rules=rules, source=["r1"]
    )

    assert story.evicted() == {"a": ("stale",)}
    assert story.book.in_flight_count() <= 1


# Admission -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "running", "owed", "demands", "short"),
    [
        (0, 0, 0, [], 0),
        (0, 0, 0, [4], 4),
        (1, 1, 1, [4], 1),
        (2, 1, 1, [4], 0),
        (2, 3, 1, [4], 0),
        (1, 1, 0, [2, 3], 3),
    ],
)
def test_the_shortage_is_what_waiters_want_beyond_what_is_there_or_coming(
    good: int, running: int, owed: int, demands: list[int], short: int
) -> None:
    story = owing(sync_story(good=good, running=running), owed)
    for number, size in enumerate(demands, 1):
        story.record(ev.BatchRequested(number, "train", size, 0))

    assert shortage(story.book, Rules()) == short


@pytest.mark.parametrize(
    ("good", "running", "demand", "short"),
    [(0, 0, 2, 2), (0, 0, 9, 4), (2, 0, 9, 4), (2, 3, 9, 1), (0, 4, 9, 0), (0, 5, 9, 0), (3, 0, 4, 1)],
)
def test_a_shortage_goes_past_what_admission_allows_but_never_past_free_slots(
    good: int, running: int, demand: int, short: int
) -> None:
    story = sync_story(good=good, running=running)
    story.record(ev.BatchRequested(1, "train", demand, 0))

    assert shortage(story.book, Rules(admission=Slots(n=4))) == short


def test_validation_demands_are_no_shortage() -> None:
    story = play("sample 3 partition=val")

    assert shortage(story.book, Rules()) == 0


Counts = tuple[int, int, int, list[int]]

ADMISSIONS: list[tuple[Admission, int | None, int, Counts, int]] = [
    # rule, batch_size, version, (sampleable, in flight, owed, demands), admissible
    (PerBatch(warmup=1), 4, 0, (0, 0, 0, []), 4),
    (PerBatch(warmup=2), 4, 0, (0, 0, 0, []), 8),
    (PerBatch(warmup=1), 4, 0, (1, 1, 1, []), 1),
    (PerBatch(warmup=1), 4, 0, (3, 3, 0, []), 0),
    (PerBatch(warmup=1), 4, 0, (0, 1, 0, [3]), 6),
    (PerBatch(warmup=0), 4, 0, (0, 1, 1, [3]), 1),
    (PerBatch(warmup=0), 4, 0, (0, 0, 0, []), 0),
    (PerBatch(warmup=1), None, 0, (0, 0, 0, []), 1),
    (PerBatch(warmup=1), None, 0, (0, 0, 0, [2, 3]), 8),
    (Slots(n=4), None, 0, (0, 0, 0, []), 4),
    (Slots(n=4), None, 0, (0, 3, 0, []), 1),
    (Slots(n=4), None, 0, (0, 3, 1, []), 0),
    (Slots(n=4), None, 0, (0, 5, 0, []), 0),
    (Slots(n=4), None, 0, (3, 1, 0, []), 0),
    (Slots(n=4), None, 0, (2, 1, 0, []), 1),
    (Slots(n=4, ready_max=2), None, 0, (3, 1, 0, []), 2),
    (Slots(n=4, ready_max=2), None, 0, (6, 0, 0, []), 0),
    (Slots(n=4, ready_max=9), None, 0, (1, 1, 1, []), 2),
    (Capacity(lag_max=0), 2, 0, (0, 0, 0, []), 2),
    (Capacity(lag_max=1), 2, 0, (0, 0, 0, []), 4),
    (Capacity(lag_max=1), 2, 3, (0, 0, 0, []), 10),
    (Capacity(lag_max=1), 2, 0, (1, 1, 1, []), 1),
    (Capacity(lag_max=1), 2, 0, (3, 2, 0, []), 0),
]


@pytest.mark.parametrize(("rule", "batch_size", "version", "counts", "expected"), ADMISSIONS)
def test_admission_by_each_rule(
    rule: Admission, batch_size: int | None, version: int, counts: Counts, expected: int
) -> None:
    good, running, owed, demands = counts
    story = owing(sync_story(good=good, running=running), owed)
    if version:
        story.tell(f"publish {version}")
    for number, size in enumerate(demands, 1):
        story.record(ev.BatchRequested(number, "train", size, version))

    assert admissible(story.book, Rules(batch_size=batch_size, admission=rule)) == expected


def test_capacity_counts_what_was_sampled_and_committed_but_not_what_was_evicted() -> None:
    rules = Rules(batch_size=4, admission=Capacity(lag_max=0))
    story = sync_story("submit flat/1", "start flat", "finish flat acc=1", good=3)
    full = admissible(story.book, rules)
    story.tell("sample 1", "commit 1", "sample 1")
    used = admissible(story.book, rules)
    story.tell("evict flat zero_variance")

    assert (full, used, admissible(story.book, rules)) == (0, 0, 1)


def test_capacity_is_the_same_after_a_restart_as_before() -> None:
    rules = Rules(batch_size=1, admission=Capacity(lag_max=1))
    story = play()
    for version in range(1, 6):
        name = f"g{version}"
        story.tell(f"submit {name}/1", f"start {name}", f"finish {name} acc=1", "sample 1", f"commit {version}")
        story.tell(f"publish {version}")
    before = admissible(story.book, rules)
    story.tell("recover")

    assert before == admissible(story.book, rules) == 2


def test_capacity_is_not_used_up_by_validation() -> None:
    rules = Rules(batch_size=1, admission=Capacity(lag_max=0))
    story = play("submit v/1 partition=val", "start v", "finish v acc=1", "sample 1 partition=val")
    sampled = admissible(story.book, rules)
    story.tell("commit 1")

    assert (sampled, admissible(story.book, rules)) == (1, 1)


def test_nothing_is_admitted_while_a_batch_drains() -> None:
    story = sync_story(good=2)
    before = admissible(story.book, replace(SYNC, admission=Slots(n=4)))
    story.record(ev.BatchRequested(1, "train", 2, 0))

    assert before == 2
    assert admissible(story.book, replace(SYNC, admission=Slots(n=4))) == 0


def test_what_ended_without_a_trajectory_takes_up_its_place_until_it_is_judged() -> None:
    story = sync_story("submit v/1 partition=val", "start v", "fail v")
    before = admissible(story.book, Rules(admission=Slots(n=4)))
    story.tell("submit a/1", "start a", "fail a", "submit b/1", "start b", "fail b")

    assert (before, admissible(story.book, Rules(admission=Slots(n=4)))) == (4, 2)


def test_a_rollout_is_given_prompts_only_while_it_runs() -> None:
    rules = Rules(batch_size=2)
    idle = play("publish 1", rules=rules, source=["r1", "r2", "r3"])
    running = play("publish 1", rules=rules, source=["r1", "r2", "r3"], admits=True)

    assert idle.book.in_flight_count() == 0
    assert sorted(running.book.groups) == ["r1", "r2"]


def test_a_hold_of_admission_ends_with_the_source() -> None:
    story = play(
        "submit old/1 stamp=0", "submit bad/1", "start old", "start bad", "sample 2", "fail bad",
        rules=Rules(lag_max=1, on_stale="wait"), source=[], admits=True, weight_version=1,
    )  # fmt: skip

    assert [bool(event.reason) for event in story.events(ev.AdmissionHeld)] == [True, False]
