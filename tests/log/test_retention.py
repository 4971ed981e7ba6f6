"""What is kept of a log: as much as its snapshots, its marks and its readers need, and nothing is torn out."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest

from groupstate.core.book import Book
from groupstate.core.held import MARKS_REMEMBERED
from groupstate.errors import BadSettings, CompactedLog, CorruptLog
from groupstate.log.file import FileLog
from groupstate.log.follow import follow
from groupstate.log.process import this_process
from groupstate.log.reading import Cursor, first_event, read_log
from groupstate.log.retention import READERS, checked_keep, claim, readers, reading, retire, superfluous
from groupstate.log.snapshots import snapshot_path
from groupstate.simulate.faults import Fault, FaultyDisk

from .keeping import ID, PLACE, SMALL, book_of, go_on, segments, snap, snapshots, told
from .scenes import RUN, close, make, reopen, seqs

CLAIMS = f"{PLACE.log}/{READERS}"


def claims(disk: FaultyDisk) -> list[str]:
    return disk.listdir(CLAIMS)


def segment_of(disk: FaultyDisk, seq: int) -> int:
    return max(first for first in segments(disk) if first <= seq)


@pytest.mark.parametrize("keep", ["all", "archive", 1, MARKS_REMEMBERED])
def test_what_may_be_kept(keep) -> None:
    assert checked_keep(keep) == keep


@pytest.mark.parametrize("keep", ["some", 0, -1, True, 1.5, None, MARKS_REMEMBERED + 1])
def test_what_may_not(keep) -> None:
    with pytest.raises(BadSettings, match="keep_log is"):
        checked_keep(keep)


# What goes -------------------------------------------------------------------------------------------


def test_nothing_goes_before_there_are_two_snapshots() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 30)
    snap(log, book, limit=30)
    assert segments(disk)[0] == 1

    go_on(log, book, 30)
    snap(log, book, limit=60)
    assert segments(disk)[0] == segment_of(disk, 31) > 1


@pytest.mark.parametrize("bad", [b"", b"damaged"])
def test_a_snapshot_that_is_no_good_does_not_count(bad: bytes) -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 20)
    snap(log, book)
    disk.replace(snapshot_path(PLACE, 20), bad)
    for count in (20, 20):
        assert segments(disk)[0] == 1
        go_on(log, book, count)
        snap(log, book, limit=book.last_seq)

    assert segments(disk)[0] == segment_of(disk, 41)
    assert snapshots(disk) == [40, 60]


@pytest.mark.parametrize("keep", ["all", "archive"])
def test_all_stays_where_all_is_kept(keep) -> None:
    disk = FaultyDisk()
    log = told(disk, events=60, at=(10, 20, 30, 40), keep=keep, limit=60)

    assert seqs(log.read()) == list(range(1, 61))
    assert snapshots(disk) == [10, 20, 30, 40]


def test_archives_wait_for_two_snapshots_as_well() -> None:
    disk = FaultyDisk()
    told(disk, at=(20,), keep="archive", limit=30)

    assert not [name for name in disk.listdir(PLACE.log) if name.endswith(".gz")]


@pytest.mark.parametrize("limit", range(0, 31))
def test_no_event_behind_the_limit_or_the_older_snapshot_goes(limit: int) -> None:
    disk = FaultyDisk()
    log = told(disk, events=40, at=(20, 30), keep=2, limit=limit)
    first = segments(disk)[0]

    assert first <= min(limit, 20) + 1
    following = segments(disk)[1]
    assert following > min(limit, 20) + 1
    assert seqs(log.read(first)) == list(range(first, 41))


def test_snapshots_before_the_first_event_go_but_for_the_two_newest() -> None:
    disk = FaultyDisk()
    told(disk, events=60, at=(10, 20, 30, 40, 50), keep=1, limit=60)

    assert snapshots(disk) == [40, 50]


def test_snapshots_that_the_beginning_needs_stay() -> None:
    disk = FaultyDisk()
    log = told(disk, events=60, at=(10, 20, 30, 40, 50), keep=1, limit=15)

    first = segments(disk)[0]
    assert first <= 16
    assert snapshots(disk) == [20, 30, 40, 50]
    assert log.beginning()[1] == 21


def test_all_snapshots_since_the_first_event_stay() -> None:
    disk = FaultyDisk()
    log = told(disk, events=50, at=(10, 20, 30, 40), keep=1)
    snap(log, book_of(log), limit=15)

    assert 11 < segments(disk)[0] <= 16
    assert snapshots(disk) == [20, 30, 40, 50]


def test_archives_go_like_other_segments() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=60, at=(20, 30), keep="archive", limit=60)))
    packed = [name for name in disk.listdir(PLACE.log) if name.endswith(".gz")]
    assert packed
    log = reopen(disk, keep=1)
    book = book_of(log)
    snap(log, book, limit=60)

    assert not [name for name in disk.listdir(PLACE.log) if name.endswith(".gz")]
    assert segments(disk)[0] == segment_of(disk, 31)


def test_what_was_done_is_told() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=40, at=(10, 20, 30))))
    packed = retire(disk, PLACE, ID, "archive", 40)
    removed = retire(disk, PLACE, ID, 1, 40)

    assert packed.packed == removed.removed
    assert packed.packed[0] == 1
    assert removed.snapshots == (10,)
    assert retire(disk, PLACE, ID, 1, 40).removed == ()
    assert retire(disk, PLACE, ID, "all", 40) == attrs.evolve(removed, removed=(), snapshots=())


# Old snapshots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [25_000, 250_000, 400_000])
def test_the_number_of_snapshots_grows_by_the_logarithm_of_the_events(every: int) -> None:
    kept: list[int] = []
    counts = []
    for seq in range(every, 100_000_001, every):
        kept.append(seq)
        kept = sorted({*kept} - {*superfluous(kept, 250_000)})
        counts.append(len(kept))
        if seq % 10_000_000 == 0:
            gaps = zip([0, *kept], kept, strict=False)
            assert all(b - a <= max(250_000, every, (kept[-1] - b) // 8) for a, b in gaps)
            assert kept[-1] - kept[-2] == every

    assert max(counts) <= 60
    assert counts[len(counts) // 2] <= 50


def test_snapshots_that_lie_far_enough_apart_all_stay() -> None:
    assert superfluous([30, 60, 90], 20) == ()
    assert superfluous([30, 60], 100) == ()
    assert superfluous([], 100) == ()


@pytest.mark.parametrize("keep", ["all", "archive"])
def test_where_all_events_stay_old_snapshots_go_that_save_little(keep) -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=60, at=(10, 15, 20, 25, 30, 50))))

    assert retire(disk, PLACE, ID, keep, 0).snapshots == ()
    assert retire(disk, PLACE, ID, keep, 0, spacing=12).snapshots == (15, 25)
    assert snapshots(disk) == [10, 20, 30, 50]


def test_where_the_beginning_is_gone_no_snapshot_goes() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=60, at=(10, 20, 30, 40, 50), limit=30, keep=1)))
    before = snapshots(disk)

    assert segments(disk)[0] > 1
    assert retire(disk, PLACE, ID, "all", 0, spacing=1_000).snapshots == ()
    assert snapshots(disk) == before


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_after_a_crash_has_no_gap(at: int, seed: int) -> None:

    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=60, at=(20, 40))))
    disk.fault = Fault(disk.operation_count + at, once=False)
    try:
        retire(disk, PLACE, ID, 1, 60)
    except OSError:
        pass
    left = disk.crash(chance=random.Random(seed))
    first = segments(left)[0]

    # The watermark may be behind after a loss of power, and readers with it, until the log is opened.
    assert seqs(reopen(left).read(first)) == list(range(first, 61))


# Readers ---------------------------------------------------------------------------------------------


def test_a_claim_holds_back_what_its_reader_needs_and_goes_with_him() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 40)
    snap(log, book)
    with reading(disk, PLACE, 12) as path:
        assert readers(disk, PLACE) == [12]
        assert [os.path.basename(path)] == claims(disk)
        snap_at(log, book)
        assert segments(disk)[0] == segment_of(disk, 12)
        claim(disk, path, 30)
        snap_at(log, book)
        assert segments(disk)[0] == segment_of(disk, 30)
    assert claims(disk) == []
    snap_at(log, book)
    assert segments(disk)[0] > 40


def snap_at(log: FileLog, book: Book) -> None:
    go_on(log, book, 10)
    snap(log, book, limit=book.last_seq)


def test_a_run_that_removes_nothing_has_no_claims_and_is_left_alone() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk)))
    before = disk.operation_count
    list(read_log(RUN, disk=disk))

    assert disk.operation_count == before
    assert readers(disk, PLACE) == []


def test_where_no_claim_can_be_made_a_reader_reads_without() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, keep=1)))
    disk.fault = Fault(disk.operation_count + 1, once=False)

    assert seqs(read_log(RUN, disk=disk)) == list(range(1, 31))


@pytest.mark.parametrize("how", ["read_log", "FileLog.read"])
def test_a_reader_is_not_disturbed_by_the_writer(how: str) -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 40)
    found = []
    for record in read_log(RUN, disk=disk) if how == "read_log" else log.read():
        found.append(record.seq)
        if record.seq in (2, 15, 30):
            snap_at(log, book)

    assert found == list(range(1, 41))
    assert claims(disk) == []
    snap_at(log, book)
    assert segments(disk)[0] > 1


def test_a_reading_that_is_given_up_takes_its_claim_along() -> None:
    disk = FaultyDisk()
    log = told(disk, keep=1)
    started = log.read()
    next(started)
    assert len(claims(disk)) == 1

    del started
    assert claims(disk) == []


async def test_a_follower_is_not_disturbed_and_lets_go_of_what_it_has_read() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 20)
    found, firsts = [], []
    async for records in follow(RUN, poll_s=0.001, stop_when=lambda: len(found) >= 120, disk=disk):
        found.extend(seqs(records))
        if len(found) % 10 == 0 and log.last_seq < 120:
            snap_at(log, book)
            firsts.append(segments(disk)[0])

    assert found == list(range(1, log.last_seq + 1))
    assert firsts[-1] > 60
    assert claims(disk) == []


async def test_a_follower_that_cannot_move_its_claim_keeps_the_old_one() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 20)
    found, held = [], []
    original = disk.rename

    def full(source: str, target: str) -> None:
        if READERS in target and found:
            raise OSError("full")
        original(source, target)

    disk.rename = full  # type: ignore[method-assign]
    async for records in follow(RUN, poll_s=0.001, stop_when=lambda: len(found) >= 60, disk=disk):
        found.extend(seqs(records))
        if log.last_seq < 60:
            snap_at(log, book)
            held.append(readers(disk, PLACE))

    assert found == list(range(1, log.last_seq + 1))
    assert all(1 in starts for starts in held)
    assert segments(disk)[0] == 1


def test_claims_of_dead_processes_are_removed_and_others_count() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, keep=1)))
    me = this_process()
    dead = attrs.evolve(me, started="long ago")
    for name, holder in (("dead", dead), ("here", me), ("there", attrs.evolve(dead, host="elsewhere"))):
        disk.replace(f"{CLAIMS}/{name}.json", json.dumps({"first_seq": 5, **attrs.asdict(holder)}).encode())
    disk.replace(f"{CLAIMS}/beginning.json.tmp", b'{"first_')
    disk.replace(f"{CLAIMS}/odd.json", b"[]")

    assert readers(disk, PLACE) == [5, 5]
    assert "dead.json" not in claims(disk)
    assert {"here.json", "there.json"} < set(claims(disk))


FOLLOWER = """
    import asyncio, sys
    from groupstate.log.follow import follow
    async def main():
        expected = 1
        async for records in follow(sys.argv[1], poll_s=0.001):
            for record in records:
                assert record.seq == expected, record
                expected += 1
            print(expected - 1, flush=True)
            if expected > 400:
                return
    asyncio.run(main())
