"""What opening a log finds, and what it does about it.

Rule 1: looking comes first and changes nothing; an error leaves every file as it was.
Rule 2: only the end of the last segment can be torn, and only by one commit. Anything else is damage.
Rule 3: a log that ends below its durable watermark has lost acknowledged events, however clean it looks.
"""

import os
from bisect import bisect_right
from collections.abc import Callable

import attrs

from groupstate.errors import CorruptLog, LostEvents, UnsupportedLog
from groupstate.log.archive import read_segment
from groupstate.log.disk import Disk
from groupstate.log.frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    SegmentHeader,
    checksum_seed,
    claimed_stop,
    find_frame_behind,
    parse_header,
    walk_to_end,
)
from groupstate.log.head import Watermark, read_head
from groupstate.log.payload_files import list_payload_files, payload_path
from groupstate.log.rundir import RunDir
from groupstate.log.segments import SegmentEnd, is_leftover, list_segments
from groupstate.log.snapshots import WAYPOINT, Snapshot, later_format, newest_snapshot, snapshot_path, snapshots_among
from groupstate.log.snapshots import is_leftover as is_snapshot_leftover
from groupstate.log.upcasts import UPCASTS, Upcasts

REPAIR_ADVICE = (
    "Nothing was changed. `groupstate repair RUN` says what is still good, and writes a new run up to an event you "
    "choose, leaving this one alone"
)


@attrs.frozen
class Known:
    """The end of a frame, from which on a log may be read without walking to it."""

    segment: int
    """First seq of its segment."""
    stop: int
    last_seq: int
    form: int
    """Format of the segment."""


@attrs.frozen
class Findings:
    """What a log holds, and what is to be done before it can be written to."""

    last_seq: int
    last: SegmentEnd | None
    """None where there is no segment to go on with."""
    torn_bytes: int = 0
    """Bytes of an interrupted commit behind the last good frame."""
    leftovers: tuple[str, ...] = ()
    """Files to remove."""
    known: "Known | None" = None
    """Where the events behind the snapshot begin."""
    snapshot: Snapshot | None = None
    """The newest good one."""
    waypoint_seq: int = 0
    """The last event of the newest waypoint; 0 without one."""


def examine(disk: Disk, run: RunDir, log_id: bytes, boot_crc: int, *, upcasts: Upcasts = UPCASTS) -> Findings:
    """Read every frame of the log behind the newest snapshot, all without one, and judge it.

    What lies before the snapshot's segment isn't read: `groupstate check` does that.

    Raises:
        CorruptLog: damage that isn't a torn tail.
        LostEvents: acknowledged events are missing at the end.
        UnsupportedLog: a segment of a format that this version doesn't know; or a snapshot of one, where the events
            before it are gone.
    """
    mark = read_head(disk, run.head, checksum_seed(log_id))
    names = disk.listdir(run.log)
    leftovers = [os.path.join(run.log, name) for name in names if is_leftover(name) or is_snapshot_leftover(name)]
    snapshot = newest_snapshot(disk, run, log_id)
    findings = _examine_segments(disk, run, log_id, snapshot.info.seq if snapshot else 0, upcasts)
    excused = mark is not None and _may_be_lost(mark, boot_crc)
    promised = max(mark.durable_seq if mark is not None else 0, snapshot.info.seq if snapshot else 0)
    if findings.last_seq < promised and not excused:
        raise LostEvents(run.log, findings.last_seq + 1, promised)
    while snapshot is not None and snapshot.info.seq > findings.last_seq:
        # It holds events that went with the machine, as `durability="os"` allows.
        leftovers.append(snapshot_path(run, snapshot.info.seq))
        snapshot = newest_snapshot(disk, run, log_id, upto=snapshot.info.seq - 1)
        first_seq = list_segments(disk, run)[0]
        if first_seq > 1 and (snapshot is None or snapshot.info.seq < first_seq - 1):
            # What it holds is nowhere else any more.
            raise LostEvents(run.log, findings.last_seq + 1, promised)
    # Of events that went with the machine: others will have their numbers.
    waypoints = snapshots_among(names, WAYPOINT)
    leftovers += [snapshot_path(run, seq, WAYPOINT) for seq in waypoints if seq > findings.last_seq]
    waypoint_seq = max((seq for seq in waypoints if seq <= findings.last_seq), default=0)
    return attrs.evolve(findings, leftovers=tuple(leftovers), snapshot=snapshot, waypoint_seq=waypoint_seq)


def _may_be_lost(mark: Watermark, boot_crc: int) -> bool:
    """With `durability="os"` events survive the process, and not the machine."""
    return not mark.flushed and mark.boot_crc != boot_crc


def _examine_segments(disk: Disk, run: RunDir, log_id: bytes, known_seq: int, upcasts: Upcasts) -> Findings:
    """
    Args:
        known_seq: the last event of the newest snapshot; what lies in earlier segments was sealed before it.
    """
    first_seqs = list_segments(disk, run)
    begin = max(0, bisect_right(first_seqs, known_seq) - 1)
    findings = Findings(known_seq if not first_seqs else min(first_seqs[begin] - 1, known_seq), None)
    for first_seq in first_seqs[begin:]:
        path = run.segment(first_seq)
        if first_seq != findings.last_seq + 1:
            if first_seq == first_seqs[0]:
                _refuse_later_snapshots(disk, run, log_id, first_seq)
            missing = f"the next segment starts with event {first_seq}, so a segment before it is missing"
            raise CorruptLog(path, 0, findings.last_seq + 1, missing, REPAIR_ADVICE)
        last = first_seq == first_seqs[-1]
        data = read_segment(disk, run, first_seq)
        findings = _examine_segment(path, data, log_id, first_seq, findings, known_seq, upcasts, last=last)
    if findings.last is not None and not disk.exists(run.segment(findings.last.first_seq)):
        # It is packed, so whatever came behind it is gone. Nothing is ever written to an archive.
        return attrs.evolve(findings, last=None)
    return findings


