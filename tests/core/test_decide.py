"""What follows from the book under the rules, cell by cell; the controller's part is to do it."""

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.decide import (
    Evict,
    Judgement,
    Missing,
    admissible,
    credit_of,
    draining,
    forfeits,
    held_by_stale,
    is_flat,
    judged,
    newly_stale,
    reasons_of,
    refills_now,
    selected,
    shortage,
    surplus,
    unservable,
    why_not,
)
from groupstate.core.group import Group
from groupstate.core.rules import Admission, Capacity, PerBatch, Rules, Slots
from groupstate.errors import EvictionStreak, MissingMetric, NotEnoughGroups, RefillLimitExceeded
from groupstate.testing.notation import Story, play

# The matrix ------------------------------------------------------------------------------------------
#
# One group `g` of two sessions, stamped 0, the current version 9 and the bound 1; what it is made of below.

MADE_OF: dict[str, list[str]] = {
    "mixed": ["finish g.0 acc=0", "finish g.1 acc=1"],
    "flat": ["finish g acc=1"],
    "failed with rows": ["finish g.0 acc=1", "fail g.1"],
    "failed without rows": ["fail g"],
    "finished without rows": ["finish g nothing"],
    "cancelled with rows": ["finish g.0 acc=1", "cancel g"],
    "cancelled without rows": ["cancel g"],
}

Stale = Literal["off", "drop", "wait"]
Row = tuple[str, dict[str, Any], Stale, tuple[str, ...], int]

ASYNC_ROWS: list[Row] = [
    # made of, further rules, on_stale, reasons, credit
    ("mixed", {}, "off", (), 0),
    ("mixed", {}, "drop", ("stale",), 1),
    ("mixed", {}, "wait", (), 0),
    ("flat", {}, "off", ("zero_variance",), 1),
    ("flat", {}, "drop", ("stale", "zero_variance"), 1),
    ("flat", {}, "wait", ("zero_variance",), 1),
    ("flat", {"filter_metric": None}, "off", (), 0),
    ("flat", {"filter_metric": None}, "drop", ("stale",), 1),
    ("failed with rows", {}, "off", ("failed",), 1),
    ("failed with rows", {}, "drop", ("failed", "stale"), 1),
    ("failed with rows", {}, "wait", ("failed",), 1),
    ("failed with rows", {"failure": "keep"}, "off", ("failed",), 1),
    ("failed with rows", {"survivors_min": 2}, "off", ("too_few",), 1),
    ("failed with rows", {"survivors_min": 2}, "drop", ("stale", "too_few"), 1),
    ("failed with rows", {"survivors_min": 1}, "off", ("zero_variance",), 1),
    ("failed with rows", {"survivors_min": 1, "on_singleton": "keep"}, "off", (), 0),
    ("failed without rows", {}, "off", ("empty",), 1),
    ("failed without rows", {}, "drop", ("empty", "stale"), 1),
    ("failed without rows", {"empty": "drop"}, "off", ("empty",), 1),
    ("failed without rows", {"survivors_min": 2}, "off", ("empty",), 1),
    ("finished without rows", {}, "off", ("empty",), 1),
    ("finished without rows", {}, "drop", ("empty", "stale"), 1),
    ("finished without rows", {}, "wait", ("empty",), 1),
    ("finished without rows", {"empty": "drop"}, "off", ("empty",), 1),
    ("cancelled with rows", {}, "off", ("cancelled",), 1),
    ("cancelled with rows", {}, "drop", ("cancelled", "stale"), 1),
    ("cancelled with rows", {"survivors_min": 1}, "off", ("cancelled",), 1),
    ("cancelled with rows", {"survivors_min": 2}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "drop", ("cancelled", "stale"), 1),
]

SYNC_ROWS: list[Row] = [
    ("mixed", {}, "off", (), 0),
    ("mixed", {}, "drop", (), 0),
    ("mixed", {}, "wait", (), 0),
    ("flat", {}, "off", ("zero_variance",), 2),
    ("flat", {}, "drop", ("zero_variance",), 2),
    ("flat", {}, "wait", ("zero_variance",), 2),
    ("flat", {"filter_metric": None}, "drop", (), 0),
    ("failed with rows", {}, "off", (), 0),
    ("failed with rows", {}, "drop", (), 0),
    ("failed with rows", {"failure": "refill"}, "off", ("failed",), 1),
    ("failed with rows", {"failure": "refill"}, "drop", ("failed",), 1),
    ("failed with rows", {"survivors_min": 2}, "off", ("too_few",), 1),
    ("failed with rows", {"survivors_min": 1}, "off", ("zero_variance",), 2),
    ("failed without rows", {}, "off", ("empty",), 1),
    ("failed without rows", {"failure": "refill"}, "off", ("empty",), 1),
    ("failed without rows", {"empty": "drop"}, "off", ("empty",), 0),
    ("failed without rows", {"empty": "drop", "failure": "refill"}, "off", ("empty",), 0),
    ("finished without rows", {}, "off", ("empty",), 1),
    ("finished without rows", {"empty": "drop"}, "off", ("empty",), 0),
    ("finished without rows", {}, "drop", ("empty",), 1),
    ("cancelled with rows", {}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "off", ("cancelled",), 1),
    ("cancelled without rows", {"empty": "drop"}, "off", ("cancelled",), 1),
]

