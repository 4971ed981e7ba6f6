"""The rollout: cancelling and requeueing groups, its own death, what it admits, and the end of a run."""

import asyncio
import gc
import math
import time
import weakref
from typing import Any

import anyio
import pytest

from groupstate import Capacity, PerBatch, Prompt, RetryableError, Rules, SessionContext, Slots, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.engines.port import SamplingParams
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import (
    BadSettings,
    DuplicateGroup,
    EngineDied,
    EngineError,
    EvictionStreak,
    IllegalTransition,
    LogFailed,
    NotEnoughGroups,
    RolloutDied,
    RunIsClosed,
    SourceFailed,
    UnknownGroup,
    WeightVersionError,
)
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.rollout import Rollout
from groupstate.runtime.sources import FunctionSource
from groupstate.simulate.faults import Fault, FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import (
    check,
    ended,
    endless,
    events,
    failing,
    finish,
    half_right,
    opened,
    quiet,
    ready,
    returning,
    started,
    virtual,
)

# Giving a group up -----------------------------------------------------------------------------------


def failures(run) -> list[tuple[int, int, str]]:
    return [(event.session, event.attempt, event.failure) for event in events(run, ev.SessionFailed)]


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


# Requeue ---------------------------------------------------------------------------------------------


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


# The rollout's death ---------------------------------------------------------------------------------


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


# Admission -------------------------------------------------------------------------------------------


class Counting:
    """A session that takes a second, and the most groups that were in flight at once."""

    def __init__(self) -> None:
        self.run: Any = None
        self.most_in_flight = 0
        self.most_open = 0

    async def __call__(self, ctx) -> Trajectory:
        book = self.run.book
        self.most_in_flight = max(self.most_in_flight, book.in_flight_count())
        self.most_open = max(self.most_open, book.in_flight_count() + book.ready_count())
        await anyio.sleep(1 + ctx.session)
        return Trajectory(reward=float(ctx.session))


async def counted(loop, rules: Rules, *, sizes: list[int]) -> Counting:
    counting = Counting()
    async with opened(loop, rules=rules, source=range(1000), session=counting, group_size=2) as run:
        counting.run = run
        for size in sizes:
            await run.commit(await run.sample(size))
    return counting


@virtual
async def test_per_batch_keeps_one_batch_ahead_of_what_is_waited_for(loop):
    counting = await counted(loop, Rules(batch_size=4), sizes=[4] * 5)

    assert counting.most_open == 8


@virtual
async def test_a_trainer_that_does_not_sample_is_not_run_ahead_of(loop):
    async with opened(loop, rules=Rules(batch_size=4), source=range(1000), session=half_right) as run:
        await anyio.sleep(3600)

        assert run.book.totals["submitted"] == 4


@virtual
async def test_warmup_says_how_many_batches_are_ahead(loop):
    rules = Rules(batch_size=4, admission=PerBatch(warmup=2))
    async with opened(loop, rules=rules, source=range(1000), session=half_right) as run:
        await anyio.sleep(60)
        assert run.book.totals["submitted"] == 8

        await run.sample(4)
        await quiet()

        assert run.book.totals["submitted"] == 12


@virtual
async def test_without_warmup_nothing_starts_before_somebody_waits(loop):
    rules = Rules(batch_size=4, admission=PerBatch(warmup=0))
    async with opened(loop, rules=rules, source=range(1000), session=half_right) as run:
        await anyio.sleep(60)
        assert run.book.totals["submitted"] == 0

        await run.sample(3)

        assert run.book.totals["submitted"] == 3


@virtual
async def test_slots_bound_what_is_in_flight(loop):
    counting = await counted(loop, Rules(admission=Slots(n=3)), sizes=[1] * 10)

    assert counting.most_in_flight == 3


@virtual
async def test_slots_bound_what_is_in_flight_for_a_batch_that_is_larger(loop):
    counting = await counted(loop, Rules(admission=Slots(n=2, ready_max=6)), sizes=[8, 8])

    assert counting.most_in_flight == 2


@virtual
async def test_ready_max_bounds_what_is_sampleable_and_in_flight_together(loop):
    async with opened(
        loop, rules=Rules(admission=Slots(n=2, ready_max=3)), source=range(1000), session=half_right
    ) as run:
        await anyio.sleep(600)

        assert (run.sampleable_count(), run.book.in_flight_count()) == (5, 0)


