"""Numbers of many mini-batches as one each."""

import math
import re
import statistics
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupstate.errors import BadInput, BadSettings
from groupstate.integrations.aggregation import RULES, AggregationError, Aggregator

numbers = st.floats(allow_nan=False, allow_infinity=False)
weights = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


def aggregated(*batches: Mapping[str, Any], rules: Any = None) -> dict[str, float]:
    aggregator = Aggregator(rules)
    for batch in batches:
        aggregator.add(batch)
    return aggregator.take()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", 2.0),
        ("actor/kl/mean", 2.0),
        ("actor/max", 3.0),
        ("grad_norm_max", 3.0),
        ("reward/min", 1.0),
        ("reward_min", 1.0),
        ("tokens_total", 6.0),
        ("tokens/total", 6.0),
        ("tokens/sum", 6.0),
        ("tokens_sum", 6.0),
        ("rows/count", 6.0),
        ("row_count", 6.0),
        ("actor/lr", 2.0),
        ("actor_lr", 2.0),
        ("lr", 2.0),
        ("weight_version", 2.0),
        ("clip/last", 2.0),
        ("clip_last", 2.0),
        ("maximum", 2.0),
    ],
)
def test_the_name_says_what_becomes_of_a_metric(name: str, expected: float):
    assert aggregated({name: 1.0}, {name: 3.0}, {name: 2.0}) == {name: expected}


@pytest.mark.parametrize("name", ["length/hist", "length_hist"])
def test_a_histogram_comes_to_a_count_the_ends_and_three_quantiles(name: str):
    found = aggregated({name: list(range(1, 51))}, {name: list(range(51, 101))})

    assert (found[f"{name}/count"], found[f"{name}/min"], found[f"{name}/max"]) == (100, 1, 100)
    for part, exact in (("p10", 10), ("p50", 50), ("p90", 90)):
        assert found[f"{name}/{part}"] == pytest.approx(exact, rel=0.045)
    assert len(found) == 6


@given(st.lists(numbers, min_size=1))
def test_quantiles_are_close_to_a_value_that_was_there(values: list[float]):
    found = aggregated({"x_hist": values})

    ranked = sorted(values)
    for part, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        exact = ranked[math.ceil(share * len(ranked)) - 1]
        assert found[f"x_hist/{part}"] == pytest.approx(exact, rel=0.0451, abs=1e-322)


@given(st.lists(st.tuples(numbers, weights), min_size=1), st.randoms())
def test_a_mean_is_exact_and_does_not_depend_on_the_order(pairs: list[tuple[float, float]], random: Any):
    def mean() -> dict[str, float]:
        aggregator = Aggregator()
        for value, weight in pairs:
            aggregator.add({"loss": value}, weight=weight)
        return aggregator.take()

    first = mean()
    random.shuffle(pairs)
    assert mean() == first
    total = sum(Fraction(weight) for _, weight in pairs)
    if total:
        assert first == {"loss": float(sum(Fraction(v) * Fraction(w) for v, w in pairs) / total)}
    else:
        assert first == {}


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=50))
def test_sums_are_those_of_fsum_and_equal_weights_are_a_plain_mean(values: list[float]):
    batches = [{"x": value, "x_sum": value, "x_max": value, "x_min": value} for value in values]
    found = aggregated(*batches)

    assert found["x_sum"] == math.fsum(values)
    assert found["x"] == pytest.approx(statistics.fmean(values), rel=1e-15, abs=5e-324)
    assert (found["x_max"], found["x_min"]) == (max(values), min(values))


def test_small_numbers_beside_large_ones_are_not_lost():
    assert aggregated({"x_sum": [1e16, 1.0, -1e16]}) == {"x_sum": 1.0}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_beyond_all_numbers_is_infinite(sign: int):
    assert aggregated({"x_sum": [sign * 1e308] * 2, "x": [sign * 1e308] * 2}) == {
        "x_sum": sign * math.inf,
        "x": sign * 1e308,
    }


def test_a_mean_is_weighted_and_nothing_else_is():
    aggregator = Aggregator()
    batch = {"loss": 1.0, "loss_max": 1.0, "tokens_total": 1.0, "x_hist": 1.0}
    aggregator.add(batch, weight=3)
    aggregator.add({name: 2 * value for name, value in batch.items()}, weight=1)

    found = aggregator.take()
    assert (found["loss"], found["loss_max"], found["tokens_total"], found["x_hist/count"]) == (1.25, 2.0, 3.0, 2.0)