ROWS = [("async", *row) for row in ASYNC_ROWS] + [("sync", *row) for row in SYNC_ROWS]


def matrix_rules(mode: str, more: dict[str, Any], stale: Stale) -> Rules:
    fields: dict[str, Any] = {
        "mode": mode,
        "batch_size": 4,
        "filter_metric": "acc",
        "on_singleton": "evict",
        "empty_session": "allow",
    }
    if stale != "off":
        fields |= {"lag_max": 1, "on_stale": stale}
    return Rules(**(fields | more))


def ids_of(row: tuple[Any, ...]) -> str:
    mode, made_of, more, stale, _, _ = row
    return " ".join([mode, made_of, f"stale={stale}", *(f"{key}={value}" for key, value in more.items())])


@pytest.mark.parametrize("row", ROWS, ids=ids_of)
def test_the_matrix_for_training_groups(row: tuple[Any, ...]) -> None:
    mode, made_of, more, stale, reasons, credit = row
    rules = matrix_rules(mode, more, stale)
    story = play("submit g/2", "start g", *MADE_OF[made_of], "publish 9", rules=rules, controlled=False)
    group = story.group("g")
    verdict = judged(story.book, rules, [group], demand=1)

    assert [(e.group_id, e.reasons, e.credit, e.lag) for e in verdict.evictions] == (
        [("g", reasons, credit, 9)] if reasons else []
    )
    assert verdict.kept == (() if reasons else ("g",))
    assert verdict.missing == ()


@pytest.mark.parametrize("row", ROWS, ids=ids_of)
def test_validation_groups_stay_whatever_they_are(row: tuple[Any, ...]) -> None:
    mode, made_of, more, stale, _, _ = row
    rules = matrix_rules(mode, more, stale)
    lines = ["submit g/2 partition=val", "start g", *MADE_OF[made_of], "publish 9"]
    story = play(*lines, "sample 2 partition=val", rules=rules, source=["r1"])

    assert judged(story.book, rules, [story.group("g")], demand=1) == Judgement((), (), ())
    assert story.ready("val") == ["g"]
    assert story.evicted() == {}
    assert story.refills() == []


@pytest.mark.parametrize("row", ROWS, ids=ids_of)
def test_the_controller_does_what_the_matrix_says(row: tuple[Any, ...]) -> None:
    mode, made_of, more, stale, reasons, credit = row
    rules = matrix_rules(mode, more, stale)
    story = play(
        "submit g/2",
        "start g",
        "sample 3",
        *MADE_OF[made_of],
        "publish 9",
        rules=rules,
        source=["r1", "r2", "r3", "r4"],
    )
    event = story.events(ev.GroupEvicted)

    # At the end of the group the version is still 0; it is the publishing that makes it stale.
    expected = tuple(reason for reason in reasons if reason != "stale") or reasons
    assert [(e.group_id, e.reasons, e.credit) for e in event] == ([("g", expected, credit)] if reasons else [])
    assert len(story.refills()) == credit


def test_two_reasons_are_one_eviction_one_credit_and_two_counts() -> None:
    rules = Rules(lag_max=0, filter_metric="acc")
    story = play("submit g/2", "start g", "publish 5", "finish g acc=1", rules=rules, source=["r1", "r2"])
    window = story.book.window("train")

    assert story.evicted() == {"g": ("stale", "zero_variance")}
    assert story.refills() == ["r1"]
    assert (window.evicted_groups, dict(window.evicted)) == (1, {"stale": 1, "zero_variance": 1})


def test_a_refill_has_the_size_of_the_group_that_it_replaces() -> None:
    story = play(
        "submit big/5", "submit small/1", "start big", "start small", "fail big", "fail small",
        rules=Rules(), source=["r1", "r2"], group_size=3,
    )  # fmt: skip

    assert {name: story.group(name).size for name in story.refills()} == {"r1": 5, "r2": 1}


def test_a_failure_with_just_enough_survivors_for_the_rules_of_now_is_not_too_few() -> None:
    story = play("submit g/3", "start g", "finish g.0 acc=0", "finish g.1 acc=1", "fail g.2")

    assert reasons_of(story.group("g"), 0, Rules(survivors_min=2)) == ("failed",)
    assert reasons_of(story.group("g"), 0, Rules(survivors_min=3)) == ("too_few",)


DAMAGED = {"g": "payload 3 is not in the store"}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("made_of", "reasons"),
    [
        ("mixed", ("damaged",)),
        ("flat", ("damaged", "zero_variance")),
        ("failed with rows", ("damaged",)),
        ("failed without rows", ("damaged",)),
        ("finished without rows", ("damaged",)),
        ("cancelled with rows", ("cancelled",)),
    ],
)
def test_a_group_whose_payload_can_not_be_read_goes_as_damaged(
    mode: str, made_of: str, reasons: tuple[str, ...]
) -> None:
    rules = matrix_rules(mode, {"survivors_min": 2}, "off")
    story = play("submit g/2", "start g", *MADE_OF[made_of], rules=rules, controlled=False)
    (evict,) = judged(story.book, rules, [story.group("g")], demand=1, damaged=DAMAGED).evictions

    assert (evict.reasons, evict.message) == (reasons, "payload 3 is not in the store")
    assert evict.credit == (2 if mode == "sync" and "zero_variance" in reasons else 1)


