"""The deviation that numpy computes, to the last bit."""

import random

import numpy as np
import pytest

from groupstate.core.evict import is_flat
from groupstate.core.group import Group
from groupstate.core.rules import Rules
from groupstate.core.spread import deviation
from groupstate.testing.notation import play

KINDS = {
    "even": lambda: random.random(),
    "a few values": lambda: random.choice([0.1, 0.3, 0.7]),
    "of all sizes": lambda: random.gauss(0, 1) * 10 ** random.randint(-8, 8),
    "near to each other": lambda: 0.7 + random.random() * 1e-15,
    "of both signs": lambda: random.choice([-1.0, -0.0, 0.0, 1.0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_deviation_is_numpys_bit_for_bit(kind: str) -> None:
    random.seed(kind)
    for size in [*range(1, 301)] * 4:
        values = [KINDS[kind]() for _ in range(size)]

        assert deviation(values) == float(np.std(values)), values


def test_more_values_than_numpy_buffers_at_once_make_no_difference() -> None:
    random.seed(0)
    values = [random.random() for _ in range(20_000)]

    assert deviation(values) == float(np.std(values))


def group_of(*values: float) -> Group:
    lines = [f"finish g.{number} acc={value}" for number, value in enumerate(values)]
    return play(f"submit g/{len(values)}", "start g", *lines).group("g")


@pytest.mark.parametrize(
    ("values", "tolerance", "by_range", "by_std"),
    [
        # Six times 0.7 has a deviation, numpy's rounding and all.
        ((0.7,) * 6, 0.0, True, False),
        ((0.5,) * 6, 0.0, True, True),
        ((0.0, 1.0), 0.5, False, True),
        ((0.0, 1.0), 0.4, False, False),
        ((0.0, 0.4), 0.4, True, True),
    ],
)
def test_std_is_held_against_the_tolerance_in_place_of_the_range(
    values: tuple[float, ...], tolerance: float, by_range: bool, by_std: bool
) -> None:
    group = group_of(*values)

    assert is_flat(group, Rules(filter_metric="acc", tolerance=tolerance)) is by_range
    assert is_flat(group, Rules(filter_metric="acc", tolerance=tolerance, spread="std")) is by_std


def test_std_is_over_one_value_per_session_or_per_trajectory() -> None:
    group = play("submit g/2", "start g", "finish g.0 acc=0 | acc=1", "finish g.1 acc=1").group("g")
    rules = {per: Rules(filter_metric="acc", spread="std", per=per) for per in ("session", "trajectory")}

    assert is_flat(group, rules["session"]) is True
    assert is_flat(group, rules["trajectory"]) is False


def test_a_metric_that_some_lack_under_on_missing_is_not_looked_at() -> None:
    group = play("submit g/2", "start g", "finish g.0 acc=1", "finish g.1 len=1").group("g")

    assert is_flat(group, Rules(filter_metric="acc", spread="std", on_missing="keep")) is False
    assert is_flat(group, Rules(filter_metric="acc", spread="std", on_missing="evict")) is True


def test_sessions_that_are_flat_by_std_only_share_no_value() -> None:
    rules = Rules(filter_metric="acc", spread="std", tolerance=0.5)
    story = play("submit g/2", "start g", "finish g.0 acc=0", "finish g.1 acc=1", rules=rules)

    assert story.evicted() == {"g": ("zero_variance",)}
    assert not story.book.window("train").filtered_values