def test_a_mean_of_which_all_has_weight_0_is_left_out():
    aggregator = Aggregator()
    aggregator.add({"loss": 1.0, "loss_max": 2.0}, weight=0)

    assert aggregator.take() == {"loss_max": 2.0}


def test_an_interval_begins_empty_and_one_without_mini_batches_comes_to_nothing():
    aggregator = Aggregator()
    assert aggregator.take() == {}
    aggregator.add({"loss": 1.0, "kl": math.nan, "empty": []})
    assert aggregator.take() == {"loss": 1.0, "kl/not_finite": 1.0}
    aggregator.add({"loss": 3.0})
    assert aggregator.take() == {"loss": 3.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_left_out_and_counted(bad: float):
    found = aggregated({"loss": 1.0, "x_max": bad}, {"loss": bad, "x_max": 2.0}, {"loss": [3.0, bad]})

    assert found == {"loss": 2.0, "x_max": 2.0, "loss/not_finite": 2.0, "x_max/not_finite": 1.0}


def test_or_it_is_refused_with_its_whole_mini_batch():
    aggregator = Aggregator(on_not_finite="refuse")
    aggregator.add({"loss": 1.0})
    with pytest.raises(BadInput, match="metric 'kl' is nan, which is not finite; leave it out, or take on_not_finite"):
        aggregator.add({"loss": 2.0, "kl": math.nan})

    assert aggregator.take() == {"loss": 1.0}


class Spread:
    """A rule of a user's own: two numbers."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float, weight: float) -> None:
        self.values.append(value * weight)

    def value(self) -> dict[str, float]:
        return {"low": min(self.values), "high": max(self.values)}


def test_rules_of_ones_own_come_first_and_may_be_classes():
    rules = {"timing/*": "sum", "actor/loss_max": "last", "reward": Spread}
    found = aggregated(
        {"timing/step": 1.0, "actor/loss_max": 3.0, "reward": 1.0, "other_max": 3.0},
        {"timing/step": 2.0, "actor/loss_max": 2.0, "reward": 0.0, "other_max": 2.0},
        rules=rules,
    )

    assert found == {
        "timing/step": 3.0,
        "actor/loss_max": 2.0,
        "reward/low": 0.0,
        "reward/high": 1.0,
        "other_max": 3.0,
    }


class Faulty:
    """A rule that raises where its values say so, or gives what they say."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def add(self, value: float, weight: float) -> None:
        if value < 0:
            raise ValueError("below zero")
        self.given.append(value)

    def value(self) -> Any:
        if 0 in self.given:
            raise ZeroDivisionError("none to divide by")
        return {7: "seven", 8: {"low": "eight"}}.get(int(sum(self.given)), sum(self.given))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "ZeroDivisionError: none to divide by"),
        (7.0, "ValueError: could not convert string to float: 'seven'"),
        (8.0, "ValueError: could not convert string to float: 'eight'"),
    ],
)
def test_a_rule_of_ones_own_that_fails_costs_its_metric_and_no_other(value: float, text: str):
    aggregator = Aggregator({"own/*": Faulty})
    aggregator.add({"loss": 1.0, "own/a": value, "own/b": 2.0, "kl": math.nan})
    with pytest.raises(AggregationError) as caught:
        aggregator.take()

    assert str(caught.value) == f"metric 'own/a': its rule Faulty (for 'own/*') failed: {text}"
    assert caught.value.metrics == {"loss": 1.0, "own/b": 2.0, "kl/not_finite": 1.0}
    assert isinstance(caught.value.__cause__, (ValueError, ZeroDivisionError))
    # The interval is over: the next one begins empty, with the same rules.
    assert aggregator.take() == {}
    aggregator.add({"loss": 3.0, "own/a": 1.0})
    assert aggregator.take() == {"loss": 3.0, "own/a": 1.0}


def test_one_that_fails_at_a_mini_batch_leaves_its_metric_out_of_the_interval():
    aggregator = Aggregator({"own/*": Faulty})
    aggregator.add({"own/a": 1.0, "own/b": 1.0})
    with pytest.raises(
        AggregationError, match=r"^metric 'own/a': its rule Faulty .* ValueError: below zero$"
    ) as caught:
        aggregator.add({"own/a": [1.0, -1.0], "own/b": 2.0, "loss": 2.0})
    aggregator.add({"own/a": -1.0, "own/b": 3.0})

    assert caught.value.metrics == {}
    assert aggregator.take() == {"own/b": 6.0, "loss": 2.0}
    aggregator.add({"own/a": 4.0})
    assert aggregator.take() == {"own/a": 4.0}


