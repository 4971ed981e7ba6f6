"""Deadlines of sessions and of groups, in virtual time."""

import asyncio

import anyio
import pytest

from groupstate import RetryableError, Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import EngineDied, LogFailed, RolloutDied
from groupstate.log.file import FileLog
from groupstate.runtime import deadlines
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import endless, events, finish, half_right, opened, quiet, started, virtual

SESSION = Rules(session_deadline_s=10)
GROUP = Rules(group_deadline_s=10)
TWICE = Rules(session_deadline_s=10, attempts_max=2, retry_delay_s=1)


def failures(run) -> list[tuple[int, int, str, str]]:
    return [(e.session, e.attempt, e.failure, e.message) for e in events(run, ev.SessionFailed)]


def kinds(run) -> list[tuple[int, int, str]]:
    return [failure[:3] for failure in failures(run)]


def fenced(run) -> list[str]:
    return [event.reason for event in events(run, ev.ResultFenced)]


def stubborn(until_s: float, result: object = None):
    """A session that ignores its cancellations, and ends when its time has come."""

    async def session(ctx):
        loop = asyncio.get_running_loop()
        end = loop.time() + until_s
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                pass
        if isinstance(result, BaseException):
            raise result
        return result or Trajectory(reward=1.0)

    return session


def taking(seconds: float):
    """A session that takes its time, and ends at once when it is cancelled."""

    async def session(ctx):
        await anyio.sleep(seconds)
        return Trajectory(reward=1.0)

    return session


# Sessions that the caller dispatches -----------------------------------------------------------------


@virtual
async def test_an_attempt_that_takes_too_long_has_timed_out(loop):
    async with opened(loop, rules=SESSION, group_size=2) as run:
        group = run.submit("p")
        attempt = group.start(0)
        await anyio.sleep(9.9)
        before = (kinds(run), attempt.cancelled)
        await anyio.sleep(0.2)

        assert before == ([], False)
        assert failures(run) == [(0, 1, "timeout", "no result within session_deadline_s 10")]
        assert attempt.cancelled
        assert attempt.finish(Trajectory(reward=1.0)) is False
        assert (fenced(run), group.phase) == (["settled"], "running")


@virtual
async def test_each_attempt_has_its_own_time(loop):
    async with opened(loop, rules=TWICE) as run:
        group = run.submit("p")
        group.start(0)
        await anyio.sleep(11)
        assert [event.retry_in_s for event in events(run, ev.SessionFailed)] == [1.0]
        second = group.start(0)
        await anyio.sleep(9)
        in_time = kinds(run)
        await anyio.sleep(2)

        assert second.number == 2
        assert in_time == [(0, 1, "timeout")]
        assert kinds(run) == [(0, 1, "timeout"), (0, 2, "timeout")]
        assert group.phase == "evicted"


@pytest.mark.parametrize("end", ["finish", "fail", "requeue", "cancel"])
@virtual
async def test_what_has_ended_before_is_left_alone(loop, end):
    async with opened(loop, rules=SESSION, group_size=2) as run:
        group = run.submit("p")
        attempt = group.start(0)
        await anyio.sleep(5)
        if end == "finish":
            attempt.finish(Trajectory(reward=1.0))
        elif end == "fail":
            attempt.fail("broken")
        elif end == "requeue":
            run.requeue(group.id)
        else:
            run.cancel(group.id)
        await anyio.sleep(20)

        assert "timeout" not in [kind for _, _, kind in kinds(run)]


@virtual
async def test_validation_attempts_have_deadlines_too(loop):
    async with opened(loop, rules=SESSION) as run:
        run.submit("p", partition="val").start(0)
        await anyio.sleep(11)

        assert kinds(run) == [(0, 1, "timeout")]
        assert run.sampleable_count("val") == 1


@virtual
async def test_what_is_no_longer_due_is_forgotten_and_what_is_due_stays(loop, monkeypatch):
    monkeypatch.setattr(deadlines, "SWEEP_AT", 12)
    rules = Rules(session_deadline_s=20, group_deadline_s=30, attempts_max=2, requeues_max=1)
    async with opened(loop, rules=rules, group_size=2) as run:
        hung = run.submit("hung")
        hung.start(0).finish(Trajectory(reward=1.0))
        hung.start(1)
        again = run.submit("again")
        run.requeue(again.id)
        for _ in range(100):
            finish(run.submit("done"), 0.0, 1.0)
        kept = run.deadlines.watched
        await anyio.sleep(31)

        assert kept <= 12
        timeouts = [(event.group_id, event.session, event.attempt) for event in events(run, ev.SessionFailed)]
        assert timeouts == [(hung.id, 1, 1), (hung.id, 1, 2), (again.id, 0, 2), (again.id, 1, 2)]


# Sessions that a rollout runs ------------------------------------------------------------------------


@virtual
async def test_a_session_that_takes_too_long_is_cancelled_and_has_timed_out(loop):
    cancelled_at = []

    async def session(ctx):
        try:
            await anyio.sleep_forever()
        finally:
            cancelled_at.append(loop.time())

    async with opened(loop, rules=SESSION, session=session) as run:
        run.submit("p")
        await anyio.sleep(11)

        assert cancelled_at == [10]
        assert failures(run) == [(0, 1, "timeout", "no result within session_deadline_s 10")]


