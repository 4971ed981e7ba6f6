"""Sessions that ignore their cancellation, or take a while over it: they hold up neither their group nor the run."""

import asyncio

import anyio
import pytest

from groupstate import SessionContext, Trajectory
from groupstate.core import events as ev
from tests.runtime.scenes import Session, endless, events, opened, quiet, virtual


def deaf(seconds: float) -> Session:
    """A session that works on for `seconds`, however often it is cancelled."""

    async def session(ctx: SessionContext) -> Trajectory:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                pass
        return Trajectory(reward=1.0)

    return session


@virtual
async def test_a_session_that_ignores_its_cancellation_is_lost_after_the_grace(loop, caplog):
    async with opened(loop, session=deaf(100), cancel_grace_s=3) as run:
        group = run.submit("p")
        await anyio.sleep(1)

        run.cancel(group.id)
        await anyio.sleep(2.9)
        assert group.phase == "running"
        await anyio.sleep(0.2)

        (end,) = events(run, ev.SessionFailed)
        assert (end.failure, end.message) == ("lost", "it ignored its cancellation for 3 s")
        assert group.phase == "evicted"
        assert "ignores its cancellation" in caplog.text
        await anyio.sleep(100)


@virtual
async def test_without_any_grace_a_session_that_ends_at_once_is_not_lost(loop):
    async with opened(loop, session=endless, cancel_grace_s=0) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await quiet()

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"]


@virtual
async def test_what_a_lost_session_returns_in_the_end_is_fenced(loop):
    async with opened(loop, session=deaf(100), cancel_grace_s=3) as run:
        run.submit("p")
        await anyio.sleep(1)
        run.cancel("g1")
        await anyio.sleep(200)

        assert [event.result for event in events(run, ev.ResultFenced)] == ["finished"]
        assert run.book.totals["fenced"] == 1


@virtual
async def test_a_deaf_session_does_not_keep_the_run_from_closing(loop):
    async with opened(loop, session=deaf(1_000), cancel_grace_s=3, grace_s=2) as run:
        run.submit("p")
        await anyio.sleep(1)
        await run.close()

        assert loop.time() == pytest.approx(6)
        assert [event.reason for event in events(run, ev.GroupRequeued)] == ["the run closed: closed"]
    await anyio.sleep(1_000)


@virtual
async def test_a_session_that_ends_within_the_grace_of_its_cancellation_keeps_its_result(loop):
    async def finishes_up(ctx):
        try:
            await anyio.sleep(100)
        except asyncio.CancelledError:
            await anyio.sleep(1)
        return Trajectory(reward=1.0)

    async with opened(loop, session=finishes_up, cancel_grace_s=3) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await anyio.sleep(2)

        assert group.phase == "finished"


@virtual
async def test_a_session_that_answers_its_cancellation_with_an_error_was_cancelled(loop):
    async def clumsy(ctx):
        try:
            await anyio.sleep(100)
        finally:
            raise ValueError("in the cleanup")

    async with opened(loop, session=clumsy) as run:
        run.submit("p")
        await anyio.sleep(1)
        run.cancel("g1")
        await anyio.sleep(1)

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"]
