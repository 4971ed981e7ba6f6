"""The numbers that come with a batch: counts of the log between two batches of one partition.

Rule 1: names are verl's where verl has one. Its staleness of a group holds lag + 1, its staleness of a
trajectory holds none.
Rule 2: a number is kept as what it was made of, so that tallies merge into what one tally of all would be:
no mean of means.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from groupstate.core.events import TRAIN, EvictReason, VersionSpan
from groupstate.core.group import Group
from groupstate.core.held import Window
from groupstate.errors import BadSettings

EVICTION_METRICS: Final[dict[str, frozenset[EvictReason]]] = {
    "off_policy/evicted_samples": frozenset({"stale"}),
    "filter_groups/evicted_samples": frozenset({"zero_variance"}),
    "rollout_failure/evicted_samples": frozenset({"failed", "empty", "too_few", "damaged"}),
    "filter_groups/discarded_surplus_samples": frozenset({"surplus"}),
    "cancelled/evicted_samples": frozenset({"cancelled"}),
    "custom/evicted_samples": frozenset({"custom"}),
}
"""Groups evicted, by metric. A group counts once under each metric that one of its reasons belongs to."""

WINDOW_METRICS: Final[dict[str, str]] = {
    "groups/evicted": "evicted_groups",
    "groups/submitted": "submitted",
    "refill/submitted": "refills",
    "refill/forfeited": "forfeited",
    "results/fenced": "fenced",
    "groups/requeued": "requeued",
}
"""Plain counts, by metric: the field of `Window` that holds them."""


def prefix(partition: str) -> str:
    return "training/" if partition == TRAIN else "validation/"


class Spread(msgspec.Struct, frozen=True, gc=False):
    """How many values there were, and how they lie; at least one."""

    count: int
    total: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None where there is no value."""
        numbers = list(values)
        if not numbers:
            return None
        return cls(len(numbers), float(sum(numbers)), float(min(numbers)), float(max(numbers)))

    @property
    def mean(self) -> float:
        return self.total / self.count

    def merged(self, other: "Spread") -> "Spread":
        return Spread(
            self.count + other.count, self.total + other.total, min(self.low, other.low), max(self.high, other.high)
        )


class Tally(msgspec.Struct, frozen=True):
    """The metrics of one partition, of one `sample()` or of several, in a form that can be merged.

    Names are without `training/` or `validation/`; `flat()` puts that in front.
    """

    partition: str
    sums: dict[str, float] = {}
    """Counts."""
    spreads: dict[str, Spread] = {}
    """What has a mean, a maximum and a minimum; without a key where there is no data."""
    histograms: dict[str, dict[float, int]] = {}
    """How often each value occurred; without a key where none did. Not in `flat()`."""

    def flat(self) -> dict[str, float]:
        """Name -> number, as a tracker takes it."""
        start = prefix(self.partition)
        found = {start + name: value for name, value in self.sums.items()}
        for name, spread in self.spreads.items():
            found[f"{start}{name}/mean"] = spread.mean
            found[f"{start}{name}/max"] = spread.high
            found[f"{start}{name}/min"] = spread.low
        return found

    @classmethod
    def merged(cls, tallies: "Iterable[Tally]") -> "Tally":
        """Several tallies of one partition as one: counts added up, means weighted by what they are means of.

        Raises:
            BadSettings: no tally, or tallies of different partitions.
        """
        given = list(tallies)
        partitions = sorted({tally.partition for tally in given})
        if not given:
            raise BadSettings("there is nothing to merge: give at least one tally")
        if len(partitions) > 1:
            raise BadSettings(f"tallies of {' and '.join(map(repr, partitions))} can't be one; merge each partition")
        sums: dict[str, float] = {}
        spreads: dict[str, Spread] = {}
        histograms: dict[str, Counter[float]] = {}
        for tally in given:
            for name, value in tally.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, spread in tally.spreads.items():
                spreads[name] = spread.merged(spreads[name]) if name in spreads else spread
            for name, histogram in tally.histograms.items():
                histograms.setdefault(name, Counter()).update(histogram)
        return cls(partitions[0], sums, spreads, {name: dict(counts) for name, counts in histograms.items()})