def test_the_damage_of_one_group_is_not_that_of_another() -> None:
    rules = Rules()
    story = play("submit a/1", "start a", "finish a acc=1", rules=rules, controlled=False)

    assert judged(story.book, rules, [story.group("a")], demand=None, damaged=DAMAGED).kept == ("a",)


def test_a_damaged_validation_group_is_not_evicted() -> None:
    story = play("submit g/1 partition=val", "start g", "finish g acc=1")

    assert judged(story.book, Rules(), [story.group("g")], demand=None, damaged=DAMAGED) == Judgement((), (), ())


def test_a_claim_with_damage_goes_back_and_what_is_damaged_is_evicted_and_refilled() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "finish a acc=1", "finish b acc=1", "sample 2",
        rules=Rules(), source=["r1"],
    )  # fmt: skip
    controller, claim = story.controller, story.waiters[0].claim
    assert controller is not None
    assert claim is not None
    controller.give_back_damaged(claim, {"b": "gone"})
    (event,) = story.events(ev.GroupEvicted)

    assert (event.group_id, event.reasons, event.message) == ("b", ("damaged",), "gone")
    assert (story.ready(), story.refills(), controller.damaged) == (["a"], ["r1"], {})


@pytest.mark.parametrize(
    ("made_of", "reason"),
    [
        ("cancelled with rows", "cancelled"),
        ("cancelled without rows", "cancelled"),
        ("failed with rows", "too_few"),
        ("failed without rows", "empty"),
    ],
)
def test_of_the_reasons_of_an_end_the_first_that_holds_is_given(made_of: str, reason: str) -> None:
    rules = Rules(survivors_min=2, failure="refill")
    story = play("submit g/2", "start g", *MADE_OF[made_of], rules=rules, controlled=False)

    assert reasons_of(story.group("g"), 0, rules) == (reason,)


def test_groups_in_flight_and_groups_sampled_are_not_judged() -> None:
    story = play(
        "submit a/1", "submit b/1", "start b", "submit c/1", "start c", "finish c acc=1", "sample 1", "publish 9"
    )
    rules = Rules(lag_max=0, filter_metric="acc")

    assert judged(story.book, rules, story.book.groups.values(), demand=None) == Judgement((), (), ())


# Lag -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag_max", "lag", "reasons"),
    [(0, 0, ()), (0, 1, ("stale",)), (2, 1, ()), (2, 2, ()), (2, 3, ("stale",)), (None, 99, ())],
)
def test_a_lag_of_exactly_the_bound_is_kept(lag_max: int | None, lag: int, reasons: tuple[str, ...]) -> None:
    rules = Rules(lag_max=lag_max)
    story = play("submit g/1", "start g", "finish g acc=1", f"publish {lag}", rules=rules, controlled=False)
    group = story.group("g")

    assert reasons_of(group, story.book.lag(group), rules) == reasons
    assert [g.group_id for g in newly_stale(story.book, rules)] == (["g"] if reasons else [])


def test_a_new_version_looks_at_the_oldest_and_stops_at_the_first_that_is_fresh() -> None:
    lines = [f"submit g{v}/1 stamp={v}" for v in (3, 1, 2, 0)]
    story = play(*lines, *(f"start g{v}" for v in range(4)), *(f"finish g{v} acc=1" for v in range(4)), "publish 3")

    assert [g.group_id for g in newly_stale(story.book, Rules(lag_max=1))] == ["g0", "g1"]
    assert [g.group_id for g in newly_stale(story.book, Rules(lag_max=0))] == ["g0", "g1", "g2"]
    assert newly_stale(story.book, Rules(lag_max=3)) == []


class Counted(Book):
    """A book that counts how often it is asked for a lag."""

    asked = 0

    def lag(self, group: Group) -> int:
        self.asked += 1
        return super().lag(group)


def test_a_new_version_costs_what_it_makes_stale_and_not_what_is_held() -> None:
    story = play("submit old/1", "start old", "finish old acc=1")
    for number in range(20):
        story.tell(f"submit g{number}/1 stamp=1", f"start g{number}", f"finish g{number} acc=1")
    story.tell("publish 1")
    book = Counted()
    for record in story.log.read():
        book.apply(record)
    stale = newly_stale(book, Rules(lag_max=0))

    assert [group.group_id for group in stale] == ["old"]
    assert book.asked == 2


@pytest.mark.parametrize(
    "rules", [Rules(), Rules(lag_max=0, on_stale="wait"), Rules(mode="sync", lag_max=0)], ids=["off", "wait", "sync"]
)
def test_nothing_becomes_stale_unless_the_rules_drop(rules: Rules) -> None:
    story = play("submit g/1", "start g", "finish g acc=1", "publish 9")

    assert newly_stale(story.book, rules) == []


