"""What a waiting sample() waits for: as a value, and as a text that names who could help."""

from typing import Any

import attrs
import pytest

from groupstate.core import events as ev
from groupstate.core.explain import IN_FLIGHT_SHOWN_MAX, Explanation, GroupInFlight, explain
from groupstate.core.held import DISK_HOLD
from groupstate.core.rules import Rules
from groupstate.testing.notation import Story, play

SYNC = Rules(mode="sync", batch_size=1, filter_metric="acc")


def explained(story: Story, **changes: Any) -> Explanation:
    options: dict[str, Any] = {"now_ns": story.now_ns, "has_source": True, "dispatches": True}
    rules = changes.pop("rules", story.rules)
    return explain(story.book, rules, **(options | changes))


def test_with_nobody_waiting_there_is_nothing_to_explain() -> None:
    found = explained(play("submit a/1"))

    assert (found.needed, found.blocked_by, found.unblocked_by, found.in_flight_count) == (0, "", (), 1)
    assert str(found).splitlines()[0] == "no sample() waits in partition 'train'"


def test_what_can_be_served_says_so() -> None:
    # The controller would have served it at once; between two records it is still a state of the book.
    story = play("sample 1", "submit a/1", "start a", "finish a acc=1")
    found = explained(story)

    assert (found.needed, found.sampleable, found.blocked_by, found.unblocked_by) == (1, 1, "", ())
    assert str(found) == ("sample(1) in partition 'train' can be served\nsampleable 1, in flight 0, refills owed 0")


def test_groups_in_flight_are_shown_with_their_ages_and_sessions() -> None:
    story = play(
        "submit a/3", "wait 10", "start a.0", "start a.1", "finish a.0 acc=1", "publish 2", "wait 5", "sample 1"
    )
    found = explained(story)

    assert found.in_flight == (
        GroupInFlight("a", "running", lag=2, age_s=15.0, quiet_s=5.0, open_sessions=(1,), waiting_sessions=(2,)),
    )
    assert found.in_flight_count == 1
    assert str(found).splitlines() == [
        "sample(1) in partition 'train' waits: 0 of 1 groups are sampleable",
        "sampleable 0, in flight 1, refills owed 0",
        "  'a' is running, lag 2, submitted 15.0 s ago, quiet for 5.0 s, sessions open [1], to begin [2]",
        "to go on: sessions in flight must end (the rollout runs them); run.cancel(group) gives a group up",
    ]


def test_a_clock_that_went_back_makes_no_negative_ages() -> None:
    story = play("submit a/1", "sample 1")
    (group,) = explained(story, now_ns=0).in_flight

    assert (group.age_s, group.quiet_s) == (0.0, 0.0)


def test_pending_and_running_groups_come_in_the_order_of_submission() -> None:
    story = play("submit a/1", "submit b/1", "submit c/1", "submit v/1 partition=val", "start a", "start c", "sample 1")

    assert [(group.group_id, group.phase) for group in explained(story).in_flight] == [
        ("a", "running"),
        ("b", "pending"),
        ("c", "running"),
    ]


@pytest.mark.parametrize(("count", "more"), [(IN_FLIGHT_SHOWN_MAX, 0), (IN_FLIGHT_SHOWN_MAX + 3, 3)])
def test_of_many_groups_the_oldest_are_shown_and_the_rest_is_a_number(count: int, more: int) -> None:
    found = explained(play(*(f"submit g{i}/1" for i in range(count)), "sample 1"))

    assert found.in_flight_count == count
    assert [group.group_id for group in found.in_flight] == [f"g{i}" for i in range(IN_FLIGHT_SHOWN_MAX)]
    assert (f"  and {more} more in flight" in str(found)) is (more > 0)


def test_the_oldest_waiter_is_the_one_that_is_explained() -> None:
    assert explained(play("sample 3", "sample 1")).needed == 3


