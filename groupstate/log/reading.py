"""Reading a log that may be growing: in order, from any event on, never further than is allowed.

Rule 1: a reader without the lock obeys the durable watermark: what it shows is not taken back by a power loss.
Rule 2: what the watermark covers must be readable; where it isn't, that is damage.
"""

import operator
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import NoReturn

import msgspec

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.snapshot import LaterState, decoded, restore
from groupstate.errors import CompactedLog, CorruptLog, LostEvents, UnsupportedLog
from groupstate.log.archive import read_segment
from groupstate.log.codec import decode
from groupstate.log.disk import Disk, OsDisk, read_all
from groupstate.log.frames import HEADER_BYTES, Frame, checksum_seed, frame_at, last_frame, walk
from groupstate.log.head import read_head
from groupstate.log.recovery import REPAIR_ADVICE, Known, check_header, check_torn
from groupstate.log.retention import reading
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import (
    WAYPOINT,
    later_format,
    list_snapshots,
    newest_snapshot,
    read_snapshot,
    snapshot_path,
)
from groupstate.log.upcasts import FORMAT, UPCASTS, Upcasts

_SEQ = operator.attrgetter("seq")


class Cursor:
    """A place in a log, moved on by reading. Keeps no file open between two calls of `read`."""

    def __init__(
        self,
        disk: Disk,
        run: RunDir,
        log_id: bytes,
        start: int,
        known: Known | None = None,
        *,
        upcasts: Upcasts = UPCASTS,
    ) -> None:
        """
        Args:
            known: a place in the log; from there the first event is looked for if it lies behind.
        """
        assert start >= 1
        self._upcasts = upcasts
        self._form = FORMAT
        """Of the segment that the place is in."""
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._seed = checksum_seed(log_id)
        self._start = start
        self._segment: int | None = None
        """First seq of the segment that the place is in."""
        self._offset = 0
        self._next_seq = 0
        """Number of the frame at the offset; below `_start` until the first event wanted was found."""
        if known is not None and start > known.last_seq:
            self._segment, self._offset, self._next_seq = known.segment, known.stop, known.last_seq + 1
            self._form = known.form

    @property
    def segment(self) -> int | None:
        """First seq of the segment that the place is in; None before anything was read."""
        return self._segment

    def read(self, limit: int | None) -> Iterator[list[Record]]:
        """Records up to and including `limit`, in lists of one commit each; None for all there are.

        Raises:
            CorruptLog: damage, or a frame that should be there can't be read.
            LostEvents: the segments end below `limit`.
        """
        while limit is None or max(self._next_seq, self._start) <= limit:
            if not self._enter_segment():
                if limit is not None:
                    raise LostEvents(self._run.log, max(self._next_seq, self._start), limit)
                return
            yield from self._read_segment(limit)
            if limit is None and self._next_seq not in list_segments(self._disk, self._run):
                return

    def _enter_segment(self) -> bool:
        """Go to the segment of the first event, or to the next one where this one is at its end."""
        first_seqs = list_segments(self._disk, self._run)
        if self._segment is None:
            if not first_seqs:
                return False
            found = bisect_right(first_seqs, self._start) - 1
            if found < 0:
                self._raise_gone(first_seqs[0])
            self._move_to(first_seqs[found])
        elif self._next_seq > self._segment and self._next_seq in first_seqs:
            self._move_to(self._next_seq)
        return True

    def _raise_gone(self, first_seq: int) -> NoReturn:
        """The event to start at lies before all segments."""
        if any(seq >= first_seq - 1 for seq in list_snapshots(self._disk, self._run)):
            raise CompactedLog(self._run.log, max(self._next_seq, self._start), first_seq)
        self._raise_missing_before(first_seq, self._next_seq or 1)

    def _raise_missing_before(self, first_seq: int, expected: int) -> NoReturn:
        what = f"it starts with event {first_seq}, so a segment before it is missing"
        raise CorruptLog(self._run.segment(first_seq), 0, expected, what, REPAIR_ADVICE)

    def _move_to(self, first_seq: int) -> None:
        self._segment = first_seq
        self._offset = 0
        self._next_seq = first_seq

    def _read_segment(self, limit: int | None) -> Iterator[list[Record]]:
        assert self._segment is not None
        path = self._run.segment(self._segment)
        try:
            rest = self._rest_of(path)
        except FileNotFoundError:
            rest = self._rest_of_archive(path)
        data = memoryview(rest)
        base = self._offset
        if base == 0:
            header = check_header(path, bytes(data[:HEADER_BYTES]), self._log_id, self._segment, self._upcasts)
            self._form = header.form
            self._offset = HEADER_BYTES
            if self._next_seq < self._start:
                self._skip(rest)
        for frame in walk(data, self._offset - base, self._seed, self._next_seq):
            if limit is not None and frame.first_seq > limit:
                return
            self._offset = base + frame.stop
            self._next_seq = frame.last_seq + 1
            if frame.last_seq >= self._start:
                yield self._decode(path, base, data, frame, limit)
        self._check_end(path, data, base, limit)

    def _skip(self, segment: bytes) -> None:
        """Go on to near the first event wanted, without checking what lies before it in this segment."""
        begin = last_frame(segment, self._offset, self._seed, lambda frame: frame.first_seq <= self._start)
        frame = frame_at(memoryview(segment), begin, self._seed) if begin > self._offset else None
        if frame is not None:
            self._offset, self._next_seq = frame.start, frame.first_seq

    def _rest_of(self, path: str) -> bytes:
        fd = self._disk.open_to_read(path)
        try:
            return read_all(self._disk, fd, self._disk.size(fd) - self._offset, self._offset)
        finally:
            self._disk.close(fd)

    def _rest_of_archive(self, path: str) -> bytes:
        """The same of a segment that was packed, or removed, since it was listed."""
        assert self._segment is not None
        try:
            return read_segment(self._disk, self._run, self._segment)[self._offset :]
        except FileNotFoundError:
            first_seqs = list_segments(self._disk, self._run)
            if first_seqs and first_seqs[0] > self._segment:
                raise CompactedLog(self._run.log, max(self._next_seq, self._start), first_seqs[0]) from None
            raise CorruptLog(path, 0, self._segment, "the segment is missing", REPAIR_ADVICE) from None

    def _check_end(self, path: str, data: memoryview, base: int, limit: int | None) -> None:
        """No good frame follows in this segment. Is that right?"""
        if limit is not None and self._next_seq > limit:
            return
        stop = self._offset - base
        first_seqs = list_segments(self._disk, self._run)
        later = [first_seq for first_seq in first_seqs if first_seq > (self._segment or 0)]
        if stop < len(data) and (later or limit is None):
            check_torn(path, data, stop, self._seed, self._next_seq - 1, last=not later)
        elif stop < len(data):
            what = f"the frame of event {self._next_seq} is bad, though it was acknowledged as durable"
            raise CorruptLog(path, self._offset, self._next_seq - 1, what, REPAIR_ADVICE)
        elif later and later[0] != self._next_seq:
            if first_seqs[0] == later[0]:
                self._raise_gone(later[0])  # this one too: they were removed while it was read
            self._raise_missing_before(later[0], self._next_seq)
        elif not later and limit is not None:
            raise LostEvents(self._run.log, self._next_seq, limit)

    def _decode(self, path: str, base: int, data: memoryview, frame: Frame, limit: int | None) -> list[Record]:
        offset = base + frame.start
        where = f"{path} at byte {offset}"
        records = decode(data[frame.body_start : frame.stop], where, self._form, upcasts=self._upcasts)
        numbers = list(map(_SEQ, records))
        if numbers != list(range(frame.first_seq, frame.first_seq + frame.count)):
            what = f"the frame says events {frame.first_seq} to {frame.last_seq} and holds {numbers[:5]}"
            raise CorruptLog(path, offset, frame.first_seq - 1, what, REPAIR_ADVICE)
        before = max(0, self._start - frame.first_seq)
        behind = frame.count if limit is None else limit + 1 - frame.first_seq
        return records[before:behind]


