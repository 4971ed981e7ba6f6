"""Waiting for a batch: who is served, in which order, and what a wait that can't be served ends with."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

from groupstate import (
    Batch,
    Book,
    Capacity,
    OpenRequest,
    PerBatch,
    Prompt,
    Rules,
    Select,
    SessionContext,
    Slots,
    Trajectory,
    open_run,
)
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.errors import (
    BadInput,
    DamagedPayload,
    EvictionStreak,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RunIsClosed,
    SampleError,
    SamplerBusy,
    SampleTimeout,
    SourceFailed,
    WeightVersionError,
)
from groupstate.runtime.sources import FunctionSource
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

SYNC = Rules(mode="sync", batch_size=2, filter_metric="reward")

# Serving ---------------------------------------------------------------------------------------------


@virtual
async def test_a_sample_is_served_when_its_last_group_finishes(loop):
    async with opened(loop) as run:
        ready(run, "a")
        waiting = started(run.sample(2))
        await quiet()
        assert not waiting.done()

        ready(run, "b")

        assert (await waiting).group_ids == ["a", "b"]


@virtual
async def test_a_batch_carries_what_the_sessions_returned(loop):
    async with opened(loop) as run:
        group = run.submit({"question": "2 + 2"}, n=2, dataset="sums")
        group.start(0).finish([Trajectory(text="4", reward=1.0), Trajectory(text="four", reward=0.5)])
        group.start(1).finish(Trajectory(text="5", reward=0.0, info={"turns": 3}))

        batch = await run.sample(1)

    assert [(row.session, row.index, row.trajectory.text) for row in batch.rows] == [
        (0, 0, "4"),
        (0, 1, "four"),
        (1, 0, "5"),
    ]
    assert batch.rows[2].trajectory.info == {"turns": 3}
    assert (batch.groups[0].prompt.content, batch.groups[0].dataset) == ({"question": "2 + 2"}, "sums")


@virtual
async def test_several_waiters_are_served_in_order_of_arrival_and_no_group_twice(loop):
    async with opened(loop) as run:
        waiters = [started(run.sample(2)) for _ in range(3)]
        await quiet()

        ready(run, "a", "b", "c", "d", "e", "f")

        assert [(await waiter).group_ids for waiter in waiters] == [["a", "b"], ["c", "d"], ["e", "f"]]


@virtual
async def test_a_small_sample_does_not_overtake_a_large_one_that_came_before(loop):
    async with opened(loop) as run:
        large = started(run.sample(3))
        await quiet()
        small = started(run.sample(1))
        ready(run, "a", "b")
        await quiet()
        assert not small.done()

        ready(run, "c", "d")

        assert (await large).group_ids == ["a", "b", "c"]
        assert (await small).group_ids == ["d"]


@virtual
async def test_a_waiter_of_one_partition_does_not_hold_up_the_other(loop):
    async with opened(loop) as run:
        training = started(run.sample(1))
        await quiet()
        finish(run.submit("v", partition="val"), 0.5)

        batch = await run.sample(1, partition="val")

        assert (batch.partition, batch.group_ids) == ("val", ["g1"])
        assert not training.done()
        await ended(training)


@virtual
async def test_surplus_groups_are_there_for_the_next_sample(loop):
    async with opened(loop) as run:
        ready(run, *"abcdefghij")

        batches = [(await run.sample(4)).group_ids for _ in range(2)]

        assert batches == [list("abcd"), list("efgh")]
        assert run.sampleable_count() == 2


@virtual
async def test_interleaved_sessions_make_whole_groups_only(loop):
    async with opened(loop) as run:
        handles = {name: run.submit(name, n=3, group_id=name) for name in "ab"}
        attempts = {(name, i): handles[name].start(i) for name in "ab" for i in range(3)}
        seen = []

        for name, session in [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]:
            attempts[name, session].finish(Trajectory(reward=float(session)))
            seen.append(run.sampleable_count())

        assert seen == [0, 0, 0, 0, 1, 2]


# Cancelled waiters -----------------------------------------------------------------------------------


@virtual
async def test_a_cancelled_waiter_takes_nothing(loop):
    async with opened(loop) as run:
        ready(run, "a")
        waiting = started(run.sample(2))
        await quiet()

        await ended(waiting)
        ready(run, "b")

        assert run.sampleable_count() == 2
        assert events(run, ev.BatchSampled) == []
        assert [event.reason for event in events(run, ev.BatchRequestCancelled)] == ["cancelled"]


@virtual
async def test_the_waiter_behind_one_that_is_cancelled_as_its_group_comes_gets_the_group(loop):
    async with opened(loop) as run:
        first, second = started(run.sample(1)), started(run.sample(1))
        await quiet()

        ready(run, "a")
        first.cancel()

        assert (await second).group_ids == ["a"]
        assert first.cancelled()


@virtual
async def test_a_waiter_cancelled_in_the_turn_of_its_answer_gives_its_groups_back(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(2))
        await quiet()

        ready(run, "a", "b")
        await ended(waiting)

        assert [event.reason for event in events(run, ev.BatchReturned)] == ["cancelled"]
        assert (await run.sample(2)).group_ids == ["a", "b"]


@virtual
async def test_a_scope_that_is_cancelled_in_the_turn_of_the_answer_gives_its_groups_back(loop):
    async with opened(loop) as run:
        with anyio.CancelScope() as scope:
            loop.call_soon(ready, run, "a")
            loop.call_soon(scope.cancel)
            await run.sample(1)

        assert scope.cancelled_caught
        assert run.sampleable_count() == 1


@virtual
async def test_a_batch_that_was_released_by_its_number_is_not_given_back_again(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(1))
        await quiet()
        ready(run, "a")
        await run.release(1)

        await ended(waiting)

        assert [event.reason for event in events(run, ev.BatchReturned)] == ["released"]
        assert run.sampleable_count() == 1


class CancelledAt:
    """Awaits a coroutine and has the task cancelled at its n-th suspension."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine = coroutine
        self._at = at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        resume = self._coroutine.send, None
        while True:
            try:
                future = resume[0](resume[1])
            except StopIteration as stop:
                return stop.value
            self.suspensions += 1
            if self.suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.get_loop().call_soon(task.cancel)
            try:
                yield future
                resume = self._coroutine.send, None
            except BaseException as error:
                resume = self._coroutine.throw, error