@pytest.mark.parametrize(
    ("dispatches", "who"), [(True, "the rollout runs them"), (False, "whoever dispatches them must report their end")]
)
def test_who_must_end_the_sessions_is_named(dispatches: bool, who: str) -> None:
    found = explained(play("submit a/1", "sample 1"), dispatches=dispatches)

    assert found.unblocked_by == (f"sessions in flight must end ({who}); run.cancel(group) gives a group up",)


@pytest.mark.parametrize(
    ("lines", "partition", "has_source", "way"),
    [
        ([], "train", True, "the source must supply prompts for 3 groups more"),
        ([], "train", False, "only a submit can supply the missing 3 groups: run.submit(...)"),
        ([], "val", True, "only a submit can supply the missing 3 groups: run.submit(...)"),
        (["exhausted"], "val", True, "only a submit can supply the missing 3 groups: run.submit(...)"),
        (["exhausted"], "train", True, "the source is exhausted, 3 groups short: sample a smaller batch"),
    ],
)
def test_who_could_supply_what_is_missing_is_named(
    lines: list[str], partition: str, has_source: bool, way: str
) -> None:
    story = play(*lines, f"sample 3 partition={partition}")
    found = explained(story, partition=partition, has_source=has_source)

    assert found.unblocked_by == (way,)
    assert str(found).endswith(f"to go on: {way}")


def test_what_is_in_flight_and_sampleable_is_not_missing() -> None:
    story = play("submit a/1", "submit b/1", "start a", "finish a acc=1", "sample 4")

    assert explained(story).unblocked_by == (
        "sessions in flight must end (the rollout runs them); run.cancel(group) gives a group up",
        "the source must supply prompts for 2 groups more",
    )


def test_a_selection_that_takes_nothing_is_named_with_what_it_must_do() -> None:
    story = play("submit a/1", "start a", "finish a acc=1", "sample 1", rules=Rules(selection="mine:pick"),
                 selection=lambda book, rules, request: [])  # fmt: skip
    found = explained(story)

    assert found.blocked_by == "selection 'mine:pick' has taken none of the 1 sampleable groups"
    assert found.unblocked_by[-1].startswith("selection 'mine:pick' must select 1, or drop what it will never take")


def test_a_retry_that_is_due_is_told_with_what_failed() -> None:
    story = play("submit a/2", "start a", "fail a.1 timeout retryable", "sample 1", rules=Rules(attempts_max=2))

    assert "to begin [1]; session 1 failed (timeout): told so, attempt 2 is due" in str(explained(story))


def test_a_group_at_the_lag_bound_is_named_with_what_must_happen() -> None:
    rules = Rules(on_stale="wait", lag_max=1, batch_size=1)
    story = play("submit old/1", "submit new/1", "start new", "finish new acc=1", "publish 1", "sample 1", rules=rules)
    found = explained(story)

    assert found.blocked_by == "group 'old' in flight has lag 1, the bound is 1"
    assert found.unblocked_by == (
        "sessions in flight must end (the rollout runs them); run.cancel(group) gives a group up",
        "group 'old' at the lag bound must end before anything is sampled (on_stale='wait')",
    )


def test_the_bound_of_training_holds_no_validation() -> None:
    rules = Rules(on_stale="wait", lag_max=1, batch_size=1)
    story = play("submit old/1", "publish 1", "sample 1", "sample 1 partition=val", rules=rules)

    assert explained(story, partition="val").unblocked_by == (
        "only a submit can supply the missing 1 group: run.submit(...)",
    )


def test_a_drain_is_explained() -> None:
    story = play("submit a/2", "submit b/1", "start a", "finish a.0 acc=0", "finish a.1 acc=1", "sample 1", rules=SYNC)

    assert explained(story).blocked_by == "1 groups in flight are being drained"


def test_credit_and_exhaustion_are_shown() -> None:
    story = play("submit a/1", "start a", "fail a", "evict a empty credit=2", "exhausted", "sample 1")
    found = explained(story)

    assert (found.refills_owed, found.source_exhausted) == (2, True)
    assert str(found).splitlines()[1] == "sampleable 0, in flight 0, refills owed 2, source exhausted"


