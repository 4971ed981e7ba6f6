"""What is still good of a damaged log, and a new run that holds the good part.

Rule 1: the run that is looked at is never changed, nor are files that it may still write shared with the new one.
Rule 2: commits and events are copied byte by byte, so that what this version doesn't know is kept.
Rule 3: the new run has the same id: its payloads are checked against it, and marks of the old run fit the new one.
"""

import os
import zlib
from collections.abc import Iterator

import attrs
import msgspec

from groupstate.core.events import GroupFailed, GroupFinished, Record
from groupstate.errors import BadInput, CorruptLog, LogError, LostEvents
from groupstate.log.archive import read_segment
from groupstate.log.codec import decode, join_items
from groupstate.log.disk import Disk, OsDisk, make_file, read_file
from groupstate.log.frames import HEADER_BYTES, Frame, build_frame, checksum_seed, find_frame_behind, parse_header, walk
from groupstate.log.head import HeadWriter, Watermark, read_head
from groupstate.log.payload_files import list_payload_files, payload_path
from groupstate.log.process import boot_id
from groupstate.log.recovery import check_header, check_torn
from groupstate.log.rundir import RunDir, RunInfo, read_run_info, write_run_info
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import list_snapshots, read_snapshot, snapshot_path


@attrs.frozen
class Good:
    """The frames of one segment up to its end, or up to where the damage begins."""

    first_seq: int
    stop: int
    last_seq: int


@attrs.frozen
class Diagnosis:
    """How far a log is good, and what lies behind that."""

    path: str
    last_seq: int
    """The last event before the damage; the last of all where there is none."""
    damage: str = ""
    """What is wrong, with file and byte; empty if nothing is."""
    behind: int = 0
    """Good events behind the damage, which no new run can have: what they build on isn't there."""
    first_behind: int | None = None
    last_behind: int | None = None
    torn_bytes: int = 0
    """Of a commit at the very end that isn't whole. Without damage it was interrupted, and opening the run cuts it."""
    first_seq: int = 1
    """The first event that is still there; those before it went as the run's `keep_log` has it."""
    begins_at: int = 0
    """The first event that a new run may end with: that of the oldest snapshot, where the log's beginning is gone."""

    @property
    def keep_until(self) -> int | None:
        """Where a new run would best end; None if nothing is left to keep."""
        return self.last_seq if self.last_seq >= max(1, self.begins_at) else None


@attrs.frozen
class Repaired:
    """What `repair` wrote."""

    path: str
    last_seq: int
    segments: int
    payload_files: int
    linked: int
    """Payload files among them that the two runs share, as hard links; neither ever writes to them."""


