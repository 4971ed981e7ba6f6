"""Segments that are full, packed to a third of their size, and read as if they weren't.

Rule: the packed file is on the disk under its name before the plain one goes, so that there is one at any time.
"""

import gzip
import os
import zlib

from groupstate.errors import CorruptLog
from groupstate.log.disk import Disk, make_file, read_all, read_file
from groupstate.log.rundir import SEGMENT_SUFFIX, RunDir

ARCHIVE_SUFFIX = SEGMENT_SUFFIX + ".gz"
LEVEL = 6
GZIP = 16
"""Added to zlib's window bits: a gzip header is expected."""


def archive_path(run: RunDir, first_seq: int) -> str:
    return os.path.join(run.log, f"{first_seq:020d}{ARCHIVE_SUFFIX}")


def pack_segment(disk: Disk, run: RunDir, first_seq: int) -> None:
    """Replace a segment by its archive. Packed twice it is the same.

    Raises:
        OSError: it can't be; the segment is still there.
    """
    plain, packed = run.segment(first_seq), archive_path(run, first_seq)
    data = read_file(disk, plain)
    if _holds(disk, packed, data):
        # Of a try that failed, or whose process died: its name may not be on the disk yet.
        disk.fsync_dir(run.log)
    else:
        # Without a time in it, so that the same segment always makes the same file.
        make_file(disk, packed, gzip.compress(data, LEVEL, mtime=0))
    disk.unlink(plain)


def _holds(disk: Disk, packed: str, data: bytes) -> bool:
    """There is an archive, and these bytes can be had from it."""
    try:
        return disk.exists(packed) and gzip.decompress(read_file(disk, packed)) == data
    except (OSError, EOFError, zlib.error):
        return False


def read_beginning(disk: Disk, run: RunDir, first_seq: int, length: int) -> bytes:
    """The first bytes of a segment, packed or not, as many as there are up to `length`.

    Raises:
        FileNotFoundError: it is neither here nor in the archive.
        CorruptLog: its archive can't be unpacked.
    """
    try:
        fd = disk.open_to_read(run.segment(first_seq))
    except FileNotFoundError:
        packed = read_file(disk, archive_path(run, first_seq))
        try:
            return zlib.decompressobj(zlib.MAX_WBITS | GZIP).decompress(packed, length)
        except zlib.error as error:
            raise _damaged(run, first_seq, error) from error
    try:
        return read_all(disk, fd, length)
    finally:
        disk.close(fd)


def _damaged(run: RunDir, first_seq: int, error: Exception) -> CorruptLog:
    return CorruptLog(archive_path(run, first_seq), 0, first_seq, f"the archived segment can't be unpacked: {error}")


def read_segment(disk: Disk, run: RunDir, first_seq: int) -> bytes:
    """All bytes of a segment, packed or not.

    Raises:
        FileNotFoundError: it is neither here nor in the archive.
        CorruptLog: its archive can't be unpacked.
    """
    try:
        return read_file(disk, run.segment(first_seq))
    except FileNotFoundError:
        packed = read_file(disk, archive_path(run, first_seq))
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(run, first_seq, error) from error
