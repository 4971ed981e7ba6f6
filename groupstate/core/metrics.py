"""The numbers that come with a batch: counts of the log between two batches of one partition.

Names are verl's where verl has one; its staleness numbers hold lag + 1.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from groupstate.core.events import TRAIN, EvictReason
from groupstate.core.group import Group
from groupstate.core.held import Window

EVICTION_METRICS: Final[dict[str, frozenset[EvictReason]]] = {
    "off_policy/evicted_samples": frozenset({"stale"}),
    "filter_groups/evicted_samples": frozenset({"zero_variance"}),
    "rollout_failure/evicted_samples": frozenset({"failed", "empty", "too_few", "damaged"}),
    "filter_groups/discarded_surplus_samples": frozenset({"surplus"}),
    "cancelled/evicted_samples": frozenset({"cancelled"}),
    "custom/evicted_samples": frozenset({"custom"}),
}
"""Groups evicted, by metric. A group counts once under each metric that one of its reasons belongs to."""


def prefix(partition: str) -> str:
    return "training/" if partition == TRAIN else "validation/"


def batch_metrics(
    partition: str, window: Window, groups: Sequence[Group], lags: Sequence[int], weight_version: int
) -> dict[str, float]:
    """Metrics of one batch: what happened since the previous one, and what is in it.

    Args:
        window: counts up to the moment of sampling.
        groups: the groups sampled, with their lags at that moment.
    """
    found: dict[str, float] = {
        name: float(sum(window.evicted[reason] for reason in reasons)) for name, reasons in EVICTION_METRICS.items()
    }
    found["groups/evicted"] = float(window.evicted_groups)
    found["groups/submitted"] = float(window.submitted)
    found["refill/submitted"] = float(window.refills)
    found["refill/forfeited"] = float(window.forfeited)
    found["results/fenced"] = float(window.fenced)
    for kind, count in sorted(window.sessions_failed.items()):
        found[f"sessions/failed/{kind}"] = float(count)
    found.update(_spread("off_policy/evicted_samples_staleness", [lag + 1 for lag in window.stale_lags]))
    found.update(_spread("off_policy/group_staleness", [lag + 1 for lag in lags]))
    found["off_policy/newer_than_trainer"] = float(
        sum(group.aged_from > weight_version for group in groups if group.kept_lag is None)
    )
    rows = [row for group in groups for session in group.sessions for row in session.trajectories]
    widths = [1 + max(s.weight_version for s in row.spans) - min(s.weight_version for s in row.spans)
              for row in rows if row.spans]  # fmt: skip
    found.update(_spread("off_policy/trajectory_spans", widths))
    found.update(_spread("response/tokens", [row.response_tokens for row in rows]))
    rewards = [row.metrics["reward"] for row in rows if "reward" in row.metrics]
    found.update(_spread("reward", rewards))
    return {prefix(partition) + name: value for name, value in found.items()}


def _spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Mean, max and min; no keys where there is no data."""
    numbers = list(values)
    if not numbers:
        return {}
    return {
        f"{name}/mean": sum(numbers) / len(numbers),
        f"{name}/max": float(max(numbers)),
        f"{name}/min": float(min(numbers)),
    }
