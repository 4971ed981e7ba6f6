"""The bytes of a segment: a header, then one frame per commit. Pure functions over bytes.

Rule 1: a frame counts only where magic, length, checksum and number fit together. The checksum starts from
the log's id, so a run of zeros, a frame of another log and a frame in the wrong place are all bad.
Rule 2: a bad frame alone says nothing; whether a good one lies behind it decides between torn and damaged.
"""

import struct
import zlib
from collections.abc import Callable, Iterator

import attrs

from groupstate.errors import UnsupportedLog
from groupstate.log.upcasts import FORMAT, UPCASTS, Upcasts

SEGMENT_MAGIC = b"GSLOG1\0\0"
CODEC_MSGPACK = 1
COMPRESSION_NONE = 0
CHECKSUM_CRC32 = 1

_HEADER = struct.Struct("<8sHBBB3x16sQQQ4xI")
HEADER_BYTES = _HEADER.size
_HEADER_CHECKED_BYTES = HEADER_BYTES - 4

FRAME_MAGIC = b"\xf1GSL"
_FRAME = struct.Struct("<4sIIIQ")
FRAME_HEADER_BYTES = _FRAME.size
_CHECKED_FROM = 12
"""The checksum covers count, first seq and body, which lie in one piece behind it."""

WALKED_BYTES = 64 << 10
"""A stretch of frames that is sooner walked through than halved."""

FRAME_BYTES_MAX = 256 << 20
"""Largest frame, header included. More bytes than this behind the last good frame can't be one torn commit."""


@attrs.frozen
class SegmentHeader:
    """What a segment says about itself in its first 64 bytes."""

    log_id: bytes
    first_seq: int
    created_ns: int
    fingerprint: int
    form: int = FORMAT
    """The format of its events."""

    def encode(self) -> bytes:
        fields = (self.log_id, self.first_seq, self.created_ns, self.fingerprint)
        kinds = (self.form, CODEC_MSGPACK, COMPRESSION_NONE, CHECKSUM_CRC32)
        bare = _HEADER.pack(SEGMENT_MAGIC, *kinds, *fields, 0)[:_HEADER_CHECKED_BYTES]
        return bare + struct.pack("<I", zlib.crc32(bare))


def parse_header(data: bytes, path: str, upcasts: Upcasts = UPCASTS) -> SegmentHeader | None:
    """The header, or None where it is torn or damaged.

    Raises:
        UnsupportedLog: a whole header of a format that this version doesn't know.
    """
    if len(data) < HEADER_BYTES:
        return None
    magic, form, codec, compression, checksum, log_id, first_seq, created_ns, fingerprint, crc = _HEADER.unpack(
        data[:HEADER_BYTES]
    )
    if crc != zlib.crc32(data[:_HEADER_CHECKED_BYTES]):
        return None
    kinds = (magic, codec, compression, checksum)
    if kinds != (SEGMENT_MAGIC, CODEC_MSGPACK, COMPRESSION_NONE, CHECKSUM_CRC32) or not upcasts.reads(form):
        raise UnsupportedLog(
            f"{path} is of format {form}, codec {codec}, compression {compression}, checksum {checksum}; this version "
            f"of groupstate reads {upcasts.readable}, codec {CODEC_MSGPACK}, compression {COMPRESSION_NONE}, "
            f"checksum {CHECKSUM_CRC32}. Open it with the version that wrote it, or a later one"
        )
    return SegmentHeader(log_id, first_seq, created_ns, fingerprint, form)


def checksum_seed(log_id: bytes) -> int:
    """Where the checksums of a log start from."""
    return zlib.crc32(log_id)


def build_frame(body: bytes, count: int, first_seq: int, seed: int) -> bytes:
    assert count > 0
    checked = struct.pack("<IQ", count, first_seq) + body
    return FRAME_MAGIC + struct.pack("<II", len(body), zlib.crc32(checked, seed)) + checked


