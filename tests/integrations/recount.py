"""The numbers of a run counted from its events alone, as plainly as can be, and records told again to a ledger."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.rules import recorded_rules
from groupstate.integrations.figures import SECONDS, Distribution, Reading
from groupstate.log.memory import MemoryLog
from groupstate.runtime.ledger import Ledger

TERMINAL = (ev.GroupFinished, ev.GroupFailed)
RECOVERY = (ev.RunRecovered, ev.RunRewound, ev.BatchReturned, ev.GroupRequeued, ev.GroupEvicted)
"""What an opening may write before anybody can look at the run."""


def steps(records: Sequence[ev.Record]) -> Iterable[list[ev.Record]]:
    """The records in the units in which they were written."""
    at = 0
    while at < len(records):
        record, after = records[at], records[at + 1 : at + 2]
        ends = isinstance(record.event, ev.SessionFinished | ev.SessionFailed)
        pair = ends and after and isinstance(after[0].event, TERMINAL) and after[0].at_ns == record.at_ns
        yield [record, *after] if pair else [record]
        at += 2 if pair else 1


class Retold:
    """A ledger that takes records as `Ledger.record` takes events."""

    def __init__(self, first: ev.RunStarted) -> None:
        self.ledger = Ledger(MemoryLog(), recorded_rules(first.rules, "the log"))

    def take(self, step: list[ev.Record]) -> None:
        self.ledger.book.preview(step[0].event, step[0].seq, step[0].at_ns)
        self.ledger.log.post(step)
        self.ledger.apply(step)


@attrs.define
class Session:
    began_ns: int = 0
    tokens: int = 0


@attrs.define
class Told:
    partition: str
    sessions: list[Session]
    durations: list[tuple[str, int]] = attrs.field(factory=list)
    """Of finished sessions, until the group has ended."""


class Recount:
    """Counts everything from the first event; the counts since some event are differences of two."""

    def __init__(self) -> None:
        self.groups: dict[str, Told] = {}
        self.requests: dict[int, int] = {}
        self.batches: dict[int, ev.BatchSampled] = {}
        self.totals: Counter[Any] = Counter()

    def take(self, record: ev.Record) -> None:
        self.totals["groupstate_events", ()] += 1
        handler = getattr(self, f"_{type(record.event).__name__}", None)
        if handler is not None:
            handler(record.event, record.at_ns)

    def _count(self, name: str, *labels: str, by: int = 1) -> None:
        self.totals[f"groupstate_{name}", labels] += by

    def _lasted(self, name: str, labels: tuple[str, ...], lasted_ns: int) -> None:
        bucket = sum(lasted_ns / 1e9 > bound for bound in SECONDS)
        self.totals[f"groupstate_{name}", labels, bucket] += 1
        self.totals[f"groupstate_{name}", labels, "total"] += lasted_ns

    def _GroupSubmitted(self, event: ev.GroupSubmitted, at_ns: int) -> None:
        self.groups[event.group_id] = Told(event.partition, [Session() for _ in range(event.size)])
        self._count("groups_submitted", event.partition)
        if event.cause == "refill":
            self._count("refills")

    def _SessionStarted(self, event: ev.SessionStarted, at_ns: int) -> None:
        self.groups[event.group_id].sessions[event.session].began_ns = at_ns

    def _SessionFinished(self, event: ev.SessionFinished, at_ns: int) -> None:
        group = self.groups[event.group_id]
        session = group.sessions[event.session]
        session.tokens = sum(row.response_tokens for row in event.trajectories)
        group.durations.append((group.partition, at_ns - session.began_ns))
        session.began_ns = 0
        self._count("sessions_finished")
        self._count("tokens_generated", by=session.tokens)

    def _SessionFailed(self, event: ev.SessionFailed, at_ns: int) -> None:
        group = self.groups[event.group_id]
        session = group.sessions[event.session]
        if session.began_ns:
            self._lasted("session_seconds", (group.partition, "failed"), at_ns - session.began_ns)
        session.began_ns = 0
        self._count("session_failures", group.partition, event.failure)

    def _GroupFinished(self, event: ev.GroupFinished, at_ns: int) -> None:
        self._end(event.group_id, "partial" if event.partial else "finished")

    def _GroupFailed(self, event: ev.GroupFailed, at_ns: int) -> None:
        self._end(event.group_id, "cancelled" if event.cancelled else "failed")

    def _end(self, group_id: str, outcome: str) -> None:
        self._count("groups_ended", self.groups[group_id].partition, outcome)
        self._settle(self.groups[group_id])

    def _settle(self, group: Told) -> None:
        for partition, lasted_ns in group.durations:
            self._lasted("session_seconds", (partition, "finished"), lasted_ns)
        group.durations.clear()

    def _GroupRequeued(self, event: ev.GroupRequeued, at_ns: int) -> None:
        group = self.groups[event.group_id]
        self._settle(group)
        self._count("groups_requeued", group.partition)
        self._fate(group, "requeued")
        group.sessions = [Session() for _ in group.sessions]

    def _fate(self, group: Told, fate: str) -> None:
        self._count("tokens", group.partition, fate, by=sum(session.tokens for session in group.sessions))

    def _GroupEvicted(self, event: ev.GroupEvicted, at_ns: int) -> None:
        group = self.groups[event.group_id]
        self._count("groups_evicted", group.partition)
        for reason in event.reasons:
            self._count("evictions", group.partition, reason)
        self._fate(group, "evicted")

    def _RefillForfeited(self, event: ev.RefillForfeited, at_ns: int) -> None:
        self._count("refills_forfeited", by=event.count)

    def _ResultFenced(self, event: ev.ResultFenced, at_ns: int) -> None:
        self._count("results_fenced", event.reason)

    def _BatchRequested(self, event: ev.BatchRequested, at_ns: int) -> None:
        self.requests[event.request] = at_ns

    def _BatchSampled(self, event: ev.BatchSampled, at_ns: int) -> None:
        self.batches[event.batch] = event
        self._count("batches", event.partition, "sampled")
        self._count("groups_sampled", event.partition, by=len(event.group_ids))
        self._lasted("sample_wait_seconds", (event.partition,), at_ns - self.requests[event.request])
        self.totals["lags"] += sum(event.lags)

    def _BatchReturned(self, event: ev.BatchReturned, at_ns: int) -> None:
        self._count("batches", self.batches[event.batch].partition, "returned")

    def _BatchCommitted(self, event: ev.BatchCommitted, at_ns: int) -> None:
        batch = self.batches[event.batch]
        self._count("batches", batch.partition, "committed")
        self._count("groups_committed", batch.partition, by=len(batch.group_ids))
        for group_id in batch.group_ids:
            self._fate(self.groups[group_id], "committed")


def counted(reading: Reading, kinds: dict[str, str]) -> Counter[Any]:
    """The counters and histograms of a reading, in the form of `Recount.totals`."""
    found: Counter[Any] = Counter()
    for name, values in reading.values.items():
        for labels, value in values.items():
            if isinstance(value, Distribution):
                if name == "groupstate_sampled_lag_versions":
                    found["lags"] += round(value.total)
                    continue
                found[name, labels, "total"] = round(value.total * 1e9)
                found.update({(name, labels, bucket): count for bucket, count in enumerate(value.counts)})
            elif kinds[name] == "counter":
                found[name, labels] = round(value)
    return +found
