"""What becomes of a session, whatever its function does: one recorded end, and its siblings go on."""

import asyncio
import gc
import math
import weakref
from typing import Any

import anyio
import pytest

from groupstate import Rules, Select, SessionContext, Trajectory
from groupstate.core import events as ev
from groupstate.errors import RolloutDied
from groupstate.simulate.loop import VirtualLoop, run_virtual
from tests.runtime.scenes import Session, events, failures, half_right, opened, quiet, raising, returning, virtual


async def outcome(loop: VirtualLoop, session: Session, **options: Any) -> list[ev.SessionFinished | ev.SessionFailed]:
    """Ends of the sessions of one group, in the order of the log."""
    async with opened(loop, session=session, rules=Rules(), **options) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(600)
        return events(run, ev.SessionFinished, ev.SessionFailed)


@virtual
async def test_what_a_session_returns_is_recorded_as_its_end(loop):
    (end,) = await outcome(loop, half_right)

    assert isinstance(end, ev.SessionFinished)
    assert end.trajectories[0].metrics == {"reward": 0.0}


@virtual
async def test_a_session_that_raises_has_failed_with_what_it_raised(loop):
    (end,) = await outcome(loop, raising(KeyError("answer")))

    assert (end.failure, end.message) == ("error", "KeyError: 'answer'")


@virtual
async def test_a_failure_names_its_cause(loop):
    async def session(ctx):
        try:
            raise ConnectionError("refused")
        except ConnectionError as error:
            raise RuntimeError("no judge") from error

    (end,) = await outcome(loop, session)

    assert end.message == "RuntimeError: no judge (from ConnectionError: refused)"


@virtual
async def test_a_cause_that_the_failure_repeats_is_not_said_twice(loop):
    async def session(ctx):
        cause = ConnectionError("refused")
        raise RuntimeError(f"no judge: {type(cause).__name__}: {cause}") from cause

    (end,) = await outcome(loop, session)

    assert end.message == "RuntimeError: no judge: ConnectionError: refused"


@virtual
async def test_an_endless_message_is_cut(loop):
    (end,) = await outcome(loop, raising(ValueError("x" * 1_000_000)))

    assert len(end.message) <= 2_000
    assert end.message.endswith("... (cut)")


@virtual
async def test_a_group_of_errors_is_one_failure(loop):
    (end,) = await outcome(loop, raising(ExceptionGroup("tools", [ValueError("a"), ValueError("b")])))

    assert end.failure == "error"


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_a_session_that_returns_nothing_has_failed_as_empty(nothing):
    (end,) = run_virtual(lambda loop: outcome(loop, returning(nothing)))

    assert (end.failure, end.message) == ("empty", "it returned no trajectory")


@virtual
async def test_a_session_may_return_nothing_where_the_rules_allow_it(loop):
    async with opened(loop, session=returning(None), rules=Rules(empty_session="allow"), group_size=2) as run:
        run.submit("p")
        await anyio.sleep(2)

        assert [event.trajectories for event in events(run, ev.SessionFinished)] == [(), ()]
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("empty",)]


@pytest.mark.parametrize(
    "result",
    [
        "text",
        {"reward": 1.0},
        1.0,
        [Trajectory(reward=1.0), "text"],
        Trajectory(reward=math.nan),
        Trajectory(reward=math.inf),
        Trajectory(reward=-math.inf),
        Trajectory(metrics={"acc": math.nan}),
        Trajectory(metrics={"acc": "high"}),
        Trajectory(response_ids=(1, 2), log_probs=(-0.5,)),
        Trajectory(response_ids=(1,), log_probs=(math.nan,)),
        Trajectory(info={"tool": object()}),
    ],
    ids=lambda result: str(result)[:40],
)
def test_a_result_that_cannot_be_recorded_is_the_sessions_failure(result):
    (end,) = run_virtual(lambda loop: outcome(loop, returning(result)))

    assert end.failure == "refused"
    assert "session 0 of group 'g'" in end.message


@virtual
async def test_a_session_that_cancels_itself_has_failed_as_cancelled(loop):
    async def session(ctx):
        asyncio.current_task().cancel()
        await anyio.sleep(1)

    (end,) = await outcome(loop, session)

    assert (end.failure, end.message) == ("cancelled", "the session cancelled itself")


@virtual
async def test_a_session_that_raises_a_cancellation_by_hand_ends_alone(loop):
    async def session(ctx):
        if ctx.session == 0:
            raise asyncio.CancelledError
        await anyio.sleep(1)
        return Trajectory(reward=1.0)

    ends = await outcome(loop, session, group_size=2)

    assert [(type(end).__name__, end.session) for end in ends] == [("SessionFailed", 0), ("SessionFinished", 1)]