async def sampled_but_cancelled(run, at: int) -> tuple[bool, Batch | None]:
    """Wait for two groups, cancelled at the n-th suspension. Was it, and what came of it?"""
    call = CancelledAt(run.sample(2), at)
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    ready(run, "b")
    await asyncio.wait({task})
    reached = call.suspensions >= at
    return reached, None if task.cancelled() else task.result()


@virtual
async def test_cancelled_at_whatever_await_nothing_is_lost(loop):
    for at in itertools.count(1):
        async with opened(loop, rules=Rules(stall_s=0)) as run:
            ready(run, "a")

            reached, batch = await sampled_but_cancelled(run, at)

            left = run.sampleable_count()
            assert (left, batch is None) == ((2, True) if batch is None else (0, False))
            check(run)
        if not reached:
            break

    assert at > 1


async def test_cancelled_at_whatever_await_nothing_is_lost_with_threads_and_a_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("groupstate.log.payloads.RECENT_BYTES_MAX", 0)
    delivered = []
    for at in itertools.count(1):
        async with open_run(tmp_path / str(at), group_size=1) as run:
            finish(run.submit("text", group_id="a"), 1.0)

            reached, batch = await sampled_but_cancelled(run, at)

            delivered.append(batch is not None)
            assert run.sampleable_count() == (0 if batch else 2)
            check(run)
            if batch is None:
                assert (await run.sample(2)).group_ids == ["a", "b"]
        if not reached:
            break

    assert at > 3, "the answer, its durability and the payloads are waited for"
    assert delivered[-1]


# Waits that end otherwise ----------------------------------------------------------------------------


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
async def test_a_time_out_says_what_was_waited_for(loop):
    async with opened(loop) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout, match=r"(?s)within 5 s.*0 of 2 groups.*'slow' is running.*submit") as caught:
            await run.sample(2, timeout_s=5)

        assert isinstance(caught.value, TimeoutError)
        assert caught.value.timeout_s == 5
        assert caught.value.explanation.in_flight[0].group_id == "slow"
        assert str(caught.value) == f"no batch within 5 s\n{caught.value.explanation}"
        assert loop.time() == pytest.approx(5)
        assert [event.reason for event in events(run, ev.BatchRequestCancelled)] == ["timeout"]


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, -0.5, "5", True], ids=repr)
@pytest.mark.parametrize("call", ["sample", "validate"])
@virtual
async def test_a_time_out_that_is_no_duration_is_refused_before_anything_is_changed(loop, call, timeout_s):
    async with opened(loop) as run:
        before = run.book.last_seq
        with pytest.raises(BadInput) as refused:
            if call == "sample":
                await run.sample(1, weight_version=3, timeout_s=timeout_s)
            else:
                await run.validate(["p"], timeout_s=timeout_s)

        assert str(refused.value) == f"timeout_s is {timeout_s!r}; it must be a number of seconds, at least 0"
        assert run.book.last_seq == before


