"""Where the drop-in does otherwise than verl on purpose, and the switches that undo it; each beside verl's own."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupstate.errors import EvictionStreak, MissingMetric, SampleTimeout
from tests.verl.producing import POLL_S, Queue, Refiller, Waiting, construct

Make = Callable[..., Any]

ASYNC = {"trainer_mode": "separate_async"}


def theirs(verl_classes: Any, **settings: Any) -> Any:
    sync = settings.get("trainer_mode", "sync") == "sync"
    return construct(verl_classes.ReplayBuffer if sync else verl_classes.ReplayBufferAsync, **settings)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("groupstate")]


# Equality of values --------------------------------------------------------------------------------------

SIX_TIMES_0_7 = [0.7] * 6
"""Whose standard deviation numpy computes as 1.1e-16."""


def test_equal_values_are_equal(make: Make, queue: Queue) -> None:
    queue.group("flat", "finished", *SIX_TIMES_0_7)
    refill = Refiller(queue)
    buffer = make(**ASYNC, filter_groups_metric="acc", refill_fn=refill)

    assert queue.take(buffer, 1)[0] == ["refill0"]


@pytest.mark.parametrize("kwargs", [{"rules": {"spread": "std"}}, {"strict": True}])
def test_with_a_switch_they_deviate_as_in_verl(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    settings = {**ASYNC, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    for buffer in (make(**settings, sampler_kwargs=kwargs), theirs(verl_classes, **settings)):
        queue.group("flat", "finished", *SIX_TIMES_0_7)
        assert queue.take(buffer, 1)[0] == ["flat"]
        queue.clear()


# Order of ties -------------------------------------------------------------------------------------------


def test_groups_of_one_age_come_in_the_order_of_their_submission(make: Make, queue: Queue) -> None:
    uids = [queue.group(f"g{number:02}", "finished", 0.0) for number in range(12)]

    assert queue.take(make(), 12)[0] == uids


@pytest.mark.parametrize("kwargs", [{"ties": "set"}, {"strict": True}])
def test_with_a_switch_they_come_in_that_of_a_set(make: Make, queue: Queue, kwargs: dict[str, Any]) -> None:
    uids = [queue.group(f"g{number:02}", "finished", 0.0) for number in range(12)]

    assert queue.take(make(sampler_kwargs=kwargs), 12)[0] == list(set(uids))


# Underscores in uids -------------------------------------------------------------------------------------


def test_a_uid_may_hold_underscores(make: Make, queue: Queue) -> None:
    queue.group("math_17_b", "finished", 0.0, 1.0)
    queue.group("math", "finished", 0.0, stamp=1)
    batch, _ = make().sample(global_steps=1, partition_id=queue.partition, batch_size=1)

    assert batch.keys == ["math_17_b_0_0", "math_17_b_1_0"]
    assert queue.uids() == {"math"}


@pytest.mark.parametrize("kwargs", [{"uid_split": "left"}, {"strict": True}])
def test_with_a_switch_a_uid_ends_at_the_first_underscore(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    for buffer in (make(sampler_kwargs=kwargs), theirs(verl_classes)):
        queue.group("a_b", "finished", 0.0)
        with pytest.raises(RuntimeError, match="trajector"):
            queue.take(buffer, 1)
        queue.clear()


def test_two_keys_of_one_trajectory_may_go_in_any_order(make: Make, queue: Queue) -> None:
    """Split at the first underscore they are the same one."""
    for key in ("a_b_0_0", "a_c_0_0"):
        queue.row(key)
    buffer = make(**ASYNC, sampler_kwargs={"uid_split": "left"})
    assert buffer.get_sampleable_count(0, queue.partition) == 0
    queue.clear("a_c_0_0")
    assert buffer.get_sampleable_count(0, queue.partition) == 0
    queue.clear("a_b_0_0")

    assert buffer.get_sampleable_count(0, queue.partition) == 0


# Groups without a trajectory -----------------------------------------------------------------------------


def test_a_finished_group_without_a_trajectory_is_replaced_in_async_mode(
    make: Make, queue: Queue, verl_classes: Any
) -> None:
    """In verl it is sampled, and makes the batch shorter."""
    queue.group("empty", "finished")
    assert queue.take(theirs(verl_classes, **ASYNC), 1)[0] == []
    queue.group("empty", "finished")
    refill = Refiller(queue)
    uids, metrics = queue.take(make(**ASYNC, refill_fn=refill), 1)

    assert uids == ["refill0"]
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}


def test_a_finished_group_without_a_trajectory_leaves_its_place_empty_in_sync_mode(
    make_each: Make, queue: Queue
) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("empty", "finished")

    assert queue.take(make_each(), 2)[0] == ["a"]


def test_with_a_filter_it_is_replaced_in_sync_mode_too(make: Make, queue: Queue, verl_classes: Any) -> None:
    """It stops verl."""
    settings = {"filter_groups_metric": "acc", "train_batch_size": 1, "refill_fn": Refiller(queue)}
    queue.group("empty", "finished")
    with pytest.raises(RuntimeError, match="empty"):
        queue.take(theirs(verl_classes, **settings), 1)

    assert queue.take(make(**settings), 1)[0] == ["refill0"]


@pytest.mark.parametrize("kwargs", [{"empty_groups": "keep"}, {"strict": True}])
def test_with_a_switch_it_is_sampled_in_async_mode_and_the_batch_is_short(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    for buffer in (make(**ASYNC, sampler_kwargs=kwargs), theirs(verl_classes, **ASYNC)):
        for uid, *values in (("empty", None, None), ("a", 0.0, 1.0), ("alone", None, None)):
            queue.group(uid, "finished", *values, stamp=int(uid == "alone"))
        batch, metrics = buffer.sample(global_steps=1, partition_id=queue.partition, batch_size=2)

        assert (set(batch.keys), len(batch.tags), metrics) == ({"a_0_0", "a_1_0"}, 2, {})
        assert queue.uids() == {"alone"}
        assert queue.take(buffer, 1, global_steps=1) == ([], {})
        assert queue.uids() == set()
        queue.clear()


@pytest.mark.parametrize("kwargs", [{"empty_groups": "keep"}, {"strict": True}])
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_with_a_switch_it_stops_the_run_where_there_is_a_filter(
    make: Make, queue: Queue, verl_classes: Any, mode: str, kwargs: dict[str, Any]
) -> None:
    settings = {"trainer_mode": mode, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    queue.group("good", "finished", 0.0, 1.0)
    queue.group("empty", "finished")
    with pytest.raises(MissingMetric, match="group 'empty' has no metric 'acc'"):
        queue.take(make(**settings, sampler_kwargs=kwargs), 1)
    with pytest.raises(RuntimeError, match="empty"):
        queue.take(theirs(verl_classes, **settings), 1)

    assert queue.uids() == {"good", "empty"}


@pytest.mark.parametrize("kwargs", [{"empty_groups": "keep"}, {"strict": True}])
def test_with_a_switch_it_is_kept_where_failed_ones_are_replaced(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    for switch in (kwargs, None):
        refill = Refiller(queue)
        settings = {"sync_refill_failed_groups": True, "refill_fn": refill, "gen_batch_size": 1}
        buffer = theirs(verl_classes, **settings) if switch is None else make(**settings, sampler_kwargs=switch)
        queue.group("empty", "finished")
        queue.group("failed", "failure")
        assert set(queue.take(buffer, 2)[0]) == {"refill0"}
        assert (refill.calls, queue.uids()) == ([1], set())
        queue.clear()


def test_a_session_without_a_trajectory_is_no_failure(make_each: Make, queue: Queue) -> None:
    """It is counted as one that finished with none, unless the rules say otherwise."""
    queue.group("short", "finished", 0.0, None)

    assert queue.take(make_each(**ASYNC), 1)[0] == ["short"]


def test_with_a_switch_a_session_without_a_trajectory_has_failed(make: Make, queue: Queue) -> None:
    queue.group("short", "finished", 0.0, None)
    refill = Refiller(queue)
    kwargs = {"group_size": 2, "rules": {"empty_session": "fail"}}

    assert queue.take(make(**ASYNC, refill_fn=refill, sampler_kwargs=kwargs), 1)[0] == ["refill0"]


# What can't go on ----------------------------------------------------------------------------------------


def test_a_wait_in_which_nothing_happens_says_what_it_waits_for(
    make: Make, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.group("stuck", "running")
    buffer = make(sampler_kwargs={"stall_s": 4 * POLL_S})
    waiting = Waiting(lambda: queue.take(buffer, 1))
    while waiting.is_alive() and not warnings(caplog):
        pass
    queue.group("stuck", "finished", 0.0)
    waiting.ended()

    text = warnings(caplog)[0]
    assert "a wait is stalled" in text
    assert "0 of 1 groups are sampleable" in text
    assert "'stuck' is running" in text


def test_it_is_said_once_in_a_while(make: Make, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.group("stuck", "running")
    buffer = make(sampler_kwargs={"stall_s": 5 * POLL_S, "timeout_s": 23 * POLL_S})
    with pytest.raises(SampleTimeout):
        queue.take(buffer, 1)

    assert 1 <= len(warnings(caplog)) <= 4


def test_with_a_switch_it_waits_in_silence(make: Make, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.group("stuck", "running")
    buffer = make(sampler_kwargs={"stall_s": 0, "timeout_s": 10 * POLL_S})
    with pytest.raises(SampleTimeout, match="'stuck' is running"):
        queue.take(buffer, 1)

    assert warnings(caplog) == []


def test_a_wait_for_groups_ends_too(make: Make, queue: Queue) -> None:
    queue.group("old", "running", 0.0)
    buffer = make(**ASYNC, max_off_policy_threshold=1, max_off_policy_strategy="wait", sampler_kwargs={"timeout_s": 0})
    with pytest.raises(SampleTimeout, match="group 'old' is at the bound"):
        buffer.wait_for_sampleable(0, queue.partition, 1)


def test_a_run_in_which_everything_is_filtered_is_stopped(make: Make, queue: Queue) -> None:
    buffer = make(**ASYNC, filter_groups_metric="acc", refill_fn=Refiller(queue, 1.0, 1.0))
    queue.group("flat", "finished", 1.0, 1.0)
    with pytest.raises(EvictionStreak, match="8 groups in a row were evicted"):
        queue.take(buffer, 1)


def test_one_that_lacks_the_metric_is_named(make: Make, queue: Queue, verl_classes: Any) -> None:
    settings = {**ASYNC, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    queue.group("good", "finished", 0.0, 1.0)
    queue.group("bad", "finished", 0.0, 1.0, metric="other")
    with pytest.raises(MissingMetric, match="session 0 of group 'bad' has no metric 'acc'"):
        queue.take(make(**settings), 1)
    with pytest.raises(RuntimeError, match="bad"):
        queue.take(theirs(verl_classes, **settings), 1)


def test_rewards_that_are_not_there_yet_are_a_missing_metric(make: Make, queue: Queue) -> None:
    queue.group("good", "finished", 0.0, 1.0, metric="reward")
    queue.group("bad", "finished", 0.0, 1.0, metric="acc")
    buffer = make(**ASYNC, filter_groups_metric="reward", refill_fn=Refiller(queue))
    with pytest.raises(MissingMetric, match="group 'bad' has no metric 'reward'"):
        queue.take(buffer, 1)


# What others put there -----------------------------------------------------------------------------------


def test_what_can_t_be_read_is_passed_over_with_one_warning(
    make: Make, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """verl stops at such a key."""
    queue.tag("somebody's note", {"text": "hello"})
    queue.tag("another", {"text": "hello"})
    queue.status("bogus", "bogus")
    queue.status("ageless", "finished", stamp="yesterday")
    queue.group("good", "finished", 0.0)
    queue.group("later", "running")
    buffer = make()

    assert queue.take(buffer, 1)[0] == ["good"]
    queue.group("later", "finished", 0.0)
    assert queue.take(buffer, 1)[0] == ["later"]
    texts = warnings(caplog)
    assert [text for text in texts if "is passed over" in text] == texts
    assert len(texts) == 3  # the keys that fit nowhere, the status, the stamp


SWITCH_TAGS = pytest.mark.parametrize("kwargs", [{"unknown_tags": "raise"}, {"strict": True}])


@SWITCH_TAGS
@pytest.mark.parametrize(
    "tag",
    [
        {"is_prompt": True, "status": "bogus", "global_steps": 0},
        {"is_prompt": True, "global_steps": 0},
        {"is_prompt": True, "status": "finished"},
    ],
    ids=["status", "no status", "no stamp"],
)
def test_with_a_switch_a_prompt_that_can_t_be_read_stops_the_run(
    make: Make, queue: Queue, verl_classes: Any, tag: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    buffers = make(**ASYNC, sampler_kwargs=kwargs), theirs(verl_classes, **ASYNC)
    calls = [
        call
        for buffer in buffers
        for call in (
            lambda buffer=buffer: buffer.get_sampleable_count(0, queue.partition),
            lambda buffer=buffer: buffer.wait_for_sampleable(0, queue.partition, 1),
            lambda buffer=buffer: queue.take(buffer, 1),
        )
    ]
    queue.group("good", "finished", 0.0)
    queue.tag("strange", tag)
    for call in calls:
        with pytest.raises((ValueError, KeyError)):
            call()
    # Once it has been put right nothing of what was listed meanwhile is lost.
    queue.group("strange", "running")

    assert [buffer.get_sampleable_count(0, queue.partition) for buffer in buffers] == [1, 1]
    assert queue.take(buffers[0], 1)[0] == ["good"]


@SWITCH_TAGS
def test_one_that_turns_up_while_a_sampler_waits_stops_it(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    for buffer in (make(sampler_kwargs=kwargs), theirs(verl_classes)):
        queue.group("later", "running")
        waiting = Waiting(lambda buffer=buffer: queue.take(buffer, 1))
        assert waiting.still_waits()
        queue.status("later", "bogus")
        with pytest.raises(ValueError, match="bogus"):
            waiting.ended()
        queue.group("later", "finished", 0.0)
        assert queue.take(buffer, 1)[0] == ["later"]
        queue.clear()


@SWITCH_TAGS
def test_with_the_switch_too_a_key_of_somebody_else_is_passed_over(
    make: Make, queue: Queue, verl_classes: Any, kwargs: dict[str, Any]
) -> None:
    for buffer in (make(sampler_kwargs=kwargs), theirs(verl_classes)):
        queue.tag("somebody's note", {"text": "hello"})
        queue.group("good", "finished", 0.0)
        assert queue.take(buffer, 1)[0] == ["good"]
        queue.clear()


def test_a_tag_that_is_put_right_counts(make: Make, queue: Queue) -> None:
    buffer = make(**ASYNC)
    queue.tag("late", {"status": "running"})
    assert buffer.get_sampleable_count(0, queue.partition) == 0
    queue.group("late", "finished", 0.0)

    assert queue.take(buffer, 1)[0] == ["late"]


def test_a_group_that_others_clear_is_no_group(make: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "finished", 0.0)
    queue.group("c", "running")
    queue.group("d", "finished", 0.0, 1.0)
    buffer = make(**ASYNC)
    assert buffer.get_sampleable_count(0, queue.partition) == 3
    queue.clear("a", "a_0_0", "c", "d_1_0")

    assert buffer.get_sampleable_count(0, queue.partition) == 1
    assert queue.take(buffer, 1)[0] == ["b"]


# Values that are no numbers ------------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("values", [[NAN, 1.0], [NAN, NAN], [INFINITE, INFINITE], [NAN]])
@pytest.mark.parametrize("metric", ["acc", "reward"])
def test_a_value_that_is_no_number_costs_its_session(
    make: Make, queue: Queue, values: list[float], metric: str
) -> None:
    queue.group("strange", "finished", *values, metric=metric)
    settings = {"filter_groups_metric": metric, "refill_fn": Refiller(queue, 0.0, 1.0)}
    if metric == "reward":
        settings["refill_fn"] = lambda count: queue.group("refill0", "finished", 0.0, 1.0, metric="reward")
    uids, metrics = queue.take(make(**ASYNC, **settings), 1)

    assert uids == ["refill0"]
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}


def test_in_sync_mode_its_group_is_short_and_the_trajectory_is_cleared(make: Make, queue: Queue) -> None:
    """The trainer clears what is in its batch, and nobody else knows of the other."""
    queue.group("strange", "finished", 1.0, NAN)
    queue.group("none", "finished", NAN, NAN)
    refill = Refiller(queue)
    buffer = make(filter_groups_metric="acc", train_batch_size=2, refill_fn=refill)
    batch, metrics = buffer.sample(global_steps=0, partition_id=queue.partition, batch_size=2)

    assert (batch.keys, metrics, refill.calls) == (["strange_0_0"], {}, [])
    assert queue.listed() == {"strange_0_0"}


def test_a_group_without_any_value_is_replaced_where_failed_ones_are(make: Make, queue: Queue) -> None:
    queue.group("none", "finished", NAN, NAN)
    settings = {"filter_groups_metric": "acc", "train_batch_size": 1, "refill_fn": Refiller(queue)}

    assert queue.take(make(**settings, sync_refill_failed_groups=True), 1)[0] == ["refill0"]
    assert queue.listed() == {"refill0_0_0", "refill0_1_0"}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in verl's own buffer.
@pytest.mark.parametrize("kwargs", [{"not_finite": "keep"}, {"strict": True}])
@pytest.mark.parametrize("values", [[NAN, 1.0], [NAN, NAN], [INFINITE, INFINITE], [1.0, -INFINITE], [NAN]])
@pytest.mark.parametrize("metric", ["acc", "reward"])
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_with_a_switch_its_group_is_kept(
    make: Make, queue: Queue, verl_classes: Any, mode: str, metric: str, values: list[float], kwargs: dict[str, Any]
) -> None:
    refill = Refiller(queue)
    settings = {"trainer_mode": mode, "filter_groups_metric": metric, "refill_fn": refill, "train_batch_size": 1}
    for buffer in (make(**settings, sampler_kwargs=kwargs), theirs(verl_classes, **settings)):
        queue.group("strange", "finished", *values, metric=metric)
        batch, metrics = buffer.sample(global_steps=0, partition_id=queue.partition, batch_size=1)

        assert set(batch.keys) == {f"strange_{session}_0" for session in range(len(values))}
        assert (metrics, refill.calls) == ({}, [])
        queue.clear()


def test_a_value_that_is_missing_beside_one_that_is_no_number_is_missing(
    make: Make, queue: Queue, verl_classes: Any
) -> None:
    settings = {**ASYNC, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    queue.group("bad", "finished", NAN)
    queue.row("bad_1_0", 1.0, metric="other")
    queue.status("bad", "finished")
    with pytest.raises(MissingMetric, match="session 1 of group 'bad' has no metric 'acc'"):
        queue.take(make(**settings, sampler_kwargs={"not_finite": "keep"}), 1)
    with pytest.raises(RuntimeError, match="bad"):
        queue.take(theirs(verl_classes, **settings), 1)


# Metrics that are missing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (
            {"accuracy": 1.0, "len_pen": 0.1},
            "which the filter reads; its reward_extra_info has 'accuracy', 'len_pen'. Re",
        ),
        ({}, "its reward_extra_info has nothing"),
        ({"acc": "good", "n": 1}, "that is a number, which the filter reads: its reward_extra_info says 'good'"),
        ({"acc": None}, "its reward_extra_info says None"),
    ],
)
def test_a_missing_metric_is_told_with_what_there_is(make: Make, queue: Queue, info: dict[str, Any], text: str) -> None:
    settings = {**ASYNC, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    queue.row("bad_0_0", 1.0)
    queue.row("bad_1_0", info=info)
    queue.status("bad", "finished")
    with pytest.raises(MissingMetric, match="session 1 of group 'bad' has no metric 'acc'") as caught:
        queue.take(make(**settings), 1)

    assert text in str(caught.value)
    assert caught.value.present == tuple(sorted(info))
    assert isinstance(caught.value, RuntimeError)


def test_so_is_a_reward_that_is_missing(make: Make, queue: Queue) -> None:
    queue.group("bad", "finished", 1.0)
    with pytest.raises(MissingMetric, match="reads from its rm_scores: it has none"):
        queue.take(make(**ASYNC, filter_groups_metric="reward", refill_fn=Refiller(queue)), 1)


def test_so_is_a_group_without_a_trajectory(make: Make, queue: Queue) -> None:
    queue.group("empty", "finished")
    settings = {**ASYNC, "filter_groups_metric": "acc", "refill_fn": Refiller(queue)}
    with pytest.raises(MissingMetric, match="since it has no trajectory"):
        queue.take(make(**settings, sampler_kwargs={"empty_groups": "keep"}), 1)


# Restarts ------------------------------------------------------------------------------------------------


@pytest.fixture
def dispatched_anew(queue: Queue) -> Callable[..., list[str]]:
    """What is sampled after a restart at version 5 with a group that was in flight since version 0, and which verl's
    trainer dispatches anew."""

    def sampled(construct_one: Callable[[Refiller], Any], status: str = "running") -> list[str]:
        queue.group("flying", status, 0.0)
        first = construct_one(Refiller(queue))
        assert first.get_sampleable_count(0, queue.partition) == 0
        if hasattr(first, "close"):
            first.close()
        queue.clear("flying_0_0")
        queue.status("flying", "pending", stamp=5)
        second = construct_one(Refiller(queue, 0.0, stamp=5))
        assert second.get_sampleable_count(5, queue.partition) == 0
        queue.group("flying", "finished", 0.0, stamp=5)
        found = queue.take(second, 1, global_steps=5)[0]
        queue.clear()
        return found

    return sampled


STALE = {**ASYNC, "max_off_policy_threshold": 1}


@pytest.mark.parametrize("status", ["pending", "running"])
def test_a_group_that_was_in_flight_over_a_restart_is_as_old_as_it_is(
    make: Make, dispatched_anew: Callable[..., list[str]], tmp_path: Path, status: str
) -> None:
    kwargs = {"log": str(tmp_path / "run")}
    found = dispatched_anew(lambda refill: make(**STALE, refill_fn=refill, sampler_kwargs=kwargs), status)

    assert found == ["refill0"]


@pytest.mark.parametrize("kwargs", [{"restart_age": "restart"}, {"strict": True}])
@pytest.mark.parametrize("status", ["pending", "running"])
def test_with_a_switch_it_is_as_young_as_the_restart(
    make: Make,
    dispatched_anew: Callable[..., list[str]],
    verl_classes: Any,
    tmp_path: Path,
    status: str,
    kwargs: dict[str, Any],
) -> None:
    settings = {"log": str(tmp_path / "run"), **kwargs}

    assert dispatched_anew(lambda refill: theirs(verl_classes, **STALE, refill_fn=refill), status) == ["flying"]
    assert dispatched_anew(lambda refill: make(**STALE, refill_fn=refill, sampler_kwargs=settings), status) == [
        "flying"
    ]


# Sizes ---------------------------------------------------------------------------------------------------


def test_a_group_may_have_more_sessions_than_the_configured_n(make: Make, queue: Queue) -> None:
    buffer = make(**ASYNC, sampler_kwargs={"group_size": 2})
    queue.group("large", "pending")
    assert buffer.get_sampleable_count(0, queue.partition) == 0
    queue.group("large", "finished", 0.0, 1.0, 0.0, 1.0)
    batch, _ = buffer.sample(global_steps=0, partition_id=queue.partition, batch_size=1)

    assert sorted(batch.keys) == [f"large_{session}_0" for session in range(4)]


def test_a_failed_group_keeps_all_its_trajectories(make_each: Make, queue: Queue) -> None:
    """Its status says that a session failed, and every session has a trajectory."""
    queue.group("failed", "failure", 0.0, 1.0)
    batch, _ = make_each().sample(global_steps=0, partition_id=queue.partition, batch_size=1)

    assert sorted(batch.keys) == ["failed_0_0", "failed_1_0"]


def test_a_failed_group_of_the_configured_n_does_too(make: Make, queue: Queue) -> None:
    queue.group("failed", "running")
    buffer = make(sampler_kwargs={"group_size": 2})
    buffer.get_sampleable_count(0, queue.partition)
    queue.group("failed", "failure", 0.0, 1.0)
    batch, _ = buffer.sample(global_steps=0, partition_id=queue.partition, batch_size=1)

    assert sorted(batch.keys) == ["failed_0_0", "failed_1_0"]


# Metrics and refills -------------------------------------------------------------------------------------


def test_with_a_switch_the_other_metrics_come_too(make: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0, min_global_steps=1, max_global_steps=1, response_len=3)
    metrics = queue.take(make(sampler_kwargs={"metrics": "all"}), 1, global_steps=2)[1]

    assert metrics["validation/off_policy/group_staleness/mean"] == 3
    assert metrics["validation/response/tokens/mean"] == 3
    assert not any("trajectory_" in name for name in metrics)


def test_refills_that_were_not_dispatched_are_asked_for_again(make: Make, queue: Queue) -> None:
    refill = Refiller(queue)
    answers = iter([OSError("no more data"), 1, 1])

    def refill_fn(count: int) -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        refill(answer)
        return answer

    queue.group("failed", "failure", 0.0)
    queue.group("failed too", "failure", 0.0)
    buffer = make(**ASYNC, refill_fn=refill_fn)
    with pytest.raises(OSError, match="no more data"):
        queue.take(buffer, 2)

    assert queue.take(buffer, 2)[0] == ["refill0", "refill1"]
    assert refill.calls == [1, 1]


def test_where_nothing_can_be_replaced_nothing_is_owed(make: Make, queue: Queue) -> None:
    queue.group("failed", "failure", 0.0)
    queue.group("a", "finished", 0.0)
    buffer = make(**ASYNC)
    queue.take(buffer, 1)

    assert not buffer._runs[queue.partition].feed.book.credits
