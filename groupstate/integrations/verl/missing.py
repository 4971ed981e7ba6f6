"""What a trajectory that lacks the filter's metric has in its place.

The log has the filter's metric alone, so what else there is can only be read from TransferQueue.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from groupstate.core.arguments import shown
from groupstate.errors import MissingMetric
from groupstate.integrations.verl.queue import REWARD, Partition, number

ADVICE: Final = (
    "Report {!r} from every session, name another metric in algorithm.filter_groups.metric, or set "
    "sampler_kwargs.rules.on_missing to 'keep' or 'evict'"
)


class MissingVerlMetric(MissingMetric, RuntimeError):
    """A finished group lacks the metric that the filter reads. verl raises `RuntimeError`."""

    def __init__(self, missing: MissingMetric, present: Sequence[str], text: str) -> None:
        super().__init__(missing.group_id, missing.session, missing.metric, present)
        self.args = (text,)


def explained(missing: MissingMetric, partition: Partition, keys: list[str]) -> MissingVerlMetric:
    """The same with what there is.

    Args:
        keys: those of the session's trajectories that the filter reads.
    """
    metric, end = missing.metric, ADVICE.format(missing.metric)
    start = f"session {missing.session} of group {missing.group_id!r} has no metric {metric!r}"
    if not keys:
        return MissingVerlMetric(missing, (), f"{start}, which the filter reads, since it has no trajectory. {end}")
    if metric == REWARD:
        return MissingVerlMetric(missing, (), f"{start}, which the filter reads from its rm_scores: it has none. {end}")
    infos = partition.infos(keys)
    info = next((info for info in infos.values() if number(info.get(metric)) is None), {})
    return MissingVerlMetric(missing, tuple(sorted(map(str, info))), f"{start}{_instead(info, metric)}. {end}")


def _instead(info: Mapping[Any, Any], metric: str) -> str:
    if metric in info:
        return f" that is a number, which the filter reads: its reward_extra_info says {shown(info[metric])}"
    there = ", ".join(map(repr, sorted(map(str, info)))) or "nothing"
    return f", which the filter reads; its reward_extra_info has {there}"