def durable_seq(disk: Disk, run: RunDir, log_id: bytes) -> int | None:
    """How far the log is acknowledged; None where nothing says."""
    mark = read_head(disk, run.head, checksum_seed(log_id))
    return None if mark is None else mark.durable_seq


def durable_stop(path: str | os.PathLike[str], *, disk: Disk | None = None) -> int | None:
    """The first event of a run that isn't acknowledged as durable yet; None where nothing says.

    Raises:
        NotARun: `path` is not a run directory.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    last = durable_seq(disk, run, read_run_info(disk, run).log_id)
    return None if last is None else last + 1


def read_log(
    path: str | os.PathLike[str], start: int = 1, stop: int | None = None, *, disk: Disk | None = None
) -> Iterator[Record]:
    """The records `start` up to (not including) `stop` of a run directory, without opening it for writing.

    Works while another process writes the log, and then ends at what was durable when the reading began.

    Raises:
        NotARun: `path` is not a run directory.
        CorruptLog, LostEvents, UnsupportedLog: as when the log is opened, at the place where it shows.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    limit = durable_seq(disk, run, log_id)
    if stop is not None:
        limit = stop - 1 if limit is None else min(limit, stop - 1)
    return chain.from_iterable(_commits(disk, run, Cursor(disk, run, log_id, start), start, limit))


