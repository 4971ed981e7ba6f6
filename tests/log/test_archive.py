"""Archived segments read as if they were plain."""

import asyncio
import gzip

import pytest

from groupstate.errors import CorruptLog
from groupstate.log.archive import archive_path, pack_segment, read_segment
from groupstate.log.follow import follow
from groupstate.log.reading import Cursor, read_log
from groupstate.log.repair import diagnose, repair
from groupstate.simulate.faults import Fault, FaultyDisk

from .keeping import ID, PLACE, book_of, go_on, names, plain, segments, snap, told
from .scenes import RUN, close, reopen, seqs


def archived(**options: object) -> FaultyDisk:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, keep="archive", limit=30, **options)))
    return disk


def test_full_segments_before_the_older_snapshot_are_packed() -> None:
    disk = archived()
    packed = [first for first in segments(disk) if first not in plain(disk)]
    following = dict(zip(segments(disk), segments(disk)[1:], strict=False))

    assert packed == [first for first in following if following[first] <= 11]
    assert len(packed) >= 2
    assert [name for name in names(disk) if name.endswith(".gz")] == [f"{first:020d}.seg.gz" for first in packed]


def test_an_archive_is_the_segment_and_smaller() -> None:
    disk = archived()
    before = FaultyDisk()
    asyncio.run(close(told(before)))
    (first, *_) = segments(disk)

    assert read_segment(disk, PLACE, first) == before.read(PLACE.segment(first))
    assert gzip.decompress(disk.read(archive_path(PLACE, first))) == before.read(PLACE.segment(first))


def test_everything_reads_as_before() -> None:
    disk = archived()
    everything = list(range(1, 31))

    assert seqs(read_log(RUN, disk=disk)) == everything
    assert seqs(read_log(RUN, 3, 9, disk=disk)) == everything[2:8]
    log = reopen(disk, keep="archive")
    assert seqs(log.read()) == everything
    assert log.beginning() == (None, 1)
    found = diagnose(RUN, disk=disk)
    assert (found.damage, found.last_seq, found.first_seq) == ("", 30, 1)
    repair(RUN, "/runs/new", 7, disk=disk)
    assert seqs(read_log("/runs/new", disk=disk)) == everything[:7]
    assert not [name for name in disk.listdir("/runs/new/log") if name.endswith(".gz")]


def test_a_run_without_its_snapshots_opens_from_its_archives() -> None:
    disk = archived()
    for name in names(disk):
        if name.endswith(".snap"):
            disk.remove(f"{PLACE.log}/{name}")

    assert seqs(reopen(disk).read()) == list(range(1, 31))


async def test_a_follower_goes_from_archives_into_what_is_written() -> None:
    disk = FaultyDisk()
    log = told(disk, keep="archive", limit=30)
    book, found = book_of(log), []
    async for records in follow(RUN, poll_s=0.001, stop_when=lambda: len(found) >= 60, disk=disk):
        found.extend(seqs(records))
        if len(found) == 5:
            go_on(log, book, 30)
            snap(log, book, limit=60)
            snap(log, book, limit=60)
    await close(log)

    assert found == list(range(1, 61))


def test_packing_in_the_middle_of_a_reading_does_not_disturb_it() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk)))
    found = []
    for record in read_log(RUN, disk=disk):
        found.append(record.seq)
        for first in plain(disk)[:-1]:
            pack_segment(disk, PLACE, first)

    assert found == list(range(1, 31))


def test_a_segment_that_grew_since_it_was_read_is_read_on_in_its_archive() -> None:
    disk = FaultyDisk()
    log = told(disk, events=12, at=())
    cursor = Cursor(disk, PLACE, ID, 1)
    assert len([record for records in cursor.read(10) for record in records]) == 10
    go_on(log, book_of(log), 10)
    for first in plain(disk)[:-1]:
        pack_segment(disk, PLACE, first)

    assert [record.seq for records in cursor.read(22) for record in records] == list(range(11, 23))


def test_both_there_is_one_segment_and_packing_again_ends_it() -> None:
    disk = archived()
    first = segments(disk)[0]
    disk.replace(PLACE.segment(first), read_segment(disk, PLACE, first))

    assert seqs(reopen(disk).read()) == list(range(1, 31))
    pack_segment(disk, PLACE, first)
    assert first not in plain(disk)
    assert seqs(read_log(RUN, disk=disk)) == list(range(1, 31))


@pytest.mark.parametrize("at", range(1, 7))
def test_there_is_one_of_the_two_at_any_time(at: int) -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk)))
    disk.fault = Fault(disk.operation_count + at, once=False)
    with pytest.raises(OSError, match="planned"):
        for first in plain(disk)[:-1]:
            pack_segment(disk, PLACE, first)

    for left in (disk.copy(), disk.crash(), disk.crash(torn_bytes=30)):
        log = reopen(left)
        assert seqs(log.read()) == list(range(1, 31))
        assert not [name for name in names(left) if name.endswith(".tmp")]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"no", lambda data: data[:30] + bytes(9)])
def test_a_damaged_archive_is_named(damage) -> None:
    disk = archived()
    path = archive_path(PLACE, segments(disk)[0])
    disk.replace(path, damage(disk.read(path)))

    with pytest.raises(CorruptLog, match=r"the archived segment can't be unpacked"):
        list(read_log(RUN, disk=disk))
    assert "can't be unpacked" in diagnose(RUN, disk=disk).damage


def test_nothing_is_written_to_an_archive() -> None:
    disk = archived()
    last_packed = max(first for first in segments(disk) if first not in plain(disk))
    for first in plain(disk):
        if first > last_packed:
            disk.remove(PLACE.segment(first))
    for name in names(disk):
        if name.endswith(".snap") or name == "head":
            disk.remove(f"{PLACE.log}/{name}")
    log = reopen(disk)
    stop = log.last_seq
    go_on(log, book_of(log), 2)

    assert plain(disk) == [stop + 1]
    assert seqs(log.read()) == list(range(1, stop + 3))


def test_a_segment_that_vanished_is_missing() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, at=())))
    found = []
    with pytest.raises(CorruptLog, match="missing"):
        for record in read_log(RUN, disk=disk):
            found.append(record.seq)
            if len(found) == 1:
                disk.remove(PLACE.segment(segments(disk)[1]))


async def test_listed_and_vanished_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    await close(told(disk, at=()))
    cursor = Cursor(disk, PLACE, ID, 1)
    list(cursor.read(2))
    disk.remove(PLACE.segment(1))
    disk.replace(f"{PLACE.log}/{0:020d}.seg", b"")

    with pytest.raises(CorruptLog, match="the segment is missing"):
        list(cursor.read(30))
