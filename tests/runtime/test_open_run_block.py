"""What comes out of the block of `open_run`: errors as themselves, cancellations and time-outs from outside as such."""

import asyncio

import anyio
import pytest

from groupstate import open_run
from groupstate.core import events as ev
from groupstate.errors import LogFailed
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import check, endless, events, half_right, opened, started, virtual


@virtual
async def test_an_error_of_the_body_arrives_as_itself(loop):
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with opened(loop, source=range(9), session=half_right) as run:
            await run.sample(1)
            raise error

    assert caught.value is error


@virtual
async def test_the_log_says_how_the_run_ended(loop):
    log = MemoryLog()
    with pytest.raises(KeyError):
        async with opened(loop, log=log):
            raise KeyError("mine")

    assert events(log)[-1] == ev.RunClosed("KeyError")


@virtual
async def test_an_outer_time_out_passes_through(loop):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5), opened(loop, source=range(9), session=endless) as run:
            await run.sample(1)

    assert loop.time() == pytest.approx(5)
    check(run)


@virtual
async def test_an_outer_scope_passes_through(loop):
    with anyio.move_on_after(5) as scope:
        async with opened(loop, source=range(9), session=endless) as run:
            await run.sample(1)
        raise AssertionError("the cancellation was swallowed")

    assert scope.cancelled_caught
    check(run)


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
@virtual
async def test_an_outer_time_out_is_not_swallowed_when_a_session_fails_at_the_same_moment(loop, kind):
    async def fails_or_cleans_up(ctx):
        try:
            await anyio.sleep(5 if ctx.session == 0 else 100)
        finally:
            await asyncio.sleep(1)
        raise ValueError("at the same moment")

    async def drive() -> None:
        async with opened(loop, source=range(9), session=fails_or_cleans_up, group_size=2) as run:
            await run.sample(1)
        raise AssertionError("the cancellation was swallowed")

    with pytest.raises(TimeoutError):
        if kind == "asyncio":
            async with asyncio.timeout(6):
                await drive()
        else:
            with anyio.fail_after(6):
                await drive()


@virtual
async def test_a_cancelled_task_leaves_a_closed_run(loop):
    log = MemoryLog()

    async def drive():
        async with opened(loop, log=log, source=range(9), session=endless, group_size=2) as run:
            await run.sample(1)

    task = started(drive())
    await anyio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert isinstance(events(log)[-1], ev.RunClosed)
    assert len(events(log, ev.GroupRequeued)) == 2


async def test_what_could_not_be_kept_is_told_at_the_end_of_the_block():
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log) as run:
            await run.checkpoint()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            run.submit("important")

    assert disk.locks_held == set()


@pytest.mark.parametrize("times", [1, 2, 4])
async def test_who_holds_a_run_may_be_cancelled_again_and_again(tmp_path, times):
    async def hold():
        async with open_run(tmp_path / "run", source=range(50), session=endless, grace_s=0.05):
            await asyncio.sleep(60)

    holding = asyncio.ensure_future(hold())
    await asyncio.sleep(0.05)
    for _ in range(times):
        holding.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({holding})

    assert holding.cancelled()
    async with open_run(tmp_path / "run"):
        pass
