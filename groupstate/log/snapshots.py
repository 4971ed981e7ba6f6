"""Snapshot files beside the segments: the book after an event, so that opening a run costs what is live.

A **waypoint** is a smaller one, without what only going on with the run needs. Readers go on from it, to look at any
event of a long log; opening a run never asks for one.

Rule 1: a snapshot is written behind the events that it holds, under a temporary name, and is there whole or not at all.
Rule 2: it is never needed but where the events before it were removed: one that is damaged is passed over.
Rule 3: it says nothing that the events don't; who doubts it replays them.
"""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator

import attrs

from groupstate.log.disk import Disk, make_file, read_all, read_file
from groupstate.log.rundir import RunDir

SNAPSHOT_SUFFIX = ".snap"
WAYPOINT_SUFFIX = ".way"
FORMAT = 1
ZLIB = 1
_HEADER = struct.Struct("<8sHB5x16sQQqIII")
HEADER_BYTES = 80
_CHECKED_BYTES = HEADER_BYTES - 4
_PART = struct.Struct("<BI")

Parts = Iterable[tuple[int, bytes]]
"""(kind, bytes) of each part of a state."""


@attrs.frozen
class Shape:
    """How files of a kind are told apart."""

    suffix: str
    magic: bytes


WHOLE = Shape(SNAPSHOT_SUFFIX, b"GSSNAP\0\0")
WAYPOINT = Shape(WAYPOINT_SUFFIX, b"GSWAYP\0\0")


@attrs.frozen
class SnapshotInfo:
    """What is known of a snapshot without its state."""

    seq: int
    """The last event that it holds."""
    at_ns: int
    """When that event was recorded."""
    weight_version: int
    lineage: int


def snapshot_path(run: RunDir, seq: int, shape: Shape = WHOLE) -> str:
    return os.path.join(run.log, f"{seq:020d}{shape.suffix}")


def list_snapshots(disk: Disk, run: RunDir, shape: Shape = WHOLE) -> list[int]:
    """Seqs of the snapshots, in order."""
    return snapshots_among(disk.listdir(run.log), shape)


def snapshots_among(names: Iterable[str], shape: Shape = WHOLE) -> list[int]:
    """Seqs of the snapshots that names of files tell of, in order."""
    stems = (name.removesuffix(shape.suffix) for name in names if name.endswith(shape.suffix))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def is_leftover(name: str) -> bool:
    """A snapshot whose making was interrupted."""
    return name.endswith((SNAPSHOT_SUFFIX + ".tmp", WAYPOINT_SUFFIX + ".tmp"))


def encode_snapshot(log_id: bytes, info: SnapshotInfo, parts: Parts, shape: Shape = WHOLE) -> bytes:
    """A snapshot file. Each part is packed by itself, so no step of it takes long."""
    packed = []
    for kind, data in parts:
        small = zlib.compress(data, 1)
        packed += [_PART.pack(kind, len(small)), small]
    body = b"".join(packed)
    fields = (shape.magic, FORMAT, ZLIB, log_id, info.seq, info.at_ns, info.weight_version, info.lineage)
    bare = _HEADER.pack(*fields, len(body), zlib.crc32(body)).ljust(_CHECKED_BYTES, b"\0")
    return bare + struct.pack("<I", zlib.crc32(bare)) + body


def write_snapshot(
    disk: Disk, run: RunDir, log_id: bytes, info: SnapshotInfo, parts: Parts, shape: Shape = WHOLE
) -> None:
    """Put a snapshot on the disk.

    Raises:
        OSError: it can't be; nothing that was there has changed.
    """
    path = snapshot_path(run, info.seq, shape)
    try:
        make_file(disk, path, encode_snapshot(log_id, info, parts, shape))
    except OSError:
        remove_quietly(disk, f"{path}.tmp")
        raise


def remove_quietly(disk: Disk, path: str) -> None:
    """Remove a file that nobody needs, if that is possible."""
    try:
        disk.unlink(path)
    except OSError:
        pass  # it is in nobody's way, and goes when the run is opened again


@attrs.frozen
class Snapshot:
    """A whole snapshot."""

    info: SnapshotInfo
    body: bytes

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """
        Raises:
            ValueError: it isn't made of parts.
        """
        offset = 0
        while offset < len(self.body):
            try:
                kind, length = _PART.unpack_from(self.body, offset)
                data = zlib.decompress(self.body[offset + _PART.size : offset + _PART.size + length])
            except (struct.error, zlib.error) as error:
                raise ValueError(f"the part at byte {offset} can't be read: {error}") from error
            yield kind, data
            offset += _PART.size + length


def read_info(data: bytes, log_id: bytes, seq: int, shape: Shape = WHOLE) -> SnapshotInfo | None:
    """What a snapshot's header says; None where it isn't one of this log, or damaged, or of a later format."""
    if _whole_header(data, log_id, seq, shape) != FORMAT:
        return None
    packing, _, _, at_ns, version, lineage, _, _ = _HEADER.unpack_from(data)[2:]
    if packing != ZLIB:
        return None
    return SnapshotInfo(seq, at_ns, version, lineage)


def later_format(disk: Disk, run: RunDir, log_id: bytes, least_seq: int) -> str:
    """That there is a snapshot of a later format after event `least_seq` or a later one, as text; empty where not."""
    for seq in reversed(list_snapshots(disk, run)):
        path = snapshot_path(run, seq)
        data = read_file(disk, path)[:HEADER_BYTES]
        form = _whole_header(data, log_id, seq)
        if seq >= least_seq and form is not None and form > FORMAT:
            return f"{path} is a snapshot of format {form}; this version of groupstate reads format {FORMAT}"
    return ""


def _whole_header(data: bytes, log_id: bytes, seq: int, shape: Shape = WHOLE) -> int | None:
    """The format that a snapshot's header names; None where it isn't one of this log, or damaged."""
    if len(data) < HEADER_BYTES:
        return None
    (crc,) = struct.unpack_from("<I", data, _CHECKED_BYTES)
    if crc != zlib.crc32(data[:_CHECKED_BYTES]):
        return None
    magic, form, _, owner, last, *_ = _HEADER.unpack_from(data)
    return form if (magic, owner, last) == (shape.magic, log_id, seq) else None


def read_snapshot(disk: Disk, run: RunDir, log_id: bytes, seq: int, shape: Shape = WHOLE) -> Snapshot | None:
    """The snapshot after an event; None where there is none that can be trusted."""
    try:
        data = read_file(disk, snapshot_path(run, seq, shape))
    except OSError:
        return None
    info = read_info(data, log_id, seq, shape)
    if info is None:
        return None
    body = data[HEADER_BYTES:]
    length, crc = _HEADER.unpack_from(data)[-2:]
    return Snapshot(info, body) if (len(body), zlib.crc32(body)) == (length, crc) else None


def newest_snapshot(disk: Disk, run: RunDir, log_id: bytes, *, upto: int | None = None) -> Snapshot | None:
    """The last good snapshot that holds no event behind `upto`."""
    for seq in reversed(list_snapshots(disk, run)):
        if upto is None or seq <= upto:
            found = read_snapshot(disk, run, log_id, seq)
            if found is not None:
                return found
    return None


def read_header(disk: Disk, run: RunDir, log_id: bytes, seq: int, shape: Shape) -> SnapshotInfo | None:
    """What the header alone says; None where there is no snapshot, or none that can be trusted."""
    try:
        fd = disk.open_to_read(snapshot_path(run, seq, shape))
    except OSError:
        return None
    try:
        return read_info(read_all(disk, fd, HEADER_BYTES), log_id, seq, shape)
    finally:
        disk.close(fd)
