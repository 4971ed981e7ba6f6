"""Every operation of the log fails once, in every way, and what was acknowledged is still there."""

import asyncio
import errno
import random

import pytest

from groupstate.errors import LogError, LogFailed
from groupstate.simulate.faults import Fault, FaultyDisk

from .scenes import RUN, check_recovery, close, make, reopen, seqs, story_on, submitted, tell, weights


def count_operations() -> int:
    disk = FaultyDisk()
    assert story_on(disk).finished
    return disk.operation_count


OPERATION_COUNT = count_operations()
STEPS = range(1, OPERATION_COUNT + 1)


@pytest.mark.parametrize("torn_bytes", [0, 1, 20, 33, 70, 10_000])
@pytest.mark.parametrize("once", [True, False])
def test_a_killed_process_leaves_what_was_acknowledged_wherever_a_write_failed(once, torn_bytes):
    async def everything():
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=torn_bytes))
            story = await tell(disk)
            await check_recovery(disk.copy(), story)

    asyncio.run(everything())


@pytest.mark.parametrize("torn_bytes", [0, 1, 25, 60, 120, 10_000])
@pytest.mark.parametrize("once", [True, False])
def test_a_power_loss_leaves_what_was_acknowledged_wherever_a_write_failed(once, torn_bytes):
    async def everything():
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=30))
            story = await tell(disk)
            await check_recovery(disk.crash(torn_bytes=torn_bytes), story)

    asyncio.run(everything())


@pytest.mark.parametrize("seed", range(6))
def test_a_power_loss_that_keeps_sectors_in_any_order_leaves_what_was_acknowledged(seed):
    async def everything():
        chance = random.Random(seed)
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=False, torn_bytes=chance.choice([0, 10, 50])))
            story = await tell(disk)
            await check_recovery(disk.crash(chance=chance), story)

    asyncio.run(everything())


@pytest.mark.slow
def test_a_failure_while_recovering_can_be_recovered_from():
    async def everything():
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=False, torn_bytes=30))
            story = await tell(disk)
            for again in range(1, 30):
                left = disk.crash(torn_bytes=40)
                left.fault = Fault(again, once=False, torn_bytes=20)
                try:
                    await close(reopen(left))
                except LogError:
                    pass
                await check_recovery(left.crash(torn_bytes=15), story)
                if left.operation_count < again:
                    break

    asyncio.run(everything())


@pytest.mark.parametrize("chance", [None, random.Random(1)])
def test_what_a_next_process_adds_survives_a_power_loss_wherever_the_first_one_failed(chance):
    async def everything():
        for step in STEPS:
            # The same disk goes on, with all that was never flushed still in its cache.
            disk = FaultyDisk(Fault(step, torn_bytes=30))
            story = await tell(disk)
            disk.fault = None
            recovered_count = await check_recovery(disk, story)
            if story.acknowledged:
                log = reopen(disk.crash(chance=chance))
                assert log.last_seq == recovered_count + 1
                await log.aclose()

    asyncio.run(everything())


def test_a_story_without_a_fault_is_kept_whole():
    disk = FaultyDisk()
    story = story_on(disk)

    assert story.finished
    assert asyncio.run(check_recovery(disk.crash(), story)) == len(story.attempted)


def test_short_writes_are_gone_on_with():
    disk = FaultyDisk(write_bytes_max=7)
    story = story_on(disk)

    assert story.finished
    assert asyncio.run(check_recovery(disk.crash(), story)) == len(story.attempted)


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop():
    disk = FaultyDisk(write_bytes_max=0)
    with pytest.raises(LogError, match="the disk took 0 of"):
        make(disk)


def test_a_full_disk_loses_nothing_that_was_acknowledged():
    async def everything():
        full = 0
        for space_bytes in range(200, 4000, 37):
            disk = FaultyDisk(space_bytes=space_bytes)
            story = await tell(disk)
            full += not story.finished
            left = disk.copy()
            await check_recovery(left, story)
        assert full > 10

    asyncio.run(everything())


@pytest.mark.parametrize("inline", [True, False])
async def test_a_failed_flush_ends_the_log_and_tells_everybody(inline):
    disk = FaultyDisk()
    log = make(disk, inline=inline)
    log.post(weights(1))
    await log.durable(1)
    early = [asyncio.ensure_future(log.durable(3)) for _ in range(2)]
    await asyncio.sleep(0)
    disk.fault = Fault(disk.operation_count + 2)  # the frame is written, and its flush fails
    with pytest.raises(LogFailed, match=r"could not keep the events behind 1: .*planned: flush 0*1\.seg") as failed:
        log.post(weights(2))
        await log.durable(2)

    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.__cause__.errno == errno.EIO
    results = await asyncio.gather(*early, return_exceptions=True)
    assert [type(result) for result in results] == [LogFailed, LogFailed]
    assert (log.last_seq, log.durable_seq) == (2, 1)
    assert "failed" in repr(log)
    await log.durable(1)
    assert seqs(log.read(1, 2)) == [1]
    await log.aclose()