"""


def following(run: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FOLLOWER), str(run)], stdout=subprocess.PIPE, text=True
    )


def test_a_follower_in_another_process_is_not_disturbed(tmp_path: Path) -> None:
    log, book = FileLog.create(tmp_path / "run", segment_bytes=SMALL, keep=1, inline=True, durability="os"), Book()
    go_on(log, book, 10)
    process = following(tmp_path / "run")
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        while log.last_seq < 400:
            snap_at(log, book)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
        asyncio.run(log.aclose())

    assert first_event(tmp_path / "run") > 1


def test_a_follower_that_was_killed_holds_nothing_back(tmp_path: Path) -> None:
    log, book = FileLog.create(tmp_path / "run", segment_bytes=SMALL, keep=1, inline=True, durability="os"), Book()
    go_on(log, book, 10)
    process = following(tmp_path / "run")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = tmp_path / "run" / "log" / READERS
    assert list(folder.glob("*.json"))
    for _ in range(4):
        snap_at(log, book)
    asyncio.run(log.aclose())

    assert list(folder.glob("*.json")) == []
    assert first_event(tmp_path / "run") > 10


def test_a_segment_in_the_middle_that_vanishes_under_a_reader_is_damage() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=30)))
    cursor = Cursor(disk, PLACE, ID, 1)
    assert sum(map(len, cursor.read(None))) == 30

    disk.remove(PLACE.segment(segments(disk)[-1]))
    with pytest.raises(CorruptLog, match="the segment is missing"):
        list(cursor.read(None))


def test_a_segment_that_was_let_go_of_in_the_middle_of_a_reading_is_told_with_the_first_event() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, events=30)))
    _, middle, following = segments(disk)[:3]
    assert following - middle > 1
    cursor = Cursor(disk, PLACE, ID, 1)
    assert sum(map(len, cursor.read(middle))) == middle

    for first in segments(disk)[:2]:
        disk.remove(PLACE.segment(first))
    with pytest.raises(CompactedLog) as caught:
        list(cursor.read(None))

    assert caught.value.first_seq == following


def test_what_was_removed_under_a_reader_without_a_claim_is_told_with_the_first_event() -> None:
    disk = FaultyDisk()
    log, book = make(disk, segment_bytes=SMALL, keep=1), Book()
    go_on(log, book, 40)
    snap(log, book)
    reader = read_log(RUN, disk=disk)
    next(reader)
    for name in claims(disk):
        disk.remove(f"{CLAIMS}/{name}")
    snap_at(log, book)
    snap_at(log, book)
    with pytest.raises(CompactedLog) as caught:
        list(reader)

    assert caught.value.first_seq == segments(disk)[0]
    assert f"Start at event {segments(disk)[0]}" in str(caught.value)
