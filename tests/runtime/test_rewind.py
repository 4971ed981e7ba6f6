"""Going back to a mark: what becomes of the groups of the line that is gone back from."""

import pytest

from groupstate import Rules, open_run
from groupstate.core import events as ev
from groupstate.errors import BadSettings
from groupstate.inspect.story import story
from tests.runtime.scenes import events, finish, killed, opened, ready, virtual


async def abandoned(loop, path, **options):
    """A run with a mark at version 1, and groups that ended before and behind it; killed: its copy, and the mark."""
    async with opened(loop, path, **options) as run:
        ready(run, "early")
        finish(run.submit("p", group_id="val", partition="val"), 1.0)
        await run.publish_weights(1)
        mark = await run.checkpoint("step 1")
        await run.publish_weights(2)
        ready(run, "late", "committed")
        await run.sample(2)  # early and late, never committed
        await run.commit(await run.sample(1))
        run.submit("p", group_id="flying").start(0)
        run.submit("p", group_id="waiting")
        finish(run.submit("p", group_id="val 2", partition="val"), 1.0)
        return killed(path), mark


@virtual
async def test_groups_that_ended_behind_the_mark_are_kept_unless_asked(loop, tmp_path):
    path, mark = await abandoned(loop, tmp_path / "run")

    async with opened(loop, path, resume_at=mark) as run:
        assert (await run.sample(3)).group_ids == ["early", "late", "committed"]
        assert events(run, ev.GroupEvicted) == []
        assert events(run, ev.RunRewound)[0].evicts is False


@virtual
async def test_groups_that_ended_behind_the_mark_are_evicted_on_demand_and_earn_refills(loop, tmp_path):
    path, mark = await abandoned(loop, tmp_path / "run", rules=Rules(lag_max=2))

    async with opened(loop, path, resume_at=mark, on_rewind="evict", source=["new 1", "new 2", "new 3"]) as run:
        evicted = events(run, ev.GroupEvicted)
        assert [(e.group_id, e.reasons, e.lag, e.credit) for e in evicted] == [
            ("late", ("stale",), 0, 1),
            ("committed", ("stale",), 0, 1),
        ]
        assert set(run.book.groups) >= {"early", "val", "val 2", "flying", "waiting"}
        assert [group.id for group in run.pending()][:2] == ["flying", "waiting"]
        assert [e.cause for e in events(run, ev.GroupSubmitted)[-2:]] == ["refill", "refill"]
        told = story(run.ledger.log.read(), "late")
        assert "it ended behind mark 1, which the run went back to" in "\n".join(step.text for step in told.steps)


@virtual
async def test_in_sync_mode_nobody_waits_yet_so_they_earn_nothing(loop, tmp_path):
    rules = Rules(mode="sync", batch_size=2)
    async with opened(loop, tmp_path / "run", rules=rules) as run:
        mark = await run.checkpoint()
        ready(run, "late")

    async with opened(loop, tmp_path / "run", resume_at=mark, on_rewind="evict") as run:
        assert [(e.group_id, e.credit) for e in events(run, ev.GroupEvicted)] == [("late", 0)]


@virtual
async def test_a_group_submitted_before_the_mark_and_stamped_above_it_is_evicted(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        finish(run.submit("p", group_id="ahead", weight_version=5), 1.0)
        mark = await run.checkpoint()

    async with opened(loop, tmp_path / "run", resume_at=mark, on_rewind="evict") as run:
        assert [e.group_id for e in events(run, ev.GroupEvicted)] == ["ahead"]


@virtual
async def test_going_back_and_evicting_twice_changes_nothing_more(loop, tmp_path):
    path, mark = await abandoned(loop, tmp_path / "run")

    for _ in range(2):
        async with opened(loop, path, resume_at=mark, on_rewind="evict") as run:
            assert len(events(run, ev.GroupEvicted)) == 2
            assert run.sampleable_count() == 1


async def test_an_unknown_way_is_refused_with_the_right_ones(tmp_path):
    with pytest.raises(BadSettings, match="on_rewind is 'drop'; it is one of keep, evict"):
        async with open_run(tmp_path / "run", on_rewind="drop"):
            pass
    assert not (tmp_path / "run").exists()