@attrs.frozen
class Frame:
    """A good frame: where it lies in the bytes it was found in, and what it holds."""

    start: int
    stop: int
    first_seq: int
    count: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def body_start(self) -> int:
        return self.start + FRAME_HEADER_BYTES


def frame_at(data: memoryview, start: int, seed: int) -> Frame | None:
    """The good frame at `start`, or None."""
    if len(data) - start < FRAME_HEADER_BYTES:
        return None
    magic, length, crc, count, first_seq = _FRAME.unpack_from(data, start)
    stop = start + FRAME_HEADER_BYTES + length
    if magic != FRAME_MAGIC or count == 0 or stop > len(data):
        return None
    if zlib.crc32(data[start + _CHECKED_FROM : stop], seed) != crc:
        return None
    return Frame(start, stop, first_seq, count)


def walk(data: memoryview, start: int, seed: int, next_seq: int) -> Iterator[Frame]:
    """Good frames one after the other, the first numbered `next_seq`; ends at the first place without one."""
    while (frame := frame_at(data, start, seed)) is not None and frame.first_seq == next_seq:
        yield frame
        start = frame.stop
        next_seq += frame.count


def walk_to_end(data: memoryview, start: int, seed: int, next_seq: int, known_seq: int) -> tuple[int, int, int, int]:
    """Like `walk`, for whoever wants no frame: where the last good one stops and its last number, and the same of the
    last one that ends at or before event `known_seq`. Without any, `start` and the number before."""
    known = start, next_seq - 1
    while len(data) - start >= FRAME_HEADER_BYTES:
        magic, length, crc, count, first_seq = _FRAME.unpack_from(data, start)
        stop = start + FRAME_HEADER_BYTES + length
        if magic != FRAME_MAGIC or first_seq != next_seq or count == 0 or stop > len(data):
            break
        if zlib.crc32(data[start + _CHECKED_FROM : stop], seed) != crc:
            break
        start = stop
        next_seq += count
        if next_seq <= known_seq + 1:
            known = start, next_seq - 1
    return start, next_seq - 1, *known


def last_frame(data: bytes, start: int, seed: int, early: Callable[[Frame], bool]) -> int:
    """Where the last good frame begins that is early, up to some frames before it; found by halving, so that most of
    the bytes aren't looked at. `start`, the place of a frame, where none is known to be early.

    Args:
        early: true of frames up to some place, and false of those behind it.
    """
    view = memoryview(data)
    stop = len(data)
    while stop - start > WALKED_BYTES:
        middle = (start + stop) // 2
        frame = _next_frame(data, view, middle, stop, seed)
        if frame is None or not early(frame):
            stop = middle
        else:
            start = frame.start
    return start


def _next_frame(data: bytes, view: memoryview, at: int, stop: int, seed: int) -> Frame | None:
    """The first good frame that begins at `at` or behind it, before `stop`."""
    while (at := data.find(FRAME_MAGIC, at, stop + len(FRAME_MAGIC) - 1)) >= 0:
        if (frame := frame_at(view, at, seed)) is not None:
            return frame
        at += 1
    return None


def find_frame_behind(data: memoryview, bad_at: int, seed: int) -> Frame | None:
    """A good frame anywhere at or behind a place where the next one should be and isn't.

    At the place itself as well: a good frame with a wrong number is no torn write either.
    """
    whole = bytes(data)
    return _next_frame(whole, data, bad_at, len(whole), seed)


def body_length(data: bytes, start: int) -> int:
    """How long the body of the frame at `start` says that it is; 0 where there is none."""
    if len(data) - start < FRAME_HEADER_BYTES or data[start : start + 4] != FRAME_MAGIC:
        return 0
    return int(_FRAME.unpack_from(data, start)[1])


def claimed_stop(data: memoryview, start: int) -> int | None:
    """Where the frame at `start` says that it ends, if it looks like a frame at all."""
    if len(data) - start < FRAME_HEADER_BYTES or data[start : start + 4] != FRAME_MAGIC:
        return None
    (length,) = struct.unpack_from("<I", data, start + 4)
    return start + FRAME_HEADER_BYTES + int(length)
