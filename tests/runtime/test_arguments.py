"""What a run is called with: checked at the door, before anything is changed."""

from typing import Any

import numpy as np
import pytest

from groupstate import PerBatch, Prompt, Rules, open_run
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadInput, BadSettings, GroupstateError
from groupstate.log.memory import MemoryLog
from groupstate.runtime.observed import StatusFeed
from tests.runtime.scenes import events, finish, half_right, opened, quiet, ready, virtual

NO_INTEGERS = [True, 1.0, "9", 2**70]

IN_ORDER = Rules.in_order(2)


async def done(call: Any) -> Any:
    """What a call gives, async or not."""
    return await call if hasattr(call, "__await__") else call


# Integers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [*NO_INTEGERS, None], ids=repr)
@virtual
async def test_a_version_that_is_no_integer_reaches_neither_the_engine_nor_the_log(loop, version):
    engine = ScriptedEngine([])
    async with opened(loop, engine=engine, source=["a", "b"], session=half_right) as run:
        await quiet()
        before = run.book.last_seq
        with pytest.raises(BadInput) as refused:
            await run.publish_weights(version, {"w": 1.0})

        assert str(refused.value).startswith(f"weight_version is {version!r}; it must be an integer")
        assert (engine.published, run.weight_version, run.book.last_seq) == ([], 0, before)
        assert len(await run.sample(2, timeout_s=5)) == 2, "the rollout goes on"


@virtual
async def test_a_version_of_another_library_is_published_as_a_plain_integer(loop):
    engine = ScriptedEngine([])
    async with opened(loop, engine=engine, weight_version=np.int64(1)) as run:
        await run.publish_weights(np.int64(2), {"w": 1.0})
        ready(run, "a")
        await run.sample(np.int64(1), weight_version=np.uint8(3))

        assert engine.published == [(2, {"w": 1.0})]
        assert type(engine.published[0][0]) is int
        assert [event.weight_version for event in events(run, ev.RunStarted, ev.WeightsPublished)] == [1, 2, 3]


@virtual
async def test_integers_of_another_library_are_taken_wherever_one_is_asked_for(loop):
    async with opened(loop, group_size=np.int64(2), seed=np.int64(7), snapshot_events=np.int64(9)) as run:
        group = run.submit("a", weight_version=np.int64(0))
        finish(group, 0.0, 1.0)
        assert (group.size, await run.wait_sampleable(np.int64(1))) == (2, 1)
        batch = await run.sample(1)
        await run.release(np.int64(batch.number))
        batch = await run.sample(1)
        await run.commit(np.int64(batch.number))
        run.submit("b", n=np.int64(1)).start(np.int64(0))
        run.submit(Prompt("c", n=np.int64(3)))

        assert [event.size for event in events(run, ev.GroupSubmitted)] == [2, 1, 3]
        assert events(run, ev.RunStarted)[0].seed == 7


@virtual
async def test_a_target_version_of_another_library_is_taken(loop):
    async with opened(loop, rules=IN_ORDER) as run:
        run.submit("a", target_version=np.int64(1))

        assert events(run, ev.GroupSubmitted)[0].target_version == 1


@pytest.mark.parametrize("value", [*NO_INTEGERS, [1]], ids=repr)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda run, value: run.sample(1, weight_version=value), "weight_version"),
        (lambda run, value: run.submit("x", weight_version=value), "weight_version"),
        (lambda run, value: run.submit("x", target_version=value), "target_version"),
        (lambda run, value: run.submit("x", n=value), "group 'g2' has n = "),
        (lambda run, value: run.submit(Prompt("x", n=value)), "group 'g2' has n = "),
        (lambda run, value: run.wait_sampleable(value), "count"),
        (lambda run, value: run.commit(value), "batch"),
        (lambda run, value: run.release(value), "batch"),
        (lambda run, value: run.pending()[0].start(value), "session"),
        (lambda run, value: run.sample(value), "batch_size"),
    ],
    ids=["sample", "stamp", "target", "n", "prompt", "wait", "commit", "release", "start", "size"],
)
@virtual
async def test_what_is_no_integer_is_refused_by_name_and_nothing_is_changed(loop, call, name, value):
    async with opened(loop, rules=IN_ORDER) as run:
        run.submit("there")
        before = run.book.last_seq
        with pytest.raises(GroupstateError) as refused:
            await done(call(run, value))

        assert name in str(refused.value)
        assert f"{value!r}" in str(refused.value)
        assert "it must be a" in str(refused.value)
        assert run.book.last_seq == before


@pytest.mark.parametrize("value", NO_INTEGERS[:3], ids=repr)
@pytest.mark.parametrize("name", ["weight_version", "seed", "group_size", "snapshot_events", "disk_bytes_max"])
@virtual
async def test_a_setting_that_is_no_integer_is_refused_before_a_log_is_made(loop, tmp_path, name, value):
    with pytest.raises(BadSettings, match=f"^{name} is "):
        async with open_run(tmp_path / "run", **{name: value}):
            pass

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_a_feed_takes_no_other_versions_and_sizes(value):
    feed = StatusFeed.begin(MemoryLog(), Rules(), group_size=np.int64(1), weight_version=np.int64(3))

    with pytest.raises(BadInput, match="weight_version is "):
        feed.sample_now(1, weight_version=value)
    with pytest.raises(BadInput, match=r"batch is .*; it must be a batch or its number"):
        feed.commit(value)
    with pytest.raises(BadSettings, match="group_size is "):
        StatusFeed.begin(MemoryLog(), Rules(), group_size=value)
    with pytest.raises(BadSettings, match="weight_version is "):
        StatusFeed.begin(MemoryLog(), Rules(), group_size=1, weight_version=value)
    assert feed.book.weight_version == 3


def test_rules_keep_plain_integers_and_refuse_what_is_none():
    rules = Rules(batch_size=np.int64(4), lag_max=np.array(1), admission=PerBatch(warmup=np.int32(2)))

    assert rules == Rules(batch_size=4, lag_max=1, admission=PerBatch(warmup=2))
    assert [type(value) for value in (rules.batch_size, rules.lag_max)] == [int, int]
    for value in (True, 4.0, "4"):
        with pytest.raises(BadSettings, match=r"batch_size is .*; it must be an integer or None"):
            Rules(batch_size=value)


def test_presets_count_with_integers_of_another_library_too():
    assert Rules.windowed(2, max_inflight_prompts=np.int64(4), max_buffered_rollouts=np.int64(8)) == Rules.windowed(
        2, max_inflight_prompts=4, max_buffered_rollouts=8
    )
    assert Rules.verl_async(2, max_off_policy_threshold=np.int64(3)).lag_max == 2
    for make in (
        lambda: Rules.verl_async(2, max_off_policy_threshold="3"),
        lambda: Rules.windowed(2, max_inflight_prompts="4"),
        lambda: Rules.windowed(2, max_buffered_rollouts=8.0),
    ):
        with pytest.raises(BadSettings, match=r"max_\w+ is .*; it must be an integer"):
            make()
