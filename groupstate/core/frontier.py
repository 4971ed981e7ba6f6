"""Which prompts of a source are done with: its positions by what became of their groups.

Rule 1: read off the events alone, one after the other; an event costs the same however long the log is.
Rule 2: training groups only; what a user submitted himself has no position.
Rule 3: commits that a rewind undoes are open again.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.core.held import MARKS_KEPT

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Positions `start` up to (not including) `stop`, in order, with gaps between them."""

MIXED = "MixedSource"
"""The kind of source whose positions count per dataset."""


class Positions:
    """A set of numbers, kept as ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, number: int) -> None:
        at = bisect_right(self._starts, number)
        if at and number < self._stops[at - 1]:
            return
        joins_left = at > 0 and self._stops[at - 1] == number
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = number + 1
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)

    def add_range(self, start: int, stop: int) -> None:
        """Numbers of which none is there, and which lie apart from all that are or meet them."""
        self.add(start)
        at = bisect_right(self._starts, start) - 1
        self._stops[at] = max(self._stops[at], stop)
        if at + 1 < len(self._starts) and self._starts[at + 1] == stop:
            self._stops[at] = self._stops.pop(at + 1)
            del self._starts[at + 1]

    def discard(self, number: int) -> None:
        at = bisect_right(self._starts, number) - 1
        if at < 0 or number >= self._stops[at]:
            return
        start, stop = self._starts.pop(at), self._stops.pop(at)
        parts = [part for part in ((start, number), (number + 1, stop)) if part[0] < part[1]]
        self._starts[at:at] = [part[0] for part in parts]
        self._stops[at:at] = [part[1] for part in parts]

    def ranges(self) -> Ranges:
        return tuple(zip(self._starts, self._stops, strict=True))


@attrs.frozen
class SourceFrontier:
    """The positions of one source, or of one dataset of a mixed one."""

    dataset: str
    """Empty for a source that isn't mixed, whatever datasets its prompts are of."""
    committed: Ranges
    open: Ranges
    """In flight, sampleable, or with the trainer."""
    evicted: Ranges
    next: int
    """The first position that was not drawn yet, nor any behind it."""
    lowest_open: int
    """The lowest position that is neither committed nor evicted; `next` where all that was drawn is."""
    size: int | None = None
    """Positions that the source has, all epochs together, where it says so."""
    unknown: Ranges = ()
    """Committed or evicted before the first event that a run still has, which therefore can't say which of the two.
    Numbers that were never submitted, as a source of your own may leave out, are among them."""
    since: int = 1
    """The event from which on it is known which; 1 where all events are there."""

    @property
    def left(self) -> int | None:
        """Positions not drawn yet, where the source says how many it has."""
        return None if self.size is None else max(0, self.size - self.next)


@attrs.define
class _Place:
    committed: Positions = attrs.field(factory=Positions)
    open: Positions = attrs.field(factory=Positions)
    evicted: Positions = attrs.field(factory=Positions)
    resolved: Positions = attrs.field(factory=Positions)
    unknown: Positions = attrs.field(factory=Positions)
    next: int = 0