def test_a_group_newer_than_the_trainer_has_lag_zero() -> None:
    story = play("submit g/1 stamp=7", "start g", "finish g acc=1", rules=Rules(lag_max=0))

    assert story.book.lag(story.group("g")) == 0
    assert story.evicted() == {}


def test_publishing_the_current_version_again_changes_nothing() -> None:
    story = play("submit g/1", "start g", "publish 2", "finish g acc=1", "publish 2", rules=Rules(lag_max=2))
    seq = story.book.last_seq
    story.tell("publish 2")

    assert story.book.last_seq == seq
    assert story.phase("g") == "finished"


def test_a_stale_group_in_flight_is_evicted_when_it_is_terminal_and_not_before() -> None:
    story = play("submit g/1", "start g", "publish 9", rules=Rules(lag_max=2), source=["r1"])
    running = story.phase("g")
    story.tell("finish g acc=1")

    assert running == "running"
    assert story.evicted() == {"g": ("stale",)}


# Zero variance ---------------------------------------------------------------------------------------


def flat_group(*rows: str, size: int | None = None) -> Group:
    count = len(rows)
    lines = [f"finish g.{i} {row}" for i, row in enumerate(rows)]
    story = play(f"submit g/{size or count}", "start g", *lines, rules=Rules(empty_session="allow"), controlled=False)
    return story.group("g")


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([0.7] * 6, True),
        ([0.1] * 3, True),
        ([0.1] * 7, True),
        ([1 / 3] * 10, True),
        ([1, 0, 0, 0], False),
        ([1, 1, 1, 0], False),
        ([0.95] * 7 + [0.0], False),
        ([0.7] * 6 + [0.7 + 1e-12], False),
        ([0.1 + 0.2, 0.3], False),
        ([0.0, -0.0], True),
        ([1e308, -1e308], False),
    ],
)
def test_a_group_is_flat_by_its_range_and_not_by_a_deviation(values: list[float], flat: bool) -> None:
    rules = Rules(filter_metric="acc")
    rows = [f"acc={value!r}" for value in values]

    assert is_flat(flat_group(*rows), rules) is flat
    assert is_flat(flat_group(*reversed(rows)), rules) is flat


@pytest.mark.parametrize(
    ("tolerance", "flat"), [(0.0, False), (0.25, False), (0.5, True), (0.50001, True), (0.49999, False)]
)
def test_a_range_of_exactly_the_tolerance_is_flat(tolerance: float, flat: bool) -> None:
    assert is_flat(flat_group("acc=0.25", "acc=0.75"), Rules(filter_metric="acc", tolerance=tolerance)) is flat


@pytest.mark.parametrize(("on_singleton", "flat"), [("keep", False), ("evict", True)])
def test_a_single_value_is_kept_or_evicted_as_the_rules_say(on_singleton: Any, flat: bool) -> None:
    rules = Rules(filter_metric="acc", on_singleton=on_singleton)

    assert is_flat(flat_group("acc=1"), rules) is flat
    assert is_flat(flat_group("acc=1", "nothing"), rules) is flat


def test_the_value_of_a_session_is_that_of_its_last_trajectory() -> None:
    group = flat_group("acc=0 | acc=1", "acc=0.5 | acc=1")

    assert is_flat(group, Rules(filter_metric="acc")) is True
    assert is_flat(group, Rules(filter_metric="acc", per="trajectory")) is False


def test_two_trajectories_of_one_session_are_two_values_only_per_trajectory() -> None:
    group = flat_group("acc=1 | acc=1")
    keep = Rules(filter_metric="acc", on_singleton="keep")

    assert is_flat(group, keep) is False
    assert is_flat(group, Rules(filter_metric="acc", per="trajectory")) is True


def test_a_partial_group_is_classified_by_its_survivors() -> None:
    rules = Rules(filter_metric="acc", survivors_min=2)
    story = play(
        "submit g/3", "start g", "finish g.0 acc=1", "finish g.1 acc=1", "fail g.2", rules=rules, controlled=False
    )

    assert story.group("g").partial
    assert reasons_of(story.group("g"), 0, rules) == ("zero_variance",)


def test_a_failed_group_is_not_classified() -> None:
    story = play("submit g/3", "start g", "finish g.0 acc=1", "finish g.1 acc=1", "fail g.2")
    rules = Rules(mode="sync", batch_size=1, filter_metric="acc")

    assert reasons_of(story.group("g"), 0, rules) == ()


@pytest.mark.parametrize(
    ("on_missing", "reasons"), [("keep", ()), ("evict", ("zero_variance",))], ids=["keep", "evict"]
)
def test_a_group_that_lacks_the_metric_is_kept_or_evicted_as_the_rules_say(
    on_missing: Any, reasons: tuple[str, ...]
) -> None:
    rules = Rules(filter_metric="acc", on_missing=on_missing)

    assert reasons_of(flat_group("acc=1", "reward=1"), 0, rules) == reasons
    assert reasons_of(flat_group("reward=1", "reward=1"), 0, rules) == reasons


def test_a_missing_metric_names_the_session_and_what_there_is() -> None:
    group = flat_group("acc=1", "reward=1 len=5", "acc=0")

    assert reasons_of(group, 0, Rules(filter_metric="acc")) == Missing("g", 1, "acc", ("len", "reward"))


