"""The run's picture, drawn from its event log alone."""

from collections import Counter
from pathlib import Path

import attrs

from groupstate.core import events as ev
from groupstate.log.reading import read_log


@attrs.define
class Point:
    """One trainer step as the log tells it."""

    weight_version: int
    reward: float
    lag: float
    evicted: Counter[str]
    """By reason, since the step before."""


def history(folder: Path) -> list[Point]:
    """The batches that were trained on, in order; a step that was done over counts as it was done last."""
    rewards: dict[str, list[float]] = {}
    evicted: Counter[str] = Counter()
    points: dict[int, Point] = {}
    for record in read_log(folder):
        event = record.event
        if isinstance(event, ev.SessionFinished):
            rewards.setdefault(event.group_id, []).extend(row.metrics["reward"] for row in event.trajectories)
        elif isinstance(event, ev.GroupRequeued):
            rewards.pop(event.group_id, None)
        elif isinstance(event, ev.GroupEvicted):
            evicted.update(event.reasons)
        elif isinstance(event, ev.BatchSampled) and event.partition == ev.TRAIN:
            values = [value for group_id in event.group_ids for value in rewards[group_id]]
            lag = sum(event.lags) / len(event.lags)
            points[event.weight_version] = Point(event.weight_version, sum(values) / len(values), lag, evicted)
            evicted = Counter()
    return [points[version] for version in sorted(points)]


def draw(points: list[Point], path: Path) -> None:
    """Reward, lag and evictions over weight versions, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    reward, lag, evicted = figure.subplots(3, 1, sharex=True)
    steps = [point.weight_version for point in points]
    reward.plot(steps, [point.reward for point in points], color="tab:blue")
    reward.set(ylabel="reward of the batch\n(groups with signal, mean)", ylim=(0, 1), title="GRPO on groupstate")
    lag.plot(steps, [point.lag for point in points], color="tab:orange")
    lag.set(ylabel="lag (weight versions, mean)", ylim=(0, None))
    bottom = [0] * len(points)
    for reason in sorted({reason for point in points for reason in point.evicted}):
        counts = [point.evicted[reason] for point in points]
        evicted.bar(steps, counts, bottom=bottom, label=reason, width=1.0)
        bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
    evicted.set(ylabel="groups evicted", xlabel="weight version")
    if evicted.get_legend_handles_labels()[0]:
        evicted.legend()
    figure.savefig(path, dpi=120)
