"""The end of a run: the grace its sessions have, what is left for the next opening, and calls that come too late."""

import asyncio

import anyio
import pytest

from groupstate import SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import RunIsClosed
from tests.runtime.scenes import endless, events, half_right, opened, quiet, started, virtual


@virtual
async def test_closing_lets_sessions_end_within_the_grace(loop):
    async with opened(loop, source=range(9), session=half_right, grace_s=5) as run:
        await quiet()
        await run.close()

        assert loop.time() == pytest.approx(1, abs=0.01)
        assert run.sampleable_count() == 1
        assert run.book.totals["submitted"] == 1


@virtual
async def test_what_is_in_flight_after_the_grace_runs_again_when_the_run_is_opened_again(loop, tmp_path):
    async with opened(loop, tmp_path / "run", source=["x"], session=endless, grace_s=5) as run:
        await quiet()
    assert loop.time() == pytest.approx(5, abs=0.01)
    assert [event.reason for event in events(run, ev.GroupRequeued)] == ["the run closed: closed"]

    seen = []

    async def session(ctx):
        seen.append((ctx.group_id, ctx.prompt.content, ctx.attempt))
        return Trajectory(reward=1.0)

    async with opened(loop, tmp_path / "run", source=["x"], session=session) as run:
        await run.sample(1)

    assert seen == [("g1", "x", 2)]


@virtual
async def test_groups_that_had_not_started_stay_pending_over_a_close(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit("p", group_id="g")
        await run.close()

    async with opened(loop, tmp_path / "run") as run:
        assert [(group.id, group.prompt.content) for group in run.pending()] == [("g", "p")]


@virtual
async def test_an_error_of_the_body_gives_sessions_no_grace(loop):
    with pytest.raises(KeyError):
        async with opened(loop, source=range(9), session=endless, grace_s=100):
            await anyio.sleep(1)
            raise KeyError("mine")

    assert loop.time() == pytest.approx(1)


@virtual
async def test_closing_twice_is_closing_once(loop):
    async with opened(loop, source=range(9), session=half_right) as run:
        await quiet()
        await run.close("first")
        await run.close("second")

        assert [event.reason for event in events(run, ev.RunClosed)] == ["first"]


@virtual
async def test_closing_from_two_tasks_at_once_is_closing_once(loop):
    async with opened(loop, source=range(9), session=half_right) as run:
        await quiet()
        await asyncio.gather(run.close("first"), run.close("second"))

        assert [event.reason for event in events(run, ev.RunClosed)] == ["first"]


@virtual
async def test_a_run_can_be_closed_before_its_rollout_took_its_first_step(loop):
    async with opened(loop, source=range(9), session=half_right):
        pass


@virtual
async def test_a_group_that_was_submitted_just_before_the_end_is_left_for_the_next_opening(loop):
    async with opened(loop, session=half_right) as run:
        first = run.submit("p")
        await quiet()
        second = run.submit("q")
        await run.close()

        assert (first.phase, second.phase) == ("finished", "pending")


@virtual
async def test_a_cancellation_that_comes_while_the_run_closes_cuts_the_grace_short_and_no_more(loop):
    with anyio.move_on_after(3) as scope:
        async with opened(loop, session=endless, grace_s=5) as run:
            run.submit("p")
            await quiet()

    assert loop.time() == pytest.approx(3)
    assert scope.cancel_called
    assert [type(event).__name__ for event in events(run)][-2:] == ["GroupRequeued", "RunClosed"]


@virtual
async def test_nothing_new_is_dispatched_while_the_run_closes(loop):
    async with opened(loop, session=half_right) as run:
        first = run.submit("first")
        await quiet()
        closing = started(run.close())
        await quiet()

        with pytest.raises(RunIsClosed):
            run.submit("second")
        await closing

        assert first.phase == "finished"


@pytest.mark.parametrize("call", ["cancel", "requeue", "submit", "start", "finish", "fail"])
@virtual
async def test_plain_calls_on_a_closed_run_say_that_it_is_closed(loop, call):
    async with opened(loop) as run:
        waiting, begun = run.submit("p"), run.submit("q").start(0)

    calls = {
        "cancel": lambda: run.cancel(waiting.id),
        "requeue": lambda: run.requeue(waiting.id),
        "submit": lambda: run.submit("r"),
        "start": lambda: waiting.start(0),
        "finish": lambda: begun.finish(Trajectory(reward=1.0)),
        "fail": lambda: begun.fail("late"),
    }
    with pytest.raises(RunIsClosed):
        calls[call]()


@pytest.mark.parametrize("call", ["sample", "commit", "release", "checkpoint", "publish", "sampleable", "validate"])
@virtual
async def test_waiting_calls_on_a_closed_run_say_that_it_is_closed(loop, call):
    async with opened(loop) as run:
        pass

    calls = {
        "sample": lambda: run.sample(1),
        "commit": lambda: run.commit(1),
        "release": lambda: run.release(1),
        "checkpoint": run.checkpoint,
        "publish": lambda: run.publish_weights(7),
        "sampleable": lambda: run.wait_sampleable(1),
        "validate": lambda: run.validate(["p"]),
    }
    with pytest.raises(RunIsClosed):
        await calls[call]()


@virtual
async def test_a_commit_may_still_come_while_the_run_closes(loop):
    async with opened(loop, session=endless, grace_s=5) as run:
        run.submit("slow")
        await quiet()
        closing = started(run.close())
        await quiet()
        await run.checkpoint("last")
        await closing

        assert [event.name for event in events(run, ev.CheckpointMarked)] == ["last"]


@virtual
async def test_what_is_under_way_at_the_end_is_ended_in_the_order_in_which_it_began(loop):
    ended: list[str] = []

    async def session(ctx: SessionContext) -> Trajectory:
        try:
            await asyncio.sleep(1_000.0)
        except asyncio.CancelledError:
            ended.append(ctx.group_id)
            raise
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, grace_s=0.0) as run:
        names = [run.submit("p").id for _ in range(200)]
        await asyncio.sleep(1.0)

    assert ended == names


@virtual
async def test_a_group_without_a_prompt_runs_after_reopening_too(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit(None, group_id="g", dataset="sums")

    seen = []

    async def session(ctx):
        seen.append((ctx.prompt.content, ctx.prompt.dataset))
        return Trajectory(reward=1.0)

    async with opened(loop, tmp_path / "run", session=session) as run:
        await run.sample(1)

    assert seen == [(None, "sums")]


@pytest.mark.parametrize("turns", range(12))
async def test_a_close_that_is_cancelled_is_finished_all_the_same(tmp_path, turns):
    async with open_run(tmp_path / "run", source=range(50), session=half_right, group_size=2, grace_s=0.05) as run:
        await run.sample(1)
        closing = asyncio.ensure_future(run.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})

    async with open_run(tmp_path / "run") as run:
        assert events(run, ev.RunClosed) == [ev.RunClosed("closed")]
