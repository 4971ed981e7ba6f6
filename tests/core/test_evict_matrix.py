"""Which groups are evicted, cell by cell, and for which reasons; the controller's part is to do it."""

import itertools
from typing import Any, Literal

import pytest

from groupstate.core import events as ev
from groupstate.core.evict import Judgement, Missing, judged, reasons_of
from groupstate.core.rules import Rules, recorded_rules
from groupstate.errors import MissingMetric
from groupstate.testing.notation import play

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
    ("failed without rows", {}, "wait", ("empty",), 1),
    ("failed without rows", {"empty": "drop"}, "off", ("empty",), 1),
    ("failed without rows", {"survivors_min": 2}, "off", ("empty",), 1),
    ("finished without rows", {}, "off", ("empty",), 1),
    ("finished without rows", {}, "drop", ("empty", "stale"), 1),
    ("finished without rows", {}, "wait", ("empty",), 1),
    ("finished without rows", {"empty": "drop"}, "off", ("empty",), 1),
    ("finished without rows", {"empty": "keep_finished", "filter_metric": None}, "off", (), 0),
    ("finished without rows", {"empty": "keep_finished", "filter_metric": None}, "drop", ("stale",), 1),
    ("finished without rows", {"empty": "keep_finished", "on_missing": "keep"}, "off", (), 0),
    ("finished without rows", {"empty": "keep_finished", "on_missing": "evict"}, "off", ("zero_variance",), 1),
    ("finished without rows", {"empty": "keep_all"}, "off", ("empty",), 1),
    ("failed without rows", {"empty": "keep_finished"}, "off", ("empty",), 1),
    ("cancelled with rows", {}, "off", ("cancelled",), 1),
    ("cancelled with rows", {}, "drop", ("cancelled", "stale"), 1),
    ("cancelled with rows", {}, "wait", ("cancelled",), 1),
    ("cancelled with rows", {"survivors_min": 1}, "off", ("cancelled",), 1),
    ("cancelled with rows", {"survivors_min": 2}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "drop", ("cancelled", "stale"), 1),
    ("cancelled without rows", {}, "wait", ("cancelled",), 1),
    ("flat", {"on_stale": "drop", "lag_max": 0, "tolerance": 9.0}, "off", ("stale", "zero_variance"), 1),
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
    ("failed with rows", {}, "wait", (), 0),
    ("failed with rows", {"failure": "refill"}, "off", ("failed",), 1),
    ("failed with rows", {"failure": "refill"}, "drop", ("failed",), 1),
    ("failed with rows", {"survivors_min": 2}, "off", ("too_few",), 1),
    ("failed with rows", {"survivors_min": 1}, "off", ("zero_variance",), 2),
    ("failed without rows", {}, "off", ("empty",), 1),
    ("failed without rows", {}, "drop", ("empty",), 1),
    ("failed without rows", {}, "wait", ("empty",), 1),
    ("failed without rows", {"empty": "keep"}, "off", (), 0),
    ("failed without rows", {"empty": "keep_all"}, "off", (), 0),
    ("failed without rows", {"empty": "keep_finished"}, "off", ("empty",), 1),
    ("failed without rows", {"empty": "keep_all", "failure": "refill"}, "off", ("failed",), 1),
    ("failed without rows", {"failure": "refill"}, "off", ("empty",), 1),
    ("failed without rows", {"empty": "drop"}, "off", ("empty",), 0),
    ("failed without rows", {"empty": "drop", "failure": "refill"}, "off", ("empty",), 0),
    ("finished without rows", {}, "off", ("empty",), 1),
    ("finished without rows", {"empty": "drop"}, "off", ("empty",), 0),
    ("finished without rows", {}, "drop", ("empty",), 1),
    ("finished without rows", {}, "wait", ("empty",), 1),
    ("finished without rows", {"empty": "keep"}, "off", ("empty",), 1),
    ("finished without rows", {"empty": "keep_all", "filter_metric": None}, "off", (), 0),
    ("finished without rows", {"empty": "keep_finished", "on_missing": "keep"}, "off", (), 0),
    ("finished without rows", {"empty": "keep_finished", "on_missing": "evict"}, "off", ("zero_variance",), 2),
    ("cancelled with rows", {}, "off", ("cancelled",), 1),
    ("cancelled with rows", {}, "drop", ("cancelled",), 1),
    ("cancelled with rows", {}, "wait", ("cancelled",), 1),
    ("cancelled without rows", {}, "off", ("cancelled",), 1),
    ("cancelled without rows", {}, "drop", ("cancelled",), 1),
    ("cancelled without rows", {}, "wait", ("cancelled",), 1),
    ("cancelled without rows", {"empty": "drop"}, "off", ("cancelled",), 1),
]

