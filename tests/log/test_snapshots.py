"""Snapshot files: there whole or not at all, passed over where they can't be trusted, and never more than the log."""

import asyncio
import errno
import struct
import zlib

import pytest

from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.snapshot import capture, encoded
from groupstate.errors import CompactedLog, CorruptLog, LostEvents
from groupstate.log import recovery
from groupstate.log.frames import build_frame, checksum_seed, walk, walk_to_end
from groupstate.log.reading import beginning, read_book, read_log, snapshot_digests
from groupstate.log.segments import flush_segment_of
from groupstate.log.snapshots import (
    FORMAT,
    HEADER_BYTES,
    Snapshot,
    SnapshotInfo,
    encode_snapshot,
    newest_snapshot,
    read_info,
    read_snapshot,
    snapshot_path,
    write_snapshot,
)
from groupstate.simulate.faults import Fault, FaultyDisk

from .keeping import ID, PLACE, SMALL, book_of, go_on, names, plain, segments, snap, snapshots, told
from .scenes import RUN, close, make, reopen, seqs, weights

INFO = SnapshotInfo(7, 1234, 3, 2)
PARTS = [(1, b"state " * 50), (2, b""), (4, b"left")]
WHOLE = encode_snapshot(ID, INFO, PARTS)


def disk_with(data: bytes = WHOLE, seq: int = 7) -> FaultyDisk:
    disk = FaultyDisk()
    disk.makedirs(PLACE.log)
    disk.replace(snapshot_path(PLACE, seq), data)
    return disk


def closed(**options: object) -> FaultyDisk:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, **options)))
    return disk


def with_crc(header: bytes) -> bytes:
    bare = header[: HEADER_BYTES - 4]
    return bare + struct.pack("<I", zlib.crc32(bare))


def test_a_snapshot_is_read_as_it_was_written() -> None:
    disk = FaultyDisk()
    disk.makedirs(PLACE.log)
    write_snapshot(disk, PLACE, ID, INFO, PARTS)
    found = newest_snapshot(disk, PLACE, ID)

    assert disk.read(snapshot_path(PLACE, 7)) == WHOLE
    assert found is not None
    assert (found.info, list(found.parts())) == (INFO, PARTS)


def test_the_header_is_what_the_page_says() -> None:
    body = WHOLE[80:]
    fields = struct.unpack_from("<8sHB5x16sQQqIII", WHOLE)

    assert fields == (b"GSSNAP\0\0", 1, 1, ID, 7, 1234, 3, 2, len(body), zlib.crc32(body))
    assert WHOLE[68:76] == bytes(8)
    assert struct.unpack_from("<I", WHOLE, 76)[0] == zlib.crc32(WHOLE[:76])
    kind, length = struct.unpack_from("<BI", body)
    assert (kind, zlib.decompress(body[5 : 5 + length])) == PARTS[0]


@pytest.mark.parametrize("at", range(len(WHOLE)))
def test_no_flipped_bit_is_believed(at: int) -> None:
    data = bytearray(WHOLE)
    data[at] ^= 1 << at % 8

    assert read_snapshot(disk_with(bytes(data)), PLACE, ID, 7) is None


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_no_part_of_a_snapshot_is_believed(length: int) -> None:
    assert read_snapshot(disk_with(WHOLE[:length]), PLACE, ID, 7) is None


def test_a_snapshot_of_another_log_under_another_name_or_of_a_later_format_is_passed_over() -> None:
    later = with_crc(WHOLE[:8] + struct.pack("<H", FORMAT + 1) + WHOLE[10:HEADER_BYTES])

    assert read_info(WHOLE, ID, 7) == INFO
    assert read_info(WHOLE, bytes(16), 7) is None
    assert read_info(WHOLE, ID, 8) is None
    assert read_info(later + WHOLE[HEADER_BYTES:], ID, 7) is None
    assert read_snapshot(disk_with(), PLACE, ID, 8) is None


def test_parts_that_cannot_be_unpacked_are_named_by_their_place() -> None:
    with pytest.raises(ValueError, match="the part at byte 0 can't be read"):
        list(Snapshot(INFO, struct.pack("<BI", 1, 4) + b"none").parts())
    with pytest.raises(ValueError, match="the part at byte 0 can't be read"):
        list(Snapshot(INFO, b"\1").parts())


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("torn_bytes", [0, 40, 100])
def test_a_snapshot_is_there_whole_or_not_at_all(at: int, torn_bytes: int) -> None:
    disk = FaultyDisk(Fault(at, torn_bytes=torn_bytes))
    disk.makedirs(PLACE.log)
    with pytest.raises(OSError, match="planned"):
        write_snapshot(disk, PLACE, ID, INFO, PARTS)

    for left in (disk.copy(), disk.crash(torn_bytes=50), disk.crash()):
        found = newest_snapshot(left, PLACE, ID)
        assert found is None or list(found.parts()) == PARTS
    assert not disk.exists(f"{snapshot_path(PLACE, 7)}.tmp")


