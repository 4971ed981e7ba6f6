"""What `stats` counts: per interval of weight versions, and per kind of group.

Rule 1: everything adds up: two intervals put together are the interval of both.
Rule 2: counts have the names that the book's totals have, and mean the same.
Rule 3: a commit that was undone counts as undone, in the interval in which it was made; none is counted below zero.
Rule 4: only training groups are trained on or thrown away; what is validation's is told apart, by `validation` names.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from groupstate.inspect.histogram import Histogram

UNDONE: Final = "undone"
"""Groups whose commit was undone by going back to a mark; such a commit is in no other count of commits."""

REQUEUED: Final = "requeued"
UNTIMED: Final = "untimed"
"""Attempts that were only observed: when they began and ended isn't known."""
"""Why tokens were thrown away that a group had yielded before it started over."""


@attrs.define
class Interval:
    """What happened while some weight versions of one lineage were current."""

    lineage: int
    first_version: int
    last_version: int
    first_seq: int
    last_seq: int
    first_at_ns: int
    last_at_ns: int
    totals: Counter[str] = attrs.field(factory=Counter)
    """Named as the totals of `show`, and also: `finished`, `failure`, `sampled`, `requeued`, `undone`, `untimed`."""
    validation: Counter[str] = attrs.field(factory=Counter)
    """Of `totals`, how much is validation's: `submitted`, `response_tokens`, `committed`, `undone`."""
    validation_tokens: Counter[str] = attrs.field(factory=Counter)
    """Of validation groups, by what came of them: `committed`, `undone`, and `requeued` where they were dropped."""
    fenced: Counter[str] = attrs.field(factory=Counter)
    """Late results by reason."""
    forfeited: Counter[str] = attrs.field(factory=Counter)
    """Refills given up, by reason."""
    trained_tokens: int = 0
    """Of training groups that were committed, for good."""
    undone_tokens: int = 0
    """Of training groups whose commit was undone; once for each time that it was."""
    thrown_tokens: Counter[str] = attrs.field(factory=Counter)
    """Of training groups, by reasons, such as `stale` or `stale, zero_variance`: a group's tokens count once."""
    waited_ns: Counter[str] = attrs.field(factory=Counter)
    """Time in which a training `sample()` waited, by what it waited for."""
    trainer_ns: int = 0
    """Time in which none did, after a training batch and before the next request."""
    down_ns: int = 0
    """Time in which no process had the run open."""
    waits_s: Histogram = attrs.field(factory=Histogram)
    """Of single training `sample()` calls that were served."""
    in_flight_lags: Counter[int] = attrs.field(factory=Counter)
    """Training groups that ended, by the versions published while they were in flight."""
    queue_lags: Counter[int] = attrs.field(factory=Counter)
    """Training groups that were sampled, by the versions published between their end and the batch."""
    sampled_lags: Counter[int] = attrs.field(factory=Counter)
    """Training groups that were sampled, by the lag that the batch says."""
    sessions_s: Histogram = attrs.field(factory=Histogram)
    """Attempts that finished, from their start; without those that were only observed, as in the three below."""
    failed_sessions_s: Histogram = attrs.field(factory=Histogram)
    """Attempts that failed, from their start; those that never began aren't in it."""
    pending_s: Histogram = attrs.field(factory=Histogram)
    """Groups, from their submission to their first session's start."""
    groups_s: Histogram = attrs.field(factory=Histogram)
    """Groups, from their submission to their end."""
    tails_s: Histogram = attrs.field(factory=Histogram)
    """Groups, from when half of their sessions had ended to the end of the last: what stragglers cost."""
    queued_s: Histogram = attrs.field(factory=Histogram)
    """Groups, from their end to the batch."""

    def take(self, other: "Interval") -> None:
        """Put a later interval behind this one."""
        self.last_version, self.last_seq, self.last_at_ns = other.last_version, other.last_seq, other.last_at_ns
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for name in _HISTOGRAMS:
            getattr(self, name).take(getattr(other, name))