def _commits(disk: Disk, run: RunDir, cursor: Cursor, start: int, limit: int | None) -> Iterator[list[Record]]:
    with reading(disk, run, start):
        yield from cursor.read(limit)


def first_event(path: str | os.PathLike[str], *, disk: Disk | None = None) -> int:
    """The first event that a run still has: 1, but for a run that keeps only what came since its last checkpoints."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    read_run_info(disk, run)
    return next(iter(list_segments(disk, run)), 1)


def last_event(path: str | os.PathLike[str], *, disk: Disk | None = None) -> int:
    """The last event of a run that is acknowledged; 0 where there is none."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    read_run_info(disk, run)
    segments = list_segments(disk, run)
    if not segments:
        return 0
    last = segments[-1] - 1
    for record in read_log(path, segments[-1], disk=disk):
        last = record.seq
    return last


def snapshot_digests(path: str | os.PathLike[str], *, disk: Disk | None = None) -> dict[int, str]:
    """The digest of the book in each snapshot that can be read, by its last event."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    read_run_info(disk, run)
    books = ((seq, read_book(path, seq, disk=disk)) for seq in list_snapshots(disk, run))
    return {seq: book.digest() for seq, book in books if book is not None and book.last_seq == seq}


def waypoint_digests(path: str | os.PathLike[str], *, disk: Disk | None = None) -> dict[int, str]:
    """The digest of the book in each waypoint that can be read, by its last event."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    digests = {}
    for seq in list_snapshots(disk, run, WAYPOINT):
        found = read_snapshot(disk, run, log_id, seq, WAYPOINT)
        try:
            if found is not None:
                digests[seq] = restore(decoded(found.parts())).digest()
        except (ValueError, msgspec.MsgspecError):
            pass  # of a later version, which says nothing about the log
    return digests


def beginning(path: str | os.PathLike[str], *, disk: Disk | None = None) -> tuple[Book | None, int]:
    """Where a run's events begin: the book before the first that it still has, and its number. None and 1 where all are
    there.

    Raises:
        CorruptLog: events are gone, and no snapshot that can be read says what they led to.
        UnsupportedLog: the same, and there is one that a later version wrote.
    """
    first = first_event(path, disk=disk)
    if first == 1:
        return None, 1
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    for seq in list_snapshots(disk, run):
        book = read_book(path, seq, disk=disk) if seq >= first - 1 else None
        if book is not None and book.last_seq >= first - 1:
            return book, book.last_seq + 1
    if later := _later_snapshot(disk, run, first - 1):
        raise UnsupportedLog(
            f"{later}, and the events before event {first} are gone. "
            "Look at the run with the version that wrote it, or a later one"
        )
    raise CorruptLog(run.segment(first), 0, 1, "the events before it are gone, and no snapshot of them can be read")


def _later_snapshot(disk: Disk, run: RunDir, least_seq: int) -> str:
    """That a later version wrote a snapshot after event `least_seq` or a later one, as text; empty where none did."""
    log_id = read_run_info(disk, run).log_id
    if text := later_format(disk, run, log_id, least_seq):
        return text
    for seq in list_snapshots(disk, run):
        found = read_snapshot(disk, run, log_id, seq) if seq >= least_seq else None
        try:
            decoded(iter(()) if found is None else found.parts())
        except LaterState as error:
            return f"{snapshot_path(run, seq)} can't be read: {error}"
        except (ValueError, msgspec.MsgspecError):
            pass
    return ""


def read_book(path: str | os.PathLike[str], upto: int | None = None, *, disk: Disk | None = None) -> Book | None:
    """The book of the last snapshot that holds no event behind `upto`; None without one that can be read."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    limit = durable_seq(disk, run, log_id)
    if upto is not None:
        limit = upto if limit is None else min(limit, upto)
    while (found := newest_snapshot(disk, run, log_id, upto=limit)) is not None:
        try:
            return restore(decoded(found.parts()))
        except (ValueError, msgspec.MsgspecError):
            limit = found.info.seq - 1
    return None