@virtual
async def test_capacity_admits_what_can_still_be_sampled_fresh_enough(loop):
    rules = Rules(batch_size=4, lag_max=1, admission=Capacity(lag_max=1))
    async with opened(loop, rules=rules, source=range(1000), session=half_right) as run:
        await anyio.sleep(60)
        assert run.book.totals["submitted"] == 8

        await run.commit(await run.sample(4))
        await anyio.sleep(60)
        assert run.book.totals["submitted"] == 8

        await run.publish_weights(1)
        await anyio.sleep(60)
        assert run.book.totals["submitted"] == 12


@virtual
async def test_capacity_after_reopening_is_that_of_a_run_that_went_on(loop, tmp_path):
    rules = Rules(batch_size=4, admission=Capacity(lag_max=1))
    async with opened(loop, tmp_path / "run", rules=rules, source=range(1000), session=half_right) as run:
        for version in range(1, 11):
            await run.commit(await run.sample(4))
            await run.publish_weights(version)
        await run.close()

    async with opened(loop, tmp_path / "run", rules=rules, source=range(1000), session=endless) as run:
        await anyio.sleep(60)

        assert run.book.in_flight_count() + run.sampleable_count() == 8


@virtual
async def test_evicted_groups_are_replaced_at_once_and_no_further(loop):
    async def flat_at_first(ctx):
        await anyio.sleep(1)
        return Trajectory(reward=1.0 if ctx.prompt.content < 3 else float(ctx.session))

    rules = Rules(filter_metric="reward", admission=Slots(n=3))
    async with opened(loop, rules=rules, source=range(1000), session=flat_at_first, group_size=2) as run:
        await anyio.sleep(1.5)

        assert [event.source_position for event in events(run, ev.GroupSubmitted) if event.cause == "refill"] == [
            3,
            4,
            5,
        ]
        assert run.book.in_flight_count() == 3


@virtual
async def test_a_refill_has_as_many_sessions_as_the_group_it_replaces(loop):
    rules = Rules(filter_metric="reward", admission=PerBatch(warmup=0))
    async with opened(loop, rules=rules, source=range(9), group_size=2) as run:
        finish(run.submit("p", n=5), *[1.0] * 5)

        assert [(event.cause, event.size) for event in events(run, ev.GroupSubmitted)] == [("submit", 5), ("refill", 5)]


@virtual
async def test_sync_refills_never_take_in_flight_past_their_bound(loop):
    most = 0

    async def flat_half_the_time(ctx):
        nonlocal most
        most = max(most, run.book.in_flight_count())
        await anyio.sleep(1 + ctx.prompt.content % 3)
        return Trajectory(reward=1.0 if ctx.prompt.content % 2 else float(ctx.session))

    rules = Rules(mode="sync", batch_size=4, filter_metric="reward")
    async with opened(loop, rules=rules, source=range(1000), session=flat_half_the_time, group_size=2) as run:
        for _ in range(5):
            assert len(await run.sample(4)) == 4
            assert len(run.book.credits) == 0
            assert run.book.in_flight_count() == 0

    assert most == 4


@virtual
async def test_a_source_that_ends_in_the_middle_of_a_batch_ends_the_wait(loop):
    async with opened(loop, source=range(5), session=half_right) as run:
        assert len(await run.sample(3)) == 3
        with pytest.raises(NotEnoughGroups):
            await run.sample(3)

        assert len(await run.sample(2)) == 2
        assert [event.position for event in events(run, ev.SourceExhausted)] == [5]


@virtual
async def test_a_source_that_ends_in_the_middle_of_refills_forfeits_the_rest(loop):
    rules = Rules(mode="sync", batch_size=2, filter_metric="reward")
    async with opened(loop, source=["r1"], rules=rules) as run:
        groups = [run.submit("p", n=2), run.submit("q", n=2)]
        waiting = started(run.sample(2))
        await quiet()
        for group in groups:
            finish(group, 1.0, 1.0)

        with pytest.raises(NotEnoughGroups):
            await waiting

        assert [event.cause for event in events(run, ev.GroupSubmitted)] == ["submit", "submit", "refill"]
        assert sum(event.count for event in events(run, ev.RefillForfeited)) == 3


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
async def test_the_users_own_groups_run_beside_those_of_the_source(loop):
    async with opened(loop, source=["from the source"], session=half_right) as run:
        run.submit("mine")

        batch = await run.sample(2)

        assert sorted(group.prompt.content for group in batch.groups) == ["from the source", "mine"]


