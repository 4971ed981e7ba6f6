"""A whole run held against the invariants: its events, and the snapshots beside them."""

import os
from collections.abc import Iterator, Sequence

import attrs

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.invariants import INVARIANTS, Checker, Violation
from groupstate.core.snapshot import capture_live, restore
from groupstate.errors import LogError
from groupstate.inspect.replay import applied
from groupstate.inspect.words import counted, in_words, kind_of
from groupstate.log.reading import beginning, read_log, snapshot_digests, waypoint_digests


@attrs.frozen
class Cited:
    """An event that a violation names, as a sentence."""

    seq: int
    at_ns: int
    kind: str
    text: str


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
    cited: tuple[Cited, ...] = ()
    """The events that the violations name as what can't all be true, in the order of the log."""
    waypoints: int = 0
    """Waypoints that were compared with the replay."""

    def witness_of(self, violation: Violation) -> list[Cited]:
        """The events that can't all be true, as sentences."""
        return [one for one in self.cited if one.seq in violation.witness]

    @property
    def verdict(self) -> str:
        beside = ((self.snapshots, "snapshot"), (self.waypoints, "waypoint"))
        snapshots = "".join(f", {counted(count, thing)}" for count, thing in beside if count)
        events = counted(self.events, "event")
        if self.first_seq > 1:
            return (
                f"{events} from {self.first_seq} on{snapshots}: they replay, and nothing is wrong with that. "
                "The events before them are gone, so the other invariants can't be counted"
            )
        return f"{events}{snapshots}, {self.invariants} invariants: nothing is wrong"


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
                found.append(Violation(9, record.seq, "", text, (record.seq,)))
        if record.seq in live_digests:
            waypoints += 1
            if book.last_seq == record.seq and restore(capture_live(book)).digest() != live_digests[record.seq]:
                text = f"the waypoint after event {record.seq} is another book than the one that the events lead to"
                found.append(Violation(9, record.seq, "", text, (record.seq,)))
        if found and base is not None:
            break  # the book can't follow any more
    return Checked(count, start, compared, len(INVARIANTS), tuple(found), _cited(path, found), waypoints)


def _cited(path: str | os.PathLike[str], found: Sequence[Violation]) -> tuple[Cited, ...]:
    """The events that are named, read once more: while they are checked nobody knows which will be."""
    seqs = {seq for violation in found for seq in violation.witness}
    if not seqs:
        return ()
    records = read_log(path, min(seqs), max(seqs) + 1)
    return tuple(Cited(r.seq, r.at_ns, kind_of(r.event), in_words(r.event)) for r in records if r.seq in seqs)


def _fed(checker: Checker, book: Book, record: Record, *, whole: bool) -> Iterator[Violation]:
    """What one more record makes wrong."""
    if whole:
        yield from checker.feed(record)
        return
    try:
        applied(book, record)
    except LogError as error:
        yield Violation(9, record.seq, getattr(record.event, "group_id", ""), str(error), (record.seq,))
