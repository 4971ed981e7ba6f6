"""Who gets a batch, of which groups and in which order, and at which weight version."""

import pytest

from groupstate import Rules, Trajectory
from groupstate.core import events as ev
from groupstate.errors import WeightVersionError
from tests.runtime.scenes import ended, events, finish, opened, quiet, ready, started, virtual

# Order -----------------------------------------------------------------------------------------------


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