@virtual
async def test_admission_is_held_while_a_sampler_waits_for_a_stale_group(loop):
    async def slow_first(ctx):
        await anyio.sleep(100 if ctx.prompt.content == 0 else 1)
        return Trajectory(reward=1.0)

    async with opened(
        loop, rules=Rules(lag_max=1, on_stale="wait", batch_size=2), source=range(100), session=slow_first
    ) as run:
        await anyio.sleep(2)
        await run.publish_weights(1)
        waiting = started(run.sample(1))
        await anyio.sleep(10)
        submitted = run.book.totals["submitted"]
        await anyio.sleep(50)

        assert not waiting.done()
        assert run.book.totals["submitted"] == submitted == 2
        assert len(await waiting) == 1
        assert [event.reason for event in events(run, ev.AdmissionHeld)] == [
            "a group in flight is at the lag bound",
            "",
        ]


@virtual
async def test_a_shortage_is_not_drawn_either_while_a_sampler_waits_for_a_stale_group(loop):
    async with opened(loop, rules=Rules(lag_max=1, on_stale="wait"), source=range(100)) as run:
        slow = run.submit("slow")
        slow.start(0)
        await run.publish_weights(1)
        waiting = started(run.sample(3))
        await quiet()
        assert run.book.totals["submitted"] == 1

        run.ledger.finish(slow.id, 0, 1, Trajectory(reward=1.0))
        await quiet()

        assert run.book.totals["submitted"] == 3
        for group in run.pending():
            finish(group, 1.0)
        assert len(await waiting) == 3


@virtual
async def test_a_running_group_is_not_evicted_however_stale_it_gets(loop):
    async with opened(loop, rules=Rules(lag_max=2), session=half_right) as run:
        group = run.submit("p")
        await quiet()
        await run.publish_weights(9)
        assert (group.phase, run.book.totals["evicted"]) == ("running", 0)

        await anyio.sleep(2)

        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("stale",)]


@virtual
async def test_sessions_go_on_when_weights_are_published(loop):
    async with opened(loop, session=half_right, group_size=16) as run:
        run.submit("p")
        await quiet()
        await run.publish_weights(1)

        batch = await run.sample(1)

        assert len(batch.rows) == 16
        assert batch.groups[0].weight_version == 0


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


def test_the_same_run_writes_the_same_log():
    async def drive(loop):
        async def session(ctx):
            await anyio.sleep(1 + (ctx.session * 7 + ctx.prompt.content) % 5)
            if ctx.prompt.content % 4 == 3:
                raise ValueError("no")
            return Trajectory(reward=float(ctx.session % 2) if ctx.prompt.content % 3 else 1.0)

        rules = Rules(filter_metric="reward", lag_max=1)
        async with opened(loop, rules=rules, source=range(200), session=session, group_size=4) as run:
            for step in range(6):
                batch = await run.sample(3, weight_version=step)
                for group in list(run.book.in_phase("running"))[:2]:
                    run.cancel(group.group_id)
                await run.commit(batch)
            for group in list(run.book.in_phase("running"))[:1]:
                run.requeue(group.group_id)
            await anyio.sleep(2)
        return list(run.ledger.log.read())

    first, *others = [run_virtual(drive) for _ in range(4)]

    assert all(other == first for other in others)


# Weights ---------------------------------------------------------------------------------------------


@virtual
async def test_weights_reach_the_engine_before_their_version_is_current(loop):
    engine = ScriptedEngine([])
    async with opened(loop, session=half_right, engine=engine) as run:
        await run.publish_weights(1, {"w": 1.0})

        assert engine.published == [(1, {"w": 1.0})]
        assert run.weight_version == 1


@virtual
async def test_weights_that_the_engine_refuses_are_not_published(loop):
    engine = ScriptedEngine([], fits=lambda weights: False)
    async with opened(loop, session=half_right, engine=engine) as run:
        with pytest.raises(EngineError, match="don't fit"):
            await run.publish_weights(1, {"w": 1.0})

        assert run.weight_version == 0


@virtual
async def test_a_lower_version_is_refused_before_the_engine_sees_it(loop):
    engine = ScriptedEngine([])
    async with opened(loop, session=half_right, engine=engine, weight_version=3) as run:
        with pytest.raises(WeightVersionError):
            await run.publish_weights(2, {"w": 1.0})

        assert engine.published == []


