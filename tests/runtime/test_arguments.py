"""What a run is called with: checked at the door, before anything is changed."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from groupstate import PerBatch, Prompt, Rules, open_run, sync
from groupstate.core import events as ev
from groupstate.engines.given import need_in_flight
from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadInput, BadSettings, GroupstateError
from groupstate.integrations.aggregation import Aggregator
from groupstate.log.memory import MemoryLog
from groupstate.runtime.observed import StatusFeed
from groupstate.tensors import to_torch
from tests.runtime.scenes import events, finish, half_right, opened, quiet, ready, virtual

NO_INTEGERS = [True, 1.0, "9", 2**70]

IN_ORDER = Rules.in_order(2)


async def done(call: Any) -> Any:
    """What a call gives, async or not."""
    return await call if hasattr(call, "__await__") else call


# Words ---------------------------------------------------------------------------------------------------


def tensors(**options: Any) -> None:
    whole: dict[str, Any] = {"layout": "padded", "pad_id": 0, "advantages": None, "reward": "reward", "log_probs": True}
    to_torch(None, max_prompt=None, max_response=None, device=None, **whole | options)  # type: ignore[arg-type]


def opening(**options: Any) -> Callable[[], object]:
    def call() -> None:
        with sync.open_run(**options):
            pass

    return call


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Aggregator({"a": "meen"}), "mean"),  # type: ignore[dict-item]
        (lambda: Aggregator(on_not_finite="counts"), "count"),  # type: ignore[arg-type]
        (opening(durability="fsnc"), "fsync"),
        (opening(keep_log="archiv"), "archive"),
        (opening(close_on=["SIGTREM"]), "SIGTERM"),
        (opening(on_rewind="kep"), "keep"),
        (opening(track_by="weight_versions"), "weight_version"),
        (lambda: need_in_flight("contine"), "continue"),
        (lambda: OpenAIEngine("http://localhost:1", dialect="vlm"), "vllm"),  # type: ignore[arg-type]
        (lambda: tensors(advantages="gppo"), "grpo"),
        (lambda: tensors(layout="paded"), "padded"),
    ],
)
def test_a_word_that_there_is_not_is_told_with_the_one_that_was_meant(call: Callable[[], object], word: str) -> None:
    with pytest.raises(GroupstateError, match=rf" \(did you mean '{word}'\?\)"):
        call()


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


# What a run is opened with -------------------------------------------------------------------------------


class Half:
    """An engine that lacks some of what one has."""

    weight_version = 0
    tokenizer = None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rules": {"lag_max": 1}}, "rules is {'lag_max': 1}; it must be Rules, such as Rules(lag_max=1), or None"),
        ({"params": {"temperature": 0}}, "params is {'temperature': 0}; it must be SamplingParams, such as "),
        ({"engine": "vllm"}, "engine is 'vllm'; it must be an engine, an object with what groupstate.Engine lists"),
        ({"engine": Half}, "engine is the class Half; it must be an object of it"),
        ({"engine": Half()}, ", which has no generate; it must be an engine"),
        ({"resume_at": "step 1"}, "resume_at is 'step 1'; it must be the CheckpointMark that run.checkpoint() gave"),
        ({"on_rewind": ["keep"]}, "on_rewind is ['keep']; it is one of keep, evict"),
        ({"source_changed": "no"}, "source_changed is 'no'; it must be True or False"),
        ({"take_over": 1}, "take_over is 1; it must be True or False"),
        ({"grace_s": "5"}, "grace_s is '5'; it must be a number of seconds, finite and at least 0"),
        ({"cancel_grace_s": None}, "cancel_grace_s is None; it must be a number of seconds"),
        ({"close_on": None}, "close_on is None; it must be a list of signals, such as ['SIGTERM'], or () for none"),
        ({"clock_ns": 3}, "clock_ns is 3; it must be a function that gives whole nanoseconds, as time.time_ns does"),
        ({"clock_ns": lambda: 1.5}, "clock_ns gives 1.5; it must be a function that gives whole nanoseconds"),
        ({"durability": 3}, "durability is 3; it is one of fsync, os, memory"),
        ({"keep_log": True}, "keep_log is True; it is 'all', 'archive', or a number of checkpoints"),
        ({"log": "runs/x"}, "log is 'runs/x'; it must be an event log, as FileLog.create('runs/one') or MemoryLog()"),
        ({"log": MemoryLog}, "log is the class MemoryLog; it must be an object of it"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
@virtual
async def test_a_setting_of_another_kind_is_refused_before_anything_is_opened(loop, tmp_path, options, text):
    source = iter(["a"])
    where = {} if "log" in options else {"path": tmp_path / "run"}
    with pytest.raises(BadSettings) as refused:
        async with open_run(source=source, session=half_right, **where, **options):
            pass

    assert text in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert next(source) == "a"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"grace_s": -1.0}, "grace_s is -1.0"),
        ({"grace_s": float("nan")}, "grace_s is nan"),
        ({"cancel_grace_s": -1.0}, "cancel_grace_s is -1.0"),
        ({"cancel_grace_s": float("nan")}, "cancel_grace_s is nan"),
    ],
)
@virtual
async def test_settings_that_make_no_sense_are_refused_and_the_log_is_closed(loop, options, shown):
    log = MemoryLog()

    with pytest.raises(BadSettings, match=shown):
        async with opened(loop, log=log, **options):
            pass

    assert "closed" in repr(log)


@pytest.mark.parametrize("path", ["", 3, b"run", "a\0b"], ids=repr)
@virtual
async def test_a_path_that_names_no_directory_is_refused(loop, path):
    with pytest.raises(BadSettings) as refused:
        async with open_run(path):
            pass

    assert str(refused.value).startswith(f"path is {path!r}; it must be the name of a directory")


@virtual
async def test_a_log_and_a_path_together_are_refused_and_the_log_is_closed(loop, tmp_path):
    log = MemoryLog()
    with pytest.raises(BadSettings, match=r"both path .* and a log are given"):
        async with open_run(tmp_path / "run", log=log):
            pass

    assert "closed" in repr(log)


@pytest.mark.parametrize("source", [3, b"ab", None], ids=repr)
@virtual
async def test_prompts_to_validate_on_come_from_a_source(loop, source):
    async with opened(loop) as run:
        with pytest.raises(BadInput, match="can't give prompts; a source is a list, a file name"):
            await run.validate(source)


@virtual
async def test_weights_for_an_engine_that_takes_none_are_refused(loop):
    engine = Half()
    engine.generate = None
    async with opened(loop, engine=engine) as run:
        with pytest.raises(BadSettings, match="this run's engine has no publish_weights, so it takes none"):
            await run.publish_weights(1, {"w": 1.0})

        assert run.weight_version == 0
        await run.publish_weights(1)


def test_the_blocking_twin_refuses_the_same():
    with (
        pytest.raises(BadSettings, match=r"rules is {'lag_max': 1}; it must be Rules"),
        sync.open_run(rules={"lag_max": 1}),
    ):
        pass
    with sync.open_run() as run:
        with pytest.raises(BadInput, match="weight_version is '6'; it must be an integer"):
            run.publish_weights("6")
        with pytest.raises(BadInput, match="batch is None; it must be a Batch or its number"):
            run.commit(None)
        with pytest.raises(BadInput, match="name is 3; it must be a string"):
            run.checkpoint(3)


# What its methods are called with ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: run.commit([1]), "batch is [1]; it must be a Batch or its number"),
        (lambda run: run.commit(None), "batch is None; it must be a Batch or its number"),
        (lambda run: run.checkpoint(3), "name is 3; it must be a string"),
        (lambda run: run.checkpoint("\ud800"), r"name is '\ud800'; it must be a string that UTF-8 can hold"),
        (lambda run: run.close(None), "reason is None; it must be a string"),
        (lambda run: run.close(mark="yes"), "mark is 'yes'; it must be True or False"),
        (lambda run: run.cancel(["g1"]), "group_id is ['g1']; it must be the id of a group, a string"),
        (lambda run: run.requeue(1), "group_id is 1; it must be the id of a group, a string"),
        (lambda run: run.requeue("there", 3), "reason is 3; it must be a string"),
        (lambda run: run.submit("x", dataset=3), "the dataset of group 'g3' is 3; it must be a string"),
        (lambda run: run.submit(Prompt("x", dataset=3)), "the dataset of group 'g3' is 3; it must be a string"),
        (lambda run: run.submit(Prompt("x", extra=3)), "the extra of group 'g3' is 3; it must be a mapping of names"),
        (lambda run: run.submit("x", group_id=3), "a group id is a string that is not empty, not 3"),
        (lambda run: run.submit("x", partition=3), "there is no partition 3; it is 'train' or 'val'"),
        (lambda run: run.sample(1, partition=["val"]), "there is no partition ['val']; it is 'train' or 'val'"),
        (lambda run: run.wait_sampleable(-1), "count is -1; it must be an integer of at least 0"),
        (lambda run: run.wait_sampleable(1, "all"), "there is no partition 'all'"),
        (lambda run: run.sampleable_count(["val"]), "there is no partition ['val']"),
        (lambda run: run.explain({}), "there is no partition {}"),
        (lambda run: run.validate([]), "there are no prompts to validate on: 'list' gives none"),
        (lambda run: run.validate(["q"], n=0), "n is 0; it must be an integer from 1 to 4096"),
        (lambda run: run.validate(["q"], greedy="no"), "greedy is 'no'; it must be True or False"),
        (lambda run: run.validate(["q"], params={"top_p": 1}), "params is {'top_p': 1}; it must be SamplingParams"),
        (lambda run: run.trainer_turn(sleep=0), "sleep is 0; it must be True or False"),
        (lambda run: run.pending()[0].start(0, worker=3), "worker is 3; it must be a string"),
    ],
)
@virtual
async def test_an_argument_of_another_kind_is_refused_and_nothing_is_changed(loop, call, text):
    async with opened(loop) as run:
        run.submit("x", group_id="there")
        run.submit("y")
        before = run.book.last_seq
        with pytest.raises(GroupstateError) as refused:
            await done(call(run))

        assert text in str(refused.value)
        assert run.book.last_seq == before
        assert run.submit("z").phase == "pending", "the run is open"


@virtual
async def test_whether_a_failure_may_be_retried_is_true_or_false(loop):
    async with opened(loop) as run:
        attempt = run.submit("x").start(0)
        with pytest.raises(BadInput, match="retryable is 'no'; it must be True or False"):
            attempt.fail("broken", retryable="no")

        assert attempt.fail("broken", retryable=False)


@virtual
async def test_ids_that_are_made_avoid_those_that_are_taken(loop):
    async with opened(loop) as run:
        run.submit("p", group_id="g2")

        assert [run.submit("p").id, run.submit("p").id] == ["g3", "g4"]