def test_per_trajectory_each_of_them_needs_the_metric() -> None:
    group = flat_group("acc=1", "reward=1 | acc=1")

    assert is_flat(group, Rules(filter_metric="acc")) is True
    assert is_flat(group, Rules(filter_metric="acc", per="trajectory")) == Missing("g", 1, "acc", ("reward",))


def test_per_session_the_session_is_named_whose_last_trajectory_lacks_the_metric() -> None:
    group = flat_group("len=1 | acc=1", "reward=1")

    assert is_flat(group, Rules(filter_metric="acc")) == Missing("g", 1, "acc", ("reward",))


def test_a_group_that_goes_anyway_needs_no_metric() -> None:
    rules = Rules(filter_metric="acc", lag_max=0)

    assert reasons_of(flat_group("reward=1"), 1, rules) == ("stale",)
    assert reasons_of(flat_group("reward=1"), 0, rules) == Missing("g", 0, "acc", ("reward",))


def test_a_judgement_sorts_groups_into_evicted_missing_and_kept() -> None:
    rules = Rules(filter_metric="acc")
    story = play(
        "submit flat/2", "submit mixed/2", "submit bare/1", "start flat", "start mixed", "start bare",
        "finish flat acc=0.5", "finish mixed.0 acc=0", "finish mixed.1 acc=1", "finish bare reward=1",
    )  # fmt: skip
    judgement = judged(story.book, rules, story.book.groups.values(), demand=None)

    assert judgement == Judgement(
        (Evict("flat", ("zero_variance",), 0, 1, 0.5),), (Missing("bare", 0, "acc", ("reward",)),), ("mixed",)
    )


@pytest.mark.parametrize(("per", "value"), [("session", 1.0), ("trajectory", 1.0)])
def test_an_eviction_for_zero_variance_says_the_shared_value(per: Any, value: float) -> None:
    rules = Rules(filter_metric="acc", per=per)
    story = play("submit g/2", "start g", "finish g acc=1 | acc=1", rules=rules)
    (event,) = story.events(ev.GroupEvicted)

    assert (event.shared_value, event.metric) == (value, "acc")


def test_an_eviction_for_another_reason_has_no_shared_value() -> None:
    story = play("submit g/2", "start g", "finish g.0 acc=1", "fail g.1", rules=Rules(filter_metric="acc"))
    (event,) = story.events(ev.GroupEvicted)

    assert (event.reasons, event.shared_value, event.metric) == (("failed",), None, "")


@pytest.mark.parametrize("rows", [["reward=1", "reward=1"]])
def test_without_any_value_none_is_shared(rows: list[str]) -> None:
    rules = Rules(filter_metric="acc", on_missing="evict")
    story = play(
        "submit g/2", "start g", *(f"finish g.{i} {row}" for i, row in enumerate(rows)), rules=rules, controlled=False
    )

    assert judged(story.book, rules, [story.group("g")], demand=None).evictions == (
        Evict("g", ("zero_variance",), 0, 1, None),
    )


def test_values_that_differ_are_not_shared() -> None:
    rules = Rules(filter_metric="acc", on_missing="evict")
    story = play("submit g/3", "start g", "finish g.0 acc=0", "finish g.1 acc=1", "finish g.2 reward=1", rules=rules)
    (event,) = story.events(ev.GroupEvicted)

    assert event.shared_value is None


def test_every_sampler_is_told_of_a_missing_metric_until_the_group_is_gone() -> None:
    rules = Rules(filter_metric="acc", lag_max=0)
    story = play("submit g/1", "sample 1", "start g", "finish g reward=1", "sample 1", rules=rules, source=["r1"])
    errors = [waiter.error for waiter in story.waiters]
    story.tell("publish 1", "start r1", "finish r1.0 acc=0", "finish r1.0 acc=1", "sample 1")

    assert [type(error) for error in errors] == [MissingMetric, MissingMetric]
    assert "session 0 of group 'g' has no metric 'acc'" in str(errors[0])
    assert story.evicted() == {"g": ("stale",)}
    assert story.batches() == [("r1",)]


def test_a_missing_metric_does_not_stop_validation() -> None:
    story = play(
        "submit g/1", "start g", "finish g reward=1", "submit v/1 partition=val", "start v", "finish v reward=1",
        "sample 1 partition=val", rules=Rules(filter_metric="acc"),
    )  # fmt: skip

    assert story.batches() == [("v",)]


def test_a_group_that_lacks_the_metric_is_not_counted_as_sampleable() -> None:
    story = play("submit g/1", "start g", "finish g reward=1", rules=Rules(filter_metric="acc"))
    assert story.controller is not None

    assert story.controller.sampleable_count("train") == 0


# Credit ----------------------------------------------------------------------------------------------

ALL_REASONS = ("cancelled", "damaged", "empty", "failed", "stale", "too_few")


@pytest.mark.parametrize("unmet", [True, False])
@pytest.mark.parametrize("reasons", [*((reason,) for reason in ALL_REASONS), ("zero_variance",), ("stale", "too_few")])
def test_in_async_mode_each_eviction_earns_one(reasons: Any, unmet: bool) -> None:
    assert credit_of(reasons, Rules(empty="drop"), unmet=unmet) == 1


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