@virtual
async def test_a_time_out_without_end_is_none(loop):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        waiting = started(run.sample(1, timeout_s=float("inf")))
        await anyio.sleep(10**9)
        ready(run, "a")

        assert (await waiting).group_ids == ["a"]


@virtual
async def test_a_time_out_of_zero_takes_what_is_there(loop):
    async with opened(loop) as run:
        ready(run, "a")

        assert (await run.sample(1, timeout_s=0)).group_ids == ["a"]
        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=0)


@virtual
async def test_an_answer_in_time_beats_the_deadline(loop):
    async with opened(loop) as run:
        group = run.submit("a")
        loop.call_later(4, finish, group, 1.0)

        assert len(await run.sample(1, timeout_s=5)) == 1


def stalls(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "stalled" in record.getMessage()]


@virtual
async def test_a_stall_is_told_each_time_that_nothing_has_happened_for_stall_s(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=35)

    assert len(stalls(caplog)) == 3
    assert "'slow' is running" in stalls(caplog)[0].getMessage()


@virtual
async def test_nothing_is_told_while_progress_goes_on(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        for second in range(0, 40, 5):
            loop.call_later(second, run.submit, f"p{second}")

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=39)

    assert stalls(caplog) == []


@virtual
async def test_a_stall_is_told_stall_s_after_the_last_progress(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        loop.call_later(1, run.submit, "p")

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=11.5)

    assert len(stalls(caplog)) == 1


@virtual
async def test_no_stall_is_told_with_stall_s_zero(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=3600)

    assert stalls(caplog) == []


@virtual
async def test_looking_out_for_groups_tells_of_a_stall_and_ends_in_time(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout, match="0 of 2 groups are sampleable") as out:
            await run.wait_sampleable(2, timeout_s=35)

    assert anyio.current_time() == pytest.approx(35)
    assert (out.value.timeout_s, out.value.explanation.needed) == (35, 2)
    assert len(stalls(caplog)) == 3
    assert "call='wait_sampleable()'" in stalls(caplog)[0].getMessage()
    assert "'slow' is running" in stalls(caplog)[0].getMessage()


@virtual
async def test_groups_that_come_in_the_last_moment_are_no_time_out(loop):
    async with opened(loop) as run:
        attempt = run.submit("p", n=1).start(0)
        loop.call_later(5, attempt.finish, Trajectory(reward=1.0))

        assert await run.wait_sampleable(1, timeout_s=5) == 1


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
async def test_sessions_that_always_fail_end_the_wait_and_the_first_failure_can_be_read(loop):
    async with opened(loop, source=range(100), session=failing(ValueError("no judge"))) as run:
        with pytest.raises(EvictionStreak, match="empty 8"):
            await run.sample(1)

        assert events(run, ev.SessionFailed)[0].message == "ValueError: no judge"


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


@virtual
async def test_a_waiting_sample_learns_that_the_run_closes(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(1))
        await quiet()

        await run.close()

        with pytest.raises(RunIsClosed, match="closing"):
            await waiting


@virtual
async def test_a_closed_run_gives_no_batches(loop):
    async with opened(loop) as run:
        ready(run, "a")
    with pytest.raises(RunIsClosed, match="open it again"):
        await run.sample(1)


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


# Weight versions -------------------------------------------------------------------------------------


@virtual
async def test_sampling_with_a_weight_version_publishes_it_first(loop):
    async with opened(loop, rules=Rules(lag_max=0)) as run:
        ready(run, "old")
        group = None

        waiting = started(run.sample(1, weight_version=1))
        await quiet()
        group = run.submit("new")
        finish(group, 1.0)

        batch = await waiting
        assert (run.weight_version, batch.weight_version, batch.group_ids) == (1, 1, [group.id])
        assert run.book.totals["evicted/stale"] == 1


@virtual
async def test_the_current_weight_version_again_changes_nothing(loop):
    async with opened(loop, weight_version=3) as run:
        ready(run, "a")

        await run.sample(1, weight_version=3)

        assert events(run, ev.WeightsPublished) == []


