"""The bytes of a payload file: a header, then one record per payload. Finding them again, and adding more.

Rule 1: a payload's key is never given twice, also when its file is long gone: every file's header names a key
above all those of older files, and the newest file is never removed.
Rule 2: a damaged file costs the payloads that are damaged, not the run: the search goes on behind the damage.
Rule 3: a record is the same bytes wherever it lies, so a file may hold copies of records of older ones.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs

from groupstate.errors import UnsupportedLog
from groupstate.log.disk import Disk, make_file, read_all, write_all
from groupstate.log.rundir import RunDir

PAYLOAD_SUFFIX = ".pay"
PAYLOAD_FILE_BYTES = 64 << 20
"""About where a file ends and the next one begins; only a file with a single payload is longer. Small enough that
freed groups soon free whole files."""

FILE_MAGIC = b"GSPAY1\0\0"
FORMAT = 1
_FILE_HEADER = struct.Struct("<8sH6x16sI4xQQ4xI")
FILE_HEADER_BYTES = _FILE_HEADER.size
_CHECKED_BYTES = FILE_HEADER_BYTES - 4

RECORD_MAGIC = b"\xf1GSP"
_RECORD = struct.Struct("<4sQIII")
_BARE_RECORD = struct.Struct("<4sQII")
_CHECK = struct.Struct("<I")
RECORD_HEADER_BYTES = _RECORD.size

_SEARCH_BYTES = 1 << 20


class Place(NamedTuple):
    """Where the record of a payload begins, and what its header says."""

    file: int
    offset: int
    key: int
    length: int
    crc: int

    @property
    def size(self) -> int:
        """Of the record, its header included."""
        return RECORD_HEADER_BYTES + self.length

    @property
    def stop(self) -> int:
        return self.offset + RECORD_HEADER_BYTES + self.length


def encode_record(key: int, data: bytes, seed: int) -> bytes:
    bare = _BARE_RECORD.pack(RECORD_MAGIC, key, len(data), zlib.crc32(data))
    return bare + _CHECK.pack(zlib.crc32(bare, seed)) + data


def parse_record_header(data: bytes, file: int, offset: int, seed: int) -> Place | None:
    """The record that begins with `data`, or None where none does."""
    if len(data) < RECORD_HEADER_BYTES:
        return None
    magic, key, length, crc, check = _RECORD.unpack(data[:RECORD_HEADER_BYTES])
    if magic != RECORD_MAGIC or check != zlib.crc32(data[: RECORD_HEADER_BYTES - 4], seed):
        return None
    return Place(file, offset, key, length, crc)


def payload_path(run: RunDir, file: int) -> str:
    return os.path.join(run.payloads, f"{file:010d}{PAYLOAD_SUFFIX}")


def list_payload_files(disk: Disk, run: RunDir) -> list[int]:
    """Numbers of the payload files, in order."""
    try:
        names = disk.listdir(run.payloads)
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(PAYLOAD_SUFFIX) for name in names if name.endswith(PAYLOAD_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def encode_file_header(log_id: bytes, file: int, first_key: int, created_ns: int) -> bytes:
    bare = _FILE_HEADER.pack(FILE_MAGIC, FORMAT, log_id, file, first_key, created_ns, 0)[:_CHECKED_BYTES]
    return bare + struct.pack("<I", zlib.crc32(bare))


@attrs.frozen
class FileHeader:
    log_id: bytes
    first_key: int


def parse_file_header(data: bytes, path: str) -> FileHeader | None:
    """The header that a file begins with, or None where it is damaged.

    Raises:
        UnsupportedLog: a whole header of a format that this version doesn't know.
    """
    if len(data) < FILE_HEADER_BYTES:
        return None
    magic, form, log_id, _, first_key, _, crc = _FILE_HEADER.unpack(data)
    if crc != zlib.crc32(data[:_CHECKED_BYTES]):
        return None
    if (magic, form) != (FILE_MAGIC, FORMAT):
        raise UnsupportedLog(
            f"{path} is a payload file of format {form}; this version of groupstate reads format {FORMAT}. "
            "Open the run with the version that wrote it, or a later one"
        )
    return FileHeader(log_id, first_key)


@attrs.frozen
class Scan:
    """What a payload file holds."""

    header: FileHeader | None
    """None where it is damaged."""
    places: list[Place]
    stop: int
    """End of the last whole record; what lies behind it is torn."""
    size: int

    @property
    def next_key(self) -> int:
        """Above the keys of the file, and of older ones."""
        first_key = 1 if self.header is None else self.header.first_key
        return max(first_key, 1 + max((place.key for place in self.places), default=0))


def scan_file(disk: Disk, run: RunDir, file: int, seed: int) -> Scan:
    """Find the payloads by their headers; their bytes are checked when they are asked for."""
    path = payload_path(run, file)
    fd = disk.open_to_read(path)
    try:
        size = disk.size(fd)
        header = parse_file_header(disk.pread(fd, FILE_HEADER_BYTES, 0), path)
        places = list(_places(disk, fd, file, size, seed))
    finally:
        disk.close(fd)
    stop = places[-1].stop if places else min(size, FILE_HEADER_BYTES)
    return Scan(header, places, stop, size)


def _places(disk: Disk, fd: int, file: int, size: int, seed: int) -> Iterator[Place]:
    offset = FILE_HEADER_BYTES
    while offset < size:
        place = parse_record_header(disk.pread(fd, RECORD_HEADER_BYTES, offset), file, offset, seed)
        if place is None or place.stop > size:
            place = _search(disk, fd, file, offset + 1, size, seed)
        if place is None:
            return
        yield place
        offset = place.stop


def _search(disk: Disk, fd: int, file: int, offset: int, size: int, seed: int) -> Place | None:
    """The first whole record at or behind `offset`."""
    while offset < size:
        # A header's length of overlap, so that none is missed between two reads.
        data = read_all(disk, fd, _SEARCH_BYTES + RECORD_HEADER_BYTES, offset)
        at = data.find(RECORD_MAGIC)
        while at >= 0:
            place = parse_record_header(data[at : at + RECORD_HEADER_BYTES], file, offset + at, seed)
            if place is not None and place.stop <= size:
                return place
            at = data.find(RECORD_MAGIC, at + 1)
        offset += _SEARCH_BYTES
    return None


def read_record(disk: Disk, fd: int, place: Place, seed: int) -> bytes | None:
    """The record at `place`, header and payload, or None where it isn't there whole."""
    record = read_all(disk, fd, place.size, place.offset)
    if parse_record_header(record, place.file, place.offset, seed) != place:
        return None
    return record if zlib.crc32(record[RECORD_HEADER_BYTES:]) == place.crc else None


