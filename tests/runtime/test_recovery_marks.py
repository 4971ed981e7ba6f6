"""Opening a run at a checkpoint's mark: what is undone, what stays, and which marks are refused."""

import asyncio
from pathlib import Path

import pytest

from groupstate import CheckpointMark, Rules, open_run
from groupstate.core import events as ev
from groupstate.errors import BadMark, BadSettings
from tests.runtime.scenes import events, finish, killed, opened, ready, virtual


async def trained(loop, path: Path, steps: int, marks: list[CheckpointMark], prefix: str = "g") -> None:
    """Batches of one group, each committed and marked before the next version is published."""
    async with opened(loop, path) as run:
        for step in range(run.weight_version + 1, run.weight_version + 1 + steps):
            ready(run, f"{prefix}{step}")
            await run.commit(await run.sample(1))
            await run.publish_weights(step)
            marks.append(await run.checkpoint(f"step {step}"))


@virtual
async def test_going_back_to_a_mark_undoes_the_commits_behind_it(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 3, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[1]) as run:
        assert (run.weight_version, run.book.totals["committed"]) == (2, 2)
        batch = await run.sample(1)

    assert [(group.group_id, group.lag, group.prompt.content) for group in batch.groups] == [("g3", 0, "g3")]


@virtual
async def test_going_back_keeps_what_was_generated_since(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "before")
        mark = await run.checkpoint()
        ready(run, "after")
        run.submit("p", group_id="under way").start(0)
        await run.publish_weights(1)

    async with opened(loop, tmp_path / "run", resume_at=mark) as run:
        assert (await run.sample(2)).group_ids == ["before", "after"]
        assert [group.id for group in run.pending()] == ["under way"]


@virtual
async def test_an_eviction_behind_the_mark_is_not_undone(loop, tmp_path):
    rules = Rules(filter_metric="reward")
    async with opened(loop, tmp_path / "run", rules=rules) as run:
        mark = await run.checkpoint()
        finish(run.submit("p", n=2, group_id="flat"), 1.0, 1.0)

    async with opened(loop, tmp_path / "run", rules=rules, resume_at=mark) as run:
        assert run.book.departed == {"flat": "evicted"}


@virtual
async def test_going_back_begins_a_new_lineage_and_versions_may_be_used_again(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 3, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[1]) as run:
        assert run.book.lineage > marks[1].lineage
        await run.publish_weights(3)
        assert [(event.weight_version, event.lineage) for event in events(run, ev.WeightsPublished)][-1] == (3, 2)


@virtual
async def test_work_of_the_abandoned_line_counts_its_lag_from_the_mark(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        mark = await run.checkpoint()
        await run.publish_weights(5)
        ready(run, "newer")

    async with opened(loop, tmp_path / "run", resume_at=mark) as run:
        await run.publish_weights(2)

        assert (await run.sample(1)).groups[0].lag == 2


@virtual
async def test_one_can_go_back_to_the_same_mark_again(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 2, marks)

    for _ in range(2):
        async with opened(loop, tmp_path / "run", resume_at=marks[0]) as run:
            batch = await run.sample(1)
            assert batch.group_ids == ["g2"]
            await run.commit(batch)


@virtual
async def test_nothing_committed_before_the_mark_comes_back(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 4, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[-1]) as run:
        assert run.sampleable_count() == 0


@virtual
async def test_a_mark_says_where_it_stands_and_survives_json(loop, tmp_path):
    async with opened(loop, tmp_path / "run", weight_version=2) as run:
        mark = await run.checkpoint("best")

        assert (mark.run_id, mark.mark, mark.weight_version, mark.lineage, mark.name) == (run.id, 1, 2, 1, "best")
        assert events(run)[mark.seq - 1] == ev.CheckpointMarked(1, 2, 1, "best")
    assert CheckpointMark.from_json(mark.to_json()) == mark


@virtual
async def test_a_mark_names_the_lineage_that_it_was_made_in(loop, tmp_path):
    async with opened(loop, tmp_path / "run"):
        pass
    async with opened(loop, tmp_path / "run") as run:
        mark = await run.checkpoint()

        assert mark.lineage == run.book.lineage == 2
        assert events(run)[mark.seq - 1].lineage == 2


@pytest.mark.parametrize("text", ["", "{}", '{"mark": "one"}', b"\xff", '{"run_id": "x", "extra": 1}'])
def test_what_is_no_mark_is_refused(text):
    with pytest.raises(BadMark, match="not a checkpoint mark"):
        CheckpointMark.from_json(text)


async def test_a_mark_carries_the_version_that_its_event_has(tmp_path):
    async with open_run(tmp_path / "run") as run:
        marking = asyncio.ensure_future(run.checkpoint())
        await asyncio.sleep(0)
        await run.publish_weights(5)
        mark = await marking

        assert mark.weight_version == 0


@virtual
async def test_a_mark_of_another_run_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "one") as run:
        mark = await run.checkpoint()
    async with opened(loop, tmp_path / "two"):
        pass

    with pytest.raises(BadMark, match="is of run"):
        await opened(loop, tmp_path / "two", resume_at=mark).__aenter__()


@virtual
async def test_a_mark_of_a_later_log_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        older = killed(tmp_path / "run")
        ready(run, *"abcdef")
        mark = await run.checkpoint()

    with pytest.raises(BadMark, match="the log is older than the checkpoint"):
        await opened(loop, older, resume_at=mark).__aenter__()


@virtual
async def test_a_mark_that_is_too_old_is_refused_with_those_that_are_kept(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 4, marks)

    with pytest.raises(BadMark, match=r"mark 2 can't be gone back to any more; marks that are kept: 3, 4"):
        await opened(loop, tmp_path / "run", resume_at=marks[1]).__aenter__()


@virtual
async def test_a_mark_where_none_is_kept_says_so(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        mark = CheckpointMark(run_id=run.id, mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadMark, match="kept: none"):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()


@virtual
async def test_a_new_run_has_no_mark_to_go_back_to(loop, tmp_path):
    mark = CheckpointMark(run_id="x", mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadSettings, match="this one is new"):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()


@virtual
async def test_a_weight_version_that_differs_from_the_marks_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "run", weight_version=2) as run:
        mark = await run.checkpoint()

    with pytest.raises(BadSettings, match="weight_version is 3 and the mark says 2"):
        await opened(loop, tmp_path / "run", resume_at=mark, weight_version=3).__aenter__()
    async with opened(loop, tmp_path / "run", resume_at=mark, weight_version=2) as run:
        assert run.weight_version == 2


@virtual
async def test_a_refused_opening_changes_nothing_and_lets_go_of_the_lock(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        last = run.book.last_seq + 1
    mark = CheckpointMark(run_id="another", mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadMark):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()

    async with opened(loop, tmp_path / "run") as run:
        assert events(run)[last - 1] == ev.RunClosed("closed")
        assert isinstance(events(run)[last], ev.RunRecovered)