def test_what_cannot_be_removed_after_a_failure_is_removed_by_the_next_opening() -> None:
    disk = closed()
    disk.fault = Fault(disk.operation_count + 2, once=False)
    with pytest.raises(OSError, match="planned"):
        write_snapshot(disk, PLACE, ID, SnapshotInfo(30, 0, 0, 1), PARTS)
    left = disk.copy()

    assert f"{30:020d}.snap.tmp" in names(left)
    asyncio.run(close(reopen(left)))
    assert not [name for name in names(left) if name.endswith(".tmp")]
    assert snapshots(left) == [10, 20]


# Opening ---------------------------------------------------------------------------------------------


def test_opening_takes_the_newest_good_one() -> None:
    disk = closed()
    assert reopen(disk.copy()).snapshot.info.seq == 20

    disk.replace(snapshot_path(PLACE, 20), disk.read(snapshot_path(PLACE, 20))[:-1])
    log = reopen(disk)
    assert (log.snapshot.info.seq, log.snapshot_seq, log.last_seq) == (10, 10, 30)
    assert log.snapshot_before(10) is None

    disk = closed()
    assert reopen(disk).snapshot_before(20).info.seq == 10


def test_opening_reads_nothing_before_the_snapshots_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = closed()
    read = []
    whole = recovery.read_segment
    monkeypatch.setattr(recovery, "read_segment", lambda d, r, first: read.append(first) or whole(d, r, first))
    disk.replace(PLACE.segment(1), b"nobody looks here")
    log = reopen(disk)

    assert log.last_seq == 30
    assert read == [first for first in segments(disk) if first >= max(s for s in segments(disk) if s <= 20)]
    assert seqs(log.read(21)) == list(range(21, 31))


@pytest.mark.parametrize("known_seq", range(0, 14))
def test_walking_to_the_end_is_walking_all_frames(known_seq: int) -> None:
    seed, counts = checksum_seed(ID), (3, 1, 2, 4)
    firsts = [1, 4, 5, 7]
    frames = [build_frame(b"body" * n, n, first, seed) for n, first in zip(counts, firsts, strict=True)]
    for data in (
        b"".join(frames),
        b"".join([*frames, build_frame(b"", 1, 12, seed)]),  # one that is numbered wrong
        b"".join(frames)[:-1],
        b"".join([*frames, b"zero" * 9]),
        b"",
    ):
        view = memoryview(data)
        walked = list(walk(view, 0, seed, 1))
        before = [frame for frame in walked if frame.last_seq <= known_seq]
        end, known = [(f[-1].stop, f[-1].last_seq) if f else (0, 0) for f in (walked, before)]
        assert walk_to_end(view, 0, seed, 1, known_seq) == (*end, *known)


def test_without_a_snapshot_all_is_read_and_damage_found() -> None:
    disk = closed(at=())
    disk.replace(PLACE.segment(1), b"x" + disk.read(PLACE.segment(1))[1:])

    with pytest.raises(CorruptLog):
        reopen(disk)


@pytest.mark.parametrize("inline", [True, False])
async def test_a_power_loss_with_durability_os_leaves_a_log_that_holds_its_snapshots(inline: bool) -> None:
    disk = FaultyDisk()
    log = told(disk, durability="os", inline=inline, keep=1, limit=20, at=(10, 20))
    await log.durable(30)
    await log.aclose()
    left = disk.crash()
    again = _after_restart(left)

    assert again.last_seq >= 20
    assert again.snapshot.info.seq == 20
    await again.aclose()


