"""The metrics that come with a batch, as verl's trainer takes them.

Rule: only what happened is there, and once: verl's trainer adds up what it is given.
"""

from collections import Counter
from typing import Any, Final

from groupstate.core import events as ev
from groupstate.core.metrics import EVICTION_METRICS

FILTERED_COUNTS: Final = "_dapo_filtered_reward_counts"
"""The key under which verl's trainer looks for the values that filtered groups collapsed to, each with a count."""

_OF_VERL: Final = (
    "off_policy/evicted_samples",
    "filter_groups/evicted_samples",
    "rollout_failure/evicted_samples",
    "filter_groups/discarded_surplus_samples",
)

_VERL_COUNTS_ITSELF: Final = "off_policy/trajectory_"


def prefix(partition: str) -> str:
    """verl's: every partition but that of training is one of validation."""
    return "training/" if partition == "train" else "validation/"


class Evictions:
    """Groups that were evicted and not told of yet."""

    def __init__(self) -> None:
        self._events: list[ev.GroupEvicted] = []

    def note(self, record: ev.Record) -> None:
        if isinstance(record.event, ev.GroupEvicted):
            self._events.append(record.event)

    def take(self, partition: str) -> dict[str, Any]:
        """What verl's buffer would say of them."""
        events, self._events = self._events, []
        start = prefix(partition)
        found: dict[str, Any] = {}
        for name in _OF_VERL:
            if count := sum(not EVICTION_METRICS[name].isdisjoint(event.reasons) for event in events):
                found[start + name] = count
        if spans := [event.lag + 1 for event in events if "stale" in event.reasons]:
            name = f"{start}off_policy/evicted_samples_staleness"
            found |= {
                f"{name}/mean": sum(spans) / len(spans),
                f"{name}/max": float(max(spans)),
                f"{name}/min": float(min(spans)),
            }
        values = [event.shared_value + 0.0 for event in events if event.shared_value is not None]
        if values:
            found[FILTERED_COUNTS] = dict(Counter(values))
        return found


def everything(partition: str, metrics: dict[str, float]) -> dict[str, float]:
    """groupstate's metrics of a batch under verl's prefix, without those that the trainer works out itself."""
    bare = {name.partition("/")[2]: value for name, value in metrics.items()}
    return {prefix(partition) + name: value for name, value in bare.items() if not name.startswith(_VERL_COUNTS_ITSELF)}