@virtual
async def test_a_weight_version_that_goes_backwards_is_refused(loop):
    async with opened(loop, weight_version=3) as run:
        with pytest.raises(WeightVersionError, match="version 2 is below the current version 3"):
            await run.sample(1, weight_version=2)

        assert events(run, ev.BatchRequested) == []


@virtual
async def test_without_a_weight_version_lag_counts_from_what_was_published_last(loop):
    async with opened(loop, rules=Rules(lag_max=1)) as run:
        ready(run, *"abc")

        for _ in range(3):
            assert (await run.sample(1)).groups[0].lag == 0


@virtual
async def test_with_wait_a_group_in_flight_at_the_bound_holds_the_sampler(loop):
    async with opened(loop, rules=Rules(lag_max=1, on_stale="wait")) as run:
        slow = run.submit("slow", group_id="slow")
        ready(run, "a")
        await run.publish_weights(1)
        waiting = started(run.sample(1))
        await quiet()
        assert "lag 1, the bound is 1" in run.explain().blocked_by

        finish(slow, 1.0)

        assert (await waiting).group_ids == ["slow"]


# Validation ------------------------------------------------------------------------------------------


@virtual
async def test_validate_runs_all_prompts_and_commits_them(loop):
    async with opened(loop, rules=Rules(filter_metric="reward"), session=half_right, group_size=2) as run:
        batch = await run.validate(["a", "b", "c"], n=1)

        assert [group.prompt.content for group in batch.groups] == ["a", "b", "c"]
        assert run.book.totals["committed"] == 3
        assert run.book.totals["evicted"] == 0


@virtual
async def test_validation_shows_failed_groups_too(loop):
    async with opened(loop, session=failing(ValueError("no"))) as run:
        batch = await run.validate(["a"])

        assert [(group.phase, len(list(group.rows()))) for group in batch.groups] == [("failure", 0)]


@virtual
async def test_a_validation_that_timed_out_does_not_hand_its_groups_to_the_next(loop):
    async with opened(loop, session=half_right) as run:
        with pytest.raises(SampleTimeout):
            await run.validate(["old"], timeout_s=0.5)

        batch = await run.validate(["new"])

        assert [group.prompt.content for group in batch.groups] == ["new"]


@virtual
async def test_the_same_validation_prompts_can_be_used_again_and_again(loop):
    prompts = [Prompt("a", group_id="v1"), Prompt("b", group_id="v2")]
    async with opened(loop, session=half_right) as run:
        for _ in range(3):
            batch = await run.validate(prompts)

            assert [group.prompt.content for group in batch.groups] == ["a", "b"]
            assert [group.prompt.extra for group in batch.groups] == [{"group_id": "v1"}, {"group_id": "v2"}]


@virtual
async def test_two_validations_at_once_each_get_their_own_groups(loop):
    async def slow_first(ctx):
        await anyio.sleep(2 if ctx.prompt.content == "a" else 1)
        return Trajectory(reward=1.0)

    async with opened(loop, session=slow_first) as run:
        batches = await asyncio.gather(run.validate(["a"]), run.validate(["b"]))

        assert [batch.groups[0].prompt.content for batch in batches] == ["a", "b"]


@virtual
async def test_metrics_of_the_partitions_are_counted_apart(loop):
    async with opened(loop, rules=Rules(filter_metric="reward")) as run:
        finish(run.submit("flat", n=2), 1.0, 1.0)
        finish(run.submit("v", n=2, partition="val"), 1.0, 1.0)
        ready(run, "a", n=2)

        training, validation = await run.sample(1), await run.sample(1, partition="val")

        assert training.metrics["training/filter_groups/evicted_samples"] == 1
        assert validation.metrics["validation/filter_groups/evicted_samples"] == 0


# Looking ---------------------------------------------------------------------------------------------


@virtual
async def test_wait_sampleable_waits_and_takes_nothing(loop):
    async with opened(loop) as run:
        waiting = started(run.wait_sampleable(2))
        ready(run, "a")
        await quiet()
        assert not waiting.done()

        ready(run, "b")

        assert await waiting == 2
        assert run.sampleable_count() == 2


@virtual
async def test_wait_sampleable_learns_that_the_run_closes(loop):
    async with opened(loop) as run:
        waiting = started(run.wait_sampleable(1))
        await quiet()

        await run.close()

        with pytest.raises(RunIsClosed):
            await waiting


@virtual
async def test_wait_sampleable_learns_that_the_source_cannot_supply_so_many(loop):
    async with opened(loop, source=["a"], session=half_right) as run:
        with pytest.raises(NotEnoughGroups):
            await run.wait_sampleable(2)


