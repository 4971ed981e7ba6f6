"""Snapshots are written beside the writer: behind their events, without being waited for, and without harm to it."""

import asyncio
import random
import threading

import pytest

from groupstate.core.book import Book
from groupstate.log.keeper import Job, Keeper
from groupstate.log.snapshots import SnapshotInfo
from groupstate.simulate.faults import Fault, FaultyDisk

from .keeping import ID, PLACE, SMALL, go_on, names, snap, snapshots
from .scenes import RUN, close, make, reopen, seqs, weights


def job(seq: int, parts=((1, b"state"),)) -> Job:
    return Job(SnapshotInfo(seq, 0, 0, 1), parts, 0)


def keeper(disk: FaultyDisk, *, inline: bool = False) -> Keeper:
    disk.makedirs(PLACE.log)
    return Keeper(disk, PLACE, ID, "all", inline=inline, sync=True)


@pytest.mark.parametrize("inline", [True, False])
def test_a_snapshot_waits_until_its_events_are_durable(inline: bool) -> None:
    disk = FaultyDisk()
    keep, done = keeper(disk, inline=inline), threading.Event()
    keep.on_done = lambda seq, error: done.set()
    keep.advance(6)
    keep.take(job(7))
    assert not done.wait(0 if inline else 0.05)
    assert snapshots(disk) == []

    keep.advance(7)
    assert done.wait(5)
    assert snapshots(disk) == [7]
    keep.close()


def test_what_is_durable_never_becomes_less() -> None:
    disk = FaultyDisk()
    keep = keeper(disk, inline=True)
    keep.advance(9)
    keep.advance(3)
    keep.take(job(9))

    assert snapshots(disk) == [9]


def test_closing_finishes_what_may_be_written_and_drops_the_rest() -> None:
    disk = FaultyDisk()
    keep, gate = keeper(disk), threading.Event()

    def parts():
        assert gate.wait(5)
        yield 1, b"state"

    keep.advance(8)
    for number in (6, 7, 8, 9):
        keep.take(job(number, parts() if number == 6 else [(1, b"state")]))
    closing = threading.Thread(target=keep.close)
    closing.start()
    gate.set()
    closing.join(5)

    assert not closing.is_alive()
    assert snapshots(disk) == [6, 7, 8]


def test_a_failure_of_any_kind_is_told_and_the_next_one_is_written() -> None:
    disk = FaultyDisk()
    keep, errors = keeper(disk, inline=True), []
    keep.on_done = lambda seq, error: errors.append((seq, type(error)))

    def broken():
        raise ValueError("can't be encoded")
        yield 1, b""

    keep.advance(9)
    keep.take(job(7, broken()))
    keep.take(job(8))
    disk.fault = Fault(disk.operation_count + 1)
    keep.take(job(9))

    assert errors == [(7, ValueError), (8, type(None)), (9, OSError)]
    assert snapshots(disk) == [8]


async def test_a_commit_does_not_wait_for_a_snapshot() -> None:
    disk = FaultyDisk()
    log, gate = make(disk, inline=False), threading.Event()

    def parts():
        assert gate.wait(5)
        yield 1, b"state"

    go_on(log, Book(), 3)
    await log.durable(3)
    log.keep_snapshot(SnapshotInfo(3, 0, 0, 1), parts(), limit=0)
    log.post(weights(4))
    await log.durable(4)
    assert snapshots(disk) == []
    gate.set()
    await log.aclose()

    assert snapshots(disk) == [3]


@pytest.mark.parametrize("inline", [True, False])
async def test_a_snapshot_of_events_that_never_became_durable_is_not_written(inline: bool) -> None:
    disk = FaultyDisk()
    log, book = make(disk, inline=inline, segment_bytes=SMALL), Book()
    go_on(log, book, 4)
    await log.durable(4)
    disk.fault = Fault(disk.operation_count + 1, once=False)
    with pytest.raises(Exception, match="could not keep"):
        go_on(log, book, 1)
        await log.durable(5)
    snap(log, book)
    await close(log)

    assert [name for name in names(disk) if ".snap" in name] == []
    left = reopen(disk.copy())
    assert seqs(left.read()) == [1, 2, 3, 4]


@pytest.mark.parametrize("at", range(1, 60))
def test_a_crash_between_any_two_steps_is_harmless(at: int) -> None:
    """Snapshots, removals and packing with a fault at each operation, then a kill and several losses of power."""
    for keep in (1, "archive"):
        disk = FaultyDisk()
        log, book = make(disk, segment_bytes=SMALL, keep=keep), Book()
        go_on(log, book, 12)
        snap(log, book, limit=12)
        go_on(log, book, 12)
        snap(log, book, limit=24)
        go_on(log, book, 6)
        disk.fault = Fault(disk.operation_count + at, once=False)
        snap(log, book, limit=30)
        lost = [disk.crash(chance=random.Random(seed)) for seed in range(4)]
        for left in (disk.copy(), disk.crash(), *lost):
            again = reopen(left, keep=keep)
            assert again.last_seq == 30
            base, start = again.beginning()
            assert keep == 1 or base is None
            assert seqs(again.read(start)) == list(range(start, 31))
            assert again.snapshot.info.seq >= 24
            again_book = _replayed(base, again.read(start))
            assert again_book.digest() == book.digest()
            go_on(again, again_book, 3)
            snap(again, again_book, limit=33)
            asyncio.run(again.aclose())
            assert reopen(left).last_seq == 33
            assert not [name for name in names(left) if name.endswith(".tmp")]


def _replayed(base, records):
    book = Book() if base is None else base
    for record in records:
        book.apply(record)
    return book


def test_the_run_directory_is_told_by_its_snapshots_name() -> None:
    disk = FaultyDisk()
    log, book = make(disk), Book()
    go_on(log, book, 2)
    snap(log, book)

    assert disk.exists(f"{RUN}/log/{2:020d}.snap")