def test_all_that_fail_are_named():
    aggregator = Aggregator({"own/*": Faulty})
    aggregator.add({"own/a": 0.0, "own/b": 0.0})
    with pytest.raises(AggregationError, match=r"^metric 'own/a': .*; metric 'own/b': "):
        aggregator.take()


def test_a_rule_of_which_no_object_can_be_made_is_refused():
    with pytest.raises(BadSettings, match=r"the rule for 'x' is .*; no object of it can be made: TypeError"):
        Aggregator({"x": lambda needed: needed})  # type: ignore[misc, arg-type, dict-item]


def test_arrays_count_value_by_value():
    numpy = pytest.importorskip("numpy")

    assert aggregated({"x": numpy.array([[1.0, 2.0], [3.0, 6.0]]), "y": numpy.float32(0.5), "z_sum": True}) == {
        "x": 3.0,
        "y": 0.5,
        "z_sum": 1.0,
    }


endless: list[Any] = []
endless.append(endless)


class NoData:
    """As a tensor on the device `meta`."""

    def __repr__(self) -> str:
        return "a tensor on no device"

    def tolist(self) -> list[float]:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


@pytest.mark.parametrize(
    ("metrics", "weight", "text"),
    [
        ([1.0], 1, r"metrics is \[1.0\]; it must be a dict of names and numbers"),
        ({1: 1.0}, 1, "the name of a metric is 1; it must be a string"),
        ({"loss": "low"}, 1, "metric 'loss' is 'low'; it must be a number or a list of numbers"),
        ({"loss": None}, 1, "metric 'loss' is None; it must be a number or a list of numbers"),
        ({"loss": {"a": 1.0}}, 1, "metric 'loss' is .*; it must be a number or a list of numbers"),
        ({"loss": [1.0, "low"]}, 1, "metric 'loss' is 'low'"),
        ({"loss": bytearray(b"12")}, 1, "metric 'loss' is bytearray"),
        ({"loss": endless}, 1, "metric 'loss' is .* a number or a list of numbers"),
        ({"loss": NoData()}, 1, "metric 'loss' is a tensor on no device; it must be"),
        ({"loss": 1.0}, -1, "weight is -1; it must be a finite number of at least 0"),
        ({"loss": 1.0}, math.nan, "weight is nan; it must be"),
        ({"loss": 1.0}, math.inf, "weight is inf; it must be"),
        ({"loss": 1.0}, "2", "weight is '2'; it must be"),
    ],
)
def test_what_is_no_number_is_refused_and_nothing_is_taken(metrics: Any, weight: Any, text: str):
    aggregator = Aggregator()
    with pytest.raises(BadInput, match=text):
        aggregator.add({"first": 1.0, **metrics} if isinstance(metrics, dict) else metrics, weight=weight)

    assert aggregator.take() == {}


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            {"loss": "median"},
            "the rule for 'loss' is 'median'; it is one of mean, sum, max, min, last, histogram.* or a class",
        ),
        ({"loss": object}, "it is one of mean, sum"),
        ({"loss": 3}, "the rule for 'loss' is 3"),
        ([("loss", "mean")], "rules is .*; it must be a dict"),
        ({3: "mean"}, "the pattern of a rule is 3; it must be a string"),
    ],
)
def test_a_rule_that_there_is_not_is_refused(rules: Any, text: str):
    with pytest.raises(BadSettings, match=text):
        Aggregator(rules)


def test_another_way_with_values_that_are_not_finite_is_refused():
    with pytest.raises(BadSettings, match="on_not_finite is 'drop'; it is one of count, refuse"):
        Aggregator(on_not_finite="drop")  # type: ignore[arg-type]


def test_the_page_tells_every_rule_by_its_names():
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "trackers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| `(\w+)` \| .* \|$", page.partition("## Many mini-batches")[2], re.MULTILINE)
    told = {pattern: kind for names, kind in rows for pattern in re.findall(r"`([^`]+)`", names) or ["*"]}

    assert told == dict(RULES)