def _after_restart(disk: FaultyDisk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupstate.log.file.boot_id", lambda: "another start")
        return reopen(disk, durability="os")


def shortened(disk: FaultyDisk, last: int) -> FaultyDisk:
    """The same without the segments behind an event."""
    for first in segments(disk):
        if first > last:
            disk.remove(PLACE.segment(first))
    return disk


def test_snapshots_ahead_of_a_log_that_lost_its_tail_go_where_that_may_be() -> None:
    disk = shortened(closed(durability="os"), 11)
    with pytest.raises(LostEvents):
        reopen(disk, durability="os")
    assert snapshots(disk) == [10, 20]

    log = _after_restart(disk)
    assert log.snapshot.info.seq == 10
    assert (snapshots(disk), log.last_seq < 20) == ([10], True)
    assert book_of(log).last_seq == log.last_seq


def test_all_snapshots_may_be_ahead() -> None:
    disk = shortened(closed(durability="os"), 4)

    log = _after_restart(disk)
    assert (log.snapshot, snapshots(disk)) == (None, [])
    assert seqs(log.read()) == list(range(1, log.last_seq + 1))


def test_a_snapshot_whose_events_are_nowhere_else_is_never_dropped() -> None:
    disk = closed(durability="os", keep=1, limit=20)
    first = segments(disk)[0]
    assert first > 1
    shortened(disk, first)
    for seq in snapshots(disk):
        if seq < 20:
            disk.remove(snapshot_path(PLACE, seq))
    before = names(disk)

    with pytest.raises(LostEvents):
        _after_restart(disk)
    assert names(disk) == before


def test_a_flushed_log_that_ends_before_its_snapshot_has_lost_events() -> None:
    disk = shortened(closed(), 11)
    disk.remove(f"{RUN}/log/head")

    with pytest.raises(LostEvents, match="20"):
        reopen(disk)


def test_without_any_segment_a_snapshot_alone_is_no_log() -> None:
    disk = closed(keep=1, limit=20)
    for first in segments(disk):
        disk.remove(PLACE.segment(first))

    with pytest.raises(LostEvents):
        reopen(disk)


# Readers ---------------------------------------------------------------------------------------------


def test_the_book_of_the_nearest_snapshot() -> None:
    disk = closed()
    records = list(read_log(RUN, disk=disk))

    assert read_book(RUN, 9, disk=disk) is None
    assert read_book(RUN, 19, disk=disk).digest() == replayed(records[:10]).digest()
    assert read_book(RUN, disk=disk).digest() == replayed(records[:20]).digest()
    assert snapshot_digests(RUN, disk=disk) == {seq: replayed(records[:seq]).digest() for seq in (10, 20)}


def test_a_snapshot_that_holds_no_book_is_passed_over() -> None:
    disk = closed()
    disk.replace(snapshot_path(PLACE, 20), encode_snapshot(ID, SnapshotInfo(20, 0, 0, 1), [(9, b"")]))

    assert read_book(RUN, disk=disk).last_seq == 10
    assert list(snapshot_digests(RUN, disk=disk)) == [10]


def test_where_a_compacted_log_begins() -> None:
    disk = closed(keep=1, limit=20)
    first = segments(disk)[0]
    book, start = beginning(RUN, disk=disk)

    assert 1 < first <= 11
    assert (book.last_seq, start) == (10, 11)
    assert beginning(RUN, disk=closed()) == (None, 1)
    with pytest.raises(CompactedLog, match=f"Start at event {first}"):
        list(read_log(RUN, disk=disk))
    assert seqs(read_log(RUN, first, disk=disk)) == list(range(first, 31))


def test_a_beginning_is_never_before_the_first_event() -> None:
    disk = closed(events=40, at=(10, 20, 30), keep=1, limit=30)
    first = segments(disk)[0]
    disk.replace(snapshot_path(PLACE, 3), b"old")
    disk.replace(snapshot_path(PLACE, first - 2), encode_snapshot(ID, SnapshotInfo(first - 2, 0, 0, 1), _parts(first)))
    for seq in (20, 30):
        disk.replace(snapshot_path(PLACE, seq), disk.read(snapshot_path(PLACE, seq))[:-1])

    with pytest.raises(CorruptLog, match="no snapshot of them can be read"):
        beginning(RUN, disk=disk)


def _parts(first: int) -> list[tuple[int, bytes]]:
    return list(encoded(capture(replayed(weights(1, first - 2)))))


def test_a_missing_beginning_without_a_snapshot_is_damage() -> None:
    disk = closed(at=())
    disk.remove(PLACE.segment(1))

    with pytest.raises(CorruptLog, match="a segment before it is missing"):
        list(read_log(RUN, disk=disk))
    with pytest.raises(CorruptLog, match="a segment before it is missing"):
        reopen(disk)


def test_the_segment_of_an_event_is_flushed() -> None:
    disk = closed()
    disk.operations.clear()
    flush_segment_of(disk, PLACE, 12)

    (flushed,) = [words for words in disk.operations if words.startswith("flush")]
    assert flushed == f"flush {max(s for s in plain(disk) if s <= 12):020d}.seg"


def test_a_full_disk_costs_the_snapshot_and_not_the_log() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL), Book()
    told_of = []
    log.on_snapshot = lambda seq, error: told_of.append((seq, getattr(error, "errno", None)))
    assert log.on_snapshot is not None
    go_on(log, book, 10)
    disk.fault = Fault(disk.operation_count + 2, errno=errno.ENOSPC)
    snap(log, book)
    go_on(log, book, 10)
    snap(log, book)

    assert told_of == [(10, errno.ENOSPC), (20, None)]
    assert snapshots(disk) == [20]
    assert seqs(log.read()) == list(range(1, 21))
