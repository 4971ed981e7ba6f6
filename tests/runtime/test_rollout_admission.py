"""Which groups a rollout starts: as many ahead as the rules say, refills, and what was pending before it."""

import time
from typing import Any

import anyio
import pytest

from groupstate import Capacity, PerBatch, Rules, Slots, Trajectory
from groupstate.core import events as ev
from groupstate.engines.port import SamplingParams
from groupstate.errors import EvictionStreak, NotEnoughGroups
from groupstate.log.memory import MemoryLog
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.rollout import Rollout
from tests.runtime.scenes import endless, events, failing, finish, half_right, opened, quiet, started, virtual


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


@pytest.mark.slow
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
