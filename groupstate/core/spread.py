"""The deviation that numpy computes, rounding and all, for rules that must decide as a filter by `np.std` does.

Rule: the same additions in the same order, so the same last bit.
"""

import math
from collections.abc import Sequence

UNROLLED = 8
"""Partial sums that numpy keeps while it adds up a block."""
BLOCK_MAX = 128
"""Longest block that it adds up without halving it."""


def deviation(values: Sequence[float]) -> float:
    """What `numpy.std(values)` gives: the root of the mean squared distance from the mean, in float64."""
    mean = _sum(values) / len(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return math.sqrt(_sum(squares) / len(values))


def _sum(values: Sequence[float]) -> float:
    """Pairwise, as `numpy.add.reduce` adds a contiguous array."""
    count = len(values)
    if count < UNROLLED:
        total = -0.0
        for value in values:
            total += value
        return total
    if count > BLOCK_MAX:
        half = count // 2
        half -= half % UNROLLED
        return _sum(values[:half]) + _sum(values[half:])
    sums = list(values[:UNROLLED])
    whole = count - count % UNROLLED
    for start in range(UNROLLED, whole, UNROLLED):
        for lane in range(UNROLLED):
            sums[lane] += values[start + lane]
    total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    for value in values[whole:]:
        total += value
    return total