@virtual
async def test_a_failed_session_does_not_end_its_siblings_or_the_group(loop):
    async def session(ctx):
        await anyio.sleep(1 + ctx.session)
        if ctx.session == 0:
            raise ValueError("no")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, group_size=3) as run:
        group = run.submit("p")
        await anyio.sleep(1.5)
        assert group.phase == "running"
        await anyio.sleep(2)

        names = [type(event).__name__ for event in events(run)][-6:-1]
        assert names == ["SessionFailed", "SessionFinished", "SessionFinished", "GroupFailed", "GroupEvicted"]
        assert group.phase == "evicted"


@virtual
async def test_survivors_make_a_partial_group(loop):
    async def session(ctx):
        if ctx.session == 0:
            raise ValueError("no")
        return Trajectory(reward=float(ctx.session))

    async with opened(loop, session=session, rules=Rules(survivors_min=2), group_size=3) as run:
        run.submit("p")
        batch = await run.sample(1)

    assert [(group.partial, group.size, len(group.sessions)) for group in batch.groups] == [(True, 3, 2)]


class Harsh(BaseException):
    """Not an `Exception`: what libraries use to get past every handler."""


@virtual
async def test_an_exception_that_is_no_exception_is_recorded_and_is_the_rollouts_death(loop):
    async def session(ctx):
        await anyio.sleep(1)
        raise Harsh("stop everything")

    async with opened(loop, session=session) as run:
        run.submit("p")
        with pytest.raises(RolloutDied) as caught:
            await run.sample(1)

        assert isinstance(caught.value.__cause__, Harsh)
        assert [event.message for event in events(run, ev.SessionFailed)] == ["Harsh: stop everything"]


def test_ctrl_c_in_a_session_ends_the_run_and_leaves_a_log_to_go_on_from(tmp_path):
    async def interrupted(ctx):
        await anyio.sleep(1)
        raise KeyboardInterrupt

    async def first(loop):
        async with opened(loop, tmp_path / "run", session=interrupted) as run:
            run.submit("p", group_id="g")
            await run.sample(1)

    async def second(loop):
        async with opened(loop, tmp_path / "run", session=half_right) as run:
            return (await run.sample(1)).group_ids

    with pytest.raises(KeyboardInterrupt):
        run_virtual(first)

    assert run_virtual(second) == ["g"]


def test_ctrl_c_in_a_rule_ends_the_run_and_leaves_a_log_to_go_on_from(tmp_path):
    interrupts = [KeyboardInterrupt()]

    def interrupted(book, rules, request):
        ready = [group.group_id for group in book.ready()]
        if ready and interrupts:
            raise interrupts.pop()
        if ready:
            yield Select(ready)

    async def first(loop):
        async with opened(loop, tmp_path / "run", session=half_right, selection=interrupted) as run:
            run.submit("p", group_id="g")
            await run.sample(1)

    async def second(loop):
        async with opened(loop, tmp_path / "run", session=half_right, selection=interrupted) as run:
            return (await run.sample(1)).group_ids

    with pytest.raises(KeyboardInterrupt):
        run_virtual(first)

    assert run_virtual(second) == ["g"]


@virtual
async def test_an_exception_that_cannot_say_what_it_is_fails_its_session_alone(loop):
    class Mute(Exception):
        def __str__(self):
            return None

    async def session(ctx):
        await anyio.sleep(1)
        if ctx.session == 0:
            raise Mute
        return Trajectory(reward=1.0)

    async with opened(loop, session=session) as run:
        run.submit("p", n=2)
        await anyio.sleep(2)

        assert [event.message for event in events(run, ev.SessionFailed)] == [
            "Mute: (its text can't be had: TypeError)"
        ]


@virtual
async def test_a_result_that_is_refused_needs_no_garbage_collector_to_be_freed(loop):
    class Ids(list):
        """Tokens that can be watched."""

    made = []

    async def session(ctx: SessionContext) -> list[Trajectory]:
        ids = Ids([1] * 100)
        made.append(weakref.ref(ids))
        return [Trajectory(response_ids=ids, reward=1.0), Trajectory(reward=math.nan)]

    async with opened(loop, session=session, group_size=2) as run:
        gc.collect()
        gc.disable()
        try:
            run.submit("p")
            await quiet()

            assert [ids() for ids in made] == [None, None]
            assert failures(run) == [(0, 1, "refused"), (1, 1, "refused")]
        finally:
            gc.enable()


@virtual
async def test_a_session_is_not_collected_as_garbage_while_it_waits(loop):
    async def alone(ctx):
        await asyncio.get_running_loop().create_future()

    async with opened(loop, session=alone) as run:
        group = run.submit("p")
        await quiet()
        for _ in range(3):
            gc.collect()
            await quiet()

        assert group.phase == "running"
        run.cancel(group.id)
        await quiet()
        assert group.phase == "evicted"
