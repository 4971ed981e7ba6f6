"""The numbers of a run that goes on: what there are, and a reading of all of them.

Rule: `METRICS` is the whole truth. Whoever shows numbers takes names, labels and meanings from it, the docs too.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import attrs

from groupstate.core import events as ev
from groupstate.core.phases import Phase

PARTITIONS: Final = (ev.TRAIN, ev.VALIDATION)

REASONS: Final = get_args(ev.EvictReason)

LIVE: Final = tuple(phase for phase in Phase if phase not in (Phase.EVICTED, Phase.COMMITTED))

DIGITS_MIN: Final = 24

SECONDS: Final = tuple((2**digits - 1) / 1e9 for digits in range(DIGITS_MIN, 43))
"""Upper bounds of the buckets of durations, in seconds: from 17 ms to 73 minutes, each twice the one before."""

LAGS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Upper bounds of the buckets of lags, in weight versions."""

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]
Labels: TypeAlias = tuple[str, ...]
"""Values of a metric's labels, in the order of `Metric.labels`."""


@attrs.frozen
class Metric:
    name: str
    """As Prometheus has it, without the `_total` of a counter."""
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets."""


METRICS: Final = (
    Metric("groupstate_groups", "gauge", "groups", ("partition", "phase"), "Live groups by phase."),
    Metric("groupstate_groups_in_flight", "gauge", "groups", ("partition",), "Groups that are pending or running."),
    Metric("groupstate_groups_sampleable", "gauge", "groups", ("partition",), "Groups that could be sampled now."),
    Metric(
        "groupstate_sessions_in_flight", "gauge", "sessions", ("partition",), "Attempts that began and have not ended."
    ),
    Metric(
        "groupstate_oldest_lag_versions",
        "gauge",
        "weight versions",
        ("partition", "state"),
        "The highest lag of a group that is `in_flight` or `sampleable`; 0 without one.",
    ),
    Metric("groupstate_samplers_waiting", "gauge", "calls", ("partition",), "Calls of `sample()` that wait."),
    Metric("groupstate_refills_owed", "gauge", "groups", (), "Refills that evictions earned and that are to come."),
    Metric("groupstate_admission_held", "gauge", "", (), "1 while nothing is drawn although there is room, else 0."),
    Metric("groupstate_weight_version", "gauge", "weight versions", (), "The current weight version."),
    Metric("groupstate_events_unsynced", "gauge", "events", (), "Events that are recorded and not yet durable."),
    Metric("groupstate_events", "counter", "events", (), "Events recorded."),
    Metric("groupstate_groups_submitted", "counter", "groups", ("partition",), "Groups submitted, refills included."),
    Metric(
        "groupstate_groups_ended",
        "counter",
        "groups",
        ("partition", "outcome"),
        "Groups whose last session ended: `finished`, `partial`, `failed` or `cancelled`.",
    ),
    Metric("groupstate_groups_evicted", "counter", "groups", ("partition",), "Groups evicted, each counted once."),
    Metric(
        "groupstate_evictions",
        "counter",
        "groups",
        ("partition", "reason"),
        "Groups evicted by reason. A group with two reasons counts under both.",
    ),
    Metric("groupstate_refills", "counter", "groups", (), "Groups submitted in the place of evicted ones."),
    Metric("groupstate_refills_forfeited", "counter", "groups", (), "Refills that were earned and given up."),
    Metric(
        "groupstate_groups_requeued", "counter", "groups", ("partition",), "Groups that started over, for any reason."
    ),
    Metric("groupstate_groups_sampled", "counter", "groups", ("partition",), "Groups given to a trainer."),
    Metric("groupstate_groups_committed", "counter", "groups", ("partition",), "Groups trained on, for good."),
    Metric(
        "groupstate_batches",
        "counter",
        "batches",
        ("partition", "outcome"),
        "Batches that were `sampled`, and what became of them: `committed` or `returned`.",
    ),
    Metric("groupstate_sessions_finished", "counter", "attempts", (), "Attempts that gave a result."),
    Metric(
        "groupstate_session_failures",
        "counter",
        "attempts",
        ("partition", "kind"),
        "Attempts that ended without a result, by kind; `spare` ones were not needed any more.",
    ),
    Metric(
        "groupstate_results_fenced",
        "counter",
        "results",
        ("reason",),
        "Late results that changed nothing.",
    ),
    Metric("groupstate_tokens_generated", "counter", "tokens", (), "Response tokens of finished sessions."),
    Metric(
        "groupstate_tokens",
        "counter",
        "tokens",
        ("partition", "fate"),
        "Response tokens whose group has left or started over: `committed`, `evicted` or `requeued`.",
    ),
    Metric(
        "groupstate_session_seconds",
        "histogram",
        "seconds",
        ("partition", "outcome"),
        "An attempt from its start to its end. One that `finished` counts once its group has ended, one that `failed` "
        "at once, and one that never began not at all.",
        SECONDS,
    ),
    Metric(
        "groupstate_sample_wait_seconds",
        "histogram",
        "seconds",
        ("partition",),
        "A `sample()` that was served, from the call to its batch.",
        SECONDS,
    ),
    Metric(
        "groupstate_sampled_lag_versions",
        "histogram",
        "weight versions",
        ("partition",),
        "The lag of a group when it was sampled.",
        LAGS,
    ),
)
"""In the order in which they are shown."""

OUTCOMES: Final = ("finished", "partial", "failed", "cancelled")
FATES: Final = ("committed", "evicted", "requeued")


@attrs.frozen
class Distribution:
    """What a histogram holds."""

    counts: tuple[int, ...]
    """Per bucket, and above the last bound; not summed up."""
    total: float
    """Sum of all values."""

    @property
    def count(self) -> int:
        return sum(self.counts)


Value: TypeAlias = "float | Distribution"
Values: TypeAlias = dict[str, dict[Labels, Value]]


@attrs.frozen
class Reading:
    """All numbers of one moment."""

    seq: int
    """The last event that they know."""
    values: Mapping[str, Mapping[Labels, Value]]
    """By metric and label values. Every value that a label can have is there, but for reasons of later versions."""
