"""A copy of a run for a bug report, in which nothing of its user's is left.

Events keep their numbers, times and commits; `groupstate.inspect.redaction` says what of them is replaced. Snapshots
are rewritten the same way, so that what is wrong with one stays wrong. Payloads that are still there become ones that
say nothing, so the copy opens and goes on.

Rule 1: nothing is copied byte by byte: what can't be read and understood is left out.
Rule 2: the copy is handed out only where every group is in the same phase after every event.
"""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Final

import attrs
import msgspec

from groupstate.core import events as ev
from groupstate.core.snapshot import decoded, encoded
from groupstate.errors import BadInput, CorruptLog, LogError, LostEvents, UnsupportedLog
from groupstate.inspect.lives import Life, Listener, Lives
from groupstate.inspect.redaction import Redactor, redacted_payload
from groupstate.inspect.words import counted
from groupstate.inspect.writing import whole_file, whole_folder
from groupstate.log.archive import LEVEL, archive_path
from groupstate.log.codec import encode_items, fingerprint, join_items, schema_json, schema_name
from groupstate.log.disk import OsDisk
from groupstate.log.frames import SegmentHeader, build_frame, checksum_seed
from groupstate.log.head import HeadWriter, Watermark
from groupstate.log.payload_files import (
    PAYLOAD_FILE_BYTES,
    RECORD_HEADER_BYTES,
    PayloadWriter,
    Place,
    list_payload_files,
    payload_path,
    read_record,
    scan_file,
)
from groupstate.log.reading import Cursor, beginning, durable_seq, first_event, read_log
from groupstate.log.retention import reading
from groupstate.log.rundir import RunDir, read_run_info, write_run_info
from groupstate.log.snapshots import WAYPOINT, WHOLE, Shape, list_snapshots, read_snapshot, write_snapshot
from groupstate.version import VERSION

MARKER: Final = "log/redacted.json"
"""Marks a directory as a copy, which another copy may replace."""
PACKED: Final = (".tar.gz", ".tgz")

PAYLOADS_AT_ONCE: Final = 64


@attrs.frozen
class Redacted:
    path: str
    first_seq: int
    last_seq: int
    segments: int
    snapshots: int
    payloads: int
    left_out: tuple[str, ...]
    """What the run has and the copy hasn't, in words."""
    replaced: dict[str, int]
    """Different texts that were replaced, by what they were."""
    phases: str
    """Digest of the phase of every group after every event: of the run, and of the copy."""


def redact(run: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False) -> Redacted:
    """Write a copy of a run without prompts, answers, error texts, names of workers, data sets, hosts and files.

    Args:
        target: a directory, which becomes a run; or a file whose name ends in .tar.gz or .tgz, which holds one.
        overwrite: the target may be a copy that an earlier call made, or a file.

    Raises:
        NotARun: `run` is not a run directory.
        BadInput: it has no event, or the target can't be written.
        LogError: the log can't be read. Nothing is left then.
    """
    source, place = RunDir.at(run), Path(target)
    if _lies_in(place, Path(source.path)):
        raise BadInput(f"{place} lies inside of the run {source.path}; name a place beside it")
    if not place.name.endswith(PACKED):
        with whole_folder(place, MARKER, overwrite=overwrite) as made:
            return attrs.evolve(_Copy(source, RunDir.at(made)).write(), path=str(place))
    # In a folder of the file's name, so that it unpacks to one.
    name = next(place.name.removesuffix(suffix) for suffix in PACKED if place.name.endswith(suffix)) or "run"
    with whole_file(place, overwrite=overwrite) as beside, TemporaryDirectory(dir=place.parent, prefix=".") as folder:
        made = Path(folder) / name
        made.mkdir()
        done = _Copy(source, RunDir.at(made)).write()
        _pack(made, beside)
    return attrs.evolve(done, path=str(place))


def _lies_in(place: Path, run: Path) -> bool:
    return place.resolve().is_relative_to(run.resolve())


