"""Quantiles of any number of values in a fixed space: counts in buckets that grow by a constant factor.

Rule: two histograms add up to the one of all their values, so intervals can be put together.
"""

import math
from collections.abc import Iterable
from typing import Final

import attrs

BUCKETS_PER_OCTAVE: Final = 8
"""A quantile is off by at most half a bucket: 4.5 %."""

ZERO: Final = -(1 << 20)
"""The bucket of zero, and of less."""


@attrs.define
class Histogram:
    counts: dict[int, int] = attrs.field(factory=dict)
    """By bucket. Values from a nanosecond to a century take some 500 of them."""
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, values: Iterable[float]) -> "Histogram":
        made = cls()
        for value in values:
            made.add(value)
        return made

    def add(self, value: float) -> None:
        bucket = math.floor(math.log2(value) * BUCKETS_PER_OCTAVE) if value > 0 else ZERO
        counts = self.counts
        counts[bucket] = counts.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    def take(self, other: "Histogram") -> None:
        """Count the values of another one too."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float:
        """The value below which so much of them lies, to within 4.5 %; 0 where there are none."""
        assert 0 <= share <= 1
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                middle = 0.0 if bucket == ZERO else 2 ** ((bucket + 0.5) / BUCKETS_PER_OCTAVE)
                return min(max(middle, self.least), self.most)
        return 0.0

    def summary(self) -> "Summary":
        if not self.count:
            return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Summary(self.count, self.total, p50, p90, p99, self.most)


@attrs.frozen
class Summary:
    """Of a histogram; the quantiles to within 4.5 %, the rest exact."""

    count: int
    total: float
    p50: float
    p90: float
    p99: float
    most: float
