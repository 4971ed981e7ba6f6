"""Every operation fails while snapshots are taken and old events packed or removed, in every way."""

import asyncio
import gzip
import random

import pytest

from groupstate.errors import LogError
from groupstate.log.archive import archive_path, pack_segment, read_segment
from groupstate.log.disk import make_file
from groupstate.log.rundir import RunDir
from groupstate.simulate.faults import Fault, FaultyDisk

from .retiring import OPTIONS, check, told
from .scenes import close, reopen

KEEPS = ["archive", 1]


def whole(keep):
    disk = FaultyDisk()
    kept = asyncio.run(told(disk, keep))
    assert kept.finished
    assert kept.failures == []
    return disk


WHOLE = {keep: whole(keep) for keep in KEEPS}


def steps(keep, stride, offset=0):
    return range(1 + offset % stride, WHOLE[keep].operation_count + 1, stride)


def full(*values):
    """Besides the ordinary values those that take long."""
    return [*values[:1], *[pytest.param(value, marks=pytest.mark.crash) for value in values[1:]]]


@pytest.mark.parametrize("keep", KEEPS)
def test_the_story_takes_snapshots_and_packs_or_removes_segments(keep):
    operations = WHOLE[keep].operations

    assert sum(words.startswith("rename") and words.endswith(".snap") for words in operations) >= 4
    if keep == "archive":
        assert sum(words.startswith("rename") and words.endswith(".seg.gz") for words in operations) >= 3
    assert sum(words.startswith("unlink") and words.endswith(".seg") for words in operations) >= 3
    assert keep == "archive" or any(words.startswith("unlink") and words.endswith(".snap") for words in operations)


@pytest.mark.slow
@pytest.mark.parametrize("stride", full(17, 1))
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_killed_process_leaves_what_was_acknowledged_wherever_an_operation_failed(keep, once, stride):
    async def everything():
        for step in steps(keep, stride):
            for torn_bytes in (0, 40, 10_000):
                disk = FaultyDisk(Fault(step, once=once, torn_bytes=torn_bytes))
                kept = await told(disk, keep)
                await check(disk.copy(), kept)

    asyncio.run(everything())


@pytest.mark.slow
@pytest.mark.parametrize("stride", full(17, 1))
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_power_loss_leaves_what_was_acknowledged_wherever_an_operation_failed(keep, once, stride):
    async def everything():
        for step in steps(keep, stride, 1):
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=30))
            kept = await told(disk, keep)
            for torn_bytes in (0, 60, 10_000):
                await check(disk.crash(torn_bytes=torn_bytes), kept)

    asyncio.run(everything())


@pytest.mark.slow
@pytest.mark.parametrize("stride", full(11, 1))
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_power_loss_that_keeps_any_mix_leaves_what_was_acknowledged(keep, once, stride):
    async def everything():
        chance = random.Random(stride)
        for step in steps(keep, stride, 2):
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=chance.choice([0, 30, 10_000])))
            kept = await told(disk, keep)
            for _ in range(2 if stride > 1 else 4):
                await check(disk.crash(chance=chance), kept, chance=chance)

    asyncio.run(everything())


@pytest.mark.slow
@pytest.mark.parametrize("stride", full(83, 5))
@pytest.mark.parametrize("keep", KEEPS)
def test_a_failure_while_recovering_leaves_what_was_acknowledged(keep, stride):
    async def everything():
        chance = random.Random(stride)
        for step in steps(keep, stride, 3):
            disk = FaultyDisk(Fault(step, once=False, torn_bytes=30))
            kept = await told(disk, keep)
            for again in range(1, 40):
                left = disk.crash(torn_bytes=40)
                left.fault = Fault(again, once=False, torn_bytes=20)
                try:
                    await close(reopen(left, keep=keep, **OPTIONS))
                except LogError:
                    pass
                await check(left.crash(chance=chance), kept, chance=chance)
                if left.operation_count < again:
                    break

    asyncio.run(everything())


@pytest.mark.slow
@pytest.mark.parametrize("stride", full(7, 1))
@pytest.mark.parametrize("keep", KEEPS)
def test_what_a_next_process_adds_survives_wherever_the_first_one_failed(keep, stride):
    async def everything():
        chance = random.Random(5)
        for step in steps(keep, stride):
            # The same disk goes on, with all that was never flushed still in its cache.
            disk = FaultyDisk(Fault(step, torn_bytes=30))
            kept = await told(disk, keep)
            disk.fault = None
            await check(disk, kept, chance=chance)

    asyncio.run(everything())


@pytest.mark.parametrize("keep", KEEPS)
def test_a_snapshot_or_a_segment_that_cannot_be_let_go_of_never_stops_the_log(keep):
    async def everything():
        failed = 0
        for step, words in enumerate(WHOLE[keep].operations, 1):
            if ".snap" in words or ".gz" in words or (words.startswith("unlink") and words.endswith(".seg")):
                disk = FaultyDisk(Fault(step, torn_bytes=30))
                kept = await told(disk, keep)
                assert kept.finished, words
                assert kept.failures or words.startswith("unlink"), words
                failed += 1
        assert failed > 20

    asyncio.run(everything())


@pytest.mark.parametrize("keep", KEEPS)
def test_a_full_disk_loses_nothing_that_was_acknowledged(keep):
    async def everything():
        stopped = 0
        for space_bytes in range(400, 6000, 197):
            disk = FaultyDisk(space_bytes=space_bytes)
            kept = await told(disk, keep)
            stopped += not kept.finished
            await check(disk.copy(), kept)
        assert stopped > 10

    asyncio.run(everything())


def test_a_segment_whose_archive_had_no_lasting_name_is_not_removed_before_it_has():
    disk = FaultyDisk()
    run = RunDir.at("/runs/one")
    disk.makedirs(run.log)
    make_file(disk, run.segment(1), b"a segment")
    disk.fault = Fault(disk.operation_count + 5)  # the directory's flush, behind the rename
    with pytest.raises(OSError, match="planned: flush log/"):
        pack_segment(disk, run, 1)
    pack_segment(disk, run, 1)

    assert read_segment(disk.crash(), run, 1) == b"a segment"


@pytest.mark.parametrize(
    "damaged",
    [b"", b"no archive", gzip.compress(b"another segment", mtime=0)],
    ids=["empty", "no archive", "of another segment"],
)
def test_a_segment_is_packed_anew_where_its_archive_is_not_what_it_should_be(damaged):
    disk = FaultyDisk()
    run = RunDir.at("/runs/one")
    disk.makedirs(run.log)
    make_file(disk, run.segment(1), b"a segment")
    make_file(disk, archive_path(run, 1), damaged)
    pack_segment(disk, run, 1)

    assert not disk.exists(run.segment(1))
    assert read_segment(disk, run, 1) == b"a segment"
