"""Finding a place in a long log without reading what lies before it.

Rule 1: what is found is found by halving, in time that grows by the logarithm of the events.
Rule 2: nobody shows what isn't acknowledged, so no place behind the durable watermark is found.
"""

import os
from bisect import bisect_right
from collections.abc import Callable

import attrs
import msgspec

from groupstate.core.book import Book
from groupstate.core.snapshot import decoded, restore
from groupstate.errors import CorruptLog
from groupstate.log.archive import read_beginning, read_segment
from groupstate.log.codec import decode
from groupstate.log.disk import Disk, OsDisk
from groupstate.log.frames import (
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    Frame,
    body_length,
    checksum_seed,
    frame_at,
    last_frame,
)
from groupstate.log.reading import durable_seq, last_event, read_log
from groupstate.log.recovery import check_header
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import WAYPOINT, WHOLE, SnapshotInfo, list_snapshots, read_header, read_snapshot

READ_AHEAD_BYTES = 64 << 10
"""Of a segment's beginning; more where its first frame is longer."""

NEVER_NS = 1 << 200
"""Behind all times."""


@attrs.define
class Base:
    """A book to go on from."""

    book: Book
    whole: bool
    """It knows the groups that have left too, as far as any book does. One from a waypoint doesn't."""


def nearest_base(
    path: str | os.PathLike[str], upto: int | None = None, *, whole: bool = False, disk: Disk | None = None
) -> Base | None:
    """The book of the last snapshot or waypoint that holds no event behind `upto`; None without one that can be read.

    Args:
        whole: snapshots alone.

    Raises:
        NotARun: `path` is not a run directory.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    for seq, is_waypoint in reversed(_places(disk, run, log_id, upto)):
        if whole and is_waypoint:
            continue
        found = read_snapshot(disk, run, log_id, seq, WAYPOINT if is_waypoint else WHOLE)
        try:
            if found is not None:
                return Base(restore(decoded(found.parts())), not is_waypoint)
        except (ValueError, msgspec.MsgspecError):
            pass  # of a later version, or no state: an older one is as good
    return None


def first_base_seq(path: str | os.PathLike[str], least_seq: int, *, disk: Disk | None = None) -> int | None:
    """The last event of the first snapshot or waypoint that holds event `least_seq`; None without one."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    return next((seq for seq, _ in _places(disk, run, log_id, None) if seq >= least_seq), None)


def known_places(path: str | os.PathLike[str], *, disk: Disk | None = None) -> list[SnapshotInfo]:
    """What the headers of snapshots and waypoints say, in the order of the log."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    places = _places(disk, run, log_id, None)
    found = (read_header(disk, run, log_id, seq, WAYPOINT if way else WHOLE) for seq, way in places)
    return [info for info in found if info is not None]


def _places(disk: Disk, run: RunDir, log_id: bytes, upto: int | None) -> list[tuple[int, bool]]:
    """(last event, whether it is a waypoint) of each, in order; of two after the same event the smaller one last."""
    durable = durable_seq(disk, run, log_id)
    limits = [limit for limit in (durable, upto) if limit is not None]
    every = [(seq, False) for seq in list_snapshots(disk, run)]
    every += [(seq, True) for seq in list_snapshots(disk, run, WAYPOINT)]
    return sorted(place for place in every if all(place[0] <= limit for limit in limits))


def end_of(path: str | os.PathLike[str], *, disk: Disk | None = None) -> int:
    """The last event that is acknowledged; 0 where there is none. Reads no event where the watermark says it."""
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    durable = durable_seq(disk, run, read_run_info(disk, run).log_id)
    return last_event(path, disk=disk) if durable is None else durable


def event_at(path: str | os.PathLike[str], at_ns: int, *, disk: Disk | None = None) -> int:
    """The last event recorded at or before a time, in nanoseconds since the epoch; 0 where none was.

    The clock is taken to go forward. Where it was set back one of the places with that time is found.

    Raises:
        NotARun: `path` is not a run directory.
        CorruptLog, LostEvents, UnsupportedLog: where it can't be read, on the way.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    segments = [_Segment(disk, run, log_id, first_seq) for first_seq in list_segments(disk, run)]
    found = bisect_right(segments, at_ns, key=_Segment.begins_ns) - 1
    if found < 0:
        return 0
    start = segments[found].last_before(at_ns)
    durable = durable_seq(disk, run, log_id)
    last = 0
    for record in read_log(path, start if durable is None else max(1, min(start, durable)), disk=disk):
        if record.at_ns > at_ns:
            break
        last = record.seq
    return last


class _Segment:
    """A segment in which frames are found by the time of their first event."""

    def __init__(self, disk: Disk, run: RunDir, log_id: bytes, first_seq: int) -> None:
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._first_seq = first_seq
        self._path = run.segment(first_seq)
        self._seed = checksum_seed(log_id)
        self._form = 0

    def begins_ns(self) -> int:
        """When its first event was recorded; never, where it has none yet."""
        data = self._beginning()
        self._check(data)
        frame = frame_at(memoryview(data), HEADER_BYTES, self._seed)
        return NEVER_NS if frame is None else self._at_ns(data, frame)

    def _beginning(self) -> bytes:
        """Its header and its first frame."""
        data = read_beginning(self._disk, self._run, self._first_seq, READ_AHEAD_BYTES)
        stop = HEADER_BYTES + FRAME_HEADER_BYTES + body_length(data, HEADER_BYTES)
        return data if stop <= READ_AHEAD_BYTES else read_beginning(self._disk, self._run, self._first_seq, stop)

    def last_before(self, at_ns: int) -> int:
        """The first event of the last frame that begins at or before a time, or of one shortly before it."""
        data = read_segment(self._disk, self._run, self._first_seq)
        self._check(data)
        early: Callable[[Frame], bool] = lambda frame: self._at_ns(data, frame) <= at_ns  # noqa: E731
        frame = frame_at(memoryview(data), last_frame(data, HEADER_BYTES, self._seed, early), self._seed)
        if frame is None:
            raise CorruptLog(self._path, HEADER_BYTES, self._first_seq, "its first frame can't be read")
        return frame.first_seq

    def _check(self, data: bytes) -> None:
        self._form = check_header(self._path, data[:HEADER_BYTES], self._log_id, self._first_seq).form

    def _at_ns(self, data: bytes, frame: Frame) -> int:
        where = f"{self._path} at byte {frame.start}"
        return decode(memoryview(data)[frame.body_start : frame.stop], where, self._form)[0].at_ns
