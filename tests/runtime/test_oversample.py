"""Groups that start more sessions than they need, groups that are lost, and groups that start over: in real runs."""

import asyncio

import anyio
import pytest

from groupstate import Prompt, RetryableError, Rules, Trajectory
from groupstate.core import events as ev
from groupstate.core.prompt import GROUP_SIZE_MAX
from groupstate.errors import BadInput, BadSettings
from groupstate.runtime.ledger import SPARE
from groupstate.testing.notation import play
from tests.runtime.scenes import endless, events, finish, killed, opened, quiet, virtual

ONE_MORE = Rules(oversample=1)
DOOMED = Rules(cancel_doomed=True, lag_max=0)


def ends(run) -> list[tuple[int, str]]:
    """(session, how it ended), in order."""
    return [
        (event.session, "finished" if isinstance(event, ev.SessionFinished) else event.failure)
        for event in events(run, ev.SessionFinished, ev.SessionFailed)
    ]


def taking(*seconds: float):
    """Each session takes its own time."""

    async def session(ctx):
        await anyio.sleep(seconds[ctx.session])
        return Trajectory(reward=float(ctx.session))

    return session


# Sessions to spare -----------------------------------------------------------------------------------


@virtual
async def test_the_last_to_finish_are_cancelled_once_the_group_has_enough(loop):
    async with opened(loop, rules=Rules(oversample=2), session=taking(3, 9, 1, 9), group_size=2) as run:
        run.submit("p")
        batch = await run.sample(1)

        assert loop.time() == 3
        assert ends(run) == [(2, "finished"), (0, "finished"), (1, "spare"), (3, "spare")]
        assert {e.message for e in events(run, ev.SessionFailed)} == {SPARE.message}
        (group,) = batch.groups
        assert (group.size, group.phase, group.partial) == (2, "finished", False)
        assert [number for number, _ in group.sessions] == [0, 2]
        assert [event.size for event in events(run, ev.GroupSubmitted)] == [4]


