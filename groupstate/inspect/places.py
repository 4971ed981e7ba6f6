"""Any place in a run's log: the event that a text names, and the book after it.

Rule 1: the book comes from the nearest snapshot or waypoint, so it costs the events between them, not all before.
Rule 2: what the log can't tell any more is refused with the nearest place that it can.
"""

import datetime
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.errors import BadInput
from groupstate.inspect.replay import applied
from groupstate.inspect.words import time_of
from groupstate.log.reading import beginning, first_event, read_log
from groupstate.log.seeking import Base, end_of, event_at, first_base_seq, known_places, nearest_base
from groupstate.log.snapshots import SnapshotInfo

Run = str | os.PathLike[str]

WAYS: Final = (
    "an event's number, a time in UTC as the log prints it (2026-01-31T18:05:00.250Z, or 18:05:00), the time since the "
    "first event (+90s, +5m, +2h), version:N or version:N/LINEAGE, start, or end"
)

_CLOCK: Final = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?Z?")
_SINCE: Final = re.compile(r"\+(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_VERSION: Final = re.compile(r"version:(\d+)(?:/(\d+))?")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)

SHOWN_NS: Final = 1_000_000
"""Times are shown to the millisecond, so one that is given means all of its millisecond."""

Starts = ev.RunStarted | ev.WeightsPublished | ev.RunRecovered | ev.RunRewound
"""With these a weight version becomes the current one."""


# The book after an event ----------------------------------------------------------------------------------


def book_after(run: Run, seq: int | None = None) -> Book:
    """The book after event `seq`; None for the end of the log.

    It is for looking: it may lack the groups that have left (`departed`, `aside`), and finished groups may not know any
    more what their sessions yielded, but for counts and ranges.

    Raises:
        BadInput: there is no such event, or what was at it can't be told any more.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: the log can't be read.
        LogError: it isn't one that a run wrote.
    """
    try:
        return _replayed(run, _base(run, seq), seq)
    except _NeedsWhole:
        return _replayed(run, _base(run, seq, whole=True), seq)


class _NeedsWhole(Exception):
    """What comes back isn't in a waypoint."""


def _base(run: Run, seq: int | None, *, whole: bool = False) -> Base | None:
    base = nearest_base(run, seq, whole=whole)
    first = first_event(run)
    if first == 1 or (base is not None and base.book.last_seq >= first - 1):
        return base
    told = first_base_seq(run, first - 1)
    if seq is None or told is None:
        beginning(run)  # for its error
    raise BadInput(f"what was at event {seq} can't be told any more: the first that can is event {told}")


def _replayed(run: Run, base: Base | None, seq: int | None) -> Book:
    book = Book() if base is None else base.book
    partial, begin = base is not None and not base.whole, book.last_seq
    for record in read_log(run, begin + 1, None if seq is None else seq + 1):
        if partial:
            _complete(book, begin, record.event)
        applied(book, record)
    if seq is not None and book.last_seq != seq:
        raise BadInput(f"there is no event {seq}: the log has events 1 to {book.last_seq}")
    return book


def _complete(book: Book, begin: int, event: ev.Event) -> None:
    """What an event needs of the groups that have left."""
    if isinstance(event, ev.RunRewound) and event.mark_seq < begin:
        raise _NeedsWhole
    if isinstance(event, ev.ResultFenced) and book.is_taken(event.group_id) is None:
        book.departed.add(event.group_id, Phase.EVICTED)


# The event that a text names ------------------------------------------------------------------------------


def seq_of(run: Run, text: str) -> int:
    """The event that a text names, in one of the `WAYS`. Of a time it is the last event up to then.

    Raises:
        BadInput: it names none, or several.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: the log can't be read.
    """
    word = text.strip()
    if word.isascii() and word.isdecimal():
        if int(word) < 1:
            raise BadInput(f"there is no event {word}: they are numbered from 1")
        return int(word)
    if word in ("start", "end"):
        return _end(run) if word == "end" else first_event(run)
    if found := _VERSION.fullmatch(word):
        return published(run, int(found[1]), None if found[2] is None else int(found[2]))
    return _event_up_to(run, word, _at_ns(run, word))


def _end(run: Run) -> int:
    last = end_of(run)
    if not last:
        raise BadInput(f"{os.fspath(run)} has no event yet")
    return last


def _event_up_to(run: Run, text: str, at_ns: int) -> int:
    seq = event_at(run, at_ns + SHOWN_NS - 1)
    if not seq:
        first = _first_record(run)
        raise BadInput(f"nothing was recorded at {text} yet: event {first.seq} is of {time_of(first.at_ns)}")
    return seq


def _first_record(run: Run) -> ev.Record:
    return _record(run, first_event(run))


def _record(run: Run, seq: int) -> ev.Record:
    record = next(read_log(run, seq, seq + 1), None)
    if record is None:
        raise BadInput(f"{os.fspath(run)} has no event {seq} yet")
    return record


def _at_ns(run: Run, text: str) -> int:
    """The time that a text means, in nanoseconds since the epoch."""
    if found := _SINCE.fullmatch(text):
        base, _ = beginning(run)
        begun = _first_record(run).at_ns if base is None else base.started_at_ns
        return begun + round(float(found[1]) * _SECONDS[found[2] or ""] * 1e9)
    if found := _CLOCK.fullmatch(text):
        return _on_a_day(run, text, _since_midnight_ns(text, found))
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{text!r} names no place in a log; what does: {WAYS}") from None
    return _ns(moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC))


