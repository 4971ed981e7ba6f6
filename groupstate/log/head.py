"""The durable watermark: 64 bytes beside the segments that say how far the log has been acknowledged.

Rule 1: it is written after the flush that it reports, so it never runs ahead of the disk. A log that ends
below it has lost acknowledged events; without it that would look like a torn write.
Rule 2: it isn't flushed itself. An old watermark proves less and never anything wrong.

Two slots are written in turn, each with a checksum, so that a torn write spoils one and leaves the other.
"""

import struct
import zlib

import attrs

from groupstate.errors import CorruptLog
from groupstate.log.disk import Disk, make_file, read_file, write_all

_SLOT = struct.Struct("<4s4xQB3xIII")
_SLOT_MAGIC = b"GSHD"
SLOT_BYTES = _SLOT.size
HEAD_BYTES = 2 * SLOT_BYTES
_CHECKED_BYTES = SLOT_BYTES - 4


@attrs.frozen
class Watermark:
    durable_seq: int
    flushed: bool
    """False: `durability="os"`, the events were handed to the operating system and not flushed."""
    boot_crc: int
    """Which start of the machine wrote it: events that were only handed over are gone after another start."""


def _encode(durable_seq: int, flushed: bool, boot_crc: int, seed: int) -> bytes:
    bare = _SLOT.pack(_SLOT_MAGIC, durable_seq, flushed, boot_crc, seed, 0)[:_CHECKED_BYTES]
    return bare + struct.pack("<I", zlib.crc32(bare))


def _parse(slot: bytes, seed: int) -> Watermark | None:
    if len(slot) < SLOT_BYTES:
        return None
    magic, durable_seq, flushed, boot_crc, log_crc, crc = _SLOT.unpack(slot)
    if magic != _SLOT_MAGIC or log_crc != seed or crc != zlib.crc32(slot[:_CHECKED_BYTES]):
        return None
    return Watermark(durable_seq, bool(flushed), boot_crc)


def read_head(disk: Disk, path: str, seed: int) -> Watermark | None:
    """The watermark, or None where there is no such file.

    Raises:
        CorruptLog: the file is there and neither of its slots is whole.
    """
    try:
        data = read_file(disk, path)
    except FileNotFoundError:
        return None
    slots = (_parse(data[:SLOT_BYTES], seed), _parse(data[SLOT_BYTES:HEAD_BYTES], seed))
    marks = [mark for mark in slots if mark is not None]
    if not marks:
        advice = "If the segments beside it are whole, move it away: the log then opens without the check for losses"
        raise CorruptLog(path, 0, 0, "the durable watermark has no whole slot", advice)
    return max(marks, key=lambda mark: mark.durable_seq)


class HeadWriter:
    """The open watermark file of the one writer."""

    def __init__(self, disk: Disk, path: str, mark: Watermark, seed: int) -> None:
        self._disk = disk
        self._flushed = mark.flushed
        self._boot_crc = mark.boot_crc
        self._seed = seed
        self._slot = 0
        # Both slots at once: a higher number left in one of them would be believed.
        both = _encode(mark.durable_seq, mark.flushed, mark.boot_crc, seed) * 2
        if not disk.exists(path):
            make_file(disk, path, both)
        self._fd = disk.open(path)
        try:
            write_all(disk, self._fd, both, 0)
        except OSError:
            disk.close(self._fd)
            raise

    def write(self, durable_seq: int) -> None:
        slot = _encode(durable_seq, self._flushed, self._boot_crc, self._seed)
        write_all(self._disk, self._fd, slot, self._slot * SLOT_BYTES)
        self._slot = 1 - self._slot

    def close(self) -> None:
        self._disk.close(self._fd)
