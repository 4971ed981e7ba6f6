"""What ends a rollout, and who is told: an engine that died, a source or a log that breaks."""

import asyncio

import anyio
import pytest

from groupstate import Prompt, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import EngineDied, LogFailed, RolloutDied, SourceFailed
from groupstate.log.file import FileLog
from groupstate.runtime.sources import FunctionSource
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import events, failing, half_right, opened, quiet, started, virtual

# The engine -------------------------------------------------------------------------------------------


def dying_engine(loop, after_s: float) -> ScriptedEngine:
    engine = ScriptedEngine(lambda ids: [1] * 100, token_s=1)
    loop.call_later(after_s, engine.die, RuntimeError("out of memory"))
    return engine


async def generating(ctx) -> Trajectory:
    generation = await ctx.generate([1])
    return ctx.trajectory([1], generation, reward=1.0)


@virtual
async def test_the_engines_death_is_raised_in_the_waiting_sampler(loop):
    async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)) as run:
        with pytest.raises(RolloutDied, match="out of memory") as caught:
            await run.sample(1)

        assert isinstance(caught.value.__cause__, EngineDied)
        assert loop.time() == 5


@virtual
async def test_the_death_is_told_at_once_also_while_no_session_asks_the_engine(loop):
    async def in_a_tool(ctx):
        await anyio.sleep(3600)
        return Trajectory(reward=1.0)

    async with opened(loop, source=range(9), session=in_a_tool, engine=dying_engine(loop, 5)) as run:
        with pytest.raises(RolloutDied, match="out of memory") as caught:
            await run.sample(1)

        assert isinstance(caught.value.__cause__, EngineDied)
        assert loop.time() == 5


@virtual
async def test_an_engine_that_was_closed_has_not_died(loop):
    async def in_a_tool(ctx):
        await anyio.sleep(10)
        return Trajectory(reward=1.0)

    engine = ScriptedEngine([])
    async with opened(loop, source=range(1), session=in_a_tool, engine=engine) as run:
        await engine.aclose()

        assert len(await run.sample(1)) == 1


@pytest.mark.parametrize("died", [False, lambda: None], ids=["a flag", "a plain function"])
@virtual
async def test_what_else_an_engine_calls_died_is_left_alone(loop, died):
    engine = ScriptedEngine(lambda ids: [1], token_s=1)
    engine.died = died
    async with opened(loop, source=range(1), session=generating, engine=engine) as run:
        assert len(await run.sample(1)) == 1


@virtual
async def test_every_waiter_and_every_later_sample_is_told_of_the_death(loop):
    async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)) as run:
        waiters = [started(run.sample(1)), started(run.sample(2)), started(run.sample(1, partition="val"))]
        await anyio.sleep(6)
        waiters.append(started(run.sample(1)))

        for waiter in waiters:
            with pytest.raises(RolloutDied):
                await waiter


@virtual
async def test_a_death_that_nobody_waited_for_is_raised_at_the_end(loop):
    with pytest.raises(RolloutDied, match="while nobody waited") as caught:
        async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)):
            await anyio.sleep(10)

    assert isinstance(caught.value.__cause__, EngineDied)


@virtual
async def test_a_death_that_was_told_is_not_raised_again_at_the_end(loop):
    async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)) as run:
        with pytest.raises(RolloutDied):
            await run.sample(1)


@virtual
async def test_an_error_of_the_body_is_raised_rather_than_the_death(loop):
    with pytest.raises(KeyError, match="mine"):
        async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)):
            await anyio.sleep(10)
            raise KeyError("mine")


@virtual
async def test_who_waits_for_sampleable_groups_is_told_of_the_death(loop):
    async with opened(loop, source=range(9), session=generating, engine=dying_engine(loop, 5)) as run:
        with pytest.raises(RolloutDied):
            await run.wait_sampleable(1)


@virtual
async def test_what_was_sampleable_when_the_rollout_died_can_still_be_sampled(loop):
    async def first_finishes(ctx):
        if ctx.prompt.content:
            await anyio.sleep(5)
            raise EngineDied("gone")
        return Trajectory(reward=1.0)

    async with opened(loop, source=[0, 1], session=first_finishes) as run:
        with pytest.raises(RolloutDied):
            await run.sample(2)

        assert len(await run.sample(1)) == 1


