"""Opening a run again after a kill: what was under way goes on, and nothing is lost or given twice."""

import asyncio

import pytest

from groupstate import Prompt, Rules, Trajectory
from groupstate.errors import DuplicateGroup
from tests.runtime.scenes import endless, events, half_right, killed, opened, quiet, ready, virtual


def recovery(run) -> list[str]:
    """Names of what the last recovery recorded."""
    names = [type(event).__name__ for event in events(run)]
    return names[len(names) - 1 - names[::-1].index("RunRecovered") :]


@virtual
async def test_an_uncommitted_batch_comes_back_once_and_a_committed_one_never(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a", "b", "c")
        await run.commit(await run.sample(1))
        assert (await run.sample(1)).group_ids == ["b"]
        path = killed(tmp_path / "run")

    async with opened(loop, path) as run:
        assert run.book.totals["committed"] == 1
        assert (await run.sample(2)).group_ids == ["b", "c"]
        assert run.sampleable_count() == 0


@virtual
async def test_groups_in_flight_run_again_with_their_prompt_their_stamp_and_a_new_attempt(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=endless, weight_version=3) as run:
        run.submit(Prompt("what", "sums", extra={"answer": 4}), group_id="g", n=2)
        await quiet()
        await run.publish_weights(5)
        path = killed(tmp_path / "run")

    seen = []

    async def session(ctx):
        seen.append((ctx.prompt.content, ctx.prompt.extra, ctx.prompt.dataset, ctx.session, ctx.attempt))
        return Trajectory(reward=1.0)

    async with opened(loop, path, session=session) as run:
        batch = await run.sample(1)

    assert seen == [("what", {"answer": 4}, "sums", 0, 2), ("what", {"answer": 4}, "sums", 1, 2)]
    assert (batch.groups[0].weight_version, batch.groups[0].lag) == (3, 2)


@virtual
async def test_what_had_finished_is_sampled_without_being_generated_again(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        group = run.submit("p", group_id="g")
        group.start(0).finish(Trajectory(text="kept", response_ids=(1, 2), log_probs=(-1.0, -2.0), reward=1.0))
        path = killed(tmp_path / "run")

    async with opened(loop, path, session=endless) as run:
        (row,) = (await run.sample(1)).rows

    assert (row.trajectory.text, list(row.trajectory.response_ids)) == ("kept", [1, 2])


@virtual
async def test_a_late_result_of_the_killed_process_is_fenced(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit("p", group_id="g").start(0)
        path = killed(tmp_path / "run")

    async with opened(loop, path) as run:
        reason = run.ledger.finish("g", 0, 1, Trajectory(reward=1.0))

        assert reason == "attempt"
        assert [group.id for group in run.pending()] == ["g"]


@virtual
async def test_a_sampler_that_waited_in_the_killed_process_waits_no_more(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        waiting = asyncio.ensure_future(run.sample(2))
        await quiet()
        path = killed(tmp_path / "run")
        waiting.cancel()
        await asyncio.wait({waiting})

    async with opened(loop, path) as run:
        assert run.explain().needed == 0
        ready(run, "a")
        assert (await run.sample(1)).group_ids == ["a"]


@virtual
async def test_a_second_recovery_changes_nothing_more(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a", "b")
        await run.sample(1)
        run.submit("p", group_id="g").start(0)
        first = killed(tmp_path / "run")

    async with opened(loop, first) as run:
        assert recovery(run) == ["RunRecovered", "BatchReturned", "GroupRequeued"]
        second = killed(first)

    async with opened(loop, second) as run:
        assert recovery(run) == ["RunRecovered"]
        assert run.book.groups["g"].sessions[0].attempt == 2
        assert run.sampleable_count() == 2


@virtual
async def test_every_opening_begins_a_new_lineage_at_the_last_version(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        await run.publish_weights(4)

    async with opened(loop, tmp_path / "run") as run:
        assert (run.weight_version, run.book.lineage) == (4, 2)
    async with opened(loop, tmp_path / "run", weight_version=3) as run:
        assert (run.weight_version, run.book.lineage) == (3, 3)


@virtual
async def test_a_returned_group_keeps_the_lag_it_was_sampled_with(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=0)) as run:
        ready(run, "a")
        await run.sample(1)
        await run.publish_weights(7)

    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=0)) as run:
        batch = await run.sample(1)

    assert [(group.group_id, group.lag) for group in batch.groups] == [("a", 0)]


@virtual
async def test_groups_keep_their_own_size_when_the_runs_changes(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=half_right, group_size=4) as run:
        run.submit("done", group_id="done")
        await run.wait_sampleable(1)
        run.submit("under way", group_id="under way")
        await quiet()
        path = killed(tmp_path / "run")

    async with opened(loop, path, session=half_right, group_size=8) as run:
        run.submit("new", group_id="new")
        batch = await run.sample(3)

    assert {group.group_id: group.size for group in batch.groups} == {"done": 4, "under way": 4, "new": 8}


@virtual
async def test_ids_of_groups_that_have_left_stay_taken(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")
        await run.commit(await run.sample(1))

    async with opened(loop, tmp_path / "run") as run:
        with pytest.raises(DuplicateGroup):
            run.submit("p", group_id="a")
