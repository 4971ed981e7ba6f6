"""Which groups are evicted, cell by cell; the controller's part is to do it."""

import itertools
from typing import Any, Literal

import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.evict import (
    Evict,
    Judgement,
    Missing,
    credit_of,
    is_doomed,
    is_flat,
    judged,
    newly_stale,
    reasons_of,
)
from groupstate.core.group import Group
from groupstate.core.rules import PerDataset, Rules, recorded_rules
from groupstate.errors import MissingMetric
from groupstate.testing.notation import Story, play

from .scenes import SYNC, sync_story

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


def with_rows(*sessions: list[tuple[dict[str, float], tuple[str, ...]]], **rules: Any) -> Story:
    """A finished group; a row is its metrics, and those that are no number."""
    story = play(f"submit g/{len(sessions)}", "start g", rules=Rules(filter_metric="acc", **rules), controlled=False)
    for number, rows in enumerate(sessions):
        records = tuple(
            ev.TrajectoryRecord(index, metrics, not_finite=without) for index, (metrics, without) in enumerate(rows)
        )
        story.record(ev.SessionFinished("g", number, 1, records))
    return story


NAN: tuple[dict[str, float], tuple[str, ...]] = ({}, ("acc",))
"""A row whose acc is no number."""


@pytest.mark.parametrize("on_missing", ["error", "keep", "evict"])
@pytest.mark.parametrize("per", ["session", "trajectory"])
@pytest.mark.parametrize(
    "sessions", [[[NAN], [NAN]], [[NAN], [({"acc": 1.0}, ())]], [[NAN]]], ids=["all", "one", "single"]
)
def test_a_value_that_is_no_number_keeps_its_group(sessions: Any, per: Any, on_missing: Any) -> None:
    story = with_rows(*sessions, per=per, on_missing=on_missing, on_singleton="evict")

    assert is_flat(story.group("g"), story.rules) is False


def test_another_metric_that_is_no_number_is_none_that_is_missing_here() -> None:
    story = with_rows([({"acc": 1.0}, ("other",))], [({"acc": 1.0}, ())])

    assert is_flat(story.group("g"), story.rules) is True


def test_one_that_is_missing_besides_is_missing() -> None:
    story = with_rows([NAN], [({"other": 1.0}, ("more",))])

    assert is_flat(story.group("g"), story.rules) == Missing("g", 1, "acc", ("other",))


def test_only_the_last_row_of_a_session_counts_where_a_value_is_no_number() -> None:
    rows = [NAN, ({"acc": 1.0}, ())]

    assert is_flat(with_rows(rows, rows).group("g"), Rules(filter_metric="acc")) is True
    assert is_flat(with_rows(rows, rows).group("g"), Rules(filter_metric="acc", per="trajectory")) is False


def test_a_group_that_is_evicted_for_want_of_a_row_shares_no_value() -> None:
    rules = matrix_rules("async", {"empty": "keep_finished", "on_missing": "evict"}, "off")
    story = play("submit g/2", "start g", "finish g nothing", rules=rules)

    assert [event.shared_value for event in story.events(ev.GroupEvicted)] == [None]


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


def test_what_is_not_judged_keeps_nothing_behind_it_from_being_judged() -> None:
    story = play(
        "submit a/1", "submit v/1 partition=val", "start v", "finish v acc=1", "submit g/1", "start g", "fail g"
    )
    candidates = [story.group("a"), story.group("v"), story.group("g")]

    assert [e.group_id for e in judged(story.book, Rules(), candidates, demand=None).evictions] == ["g"]


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
    "rules",
    [Rules(), Rules(lag_max=0, on_stale="wait"), recorded_rules({"mode": "sync", "lag_max": 0})],
    ids=["off", "wait", "sync"],
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
        ([0.1] * 6, True),
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


@pytest.mark.parametrize("spread", ["range", "std"])
@pytest.mark.parametrize(("dataset", "shared"), [("math", 0.25), ("code", None)])
def test_the_tolerance_is_that_of_the_groups_dataset(spread: Any, dataset: str, shared: float | None) -> None:
    rules = Rules(filter_metric="acc", spread=spread, datasets={"math": PerDataset(tolerance=0.5)})
    story = play(
        f"submit g/2 dataset={dataset}", "start g", "finish g.0 acc=0.25", "finish g.1 acc=0.75", controlled=False
    )
    evictions = judged(story.book, rules, [story.group("g")], demand=None).evictions

    assert [e.shared_value for e in evictions] == ([] if shared is None else [shared])


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


@pytest.mark.parametrize("per", ["session", "trajectory"])
def test_a_value_that_one_session_lacks_is_not_shared(per: Any) -> None:
    rules = Rules(filter_metric="acc", on_missing="evict", per=per)
    story = play("submit g/2", "start g", "finish g.0 acc=1", "finish g.1 other=1", rules=rules)
    (event,) = story.events(ev.GroupEvicted)

    assert (event.reasons, event.shared_value) == (("zero_variance",), None)


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


def test_groups_are_judged_in_the_order_in_which_they_last_ended() -> None:
    story = play(
        "submit a/1", "submit b/1", "submit c/1", "start a", "start b", "fail a", "fail b", "requeue a", "start a",
        "fail a", "sample 1", rules=Rules(mode="sync"), source=["r1", "r2"],
    )  # fmt: skip

    assert list(story.evicted()) == ["b", "a"]


# Doomed groups ---------------------------------------------------------------------------------------


def test_a_group_is_not_doomed_by_its_age_where_its_tokens_count() -> None:
    rules = Rules(lag_max=0, basis="newest_token", cancel_doomed=True, attempts_max=2)
    story = play("submit g/2", "start g", "publish 3", "fail g.0 retryable", rules=rules)
    story.tell("start g.0", "finish g reward=1 versions=0,3")

    assert story.ready() == ["g"]


@pytest.mark.parametrize("doomed", [True, False])
def test_a_group_whose_sessions_fail_is_doomed_only_where_the_rules_cancel_doomed_groups(doomed: bool) -> None:
    story = play("submit g/2", "start g", "fail g.0")

    assert is_doomed(story.group("g"), 0, Rules(cancel_doomed=doomed)) is doomed


def test_a_group_in_flight_is_doomed_once_the_version_that_it_is_made_for_is_past() -> None:
    story = play("submit g/1", "start g", rules=Rules.in_order(1, cancel_doomed=True))
    assert story.phase("g") == "running"

    story.tell("publish 1")

    assert story.evicted() == {"g": ("cancelled", "stale")}


def test_doomed_groups_end_oldest_first() -> None:
    rules = Rules(lag_max=0, cancel_doomed=True)
    story = play("submit b/1", "submit a/1 stamp=0", "publish 5", rules=rules, weight_version=1)

    assert list(story.evicted()) == ["a", "b"]