def test_explaining_is_about_one_partition() -> None:
    story = play("submit v/1 partition=val", "sample 1 partition=val")

    assert explained(story).needed == 0
    assert explained(story, partition="val").in_flight_count == 1


def test_what_was_evicted_since_the_last_batch_is_told_by_reason() -> None:
    story = play("submit a/1", "submit b/1", "fail a", "fail b", "sample 1", "evict a empty", "evict b empty")
    found = explained(story)

    assert found.evicted == (("empty", 2),)
    assert "evicted since the last batch: empty 2\n" in str(found)


# Room, failures, partitions --------------------------------------------------------------------------


def test_without_room_on_the_disk_what_is_missing_waits_for_it() -> None:
    story = play("sample 2")
    story.record(ev.AdmissionHeld(f"{DISK_HOLD}5 MB are left"))
    found = explained(story)

    assert found.blocked_by == "0 of 2 groups are sampleable, and no more are drawn: disk: 5 MB are left"
    assert found.unblocked_by == (
        "there must be room on the disk: `groupstate disk RUN` says what takes it, and what may go",
    )


def test_room_on_the_disk_is_nothing_to_what_can_be_served_or_is_not_trained_on() -> None:
    served = play("sample 1", "submit a/1", "start a", "finish a acc=1", "submit b/1")
    validation = play("sample 2 partition=val", "submit a/1", "submit v/1 partition=val")
    validation.tell("start v", "finish v acc=1")
    for story in (served, validation):
        story.record(ev.AdmissionHeld(f"{DISK_HOLD}5 MB are left"))
    found = explained(validation, partition="val")

    assert (explained(served).blocked_by, explained(served).unblocked_by) == ("", ())
    assert (found.sampleable, found.blocked_by) == (1, "1 of 2 groups are sampleable")
    assert found.unblocked_by == ("only a submit can supply the missing 1 group: run.submit(...)",)


@pytest.mark.parametrize(
    ("message", "retry_in_s", "told"),
    [
        ("boom", None, "session 1 failed (error): boom"),
        ("", None, "session 1 failed (error)"),
        ("boom", 1.0, "session 1 failed (error): boom, attempt 2 is due"),
    ],
)
def test_the_last_failure_of_a_group_in_flight_is_told(message: str, retry_in_s: float | None, told: str) -> None:
    story = play("submit a/2", "start a")
    story.record(ev.SessionFailed("a", 1, 1, "error", message, retry_in_s))
    found = explained(story)

    assert found.in_flight[0].last_failure == told
    assert str(attrs.evolve(found, evicted=(("failed", 2),), last_failure=told)).splitlines()[-1] == (
        f"evicted since the last batch: failed 2; the {told}"
    )


def test_a_validation_group_at_the_bound_is_named_to_who_waits_for_validation() -> None:
    rules = Rules(on_stale="wait", lag_max=1, wait_gates="each")
    story = play("submit v/1 partition=val", "sample 1 partition=val", "publish 2", rules=rules)

    assert (
        "group 'v' at the lag bound must end before anything is sampled (on_stale='wait')"
        in explained(story, partition="val").unblocked_by
    )


def test_who_only_observes_is_told_what_must_happen_outside() -> None:
    story = play("submit a/1", "submit v/1 partition=val", "sample 3")

    assert explained(story, observed=True).unblocked_by == (
        "groups in flight must be listed as ended, or not be listed any more, which gives them up",
        "only prompts that are dispatched outside can supply the missing 2 groups",
    )


def test_who_only_observes_is_told_nothing_of_groups_of_another_partition() -> None:
    training = play("submit v/1 partition=val", "sample 1")
    validation = play("submit v/1 partition=val", "sample 1 partition=val")

    missing = ("only prompts that are dispatched outside can supply the missing 1 group",)
    listed = ("groups in flight must be listed as ended, or not be listed any more, which gives them up",)
    assert explained(training, observed=True).unblocked_by == missing
    assert explained(validation, partition="val", observed=True).unblocked_by == listed