SYNC = Rules(mode="sync", batch_size=4, filter_metric="acc")


def sync_story(*lines: str, flat: int = 0, good: int = 0, running: int = 0) -> Story:
    """Groups of a run in sync mode, driven without the controller."""
    story = play()
    for name, count in (("flat", flat), ("good", good), ("run", running)):
        for number in range(count):
            story.tell(f"submit {name}{number}/2", f"start {name}{number}")
            if name == "flat":
                story.tell(f"finish {name}{number} acc=1")
            if name == "good":
                story.tell(f"finish {name}{number}.0 acc=0", f"finish {name}{number}.1 acc=1")
    return story.tell(*lines)


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


# Refills ---------------------------------------------------------------------------------------------


def owing(story: Story, credit: int) -> Story:
    """The same story with so much credit outstanding."""
    story.tell("submit gone/1", "start gone", "fail gone", f"evict gone failed credit={credit}")
    return story


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


def test_a_rollout_is_given_prompts_only_while_it_runs() -> None:
    rules = Rules(batch_size=2)
    idle = play("publish 1", rules=rules, source=["r1", "r2", "r3"])
    running = play("publish 1", rules=rules, source=["r1", "r2", "r3"], admits=True)

    assert idle.book.in_flight_count() == 0
    assert sorted(running.book.groups) == ["r1", "r2"]


# Waiting at the bound ---------------------------------------------------------------------------------

WAIT = Rules(on_stale="wait", lag_max=2, batch_size=1)


@pytest.mark.parametrize(("version", "held"), [(1, False), (2, True), (3, True)])
def test_a_sampler_is_held_by_a_group_in_flight_at_the_bound(version: int, held: bool) -> None:
    story = play("submit old/1", "start old", "sample 1", f"publish {version}")

    assert held_by_stale(story.book, WAIT) is held
    assert (admissible(story.book, WAIT) == 0) is held


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        (["submit old/1", "publish 9"], WAIT),
        (["sample 1", "publish 9"], WAIT),
        (["submit old/1 partition=val", "sample 1", "publish 9"], WAIT),
        (["submit old/1", "start old", "finish old acc=1", "sample 2", "publish 9"], WAIT),
        (["submit old/1", "sample 1", "publish 9"], replace(WAIT, on_stale="drop")),
        (["submit old/1", "sample 1", "publish 9"], replace(WAIT, lag_max=None)),
        (["submit old/1", "sample 1", "publish 9"], replace(WAIT, mode="sync")),
    ],
    ids=["nobody waits", "nothing in flight", "validation", "finished has no bound", "drop", "no bound", "sync"],
)
def test_nothing_is_held_otherwise(lines: list[str], rules: Rules) -> None:
    assert not held_by_stale(play(*lines).book, rules)


def test_the_oldest_group_in_flight_holds_and_its_end_lets_go() -> None:
    story = play(
        "submit old/1", "publish 2", "submit new/1", "start old", "start new", "finish new acc=1", "sample 1",
        rules=WAIT, source=["r1"], admits=True,
    )  # fmt: skip
    held = (story.batches(), story.book.held_reason, story.book.in_flight_count())
    story.tell("finish old acc=1")

    assert held == ([], "a group in flight is at the lag bound", 1)
    assert story.batches() == [("old",)]
    assert story.book.held_reason == ""


def test_refills_go_on_while_admission_is_held() -> None:
    story = play(
        "submit old/1", "submit bad/1", "start old", "start bad", "publish 2", "sample 2", "fail bad",
        rules=WAIT, source=["r1", "r2"], admits=True,
    )  # fmt: skip

    assert story.refills() == ["r1"]
    assert sorted(story.book.groups) == ["old", "r1"]


# Selection -------------------------------------------------------------------------------------------


def blocked(story: Story, rules: Rules, partition: str = "train") -> str | None:
    return why_not(story.book, rules, story.book.waiting(partition)[0])


def test_too_few_sampleable_groups_block_with_both_numbers() -> None:
    assert blocked(sync_story("sample 3", good=2), Rules()) == "2 of 3 groups are sampleable"


def test_a_group_at_the_bound_blocks_with_its_lag() -> None:
    story = play("submit old/1", "submit new/1", "start new", "finish new acc=1", "publish 3")
    story.record(ev.BatchRequested(1, "train", 1, 3))

    assert blocked(story, WAIT) == "group 'old' in flight has lag 3, the bound is 2"
    assert blocked(story, Rules()) is None


def test_a_drain_blocks_until_nothing_is_in_flight() -> None:
    story = sync_story(good=2, running=1)
    story.record(ev.BatchRequested(1, "train", 2, 0))
    before = blocked(story, SYNC)
    story.tell("fail run0")

    assert before == "1 groups in flight are being drained"
    assert blocked(story, SYNC) is None


def test_validation_is_served_whatever_holds_training() -> None:
    story = play("submit old/1", "submit v/1 partition=val", "start v", "finish v acc=1", "publish 9", "sample 1")
    story.record(ev.BatchRequested(2, "val", 1, 9))

    assert blocked(story, WAIT, "val") is None
    assert blocked(story, SYNC, "val") is None


