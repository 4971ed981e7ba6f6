"""A log that is written by steps of the event loop: time passes between a post and its flush, without a thread."""

import asyncio

import pytest

from groupstate.core import events as ev
from groupstate.errors import BadInput, LogFailed
from groupstate.log import commit
from groupstate.log.file import FileLog
from groupstate.simulate.faults import Fault, FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.log.churn import FILE_BYTES, Churn, check_bound, free, put

RUN = "/runs/later"


def made(loop, disk=None, **options):
    disk = FaultyDisk() if disk is None else disk
    return FileLog.create(
        RUN, disk=disk, later=lambda step: loop.call_later(1.0, step), now_ns=loop.clock_ns, **options
    )


def post(log, count=1):
    first = log.last_seq + 1
    log.post([ev.Record(seq, seq, ev.WeightsPublished(seq)) for seq in range(first, first + count)])


def test_what_gathers_until_the_step_is_one_commit():
    async def main(loop):
        disk = FaultyDisk()
        log = made(loop, disk)
        before = disk.operation_count
        post(log)
        post(log, 2)
        assert (log.last_seq, log.durable_seq) == (3, 0)
        assert disk.operation_count == before

        await log.durable(3)

        assert loop.now_s == 1.0
        assert disk.operations[before:].count("flush 00000000000000000001.seg") == 1
        await log.aclose()

    run_virtual(main)


def test_what_a_crash_takes_is_what_was_not_written_yet():
    async def main(loop):
        disk = FaultyDisk()
        log = made(loop, disk)
        post(log)
        await log.durable(1)
        post(log)
        left = disk.crash()
        await log.aclose()

        again = FileLog.open(RUN, disk=left, inline=True)

        assert again.last_seq == 1
        await again.aclose()

    run_virtual(main)


def test_closing_keeps_what_is_queued_and_a_step_behind_it_does_nothing():
    async def main(loop):
        disk = FaultyDisk()
        log = made(loop, disk)
        post(log, 3)
        await log.aclose()
        after = disk.operation_count
        await asyncio.sleep(5)

        assert log.durable_seq == 3
        assert disk.operation_count == after
        assert FileLog.open(RUN, disk=disk.crash(), inline=True).last_seq == 3

    run_virtual(main)


def test_more_than_one_commit_takes_goes_on_in_a_step_of_its_own(monkeypatch):
    monkeypatch.setattr(commit, "COMMIT_BYTES_MAX", 1)

    async def main(loop):
        log = made(loop)
        post(log)
        post(log)

        await log.durable(1)
        assert (log.durable_seq, loop.now_s) == (1, 1.0)
        await log.durable(2)
        assert loop.now_s == 2.0
        await log.aclose()

    run_virtual(main)


def test_a_failing_step_tells_whoever_waits_and_the_next_who_posts():
    async def main(loop):
        disk = FaultyDisk()
        log = made(loop, disk)
        post(log)
        disk.fault = Fault(disk.operation_count + 1)

        with pytest.raises(LogFailed, match="could not keep the events behind 0"):
            await log.durable(1)
        with pytest.raises(LogFailed):
            post(log)
        await log.aclose()

    run_virtual(main)


def test_at_once_and_later_together_are_refused():
    with pytest.raises(BadInput, match="inline writes at once and later doesn't"):
        FileLog.create(RUN, disk=FaultyDisk(), inline=True, later=lambda step: None)


def test_payload_files_are_rewritten_in_steps_though_nothing_more_is_posted():
    async def main(loop):
        disk = FaultyDisk()
        log = made(loop, disk, payload_file_bytes=FILE_BYTES)
        churn = Churn()
        for number in range(40):
            put(log, churn, b"%d " % number * 20)
            await log.durable(log.last_seq)
        for kept in [kept for number, kept in enumerate(churn.payloads) if number % 4]:
            free(log, kept)
        await log.durable(log.last_seq)
        operations = disk.operation_count

        await asyncio.sleep(100)

        assert disk.operation_count > operations
        check_bound(log, disk)
        await log.aclose()

    run_virtual(main)
