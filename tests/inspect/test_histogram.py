"""Quantiles from a fixed number of buckets, near those of all values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupstate.inspect.histogram import BUCKETS_PER_OCTAVE, Histogram, Summary

VALUES = st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=60)
HALF_BUCKET = 2 ** (0.5 / BUCKETS_PER_OCTAVE)


@given(VALUES, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_half_a_bucket_of_the_value_there(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = Histogram.of(values).quantile(share)

    assert found == 0 if exact == 0 else exact / HALF_BUCKET * 0.999 <= found <= exact * HALF_BUCKET * 1.001


@given(VALUES, VALUES)
def test_two_add_up_to_the_one_of_all_values(one: list[float], other: list[float]) -> None:
    both = Histogram.of(one)
    both.take(Histogram.of(other))
    whole = Histogram.of(one + other)

    assert (both.counts, both.count, both.least, both.most) == (whole.counts, whole.count, whole.least, whole.most)
    assert both.total == pytest.approx(whole.total)


def test_no_value_is_nought_and_a_negative_one_counts_as_the_least() -> None:
    assert Histogram().summary() == Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert Histogram().quantile(0.5) == 0
    assert Histogram.of([-2.0, 5.0, 5.0]).quantile(0.1) == 0.0


def test_the_buckets_of_a_hundred_years_in_nanoseconds_are_few() -> None:
    assert len(Histogram.of(1e-9 * 1.01**n for n in range(4_300)).counts) < 520
