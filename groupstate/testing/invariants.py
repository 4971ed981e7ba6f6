"""One line at the end of a test of your own: the log that it left can be true.

assert_invariants(run.ledger.log)
assert_invariants("runs/demo")
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

from groupstate.core import events as ev
from groupstate.core.invariants import INVARIANTS, Violation, violations
from groupstate.errors import BadInput
from groupstate.inspect.checking import checked
from groupstate.inspect.words import in_words, kind_of
from groupstate.log.port import EventLog
from groupstate.log.reading import beginning, read_log

SHOWN_MAX: Final = 5
"""Findings that the text tells in full; `violations` has them all."""

EVENTS_MAX: Final = 6
"""Events that are shown of each beside those that can't all be true, the last ones about its group."""

RIGHT: Final[dict[int, str]] = {
    1: "the end of the last session and the group's end are one write, and no session has a later attempt",
    2: "what comes for an ended group is recorded as fenced, and changes nothing",
    3: "a group is submitted once, under an id of its own, before anything else of it",
    4: "a batch takes groups that are whole, sampleable and in no other batch that is out or committed",
    5: "an eviction names its reasons and earns what the matrix says, once; each refill uses up one credit",
    6: "with drop, a group is sampled up to a lag of lag_max and evicted as stale above it; with wait, sampling waits",
    7: "refills and admission look at the groups in flight before each submission",
    8: "a validation group is sampled, however it ended, and nothing else",
    9: "each event is numbered one above the last and can happen in the phase in which its group is",
    11: "lags and counts are taken from the book at the moment of the event",
}
"""What it would be, by invariant."""


class InvariantBroken(AssertionError):
    """A log that can't be true."""

    def __init__(self, found: Sequence[Violation], records: Sequence[ev.Record]) -> None:
        self.violations = tuple(found)
        more = f"\n\nand {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        super().__init__("\n\n".join(_told(one, records) for one in found[:SHOWN_MAX]) + more)


def assert_invariants(log: EventLog | Iterable[ev.Record] | str | os.PathLike[str]) -> None:
    """Hold a whole run against the invariants.

    Args:
        log: a log object (`run.ledger.log`, `story.log`), records, or a run's folder, also while it is written. A
            folder's snapshots are compared with a replay too.

    Raises:
        InvariantBroken: it breaks one; the text names it, the events, and what would be right.
        CorruptLog, LostEvents, NotARun, UnsupportedLog: the folder can't be read.
        BadInput: none of these.
    """
    if isinstance(log, str | os.PathLike):
        found: Sequence[Violation] = checked(log).violations
        records = list(read_log(log, beginning(log)[1])) if found else []
    else:
        records = _records_of(log)
        found = violations(records)
    if found:
        raise InvariantBroken(found, records)


def _records_of(log: EventLog | Iterable[ev.Record]) -> list[ev.Record]:
    read: Any = getattr(log, "read", None)
    given: Any = read() if callable(read) else log
    records: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if any(not isinstance(record, ev.Record) for record in records):
        raise BadInput(
            f"{type(log).__name__} {log!r:.80} has no invariants; give a log (run.ledger.log, story.log), its records, "
            "or the folder of a run"
        )
    return records


def _told(violation: Violation, records: Sequence[ev.Record]) -> str:
    lines = [
        f"invariant {violation.invariant} is broken: {INVARIANTS[violation.invariant]}",
        f"  at event {violation.seq}: {violation.text}",
        *(f"    {line}" for line in _events(violation, records)),
        f"  right would be: {RIGHT[violation.invariant]}",
    ]
    return "\n".join(lines)


def _events(violation: Violation, records: Sequence[ev.Record]) -> list[str]:
    """The events that can't all be true, and the last ones about its group."""
    about = [
        record
        for record in records
        if record.seq in violation.witness
        or (record.seq < violation.seq and violation.group_id and violation.group_id in _groups_of(record.event))
    ]
    last = {record.seq for record in about[-EVENTS_MAX:]}
    shown = [
        f"{record.seq:>6}  {kind_of(record.event)}  {in_words(record.event)}"
        for record in about
        if record.seq in last or record.seq in violation.witness
    ]
    return shown if len(about) == len(shown) else ["   ...", *shown]


def _groups_of(event: ev.AnyEvent) -> tuple[str, ...]:
    if isinstance(event, ev.BatchSampled):
        return event.group_ids
    return (getattr(event, "group_id", ""),)