def batch_tally(
    partition: str, window: Window, groups: Sequence[Group], lags: Sequence[int], weight_version: int
) -> Tally:
    """Metrics of one batch: what happened since the previous one, and what is in it.

    Args:
        window: counts up to the moment of sampling.
        groups: the groups sampled, with their lags at that moment.
    """
    sums = {**_window_sums(window), **_group_sums(groups, weight_version)}
    values_of: dict[str, Sequence[float]] = {
        "off_policy/evicted_samples_staleness": [lag + 1 for lag in window.stale_lags],
        **_group_values(groups, lags),
        **_trajectory_values(groups, weight_version),
    }
    # A value of -0.0 is counted as 0.0, whichever came first.
    filtered = {value + 0.0: count for value, count in window.filtered_values.items()}
    return Tally(
        partition,
        sums,
        {name: found for name, values in values_of.items() if (found := Spread.of(values)) is not None},
        {"filter_groups/filtered_values": filtered} if filtered else {},
    )


def _window_sums(window: Window) -> dict[str, float]:
    sums = {
        name: float(sum(window.evicted[reason] for reason in reasons)) for name, reasons in EVICTION_METRICS.items()
    }
    sums |= {name: float(getattr(window, field)) for name, field in WINDOW_METRICS.items()}
    for kind, count in sorted(window.sessions_failed.items()):
        sums["sessions/spare" if kind == "spare" else f"sessions/failed/{kind}"] = float(count)
    sums |= {f"datasets/{name}/starved": float(count) for name, count in sorted(window.starved.items())}
    return sums


def _group_sums(groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    newer = sum(group.aged_from > weight_version for group in groups if group.kept_lag is None)
    datasets = Counter(group.dataset for group in groups if group.dataset)
    sums = {f"datasets/{name}/sampled": float(count) for name, count in sorted(datasets.items())}
    return {"off_policy/newer_than_trainer": float(newer), **sums}


def _group_values(groups: Sequence[Group], lags: Sequence[int]) -> dict[str, Sequence[float]]:
    in_flight = [lag_in_flight(group, lag) for group, lag in zip(groups, lags, strict=True)]
    return {
        "off_policy/group_staleness": [lag + 1 for lag in lags],
        "off_policy/lag_in_flight": in_flight,
        "off_policy/lag_in_queue": [lag - flown for lag, flown in zip(lags, in_flight, strict=True)],
    }


def lag_in_flight(group: Group, lag: int) -> int:
    """The part of the group's lag that came up before its last session ended; the rest it waited to be sampled."""
    return min(max(0, group.ended_version - group.aged_from), lag)


def _trajectory_values(groups: Sequence[Group], weight_version: int) -> dict[str, Sequence[float]]:
    rows = [row for group in groups for session in group.sessions for row in session.trajectories]
    versions = [_version_range(row.spans) for row in rows if row.spans]
    return {
        "off_policy/trajectory_spans": [newest - oldest + 1 for oldest, newest in versions],
        "off_policy/trajectory_staleness": [max(0, weight_version - newest) for _, newest in versions],
        "off_policy/trajectory_staleness_worst": [max(0, weight_version - oldest) for oldest, _ in versions],
        "response/tokens": [row.response_tokens for row in rows],
        "reward": [row.metrics["reward"] for row in rows if "reward" in row.metrics],
    }


def _version_range(spans: Sequence[VersionSpan]) -> tuple[int, int]:
    """Oldest and newest of the versions that generated a trajectory."""
    if len(spans) == 1:  # As nearly always.
        return spans[0].weight_version, spans[0].weight_version
    versions = [span.weight_version for span in spans]
    return min(versions), max(versions)