def _ns(moment: datetime.datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND * 1_000


def _since_midnight_ns(text: str, found: re.Match[str]) -> int:
    hours, minutes, seconds = int(found[1]), int(found[2]), int(found[3] or 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise BadInput(f"{text!r} is no time of a day")
    return (hours * 3600 + minutes * 60 + seconds) * 1_000_000_000 + int((found[4] or "").ljust(9, "0"))


def _on_a_day(run: Run, text: str, since_midnight_ns: int) -> int:
    """The one time within the run that the clock shows so."""
    first, last = _first_record(run).at_ns, _record(run, _end(run)).at_ns
    day_ns = 86_400 * 1_000_000_000
    days = range(first // day_ns, last // day_ns + 1)
    times = [day * day_ns + since_midnight_ns for day in days]
    within = [at_ns for at_ns in times if first < at_ns + SHOWN_NS and at_ns <= last]
    if len(within) == 1:
        return within[0]
    span = f"its events go from {time_of(first)} to {time_of(last)}"
    if within:
        raise BadInput(f"the run was at {text} {len(within)} times: {span}. Name the day, as in {time_of(within[-1])}")
    raise BadInput(f"the run was never at {text} (UTC): {span}")


# Versions -------------------------------------------------------------------------------------------------


def published(run: Run, version: int, lineage: int | None = None) -> int:
    """The event with which a weight version became the current one: that published it, or that began a lineage with it.

    Args:
        lineage: of weight versions; the last one that had it where none is said.

    Raises:
        BadInput: it never did, or what says so is gone.
    """
    near = {info.weight_version: info.seq for info in known_places(run) if lineage in (None, info.lineage)}
    for before, after in _stretches(run):
        if not _may_hold(before, after, version, lineage):
            continue
        found: dict[int, int] = {}
        for seq, event in _starts(run, before, after):
            if lineage is None or event.lineage == lineage:
                near[event.weight_version] = seq
                if event.weight_version == version:
                    found.setdefault(event.lineage, seq)
        if found:
            return found[max(found)]
    raise BadInput(_never(run, version, lineage, near))


def _stretches(run: Run) -> Iterator[tuple[SnapshotInfo | None, SnapshotInfo | None]]:
    """The log between two known places, from the last one back."""
    first = first_event(run)
    places = [None, *(info for info in known_places(run) if info.seq >= first), None]
    return reversed(list(pairwise(places)))


def _may_hold(before: SnapshotInfo | None, after: SnapshotInfo | None, version: int, lineage: int | None) -> bool:
    """Within a lineage versions only rise, and lineages only rise within a log."""
    if before is None or after is None:
        return True
    if lineage is not None and not before.lineage <= lineage <= after.lineage:
        return False
    return before.lineage != after.lineage or before.weight_version < version <= after.weight_version


def _starts(run: Run, before: SnapshotInfo | None, after: SnapshotInfo | None) -> Iterator[tuple[int, Starts]]:
    first = first_event(run) if before is None else before.seq + 1
    for record in read_log(run, first, None if after is None else after.seq + 1):
        if isinstance(record.event, Starts):
            yield record.seq, record.event


def _never(run: Run, version: int, lineage: int | None, near: dict[int, int]) -> str:
    text = f"weight version {version} was never the current one{'' if lineage is None else f' in lineage {lineage}'}"
    lower = max((known for known in near if known < version), default=None)
    higher = min((known for known in near if known > version), default=None)
    nearest = [f"version {known} at event {near[known]}" for known in (lower, higher) if known is not None]
    text += f"; what was: {' and '.join(nearest)}" if nearest else ""
    first = first_event(run)
    return text + (f". Events before {first} are gone" if first > 1 else "")
