"""What an eviction earns: one refill in async mode; in sync mode what its reason says, while the demand is unmet."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.evict import credit_of, judged
from groupstate.core.rules import Rules, recorded_rules
from groupstate.testing.notation import play

from .scenes import SYNC, sync_story


def test_a_refill_has_the_size_of_the_group_that_it_replaces() -> None:
    story = play(
        "submit big/5", "submit small/1", "start big", "start small", "fail big", "fail small",
        rules=Rules(), source=["r1", "r2"], group_size=3,
    )  # fmt: skip

    assert {name: story.group(name).size for name in story.refills()} == {"r1": 5, "r2": 1}


ALL_REASONS = ("cancelled", "damaged", "empty", "failed", "stale", "too_few")


@pytest.mark.parametrize("unmet", [True, False])
@pytest.mark.parametrize("reasons", [*((reason,) for reason in ALL_REASONS), ("zero_variance",), ("stale", "too_few")])
def test_in_async_mode_each_eviction_earns_one(reasons: Any, unmet: bool) -> None:
    assert credit_of(reasons, recorded_rules({"empty": "drop"}), unmet=unmet) == 1


@pytest.mark.parametrize("empty", ["refill", "drop"])
@pytest.mark.parametrize("reason", [*ALL_REASONS, "zero_variance"])
def test_in_sync_mode_nothing_is_earned_once_the_demand_is_met(reason: Any, empty: Any) -> None:
    assert credit_of((reason,), Rules(mode="sync", empty=empty), unmet=False) == 0


@pytest.mark.parametrize(
    ("reasons", "empty", "credit"),
    [
        (("zero_variance",), "refill", 2),
        (("zero_variance",), "drop", 2),
        (("empty",), "refill", 1),
        (("empty",), "drop", 0),
        (("failed",), "drop", 1),
        (("cancelled",), "drop", 1),
        (("damaged",), "drop", 1),
        (("too_few",), "drop", 1),
    ],
)
def test_in_sync_mode_the_reason_says_what_an_unmet_demand_earns(reasons: Any, empty: Any, credit: int) -> None:
    assert credit_of(reasons, Rules(mode="sync", empty=empty), unmet=True) == credit


@pytest.mark.parametrize("rules", [Rules(), Rules(mode="sync")], ids=["async", "sync"])
@pytest.mark.parametrize("reasons", [("surplus",), ("stale", "surplus")])
def test_what_is_surplus_earns_nothing(reasons: Any, rules: Rules) -> None:
    assert credit_of(reasons, rules, unmet=True) == 0


@pytest.mark.parametrize(
    ("flat", "good", "demand", "credit"),
    [
        (1, 0, 1, 2),
        (3, 0, 4, 6),
        (2, 3, 4, 4),
        (2, 4, 4, 0),
        (2, 4, 5, 4),
        (2, 5, 4, 0),
        (1, 3, None, 0),
    ],
)
def test_credit_is_earned_only_while_what_remains_sampleable_is_below_the_demand(
    flat: int, good: int, demand: int | None, credit: int
) -> None:
    story = sync_story(flat=flat, good=good)
    judgement = judged(story.book, SYNC, story.book.groups.values(), demand=demand)

    assert len(judgement.evictions) == flat
    assert sum(evict.credit for evict in judgement.evictions) == credit


def test_groups_without_rows_are_not_taken_off_what_is_sampleable() -> None:
    story = sync_story("submit e/1", "start e", "fail e", good=2)

    assert judged(story.book, SYNC, [story.group("e")], demand=2).evictions[0].credit == 0
    assert judged(story.book, SYNC, [story.group("e")], demand=3).evictions[0].credit == 1


def test_in_sync_mode_nothing_is_evicted_before_somebody_waits() -> None:
    story = play("submit g/2", "start g", "finish g acc=1", "publish 3", rules=SYNC, source=["r1", "r2"])
    before = story.evicted()
    story.tell("sample 1")

    assert before == {}
    assert story.evicted() == {"g": ("zero_variance",)}
    assert story.refills() == ["r1", "r2"]


def test_an_eviction_during_the_drain_earns_nothing() -> None:
    story = play(
        "submit good/2", "submit slow/2", "start good", "start slow", "sample 1", "finish good.0 acc=0",
        "finish good.1 acc=1", "finish slow acc=1", rules=SYNC, source=["r1", "r2"],
    )  # fmt: skip

    assert [(event.group_id, event.credit) for event in story.events(ev.GroupEvicted)] == [("slow", 0)]
    assert story.batches() == [("good",)]
    assert story.refills() == []


def test_a_group_that_the_rules_would_have_kept_empty_leaves_a_demand_unmet_when_it_is_cancelled() -> None:
    rules = Rules(mode="sync", empty="keep")
    story = play("submit g/1", "submit slow/1", "start g", "sample 1", "cancel g", rules=rules, source=["r1"])

    assert [(event.group_id, event.credit) for event in story.events(ev.GroupEvicted)] == [("g", 1)]
    assert story.refills() == ["r1"]


def test_a_group_that_starts_over_is_no_longer_sampleable_when_credit_is_counted() -> None:
    rules = Rules(mode="sync", requeues_max=1)
    story = play(
        "submit again/2", "submit empty/1", "start again", "start empty", "finish again.0 acc=1", "fail again.1",
        "fail empty", "requeue empty", "start empty", "cancel empty", "sample 1", rules=rules, source=["r1"],
    )  # fmt: skip

    assert story.phase("again") == "pending"
    assert [(event.group_id, event.credit) for event in story.events(ev.GroupEvicted)] == [("empty", 1)]


@pytest.mark.parametrize(("demand", "credit"), [(1, 0), (2, 1)])
def test_each_group_that_starts_over_is_one_less_that_is_sampleable(demand: int, credit: int) -> None:
    rules = Rules(mode="sync", requeues_max=1)
    story = sync_story("submit e/1", "start e", "cancel e", good=1)
    for name in ("a", "b"):
        story.tell(f"submit {name}/2", f"start {name}", f"finish {name}.0 acc=1", f"fail {name}.1")
    judgement = judged(story.book, rules, [story.group(name) for name in "abe"], demand=demand)

    assert [requeue.group_id for requeue in judgement.requeues] == ["a", "b"]
    assert [(evict.group_id, evict.credit) for evict in judgement.evictions] == [("e", credit)]
