"""Refills in multiples, groups in flight under capacity, failed groups that stay, what `wait` gates, and the limit
of groups for one batch."""

import pytest
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.rules import Admission, Capacity, Rules, Slots
from groupstate.core.select import held_by_stale, why_not
from groupstate.core.supply import admissible, refills_now, shortage
from groupstate.errors import RefillLimitExceeded
from groupstate.testing.notation import Story, play

from .scenes import SYNC, owing, sync_story

SOURCE = [f"r{number}" for number in range(1, 20)]

# Refills in multiples --------------------------------------------------------------------------------


@pytest.mark.parametrize(("owed", "refills"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4)])
def test_refills_are_submitted_in_whole_multiples(owed: int, refills: int) -> None:
    assert refills_now(owing(play(), owed).book, Rules(refill_multiple=2)) == refills


def failed(*names: str) -> list[str]:
    return [line for name in names for line in (f"start {name}", f"fail {name}")]


def test_what_is_left_of_the_credit_waits_for_more() -> None:
    story = play(
        *(f"submit g{number}/1" for number in range(5)), *failed("g0", "g1", "g2"),
        rules=Rules(refill_multiple=2), source=SOURCE,
    )  # fmt: skip
    left = (story.refills(), len(story.book.credits))
    story.tell(*failed("g3"))

    assert left == (["r1", "r2"], 1)
    assert (story.refills(), len(story.book.credits)) == (["r1", "r2", "r3", "r4"], 0)


def test_a_sampler_does_not_wait_for_credit_that_is_left_over() -> None:
    story = play(
        "submit a/1", "submit b/1", "sample 2", *failed("a"), "start b", "finish b acc=1",
        rules=Rules(refill_multiple=2), source=SOURCE,
    )  # fmt: skip

    assert (story.refills(), len(story.book.credits)) == ([], 1)
    assert story.book.in_flight_count() == 1


@pytest.mark.parametrize(
    "rule", [Slots(n=4), Slots(n=4, ready_max=3), Capacity(lag_max=9, in_flight_max=4)], ids=["slots", "ready", "max"]
)
def test_a_sampler_does_not_wait_for_a_multiple_that_finds_no_room(rule: Admission) -> None:
    rules = Rules(batch_size=4, refill_multiple=4, admission=rule)
    story = play(
        *(f"submit g{number}/1" for number in range(5)), "start g4", "finish g4 acc=1", "sample 4",
        *failed("g0", "g1", "g2", "g3"), rules=rules, source=SOURCE,
    )  # fmt: skip

    assert story.book.in_flight_count() >= 3


def test_leftover_credit_is_forfeited_with_the_source() -> None:
    story = play("submit a/1", *failed("a"), rules=Rules(refill_multiple=2), source=[])
    story.tell("sample 1")

    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(1, "source exhausted")]
    assert type(story.waiters[0].error).__name__ == "NotEnoughGroups"


# In flight under capacity ----------------------------------------------------------------------------

NARROW = Rules(batch_size=4, admission=Capacity(lag_max=1, in_flight_max=2))


@pytest.mark.parametrize(("running", "owed", "free"), [(0, 0, 2), (1, 0, 1), (2, 0, 0), (3, 0, 0), (0, 1, 1)])
def test_admission_keeps_within_the_groups_in_flight(running: int, owed: int, free: int) -> None:
    assert admissible(owing(sync_story(running=running), owed).book, NARROW) == free


@pytest.mark.parametrize(("running", "owed", "refills"), [(0, 3, 2), (1, 3, 1), (2, 3, 0), (3, 3, 0)])
def test_refills_keep_within_the_groups_in_flight(running: int, owed: int, refills: int) -> None:
    assert refills_now(owing(sync_story(running=running), owed).book, NARROW) == refills