@pytest.mark.parametrize(("until_s", "taken"), [(9, True), (12, True), (14.9, True), (15.1, False)])
@virtual
async def test_a_result_within_the_grace_is_taken(loop, until_s, taken):
    async with opened(loop, rules=SESSION, session=stubborn(until_s), cancel_grace_s=5) as run:
        group = run.submit("p")
        await anyio.sleep(20)

        assert (group.phase == "finished") is taken
        assert kinds(run) == ([] if taken else [(0, 1, "timeout")])
        assert fenced(run) == ([] if taken else ["gone"])


@virtual
async def test_a_late_result_of_an_attempt_that_was_retried_is_fenced_by_the_attempt(loop):
    first = stubborn(17)

    async def session(ctx):
        return await first(ctx) if ctx.attempt == 1 else await half_right(ctx)

    async with opened(loop, rules=TWICE, session=session, cancel_grace_s=5) as run:
        group = run.submit("p")
        await anyio.sleep(30)

        assert kinds(run) == [(0, 1, "timeout")]
        assert (group.phase, len(fenced(run))) == ("finished", 1)


@pytest.mark.parametrize("error", [RetryableError("busy"), ValueError("broken")], ids=str)
@virtual
async def test_an_error_within_the_grace_is_a_timeout_and_is_tried_again(loop, error):
    async with opened(loop, rules=TWICE, session=stubborn(12, error)) as run:
        run.submit("p")
        await anyio.sleep(40)

        assert kinds(run) == [(0, 1, "timeout"), (0, 2, "timeout")]


@virtual
async def test_an_engine_that_dies_within_the_grace_still_ends_the_rollout(loop):
    with pytest.raises(RolloutDied, match="the engine is gone"):
        async with opened(loop, rules=SESSION, session=stubborn(12, EngineDied("the engine is gone"))) as run:
            run.submit("p")
            await run.sample(1)


@pytest.mark.parametrize(
    ("at", "phase", "ends"),
    [(5, "evicted", [(0, 1, "lost")]), (12, "finished", [])],
    ids=["before the deadline", "within the grace"],
)
@virtual
async def test_a_cancellation_from_outside_passes_through(loop, at, phase, ends):
    async with opened(loop, rules=SESSION, session=stubborn(13)) as run:
        group = run.submit("p")
        await anyio.sleep(at)
        run.cancel(group.id)
        await anyio.sleep(20)

        assert (group.phase, kinds(run)) == (phase, ends)
        assert not run._rollout.busy


@virtual
async def test_a_requeue_within_the_grace_starts_a_new_attempt_with_its_own_time(loop):
    async with opened(loop, rules=SESSION, session=endless, cancel_grace_s=5) as run:
        group = run.submit("p")
        await anyio.sleep(9)
        run.requeue(group.id)
        await anyio.sleep(9)
        before = kinds(run)
        await anyio.sleep(2)

        assert before == []
        assert kinds(run) == [(0, 2, "timeout")]


@virtual
async def test_a_session_past_its_deadline_may_end_while_the_run_closes(loop):
    async with opened(loop, rules=SESSION, session=taking(14), grace_s=20) as run:
        group = run.submit("p")
        await anyio.sleep(8)
        await run.close()

        assert (kinds(run), group.phase) == ([], "finished")


@virtual
async def test_what_is_cut_off_by_the_closing_starts_over_with_the_run(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=SESSION, session=endless, grace_s=5) as run:
        group = run.submit("p")
        await anyio.sleep(8)
        await run.close()

        assert (kinds(run), group.phase) == ([], "pending")


# Groups ----------------------------------------------------------------------------------------------


@virtual
async def test_a_group_that_nobody_runs_times_out(loop):
    async with opened(loop, rules=GROUP, group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(9.9)
        before = group.phase
        await anyio.sleep(0.2)
        text = "the group did not end within group_deadline_s 10"

        assert before == "pending"
        assert failures(run) == [(0, 1, "timeout", text), (1, 1, "timeout", text)]
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("empty",)]


@pytest.mark.parametrize(("survivors_min", "phase"), [(None, "evicted"), (1, "finished"), (2, "evicted")])
@virtual
async def test_what_has_finished_by_then_counts(loop, survivors_min, phase):
    async def session(ctx):
        await anyio.sleep(1 if ctx.session == 0 else 100)
        return Trajectory(reward=1.0)

    rules = Rules(group_deadline_s=10, survivors_min=survivors_min)
    async with opened(loop, rules=rules, session=session, group_size=3) as run:
        group = run.submit("p")
        await anyio.sleep(11)

        assert kinds(run) == [(1, 1, "timeout"), (2, 1, "timeout")]
        assert group.phase == phase


@virtual
async def test_a_retry_that_is_due_ends_with_the_group(loop):
    rules = Rules(group_deadline_s=10, attempts_max=9, retry_delay_s=100)
    async with opened(loop, rules=rules) as run:
        run.submit("p").start(0).fail(RetryableError("busy"))
        await anyio.sleep(11)

        assert kinds(run) == [(0, 1, "error"), (0, 2, "timeout")]