def test_the_oldest_are_selected_by_version_then_by_submission() -> None:
    story = play(
        "submit c/1 stamp=2", "submit b/1 stamp=1", "submit a/1 stamp=1", "start a", "start b", "start c",
        "finish c acc=1", "finish a acc=1", "finish b acc=1",
    )  # fmt: skip
    story.record(ev.BatchRequested(1, "train", 2, 2))

    assert [group.group_id for group in selected(story.book, story.book.requests[1])] == ["b", "a"]


def test_of_groups_that_are_wanted_by_name_only_those_are_selected() -> None:
    story = play("sample 2 partition=val")
    for name in ("a", "b", "c"):
        story.tell(f"submit {name}/1 partition=val", f"start {name}", f"finish {name} acc=1")
    request = story.book.requests[1]

    assert [g.group_id for g in selected(story.book, request)] == ["a", "b"]
    assert [g.group_id for g in selected(story.book, request, wanted=frozenset("bc"))] == ["b", "c"]
    assert [g.group_id for g in selected(story.book, request, wanted=frozenset("cx"))] == ["c"]


def test_groups_reserved_for_somebody_else_are_passed_over() -> None:
    story = play("sample 2 partition=val")
    for name in ("a", "b", "c"):
        story.tell(f"submit {name}/1 partition=val", f"start {name}", f"finish {name} acc=1")
    request = story.book.requests[1]

    assert [g.group_id for g in selected(story.book, request, reserved=frozenset("a"))] == ["b", "c"]
    assert [g.group_id for g in selected(story.book, request, reserved=frozenset("ab"))] == ["c"]
    assert [g.group_id for g in selected(story.book, request, wanted=frozenset("a"), reserved=frozenset("a"))] == ["a"]


def test_of_more_than_enough_each_batch_takes_different_ones() -> None:
    lines = [line for i in range(10) for line in (f"submit g{i}/1", f"start g{i}", f"finish g{i} acc=1")]
    story = play(*lines, "sample 4", "sample 4", "sample 4", rules=Rules())

    assert story.batches() == [("g0", "g1", "g2", "g3"), ("g4", "g5", "g6", "g7")]
    assert story.ready() == ["g8", "g9"]


def test_a_later_waiter_does_not_overtake_an_older_one() -> None:
    story = play("sample 2", "sample 1", "submit a/1", "start a", "finish a acc=1", rules=Rules())
    before = story.batches()
    story.tell("submit b/1", "start b", "finish b acc=1", "submit c/1", "start c", "finish c acc=1")

    assert before == []
    assert story.batches() == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("lines", "demand", "rules", "expected"),
    [
        ([], 2, replace(SYNC, batch_size=2), ["good2", "good3"]),
        ([], 4, SYNC, []),
        ([], 2, SYNC, []),
        (["exhausted"], 2, replace(SYNC, batch_size=2), []),
        ([], 2, Rules(mode="sync", batch_size=2), []),
        ([], 2, Rules(batch_size=2, filter_metric="acc"), []),
    ],
    ids=["surplus", "none over", "small demand", "exhausted", "no filter", "async"],
)
def test_what_is_sampleable_beyond_a_full_batch_is_surplus(
    lines: list[str], demand: int, rules: Rules, expected: list[str]
) -> None:
    story = sync_story(*lines, good=4)
    story.record(ev.BatchRequested(1, "train", demand, 0))
    request = story.book.requests[1]

    assert surplus(story.book, rules, request, selected(story.book, request)) == [
        Evict(name, ("surplus",), 0, 0) for name in expected
    ]


def test_validation_has_no_surplus() -> None:
    story = sync_story(good=2)
    story.record(ev.BatchRequested(1, "val", 4, 0))

    assert surplus(story.book, SYNC, story.book.requests[1], []) == []


@pytest.mark.parametrize(
    ("lines", "demands", "hopeless"),
    [
        (["exhausted"], [2], None),
        (["exhausted"], [3], None),
        (["exhausted"], [4], 1),
        ([], [4], None),
        (["exhausted"], [2, 1], None),
        (["exhausted"], [2, 2], 2),
        (["exhausted"], [4, 1], 1),
        (["exhausted"], [1, 1, 1, 1], 4),
        (["exhausted"], [], None),
    ],
)
def test_a_waiter_is_hopeless_if_what_older_ones_leave_is_too_little(
    lines: list[str], demands: list[int], hopeless: int | None
) -> None:
    story = sync_story(*lines, good=2, running=1)
    for number, size in enumerate(demands, 1):
        story.record(ev.BatchRequested(number, "train", size, 0))
    found = unservable(story.book)

    assert (None if found is None else found.request) == hopeless


def test_while_credit_is_outstanding_nobody_is_hopeless() -> None:
    story = owing(sync_story("sample 3", "exhausted"), 1)

    assert unservable(story.book) is None


def test_a_source_that_gives_nothing_any_more_is_as_good_as_exhausted() -> None:
    book = sync_story("sample 3", good=2).book

    assert unservable(book) is None
    assert unservable(book, no_more=True) == book.requests[1]


