"""What verl's trainer can rely on, with the drop-in and with verl's own buffer: both are held to the same."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.verl.producing import FILTERED_COUNTS, Queue, Refiller, Waiting

Make = Callable[..., Any]

ASYNC = {"trainer_mode": "separate_async"}


# Batches -------------------------------------------------------------------------------------------------


def test_a_batch_is_whole_groups_with_their_keys_and_tags(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0, 1.0, min_global_steps=1, max_global_steps=2)
    queue.row("a_1_1", global_steps=0)
    queue.group("b", "running", 0.0)
    batch, metrics = make_each().sample(global_steps=0, partition_id=queue.partition, batch_size=1)

    tags = dict(zip(batch.keys, batch.tags, strict=True))
    assert set(tags) == {"a_0_0", "a_1_0", "a_1_1"}
    assert tags["a_0_0"] == {"seq_len": 3, "global_steps": 0, "min_global_steps": 1, "max_global_steps": 2}
    assert (batch.partition_id, batch.extra_info, metrics) == (queue.partition, {}, {})


def test_the_prompts_of_a_batch_are_cleared_and_its_trajectories_stay(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "running", 0.0)
    queue.take(make_each(), 1)

    assert queue.listed() == {"a_0_0", "b", "b_0_0"}


def test_the_oldest_groups_come_first(make_each: Make, queue: Queue) -> None:
    for uid, stamp in (("new", 5), ("old", 1), ("middle", 2)):
        queue.group(uid, "finished", 0.0, stamp=stamp)
    buffer = make_each()

    assert set(queue.take(buffer, 2, global_steps=5)[0]) == {"old", "middle"}
    assert queue.take(buffer, 1, global_steps=5)[0] == ["new"]


def test_no_group_is_handed_out_twice(make_each: Make, queue: Queue) -> None:
    for number in range(5):
        queue.group(f"g{number}", "finished", 0.0, 1.0)
    buffer = make_each()
    taken = [uid for size in (2, 2, 1) for uid in queue.take(buffer, size)[0]]

    assert sorted(taken) == [f"g{number}" for number in range(5)]


def test_it_waits_until_there_are_enough(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "pending")
    buffer = make_each()
    waiting = Waiting(lambda: queue.take(buffer, 2))
    assert waiting.still_waits()
    queue.status("b", "running")
    queue.row("b_0_0", global_steps=0)
    assert waiting.still_waits()
    queue.status("b", "finished")

    assert set(waiting.ended()[0]) == {"a", "b"}


# Age -----------------------------------------------------------------------------------------------------


def test_what_is_above_the_threshold_is_dropped_and_replaced(make_each: Make, queue: Queue) -> None:
    """The span of a group is `global_steps` - stamp + 1; the threshold itself is kept."""
    for uid, status, stamp in (("stale", "finished", 0), ("edge", "finished", 4), ("flying", "running", 0)):
        queue.group(uid, status, 0.0, stamp=stamp)
    refill = Refiller(queue, 0.0, stamp=5)
    buffer = make_each(**ASYNC, max_off_policy_threshold=2, refill_fn=refill)
    uids, metrics = queue.take(buffer, 2, global_steps=5)

    assert uids == ["edge", "refill0"]
    assert refill.calls == [1]
    assert not queue.listed() & {"stale", "stale_0_0"}
    assert "flying" in queue.uids()
    assert metrics == {
        "validation/off_policy/evicted_samples": 1,
        "validation/off_policy/evicted_samples_staleness/mean": 6,
        "validation/off_policy/evicted_samples_staleness/max": 6,
        "validation/off_policy/evicted_samples_staleness/min": 6,
    }


def test_one_that_ends_stale_while_others_are_replaced_is_dropped_too(make_each: Make, queue: Queue) -> None:
    queue.group("stale", "finished", 0.0)
    queue.group("late", "running", 0.0)
    refill = Refiller(queue, 0.0, stamp=5)

    def refill_fn(count: int) -> int:
        if not refill.calls:
            queue.status("late", "finished")
        return refill(count)

    buffer = make_each(**ASYNC, max_off_policy_threshold=1, refill_fn=refill_fn)
    uids, metrics = queue.take(buffer, 1, global_steps=5)

    assert uids in (["refill0"], ["refill1"])
    assert refill.calls == [1, 1]
    assert metrics["validation/off_policy/evicted_samples"] == 2


def test_without_a_threshold_nothing_is_too_old(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "running", 0.0)
    buffer = make_each(**ASYNC, max_off_policy_threshold=None, max_off_policy_strategy="wait")

    assert queue.take(buffer, 1, global_steps=1000) == (["a"], {})


def test_wait_holds_sampling_while_one_in_flight_is_at_the_threshold(make_each: Make, queue: Queue) -> None:
    queue.group("fresh", "finished", 0.0, stamp=5)
    queue.group("old", "running", 0.0, stamp=4)
    buffer = make_each(**ASYNC, max_off_policy_threshold=2, max_off_policy_strategy="wait")
    waiting = Waiting(lambda: queue.take(buffer, 1, global_steps=5))
    assert waiting.still_waits()
    queue.status("old", "finished", stamp=4)

    assert waiting.ended() == (["old"], {})


def test_wait_lets_pass_what_is_below_the_threshold(make_each: Make, queue: Queue) -> None:
    queue.group("ended", "finished", 0.0, stamp=0)
    queue.group("flying", "running", 0.0, stamp=5)
    buffer = make_each(**ASYNC, max_off_policy_threshold=2, max_off_policy_strategy="wait")

    assert queue.take(buffer, 1, global_steps=5) == (["ended"], {})


@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_sync_mode_does_nothing_about_age(make_each: Make, queue: Queue, strategy: str) -> None:
    queue.group("old", "finished", 0.0)
    queue.group("new", "finished", 0.0, stamp=5)
    buffer = make_each(max_off_policy_threshold=1, max_off_policy_strategy=strategy)

    assert queue.take(buffer, 2, global_steps=5) == (["old", "new"], {})


# Failed groups -------------------------------------------------------------------------------------------


def test_async_mode_replaces_failed_groups(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("failed", "failure", 0.0, None)
    refill = Refiller(queue)
    uids, metrics = queue.take(make_each(**ASYNC, refill_fn=refill), 2)

    assert uids == ["a", "refill0"]
    assert refill.calls == [1]
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}
    assert not queue.listed() & {"failed", "failed_0_0"}


def test_sync_mode_keeps_failed_groups(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("failed", "failure", None, 1.0)

    batch, metrics = make_each().sample(global_steps=0, partition_id=queue.partition, batch_size=2)
    assert (set(batch.keys), metrics) == ({"a_0_0", "failed_1_0"}, {})


def test_a_failed_group_without_a_trajectory_leaves_its_place_empty_in_sync_mode(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("empty", "failure")

    assert queue.take(make_each(), 2) == (["a"], {})
    assert queue.uids() == set()


def test_a_batch_of_failed_groups_without_any_trajectory_is_an_error(make_each: Make, queue: Queue) -> None:
    queue.group("a", "failure")
    queue.group("b", "failure")
    with pytest.raises(RuntimeError, match="sync_refill_failed_groups"):
        queue.take(make_each(), 2)

    assert queue.uids() == {"a", "b"}


def test_failed_groups_without_a_trajectory_are_replaced_where_that_is_asked_for(make_each: Make, queue: Queue) -> None:
    queue.group("empty1", "failure")
    queue.group("empty2", "failure")
    queue.group("failed", "failure", 0.0)
    refill = Refiller(queue)
    buffer = make_each(sync_refill_failed_groups=True, refill_fn=refill, gen_batch_size=1, train_batch_size=3)
    uids, metrics = queue.take(buffer, 3)

    assert set(uids) == {"failed", "refill0", "refill1"}
    assert refill.calls == [2]
    assert metrics == {"validation/rollout_failure/evicted_samples": 2}


def test_nothing_is_drained_for_a_failed_group(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("empty", "failure")
    queue.group("flying", "running")
    refill = Refiller(queue)
    buffer = make_each(sync_refill_failed_groups=True, refill_fn=refill, gen_batch_size=1)
    uids, metrics = queue.take(buffer, 1)

    assert (uids, refill.calls) == (["a"], [])
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}
    assert queue.uids() == {"flying"}


# Filter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["acc", "reward"])
def test_async_mode_replaces_groups_whose_values_are_all_the_same(make_each: Make, queue: Queue, metric: str) -> None:
    for uid, *values in (("zeros", 0.0, 0.0), ("ones", 1.0, 1.0), ("zeros too", 0.0, 0.0), ("mixed", 0.0, 1.0)):
        queue.group(str(uid), "finished", *values, metric=metric)  # type: ignore[arg-type]
    buffer = make_each(**ASYNC, filter_groups_metric=metric, refill_fn=lambda count: None)
    uids, metrics = queue.take(buffer, 1)

    assert uids == ["mixed"]
    assert metrics == {"validation/filter_groups/evicted_samples": 3, FILTERED_COUNTS: {0.0: 2, 1.0: 1}}
    assert queue.listed() == {"mixed_0_0", "mixed_1_0"}


def test_a_group_with_a_single_value_is_kept(make_each: Make, queue: Queue) -> None:
    queue.group("single", "finished", 1.0)
    buffer = make_each(**ASYNC, filter_groups_metric="acc", refill_fn=Refiller(queue))

    assert queue.take(buffer, 1) == (["single"], {})


def test_two_reasons_are_one_refill(make_each: Make, queue: Queue) -> None:
    queue.group("stale and flat", "finished", 1.0, 1.0)
    refill = Refiller(queue, stamp=5)
    buffer = make_each(**ASYNC, max_off_policy_threshold=1, filter_groups_metric="acc", refill_fn=refill)
    metrics = queue.take(buffer, 1, global_steps=5)[1]

    assert refill.calls == [1]
    assert metrics["validation/off_policy/evicted_samples"] == 1
    assert metrics["validation/filter_groups/evicted_samples"] == 1


def test_sync_mode_asks_for_two_and_clears_what_is_beyond_the_batch(make_each: Make, queue: Queue) -> None:
    queue.group("flat", "finished", 0.0, 0.0)
    queue.group("mixed", "finished", 0.0, 1.0)
    refill = Refiller(queue, stamp=1)
    uids, metrics = queue.take(make_each(filter_groups_metric="acc", refill_fn=refill), 2, global_steps=1)

    assert refill.calls == [2]
    assert "mixed" in uids
    assert len(uids) == 2
    assert metrics == {
        "validation/filter_groups/evicted_samples": 1,
        "validation/filter_groups/discarded_surplus_samples": 1,
        FILTERED_COUNTS: {0.0: 1},
    }
    assert {key.split("_")[0] for key in queue.listed()} == set(uids)


def test_sync_mode_asks_for_none_where_the_batch_is_full_without(make_each: Make, queue: Queue) -> None:
    queue.group("flat", "finished", 0.0, 0.0)
    queue.group("a", "finished", 0.0, 1.0)
    queue.group("b", "finished", 0.0, 1.0)
    refill = Refiller(queue)
    uids, metrics = queue.take(make_each(filter_groups_metric="acc", refill_fn=refill), 2)

    assert (set(uids), refill.calls) == ({"a", "b"}, [])
    assert metrics["validation/filter_groups/evicted_samples"] == 1


def test_sync_mode_refills_as_places_come_free_and_then_waits_for_what_is_in_flight(
    make_each: Make, queue: Queue
) -> None:
    queue.group("flat", "finished", 0.0, 0.0)
    queue.group("slow", "running", 0.0, 1.0)
    refill = Refiller(queue)
    buffer = make_each(filter_groups_metric="acc", refill_fn=refill)
    waiting = Waiting(lambda: queue.take(buffer, 2))
    while len(refill.calls) < 2 and waiting.is_alive():
        pass
    assert waiting.still_waits()
    assert refill.calls == [1, 1]
    queue.status("slow", "finished")
    uids, metrics = waiting.ended()

    assert len(uids) == 2
    assert metrics["validation/filter_groups/discarded_surplus_samples"] == 1


def test_sync_mode_forgets_the_refills_that_the_batch_no_longer_needs(make_each: Make, queue: Queue) -> None:
    queue.group("flat", "finished", 0.0, 0.0)
    queue.group("slow", "running", 0.0, 1.0)
    refill = Refiller(queue)

    def refill_fn(count: int) -> int:
        refill(count)
        queue.status("slow", "finished")
        return count

    uids, metrics = queue.take(make_each(filter_groups_metric="acc", refill_fn=refill_fn), 2)

    assert set(uids) == {"slow", "refill0"}
    assert refill.calls == [1]
    assert "validation/filter_groups/discarded_surplus_samples" not in metrics


def test_refills_for_filtered_and_for_failed_groups_come_together(make_each: Make, queue: Queue) -> None:
    queue.group("flat", "finished", 0.0, 0.0)
    queue.group("empty", "failure")
    queue.group("mixed", "finished", 0.0, 1.0)
    refill = Refiller(queue)
    buffer = make_each(filter_groups_metric="acc", sync_refill_failed_groups=True, train_batch_size=3, refill_fn=refill)
    metrics = queue.take(buffer, 3)[1]

    assert refill.calls == [3]
    assert metrics["validation/filter_groups/evicted_samples"] == 1
    assert metrics["validation/rollout_failure/evicted_samples"] == 1
    assert metrics["validation/filter_groups/discarded_surplus_samples"] == 1


# Validation ----------------------------------------------------------------------------------------------


@pytest.fixture
def held_out(transfer_queue: Any) -> Any:
    made = Queue("val")
    yield made
    made.clear()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_validation_takes_groups_as_they_are(make_each: Make, queue: Queue, held_out: Queue, mode: str) -> None:
    held_out.group("flat", "finished", 1.0, 1.0)
    held_out.group("failed", "failure", 0.0)
    held_out.group("empty", "failure")
    refill = Refiller(queue)
    buffer = make_each(trainer_mode=mode, max_off_policy_threshold=1, filter_groups_metric="acc", refill_fn=refill)
    uids, metrics = held_out.take(buffer, 3, global_steps=9)

    assert (set(uids), metrics, refill.calls) == ({"flat", "failed"}, {}, [])


def test_training_and_validation_are_counted_under_their_names(make_each: Make, transfer_queue: Any) -> None:
    training = Queue("train")
    training.group("failed", "failure", 0.0)
    training.group("a", "finished", 0.0)
    metrics = training.take(make_each(**ASYNC, refill_fn=lambda count: None), 1)[1]
    training.clear()

    assert metrics == {"training/rollout_failure/evicted_samples": 1}


# Looking without taking ----------------------------------------------------------------------------------


def test_what_could_be_sampled_is_counted_and_nothing_is_touched(make_each: Make, queue: Queue) -> None:
    queue.group("fresh", "finished", 0.0, stamp=5)
    queue.group("edge", "finished", 0.0, stamp=4)
    queue.group("stale", "finished", 0.0, stamp=0)
    queue.group("failed", "failure", 0.0, stamp=5)
    queue.group("flying", "running", stamp=5)
    refill = Refiller(queue)
    buffer = make_each(**ASYNC, max_off_policy_threshold=2, refill_fn=refill)
    before = queue.listed()

    counts = [buffer.get_sampleable_count(version, queue.partition) for version in (5, 6, 7)]
    assert counts == [2, 1, 0]
    assert (queue.listed(), refill.calls) == (before, [])


def test_waiting_for_groups_leaves_them_to_sample(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "finished", 0.0)
    buffer = make_each(**ASYNC)

    assert buffer.wait_for_sampleable(0, queue.partition, 2) == ({"a", "b"}, {})
    assert set(queue.take(buffer, 2)[0]) == {"a", "b"}


def test_waiting_for_groups_blocks_below_the_target(make_each: Make, queue: Queue) -> None:
    queue.group("a", "finished", 0.0)
    queue.group("b", "running", 0.0)
    buffer = make_each(**ASYNC)
    waiting = Waiting(lambda: buffer.wait_for_sampleable(0, queue.partition, target_count=2))
    assert waiting.still_waits()
    queue.status("b", "finished")

    assert waiting.ended() == ({"a", "b"}, {})


def test_waiting_for_groups_replaces_and_tells_what_sample_would_have(make_each: Make, queue: Queue) -> None:
    queue.group("stale", "finished", 0.0)
    refill = Refiller(queue, 0.0, stamp=5)
    buffer = make_each(**ASYNC, max_off_policy_threshold=1, refill_fn=refill)
    ready, metrics = buffer.wait_for_sampleable(5, queue.partition, 1)

    assert (ready, refill.calls) == ({"refill0"}, [1])
    assert metrics["validation/off_policy/evicted_samples"] == 1
    assert queue.take(buffer, 1, global_steps=5) == (["refill0"], {})


def test_waiting_for_groups_is_held_by_one_at_the_threshold(make_each: Make, queue: Queue) -> None:
    queue.group("fresh", "finished", 0.0, stamp=5)
    queue.group("old", "running", 0.0, stamp=4)
    buffer = make_each(**ASYNC, max_off_policy_threshold=2, max_off_policy_strategy="wait")
    waiting = Waiting(lambda: buffer.wait_for_sampleable(5, queue.partition, 1))
    assert waiting.still_waits()
    queue.status("old", "failure", stamp=4)

    assert waiting.ended()[0] == {"fresh"}