@virtual
async def test_a_requeue_begins_the_time_anew(loop):
    async with opened(loop, rules=GROUP) as run:
        group = run.submit("p")
        await anyio.sleep(9)
        run.requeue(group.id)
        await anyio.sleep(9)
        before = group.phase
        await anyio.sleep(2)

        assert (before, group.phase) == ("pending", "evicted")


@virtual
async def test_a_group_that_times_out_may_start_over(loop):
    async with opened(loop, rules=Rules(group_deadline_s=10, requeues_max=1), session=endless) as run:
        group = run.submit("p")
        await anyio.sleep(15)
        again = group.phase
        await anyio.sleep(10)

        assert (again, group.phase) == ("running", "evicted")
        assert kinds(run) == [(0, 1, "timeout"), (0, 2, "timeout")]


@virtual
async def test_a_group_that_ended_in_time_is_left_alone(loop):
    async with opened(loop, rules=GROUP) as run:
        group = run.submit("p")
        finish(group, 1.0)
        await anyio.sleep(20)

        assert group.phase == "finished"


@pytest.mark.parametrize("start", [False, True], ids=["pending", "running"])
@virtual
async def test_a_run_that_is_opened_again_gives_groups_their_time_anew(loop, tmp_path, start):
    async with opened(loop, tmp_path / "run", rules=GROUP) as run:
        group = run.submit("p", group_id="g")
        if start:
            group.start(0)
        await anyio.sleep(9)
    async with opened(loop, tmp_path / "run") as run:
        await anyio.sleep(9)
        before = str(run.book.groups["g"].phase)
        await anyio.sleep(2)

        assert (before, run.book.departed.get("g")) == ("pending", "evicted")


@virtual
async def test_validation_groups_time_out_and_are_sampled_so(loop):
    async with opened(loop, rules=GROUP, session=endless) as run:
        batch = await run.validate(["v"])

        assert [group.phase for group in batch.groups] == ["failure"]
        assert loop.time() == 10


@virtual
async def test_the_earliest_of_many_deadlines_comes_first(loop):
    async with opened(loop, rules=Rules(session_deadline_s=3, group_deadline_s=10), group_size=2) as run:
        run.submit("p", group_id="a")
        await anyio.sleep(1)
        run.submit("q", group_id="b").start(1)
        await anyio.sleep(8)
        early = [(e.group_id, e.session) for e in events(run, ev.SessionFailed)]
        await anyio.sleep(3)

        assert early == [("b", 1)]
        assert [(e.group_id, e.session) for e in events(run, ev.SessionFailed)][1:] == [("a", 0), ("a", 1), ("b", 0)]


# Around them -----------------------------------------------------------------------------------------


@virtual
async def test_no_group_times_out_while_the_run_closes(loop):
    async with opened(loop, rules=GROUP, session=taking(12), grace_s=20) as run:
        group = run.submit("p")
        await anyio.sleep(8)
        await run.close()

        assert (kinds(run), group.phase) == ([], "finished")


@virtual
async def test_without_a_deadline_nobody_keeps_time(loop):
    def timers() -> int:
        return sum("Deadlines.run" in task.get_name() for task in asyncio.all_tasks())

    async with opened(loop) as run:
        await quiet()
        assert (timers(), run.deadlines.needed) == (0, False)
    async with opened(loop, rules=GROUP) as run:
        await quiet()
        assert (timers(), run.deadlines.needed) == (1, True)


@virtual
async def test_a_wall_clock_that_jumps_decides_nothing(loop):
    jumps = iter(range(10**6))
    async with opened(
        loop,
        rules=Rules(session_deadline_s=10, group_deadline_s=10),
        clock_ns=lambda: next(jumps) * 10**15 % (7 * 10**17),
    ) as run:
        group = run.submit("p")
        group.start(0)
        await anyio.sleep(9.9)

        assert group.phase == "running"
        await anyio.sleep(0.2)
        assert group.phase == "evicted"


@virtual
async def test_an_expiry_that_can_not_be_written_reaches_the_sampler_as_the_logs_failure(loop):
    disk = FaultyDisk()
    log = FileLog.create("/run", disk=disk, durability="os", inline=True)
    with pytest.raises(LogFailed):
        async with open_run(log=log, rules=GROUP, group_size=1, clock_ns=loop.clock_ns) as run:
            run.submit("p")
            disk.fault = Fault(disk.operation_count + 1, once=False)
            waiting = started(run.sample(1))
            await anyio.sleep(20)
            await waiting


@pytest.mark.slow
@virtual
async def test_deadlines_of_what_has_ended_are_forgotten_long_before_they_pass(loop):
    async with opened(loop, rules=Rules(session_deadline_s=3600, group_deadline_s=7200)) as run:
        for number in range(1_500):
            group = run.submit("p", group_id=f"g{number}", n=1)
            group.start(0).fail("over")

        assert run.deadlines.watched <= 1_001
