"""Samples that can't be served: what is refused at the door, and what ends a wait, with what is told of it."""

import asyncio

import anyio
import pytest

from groupstate import Book, OpenRequest, PerBatch, Prompt, Rules, Select, SessionContext, Trajectory
from groupstate.core import events as ev
from groupstate.errors import (
    EvictionStreak,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RunIsClosed,
    SampleError,
    SamplerBusy,
    SampleTimeout,
    SourceFailed,
)
from groupstate.runtime.sources import FunctionSource
from tests.runtime.scenes import (
    ended,
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

SYNC = Rules(mode="sync", batch_size=2, filter_metric="reward")


# At the door -----------------------------------------------------------------------------------------


@virtual
async def test_a_second_sampler_is_refused_in_sync_mode(loop):
    async with opened(loop, rules=SYNC) as run:
        first = started(run.sample(2))
        await quiet()

        with pytest.raises(SamplerBusy, match="one may wait at a time"):
            await run.sample(2)

        ready(run, "a", "b", n=2)
        assert (await first).group_ids == ["a", "b"]


@virtual
async def test_validation_may_be_sampled_beside_training_in_sync_mode(loop):
    async with opened(loop, rules=SYNC) as run:
        first = started(run.sample(2))
        await quiet()
        finish(run.submit("v", partition="val"), 1.0)

        assert len(await run.sample(1, partition="val")) == 1
        await ended(first)


@virtual
async def test_a_batch_above_the_rules_batch_size_is_refused_in_sync_mode(loop):
    async with opened(loop, rules=SYNC) as run:
        with pytest.raises(SampleError, match=r"sample\(3\) is above the rules' batch_size 2"):
            await run.sample(3)

        assert events(run, ev.BatchRequested) == []


@virtual
async def test_a_batch_of_nothing_is_refused(loop):
    async with opened(loop) as run:
        with pytest.raises(SampleError, match="at least 1"):
            await run.sample(0)


@pytest.mark.parametrize("call", ["sample", "submit"])
@virtual
async def test_a_partition_that_does_not_exist_is_refused_at_the_door(loop, call):
    async with opened(loop) as run:
        with pytest.raises(Exception, match="trian"):
            if call == "sample":
                await run.sample(1, partition="trian", timeout_s=1)
            else:
                run.submit("p", partition="trian")
        assert len(events(run)) == 1


@virtual
async def test_a_closed_run_gives_no_batches(loop):
    async with opened(loop) as run:
        ready(run, "a")
    with pytest.raises(RunIsClosed, match="open it again"):
        await run.sample(1)


# Failed sessions -------------------------------------------------------------------------------------


async def unable(ctx: SessionContext) -> Trajectory:
    raise ValueError("no such tool")


@virtual
async def test_a_time_out_tells_which_groups_were_evicted_and_how_a_session_failed_last(loop):
    async with opened(loop, session=unable, group_size=1) as run:
        run.submit("a task")

        with pytest.raises(SampleTimeout) as caught:
            await run.sample(1, timeout_s=5)

    last = "the last session to fail was session 0 of group 'g1' (error): ValueError: no such tool"
    assert f"evicted since the last batch: empty 1; {last}\n" in str(caught.value)


@virtual
async def test_a_source_whose_last_groups_all_failed_says_how(loop):
    async with opened(loop, session=unable, source=["a task"], group_size=1) as run:
        with pytest.raises(NotEnoughGroups) as caught:
            await run.sample(1)

    last = "The last session to fail was session 0 of group 'g1' (error): ValueError: no such tool"
    assert str(caught.value).endswith(f"; evicted since the last batch: empty 1. {last}")


@virtual
async def test_sessions_that_all_give_up_by_a_cancellation_of_their_own_are_told_too(loop):
    async def gives_up(ctx: SessionContext) -> Trajectory:
        raise asyncio.CancelledError

    async with opened(loop, session=gives_up, source=["a task", "another"], group_size=2) as run:
        with pytest.raises(NotEnoughGroups) as caught:
            await run.sample(1)

    last = "The last session to fail was session 1 of group 'g2' (cancelled): the session cancelled itself"
    assert str(caught.value).endswith(f"; evicted since the last batch: empty 2. {last}")


@virtual
async def test_sessions_that_were_cancelled_with_their_group_are_not_called_failed(loop):
    async with opened(loop, session=unable, source=["a task"], group_size=1) as run:
        with pytest.raises(NotEnoughGroups):
            await run.sample(1)
        waiting = run.submit("another", group_id="b")
        run.cancel(waiting.id)

        assert run.explain().last_failure.startswith("last session to fail was session 0 of group 'g1' (error)")


@virtual
async def test_sessions_that_always_fail_end_the_wait_and_the_first_failure_can_be_read(loop):
    async with opened(loop, source=range(100), session=failing(ValueError("no judge"))) as run:
        with pytest.raises(EvictionStreak, match="empty 8"):
            await run.sample(1)

        assert events(run, ev.SessionFailed)[0].message == "ValueError: no judge"


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


# Too few groups --------------------------------------------------------------------------------------


@virtual
async def test_too_few_groups_are_an_error_with_the_counts_and_stay_sampleable(loop):
    async with opened(loop, source=["a", "b", "c"], session=half_right) as run:
        with pytest.raises(NotEnoughGroups, match="a batch of at most 3") as caught:
            await run.sample(4)

        assert caught.value.needed == 4
        assert caught.value.counts == {"needed": 4, "sampleable": 0, "in_flight": 3, "older_waiters": 0}
        assert len(await run.sample(3)) == 3


@virtual
async def test_too_few_groups_counts_what_older_samplers_wait_for(loop):
    async with opened(loop, source=["a", "b", "c"], session=half_right) as run:
        older = started(run.sample(2))
        await quiet()

        with pytest.raises(NotEnoughGroups, match="older samplers wait for 2") as caught:
            await run.sample(2)

        assert caught.value.counts["older_waiters"] == 2
        assert len(await older) == 2


@virtual
async def test_a_refill_that_the_source_does_not_have_ends_the_wait(loop):
    async def uniform_if_last(ctx):
        await anyio.sleep(1)
        return Trajectory(reward=float(ctx.session) if ctx.prompt.content != "d" else 1.0)

    async with opened(
        loop, rules=Rules(filter_metric="reward"), source=list("abcd"), session=uniform_if_last, group_size=2
    ) as run:
        with pytest.raises(NotEnoughGroups):
            await run.sample(4)

        assert run.sampleable_count() == 3
        assert run.book.totals["evicted/zero_variance"] == 1
        assert sum(event.count for event in events(run, ev.RefillForfeited)) == 1


@virtual
async def test_without_a_source_a_sample_waits_for_whoever_submits(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(1))
        await anyio.sleep(3600)
        assert not waiting.done()
        assert any("run.submit" in way for way in run.explain().unblocked_by)

        ready(run, "a")

        assert len(await waiting) == 1


# Missing metrics -------------------------------------------------------------------------------------


@virtual
async def test_a_missing_metric_names_group_session_metric_and_what_there_is(loop):
    async def without_accuracy(ctx):
        metrics = {"reward": 1.0} if ctx.session else {"reward": 1.0, "acc": 1.0}
        return Trajectory(metrics=metrics)

    async with opened(
        loop, rules=Rules(filter_metric="acc"), source=["a"], session=without_accuracy, group_size=2
    ) as run:
        for _ in range(2):
            with pytest.raises(MissingMetric) as caught:
                await run.sample(1)

        error = caught.value
        assert (error.group_id, error.session, error.metric, error.present) == ("g1", 1, "acc", ("reward",))


@virtual
async def test_a_missing_metric_is_raised_again_after_reopening(loop, tmp_path):
    rules = Rules(filter_metric="acc")
    async with opened(loop, tmp_path / "run", rules=rules) as run:
        ready(run, "a")

    async with opened(loop, tmp_path / "run", rules=rules) as run:
        with pytest.raises(MissingMetric):
            await run.sample(1)


@virtual
async def test_a_stale_group_that_lacks_the_metric_no_longer_stops_anybody(loop):
    async with opened(loop, rules=Rules(filter_metric="acc", lag_max=0)) as run:
        ready(run, "a")
        with pytest.raises(MissingMetric):
            await run.sample(1)

        await run.publish_weights(1)
        group = run.submit("b", n=2)
        for session in (0, 1):
            group.start(session).finish(Trajectory(metrics={"acc": float(session)}))

        assert (await run.sample(1)).group_ids == [group.id]


# Streaks and limits ----------------------------------------------------------------------------------


@virtual
async def test_group_after_group_evicted_ends_the_wait_with_the_reasons(loop):
    async with opened(
        loop, rules=Rules(filter_metric="reward"), source=range(100), session=returning(Trajectory(reward=1.0)),
        group_size=2,
    ) as run:  # fmt: skip
        with pytest.raises(EvictionStreak, match="zero_variance 16") as caught:
            await run.sample(2)

    assert (caught.value.streak, caught.value.bound) == (16, 16)
    assert caught.value.reasons == {"zero_variance": 16}


@virtual
async def test_a_group_that_is_kept_ends_a_streak(loop):
    rules = Rules(filter_metric="reward", eviction_streak_max=2, admission=PerBatch(warmup=0))

    async def every_second_group_uniform(ctx):
        await anyio.sleep(1)
        return Trajectory(reward=1.0 if int(ctx.prompt.content) % 2 else float(ctx.session))

    async with opened(
        loop, rules=rules, source=range(20), session=every_second_group_uniform, group_size=2
    ) as run:  # fmt: skip
        for _ in range(5):
            await run.sample(1)

        assert run.book.totals["evicted/zero_variance"] >= 3


@virtual
async def test_more_groups_than_one_batch_may_take_end_the_wait(loop):
    rules = Rules(filter_metric="reward", generated_groups_max=4, admission=PerBatch(warmup=0))
    async with opened(
        loop, rules=rules, source=range(100), session=returning(Trajectory(reward=1.0)), group_size=2
    ) as run:
        with pytest.raises(RefillLimitExceeded, match=r"4 groups were submitted for this batch and .* is 4") as caught:
            await run.sample(1)

    assert (caught.value.generated, caught.value.bound) == (4, 4)
    assert caught.value.reasons == {"zero_variance": 4}


@virtual
async def test_too_many_groups_before_any_is_evicted_are_told_as_such(loop):
    async with opened(loop, rules=Rules(generated_groups_max=2)) as run:
        for _ in range(3):
            run.submit("p")

        with pytest.raises(RefillLimitExceeded, match="none evicted"):
            await run.sample(1)


# Sources that fail, user code that raises, a run that closes -----------------------------------------


@pytest.mark.parametrize("second", [OSError("the disk with the prompts is gone"), object(), Prompt("p", group_id="a")])
@virtual
async def test_a_source_that_fails_a_waiting_sample_leaves_no_waiter_behind(loop, second):
    def make(position):
        if position == 0:
            return Prompt("p", group_id="a")
        if isinstance(second, Exception):
            raise second
        return second

    async with opened(loop, source=FunctionSource(make)) as run:
        with pytest.raises(SourceFailed, match=r"source 'function' failed at prompt 1: .*(gone|stored|taken)"):
            await run.sample(3)

        assert run.book.requests == {}
        ready(run, "mine")
        assert run.sampleable_count() == 1


@virtual
async def test_groups_that_are_ready_can_be_sampled_after_the_source_failed(loop):
    async with opened(loop, source=FunctionSource(lambda position: object())) as run:
        ready(run, "mine")
        with pytest.raises(SourceFailed):
            await run.sample(2)

        assert (await run.sample(1)).group_ids == ["mine"]


@virtual
async def test_a_source_that_loses_its_position_is_told_as_the_sources_fault(loop):
    class Broken(FunctionSource):
        @property
        def position(self) -> int:
            if self.drawn:
                raise OSError("the shelf is gone")
            return 0

        @position.setter
        def position(self, value: int) -> None: ...

        drawn = False

        def draw(self) -> Prompt | None:
            self.drawn = True
            return Prompt("p")

    async with opened(loop, source=Broken(lambda number: "p")) as run:
        with pytest.raises(SourceFailed, match="failed at prompt -1: OSError: the shelf is gone"):
            await run.sample(2)


@virtual
async def test_user_code_that_raises_in_the_middle_of_a_sample_leaves_nobody_waiting(loop):
    def interrupted(book: Book, rules: Rules, request: OpenRequest) -> list[Select]:
        raise KeyboardInterrupt

    async with opened(loop, rules=Rules(mode="sync"), selection=interrupted) as run:
        group = run.submit("p", n=1)
        group.start(0).finish(Trajectory(reward=1.0))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                await run.sample(1)

        assert run.book.requests == {}
        assert run.sampleable_count() == 1


@virtual
async def test_a_waiting_sample_learns_that_the_run_closes(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(1))
        await quiet()

        await run.close()

        with pytest.raises(RunIsClosed, match="closing"):
            await waiting
