"""Groups that start over by hand: a new attempt, and nothing from those before it."""

import asyncio

import anyio
import pytest

from groupstate import Rules, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import IllegalTransition, LogFailed
from groupstate.log.file import FileLog
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import events, failures, half_right, opened, quiet, ready, returning, virtual


@virtual
async def test_a_requeued_group_starts_over_with_the_same_prompt_and_a_new_attempt(loop):
    began = []

    async def session(ctx):
        began.append((ctx.attempt, ctx.prompt.content, loop.time()))
        await anyio.sleep(10)
        return Trajectory(reward=float(ctx.attempt))

    async with opened(loop, session=session) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(4)

        run.requeue("g", "stuck")
        batch = await run.sample(1)

        assert began == [(1, "p", 0), (2, "p", 4)]
        assert batch.rows[0].trajectory.metrics == {"reward": 2.0}
        assert [event.reason for event in events(run, ev.GroupRequeued)] == ["stuck"]


@virtual
async def test_what_an_attempt_yielded_before_a_requeue_is_dropped(loop):
    async def session(ctx):
        await anyio.sleep(1 if ctx.session == 0 else 10)
        return Trajectory(reward=float(ctx.attempt))

    async with opened(loop, session=session, group_size=2) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(4)
        run.requeue("g")

        batch = await run.sample(1)

    assert [row.trajectory.metrics["reward"] for row in batch.rows] == [2.0, 2.0]


def stubborn_first_attempt(seconds: float):
    """A session whose first attempt goes on for `seconds`, whoever cancels it."""

    async def session(ctx) -> Trajectory:
        loop = asyncio.get_running_loop()
        end = loop.time() + (seconds if ctx.attempt == 1 else 1)
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                if ctx.attempt > 1:
                    raise
        return Trajectory(reward=float(ctx.attempt))

    return session


@pytest.mark.parametrize("seconds", [3, 100])
@virtual
async def test_the_result_of_an_attempt_that_a_requeue_ended_is_fenced(loop, seconds):
    async with opened(loop, session=stubborn_first_attempt(seconds), cancel_grace_s=5) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(0.5)
        run.requeue("g")
        batch = await run.sample(1)
        await anyio.sleep(200)

        assert batch.rows[0].trajectory.metrics == {"reward": 2.0}
        assert [(event.attempt, event.result) for event in events(run, ev.ResultFenced)] == [(1, "finished")]


@virtual
async def test_a_requeued_group_can_be_cancelled_while_its_old_attempt_settles(loop):
    async with opened(loop, session=stubborn_first_attempt(3)) as run:
        group = run.submit("p")
        await anyio.sleep(0.5)
        run.requeue(group.id)
        run.cancel(group.id)
        await anyio.sleep(10)

        assert group.phase == "evicted"
        assert failures(run) == [(0, 2, "cancelled")]


@virtual
async def test_requeueing_before_anything_started_raises_the_attempt(loop):
    async with opened(loop, session=half_right) as run:
        run.submit("p", group_id="g")
        run.requeue("g")
        await run.sample(1)

        assert [event.attempt for event in events(run, ev.SessionStarted)] == [2]


@pytest.mark.parametrize("turns", range(6))
@virtual
async def test_a_group_that_is_requeued_while_its_tasks_start_runs_once(loop, turns):
    async with opened(loop, session=half_right, group_size=2) as run:
        await quiet()
        run.submit("p", group_id="g")
        for _ in range(turns):
            await asyncio.sleep(0)

        run.requeue("g")
        await run.sample(1)

        assert [(event.session, event.attempt) for event in events(run, ev.SessionFinished)] == [(0, 2), (1, 2)]
        assert failures(run) == []


@virtual
async def test_a_late_result_that_cannot_be_recorded_is_told(loop, caplog):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed):
        async with open_run(
            log=log, session=stubborn_first_attempt(100), clock_ns=loop.clock_ns, group_size=1, cancel_grace_s=1
        ) as run:
            run.submit("p", group_id="g")
            await anyio.sleep(1)
            run.cancel("g")
            await anyio.sleep(5)
            disk.fault = Fault(disk.operation_count + 1, once=False)
            with pytest.raises(LogFailed):
                run.submit("q")
                run.submit("q")
            await anyio.sleep(100)

    assert "a late result can't be recorded" in caplog.text


@virtual
async def test_a_failed_group_that_is_kept_can_be_requeued(loop):
    async def better_the_second_time(ctx):
        if ctx.attempt == 1:
            raise ValueError("no")
        return Trajectory(text=str(ctx.prompt.content), reward=1.0)

    async with opened(loop, session=better_the_second_time, rules=Rules(mode="sync")) as run:
        group = run.submit("the prompt")
        await quiet()
        assert group.phase == "failure"

        run.requeue(group.id)

        assert (await run.sample(1)).rows[0].trajectory.text == "the prompt"


@virtual
async def test_a_finished_group_cannot_be_requeued(loop):
    async with opened(loop) as run:
        ready(run, "a")

        with pytest.raises(IllegalTransition, match="is finished"):
            run.requeue("a")


@virtual
async def test_a_requeued_group_can_be_cancelled_after_its_old_attempt_has_settled(loop):
    ended_at = []

    async def session(ctx):
        try:
            await anyio.sleep(100)
        finally:
            if ctx.attempt == 1:
                await asyncio.sleep(2)
            ended_at.append((ctx.attempt, loop.time()))

    async with opened(loop, session=session) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.requeue(group.id)
        await anyio.sleep(4)

        run.cancel(group.id)
        await quiet()

        assert ended_at == [(1, 3), (2, 5)]


@virtual
async def test_a_group_that_is_requeued_before_it_was_dispatched_is_dispatched_once(loop):
    async with opened(loop, session=half_right) as run:
        group = run.submit("p")
        run.requeue(group.id)
        await run.sample(1)

        assert run.book.totals["fenced"] == 0
        assert len(events(run, ev.SessionStarted)) == 1


@virtual
async def test_lost_sessions_are_recorded_in_their_order(loop):
    async with opened(loop, session=stubborn_first_attempt(100), group_size=4, cancel_grace_s=1) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await anyio.sleep(2)

        assert failures(run) == [(session, 1, "lost") for session in range(4)]
        await anyio.sleep(100)


@virtual
async def test_a_group_that_starts_over_and_is_cancelled_before_its_first_step_ends_quietly(loop):
    async with opened(loop, session=returning(Trajectory(reward=1.0))) as run:
        group = run.submit("p", group_id="g")
        await asyncio.sleep(0)
        run.requeue("g")
        run.cancel("g")
        await asyncio.sleep(1)
        run.submit("q", group_id="h")

        assert (await run.sample(1)).group_ids == ["h"]
        assert group.phase == "evicted"


@virtual
async def test_a_requeue_is_not_ended_by_what_still_ends_the_attempts_before_it(loop):
    async def stubborn(ctx: SessionContext) -> Trajectory:
        while True:
            try:
                await asyncio.sleep(4)
            except asyncio.CancelledError:
                if ctx.attempt == 1:
                    await asyncio.sleep(1)
                    raise
                continue
            return Trajectory(reward=1.0)

    async with opened(loop, session=stubborn, cancel_grace_s=5.0) as run:
        run.submit("p", group_id="g")
        await asyncio.sleep(0.5)
        run.requeue("g")
        await asyncio.sleep(0.2)
        run.cancel("g")
        await asyncio.sleep(2)

        assert run.book.groups["g"].phase == "running"  # the second attempt still has its own grace
