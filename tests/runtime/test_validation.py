"""Validation rounds: how their sessions generate, and what is left of a round that was given up."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from groupstate import Prompt, Run, SamplingParams, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadInput, BadSettings, EngineDied, LogFailed, RolloutDied, RunIsClosed, SampleTimeout
from groupstate.log.file import FileLog
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import ended, endless, events, finish, half_right, killed, opened, quiet, started, virtual

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12, stop_token_ids=(2,))


class Asked:
    """A session that notes how it was asked to generate."""

    def __init__(self) -> None:
        self.params: dict[str, list[SamplingParams]] = {"train": [], "val": []}

    async def __call__(self, ctx: SessionContext) -> Trajectory:
        self.params["val" if ctx.prompt.content == "v" else "train"].append(ctx.params)
        await anyio.sleep(1)
        return Trajectory(reward=float(ctx.session % 2))


# How the sessions generate ---------------------------------------------------------------------------


@virtual
async def test_a_greedy_round_has_the_runs_params_at_temperature_0_and_one_session(loop):
    asked = Asked()
    async with opened(loop, session=asked, params=PARAMS, group_size=4) as run:
        batch = await run.validate([Prompt("v", n=3)], greedy=True)

    assert [group.size for group in batch.groups] == [1]
    assert asked.params["val"] == [SamplingParams(temperature=0.0, top_p=0.9, max_tokens=12, stop_token_ids=(2,))]


@virtual
async def test_a_greedy_round_has_more_sessions_where_they_are_asked_for(loop):
    async with opened(loop, session=half_right, group_size=4) as run:
        batch = await run.validate(["v"], n=2, greedy=True)

    assert [group.size for group in batch.groups] == [2]


@virtual
async def test_params_are_the_rounds_and_training_beside_it_keeps_its_own(loop):
    asked, own = Asked(), SamplingParams(temperature=0.1, max_tokens=3)
    async with opened(loop, session=asked, params=PARAMS, group_size=2) as run:
        run.submit("t")
        await run.validate(["v", "v"], params=own)
        run.submit("t")
        await run.validate(["v"])
        await run.sample(2)

    assert asked.params["val"] == [own] * 4 + [PARAMS] * 2
    assert asked.params["train"] == [PARAMS] * 4


@virtual
async def test_a_group_that_starts_over_generates_as_its_round_does(loop):
    asked = Asked()
    async with opened(loop, session=asked, params=PARAMS) as run:
        validating = started(run.validate(["v"], greedy=True))
        await anyio.sleep(0.5)
        run.requeue(next(run.book.in_phase("running")).group_id)
        await validating

        assert [params.temperature for params in asked.params["val"]] == [0.0, 0.0]
        assert not run._rollout.params_of


@virtual
async def test_params_reach_the_engine(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        return ctx.trajectory([1], await ctx.generate([1]), reward=1.0)

    engine = ScriptedEngine(lambda prompt_ids: [5] * 9)
    async with opened(loop, session=session, engine=engine) as run:
        batch = await run.validate(["v"], params=SamplingParams(max_tokens=2))

    assert len(batch.rows[0].trajectory.response_ids) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"greedy": True, "params": PARAMS}, "give one of the two"),
        ({"params": {"temperature": 0.0}}, "it must be SamplingParams"),
    ],
)
@virtual
async def test_what_contradicts_itself_is_refused_before_anything_is_submitted(loop, options, complaint):
    async with opened(loop, session=half_right) as run:
        with pytest.raises(BadSettings, match=complaint):
            await run.validate(["v"], **options)

        assert run.book.totals["submitted"] == 0


@pytest.mark.parametrize("options", [{"greedy": True}, {"params": PARAMS}])
@virtual
async def test_params_that_would_reach_nobody_are_refused(loop, options):
    async with opened(loop) as run:
        with pytest.raises(BadSettings, match="this run has no session function"):
            await run.validate(["v"], **options)


# A round that is given up ----------------------------------------------------------------------------


async def slow(ctx: SessionContext) -> Trajectory:
    """The prompt says for how long."""
    await anyio.sleep(ctx.prompt.content)
    return Trajectory(reward=1.0)


def left(run: Run) -> dict[str, int]:
    return {phase: len(list(run.book.in_phase(phase))) for phase in ("pending", "running", "finished", "failure")}


NOTHING = {"pending": 0, "running": 0, "finished": 0, "failure": 0}


@virtual
async def test_a_round_that_is_out_of_time_takes_its_groups_along(loop):
    async with opened(loop, session=slow, group_size=2) as run:
        with pytest.raises(SampleTimeout, match="1 of 2 groups are sampleable"):
            await run.validate([1, 100], timeout_s=5)

        assert left(run) == NOTHING
        assert loop.time() == pytest.approx(5)
        assert (run.book.totals["committed"], run.book.totals["evicted"]) == (2, 0)
        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"] * 2
        assert "validation round" in events(run, ev.SessionFailed)[0].message


@virtual
async def test_a_cancelled_round_takes_its_groups_along_whenever_it_is_cancelled(loop):
    for after_s in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5):
        async with opened(loop, session=slow) as run:
            validating = started(run.validate([1, 2]))
            await anyio.sleep(after_s)
            await ended(validating)

            assert left(run) == NOTHING, after_s
            assert run.book.totals["evicted"] == 0
            assert run.book.batches == {}


@virtual
async def test_other_rounds_and_training_go_on_beside_one_that_is_given_up(loop):
    async with opened(loop, session=slow) as run:
        run.submit(7)
        mine = run.submit(3, partition="val")
        other, given_up = started(run.validate([5, 6])), started(run.validate([4, 4]))
        await anyio.sleep(2)
        await ended(given_up)

        assert [group.prompt.content for group in (await other).groups] == [5, 6]
        assert (await run.sample(1)).groups[0].prompt.content == 7
        assert (await run.sample(1, partition="val")).group_ids == [mine.id]


@virtual
async def test_a_plain_sample_is_not_given_what_a_round_left(loop):
    async with opened(loop, session=slow) as run:
        plain = started(run.sample(1, partition="val"))
        await quiet()
        validating = started(run.validate([1, 100]))
        await anyio.sleep(5)
        await ended(validating)
        await quiet()

        assert not plain.done()
        mine = run.submit(1, partition="val")
        assert (await plain).group_ids == [mine.id]


@virtual
async def test_a_session_that_ignores_its_cancellation_holds_the_end_up_for_its_grace(loop):
    async def stubborn(ctx: SessionContext) -> Trajectory:
        with suppress(asyncio.CancelledError):
            await anyio.sleep(60)
        await anyio.sleep(60)
        return Trajectory(reward=1.0)

    async with opened(loop, session=stubborn, cancel_grace_s=3.0) as run:
        with pytest.raises(SampleTimeout):
            await run.validate(["v"], timeout_s=1)

        assert loop.time() == pytest.approx(4)
        assert left(run) == NOTHING
        assert [event.failure for event in events(run, ev.SessionFailed)] == ["lost"]
        await anyio.sleep(60)


@virtual
async def test_a_second_cancellation_waits_for_nothing_and_the_groups_leave_all_the_same(loop):
    async def stubborn(ctx: SessionContext) -> Trajectory:
        with suppress(asyncio.CancelledError):
            await anyio.sleep(60)
        await anyio.sleep(60)
        return Trajectory(reward=1.0)

    async with opened(loop, session=stubborn, cancel_grace_s=3.0) as run:
        validating = started(run.validate(["v"]))
        await anyio.sleep(1)
        validating.cancel()
        await anyio.sleep(1)
        await ended(validating)
        assert loop.time() == pytest.approx(2)
        await anyio.sleep(3)

        assert left(run) == NOTHING
        await anyio.sleep(60)


@virtual
async def test_sessions_dispatched_by_the_user_are_fenced_once_the_round_is_given_up(loop):
    async with opened(loop) as run:
        validating = started(run.validate(["v", "w"]))
        await quiet()
        done, open_ = run.pending()
        finish(done, 1.0)
        attempt = open_.start(0)
        await ended(validating)

        assert left(run) == NOTHING
        assert attempt.cancelled
        assert not attempt.finish(Trajectory(reward=1.0))


@virtual
async def test_a_round_of_a_run_that_closes_is_over_with_it(loop, tmp_path):
    for close in (True, False):
        path = tmp_path / f"run-{close}"
        async with opened(loop, path, session=endless if close else None) as run:
            validating = started(run.validate(["v"]))
            await quiet()
            if not close:
                run.pending()[0].start(0)
            await run.close()
            with pytest.raises(RunIsClosed):
                await validating

        async with opened(loop, path) as run:
            assert left(run) == NOTHING


@virtual
async def test_a_round_of_a_rollout_that_died_leaves_nothing_to_do_over(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        await anyio.sleep(1 if ctx.prompt.content == "dies" else 100)
        raise EngineDied("gone")

    async with opened(loop, session=session) as run:
        with pytest.raises(RolloutDied):
            await run.validate(["dies", "v"])

        assert left(run) == NOTHING


@virtual
async def test_a_group_that_starts_over_while_its_round_is_given_up_leaves_when_it_has_ended(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        if ctx.prompt.content == "stubborn":
            with suppress(asyncio.CancelledError):
                await anyio.sleep(60)
        await anyio.sleep(10)
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, cancel_grace_s=5.0) as run:
        validating = started(run.validate(["v", "stubborn"]))
        await anyio.sleep(1)
        validating.cancel()
        await quiet()
        (failed,) = run.book.in_phase("failure")
        run.requeue(failed.group_id)
        await asyncio.wait({validating})

        assert loop.time() == pytest.approx(11)
        assert left(run) == NOTHING


@virtual
async def test_a_round_whose_log_breaks_tells_so(loop):
    for sessions in (None, half_right):
        disk = FaultyDisk()
        log = FileLog.create("/runs/one", disk=disk, inline=True)
        with pytest.raises(LogFailed, match="planned"):
            async with open_run(log=log, session=sessions, clock_ns=loop.clock_ns) as run:
                disk.fault = Fault(disk.operation_count + 1, once=False)
                await run.validate(["a", "b", "c"])

        assert disk.locks_held == set()


@virtual
async def test_a_cancellation_of_a_round_is_not_replaced_by_a_broken_log(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed):
        async with open_run(log=log, clock_ns=loop.clock_ns) as run:
            validating = started(run.validate(["a"]))
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            with pytest.raises(LogFailed):
                run.submit("p")
                run.submit("p")
            validating.cancel()
            await asyncio.wait({validating})

            assert validating.cancelled()


@virtual
async def test_a_round_of_one_prompt_says_that_a_list_is_wanted(loop):
    async with opened(loop, session=half_right) as run:
        with pytest.raises(BadInput, match="'one prompt' is none by its name; if it is a prompt itself, give a list"):
            await run.validate("one prompt")


@virtual
async def test_a_round_that_cannot_be_submitted_whole_is_not_submitted(loop):
    async with opened(loop, session=half_right) as run:
        with pytest.raises(BadInput):
            await run.validate(["a", Prompt("b", n=0)])
        with pytest.raises(BadInput):
            await run.validate(["a", "b"], n=0)
        await quiet()

        assert left(run) == NOTHING


@virtual
async def test_what_a_round_left_is_not_in_the_metrics_of_the_next(loop):
    async with opened(loop, session=slow) as run:
        with pytest.raises(SampleTimeout):
            await run.validate([100], timeout_s=5)
        batch = await run.validate([1])

        assert batch.metrics["validation/groups/submitted"] == 1
        assert "validation/sessions/failed/cancelled" not in batch.metrics


@virtual
async def test_a_round_given_up_by_a_time_out_around_it_is_over_too(loop):
    async with opened(loop, session=slow) as run:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await run.validate([1, 100])
        await quiet()

        assert left(run) == NOTHING


# After a crash and a way back ------------------------------------------------------------------------


@virtual
async def test_what_a_killed_process_left_of_a_round_is_gone_once_the_run_is_opened_again(loop, tmp_path):
    async def session(ctx: SessionContext) -> Trajectory:
        await anyio.sleep(0 if ctx.prompt.content == "ends" else 100)
        return Trajectory(reward=1.0)

    async with opened(loop, tmp_path / "run", session=session, group_size=2) as run:
        validating = started(run.validate(["ends", "runs", "pending"]))
        await quiet()
        copy = killed(tmp_path / "run")
        validating.cancel()

    asked: list[str] = []

    async def again(ctx: SessionContext) -> Trajectory:
        asked.append(ctx.prompt.content)
        return Trajectory(reward=1.0)

    async with opened(loop, copy, session=again, group_size=2) as run:
        await quiet()

        assert left(run) == NOTHING
        assert asked == []
        await run.validate(["v"])
        assert asked == ["v", "v"]


@virtual
async def test_a_round_that_was_sampled_and_not_committed_is_gone_after_a_kill(loop, tmp_path):
    copies: list[Path] = []
    async with opened(loop, tmp_path / "run", session=half_right) as run:
        commit = run.commit

        async def killed_before(batch: Any) -> None:
            copies.append(killed(tmp_path / "run"))
            await commit(batch)

        run.commit = killed_before  # type: ignore[method-assign]
        await run.validate(["v"])

    async with opened(loop, copies[0]) as run:
        assert [event.reason for event in events(run, ev.BatchReturned)] == ["recovery"]
        assert left(run) == NOTHING


@virtual
async def test_a_round_behind_the_mark_that_the_run_goes_back_to_is_undone_and_gone(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=half_right) as run:
        mark = await run.checkpoint()
        await run.validate(["v"])

    async with opened(loop, tmp_path / "run", session=half_right, resume_at=mark) as run:
        assert left(run) == NOTHING


@virtual
async def test_validation_groups_that_the_user_submitted_outlast_a_kill(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit("v", group_id="own", partition="val")
        copy = killed(tmp_path / "run")

    async with opened(loop, copy, session=half_right) as run:
        assert (await run.sample(1, partition="val")).group_ids == ["own"]


UNFIT = [
    (Prompt(object()), "prompt 3 of the validation round can't be stored: Encoding objects of type object"),
    (Prompt("v", extra={"x": 2**70}), "prompt 3 of the validation round can't be stored: can't serialize ints"),
    (Prompt("v", n=0), "prompt 3 of the validation round has n = 0 sessions; it must be an integer from 1"),
    (Prompt("v", dataset=5), "the dataset of prompt 3 of the validation round is 5; it must be a string"),
    (Prompt("v", extra=["x"]), "the extra of prompt 3 of the validation round is ['x']; it must be a mapping"),
    (Prompt("v", group_id=object()), "prompt 3 of the validation round can't be stored: Encoding objects"),
]


@pytest.mark.parametrize(("unfit", "text"), UNFIT, ids=["content", "extra", "n", "dataset", "no mapping", "id"])
async def test_a_prompt_that_cannot_be_validated_on_is_named_by_its_place_and_none_is_submitted(
    unfit: Prompt, text: str
) -> None:
    async with open_run(group_size=1) as run:
        with pytest.raises(BadInput) as refused:
            await run.validate(["v", "v", unfit], timeout_s=1)

        assert str(refused.value).startswith(text)
        assert run.book.totals["submitted"] == 0