@virtual
async def test_wait_sampleable_learns_that_the_source_failed(loop):
    async with opened(loop, source=FunctionSource(lambda position: object()), session=half_right) as run:
        with pytest.raises(NotEnoughGroups, match="failed: BadInput"):
            await run.wait_sampleable(1)


@virtual
async def test_wait_sampleable_ends_when_group_after_group_is_evicted(loop):
    async with opened(
        loop, rules=Rules(filter_metric="reward"), source=FunctionSource(str), group_size=2,
        session=returning(Trajectory(reward=1.0)),
    ) as run:  # fmt: skip
        with pytest.raises(EvictionStreak), anyio.fail_after(1000):
            await run.wait_sampleable(1)


@virtual
async def test_wait_sampleable_learns_that_a_metric_is_missing(loop):
    async with opened(loop, rules=Rules(filter_metric="acc"), source=["p"], session=half_right) as run:
        with pytest.raises(MissingMetric):
            await run.wait_sampleable(1)


@virtual
async def test_wait_changed_wakes_everybody_at_the_next_event(loop):
    async with opened(loop) as run:
        waiters = [started(run.wait_changed()) for _ in range(3)]
        await quiet()
        assert not any(waiter.done() for waiter in waiters)

        run.submit("a")

        await asyncio.gather(*waiters)


@virtual
async def test_wait_sampleable_has_drawn_what_it_waits_for(loop):
    async with opened(loop, source=range(100), session=half_right) as run:
        assert await run.wait_sampleable(5) == 5
        assert run.book.totals["submitted"] == 5


@virtual
async def test_nothing_is_drawn_for_who_has_stopped_looking_out(loop):
    rules = Rules(admission=PerBatch(warmup=0))
    async with opened(loop, source=range(100), session=half_right, rules=rules) as run:
        await run.wait_sampleable(3)
        await ended(started(run.wait_sampleable(9)))
        submitted = run.book.totals["submitted"]

        await run.sample(3)
        await anyio.sleep(60)

        assert run.book.totals["submitted"] == submitted


@virtual
async def test_wait_sampleable_says_that_admission_will_never_have_so_many_ready(loop):
    async with opened(loop, source=range(100), session=half_right, rules=Rules(admission=Slots(n=2))) as run:
        with pytest.raises(NotEnoughGroups, match="lets 2 \\+ 0 groups be ready or in flight, 3 are wanted"):
            await run.wait_sampleable(3)
        assert run.book.totals["submitted"] == 2
        assert violations(run.ledger.log.read()) == []


@virtual
async def test_wait_sampleable_draws_no_more_than_the_slots_though_no_rollout_runs(loop):
    async with opened(loop, source=range(100), rules=Rules(admission=Slots(n=2, ready_max=1))) as run:
        waiting = started(run.wait_sampleable(9))
        await quiet()

        assert run.book.totals["submitted"] == 2
        assert violations(run.ledger.log.read()) == []
        await ended(waiting)


@virtual
async def test_wait_sampleable_waits_for_validation_groups_too(loop):
    async with opened(loop) as run:
        waiting = started(run.wait_sampleable(1, "val"))
        ready(run, "a")
        await quiet()
        assert not waiting.done()

        finish(run.submit("v", partition="val"), 1.0)

        assert await waiting == 1


@virtual
async def test_explain_says_what_the_oldest_waiter_lacks(loop):
    async with opened(loop, source=range(9), session=endless) as run:
        assert run.explain().needed == 0
        waiting = started(run.sample(2))
        await quiet()

        explanation = run.explain()

        assert (explanation.needed, explanation.sampleable, explanation.in_flight_count) == (2, 0, 4)
        assert explanation.blocked_by == "0 of 2 groups are sampleable"
        await ended(waiting)


# Damage ----------------------------------------------------------------------------------------------


def damage(run, ref) -> None:
    run.ledger.log.payloads._data[ref.key] = b"?"


@virtual
async def test_a_group_whose_payload_cannot_be_read_is_evicted_as_damaged_and_the_wait_goes_on(loop):
    async with opened(loop) as run:
        ready(run, "a", "b")
        damage(run, run.book.group("a").prompt)

        batch = await run.sample(1)

        assert batch.group_ids == ["b"]
        assert [(event.group_id, event.reasons) for event in events(run, ev.GroupEvicted)] == [("a", ("damaged",))]