def diagnose(path: str | os.PathLike[str], *, disk: Disk | None = None) -> Diagnosis:
    """Read a whole log and say how far it is good. Changes nothing.

    Raises:
        NotARun: `path` is not a run directory.
        UnsupportedLog: a segment of a format that this version doesn't know.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    return _examined(disk, run, read_run_info(disk, run))[0]


def repair(
    path: str | os.PathLike[str], target: str | os.PathLike[str], keep_until: int, *, disk: Disk | None = None
) -> Repaired:
    """Write a new run directory with the events up to `keep_until` of a run that is damaged, or of any, and with the
    snapshots of them. Archived segments are unpacked.

    Payloads that are gone stay gone: what needs them is evicted as damaged once it is sampled.

    Raises:
        BadInput: the target exists or lies inside of the run; the log isn't good up to `keep_until`; a session's
            end would be kept without the end of its group.
        NotARun: `path` is not a run directory.
        LogError: the target can't be written.
    """
    disk = OsDisk() if disk is None else disk
    run, new = RunDir.at(path), RunDir.at(target)
    info = read_run_info(disk, run)
    _check_target(disk, run, new)
    found, good = _examined(disk, run, info)
    _check_place(disk, run, info, found, good, keep_until)
    try:
        return _written(disk, run, new, info, good, keep_until)
    except OSError as error:
        raise LogError(
            f"{new.path} can't be written: {error}. Remove what is there of it before the next try"
        ) from error


# Looking ---------------------------------------------------------------------------------------------


def _examined(disk: Disk, run: RunDir, info: RunInfo) -> tuple[Diagnosis, list[Good]]:
    good: list[Good] = []
    last_seq, torn_bytes, damage = 0, 0, ""
    first_seqs: list[int] = []
    begins_at = 0
    try:
        first_seqs = list_segments(disk, run)
        begins_at = _begins_at(disk, run, info, first_seqs)
        last_seq = first_seqs[0] - 1 if begins_at else 0
        for first_seq in first_seqs:
            segment, torn_bytes = _examine_segment(
                disk, run, info, first_seq, last_seq, last=first_seq == first_seqs[-1]
            )
            if segment is not None:
                good.append(segment)
                last_seq = segment.last_seq
        mark = read_head(disk, run.head, checksum_seed(info.log_id))
        if mark is not None and mark.durable_seq > last_seq:
            damage = str(LostEvents(run.log, last_seq + 1, mark.durable_seq))
    except _Damaged as error:
        good += error.good
        last_seq, damage = max(error.seq, last_seq), error.text
    except CorruptLog as error:
        damage = _without_advice(error)
    behind = list(_frames_behind(disk, run, info, first_seqs, good)) if damage else []
    return (
        Diagnosis(
            run.path,
            last_seq,
            damage,
            sum(frame.count for frame in behind),
            min((frame.first_seq for frame in behind), default=None),
            max((frame.last_seq for frame in behind), default=None),
            torn_bytes,
            first_seqs[0] if begins_at else 1,
            begins_at,
        ),
        good,
    )


def _begins_at(disk: Disk, run: RunDir, info: RunInfo, first_seqs: list[int]) -> int:
    """The oldest good snapshot from which a log without its beginning can be gone on with; 0 where none is needed, or
    there is none."""
    if not first_seqs or first_seqs[0] == 1:
        return 0
    good = (seq for seq in list_snapshots(disk, run) if read_snapshot(disk, run, info.log_id, seq) is not None)
    return next((seq for seq in good if seq >= first_seqs[0] - 1), 0)


class _Damaged(Exception):
    """Damage inside of a segment, with what is good of it."""

    def __init__(self, text: str, good: list[Good], seq: int) -> None:
        super().__init__(text)
        self.text = text
        self.good = good
        self.seq = seq


def _without_advice(error: CorruptLog) -> str:
    return str(CorruptLog(error.path, error.offset, error.seq, error.what))


def _examine_segment(
    disk: Disk, run: RunDir, info: RunInfo, first_seq: int, last_seq: int, *, last: bool
) -> tuple[Good | None, int]:
    """The good part of a segment, and the bytes of an interrupted commit behind it."""
    path = run.segment(first_seq)
    if first_seq != last_seq + 1:
        what = f"the next segment starts with event {first_seq}, so a segment before it is missing"
        raise CorruptLog(path, 0, last_seq + 1, what)
    data = read_segment(disk, run, first_seq)
    if last and len(data) <= HEADER_BYTES and parse_header(data, path) is None:
        return None, len(data)
    check_header(path, data, info.log_id, first_seq)
    view, seed = memoryview(data), checksum_seed(info.log_id)
    good = Good(first_seq, HEADER_BYTES, last_seq)
    for frame in walk(view, HEADER_BYTES, seed, first_seq):
        good = Good(first_seq, frame.stop, frame.last_seq)
    if good.stop < len(data):
        try:
            check_torn(path, view, good.stop, seed, good.last_seq, last=last)
        except CorruptLog as error:
            raise _Damaged(_without_advice(error), [good], good.last_seq) from error
    return good, len(data) - good.stop


def _frames_behind(disk: Disk, run: RunDir, info: RunInfo, first_seqs: list[int], good: list[Good]) -> Iterator[Frame]:
    """Good frames anywhere behind the damage, in whichever file."""
    stops = {segment.first_seq: segment.stop for segment in good}
    last_seq = good[-1].last_seq if good else 0
    for first_seq in first_seqs:
        try:
            data = memoryview(read_segment(disk, run, first_seq))
        except CorruptLog:
            continue  # an archive that can't be unpacked
        at = stops.get(first_seq, 0)
        seed = checksum_seed(info.log_id)
        while (found := find_frame_behind(data, at, seed)) is not None:
            for frame in walk(data, found.start, seed, found.first_seq):
                at = frame.stop
                if frame.first_seq > last_seq:
                    yield frame


# Checking --------------------------------------------------------------------------------------------


def _check_target(disk: Disk, run: RunDir, new: RunDir) -> None:
    if os.path.realpath(new.path).startswith(os.path.join(os.path.realpath(run.path), "")):
        raise BadInput(f"{new.path} lies inside of the run {run.path}; name a directory beside it")
    if disk.exists(new.path):
        raise BadInput(f"{new.path} exists; name a directory that doesn't, nothing is ever written over")


def _check_place(disk: Disk, run: RunDir, info: RunInfo, found: Diagnosis, good: list[Good], keep_until: int) -> None:
    least = max(1, found.begins_at)
    if not least <= keep_until <= found.last_seq:
        some = found.keep_until is not None
        right = f"keep until an event from {least} to {found.last_seq}" if some else "no event is left to keep"
        why = "the events before the oldest snapshot are gone" if found.last_seq >= keep_until else ""
        why = why or (
            f"the damage is behind event {found.last_seq}" if found.damage else f"the log ends at {found.last_seq}"
        )
        raise BadInput(f"event {keep_until} can't be kept: {why}; {right}. {found.damage}".rstrip())
    if keep_until == found.last_seq:
        return
    after = _record(disk, run, info, good, keep_until + 1)
    if isinstance(after.event, GroupFinished | GroupFailed):
        raise BadInput(
            f"event {keep_until} is the end of the last session of group {after.event.group_id!r}, and the group's own "
            f"end, event {after.seq}, belongs to it; keep until {keep_until - 1} or until {keep_until + 1}"
        )


def _record(disk: Disk, run: RunDir, info: RunInfo, good: list[Good], seq: int) -> Record:
    segment = next(segment for segment in good if seq <= segment.last_seq)
    data = memoryview(read_segment(disk, run, segment.first_seq))
    header = check_header(run.segment(segment.first_seq), bytes(data[:HEADER_BYTES]), info.log_id, segment.first_seq)
    frames = walk(data, HEADER_BYTES, checksum_seed(info.log_id), segment.first_seq)
    frame = next(frame for frame in frames if seq <= frame.last_seq)
    records = decode(data[frame.body_start : frame.stop], run.segment(segment.first_seq), header.form)
    return records[seq - frame.first_seq]


# Writing ---------------------------------------------------------------------------------------------


def _written(disk: Disk, run: RunDir, new: RunDir, info: RunInfo, good: list[Good], keep_until: int) -> Repaired:
    disk.makedirs(new.log)
    kept = [segment for segment in good if segment.first_seq <= keep_until]
    for segment in kept:
        data = read_segment(disk, run, segment.first_seq)[: segment.stop]
        if segment.last_seq > keep_until:
            data = _cut(data, info, segment.first_seq, keep_until)
        make_file(disk, new.segment(segment.first_seq), data)
    for name in disk.listdir(run.log):
        if name.startswith("schema-") and name.endswith(".json"):
            make_file(disk, os.path.join(new.log, name), read_file(disk, os.path.join(run.log, name)))
    for seq in list_snapshots(disk, run):
        if seq <= keep_until and read_snapshot(disk, run, info.log_id, seq) is not None:
            make_file(disk, snapshot_path(new, seq), read_file(disk, snapshot_path(run, seq)))
    files, linked = _copy_payloads(disk, run, new)
    mark = Watermark(keep_until, True, zlib.crc32(boot_id().encode()))
    HeadWriter(disk, new.head, mark, checksum_seed(info.log_id)).close()
    # Last, since a directory without it is no run.
    write_run_info(disk, new, info)
    return Repaired(new.path, keep_until, len(kept), files, linked)


def _cut(data: bytes, info: RunInfo, first_seq: int, keep_until: int) -> bytes:
    """A segment up to an event, which may lie in the middle of a commit."""
    seed = checksum_seed(info.log_id)
    last = next(f for f in walk(memoryview(data), HEADER_BYTES, seed, first_seq) if f.last_seq >= keep_until)
    if last.last_seq == keep_until:
        return data[: last.stop]
    # As they are, so that nothing is lost that only a later version knows.
    records = msgspec.msgpack.decode(data[last.body_start : last.stop], type=list[msgspec.Raw])
    kept = [bytes(record) for record in records[: keep_until + 1 - last.first_seq]]
    return data[: last.start] + build_frame(join_items(kept, len(kept)), len(kept), last.first_seq, seed)


def _copy_payloads(disk: Disk, run: RunDir, new: RunDir) -> tuple[int, int]:
    """Payload files, as links where that can be: all but the newest are never written to again."""
    disk.makedirs(new.payloads)
    files, done = list_payload_files(disk, run), []
    for file in files:
        source, target = payload_path(run, file), payload_path(new, file)
        try:
            done.append((file != files[-1] and _linked(disk, source, target)) or _copied(disk, source, target))
        except FileNotFoundError:
            pass  # freed in this moment by a writer that lives
    disk.fsync_dir(new.payloads)
    return len(done), done.count("linked")


def _linked(disk: Disk, source: str, target: str) -> str:
    try:
        disk.link(source, target)
    except OSError:
        return ""  # another file system, or one without hard links
    return "linked"


def _copied(disk: Disk, source: str, target: str) -> str:
    make_file(disk, target, read_file(disk, source))
    return "copied"