@virtual
async def test_the_group_is_terminal_only_after_the_spare_sessions_have_ended(loop):
    async def session(ctx):
        if ctx.session < 2:
            await anyio.sleep(1)
            return Trajectory(reward=1.0)
        try:
            await anyio.sleep_forever()
        finally:
            await asyncio.sleep(3)

    async with opened(loop, rules=ONE_MORE, session=session, group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(2)
        before = group.phase
        await anyio.sleep(3)

        assert (before, group.phase) == ("running", "finished")


@virtual
async def test_of_sessions_that_finish_together_only_as_many_as_are_needed_count(loop):
    async with opened(loop, rules=Rules(oversample=2), session=taking(1, 1, 1, 1), group_size=2) as run:
        run.submit("p")
        (group,) = (await run.sample(1)).groups

        assert len(group.sessions) == 2
        assert sorted(kind for _, kind in ends(run)) == ["finished", "finished", "spare", "spare"]


@virtual
async def test_a_late_finisher_is_recorded_as_spare_and_told(loop):
    async with opened(loop, rules=Rules(oversample=2), group_size=1) as run:
        group = run.submit("p")
        attempts = [group.start(number) for number in range(2)]

        assert group.size == 3
        assert attempts[1].finish(Trajectory(reward=1.0)) is True
        assert attempts[0].cancelled
        assert attempts[0].finish(Trajectory(reward=0.0)) is False
        assert ends(run) == [(1, "finished"), (0, "spare"), (2, "spare")]
        assert group.phase == "finished"


@virtual
async def test_a_result_that_comes_before_the_spare_sessions_are_ended_is_recorded_as_spare(loop):
    async with opened(loop, rules=ONE_MORE, session=endless, group_size=1) as run:
        group = run.submit("p")
        await quiet()
        first = run.ledger.finish(group.id, 0, 1, Trajectory(reward=1.0))
        second = run.ledger.finish(group.id, 1, 1, Trajectory(reward=1.0))

        assert (first, second) == (None, "settled")
        assert ends(run) == [(0, "finished"), (1, "spare")]


@pytest.mark.parametrize(
    ("broken", "survivors_min", "phase", "partial"),
    [(1, None, "finished", False), (2, None, "evicted", False), (2, 1, "finished", True), (3, 1, "evicted", False)],
)
@virtual
async def test_failures_are_tolerated_up_to_the_sessions_to_spare(loop, broken, survivors_min, phase, partial):
    async def session(ctx):
        await anyio.sleep(1 + ctx.session)
        if ctx.session < broken:
            raise ValueError("no")
        return Trajectory(reward=1.0)

    rules = Rules(oversample=1, survivors_min=survivors_min)
    async with opened(loop, rules=rules, session=session, group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(9)

        assert group.phase == phase
        assert [event.partial for event in events(run, ev.GroupFinished)] == ([partial] if phase == "finished" else [])


@virtual
async def test_a_retry_that_is_due_is_cancelled_too(loop):
    async def session(ctx):
        await anyio.sleep(1)
        if ctx.session == 0:
            raise RetryableError("busy")
        await anyio.sleep(1)
        return Trajectory(reward=1.0)

    rules = Rules(oversample=1, attempts_max=3, retry_delay_s=100)
    async with opened(loop, rules=rules, session=session, group_size=1) as run:
        group = run.submit("p")
        await anyio.sleep(3)

        assert ends(run) == [(0, "error"), (1, "finished"), (0, "spare")]
        assert (group.phase, run._rollout.busy) == ("finished", False)


def test_a_failure_after_the_group_is_full_is_not_tried_again():
    rules = Rules(oversample=1, attempts_max=3)
    story = play("submit a/1", "start a", "finish a.0 acc=1", "fail a.1 retryable", rules=rules, controlled=False)

    assert story.phase("a") == "finished"


@virtual
async def test_a_refill_needs_as_many_and_gets_as_many_to_spare(loop):
    async with opened(loop, rules=ONE_MORE, source=[Prompt("r", group_id="r")], group_size=9) as run:
        group = run.submit("p", n=3)
        run.cancel(group.id)
        refill = run.book.groups["r"]

        assert (refill.size, refill.needed) == (4, 3)


@virtual
async def test_validation_has_none_to_spare(loop):
    async with opened(loop, rules=ONE_MORE, session=taking(1, 1), group_size=2) as run:
        batch = await run.validate(["v"])

        assert [len(group.sessions) for group in batch.groups] == [2]
        assert [event.oversample for event in events(run, ev.GroupSubmitted)] == [0]


@virtual
async def test_it_is_as_it_was_in_a_run_that_is_opened_again(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=ONE_MORE, group_size=1) as run:
        run.submit("p", group_id="g").start(0).fail("no")
        left = killed(tmp_path / "run")
    async with opened(loop, left, rules=Rules()) as run:
        (group,) = run.pending()
        group.start(0).finish(Trajectory(reward=1.0))

        assert (group.size, group.phase) == (2, "finished")


@virtual
async def test_a_group_may_not_have_too_many_sessions_in_all(loop):
    with pytest.raises(BadSettings, match=f"group_size {GROUP_SIZE_MAX} and oversample 1 make more than"):
        async with opened(loop, rules=ONE_MORE, group_size=GROUP_SIZE_MAX):
            pass
    async with opened(loop, rules=ONE_MORE, group_size=GROUP_SIZE_MAX - 1) as run:
        with pytest.raises(BadInput, match=f"would have {GROUP_SIZE_MAX + 1} sessions; it may have {GROUP_SIZE_MAX}"):
            run.submit("p", n=GROUP_SIZE_MAX)
        assert run.submit("p").size == GROUP_SIZE_MAX


@virtual
async def test_groups_of_one_session_that_the_rules_throw_away_every_time_are_refused(loop):
    rules = Rules(filter_metric="reward", on_singleton="evict")
    with pytest.raises(BadSettings, match="so no batch could ever come; make group_size at least 2"):
        async with opened(loop, rules=rules, group_size=1):
            pass
    async with opened(loop, rules=rules, group_size=2) as run:
        assert run.submit("p").size == 2


# Groups that are lost --------------------------------------------------------------------------------


@virtual
async def test_a_new_version_cancels_the_sessions_of_the_groups_that_it_makes_stale(loop):
    async with opened(loop, rules=DOOMED, session=endless, group_size=2) as run:
        group = run.submit("p")
        await quiet()
        await run.publish_weights(1)
        before = group.phase
        await quiet()

        assert (before, group.phase) == ("running", "evicted")
        assert ends(run) == [(0, "cancelled"), (1, "cancelled")]
        assert [(e.reasons, e.credit) for e in events(run, ev.GroupEvicted)] == [(("cancelled", "stale"), 1)]


@virtual
async def test_a_group_that_is_being_cancelled_is_not_cancelled_again(loop):
    async def slow_to_end(ctx):
        try:
            await anyio.sleep_forever()
        finally:
            await asyncio.sleep(3)

    async with opened(loop, rules=DOOMED, session=slow_to_end) as run:
        group = run.submit("p")
        await quiet()
        await run.publish_weights(1)
        await run.publish_weights(2)
        await anyio.sleep(4)

        assert (group.phase, ends(run)) == ("evicted", [(0, "cancelled")])


@virtual
async def test_a_failure_that_can_not_be_made_up_for_cancels_the_siblings(loop):
    async def session(ctx):
        await anyio.sleep(1)
        if ctx.session == 0:
            raise ValueError("no")
        await anyio.sleep_forever()

    async with opened(loop, rules=DOOMED, session=session, group_size=3) as run:
        group = run.submit("p")
        await anyio.sleep(2)

        assert group.phase == "evicted"
        assert ends(run) == [(0, "error"), (1, "cancelled"), (2, "cancelled")]


@pytest.mark.parametrize("session", [None, endless], ids=["dispatched outside", "rollout"])
@virtual
async def test_a_group_that_is_too_old_when_it_is_submitted_is_given_back_as_evicted(loop, session):
    async with opened(loop, rules=DOOMED, session=session, weight_version=3) as run:
        group = run.submit("p", weight_version=1)

        assert (group.size, group.phase) == (1, "evicted")


# Groups that start over ------------------------------------------------------------------------------


@virtual
async def test_a_failed_group_is_run_again_with_the_same_prompt(loop):
    seen = []

    async def session(ctx):
        seen.append((ctx.attempt, ctx.prompt.content, ctx.prompt.extra))
        await anyio.sleep(1)
        if ctx.attempt < 3:
            raise ValueError("no")
        return Trajectory(reward=1.0)

    async with opened(loop, rules=Rules(requeues_max=2), session=session) as run:
        run.submit(Prompt("p", extra={"answer": 4}))
        batch = await run.sample(1)

        assert seen == [(attempt, "p", {"answer": 4}) for attempt in (1, 2, 3)]
        assert batch.metrics["training/groups/requeued"] == 2.0
        assert not events(run, ev.ResultFenced)


@pytest.mark.parametrize("more", [{}, {"cancel_doomed": True}, {"requeues_max": 1}], ids=str)
@virtual
async def test_a_group_whose_prompt_can_not_be_read_is_damaged_whatever_the_rules(loop, tmp_path, more):
    async with opened(loop, tmp_path / "run", rules=Rules(**more), group_size=2) as run:
        run.submit("p", group_id="g")
    for path in (tmp_path / "run").rglob("*.pay"):
        path.write_bytes(b"\0" * path.stat().st_size)
    async with opened(loop, tmp_path / "run", session=endless, group_size=2) as run:
        await quiet()

        assert run.book.departed.get("g") == "evicted"
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("damaged",)]
        assert not events(run, ev.ResultFenced)


@virtual
async def test_finished_groups_are_not_touched_by_any_of_it(loop):
    rules = Rules(oversample=1, cancel_doomed=True, requeues_max=1, group_deadline_s=5)
    async with opened(loop, rules=rules, group_size=1) as run:
        group = run.submit("p")
        finish(group, 1.0)
        await anyio.sleep(9)

        assert group.phase == "finished"