@virtual
async def test_a_time_out_is_told_as_it_was_given_though_the_wait_began_anew_for_a_damaged_group(loop):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        ready(run, "a")
        damage(run, run.book.group("a").prompt)
        waiting = started(run.sample(2, timeout_s=1234567.5))
        await anyio.sleep(1000)
        ready(run, "b")
        await quiet()
        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["a"]

        with pytest.raises(SampleTimeout, match=r"^no batch within 1234567\.5 s"):
            await waiting
        assert loop.time() == pytest.approx(1234567.5)


@virtual
async def test_a_damaged_validation_group_is_an_error_and_stays(loop):
    async with opened(loop) as run:
        finish(run.submit("v", partition="val", group_id="v"), 1.0)
        damage(run, run.book.group("v").prompt)

        with pytest.raises(DamagedPayload, match="'v'"):
            await run.sample(1, partition="val")

        assert run.sampleable_count("val") == 1


@virtual
async def test_a_damaged_prompt_fails_its_group_before_any_session_starts(loop):
    async with opened(loop, session=half_right) as run:
        run.submit("p", group_id="a")
        run._controller.prompts.clear()
        damage(run, run.book.group("a").prompt)
        await anyio.sleep(5)

        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("damaged",)]
        assert events(run, ev.SessionStarted) == []


@virtual
async def test_a_plain_sample_takes_no_group_that_a_validation_waits_for(loop):
    async with opened(loop, session=half_right) as run:
        validating = started(run.validate(["a", "b"]))
        await quiet()
        with pytest.raises(SampleTimeout):
            await run.sample(1, partition="val", timeout_s=1)

        assert len(await validating) == 2


@virtual
async def test_a_validation_is_served_although_a_plain_sample_waits_before_it(loop):
    async with opened(loop, session=half_right) as run:
        waiting = started(run.sample(1, partition="val"))
        await quiet()

        assert len(await run.validate(["a", "b"])) == 2
        run.submit("c", partition="val")
        assert (await waiting).groups[0].prompt.content == "c"


@virtual
async def test_wait_sampleable_in_sync_mode_goes_on_behind_a_failure(loop):
    async def session(ctx):
        await anyio.sleep(1)
        return None if ctx.prompt.content == 0 else Trajectory(reward=1.0)

    async with opened(loop, rules=Rules(mode="sync", batch_size=4), source=range(100), session=session) as run:
        assert await run.wait_sampleable(1) == 1


@virtual
async def test_wait_sampleable_in_sync_mode_hears_that_every_session_fails(loop):
    async with opened(loop, rules=Rules(mode="sync", batch_size=1), source=range(100), session=returning(None)) as run:
        with pytest.raises(EvictionStreak, match="8 groups ended without a trajectory"):
            await run.wait_sampleable(1)


@virtual
async def test_wait_sampleable_draws_within_the_slots_where_the_caller_dispatches(loop):
    async with opened(loop, rules=Rules(admission=Slots(n=2)), source=range(9), group_size=1) as run:
        waiting = started(run.wait_sampleable(1))
        await quiet()
        (handle,) = run.pending()
        finish(handle, 1.0)

        assert await waiting == 1


@virtual
async def test_wait_sampleable_draws_within_the_capacity(loop):
    rules = Rules(batch_size=2, admission=Capacity(lag_max=0))
    async with opened(loop, rules=rules, source=range(9), group_size=1) as run:
        waiting = started(run.wait_sampleable(5))
        await quiet()
        assert len(run.pending()) == 2
        waiting.cancel()


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
async def test_a_source_that_lacks_what_a_source_has_is_refused(loop):
    class Bare:
        name = "bare"

        def draw(self) -> Prompt | None:
            return Prompt("p")

    with pytest.raises(BadInput, match=r"has no position, no seek; it needs name, position, draw\(\) and seek\(\)"):
        async with opened(loop, source=Bare()):
            pass


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
async def test_wait_sampleable_is_told_of_the_limit_of_groups_for_one_batch(loop):
    async with opened(loop, rules=Rules(generated_groups_max=3), source=range(9)) as run:
        with pytest.raises(RefillLimitExceeded, match="generated_groups_max is 3, so there can be 3 at most"):
            await run.wait_sampleable(5)


@virtual
@pytest.mark.parametrize("source", [5, None.__class__, {"a": 5}, {None: ["p"]}], ids=repr)
async def test_what_gives_no_prompts_is_refused_before_anything_begins(loop, source):
    with pytest.raises(BadInput):
        async with opened(loop, source=source):
            pass
