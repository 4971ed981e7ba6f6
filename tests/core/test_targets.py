"""Groups that are made for one weight version (`exact_version`), and the freshest first."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.explain import explain
from groupstate.core.rules import PerBatch, PerDataset, Rules, Slots
from groupstate.core.supply import next_target, shortage
from groupstate.errors import NotEnoughGroups
from groupstate.testing.notation import Story, play

FRESH = Rules(selection="freshest_first")
FIELDS: dict[str, Any] = {
    "selection": "exact_version",
    "basis": "target_version",
    "lag_max": 0,
    "batch_size": 2,
}
EXACT = Rules(**FIELDS)
SOURCE = [f"r{number}" for number in range(1, 20)]


def done(name: str, **options: int) -> list[str]:
    """A group of one session from its submission to its end."""
    words = " ".join(f"{key}={value}" for key, value in options.items())
    return [f"submit {name}/1 {words}", f"start {name}", f"finish {name} acc=1"]


def targets(story: Story) -> dict[str, int | None]:
    return {event.group_id: event.target_version for event in story.events(ev.GroupSubmitted)}


# The freshest first ----------------------------------------------------------------------------------


def test_the_freshest_version_comes_first_and_in_it_the_first_submitted() -> None:
    lines = [*done("c", stamp=1), *done("b", stamp=3), *done("a", stamp=3), *done("d", stamp=2)]
    story = play("publish 3", *lines, "sample 3", rules=FRESH)

    assert story.batches() == [("b", "a", "d")]
    assert story.ready() == ["c"]


def test_the_whole_order_is_newest_to_oldest() -> None:
    names = [(f"g{version}{number}", version) for version in (2, 0, 1) for number in (1, 0)]
    story = play("publish 2", *(line for name, stamp in names for line in done(name, stamp=stamp)), rules=FRESH)

    assert [g.group_id for g in story.book.freshest()] == ["g21", "g20", "g11", "g10", "g01", "g00"]
    assert list(story.book.freshest("val")) == []


def test_validation_is_served_oldest_first_all_the_same() -> None:
    story = play("publish 2", rules=FRESH)
    for name, stamp in (("new", 2), ("old", 0)):
        story.tell(f"submit {name}/1 partition=val stamp={stamp}", f"start {name}", f"finish {name} acc=1")
    story.tell("sample 1 partition=val")

    assert story.batches() == [("old",)]


@pytest.mark.parametrize("back", ["release 1", "recover"])
def test_a_batch_that_came_back_is_passed_over_for_what_is_fresher(back: str) -> None:
    story = play(*done("old"), "sample 1", "publish 1", *done("new"), back, "sample 1", "sample 1", rules=FRESH)

    assert story.batches() == [("old",), ("new",), ("old",)]


# What groups are made for ----------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "made"), [(0, [0, 0]), (1, [0, 0, 1, 1]), (2, [0, 0, 1, 1, 2, 2])])
def test_admission_makes_a_batch_for_each_version_from_the_current_one_on(warmup: int, made: list[int]) -> None:
    story = play("publish 0", rules=Rules(**FIELDS, admission=PerBatch(warmup=warmup)), source=SOURCE, admits=True)
    first = list(targets(story.tell("sample 2")).values())
    story.tell("publish 1")

    assert first == made
    assert list(targets(story).values())[len(made) :] == [warmup + 1] * 2


def test_under_slots_it_makes_as_many_as_there_are_slots() -> None:
    story = play("publish 0", "sample 1", rules=Rules(**FIELDS, admission=Slots(n=5)), source=SOURCE, admits=True)

    assert sorted(targets(story).values(), key=int) == [0, 0, 1, 1, 2]  # type: ignore[arg-type]


def test_a_group_is_sampled_at_its_version_and_no_other() -> None:
    story = play(*done("now", target=0), *done("next", target=1), *done("then", target=2), rules=EXACT)
    story.tell("sample 1", "sample 1")
    waiting = story.batches()
    story.tell("publish 1")

    assert waiting == [("now",)]
    assert story.batches() == [("now",), ("next",)]
    assert story.ready() == ["then"]


def test_the_order_at_a_version_is_that_of_submission() -> None:
    story = play(*done("b", target=0, stamp=0), *done("c", target=1), *done("a", target=0), "sample 2", rules=EXACT)

    assert story.batches() == [("b", "a")]


def test_the_next_target_is_the_first_version_that_is_not_full() -> None:
    story = play(*done("a", target=0), "submit b/1 target=1", "submit c/1 target=1", rules=EXACT)
    first = next_target(story.book, EXACT)
    story.tell("submit d/1")

    assert (first, targets(story)["d"], next_target(story.book, EXACT)) == (0, 0, 2)


def test_validation_groups_are_made_for_no_version() -> None:
    story = play(
        "submit v/1 partition=val", "start v", "finish v acc=1", "publish 5", "sample 1 partition=val", rules=EXACT
    )

    assert targets(story) == {"v": None}
    assert story.batches() == [("v",)]


# Once the version has passed -------------------------------------------------------------------------


def test_what_was_made_for_a_version_that_has_passed_is_stale_and_refilled() -> None:
    story = play(*done("a", target=0), *done("b", target=1), "publish 1", rules=EXACT, source=SOURCE)

    assert story.evicted() == {"a": ("stale",)}
    assert targets(story) == {"a": 0, "b": 1, "r1": 1}


def test_a_refill_is_made_for_the_next_version_that_is_open() -> None:
    story = play(
        *done("a", target=0), "submit b/1 target=1", "submit c/1 target=1", "publish 1", rules=EXACT, source=SOURCE
    )

    assert targets(story)["r1"] == 2


def test_a_refill_for_a_version_to_come_is_made_for_the_same() -> None:
    story = play("submit a/1 target=3", "start a", "fail a", rules=EXACT, source=SOURCE)

    assert targets(story) == {"a": 3, "r1": 3}


def test_a_refill_for_the_current_version_is_made_for_it_although_it_is_full_again() -> None:
    story = play(*(f"submit {name}/1 target=0" for name in "abc"), "start c", "fail c", rules=EXACT, source=SOURCE)

    assert targets(story)["r1"] == 0


def test_refills_that_are_owed_count_for_the_version_that_they_will_be_made_for() -> None:
    rules = Rules(**FIELDS, refill_multiple=2, admission=PerBatch(warmup=1))
    story = play("publish 0", "start r1", "fail r1", rules=rules, source=SOURCE, admits=True)
    owed = (len(story.book.credits), len(targets(story)))
    story.tell("sample 2")

    # One refill is owed for version 0, so neither admission nor the sampler draws another while `r2` is in flight.
    assert owed == (1, 4)
    assert len(targets(story)) == 4


def test_a_refill_that_is_owed_for_a_version_to_come_counts_for_that_one() -> None:
    rules = Rules(**FIELDS, refill_multiple=2)
    story = play("submit a/1 target=1", "submit b/1 target=1", "submit c/1", "submit d/1", rules=rules, source=SOURCE)
    story.tell("start a", "fail a")

    assert len(story.book.credits) == 1
    assert next_target(story.book, rules) == 2


def test_a_group_in_flight_may_end_and_is_stale_then() -> None:
    story = play("submit a/1", "start a", "publish 1", rules=EXACT)
    before = story.phase("a")
    story.tell("finish a acc=1")

    assert (before, story.evicted()) == ("running", {"a": ("stale",)})


def test_under_cancel_doomed_it_is_cancelled_when_its_version_passes() -> None:
    story = play("submit a/1", "submit b/1 target=1", "publish 1", rules=Rules(**FIELDS, cancel_doomed=True))

    assert story.evicted() == {"a": ("cancelled", "stale")}
    assert story.phase("b") == "pending"


def test_a_requeue_keeps_the_target() -> None:
    story = play("submit a/1 target=2", "start a", "publish 1", "requeue a", "start a", "finish a acc=1", rules=EXACT)
    story.tell("sample 1", "publish 2")

    assert story.batches() == [("a",)]


# Samplers that need more -----------------------------------------------------------------------------


def test_a_second_batch_at_the_same_version_is_drawn_for_it() -> None:
    story = play(*done("a"), *done("b"), "sample 2", "sample 2", rules=EXACT, source=SOURCE)

    assert targets(story) == {"a": 0, "b": 0, "r1": 0, "r2": 0}
    assert shortage(story.book, EXACT) == 0


def test_a_second_batch_at_a_version_is_drawn_although_the_versions_ahead_are_full() -> None:
    rules = Rules(**FIELDS, admission=PerBatch(warmup=1))
    story = play("sample 2", rules=rules, source=SOURCE, admits=True)
    for name in ("r1", "r2"):
        story.tell(f"start {name}", f"finish {name} acc=1")
    story.tell("sample 1")

    assert story.batches() == [("r1", "r2")]
    assert list(targets(story).values()) == [0, 0, 1, 1, 0]


def test_groups_for_other_versions_do_not_make_up_a_batch() -> None:
    story = play(*done("a"), *done("b", target=1), "submit c/1 target=1", "sample 2", rules=EXACT, source=[])
    error = story.waiters[0].error

    assert isinstance(error, NotEnoughGroups)
    assert error.counts == {"needed": 2, "sampleable": 1, "in_flight": 0, "older_waiters": 0}


def test_what_is_waited_for_is_explained_by_the_groups_of_the_version() -> None:
    story = play(*done("a"), *done("b", target=1), "submit c/1 target=1", "sample 2", rules=EXACT)
    told = explain(story.book, EXACT, now_ns=story.now_ns, has_source=False, dispatches=False)

    assert told.blocked_by == "1 of 2 groups are sampleable at weight version 0, for which they are made"
    assert (told.needed, told.sampleable) == (2, 1)
    assert told.unblocked_by == ("only a submit can supply the missing 1 group: run.submit(...)",)


def test_only_groups_of_the_version_count_as_sampleable() -> None:
    story = play(*done("a"), *done("b", target=1), *done("c", target=1), rules=EXACT)
    assert story.controller is not None
    before = story.controller.sampleable_count("train")
    story.tell("publish 1")

    assert (before, story.controller.sampleable_count("train")) == (1, 2)


def test_a_group_for_another_version_that_lacks_the_metric_takes_nothing_from_the_count() -> None:
    story = play(
        *done("a"), "submit b/1 target=1", "start b", "finish b len=1", rules=Rules(**FIELDS, filter_metric="acc")
    )
    assert story.controller is not None

    assert story.controller.sampleable_count("train") == 1


# Batches that came back, and marks -------------------------------------------------------------------


@pytest.mark.parametrize("back", ["release 1", "recover"])
def test_a_batch_that_comes_back_at_its_version_is_sampled_again(back: str) -> None:
    story = play(*done("a"), "sample 1", back, "sample 1", rules=EXACT)

    assert story.batches() == [("a",), ("a",)]


@pytest.mark.parametrize("back", ["release 1", "recover", "recover version=1"])
def test_a_batch_that_comes_back_too_late_is_stale(back: str) -> None:
    story = play(*done("a"), "sample 1", "publish 1", back, rules=EXACT)

    assert story.evicted() == {"a": ("stale",)}


def test_going_back_to_a_mark_brings_the_groups_of_its_version_back() -> None:
    story = play(
        *done("a"), "mark", *done("b", target=1), "sample 1", "commit 1", "publish 1", "sample 1", "commit 2",
        rules=EXACT,
    )  # fmt: skip
    story.tell("recover at=1", "sample 1", "sample 1")
    first = story.batches()[2:]
    story.tell("publish 1")

    assert first == [("a",)]
    assert story.batches()[2:] == [("a",), ("b",)]


def test_after_going_back_the_versions_that_come_again_count_what_is_made_for_them() -> None:
    rules = Rules(**FIELDS, admission=PerBatch(warmup=1))
    story = play("mark", "submit a/1 target=1", "publish 1", "publish 2", rules=rules)
    story.tell("start a", "finish a acc=1", "submit b/1 target=3", "recover at=1")

    # `a` was evicted as stale at version 2; `b` awaits its version.
    assert story.evicted() == {"a": ("stale",)}
    assert dict(story.book.targets) == {1: 0, 3: 1}
    assert story.phase("b") == "pending"
    assert story.book.lag(story.group("b")) == 0


def test_versions_that_can_not_come_again_are_forgotten() -> None:
    story = play(*done("a"), "sample 1", "commit 1", *done("b", target=1), "publish 1", rules=EXACT)

    assert dict(story.book.targets) == {1: 1}


def test_an_eviction_for_a_version_that_is_forgotten_counts_nothing_down() -> None:
    story = play("submit a/1", "start a", "publish 1", "finish a acc=1", rules=EXACT)

    assert dict(story.book.targets) == {}


def test_own_tolerances_of_datasets_go_with_targets() -> None:
    rules = Rules(**FIELDS, filter_metric="acc", datasets={"math": PerDataset(tolerance=1.0)})
    story = play("submit a/2 dataset=math", "start a", "finish a.0 acc=0", "finish a.1 acc=1", rules=rules)

    assert story.evicted() == {"a": ("zero_variance",)}
