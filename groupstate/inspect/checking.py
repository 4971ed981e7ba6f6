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


class Kept:
    """The books that the run kept beside its events, to be compared with what the events lead to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.snapshots = self.waypoints = 0
        """Those that were compared."""
        self._snapshots = snapshot_digests(path)
        self._waypoints = waypoint_digests(path)
        self.seqs = self._snapshots.keys() | self._waypoints.keys()
        """The events after which there is one."""

    def compare(self, book: Book, seq: int) -> list[Violation]:
        """Hold the book after event `seq`, one of `seqs`, against what is kept of it."""
        wrong, follows = [], book.last_seq == seq
        if seq in self._snapshots:
            self.snapshots += 1
            if follows and book.digest() != self._snapshots[seq]:
                wrong.append(_another_book("snapshot", seq))
        if seq in self._waypoints:
            self.waypoints += 1
            if follows and restore(capture_live(book)).digest() != self._waypoints[seq]:
                wrong.append(_another_book("waypoint", seq))
        return wrong


def _another_book(kept: str, seq: int) -> Violation:
    text = f"the {kept} after event {seq} is another book than the one that the events lead to"
    return Violation(9, seq, "", text, (seq,))


def checked(path: str | os.PathLike[str], *, stop: int | None = None) -> Checked:
    """Check a run directory.

    Args:
        stop: the first event that isn't looked at any more; by default the first that isn't durable yet.

    Raises:
        CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    kept = Kept(path)
    book = Book() if base is None else base
    checker = Checker(book)
    count, found = 0, list[Violation]()
    for record in read_log(path, start, stop):
        count += 1
        found += _fed(checker, book, record, whole=base is None)
        if record.seq in kept.seqs:
            found += kept.compare(book, record.seq)
        if found and base is not None:
            break  # the book can't follow any more
    cited = _cited(path, found)
    return Checked(count, start, kept.snapshots, len(INVARIANTS), tuple(found), cited, kept.waypoints)


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
