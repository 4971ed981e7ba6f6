"""Logs with snapshots: small segments, a book that follows the events, and what lies in the directory."""

import os

from groupstate.core.book import Book
from groupstate.core.snapshot import capture, encoded
from groupstate.log.disk import Disk
from groupstate.log.file import FileLog
from groupstate.log.rundir import RunDir
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import SnapshotInfo, list_snapshots

from .scenes import LOG_ID, RUN, make, weights

PLACE = RunDir.at(RUN)
ID = bytes.fromhex(LOG_ID)
SMALL = 200
"""Bytes of a segment: four or five events."""


def snap(log: FileLog, book: Book, *, limit: int = 0) -> None:
    info = SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)
    log.keep_snapshot(info, list(encoded(capture(book))), limit=limit)


def go_on(log: FileLog, book: Book, count: int) -> None:
    """Post so many events, each a commit of its own."""
    for record in weights(log.last_seq + 1, count):
        log.post([record])
        book.apply(record)


def book_of(log: FileLog) -> Book:
    book = Book()
    for record in log.read():
        book.apply(record)
    return book


def told(disk: Disk, *, events: int = 30, at: tuple[int, ...] = (10, 20), limit: int = 0, **options: object) -> FileLog:
    """An open log with snapshots after the events `at`."""
    log, book = make(disk, segment_bytes=SMALL, **options), Book()
    for stop in (*at, events):
        go_on(log, book, stop - log.last_seq)
        if stop in at:
            snap(log, book, limit=limit)
    return log


def segments(disk: Disk) -> list[int]:
    return list_segments(disk, PLACE)


def plain(disk: Disk) -> list[int]:
    return [first for first in segments(disk) if disk.exists(PLACE.segment(first))]


def snapshots(disk: Disk) -> list[int]:
    return list_snapshots(disk, PLACE)


def names(disk: Disk) -> list[str]:
    return sorted(os.path.basename(name) for name in disk.listdir(PLACE.log))