@pytest.mark.parametrize(("running", "short"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_what_samplers_wait_for_keeps_within_the_groups_in_flight(running: int, short: int) -> None:
    story = sync_story("sample 4", running=running)

    assert shortage(story.book, NARROW) == short


def test_a_batch_above_the_groups_in_flight_is_made_in_turns() -> None:
    story = play("sample 4", rules=NARROW, source=SOURCE, admits=True)
    most = 0
    for name in ("r1", "r2", "r3", "r4"):
        most = max(most, story.book.in_flight_count())
        story.tell(f"start {name}", f"finish {name} acc=1")

    assert (most, story.batches()) == (2, [("r1", "r2", "r3", "r4")])


# Failed groups that stay -----------------------------------------------------------------------------

KEEP = Rules(mode="sync", empty="keep")


def test_a_failed_group_without_rows_stays_sampleable() -> None:
    story = play("submit g/2", *failed("g"), rules=KEEP, source=SOURCE)
    ready = story.ready()
    story.tell("sample 1")

    assert (ready, story.batches(), story.evicted()) == (["g"], [("g",)], {})


@pytest.mark.parametrize("rules", [replace(KEEP, mode="async"), replace(KEEP, empty="refill")], ids=["async", "refill"])
def test_it_is_evicted_under_other_rules(rules: Rules) -> None:
    story = play("submit g/2", "sample 1", *failed("g"), rules=rules, source=SOURCE)

    assert story.evicted() == {"g": ("empty",)}


def test_a_finished_group_without_rows_is_not_kept() -> None:
    rules = replace(KEEP, empty_session="allow")
    story = play("submit g/1", "sample 1", "start g", "finish g nothing", rules=rules, source=SOURCE)

    assert story.evicted() == {"g": ("empty",)}


@pytest.mark.parametrize(
    "rules", [replace(KEEP, empty="keep_all"), Rules(empty="keep_finished")], ids=["sync keep_all", "async"]
)
def test_under_others_it_is_and_goes_into_a_batch_with_no_row(rules: Rules) -> None:
    rules = replace(rules, empty_session="allow")
    story = play("submit g/1", "start g", "finish g nothing", "sample 1", rules=rules, source=SOURCE)

    assert (story.batches(), story.evicted()) == ([("g",)], {})


@pytest.mark.parametrize("returned", ["release 1", "recover"])
def test_a_kept_group_comes_back_from_a_batch(returned: str) -> None:
    story = play("submit g/2", *failed("g"), "sample 1", returned, rules=KEEP)

    assert story.ready() == ["g"]


def test_a_kept_group_that_starts_over_is_no_longer_ready() -> None:
    story = play("submit g/2", *failed("g"), "requeue g", rules=KEEP)

    assert (story.ready(), story.phase("g")) == ([], "pending")


def test_a_cancelled_group_without_rows_is_not_kept_and_earns_its_refill() -> None:
    story = play("submit g/2", "start g", "sample 1", "cancel g", rules=KEEP, source=SOURCE)

    assert [(e.reasons, e.credit) for e in story.events(ev.GroupEvicted)] == [(("cancelled",), 1)]
    assert story.refills() == ["r1"]


def test_a_validation_group_is_not_marked_as_kept() -> None:
    story = play("submit v/1 partition=val", *failed("v"), rules=KEEP)

    assert (story.ready("val"), story.group("v").kept_empty) == (["v"], False)


# What `wait` gates -----------------------------------------------------------------------------------

GATED = Rules(on_stale="wait", lag_max=1)


def gated(partition: str, flying: str) -> Story:
    return play(
        "submit a/1", "submit b/1 partition=val", f"start {flying}", "publish 1", f"sample 1 partition={partition}"
    )


@pytest.mark.parametrize(
    ("gates", "partition", "oldest"),
    [("training", "train", "a"), ("training", "val", None), ("each", "train", "a"), ("each", "val", "b")],
)
def test_each_partition_waits_for_its_own_groups_or_training_alone_does(
    gates: str, partition: str, oldest: str | None
) -> None:
    book = gated(partition, "a").book
    found = held_by_stale(book, replace(GATED, wait_gates=gates), partition)

    assert (None if found is None else found.group_id) == oldest


def test_validation_that_is_gated_is_served_once_its_group_in_flight_has_ended() -> None:
    story = play(
        "submit v/1 partition=val", "submit w/1 partition=val", "submit t/1", "start v", "finish v acc=1", "publish 1",
        "sample 1 partition=val", rules=replace(GATED, wait_gates="each"),
    )  # fmt: skip
    held = why_not(story.book, story.rules, story.book.waiting("val")[0])
    story.tell("start w", "finish w acc=1")

    assert held == "group 'w' in flight has lag 1, the bound is 1"
    assert story.batches() == [("v",)]


# The limit of groups for one batch -------------------------------------------------------------------

LIMITED = Rules(filter_metric="acc", generated_groups_max=3)


def flat(name: str) -> list[str]:
    return [f"submit {name}/2", f"start {name}", f"finish {name} acc=1"]


@pytest.mark.parametrize(("demand", "refused"), [(3, False), (4, True)])
def test_a_batch_that_would_take_more_than_the_limit_is_refused_at_once(demand: int, refused: bool) -> None:
    story = play(f"sample {demand}", rules=LIMITED)

    assert (type(story.waiters[0].error) is RefillLimitExceeded) is refused


def test_it_says_how_many_there_can_be_and_what_was_evicted() -> None:
    story = play(*flat("a"), *flat("b"), "sample 2", rules=LIMITED)
    error = story.waiters[0].error

    assert isinstance(error, RefillLimitExceeded)
    assert str(error) == (
        "sample(2) can't be met: 2 groups were submitted for this batch and generated_groups_max is 3, so there can be "
        "1 at most; evicted: zero_variance 2"
    )
    assert (error.generated, error.bound, error.reasons) == (2, 3, {"zero_variance": 2})


def test_what_is_ready_and_in_flight_counts_for_what_can_be_had() -> None:
    story = play(
        *flat("a"), "submit b/2", "start b", "finish b.0 acc=0", "finish b.1 acc=1", "submit c/2", "sample 2",
        rules=LIMITED,
    )  # fmt: skip
    waits = story.waiters[0].error
    story.tell("start c", "finish c acc=1")

    assert waits is None
    assert isinstance(story.waiters[0].error, RefillLimitExceeded)


def test_a_later_sampler_is_not_refused_for_what_an_older_one_takes() -> None:
    story = play("submit a/2", "sample 1", "sample 4", rules=LIMITED)

    assert [waiter.error for waiter in story.waiters] == [None, None]


def test_the_limit_counts_anew_for_each_batch() -> None:
    story = play(*flat("a"), *flat("b"), rules=LIMITED)
    story.tell("submit c/2", "sample 1", "start c", "finish c.0 acc=0", "finish c.1 acc=1", "sample 3")

    assert story.batches() == [("c",)]
    assert story.waiters[1].error is None


def test_sync_mode_spends_credit_by_multiples_as_places_come_free() -> None:
    rules = replace(SYNC, batch_size=2, refill_multiple=2)
    story = play(
        "submit a/2", "submit b/2", "sample 2", "start a", "finish a acc=1", rules=rules, source=SOURCE
    )  # fmt: skip
    one_in_flight = story.refills()
    story.tell("start b", "finish b.0 acc=0", "finish b.1 acc=1")

    assert one_in_flight == []
    assert story.refills() == ["r1", "r2"]
