"""Batches in a book: who waits, what can be sampled, what is out, and with which lag it comes back."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.held import OpenBatch, OpenRequest
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.errors import LogError, UnknownBatch
from groupstate.testing.notation import START_NS, Story, play

from .scenes import conserved, done

# Requests ---------------------------------------------------------------------------------------------


def test_a_request_waits_in_its_partition_in_order_of_arrival() -> None:
    story = play("wait 3", "sample 2", "sample 1 partition=val", "sample 3")

    assert story.book.waiting() == [
        OpenRequest(1, "train", 2, 0, 2, START_NS + 3_000_000_000),
        OpenRequest(3, "train", 3, 0, 4, START_NS + 3_000_000_000),
    ]
    assert [request.request for request in story.book.waiting("val")] == [2]


def test_a_withdrawn_request_waits_no_more() -> None:
    story = play("sample 2", "sample 3", "withdraw 1")

    assert [request.request for request in story.book.waiting()] == [2]


def test_a_request_is_numbered_without_gaps() -> None:
    story = play()
    with pytest.raises(AssertionError):
        story.book.apply(ev.Record(2, 0, ev.BatchRequested(5, "train", 1, 0)))

    assert story.book.requests == {}


@pytest.mark.parametrize(
    "event",
    [
        ev.BatchRequestCancelled(7),
        ev.BatchRequested(7, "train", 1, 0),
        ev.BatchSampled(1, 1, "train", ("a",), 0, ()),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_the_book_can_not_apply_is_not_posted(event: ev.AnyEvent) -> None:
    story = play(*done("a"), "sample 2")
    kept = story.log.last_seq
    with pytest.raises((AssertionError, LogError, KeyError, ValueError)):
        story.record(event)

    assert story.log.last_seq == kept == story.book.last_seq


# Batches that are out ---------------------------------------------------------------------------------


def test_a_sampled_batch_is_with_the_trainer() -> None:
    story = play(*done("a", "b", "c"), "publish 2", "sample 2")

    assert story.book.batches == {1: OpenBatch(1, "train", ("a", "b"), (2, 2), 2, story.book.last_seq)}
    assert (story.group("a").batch, story.group("a").sampled_lag) == (1, 2)
    assert story.book.requests == {}
    assert story.ready() == ["c"]


def sampled_event(story: Story, **changes: Any) -> ev.BatchSampled:
    fields = {"batch": 1, "request": 1, "partition": "train", "group_ids": ("a",), "weight_version": 0, "lags": (0,)}
    return ev.BatchSampled(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"request": 9},
        {"batch": 2},
        {"group_ids": ("a", "a"), "lags": (0, 0)},
        {"group_ids": ("bare",)},
        {"group_ids": ("v",)},
        {"group_ids": ("v",), "partition": "test"},
    ],
    ids=["no request", "wrong number", "twice", "no rows", "another partition", "and another"],
)
def test_a_batch_that_can_not_be_is_our_own_fault_and_changes_nothing(changes: dict[str, Any]) -> None:
    story = play(
        *done("a"), "submit bare/1", "start bare", "fail bare", "submit v/1 partition=val", "start v",
        "finish v reward=1", "sample 5",
    )  # fmt: skip
    before, kept = story.book.digest(), story.log.last_seq
    with pytest.raises(AssertionError):
        story.record(sampled_event(story, **changes))

    assert (story.book.digest(), story.log.last_seq) == (before, kept)


@pytest.mark.parametrize("verb", ["commit", "release"])
@pytest.mark.parametrize(
    ("lines", "batch", "state"),
    [
        ([], 1, "was never sampled"),
        (["sample 1", "commit 1"], 1, "was committed or returned already"),
        (["sample 1", "release 1"], 1, "was committed or returned already"),
        (["sample 1", "commit 1"], 2, "was never sampled"),
    ],
)
def test_a_batch_that_is_not_out_can_not_be_ended(verb: str, lines: list[str], batch: int, state: str) -> None:
    story = play(*done("a"), *lines)
    before, kept = story.book.digest(), story.log.last_seq
    with pytest.raises(UnknownBatch) as refused:
        story.tell(f"{verb} {batch}")

    tried = {"commit": "commit", "release": "return"}[verb]
    assert str(refused.value) == f"cannot {tried} batch {batch}: it {state}"
    assert refused.value.batch == batch
    assert (story.book.digest(), story.log.last_seq) == (before, kept)


@pytest.mark.parametrize("tried", ["return", "commit"])
def test_a_batch_that_is_not_out_says_what_was_tried(tried: str) -> None:
    event = ev.BatchReturned(1, "closed") if tried == "return" else ev.BatchCommitted(1)

    with pytest.raises(UnknownBatch, match=f"cannot {tried} batch 1: it was never sampled"):
        Book().apply(ev.Record(1, 0, event))


def test_committed_groups_leave_and_their_batch_with_them() -> None:
    story = play(*done("a", "b"), "sample 2", "commit 1")

    assert (story.book.groups, story.book.batches, story.book.aside) == ({}, {}, {})
    assert story.book.departed == {"a": Phase.COMMITTED, "b": Phase.COMMITTED}
    assert conserved(story.book)


# What can be sampled ----------------------------------------------------------------------------------


def test_a_training_group_without_rows_is_not_sampleable_and_a_validation_group_is() -> None:
    story = play(
        "submit a/1", "submit v/1 partition=val", "start a", "start v", "fail a", "fail v",
        "submit x/1 partition=val", "start x", "finish x reward=1",
    )  # fmt: skip

    assert (story.ready(), story.book.ready_count()) == ([], 0)
    assert (story.ready("val"), story.book.ready_count("val")) == (["v", "x"], 2)


def test_a_failed_group_with_rows_is_sampleable() -> None:
    story = play("submit a/2", "start a", "finish a.0 reward=1", "fail a.1")

    assert story.ready() == ["a"]


def test_grouping_is_by_id_and_not_by_position() -> None:
    story = play("submit a/3", "submit b/3", "start a", "start b")
    seen = []
    for end in ("a.0", "b.0", "a.1", "b.1", "b.2", "a.2"):
        story.tell(f"finish {end} reward=1")
        seen.append(story.ready())

    assert seen == [[], [], [], [], ["b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"mode": "sync", "empty": "keep"}, True),
        ({"mode": "sync", "empty": "keep_all"}, True),
        ({"mode": "async", "empty": "keep"}, False),
        ({"mode": "async", "empty": "keep_all"}, False),
        ({"mode": "async", "empty": "keep_finished"}, False),
        ({"mode": "sync", "empty": "drop"}, False),
        ({"mode": "sync", "empty": "keep_finished"}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_failed_group_without_rows_is_kept_where_the_rules_of_the_log_say_so(
    rules: dict[str, Any], kept: bool, partition: Any
) -> None:
    book = Book()
    events: list[ev.Event] = [
        ev.RunStarted("r", rules, 5, 3),
        ev.GroupSubmitted("g", 1, partition, 3, 1, "submit"),
        ev.SessionFailed("g", 0, 1, "error"),
        ev.GroupFailed("g"),
    ]
    for seq, event in enumerate(events, 1):
        book.apply(ev.Record(seq, seq * 100, event))

    assert book.group("g").kept_empty is (kept and partition == "train")
    assert (book.group("g").ended_version, book.group("g").submitted_at_ns) == (3, 200)
    assert (book.openings, book.rules_version, book.last_at_ns) == (1, 5, 400)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"mode": "sync", "empty": "keep"}, False),
        ({"mode": "sync", "empty": "keep_finished"}, True),
        ({"mode": "sync", "empty": "keep_all"}, True),
        ({"mode": "async", "empty": "keep_finished"}, True),
        ({"mode": "async", "empty": "keep_all"}, False),
    ],
)
@pytest.mark.parametrize("partition", ["train", "val"])
def test_so_is_a_finished_one(rules: dict[str, Any], kept: bool, partition: Any) -> None:
    book = Book()
    events: list[ev.Event] = [
        ev.RunStarted("r", rules, 5, 3),
        ev.GroupSubmitted("g", 1, partition, 3, 1, "submit"),
        ev.SessionStarted("g", 0, 1),
        ev.SessionFinished("g", 0, 1),
        ev.GroupFinished("g"),
    ]
    for seq, event in enumerate(events, 1):
        book.apply(ev.Record(seq, seq * 100, event))

    assert book.group("g").kept_empty is (kept and partition == "train")
    assert [group.group_id for group in book.ready(partition)] == ["g"] * (kept or partition == "val")


# Groups that come back --------------------------------------------------------------------------------


def test_batches_come_back_with_the_lag_that_they_were_sampled_with() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 9", "release 1")

    assert story.book.lag(story.group("a")) == 2
    assert (story.group("a").batch, story.group("a").sampled_lag, story.group("a").stamp) == (0, 0, 0)


def test_a_returned_group_ages_no_more_and_is_not_evicted_as_stale() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 9", "release 1", "publish 99", rules=Rules(lag_max=2))

    assert story.book.lag(story.group("a")) == 2
    assert story.evicted() == {}


def test_a_requeued_group_keeps_no_lag() -> None:
    story = play(
        "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "publish 2", "sample 1", "publish 9", "release 1"
    )
    kept = story.book.lag(story.group("a"))
    story.tell("requeue a")

    assert (kept, story.book.lag(story.group("a"))) == (2, 9)


def test_a_group_newer_than_the_trainer_comes_back_with_lag_zero() -> None:
    story = play("submit a/1 stamp=5", "start a", "finish a reward=1", "sample 1", "release 1", "publish 7")

    assert story.book.lag(story.group("a")) == 0


def test_a_returned_group_takes_its_old_place_in_the_order() -> None:
    story = play(*done("a"), "publish 2", *done("b", stamp=2), "sample 1", "publish 4", "release 1")

    assert story.ready() == ["a", "b"]


def test_only_groups_whose_lag_grows_are_in_the_order_of_age() -> None:
    story = play(
        *done("a"), "publish 2", *done("c", stamp=2), *done("b", stamp=1), "sample 1", "publish 4", "release 1"
    )

    assert story.ready() == ["a", "b", "c"]
    assert [[group.group_id for group in groups] for groups in story.book.by_age()] == [["b", "c"]]


def test_a_batch_of_a_recovered_run_comes_back_with_its_lag() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 3", "recover version=9", rules=Rules(lag_max=2))

    assert story.book.lag(story.group("a")) == 2
    assert story.ready() == ["a"]


def test_a_batch_keeps_its_lag_when_the_trainer_goes_on_from_an_older_version() -> None:
    story = play(*done("a", stamp=3), "publish 5", "sample 1", "recover version=3")

    assert story.book.lag(story.group("a")) == 2