@virtual
async def test_of_two_publications_at_once_the_engine_and_the_run_end_with_the_same(loop):
    class Slow(ScriptedEngine):
        async def publish_weights(self, weights, weight_version):
            await anyio.sleep(10 if weight_version == 1 else 1)
            await super().publish_weights(weights, weight_version)

    engine = Slow([])
    async with opened(loop, session=half_right, engine=engine) as run:
        await asyncio.gather(run.publish_weights(1, {"w": 1}), run.publish_weights(2, {"w": 2}), return_exceptions=True)

        assert engine.published[-1] == (2, {"w": 2})
        assert run.weight_version == engine.weight_version == 2


@virtual
async def test_weights_without_an_engine_are_refused(loop):
    async with opened(loop) as run:
        with pytest.raises(BadSettings, match="no engine"):
            await run.publish_weights(1, {"w": 1.0})


# The end of a run ------------------------------------------------------------------------------------


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


# Errors and cancellations through open_run ------------------------------------------------------------


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
async def test_ids_that_are_made_avoid_those_that_are_taken(loop):
    async with opened(loop) as run:
        run.submit("p", group_id="g2")

        assert [run.submit("p").id, run.submit("p").id] == ["g3", "g4"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"grace_s": -1.0}, "grace_s is -1.0"),
        ({"grace_s": float("nan")}, "grace_s is nan"),
        ({"cancel_grace_s": -1.0}, "cancel_grace_s is -1.0"),
        ({"cancel_grace_s": float("nan")}, "cancel_grace_s is nan"),
    ],
)
@virtual
async def test_settings_that_make_no_sense_are_refused_and_the_log_is_closed(loop, options, shown):
    log = MemoryLog()

    with pytest.raises(BadSettings, match=shown):
        async with opened(loop, log=log, **options):
            pass

    assert "closed" in repr(log)


async def test_what_could_not_be_kept_is_told_at_the_end_of_the_block():
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk)
    with pytest.raises(LogFailed, match="planned"):
        async with open_run(log=log) as run:
            await run.checkpoint()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            run.submit("important")

    assert disk.locks_held == set()


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


@virtual
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_source_of_failing_prompts_is_not_drawn_without_end(loop, mode):
    rules = Rules(mode=mode, batch_size=2, admission=PerBatch(warmup=1))
    async with opened(loop, rules=rules, source=range(10_000), session=failing(ValueError("no"))) as run:
        await anyio.sleep(3600)
        drawn = run.book.totals["submitted"]
        with pytest.raises(EvictionStreak):
            await run.sample(2)

        assert drawn <= 2 * 8 * 2
        assert run.book.totals["submitted"] < 100


@virtual
async def test_who_samples_again_after_a_streak_means_to_go_on(loop):
    good = 60

    async def session(ctx):
        await anyio.sleep(1)
        return Trajectory(reward=float(ctx.session % 2)) if ctx.prompt.content >= good else None

    async with opened(loop, rules=Rules(batch_size=2), source=range(10_000), session=session) as run:
        told = 0
        while True:
            try:
                batch = await run.sample(2)
                break
            except EvictionStreak:
                told += 1

        assert told == 3
        assert all(group.prompt.content >= good for group in batch.groups)


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


# Many groups -----------------------------------------------------------------------------------------


async def test_taking_up_what_is_pending_costs_in_proportion_to_it():
    async def taken_up(count: int) -> float:
        """Seconds of this thread in which a rollout takes over `count` groups that were pending before it."""
        ledger = Ledger(MemoryLog(), Rules())
        controller = Controller(ledger, None, group_size=1)
        controller.closing = True
        for number in range(count):
            ledger.record(ev.GroupSubmitted(f"g{number}", 1, ev.TRAIN, 0, 1, "submit"))
        rollout = Rollout(controller, endless, engine=None, params=SamplingParams(), cancel_grace_s=1.0)
        with anyio.move_on_after(0):
            begin = time.thread_time()
            try:
                await rollout.run()
            finally:
                spent = time.thread_time() - begin
        return spent

    few = min([await taken_up(1_000) for _ in range(3)])

    assert min([await taken_up(10_000) for _ in range(3)]) < 40 * few


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


@virtual
async def test_two_groups_of_one_text_are_judged_apart(loop):
    """Each is all right or all wrong; taken for one they would have a spread."""
    async with opened(loop, rules=Rules(filter_metric="reward")) as run:
        for group_id, reward in (("u1", 0.0), ("u2", 1.0)):
            group = run.submit("the same text", n=2, group_id=group_id)
            for session in range(2):
                group.start(session).finish(Trajectory(reward=reward))

        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["u1", "u2"]
        assert run.sampleable_count() == 0
