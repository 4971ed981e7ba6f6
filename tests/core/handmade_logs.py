"""Logs written by hand, event by event, for the tests of the checker; and a book that counts wrong."""

from collections.abc import Iterable

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.invariants import violations
from groupstate.core.rules import RULES_VERSION, Rules


def log(*events: ev.AnyEvent | list[ev.AnyEvent], rules: Rules | None = None, version: int = 0) -> list[ev.Record]:
    """A log that begins with RunStarted; lists in it are flattened."""
    flat: list[ev.AnyEvent] = [ev.RunStarted("r", (rules or Rules()).to_dict(), RULES_VERSION, version)]
    for event in events:
        flat.extend(event if isinstance(event, list) else [event])
    return [ev.Record(seq, seq * 1_000, event) for seq, event in enumerate(flat, 1)]


def submit(name: str, n: int = 1, *, stamp: int = 0, val: bool = False, cause: ev.Cause = "submit") -> ev.AnyEvent:
    return ev.GroupSubmitted(name, n, ev.VALIDATION if val else ev.TRAIN, stamp, 1, cause)


def start(name: str, session: int = 0, attempt: int = 1) -> ev.AnyEvent:
    return ev.SessionStarted(name, session, attempt)


def rows(*versions: int, metrics: dict[str, float] | None = None) -> tuple[ev.TrajectoryRecord, ...]:
    spans = tuple(ev.VersionSpan(i, i + 1, version) for i, version in enumerate(versions))
    return (ev.TrajectoryRecord(0, metrics or {"acc": 1.0}, 1, len(versions), spans),)


def finish(name: str, session: int = 0, attempt: int = 1, *versions: int) -> ev.AnyEvent:
    return ev.SessionFinished(name, session, attempt, rows(*versions))


def fail(name: str, session: int = 0, attempt: int = 1, retry: float | None = None) -> ev.AnyEvent:
    return ev.SessionFailed(name, session, attempt, "error", "boom", retry)


def done(name: str) -> ev.AnyEvent:
    return ev.GroupFinished(name)


def whole(
    name: str, *versions: int, val: bool = False, stamp: int = 0, cause: ev.Cause = "submit"
) -> list[ev.AnyEvent]:
    """A group of one session, from its submission to its end."""
    return [submit(name, val=val, stamp=stamp, cause=cause), start(name), finish(name, 0, 1, *versions), done(name)]


def failed(name: str) -> list[ev.AnyEvent]:
    return [submit(name), start(name), fail(name), ev.GroupFailed(name)]


def evict(name: str, *reasons: ev.EvictReason, lag: int = 0, credit: int = 0) -> ev.AnyEvent:
    return ev.GroupEvicted(name, reasons or ("failed",), lag, credit)


def want(number: int = 1, size: int = 1, *, val: bool = False) -> ev.AnyEvent:
    return ev.BatchRequested(number, ev.VALIDATION if val else ev.TRAIN, size, 0)


def sampled(batch: int, *names: str, lags: tuple[int, ...] | None = None, val: bool = False) -> ev.AnyEvent:
    partition = ev.VALIDATION if val else ev.TRAIN
    return ev.BatchSampled(batch, batch, partition, names, 0, (0,) * len(names) if lags is None else lags)


def sample(batch: int, *names: str, lags: tuple[int, ...] | None = None, val: bool = False) -> list[ev.AnyEvent]:
    return [want(batch, len(names), val=val), sampled(batch, *names, lags=lags, val=val)]


def wrong(records: Iterable[ev.Record], invariant: int) -> list[str]:
    """What is wrong with the log under this invariant."""
    return [violation.text for violation in violations(records) if violation.invariant == invariant]


class Miscounting(Book):
    """A book with a fault in one of its numbers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def apply(self, record: ev.Record) -> None:
        super().apply(record)
        if self.fault == "phase" and isinstance(record.event, ev.SessionStarted):
            group = self.groups.pop(record.event.group_id)
            self.shelves[group.partition].remove(group)
        elif self.fault == "total" and isinstance(record.event, ev.GroupSubmitted):
            self.totals["submitted"] += 1
        elif self.fault == "phantom" and isinstance(record.event, ev.GroupFinished):
            self.groups["phantom"] = self.groups["b"]
        elif self.fault == "evicted" and isinstance(record.event, ev.GroupEvicted):
            self.totals["evicted"] -= 1
        elif self.fault == "committed" and isinstance(record.event, ev.GroupEvicted):
            self.totals["committed"] += 2
        elif self.fault == "credits" and isinstance(record.event, ev.GroupEvicted):
            self.credits.clear()
        elif self.fault == "window" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).evicted["stale"] += 1
        elif self.fault == "lag" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).stale_lags.append(3)
        elif self.fault == "filtered" and isinstance(record.event, ev.GroupEvicted):
            self.window(ev.TRAIN).filtered_values[0.5] += 1