@virtual
async def test_the_groups_of_a_dead_engine_start_over_when_the_run_is_opened_again(loop, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RolloutDied):
        async with opened(loop, path, source=range(2), session=generating, engine=dying_engine(loop, 5)) as run:
            await run.sample(2)

    async with opened(loop, path, source=range(2), session=half_right) as run:
        batch = await run.sample(2)

        assert [group.prompt.content for group in batch.groups] == [0, 1]
        assert events(run, ev.SessionFailed) == []


# The source -------------------------------------------------------------------------------------------


@virtual
async def test_a_source_that_breaks_is_told_once_what_it_gave_is_used_up(loop):
    def make(position):
        if position == 4:
            raise OSError("the prompts are gone")
        return position

    async with opened(loop, source=FunctionSource(make), session=half_right) as run:
        for _ in range(4):
            await run.sample(1)
        with pytest.raises(SourceFailed, match="at prompt 4: OSError: the prompts are gone") as caught:
            await run.sample(1)

        assert isinstance(caught.value.__cause__, OSError)


@virtual
async def test_a_source_that_gives_an_id_twice_is_told_with_the_place_of_the_second(loop):
    twice = [Prompt("x", group_id="a"), Prompt("y", group_id="a"), Prompt("z", group_id="b")]
    async with opened(loop, source=twice, session=half_right) as run:
        with pytest.raises(SourceFailed, match=r"at prompt 1: DuplicateGroup.*'a' is taken"):
            await run.sample(2)

        assert len(await run.sample(1)) == 1


@virtual
async def test_what_a_broken_source_owes_is_forfeited(loop):
    def make(position):
        if position == 1:
            raise OSError("gone")
        return position

    async with opened(loop, source=FunctionSource(make), session=failing(ValueError("no"))) as run:
        with pytest.raises(SourceFailed):
            await run.sample(1)

        assert [event.reason for event in events(run, ev.RefillForfeited)] == ["source failed"]


# The log ----------------------------------------------------------------------------------------------


@virtual
async def test_a_broken_log_reaches_a_waiting_sampler_as_itself(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log, group_size=1, clock_ns=loop.clock_ns) as run:
            group = run.submit("p")
            waiting = started(run.sample(1))
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            group.start(0)
            await waiting

    assert disk.locks_held == set()


@virtual
async def test_a_broken_log_ends_a_rollout_and_reaches_the_sampler_as_itself(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log, source=range(9), session=half_right, clock_ns=loop.clock_ns) as run:
            waiting = started(run.sample(1))
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            await waiting

    assert disk.locks_held == set()


@virtual
async def test_a_broken_log_that_nobody_waited_for_is_told_at_the_end(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log, source=range(9), session=half_right, clock_ns=loop.clock_ns):
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            await anyio.sleep(10)

    assert disk.locks_held == set()


@virtual
async def test_a_log_that_breaks_while_the_run_closes_is_told(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log, clock_ns=loop.clock_ns) as run:
            run.submit("p").start(0)
            disk.fault = Fault(disk.operation_count + 1, once=False)

    assert disk.locks_held == set()


@virtual
async def test_a_cancellation_is_not_replaced_by_a_broken_log(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed):
        async with open_run(log=log, group_size=1, clock_ns=loop.clock_ns) as run:
            waiting = started(run.sample(1))
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            with pytest.raises(LogFailed):
                run.submit("p")
                run.submit("p")
            waiting.cancel()
            await asyncio.wait({waiting})

            assert waiting.cancelled()


@virtual
async def test_a_log_that_breaks_while_a_prompt_is_drawn_is_not_the_sources_fault(loop, caplog):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)

    def breaks_the_disk(position):
        disk.fault = disk.fault or Fault(disk.operation_count + 1, once=False)
        return position

    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log, source=FunctionSource(breaks_the_disk), clock_ns=loop.clock_ns) as run:
            await run.sample(3)

    assert "the source failed" not in caplog.text


@virtual
async def test_who_waits_for_a_change_hears_of_a_broken_log(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed):
        async with open_run(log=log, clock_ns=loop.clock_ns) as run:
            disk.fault = Fault(disk.operation_count + 1, once=False)
            with pytest.raises(LogFailed):
                for _ in range(2):
                    run.submit("p")
            await quiet()
            with pytest.raises(LogFailed):
                await run.wait_changed()