class FrontierTracker:
    """Takes the records of a log one by one."""

    def __init__(self, base: Book | None = None) -> None:
        """
        Args:
            base: the book before the first record, where those before it are gone.
        """
        self._places: dict[str, _Place] = {}
        self._source: ev.SourceOpened | None = None
        self._where: dict[str, tuple[_Place, int]] = {}
        """Places of the groups that may yet change: the open ones, and committed ones that a mark could bring back."""
        self._batches: dict[int, tuple[str, ...]] = {}
        self._commits: deque[tuple[int, tuple[str, ...]]] = deque()
        self._marks: list[int] = []
        self._since = 1
        if base is not None:
            self._begin(base)

    def _begin(self, book: Book) -> None:
        """What a book knows of positions: the open ones, and the committed ones that a mark could bring back. All
        others that were drawn are done with."""
        self._since = book.last_seq + 1
        self._source = book.source
        self._marks = [mark.seq for mark in book.marks]
        self._batches = {batch.batch: batch.group_ids for batch in book.batches.values()}
        drawn = book.source_positions if self._is_mixed else {"": book.source_position}
        for dataset, following in drawn.items():
            if following:
                self._places[dataset] = _Place(next=following)
        for groups, committed in ((book.groups.values(), False), (book.aside.values(), True)):
            for group in groups:
                self._hold(group, committed=committed)
        self._commits.extend((seq, (group_id,)) for seq, group_id in book.committed_at if group_id in self._where)
        for place in self._places.values():
            known = (place.open.ranges(), place.committed.ranges())
            for start, stop in _gaps(known, place.next):
                place.unknown.add_range(start, stop)
                place.resolved.add_range(start, stop)

    def _hold(self, group: Group, *, committed: bool) -> None:
        if group.partition != ev.TRAIN or group.source_position < 0:
            return
        place = self._places[group.dataset if self._is_mixed else ""]
        for positions in (place.committed, place.resolved) if committed else (place.open,):
            positions.add(group.source_position)
        self._where[group.group_id] = (place, group.source_position)

    def feed(self, record: ev.Record) -> None:
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record.event, record.seq)

    def value(self) -> tuple[SourceFrontier, ...]:
        """By dataset, in the order of their names."""
        return tuple(self._frontier(dataset, place) for dataset, place in sorted(self._places.items()))

    def _frontier(self, dataset: str, place: _Place) -> SourceFrontier:
        resolved = place.resolved.ranges()
        lowest = resolved[0][1] if resolved and resolved[0][0] == 0 else 0
        ranges = (place.committed.ranges(), place.open.ranges(), place.evicted.ranges())
        size, unknown = self._size_of(dataset), place.unknown.ranges()
        return SourceFrontier(dataset, *ranges, place.next, lowest, size, unknown, self._since)

    def _size_of(self, dataset: str) -> int | None:
        if self._source is None or (dataset and not self._is_mixed):
            return None
        details = self._source.details.get(dataset, {}) if self._is_mixed else self._source.details
        size, epochs = details.get("size"), details.get("epochs", 1)
        return size * epochs if isinstance(size, int) and isinstance(epochs, int) else None

    @property
    def _is_mixed(self) -> bool:
        return self._source is not None and self._source.kind == MIXED

    def _opened(self, event: ev.SourceOpened, seq: int) -> None:
        self._source = event

    def _submitted(self, event: ev.GroupSubmitted, seq: int) -> None:
        if event.partition != ev.TRAIN or event.source_position < 0:
            return
        place = self._places.setdefault(event.dataset if self._is_mixed else "", _Place())
        place.open.add(event.source_position)
        place.next = max(place.next, event.source_position + 1)
        self._where[event.group_id] = (place, event.source_position)

    def _evicted(self, event: ev.GroupEvicted, seq: int) -> None:
        if event.group_id in self._where:
            place, position = self._where.pop(event.group_id)
            place.open.discard(position)
            place.evicted.add(position)
            place.resolved.add(position)

    def _sampled(self, event: ev.BatchSampled, seq: int) -> None:
        self._batches[event.batch] = event.group_ids

    def _returned(self, event: ev.BatchReturned, seq: int) -> None:
        self._batches.pop(event.batch, None)

    def _committed(self, event: ev.BatchCommitted, seq: int) -> None:
        groups = tuple(group_id for group_id in self._batches.pop(event.batch, ()) if group_id in self._where)
        for place, position in map(self._where.__getitem__, groups):
            place.open.discard(position)
            place.committed.add(position)
            place.resolved.add(position)
        self._commits.append((seq, groups))
        self._forget()

    def _marked(self, event: ev.CheckpointMarked, seq: int) -> None:
        self._marks.append(seq)
        del self._marks[:-MARKS_KEPT]
        self._forget()

    def _forget(self) -> None:
        """Commits that no mark can undo any more are final."""
        while self._commits and (not self._marks or self._commits[0][0] <= self._marks[0]):
            for group_id in self._commits.popleft()[1]:
                del self._where[group_id]

    def _rewound(self, event: ev.RunRewound, seq: int) -> None:
        self._marks = [mark for mark in self._marks if mark <= event.mark_seq]
        while self._commits and self._commits[-1][0] > event.mark_seq:
            for place, position in map(self._where.__getitem__, self._commits.pop()[1]):
                place.committed.discard(position)
                place.resolved.discard(position)
                place.open.add(position)


_HANDLERS: Final[dict[type[ev.Event], Callable[[FrontierTracker, Any, int], None]]] = {
    ev.SourceOpened: FrontierTracker._opened,
    ev.GroupSubmitted: FrontierTracker._submitted,
    ev.GroupEvicted: FrontierTracker._evicted,
    ev.BatchSampled: FrontierTracker._sampled,
    ev.BatchReturned: FrontierTracker._returned,
    ev.BatchCommitted: FrontierTracker._committed,
    ev.CheckpointMarked: FrontierTracker._marked,
    ev.RunRewound: FrontierTracker._rewound,
}


def _gaps(known: Iterable[Ranges], stop: int) -> Iterable[tuple[int, int]]:
    """The ranges up to `stop` that lie in none of those."""
    start = 0
    for begin, end in sorted(found for ranges in known for found in ranges):
        if start < begin:
            yield start, begin
        start = max(start, end)
    if start < stop:
        yield start, stop


def frontier(
    records: Iterable[ev.Record], seq: int | None = None, base: Book | None = None
) -> tuple[SourceFrontier, ...]:
    """Which positions of the source are done with after event `seq` (None: at the end), by dataset.

    Args:
        base: the book before the first of the records; None where they are all that there were.
    """
    tracker = FrontierTracker(base)
    for record in records:
        if seq is not None and record.seq > seq:
            break
        tracker.feed(record)
    return tracker.value()
