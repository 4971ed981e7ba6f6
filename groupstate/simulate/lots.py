"""Lots that are drawn by number: the same seed and key give the same draws, in every process and on every machine.

Rule: each purpose draws by a key of its own, so that one feature more or less changes no draw of another.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(value: int) -> int:
    """SplitMix64's finalizer: every bit of the value moves every bit of the result."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Lots:
    """A stream of draws."""

    __slots__ = ("_state",)

    def __init__(self, *key: int) -> None:
        state = 0
        for part in key:
            state = _mixed((state + part * _GOLDEN + _GOLDEN) & _MASK)
        self._state = state

    def of(self, *key: int) -> "Lots":
        """The stream whose key goes on with `key`, for who begins many that differ in their ends only. Nothing may have
        been drawn from this one."""
        longer = Lots.__new__(Lots)
        state = self._state
        for part in key:
            state = _mixed((state + part * _GOLDEN + _GOLDEN) & _MASK)
        longer._state = state
        return longer

    def unit(self) -> float:
        """In [0, 1)."""
        # `_mixed` once more, since a call takes longer than what it does.
        value = self._state = (self._state + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((value ^ (value >> 31)) >> 11) * 2.0**-53

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.unit() < probability

    def below(self, count: int) -> int:
        """0 up to, not including, `count`."""
        return int(self.unit() * count)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.unit()

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def waiting_s(self, mean_s: float) -> float:
        """Seconds until the next of events that come at random, once in `mean_s` on average."""
        return -mean_s * math.log(1.0 - self.unit())


LawName: TypeAlias = Literal["constant", "exponential", "lognormal", "pareto"]

_inverse = NormalDist().inv_cdf
_SIGMA = 1.5
"""Of the logarithm: the slowest of a hundred takes some thirty times as long as the middle one."""
_SHIFT = _SIGMA**2 / 2
_ALPHA = 1.2
"""Of the tail: with it the mean is still finite, and the variance isn't."""


class Law(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long something takes."""

    law: LawName = "exponential"
    mean_s: float = 10.0
    most_s: float = 86_400.0
    """What is drawn beyond takes this long."""

    def draw(self, lots: Lots) -> float:
        """Seconds."""
        unit = lots.unit()
        if self.law == "constant":
            return self.mean_s
        if self.law == "exponential":
            drawn = -self.mean_s * math.log(1.0 - unit)
        elif self.law == "lognormal":
            normal = _inverse(min(max(unit, 1e-12), 1.0 - 1e-12))
            drawn = self.mean_s * math.exp(_SIGMA * normal - _SHIFT)
        else:
            drawn = self.mean_s * (1.0 - 1.0 / _ALPHA) * (1.0 - unit) ** (-1.0 / _ALPHA)
        return min(drawn, self.most_s)
