"""Giving a group up: all of its sessions end, each once, whenever the cancellation comes."""

import asyncio

import anyio
import pytest

from groupstate import RetryableError, Rules, SessionContext, Trajectory
from groupstate.core import events as ev
from groupstate.errors import DuplicateGroup, IllegalTransition, UnknownGroup
from tests.runtime.scenes import ended, endless, events, failing, failures, half_right, opened, quiet, started, virtual


@virtual
async def test_a_cancelled_group_ends_after_each_of_its_sessions_has(loop):
    async with opened(loop, session=endless, group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(1)

        run.cancel(group.id)
        assert group.phase == "running"
        await quiet()

        names = [type(event).__name__ for event in events(run)][-5:]
        assert names == ["SessionFailed", "SessionFailed", "GroupFailed", "GroupEvicted", "RefillForfeited"]
        assert failures(run) == [(0, 1, "cancelled"), (1, 1, "cancelled")]
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("cancelled",)]


@virtual
async def test_a_group_that_is_cancelled_before_its_first_step_ends_too(loop):
    ran = []

    async def session(ctx):
        ran.append(ctx.session)

    async with opened(loop, session=session, group_size=2) as run:
        for _ in range(100):
            run.cancel(run.submit("p").id)
        await quiet()

        assert ran == []
        assert (run.book.in_flight_count(), run.book.totals["evicted/cancelled"]) == (0, 100)


@pytest.mark.parametrize("turns", range(6))
@virtual
async def test_a_group_that_is_cancelled_while_its_tasks_start_ends_too(loop, turns):
    async with opened(loop, session=endless, group_size=2) as run:
        await quiet()
        group = run.submit("p")
        for _ in range(turns):
            await asyncio.sleep(0)

        run.cancel(group.id)
        await quiet()

        assert group.phase == "evicted"
        assert {failure for _, _, failure in failures(run)} == {"cancelled"}
        assert not run._rollout.busy


@virtual
async def test_sessions_of_a_group_that_is_cancelled_before_its_task_ran_never_began(loop):
    async with opened(loop, session=endless, group_size=2) as run:
        await quiet()
        group = run.submit("p")
        await asyncio.sleep(0)
        assert run._rollout.busy

        run.cancel(group.id)
        await quiet()

        assert failures(run) == [(0, 1, "cancelled"), (1, 1, "cancelled")]
        assert events(run, ev.SessionStarted) == []


def _once(step, is_time):
    """A selection rule that takes a step in passing, once; not what rules are for, but nobody keeps them from it."""
    taken = []

    def rule(book, rules, request):
        group = book.groups.get("a")
        if group is not None and not taken and is_time(group):
            taken.append(group)
            step()
        return []

    return rule


@pytest.mark.parametrize("begun", ["together", "one by one", "once more"])
@virtual
async def test_a_group_that_is_cancelled_by_what_follows_from_a_start_has_no_session_that_runs(loop, begun):
    ran: list[int] = []

    async def session(ctx: SessionContext) -> Trajectory:
        if begun == "once more" and ctx.attempt == 1:
            raise RetryableError("busy")
        ran.append(ctx.session)
        return await endless(ctx)

    number = 2 if begun == "once more" else 1
    rule = _once(
        lambda: run.cancel("a"), lambda group: any((s.state, s.attempt) == ("open", number) for s in group.sessions)
    )
    rules = Rules(attempts_max=2, retry_delay_s=1.0)
    async with opened(loop, session=session, group_size=2, selection=rule, rules=rules) as run:
        waiting = started(run.sample(1))
        await quiet()
        group = run.submit("p", group_id="a")
        if begun == "one by one":
            run.ledger.fail("a", 1, None, "error")
        await asyncio.sleep(10.0)

        assert (ran, group.phase, run._rollout.busy) == ([], "evicted", False)
        await ended(waiting)


@virtual
async def test_cancelling_twice_is_cancelling_once(loop):
    async with opened(loop, session=endless) as run:
        group = run.submit("p")
        await anyio.sleep(1)

        run.cancel(group.id)
        run.cancel(group.id)
        await quiet()

        assert failures(run) == [(0, 1, "cancelled")]


@virtual
async def test_cancelling_while_sessions_settle_changes_nothing_more(loop):
    async def slow_to_end(ctx):
        try:
            await anyio.sleep(100)
        finally:
            await asyncio.sleep(2)

    async with opened(loop, session=slow_to_end) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await anyio.sleep(1)
        assert group.phase == "running"

        run.cancel(group.id)
        await anyio.sleep(2)

        assert failures(run) == [(0, 1, "cancelled")]
        assert group.phase == "evicted"