async def test_a_failed_log_refuses_posts_and_payloads_and_never_writes_again():
    disk = FaultyDisk()
    log = make(disk)
    disk.fault = Fault(disk.operation_count + 4)
    ref = log.payloads.put(b"x")
    with pytest.raises(LogFailed):
        log.post(weights(1))
    with pytest.raises(LogFailed):
        await log.durable(1)
    before = disk.operation_count
    with pytest.raises(LogFailed):
        log.post(weights(2))
    with pytest.raises(LogFailed):
        log.payloads.put(b"y")
    log.payloads.free([ref])

    assert disk.operation_count == before
    await log.aclose()


async def test_a_failed_flush_is_not_tried_again_and_its_events_are_cut_off():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    before = len(disk.read(f"{RUN}/log/{1:020d}.seg"))
    disk.fault = Fault(disk.operation_count + 2)
    with pytest.raises(LogFailed):
        log.post(weights(2))
    await close(log)

    assert len(disk.read(f"{RUN}/log/{1:020d}.seg")) == before
    assert [words for words in disk.operations[-4:] if "flush" in words] == [f"flush {1:020d}.seg"]


async def test_a_payload_that_could_not_be_written_is_cut_off():
    disk = FaultyDisk()
    log = make(disk)
    log.post([submitted(1, log.payloads.put(b"first"))])
    payloads = f"{RUN}/payloads/{1:010d}.pay"
    before = len(disk.read(payloads))
    disk.fault = Fault(disk.operation_count + 1, torn_bytes=9)
    with pytest.raises(LogFailed):
        log.post([submitted(2, log.payloads.put(b"second"))])
    await close(log)

    assert len(disk.read(payloads)) == before


async def test_a_log_that_failed_still_shows_what_was_posted():
    disk = FaultyDisk()
    log = make(disk, inline=False)
    log.post(weights(1))
    await log.durable(1)
    disk.fault = Fault(disk.operation_count + 2)
    log.post(weights(2))
    with pytest.raises(LogFailed):
        await log.durable(2)

    assert (log.last_seq, log.durable_seq) == (2, 1)
    assert list(log.read()) == weights(1, 2)
    await close(log)


async def test_a_log_that_writes_inside_of_post_tells_of_a_failure_there_and_only_there():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    disk.fault = Fault(disk.operation_count + 1, once=False)
    with pytest.raises(LogFailed, match="could not keep the events behind 1"):
        log.post(weights(2))
    await log.aclose()

    assert log.durable_seq == 1


async def test_what_was_kept_is_no_failure_though_the_tidying_behind_it_is(monkeypatch):
    def broken(now_ns):
        raise OSError(errno.EIO, "planned")

    log = make(FaultyDisk())
    monkeypatch.setattr(log.payloads, "rewrite", broken)
    log.post(weights(1))

    assert log.durable_seq == 1
    with pytest.raises(LogFailed, match="planned"):
        log.post(weights(2))
    await log.aclose()


async def test_closing_says_so_when_nobody_has_heard_of_lost_events():
    disk = FaultyDisk()
    log = make(disk, inline=False)
    disk.fault = Fault(disk.operation_count + 1, once=False)
    log.post(weights(1))
    with pytest.raises(LogFailed, match="could not keep the events behind 0"):
        await log.aclose()
    await log.aclose()


async def test_a_log_that_failed_can_be_opened_again_in_the_same_process():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    disk.fault = Fault(disk.operation_count + 1)
    with pytest.raises(LogFailed):
        log.post(weights(2))
    await close(log)
    again = reopen(disk)

    assert seqs(again.read()) == [1]
    await again.aclose()


async def test_the_space_of_a_file_that_cannot_be_removed_is_not_worth_a_run():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=10)
    refs = [log.payloads.put(b"x" * 20) for _ in range(1)]
    log.post(weights(1))
    refs.append(log.payloads.put(b"y" * 20))
    log.post(weights(2))
    disk.fault = Fault(disk.operation_count + 1)
    log.payloads.free(refs[:1])
    log.post(weights(3))

    assert log.durable_seq == 3
    await log.aclose()
