"""A second reader follows the log while it is written."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import textwrap

import pytest

from groupstate.errors import CorruptLog, LostEvents, NotARun
from groupstate.log import follow as follow_module
from groupstate.log.file import FileLog
from groupstate.log.follow import follow
from groupstate.simulate.faults import FaultyDisk

from .scenes import FIRST_SEGMENT, RUN, GatedDisk, make, reached, reopen, seqs, weights


async def collect(reader, last_seq):
    found = []
    async with contextlib.aclosing(reader):
        async for records in reader:
            found += seqs(records)
            if found[-1] >= last_seq:
                return found


async def test_another_process_follows_a_living_writer_over_segments(tmp_path):
    log = FileLog.create(tmp_path / "run", segment_bytes=2000)
    follower = """
        import asyncio, sys
        from groupstate.log.follow import follow
        async def main():
            expected = 1
            async for records in follow(sys.argv[1]):
                for record in records:
                    assert record.seq == expected, record
                    expected += 1
                print(expected - 1, flush=True)
                if expected > 300:
                    return
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(follower), str(tmp_path / "run")]
    # Starting it takes a moment, which no other task misses.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        log.post(weights(1))
        await log.durable(1)
        first = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        assert int(first) == 1
        for seq in range(2, 301):
            log.post(weights(seq))
            await log.durable(seq)
        rest, _ = await asyncio.get_running_loop().run_in_executor(None, process.communicate)
    finally:
        process.kill()
        process.wait()

    assert int(rest.split()[-1]) == 300
    assert process.returncode == 0
    assert len(list((tmp_path / "run" / "log").glob("*.seg"))) > 3
    await log.aclose()


async def test_a_follower_sees_only_what_is_durable():
    disk = GatedDisk()
    log = make(disk, inline=False)
    log.post(weights(1))
    await log.durable(1)
    disk.stop_next_flush()
    log.post(weights(2))
    await reached(disk.at_gate)
    looks = itertools.count()
    seen = [seqs(records) async for records in follow(RUN, disk=disk, poll_s=0, stop_when=lambda: next(looks) > 5)]

    assert seen == [[1]]
    disk.gate.set()
    await log.durable(2)
    assert await collect(follow(RUN, disk=disk, poll_s=0), 2) == [1, 2]
    await log.aclose()


async def test_a_follower_waits_for_what_comes():
    disk = FaultyDisk()
    log = make(disk, segment_bytes=200)
    task = asyncio.ensure_future(collect(follow(RUN, 3, disk=disk, poll_s=0), 20))
    for seq in range(1, 21):
        log.post(weights(seq))
        for _ in range(seq % 3):
            await asyncio.sleep(0)

    assert await task == list(range(3, 21))
    await log.aclose()


async def test_a_follower_starts_in_the_middle_of_a_commit():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1, 5))

    assert await collect(follow(RUN, 4, disk=disk), 5) == [4, 5]
    await log.aclose()


async def test_a_follower_goes_on_with_the_next_writer():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    task = asyncio.ensure_future(collect(follow(RUN, disk=disk, poll_s=0), 2))
    await asyncio.sleep(0)
    await log.aclose()
    log = reopen(disk)
    log.post(weights(2))

    assert await task == [1, 2]
    await log.aclose()


async def test_a_follower_can_be_cancelled():
    disk = FaultyDisk()
    log = make(disk)
    task = asyncio.ensure_future(collect(follow(RUN, disk=disk), 1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await log.aclose()


async def test_only_a_run_can_be_followed(tmp_path):
    with pytest.raises(NotARun):
        await collect(follow(tmp_path), 1)


async def damaged_run():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    log.post(weights(2))
    await log.aclose()
    return disk, disk.read(FIRST_SEGMENT)


@pytest.mark.parametrize(("cut", "error"), [(1, CorruptLog), (67, LostEvents)])
async def test_what_stays_unreadable_is_damage(cut, error):
    disk, whole = await damaged_run()
    disk.replace(FIRST_SEGMENT, whole[: -(len(whole) - 64) // 2] if error is LostEvents else whole[:-cut])
    with pytest.raises(error):
        await collect(follow(RUN, disk=disk, poll_s=0), 2)


async def test_what_is_late_to_be_seen_is_waited_for_each_time_anew(monkeypatch):
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    one = disk.read(FIRST_SEGMENT)
    log.post(weights(2))
    two = disk.read(FIRST_SEGMENT)
    await log.aclose()
    # Three looks see too little of the first event, three of the second.
    views = iter([one[:-1], one[:-1], one, two[:-1], two[:-1], two])

    async def sleep(seconds):
        disk.replace(FIRST_SEGMENT, next(views))

    monkeypatch.setattr(follow_module, "LATE_POLLS_MAX", 5)
    monkeypatch.setattr(follow_module.anyio, "sleep", sleep)
    disk.replace(FIRST_SEGMENT, one[:-1])
    found = [seqs(records) async for records in follow(RUN, disk=disk, stop_when=lambda: True)]

    assert found == [[1], [2]]
