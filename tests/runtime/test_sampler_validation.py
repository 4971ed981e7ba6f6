"""Batches of validation groups: by `validate`, by plain samples, and beside those of training."""

import asyncio

import anyio
import pytest

from groupstate import Prompt, Rules, Trajectory
from groupstate.errors import SampleTimeout
from tests.runtime.scenes import failing, finish, half_right, opened, quiet, ready, started, virtual


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