@virtual
async def test_cancelling_while_a_retry_is_due_ends_the_attempt_to_come(loop):
    async with opened(loop, session=failing(RetryableError("busy")), rules=Rules(attempts_max=5)) as run:
        group = run.submit("p")
        await anyio.sleep(1.5)

        run.cancel(group.id)
        await quiet()

        assert failures(run) == [(0, 1, "error"), (0, 2, "cancelled")]
        assert group.phase == "evicted"


@virtual
async def test_an_attempt_that_was_begun_by_hand_meanwhile_is_not_begun_again(loop):
    async with opened(loop, session=failing(RetryableError("busy")), rules=Rules(attempts_max=2)) as run:
        group = run.submit("p")
        await anyio.sleep(1.5)
        attempt = group.start(0)
        await anyio.sleep(1)
        assert not run._rollout.busy

        attempt.finish(Trajectory(reward=1.0))
        assert [(event.session, event.attempt) for event in events(run, ev.SessionStarted)] == [(0, 1), (0, 2)]
        assert group.phase == "finished"


@virtual
async def test_a_retryable_failure_of_a_group_that_is_given_up_is_not_tried_again(loop):
    async def busy(ctx):
        try:
            await anyio.sleep(100)
        except asyncio.CancelledError:
            raise RetryableError("busy") from None

    async with opened(loop, session=busy, rules=Rules(attempts_max=5)) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await quiet()

        assert group.phase == "evicted"


@virtual
async def test_sessions_that_have_finished_keep_their_result_when_the_group_is_cancelled(loop):
    async def first_only(ctx):
        if ctx.session:
            await anyio.sleep_forever()
        return Trajectory(reward=1.0)

    async with opened(loop, session=first_only, group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await quiet()

        assert failures(run) == [(1, 1, "cancelled")]
        assert [event.session for event in events(run, ev.SessionFinished)] == [0]


@virtual
async def test_a_cancellation_that_comes_after_the_end_changes_nothing(loop):
    async with opened(loop, session=half_right) as run:
        group = run.submit("p")
        await run.wait_sampleable(1)

        with pytest.raises(IllegalTransition, match="is finished"):
            run.cancel(group.id)

        assert (group.phase, run.sampleable_count()) == ("finished", 1)


@virtual
async def test_a_result_that_is_ready_in_the_turn_of_the_cancellation_is_taken(loop):
    async with opened(loop, session=half_right) as run:
        group = run.submit("p")
        await quiet()
        loop.call_later(1, run.cancel, group.id)
        await anyio.sleep(2)

        ends = events(run, ev.SessionFinished, ev.SessionFailed)
        assert len(ends) == 1


@virtual
async def test_an_unknown_group_cannot_be_cancelled(loop):
    async with opened(loop) as run:
        with pytest.raises(UnknownGroup, match=r"'nobody'.*never submitted"):
            run.cancel("nobody")


@virtual
async def test_groups_submitted_while_others_are_cancelled_are_not_forgotten(loop):
    async def slow_to_end(ctx):
        try:
            await anyio.sleep(50)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            raise
        return Trajectory(reward=1.0)

    async with opened(loop, session=slow_to_end) as run:
        stale = [run.submit("old") for _ in range(4)]
        await anyio.sleep(1)
        for group in stale[:2]:
            run.cancel(group.id)
        await anyio.sleep(0.5)
        new = run.submit("new")
        await anyio.sleep(60)

        assert new.phase == "finished"
        assert [group.phase for group in stale] == ["evicted", "evicted", "finished", "finished"]


@virtual
async def test_an_id_is_not_given_twice_while_its_group_is_being_cancelled(loop):
    async with opened(loop, session=endless) as run:
        run.submit("p", group_id="q7")
        await anyio.sleep(1)
        run.cancel("q7")

        with pytest.raises(DuplicateGroup, match="is running"):
            run.submit("p", group_id="q7")
        await quiet()
        with pytest.raises(DuplicateGroup, match="was evicted and has left"):
            run.submit("p", group_id="q7")


@virtual
async def test_a_cancellation_goes_before_the_end_of_spare_sessions(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        if ctx.session == 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                raise
        return Trajectory(reward=float(ctx.session))

    async with opened(loop, rules=Rules(oversample=1), session=session, group_size=2) as run:
        group = run.submit("p", group_id="g")
        await asyncio.sleep(0.5)
        run.cancel("g")
        await asyncio.sleep(2)

        assert group.phase == "evicted"
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("cancelled",)]