def _pack(folder: Path, path: Path) -> None:
    """A packed archive of a folder, without who made it and when."""

    def nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    with (
        path.open("wb") as plain,
        gzip.GzipFile("", "wb", LEVEL, plain, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        archive.add(folder, folder.name, filter=nameless)


class _Copy:
    """One copy on its way into an empty folder."""

    def __init__(self, source: RunDir, new: RunDir) -> None:
        self._disk = OsDisk()
        self._source = source
        self._new = new
        self._info = read_run_info(self._disk, source)
        self._seed = checksum_seed(self._info.log_id)
        self._refs: dict[int, tuple[int, int]] = {}
        self._redactor = Redactor(self._refs)
        self._left_out: list[str] = []

    def write(self) -> Redacted:
        """All of it. `run.json` comes last, since a directory without it is no run."""
        beginning(self._source.path)  # for its error, where the run can't be told from anywhere
        first = first_event(self._source.path)
        limit = durable_seq(self._disk, self._source, self._info.log_id)
        self._disk.makedirs(self._new.log)
        payloads = self._write_payloads()
        last, segments = self._write_segments(first, limit)
        snapshots = self._write_snapshots(last)
        self._write_snapshots(last, WAYPOINT)
        HeadWriter(self._disk, self._new.head, Watermark(last, True, 0), self._seed).close()
        Path(self._new.log, schema_name()).write_bytes(schema_json())
        done = Redacted(self._new.path, first, last, segments, snapshots, payloads, (), self._redactor.replaced(), "")
        Path(self._new.path, MARKER).write_bytes(_about(done))
        write_run_info(self._disk, self._new, self._info)
        self._tell_others()
        return attrs.evolve(done, left_out=tuple(self._left_out), phases=self._compared(last))

    # Payloads ----------------------------------------------------------------------------------------

    def _write_payloads(self) -> int:
        self._disk.makedirs(self._new.payloads)
        writer = PayloadWriter(self._disk, self._new, self._info.log_id, file_bytes=PAYLOAD_FILE_BYTES, sync=False)
        count = damaged = 0
        try:
            gathered: list[tuple[int, bytes]] = []
            for key, data in self._payloads():
                new = None if data is None else redacted_payload(self._redactor, data)
                if new is None:
                    damaged += 1
                    continue
                self._refs[key] = len(new), zlib.crc32(new)
                gathered.append((key, new))
                count += 1
                if len(gathered) == PAYLOADS_AT_ONCE:
                    writer.append(gathered, self._info.created_ns)
                    gathered = []
            if gathered:
                writer.append(gathered, self._info.created_ns)
        finally:
            writer.close()
        if damaged:
            self._left_out.append(f"{counted(damaged, 'payload')} that can't be read")
        return count

    def _payloads(self) -> Iterator[tuple[int, bytes | None]]:
        """The payloads that are there, by key; None for one of which no record is whole."""
        places: dict[int, list[Place]] = {}
        for file in list_payload_files(self._disk, self._source):
            try:
                scan = scan_file(self._disk, self._source, file, self._seed)
            except FileNotFoundError:
                continue  # freed in this moment by a writer that lives
            for place in scan.places:
                places.setdefault(place.key, []).append(place)
        for key in sorted(places):
            records = filter(None, map(self._record, reversed(places[key])))
            record = next(records, None)
            yield key, None if record is None else record[RECORD_HEADER_BYTES:]

    def _record(self, place: Place) -> bytes | None:
        try:
            fd = self._disk.open_to_read(payload_path(self._source, place.file))
        except FileNotFoundError:
            return None
        try:
            return read_record(self._disk, fd, place, self._seed)
        finally:
            self._disk.close(fd)

    # The log -----------------------------------------------------------------------------------------

    def _write_segments(self, first: int, limit: int | None) -> tuple[int, int]:
        """All events, in the commits and segments that they were in; gives the last one, and how many segments."""
        cursor = Cursor(self._disk, self._source, self._info.log_id, first)
        event = self._redactor.event
        last = segments = 0
        segment: int | None = None
        file: IO[bytes] | None = None
        try:
            with reading(self._disk, self._source, first):
                for records in cursor.read(limit):
                    if file is None or cursor.segment != segment:
                        self._end_segment(segment, file)
                        segment = cursor.segment
                        file = self._begin_segment(records[0], segment or first)
                        segments += 1
                    new = [ev.Record(record.seq, record.at_ns, event(record.event)) for record in records]
                    body = join_items([encode_items(new)], len(new))
                    file.write(build_frame(body, len(new), new[0].seq, self._seed))
                    last = new[-1].seq
        finally:
            self._end_segment(segment, file)
        if not last:
            raise BadInput(f"{self._source.path} has no event yet: nothing to write")
        return last, segments

    def _begin_segment(self, record: ev.Record, segment: int) -> IO[bytes]:
        file = open(self._new.segment(segment), "wb")  # noqa: SIM115  # closed by _end_segment
        file.write(SegmentHeader(self._info.log_id, segment, record.at_ns, fingerprint()).encode())
        return file

    def _end_segment(self, segment: int | None, file: IO[bytes] | None) -> None:
        """Pack it if it is packed in the run."""
        if file is None or segment is None or file.closed:
            return
        file.close()
        if self._disk.exists(self._source.segment(segment)):
            return
        plain, packed = Path(self._new.segment(segment)), Path(archive_path(self._new, segment))
        packed.write_bytes(gzip.compress(plain.read_bytes(), LEVEL, mtime=0))
        plain.unlink()

    def _write_snapshots(self, last: int, shape: Shape = WHOLE) -> int:
        count = unreadable = 0
        for seq in list_snapshots(self._disk, self._source, shape):
            if seq > last:
                continue
            found = read_snapshot(self._disk, self._source, self._info.log_id, seq, shape)
            try:
                taken = None if found is None else decoded(found.parts())
            except (ValueError, msgspec.MsgspecError):
                taken = None
            if found is None or taken is None:
                unreadable += 1
                continue
            parts = encoded(self._redactor.capture(taken))
            write_snapshot(self._disk, self._new, self._info.log_id, found.info, parts, shape)
            count += 1
        if unreadable:
            kind = "snapshot" if shape is WHOLE else "waypoint"
            self._left_out.append(f"{counted(unreadable, kind)} that can't be read")
        return count

    # Behind it ---------------------------------------------------------------------------------------

    def _tell_others(self) -> None:
        """Files that aren't of the run, whatever they hold."""
        own = (self._source.log, self._source.payloads)
        sizes = self._disk.sizes(self._source.path)
        others = [path for path in sizes if not path.startswith(own) and path != self._source.marker]
        if others:
            self._left_out.append(f"{counted(len(others), 'other file')} in its directory")

    def _compared(self, last: int) -> str:
        digests = [phases_digest(place.path, last) for place in (self._source, self._new)]
        if digests[0] != digests[1]:
            raise LogError(
                f"in the copy of {self._source.path} groups come to be in other phases than in the run, which must "
                "not happen; nothing was written. Please report this with the version of groupstate"
            )
        return digests[0]


def _about(done: Redacted) -> bytes:
    fields = {
        "format": "groupstate-redacted",
        "groupstate": VERSION,
        "first_seq": done.first_seq,
        "last_seq": done.last_seq,
        "replaced": done.replaced,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


class _Phases(Listener):
    """A digest of how groups went from phase to phase; groups are told apart by the order of their submission."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def submitted(self, life: Life) -> None:
        self.digest.update(f"{life.number} {life.size} {life.submitted_seq} {life.phase}\n".encode())

    def phase_ended(self, life: Life, at_ns: int) -> None:
        self.digest.update(f"{life.number} {life.phase} {life.phase_seq}\n".encode())


def phases_digest(run: str | os.PathLike[str], last: int | None = None) -> str:
    """SHA-256 of the phase of every group after every event up to `last`: equal where two runs decided the same.

    Raises:
        CorruptLog, LostEvents, UnsupportedLog: the log can't be read. One that can't be replayed is told up to there.
    """
    base, start = beginning(run)
    told = _Phases()
    lives = Lives(told, base)
    try:
        for record in read_log(run, start, None if last is None else last + 1):
            lives.feed(record, record.at_ns)
    except (CorruptLog, LostEvents, UnsupportedLog):
        raise
    except LogError:
        told.digest.update(b"it can't be replayed any further\n")
    for life in lives.groups.values():
        told.digest.update(f"{life.number} {life.phase}\n".encode())
    return told.digest.hexdigest()
