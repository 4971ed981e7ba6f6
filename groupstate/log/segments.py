"""The segment files of a log: which there are, and the one that is being written.

Rule 1: a new segment is built under a temporary name and renamed when its header is on the disk, so a segment
without a whole header is damage and not an accident of timing.
Rule 2: a failed write is undone by cutting the file where the last good frame ends. Otherwise the next good
frame would make the torn one look like damage.
"""

from collections.abc import Sequence

import attrs

from groupstate.errors import CorruptLog
from groupstate.log.codec import fingerprint, join_items
from groupstate.log.disk import Disk, make_file, write_all
from groupstate.log.frames import HEADER_BYTES, SegmentHeader, build_frame, checksum_seed
from groupstate.log.rundir import SEGMENT_SUFFIX, RunDir
from groupstate.log.upcasts import FORMAT

SEGMENT_BYTES = 64 << 20
"""A segment that is longer gets a successor. One commit is never split, so a segment may end up longer."""


def list_segments(disk: Disk, run: RunDir) -> list[int]:
    """First seqs of the segments, archived ones included, in order."""
    try:
        names = disk.listdir(run.log)
    except FileNotFoundError as error:
        raise CorruptLog(run.log, 0, 0, "the directory with the events is missing") from error
    stems = (name.removesuffix(".gz").removesuffix(SEGMENT_SUFFIX) for name in names if _is_segment(name))
    return sorted({int(stem) for stem in stems if stem.isdecimal()})


def _is_segment(name: str) -> bool:
    """A segment, packed or not."""
    return name.endswith((SEGMENT_SUFFIX, SEGMENT_SUFFIX + ".gz"))


@attrs.frozen
class SegmentEnd:
    """The last segment and where its last good frame ends."""

    first_seq: int
    stop: int
    form: int = FORMAT
    """The format of its events."""


class SegmentWriter:
    """Appends frames to the last segment and starts the next one. Used by one thread at a time."""

    def __init__(
        self, disk: Disk, run: RunDir, log_id: bytes, last: SegmentEnd | None, *, segment_bytes: int, sync: bool
    ) -> None:
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._seed = checksum_seed(log_id)
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._fd = -1
        self._stop = 0
        self._full = last is not None and last.form != FORMAT
        """The segment takes no more: what is written now is of another format than its header says."""
        if last is not None:
            self._fd = disk.open(run.segment(last.first_seq))
            self._stop = last.stop

    def append(self, parts: Sequence[bytes], count: int, first_seq: int, now_ns: int) -> None:
        """One frame, on the disk when this returns."""
        frame = build_frame(join_items(parts, count), count, first_seq, self._seed)
        if self._fd < 0 or self._full or (self._stop > HEADER_BYTES and self._stop + len(frame) > self._segment_bytes):
            self._start_segment(first_seq, now_ns)
        try:
            write_all(self._disk, self._fd, frame, self._stop)
            if self._sync:
                self._disk.fdatasync(self._fd)
        except BaseException:
            self._cut_back()
            raise
        self._stop += len(frame)

    def _start_segment(self, first_seq: int, now_ns: int) -> None:
        path = self._run.segment(first_seq)
        header = SegmentHeader(self._log_id, first_seq, now_ns, fingerprint()).encode()
        if self._fd >= 0 and not self._sync:
            # A power loss may then tear the last segment only, as recovery expects.
            self._disk.fdatasync(self._fd)
        make_file(self._disk, path, header)
        fd = self._disk.open(path)
        self.close()
        self._fd = fd
        self._stop = len(header)
        self._full = False

    def _cut_back(self) -> None:
        try:
            self._disk.truncate(self._fd, self._stop)
        except OSError:
            pass  # recovery finds a torn tail instead

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1


def flush_segment_of(disk: Disk, run: RunDir, seq: int) -> None:
    """Flush the segment that holds an event. Those before it were flushed when it was begun.

    Raises:
        OSError: it can't be flushed.
    """
    fd = disk.open(run.segment(max(first for first in list_segments(disk, run) if first <= seq)))
    try:
        disk.fdatasync(fd)
    finally:
        disk.close(fd)


def is_leftover(name: str) -> bool:
    """A segment whose making was interrupted."""
    return name.endswith((SEGMENT_SUFFIX + ".tmp", SEGMENT_SUFFIX + ".gz.tmp"))
