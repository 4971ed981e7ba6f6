"""Waypoints: written behind their events, never needed, gone with the events that they hold."""

import asyncio
import random

import pytest

from groupstate.core.book import Book
from groupstate.core.snapshot import capture_live, encoded
from groupstate.log.keeper import Job, Keeper
from groupstate.log.reading import waypoint_digests
from groupstate.log.retention import retire
from groupstate.log.snapshots import WAYPOINT, SnapshotInfo, list_snapshots, read_header, snapshot_path
from groupstate.simulate.faults import Fault, FaultyDisk

from .keeping import ID, PLACE, SMALL, go_on, names, snap, told
from .scenes import RUN, close, make, reopen, seqs


def waypoints(disk: FaultyDisk) -> list[int]:
    return list_snapshots(disk, PLACE, WAYPOINT)


def way(log, book: Book) -> None:
    info = SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)
    log.keep_waypoint(info, list(encoded(capture_live(book))))


def test_nothing_is_let_go_of_behind_a_waypoint_and_only_a_failure_is_told() -> None:
    disk, done = FaultyDisk(), []
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    log.on_snapshot = lambda seq, error: done.append((seq, type(error)))
    go_on(log, book, 30)
    for seq in (10, 20):
        log.keep_snapshot(SnapshotInfo(seq, 0, 0, 1), [(1, b"state")], limit=0)
    way(log, book)
    disk.fault = Fault(disk.operation_count + 1)
    way(log, book)

    assert waypoints(disk) == [30]
    assert done == [(10, type(None)), (20, type(None)), (30, OSError)]
    assert seqs(log.read()) == list(range(1, 31))


def test_a_waypoint_waits_until_its_events_are_durable() -> None:
    disk = FaultyDisk()
    disk.makedirs(PLACE.log)
    keeper = Keeper(disk, PLACE, ID, "all", inline=True, sync=False)
    keeper.take(Job(SnapshotInfo(7, 0, 0, 1), [(1, b"state")], 0, shape=WAYPOINT))
    keeper.advance(6)
    assert waypoints(disk) == []

    keeper.advance(7)
    assert waypoints(disk) == [7]


@pytest.mark.parametrize("keep", ["all", "archive"])
def test_all_stay_where_all_events_stay(keep) -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=keep), Book()
    for _ in range(5):
        go_on(log, book, 10)
        way(log, book)
        snap(log, book, limit=book.last_seq)
    retire(disk, PLACE, ID, keep, 50, spacing=40)

    assert waypoints(disk) == [10, 20, 30, 40, 50]


def test_those_that_no_event_follows_any_more_go_with_the_events() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    for _ in range(50):
        go_on(log, book, 1)
        way(log, book)
        if book.last_seq % 10 == 0:
            snap(log, book, limit=book.last_seq)
    first = min(int(name[:20]) for name in names(disk) if name.endswith(".seg"))

    assert first > 20
    assert waypoints(disk) == list(range(first - 1, 51))


def test_an_opened_log_says_where_its_newest_one_is() -> None:
    disk = FaultyDisk()
    log, book = make(disk), Book()
    assert log.waypoint_seq == 0
    for _ in range(2):
        go_on(log, book, 4)
        way(log, book)
    asyncio.run(close(log))

    assert reopen(disk).waypoint_seq == 8


def test_one_that_went_since_it_was_listed_has_no_header() -> None:
    disk = FaultyDisk()
    log, book = make(disk), Book()
    go_on(log, book, 4)
    way(log, book)
    asyncio.run(close(log))
    found = read_header(disk, PLACE, ID, 4, WAYPOINT)
    disk.unlink(snapshot_path(PLACE, 4, WAYPOINT))

    assert found is not None
    assert found.seq == 4
    assert read_header(disk, PLACE, ID, 4, WAYPOINT) is None


def test_only_those_that_can_be_read_have_a_digest() -> None:
    disk = FaultyDisk()
    log, book = make(disk), Book()
    for _ in range(3):
        go_on(log, book, 4)
        way(log, book)
    log.keep_waypoint(SnapshotInfo(12, 0, 0, 1), [(1, b"no state")])
    disk.replace(snapshot_path(PLACE, 4, WAYPOINT), b"nothing")

    assert list(waypoint_digests(RUN, disk=disk)) == [8]


def test_one_ahead_of_a_log_that_lost_its_tail_goes() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, at=(), events=10, durability="os")))
    for seq in (10, 11, 12):
        disk.replace(snapshot_path(PLACE, seq, WAYPOINT), b"of events that went with the machine")
    log = reopen(disk)

    assert waypoints(disk) == [10]
    assert log.waypoint_seq == 10


@pytest.mark.parametrize("at", range(1, 25))
def test_a_crash_between_any_two_steps_is_harmless(at: int) -> None:
    for keep in (1, "all"):
        disk = FaultyDisk()
        log, book = make(disk, segment_bytes=SMALL, keep=keep), Book()
        for _ in range(3):
            go_on(log, book, 10)
            way(log, book)
            snap(log, book, limit=book.last_seq)
        go_on(log, book, 5)
        disk.fault = Fault(disk.operation_count + at, once=False)
        way(log, book)
        snap(log, book, limit=35)
        for left in (disk.copy(), disk.crash(), *(disk.crash(chance=random.Random(seed)) for seed in range(4))):
            again = reopen(left, keep=keep)
            _, start = again.beginning()
            assert seqs(again.read(start)) == list(range(start, 36))
            assert not [name for name in names(left) if name.endswith(".tmp")]
            assert all(seq <= 35 for seq in waypoints(left))
