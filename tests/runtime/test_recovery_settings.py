"""Under which rules a run goes on, where it is kept, and what opening it leaves as it was."""

import gc

import pytest

from groupstate import Rules, Select, open_run
from groupstate.core import events as ev
from groupstate.core.rules import recorded_rules
from groupstate.errors import BadSettings
from tests.runtime.scenes import events, finish, opened, ready, virtual

# Rules -----------------------------------------------------------------------------------------------


@virtual
async def test_without_rules_a_run_goes_on_under_those_of_its_log(loop, tmp_path):
    rules = Rules(mode="sync", batch_size=4, filter_metric="acc")
    async with opened(loop, tmp_path / "run", rules=rules):
        pass

    async with opened(loop, tmp_path / "run") as run:
        assert run.rules == rules


@virtual
async def test_new_rules_hold_for_new_decisions_and_the_past_stays(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=5)) as run:
        ready(run, "old")
        await run.publish_weights(4)
        await run.commit(await run.sample(1))
        ready(run, "flat", n=2)
        finish(run.submit("p", n=2, group_id="uniform"), 1.0, 1.0)
        await run.publish_weights(6)

    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=5, filter_metric="reward")) as run:
        assert run.book.totals["committed"] == 1
        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["uniform"]


def newest(book, rules, request):
    """What became sampleable last."""
    yield Select([group.group_id for group in book.ready()][-request.size :])


@virtual
async def test_a_run_whose_rules_nobody_may_write_any_more_is_opened_and_goes_on(loop, tmp_path):
    taken_then = recorded_rules({"mode": "sync", "lag_max": 0, "on_stale": "wait"})
    async with opened(loop, tmp_path / "run", rules=taken_then) as run:
        ready(run, "a", "b", "c")
    async with opened(loop, tmp_path / "run", weight_version=5) as run:
        assert run.rules == taken_then
        assert (await run.sample(1)).group_ids == ["a"]
    async with opened(loop, tmp_path / "run", selection=newest) as run:
        assert (await run.sample(1)).group_ids == ["c"]


# Where a run is kept ---------------------------------------------------------------------------------


async def test_durability_memory_keeps_nothing_on_disk(tmp_path):
    async with open_run(tmp_path / "run", durability="memory") as run:
        run.submit("p")

    assert not (tmp_path / "run").exists()


async def test_durability_os_leaves_a_run_that_goes_on(tmp_path):
    async with open_run(tmp_path / "run", durability="os") as run:
        run.submit("p", group_id="a")
    async with open_run(tmp_path / "run", durability="os", take_over=True) as run:
        assert [group.id for group in run.pending()] == ["a"]


async def test_an_unknown_durability_is_refused_with_the_right_ones(tmp_path):
    with pytest.raises(BadSettings, match="'disk'; it is one of fsync, os, memory"):
        async with open_run(tmp_path / "run", durability="disk"):
            pass


async def test_durability_memory_passes_over_no_run_that_is_there(tmp_path):
    async with open_run(tmp_path / "run"):
        pass
    with pytest.raises(BadSettings, match="holds a run on disk"):
        async with open_run(tmp_path / "run", durability="memory"):
            pass


# The garbage collector -------------------------------------------------------------------------------


@pytest.fixture
def collector():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@virtual
async def test_opening_leaves_the_collector_as_it_was(loop, collector, enabled):
    (gc.enable if enabled else gc.disable)()
    async with opened(loop):
        assert gc.isenabled() is enabled
