"""Waiting until groups can be sampled, without taking them: what is drawn for it, and what ends it."""

import asyncio

import anyio
import pytest

from groupstate import Capacity, PerBatch, Rules, Slots, Trajectory
from groupstate.core.invariants import violations
from groupstate.errors import (
    BadInput,
    EvictionStreak,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RunIsClosed,
)
from groupstate.runtime.sources import FunctionSource
from tests.runtime.scenes import ended, finish, half_right, opened, quiet, ready, returning, started, virtual


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

        assert await asyncio.gather(*waiters) == [True, True, True]


@virtual
async def test_wait_changed_has_an_end(loop):
    async with opened(loop) as run:
        before = loop.time()

        assert await run.wait_changed(timeout_s=60) is False
        assert loop.time() - before == 60
        with pytest.raises(BadInput, match="timeout_s is 'soon'"):
            await run.wait_changed(timeout_s="soon")


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
async def test_wait_sampleable_is_told_of_the_limit_of_groups_for_one_batch(loop):
    async with opened(loop, rules=Rules(generated_groups_max=3), source=range(9)) as run:
        with pytest.raises(RefillLimitExceeded, match="generated_groups_max is 3, so there can be 3 at most"):
            await run.wait_sampleable(5)