def _refuse_later_snapshots(disk: Disk, run: RunDir, log_id: bytes, first_seq: int) -> None:
    """The events before `first_seq` are missing. Were they removed behind a snapshot that this version can't read?"""
    if text := later_format(disk, run, log_id, first_seq - 1):
        raise UnsupportedLog(
            f"{text}, and the events before event {first_seq} are gone. "
            "Open the run with the version that wrote it, or a later one"
        )


def _examine_segment(
    path: str,
    data: bytes,
    log_id: bytes,
    first_seq: int,
    before: Findings,
    known_seq: int,
    upcasts: Upcasts,
    *,
    last: bool,
) -> Findings:
    if last and len(data) <= HEADER_BYTES and parse_header(data, path, upcasts) is None:
        # The rename reached the disk and the header didn't: the file holds nothing, so it is torn as a whole.
        # What was acknowledged in it, if it was cut later, shows in the watermark.
        return Findings(before.last_seq, None, torn_bytes=len(data), known=before.known)
    header = check_header(path, data, log_id, first_seq, upcasts)
    view = memoryview(data)
    seed = checksum_seed(log_id)
    stop, last_seq, known_stop, known_last = walk_to_end(view, HEADER_BYTES, seed, first_seq, known_seq)
    if stop < len(data):
        check_torn(path, view, stop, seed, last_seq, last=last)
    end = SegmentEnd(first_seq, stop, header.form)
    known = before.known or Known(first_seq, known_stop, known_last, header.form)
    return Findings(last_seq, end, torn_bytes=len(data) - stop, known=known)


def check_header(path: str, data: bytes, log_id: bytes, first_seq: int, upcasts: Upcasts = UPCASTS) -> SegmentHeader:
    """The header of a segment that must have a good one."""
    header = parse_header(data, path, upcasts)
    if header is None:
        raise CorruptLog(path, 0, first_seq, "the segment's header is damaged", REPAIR_ADVICE)
    if header.log_id != log_id:
        raise CorruptLog(path, 0, first_seq, "the segment belongs to another log", REPAIR_ADVICE)
    if header.first_seq != first_seq:
        what = f"the segment's name says {first_seq} and its header {header.first_seq}"
        raise CorruptLog(path, 0, first_seq, what, REPAIR_ADVICE)
    return header


def check_torn(path: str, data: memoryview, stop: int, seed: int, last_seq: int, *, last: bool) -> None:
    """Make sure that what lies behind the last good frame is one interrupted commit.

    Raises:
        CorruptLog: it is not.
    """
    what = ""
    if not last:
        what = "a frame is bad and more segments follow"
    elif frame := find_frame_behind(data, stop, seed):
        what = f"a frame is bad and a good one follows at byte {frame.start} with event {frame.first_seq}"
    elif (claimed := claimed_stop(data, stop)) is not None and claimed < len(data):
        what = f"a frame is bad and {len(data) - claimed} bytes follow it, so it isn't the last"
    elif len(data) - stop > FRAME_BYTES_MAX:
        what = f"{len(data) - stop} bytes behind it make no frame, more than one commit can leave"
    if what:
        raise CorruptLog(path, stop, last_seq, what, REPAIR_ADVICE)


def carry_out(disk: Disk, run: RunDir, findings: Findings, *, sync: bool) -> None:
    """Cut the torn tail, remove leftovers, and put on the disk what was only in its cache."""
    for path in findings.leftovers:
        disk.unlink(path)
    torn = run.segment(findings.last_seq + 1)
    if findings.last is not None:
        path, stop = run.segment(findings.last.first_seq), findings.last.stop
        if findings.torn_bytes:
            _on_file(disk, path, lambda fd: disk.truncate(fd, stop))
    elif disk.exists(torn):
        disk.unlink(torn)
    if sync:
        _flush(disk, run)


def _flush(disk: Disk, run: RunDir) -> None:
    """From here on all that was found counts as durable, so it must be.

    The last writer may have died between a write and its flush, or may not have flushed at all. Older files
    were flushed before the last ones were begun.
    """
    for first_seq in list_segments(disk, run)[-1:]:
        if disk.exists(run.segment(first_seq)):
            _on_file(disk, run.segment(first_seq), disk.fdatasync)
    for file in list_payload_files(disk, run)[-1:]:
        _on_file(disk, payload_path(run, file), disk.fdatasync)
    disk.fsync_dir(run.log)
    # The name of run.json: whoever made the run may have died before he flushed it.
    disk.fsync_dir(run.path)


def _on_file(disk: Disk, path: str, action: Callable[[int], None]) -> None:
    fd = disk.open(path)
    try:
        action(fd)
    finally:
        disk.close(fd)
