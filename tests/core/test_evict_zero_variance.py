"""Groups whose values don't differ: what is flat, which values count, and what a missing one leads to."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.evict import Evict, Judgement, Missing, is_flat, judged, reasons_of
from groupstate.core.group import Group
from groupstate.core.rules import PerDataset, Rules
from groupstate.errors import MissingMetric
from groupstate.testing.notation import Story, play

# Flat ------------------------------------------------------------------------------------------------


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


# Values that are missing, or no numbers --------------------------------------------------------------


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


# What is told ----------------------------------------------------------------------------------------


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