def _place_of(record: bytes, file: int, offset: int) -> Place:
    """The place of a record that was made or read whole a moment ago."""
    _, key, length, crc, _ = _RECORD.unpack_from(record)
    return Place(file, offset, key, length, crc)


class PayloadWriter:
    """Appends records to the newest file and starts the next one. Used by one thread at a time."""

    def __init__(self, disk: Disk, run: RunDir, log_id: bytes, *, file_bytes: int, sync: bool) -> None:
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._seed = zlib.crc32(log_id)
        self._sync = sync
        self._fd = -1
        self._stop = 0
        self._next_key = 1
        """Above all keys that were written."""
        self.file_bytes = file_bytes
        self.file = 0
        """Number of the newest file; 0 while there is none."""

    def go_on_behind(self, file: int, scan: Scan, next_key: int) -> None:
        """Append to the newest file, and cut an interrupted write from its end."""
        self.file = file
        self._next_key = next_key
        if scan.header is None or scan.header.log_id != self._log_id:
            return  # not a file to go on with, so the next payload starts one of its own
        self._fd = self._disk.open(payload_path(self._run, file))
        self._stop = scan.stop
        if scan.size > scan.stop:
            self._disk.truncate(self._fd, scan.stop)

    def append(self, puts: Sequence[tuple[int, bytes]], now_ns: int) -> list[Place]:
        """Payloads by key, on the disk when this returns."""
        return self.append_records([encode_record(key, body, self._seed) for key, body in puts], now_ns)

    def append_records(self, records: Sequence[bytes], now_ns: int) -> list[Place]:
        """Whole records, new or copied from older files, on the disk when this returns."""
        places: list[Place] = []
        while len(places) < len(records):
            rest = records[len(places) :] if places else records
            if self._fd < 0 or (self._stop > FILE_HEADER_BYTES and self._stop + len(rest[0]) > self.file_bytes):
                self._start_file(max(self._next_key, _place_of(rest[0], 0, 0).key), now_ns)
            places += self._append(self._fitting(rest))
        return places

    def _fitting(self, records: Sequence[bytes]) -> Sequence[bytes]:
        """As many of the records as the newest file takes, but at least one."""
        stop = self._stop + len(records[0])
        for count, record in enumerate(records[1:], 1):
            stop += len(record)
            if stop > self.file_bytes:
                return records[:count]
        return records

    def _append(self, records: Sequence[bytes]) -> list[Place]:
        try:
            write_all(self._disk, self._fd, b"".join(records), self._stop)
            if self._sync:
                self._disk.fdatasync(self._fd)
        except BaseException:
            self._cut_back()
            raise
        places = []
        for record in records:
            place = _place_of(record, self.file, self._stop)
            places.append(place)
            self._stop += len(record)
            if place.key >= self._next_key:
                self._next_key = place.key + 1
        return places

    def flush(self) -> None:
        """Put on the disk what durability `os` leaves in its cache. Older files than the newest are there already."""
        if self._fd >= 0 and not self._sync:
            self._disk.fdatasync(self._fd)

    def _start_file(self, first_key: int, now_ns: int) -> None:
        file = self.file + 1
        path = payload_path(self._run, file)
        # So that opening the store needs to flush no other file than the newest.
        self.flush()
        make_file(self._disk, path, encode_file_header(self._log_id, file, first_key, now_ns))
        fd = self._disk.open(path)
        self.close()
        self._fd = fd
        self._stop = FILE_HEADER_BYTES
        self.file = file

    def _cut_back(self) -> None:
        try:
            self._disk.truncate(self._fd, self._stop)
        except OSError:
            pass  # the next opening cuts it

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1