_HISTOGRAMS: Final = [f.name for f in attrs.fields(Interval) if f.type is Histogram]
_COUNTERS: Final = [f.name for f in attrs.fields(Interval) if f.type in (Counter[str], Counter[int])]
_NUMBERS: Final = ("trained_tokens", "undone_tokens", "trainer_ns", "down_ns")


def whole_of(intervals: Sequence[Interval]) -> Interval:
    """All of a run's intervals as one; its versions are those of the last lineage."""
    first, last = intervals[0], intervals[-1]
    lowest = min(each.first_version for each in intervals if each.lineage == last.lineage)
    whole = Interval(last.lineage, lowest, lowest, first.first_seq, 0, first.first_at_ns, 0)
    for interval in intervals:
        whole.take(interval)
    return whole


@attrs.define
class Fates:
    """Training groups of one kind that have left, and how."""

    committed: int = 0
    evicted: Counter[str] = attrs.field(factory=Counter)
    """By reasons, such as `stale` or `stale, zero_variance`: a group counts once."""

    @property
    def count(self) -> int:
        return self.committed + self.evicted.total()

    @property
    def survival(self) -> float:
        """The share that was trained on; 0 where none has left."""
        return self.committed / self.count if self.count else 0.0


@attrs.frozen
class Failure:
    kind: str
    message: str
    """On one line, with `#` for every number in it, so that alike ones count together."""
    count: int
    retried: int
    """Of these, how many were tried again."""
    last_seq: int


@attrs.frozen
class Slow:
    """A session that took long."""

    seconds: float
    group_id: str
    session: int
    attempt: int
    seq: int
    """The event of its end."""


@attrs.frozen
class Stats:
    first_seq: int
    last_seq: int
    metric: str
    """Which is told as the reward."""
    by: int
    """Weight versions in an interval."""
    whole: Interval
    """All intervals put together; its versions are those of the last lineage."""
    intervals: tuple[Interval, ...]
    survival: Mapping[str, Mapping[Any, Fates]]
    """Training groups that have left: by `dataset`, `cause`, and by bucket of `prompt_length` (characters of the
    encoded prompt), `answer_tokens` (mean per trajectory) and `reward` (mean of the metric)."""
    failures: tuple[Failure, ...]
    """Most frequent first."""
    slowest: tuple[Slow, ...]
    live: Mapping[str, int]
    """Live groups by phase, at the end."""
    held_tokens: int
    """Yielded by the groups that are live."""
    validation_live: Mapping[str, int]
    """Of these groups, those of validation by phase."""
    validation_held_tokens: int
    owed: int
    """Refills that are owed, at the end."""


# Kinds of groups ------------------------------------------------------------------------------------------


REWARD_STEPS: Final = 10
"""Buckets of a reward in one."""
REWARD_NEAR: Final = 10.0
"""Rewards further from zero are told by their power of two."""

NO_VALUE: Final = (math.inf, math.inf)
"""The bucket of groups without a value, behind all others."""

Bucket = tuple[float, float]
"""From, and up to but not including."""


def length_bucket(length: float) -> Bucket:
    """Powers of two, such as 64 to 128."""
    if length < 1:
        return (0, 1)
    low = 1 << (int(length).bit_length() - 1)
    return (low, 2 * low)


def reward_bucket(value: float | None) -> Bucket:
    """Tenths near zero, powers of two further away."""
    if value is None:
        return NO_VALUE
    if abs(value) < REWARD_NEAR:
        # Means of many tenths are a little off; a value on a bound belongs above it.
        low = math.floor(value * REWARD_STEPS + 1e-9)
        return (low / REWARD_STEPS, (low + 1) / REWARD_STEPS)
    power = 2.0 ** math.floor(math.log2(abs(value)))
    return (power, 2 * power) if value > 0 else (-2 * power, -power)
