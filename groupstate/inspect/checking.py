"""A whole run held against the invariants: its events, and the snapshots beside them."""

import os
from collections.abc import Iterator

import attrs

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.invariants import INVARIANTS, Checker, Violation
from groupstate.core.snapshot import capture_live, restore
from groupstate.errors import LogError
from groupstate.inspect.replay import applied
from groupstate.log.reading import beginning, read_log, snapshot_digests, waypoint_digests


@attrs.frozen
class Checked:
    events: int
    """Events that were looked at."""
    first_seq: int
    """The first of them."""
    snapshots: int
    """Snapshots that were compared with the replay."""
    invariants: int
    violations: tuple[Violation, ...]
    waypoints: int = 0
    """Waypoints that were compared with the replay."""

    @property
    def verdict(self) -> str:
        snapshots = f", {self.snapshots} snapshots" if self.snapshots else ""
        snapshots += f", {self.waypoints} waypoints" if self.waypoints else ""
        if self.first_seq > 1:
            return (
                f"{self.events} events from {self.first_seq} on{snapshots}: they replay, and nothing is wrong with "
                "that. The events before them are gone, so the other invariants can't be counted"
            )
        return f"{self.events} events{snapshots}, {self.invariants} invariants: nothing is wrong"


def checked(path: str | os.PathLike[str]) -> Checked:
    """Check a run directory.

    Raises:
        CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    digests, live_digests = snapshot_digests(path), waypoint_digests(path)
    book = Book() if base is None else base
    checker = Checker(book)
    compared, waypoints, count, found = 0, 0, 0, list[Violation]()
    for record in read_log(path, start):
        count += 1
        found += _fed(checker, book, record, whole=base is None)
        if record.seq in digests:
            compared += 1
            if book.last_seq == record.seq and book.digest() != digests[record.seq]:
                text = f"the snapshot after event {record.seq} is another book than the one that the events lead to"
                found.append(Violation(9, record.seq, "", text))
        if record.seq in live_digests:
            waypoints += 1
            if book.last_seq == record.seq and restore(capture_live(book)).digest() != live_digests[record.seq]:
                text = f"the waypoint after event {record.seq} is another book than the one that the events lead to"
                found.append(Violation(9, record.seq, "", text))
        if found and base is not None:
            break  # the book can't follow any more
    return Checked(count, start, compared, len(INVARIANTS), tuple(found), waypoints)


def _fed(checker: Checker, book: Book, record: Record, *, whole: bool) -> Iterator[Violation]:
    """What one more record makes wrong."""
    if whole:
        yield from checker.feed(record)
        return
    try:
        applied(book, record)
    except LogError as error:
        yield Violation(9, record.seq, getattr(record.event, "group_id", ""), str(error))
