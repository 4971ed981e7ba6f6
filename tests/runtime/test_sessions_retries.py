"""Failures of sessions that are tried again: which, how often, and after how long."""

import anyio

from groupstate import RetryableError, Rules, Trajectory, session_from_reward
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import EngineUnavailable
from tests.runtime.scenes import events, opened, raising, virtual


class Overloaded(RetryableError):
    pass


@virtual
async def test_a_retryable_failure_is_tried_again_with_doubling_delays(loop):
    began = []

    async def session(ctx):
        began.append((ctx.attempt, loop.time()))
        if ctx.attempt < 4:
            raise Overloaded("busy")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, rules=Rules(attempts_max=4, retry_delay_s=3)) as run:
        run.submit("p")
        await run.sample(1)

        assert began == [(1, 0), (2, 3), (3, 9), (4, 21)]
        assert [event.retry_in_s for event in events(run, ev.SessionFailed)] == [3, 6, 12]


@virtual
async def test_retries_end_at_attempts_max(loop):
    async with opened(loop, session=raising(Overloaded("busy")), rules=Rules(attempts_max=3)) as run:
        group = run.submit("p")
        await anyio.sleep(100)

        assert [(e.attempt, e.retry_in_s) for e in events(run, ev.SessionFailed)] == [(1, 1), (2, 2), (3, None)]
        assert group.phase == "evicted"


@virtual
async def test_an_error_that_is_not_retryable_is_not_tried_again(loop):
    async with opened(loop, session=raising(ValueError("wrong")), rules=Rules(attempts_max=3)) as run:
        run.submit("p")
        await anyio.sleep(100)

        assert [event.attempt for event in events(run, ev.SessionFailed)] == [1]


@virtual
async def test_a_group_does_not_end_while_a_retry_of_one_session_is_due(loop):
    async def session(ctx):
        if ctx.session == 0 and ctx.attempt == 1:
            raise Overloaded("busy")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, rules=Rules(attempts_max=2, retry_delay_s=50), group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(40)
        assert (group.phase, run.sampleable_count()) == ("running", 0)

        await anyio.sleep(20)

        assert group.phase == "finished"


@virtual
async def test_a_request_that_can_never_be_served_is_recorded_as_refused_and_not_tried_again(loop):
    async with opened(
        loop,
        session=session_from_reward(lambda prompt, text: 1.0),
        engine=ScriptedEngine([[1]], context=2),
        rules=Rules(attempts_max=3),
    ) as run:
        run.submit([1, 2, 3])
        await anyio.sleep(1)

        (failure,) = events(run, ev.SessionFailed)
        assert failure.failure == "refused"
        assert "the prompt of request" in failure.message
        assert "context of 2" in failure.message


@virtual
async def test_a_request_that_failed_on_its_way_is_tried_again(loop):
    async with opened(
        loop,
        session=session_from_reward(lambda prompt, text: 1.0),
        engine=ScriptedEngine([EngineUnavailable("connection lost"), [1]]),
        rules=Rules(attempts_max=2),
    ) as run:
        run.submit([1, 2])
        await run.sample(1)

        (failure,) = events(run, ev.SessionFailed)
        assert (failure.failure, failure.message) == ("error", "EngineUnavailable: connection lost")