def test_validation_is_never_hopeless() -> None:
    assert unservable(sync_story("sample 3 partition=val", "exhausted").book) is None


# As the controller does it ---------------------------------------------------------------------------


def test_credit_of_sync_mode_is_spent_slot_by_slot_and_the_surplus_discarded() -> None:
    story = play(
        "submit same/2", "submit slow/2", "start same", "start slow", "sample 2", "finish same acc=0",
        rules=replace(SYNC, batch_size=2), source=["r1", "r2", "r3"],
    )  # fmt: skip
    first = story.refills()
    story.tell("start r1", "finish r1.0 acc=0", "finish r1.1 acc=1")
    second = story.refills()
    story.tell("start r2", "finish r2.0 acc=0", "finish r2.1 acc=1")
    waiting = story.batches()
    story.tell("finish slow.0 acc=0", "finish slow.1 acc=1")

    assert (first, second, waiting) == (["r1"], ["r1", "r2"], [])
    assert story.batches() == [("slow", "r1")]
    assert story.evicted() == {"same": ("zero_variance",), "r2": ("surplus",)}
    assert story.refills() == ["r1", "r2"]


def test_a_demand_that_refills_can_not_meet_is_drawn_from_the_source() -> None:
    story = play("sample 3", rules=Rules(), source=["r1", "r2", "r3", "r4"])

    assert sorted(story.book.groups) == ["r1", "r2", "r3"]
    assert story.refills() == []


def test_an_exhausted_source_answers_the_waiter_with_the_counts_and_keeps_the_rest() -> None:
    story = play(
        "submit a/1", "submit b/1", "submit c/1", "start a", "start b", "start c", "finish a acc=1",
        "sample 3", "fail b", "finish c acc=1", rules=Rules(), source=[],
    )  # fmt: skip
    error = story.waiters[0].error
    story.tell("sample 2")

    assert isinstance(error, NotEnoughGroups)
    assert (error.needed, error.counts) == (
        3,
        {"needed": 3, "sampleable": 1, "in_flight": 1, "older_waiters": 0},
    )
    assert "sample a batch of at most 2" in str(error)
    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(1, "source exhausted")]
    assert story.batches() == [("a", "c")]


def test_with_several_waiters_the_one_that_is_left_without_is_told() -> None:
    story = play("submit a/1", "start a", "sample 1", "sample 1", rules=Rules(), source=[])

    assert [type(waiter.error).__name__ for waiter in story.waiters] == ["NoneType", "NotEnoughGroups"]
    assert "1 in flight of which older samplers wait for 1" in str(story.waiters[1].error).replace(",", "")


def test_a_streak_of_evictions_stops_the_run_with_the_reasons() -> None:
    rules = Rules(filter_metric="acc", eviction_streak_max=3)
    story = play("submit g/2", "sample 1", "start g", "finish g acc=1", rules=rules, source=["r1", "r2", "r3", "r4"])
    story.tell("start r1", "finish r1 acc=1")
    before = story.waiters[0].error
    story.tell("start r2", "fail r2")
    error = story.waiters[0].error

    assert before is None
    assert isinstance(error, EvictionStreak)
    assert (error.streak, error.bound, error.reasons) == (3, 3, {"zero_variance": 2, "empty": 1})


def test_a_group_that_is_kept_ends_the_streak() -> None:
    rules = Rules(filter_metric="acc", eviction_streak_max=2)
    story = play(
        "submit a/2", "submit b/2", "submit c/2", "sample 3", "start a", "start b", "start c", "finish a acc=1",
        "finish b.0 acc=0", "finish b.1 acc=1", "finish c acc=1", rules=rules, source=[f"r{i}" for i in range(9)],
    )  # fmt: skip

    assert story.evicted() == {"a": ("zero_variance",), "c": ("zero_variance",)}
    assert story.waiters[0].error is None


def test_one_batch_takes_no_more_groups_than_the_limit() -> None:
    rules = Rules(filter_metric="acc", generated_groups_max=2)
    story = play("submit g/2", "sample 1", "start g", "finish g acc=1", rules=rules, source=["r1", "r2"])
    at_the_limit = story.waiters[0].error
    story.tell("start r1", "finish r1 acc=1")
    error = story.waiters[0].error

    assert at_the_limit is None
    assert isinstance(error, RefillLimitExceeded)
    assert (error.generated, error.bound, error.reasons) == (3, 2, {"zero_variance": 2})


def test_a_withdrawn_sampler_takes_nothing() -> None:
    story = play("submit a/1", "sample 2", "withdraw", "start a", "finish a acc=1", "sample 1", rules=Rules())

    assert story.batches() == [("a",)]
    assert story.events(ev.BatchRequestCancelled) == [ev.BatchRequestCancelled(1, "told so")]


def test_a_sampler_that_leaves_with_its_batch_gives_it_back() -> None:
    story = play("submit a/1", "start a", "finish a acc=1", "sample 1", "withdraw", rules=Rules())

    assert story.ready() == ["a"]
    assert story.events(ev.BatchReturned) == [ev.BatchReturned(1, "cancelled")]