ROWS = [("async", *row) for row in ASYNC_ROWS] + [("sync", *row) for row in SYNC_ROWS]


def test_there_is_a_row_for_each_cell_of_the_matrix() -> None:
    cells = {(mode, made_of, stale) for mode, made_of, more, stale, _, _ in ROWS if not more}

    assert cells == set(itertools.product(("async", "sync"), MADE_OF, ("off", "drop", "wait")))


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
    return recorded_rules(fields | more)


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


# Reasons ---------------------------------------------------------------------------------------------


def test_two_reasons_are_one_eviction_one_credit_and_two_counts() -> None:
    rules = Rules(lag_max=0, filter_metric="acc")
    story = play("submit g/2", "start g", "publish 5", "finish g acc=1", rules=rules, source=["r1", "r2"])
    window = story.book.window("train")

    assert story.evicted() == {"g": ("stale", "zero_variance")}
    assert story.refills() == ["r1"]
    assert (window.evicted_groups, dict(window.evicted)) == (1, {"stale": 1, "zero_variance": 1})


def test_a_failure_with_just_enough_survivors_for_the_rules_of_now_is_not_too_few() -> None:
    story = play("submit g/3", "start g", "finish g.0 acc=0", "finish g.1 acc=1", "fail g.2")

    assert reasons_of(story.group("g"), 0, Rules(survivors_min=2)) == ("failed",)
    assert reasons_of(story.group("g"), 0, Rules(survivors_min=3)) == ("too_few",)


@pytest.mark.parametrize("per", ["session", "trajectory"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_group_that_is_kept_without_a_row_lacks_what_the_filter_reads(mode: str, per: str) -> None:
    rules = matrix_rules(mode, {"empty": "keep_finished", "per": per}, "off")
    lines = ["submit g/2", "start g", "finish g nothing"]
    story = play(*lines, rules=rules, controlled=False)

    assert judged(story.book, rules, [story.group("g")], demand=1) == Judgement((), (Missing("g", 0, "acc", ()),), ())
    refused = play(*lines, "sample 1", rules=rules).waiters[0].error
    assert isinstance(refused, MissingMetric)
    assert (refused.group_id, refused.session, refused.present) == ("g", 0, ())


def test_a_group_that_is_evicted_for_want_of_a_row_shares_no_value() -> None:
    rules = matrix_rules("async", {"empty": "keep_finished", "on_missing": "evict"}, "off")
    story = play("submit g/2", "start g", "finish g nothing", rules=rules)

    assert [event.shared_value for event in story.events(ev.GroupEvicted)] == [None]


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


def test_what_is_not_judged_keeps_nothing_behind_it_from_being_judged() -> None:
    story = play(
        "submit a/1", "submit v/1 partition=val", "start v", "finish v acc=1", "submit g/1", "start g", "fail g"
    )
    candidates = [story.group("a"), story.group("v"), story.group("g")]

    assert [e.group_id for e in judged(story.book, Rules(), candidates, demand=None).evictions] == ["g"]


def test_groups_are_judged_in_the_order_in_which_they_last_ended() -> None:
    story = play(
        "submit a/1", "submit b/1", "submit c/1", "start a", "start b", "fail a", "fail b", "requeue a", "start a",
        "fail a", "sample 1", rules=Rules(mode="sync"), source=["r1", "r2"],
    )  # fmt: skip

    assert list(story.evicted()) == ["b", "a"]
