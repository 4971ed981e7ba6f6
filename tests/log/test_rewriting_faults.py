"""Every operation fails while payload files are rewritten, in every way, and what is needed is still there."""

import asyncio
import random

import pytest

from groupstate.errors import LogError
from groupstate.simulate.faults import Fault, FaultyDisk

from .churn import FILE_BYTES, check_payloads, churned
from .scenes import close, reopen

pytestmark = pytest.mark.slow


def told(**options):
    disk = FaultyDisk()
    churn = asyncio.run(churned(disk, **options))
    assert churn.finished
    return disk, churn


DISK, WHOLE = told()
STEPS = range(1, DISK.operation_count + 1)
PAYLOAD_STEPS = [step for step, words in enumerate(DISK.operations, 1) if ".pay" in words]


def test_the_story_has_files_that_are_rewritten():
    gone = [words for words in DISK.operations if words.startswith("unlink") and words.endswith(".pay")]
    first_of_two = {kept.ref.key for kept in WHOLE.needed(WHOLE.acknowledged)}

    assert len(gone) >= 3
    # The first payload was needed all the time, and the file that it was put in is gone.
    assert {1, 5} <= first_of_two
    assert not DISK.exists("/runs/one/payloads/0000000001.pay")


@pytest.mark.parametrize("torn_bytes", [0, 70, 10_000])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_killed_process_leaves_what_is_needed_wherever_a_write_failed(durability, once, torn_bytes):
    async def everything():
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=torn_bytes))
            churn = await churned(disk, durability=durability)
            await check_payloads(disk.copy(), churn, durability=durability)

    asyncio.run(everything())


@pytest.mark.parametrize("torn_bytes", [0, 90, 10_000])
@pytest.mark.parametrize("once", [True, False])
def test_a_power_loss_leaves_what_is_needed_wherever_a_write_failed(once, torn_bytes):
    async def everything():
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=30))
            churn = await churned(disk)
            await check_payloads(disk.crash(torn_bytes=torn_bytes), churn)

    asyncio.run(everything())


@pytest.mark.parametrize("seed", range(4))
def test_a_power_loss_that_keeps_sectors_in_any_order_leaves_what_is_needed(monkeypatch, seed):
    # So that a header and its payload may meet different fates.
    monkeypatch.setattr("groupstate.simulate.faults.SECTOR_BYTES", 64)

    async def everything():
        chance = random.Random(seed)
        for step in STEPS:
            disk = FaultyDisk(Fault(step, once=False, torn_bytes=chance.choice([0, 30, 10_000])))
            churn = await churned(disk)
            await check_payloads(disk.crash(chance=chance), churn)

    asyncio.run(everything())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_failure_while_recovering_leaves_what_is_needed(monkeypatch, mixed):
    monkeypatch.setattr("groupstate.simulate.faults.SECTOR_BYTES", 64)

    async def everything():
        chance = random.Random(7) if mixed else None
        for step in PAYLOAD_STEPS[::2]:
            disk = FaultyDisk(Fault(step, once=False, torn_bytes=10_000))
            churn = await churned(disk)
            for again in range(1, 30):
                left = disk.crash(torn_bytes=10_000)
                left.fault = Fault(again, once=False, torn_bytes=20)
                await opened_and_closed(left, churn)
                await check_payloads(left.crash(torn_bytes=40, chance=chance), churn)
                if left.operation_count < again:
                    break

    asyncio.run(everything())


async def opened_and_closed(disk, churn):
    """Recovers, lets go of what isn't needed, and so rewrites; as far as the disk lets it."""
    try:
        log = reopen(disk, payload_file_bytes=FILE_BYTES)
    except LogError:
        return
    log.payloads.keep_only({kept.ref.key for kept in churn.needed(log.last_seq)})
    await close(log)


@pytest.mark.parametrize("chance", [None, random.Random(1)])
@pytest.mark.parametrize("once", [True, False])
def test_what_a_next_process_relies_on_survives_a_power_loss_wherever_the_first_one_failed(once, chance):
    async def everything():
        for step in PAYLOAD_STEPS:
            # The same disk goes on, with all that was never flushed still in its cache: also copies whose flush
            # failed, that could not be cut off, and that no other flush puts on the disk.
            disk = FaultyDisk(Fault(step, once=once, torn_bytes=10_000))
            churn = await churned(disk)
            disk.fault = None
            await check_payloads(disk, churn, chance=chance)

    asyncio.run(everything())


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_short_writes_are_gone_on_with(durability):
    disk = FaultyDisk(write_bytes_max=7)
    churn = asyncio.run(churned(disk, durability=durability))

    assert churn.finished
    asyncio.run(check_payloads(disk.copy(), churn))


def test_a_full_disk_loses_nothing_that_is_needed():
    async def everything():
        full = 0
        for space_bytes in range(200, 4000, 23):
            disk = FaultyDisk(space_bytes=space_bytes)
            churn = await churned(disk)
            full += not churn.finished
            await check_payloads(disk.copy(), churn)
        assert full > 10

    asyncio.run(everything())
