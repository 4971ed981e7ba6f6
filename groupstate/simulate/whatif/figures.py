"""What became of a run, in numbers: the same sums over a recorded log and over one that was played."""

from collections import Counter
from collections.abc import Iterable

import attrs

from groupstate.core import events as ev


@attrs.define
class Figures:
    """Of the training partition. Tokens are those that the model generated; times are seconds."""

    groups: int = 0
    """Submitted."""
    refills: int = 0
    forfeited: int = 0
    evicted: int = 0
    reasons: Counter[str] = attrs.Factory(Counter)
    """Evictions; a group with two reasons counts under both."""
    requeued: int = 0
    sessions_finished: int = 0
    sessions_failed: int = 0
    batches: int = 0
    """Sampled and not given back."""
    trained_groups: int = 0
    left: int = 0
    """Groups that were neither trained on nor evicted at the end."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_thrown: int = 0
    """Of groups that were evicted, and of sessions that had finished when their group started over."""
    tokens_left: int = 0
    waited_s: float = 0.0
    """That the trainer waited in `sample()`, several at once each counted."""
    longest_wait_s: float = 0.0
    lag_mean: float = 0.0
    """Over the groups in batches."""
    lag_max: int = 0
    elapsed_s: float = 0.0

    @property
    def waste(self) -> float:
        """Share of the generated tokens that was thrown away."""
        return self.tokens_thrown / self.tokens_generated if self.tokens_generated else 0.0


def figures(records: Iterable[ev.Record]) -> Figures:
    """Sum up a log."""
    summer = _Summer()
    for record in records:
        summer.take(record)
    return summer.result()


class _Summer:
    def __init__(self) -> None:
        self.found = Figures()
        self.tokens: dict[str, int] = {}
        """Of groups that are in the book."""
        self.batches: dict[int, tuple[tuple[str, ...], tuple[int, ...], int]] = {}
        self.waiting: dict[int, int] = {}
        self.taken: dict[str, int] = {}
        """Groups in batches -> lag."""
        self.first_ns: int | None = None
        self.last_ns = 0

    def take(self, record: ev.Record) -> None:
        if self.first_ns is None:
            self.first_ns = record.at_ns
        self.last_ns = record.at_ns
        event, found = record.event, self.found
        if isinstance(event, ev.GroupSubmitted):
            if event.partition == ev.TRAIN:
                found.groups += 1
                found.refills += event.cause == "refill"
                self.tokens[event.group_id] = 0
        elif isinstance(event, ev.SessionFinished):
            if event.group_id in self.tokens:
                count = sum(_generated(row) for row in event.trajectories)
                found.sessions_finished += 1
                found.tokens_generated += count
                self.tokens[event.group_id] += count
        elif isinstance(event, ev.SessionFailed):
            found.sessions_failed += event.group_id in self.tokens
        elif isinstance(event, ev.GroupEvicted):
            found.evicted += 1
            found.reasons.update(event.reasons)
            found.tokens_thrown += self.tokens.pop(event.group_id, 0)
        elif isinstance(event, ev.GroupRequeued):
            if event.group_id in self.tokens:
                found.requeued += 1
                found.tokens_thrown += self.tokens[event.group_id]
                self.tokens[event.group_id] = 0
        elif isinstance(event, ev.RefillForfeited):
            found.forfeited += event.count
        else:
            self._sampling(event)

    def _sampling(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.BatchRequested):
            if event.partition == ev.TRAIN:
                self.waiting[event.request] = self.last_ns
        elif isinstance(event, ev.BatchRequestCancelled):
            self._ends(event.request)
        elif isinstance(event, ev.BatchSampled):
            self._ends(event.request)
            if event.partition == ev.TRAIN:
                self.batches[event.batch] = event.group_ids, event.lags, self.last_ns
        elif isinstance(event, ev.BatchReturned):
            self.batches.pop(event.batch, None)
        elif isinstance(event, ev.RunRecovered):
            for request in list(self.waiting):
                self._ends(request)

    def _ends(self, request: int) -> None:
        began_ns = self.waiting.pop(request, None)
        if began_ns is not None:
            waited_s = (self.last_ns - began_ns) / 1e9
            self.found.waited_s += waited_s
            self.found.longest_wait_s = max(self.found.longest_wait_s, waited_s)

    def result(self) -> Figures:
        found = self.found
        for request in list(self.waiting):
            self._ends(request)
        lags: list[int] = []
        for group_ids, own_lags, _ in self.batches.values():
            lags.extend(own_lags)
            found.tokens_trained += sum(self.tokens.pop(group_id, 0) for group_id in group_ids)
        found.batches = len(self.batches)
        found.trained_groups = len(lags)
        found.left = len(self.tokens)
        found.tokens_left = sum(self.tokens.values())
        found.lag_mean = sum(lags) / len(lags) if lags else 0.0
        found.lag_max = max(lags, default=0)
        found.elapsed_s = 0.0 if self.first_ns is None else (self.last_ns - self.first_ns) / 1e9
        return found


def _generated(row: ev.TrajectoryRecord) -> int:
    return row.response_tokens - sum(stop - start for start, stop in row.environment)
