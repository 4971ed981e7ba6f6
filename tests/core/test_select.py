"""Which groups a waiting `sample()` gets, and what keeps it waiting."""

import pytest
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.evict import (
    Evict,
)
from groupstate.core.rules import Rules
from groupstate.core.select import held_by_stale, is_for_now, selected, surplus, unservable, why_not
from groupstate.core.supply import admissible
from groupstate.testing.notation import Story, play

from .scenes import SYNC, owing, sync_story

# Waiting at the bound ---------------------------------------------------------------------------------

WAIT = Rules(on_stale="wait", lag_max=2, batch_size=1)
EXACT = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1)


@pytest.mark.parametrize(("version", "held"), [(1, False), (2, True), (3, True)])
def test_a_sampler_is_held_by_a_group_in_flight_at_the_bound(version: int, held: bool) -> None:
    story = play("submit old/1", "start old", "sample 1", f"publish {version}")

    assert (held_by_stale(story.book, WAIT) is not None) is held
    assert (admissible(story.book, WAIT) == 0) is held


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        (["submit old/1", "publish 9"], WAIT),
        (["sample 1", "publish 9"], WAIT),
        (["submit old/1 partition=val", "sample 1", "publish 9"], WAIT),
        (["submit old/1", "start old", "finish old acc=1", "sample 2", "publish 9"], WAIT),
        (["submit old/1", "sample 1", "publish 9"], replace(WAIT, on_stale="drop")),
        (["submit old/1", "sample 1", "publish 9"], replace(WAIT, mode="sync")),
    ],
    ids=["nobody waits", "nothing in flight", "validation", "finished has no bound", "drop", "sync"],
)
def test_nothing_is_held_otherwise(lines: list[str], rules: Rules) -> None:
    assert held_by_stale(play(*lines).book, rules) is None


def test_the_oldest_group_in_flight_holds_and_its_end_lets_go() -> None:
    story = play(
        "submit old/1", "publish 2", "submit new/1", "start old", "start new", "finish new acc=1", "sample 1",
        rules=WAIT, source=["r1"], admits=True,
    )  # fmt: skip
    held = (story.batches(), story.book.held_reason, story.book.in_flight_count())
    story.tell("finish old acc=1")

    assert held == ([], "a group in flight is at the lag bound", 1)
    assert story.batches() == [("old",)]
    assert story.book.held_reason == ""


def test_refills_go_on_while_admission_is_held() -> None:
    story = play(
        "submit old/1", "submit bad/1", "start old", "start bad", "publish 2", "sample 2", "fail bad",
        rules=WAIT, source=["r1", "r2"], admits=True,
    )  # fmt: skip

    assert story.refills() == ["r1"]
    assert sorted(story.book.groups) == ["old", "r1"]


# Selection -------------------------------------------------------------------------------------------


def blocked(story: Story, rules: Rules, partition: str = "train") -> str | None:
    return why_not(story.book, rules, story.book.waiting(partition)[0])


def test_too_few_sampleable_groups_block_with_both_numbers() -> None:
    assert blocked(sync_story("sample 3", good=2), Rules()) == "2 of 3 groups are sampleable"


def test_a_group_at_the_bound_blocks_with_its_lag() -> None:
    story = play("submit old/1", "submit new/1", "start new", "finish new acc=1", "publish 3")
    story.record(ev.BatchRequested(1, "train", 1, 3))

    assert blocked(story, WAIT) == "group 'old' in flight has lag 3, the bound is 2"
    assert blocked(story, Rules()) is None


def test_a_drain_blocks_until_nothing_is_in_flight() -> None:
    story = sync_story(good=2, running=1)
    story.record(ev.BatchRequested(1, "train", 2, 0))
    before = blocked(story, SYNC)
    story.tell("fail run0")

    assert before == "1 groups in flight are being drained"
    assert blocked(story, SYNC) is None


def test_validation_is_served_whatever_holds_training() -> None:
    story = play("submit old/1", "submit v/1 partition=val", "start v", "finish v acc=1", "publish 9", "sample 1")
    story.record(ev.BatchRequested(2, "val", 1, 9))

    assert blocked(story, WAIT, "val") is None
    assert blocked(story, SYNC, "val") is None


def test_the_oldest_are_selected_by_version_then_by_submission() -> None:
    story = play(
        "submit c/1 stamp=2", "submit b/1 stamp=1", "submit a/1 stamp=1", "start a", "start b", "start c",
        "finish c acc=1", "finish a acc=1", "finish b acc=1",
    )  # fmt: skip
    story.record(ev.BatchRequested(1, "train", 2, 2))

    assert [group.group_id for group in selected(story.book, Rules(), story.book.requests[1])] == ["b", "a"]


def test_of_groups_that_are_wanted_by_name_only_those_are_selected() -> None:
    story = play("sample 2 partition=val")
    for name in ("a", "b", "c"):
        story.tell(f"submit {name}/1 partition=val", f"start {name}", f"finish {name} acc=1")
    request = story.book.requests[1]

    assert [g.group_id for g in selected(story.book, Rules(), request)] == ["a", "b"]
    assert [g.group_id for g in selected(story.book, Rules(), request, wanted=frozenset("bc"))] == ["b", "c"]
    assert [g.group_id for g in selected(story.book, Rules(), request, wanted=frozenset("cx"))] == ["c"]


def test_groups_reserved_for_somebody_else_are_passed_over() -> None:
    story = play("sample 2 partition=val")
    for name in ("a", "b", "c"):
        story.tell(f"submit {name}/1 partition=val", f"start {name}", f"finish {name} acc=1")
    request = story.book.requests[1]

    assert [g.group_id for g in selected(story.book, Rules(), request, reserved=frozenset("a"))] == ["b", "c"]
    assert [g.group_id for g in selected(story.book, Rules(), request, reserved=frozenset("ab"))] == ["c"]
    assert [
        g.group_id for g in selected(story.book, Rules(), request, wanted=frozenset("a"), reserved=frozenset("a"))
    ] == ["a"]


def test_of_more_than_enough_each_batch_takes_different_ones() -> None:
    lines = [line for i in range(10) for line in (f"submit g{i}/1", f"start g{i}", f"finish g{i} acc=1")]
    story = play(*lines, "sample 4", "sample 4", "sample 4", rules=Rules())

    assert story.batches() == [("g0", "g1", "g2", "g3"), ("g4", "g5", "g6", "g7")]
    assert story.ready() == ["g8", "g9"]


def test_a_later_waiter_does_not_overtake_an_older_one() -> None:
    story = play("sample 2", "sample 1", "submit a/1", "start a", "finish a acc=1", rules=Rules())
    before = story.batches()
    story.tell("submit b/1", "start b", "finish b acc=1", "submit c/1", "start c", "finish c acc=1")

    assert before == []
    assert story.batches() == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("lines", "demand", "rules", "expected"),
    [
        ([], 2, replace(SYNC, batch_size=2), ["good2", "good3"]),
        ([], 4, SYNC, []),
        ([], 2, SYNC, []),
        (["exhausted"], 2, replace(SYNC, batch_size=2), []),
        ([], 2, Rules(mode="sync", batch_size=2), []),
        ([], 2, Rules(batch_size=2, filter_metric="acc"), []),
    ],
    ids=["surplus", "none over", "small demand", "exhausted", "no filter", "async"],
)
def test_what_is_sampleable_beyond_a_full_batch_is_surplus(
    lines: list[str], demand: int, rules: Rules, expected: list[str]
) -> None:
    story = sync_story(*lines, good=4)
    story.record(ev.BatchRequested(1, "train", demand, 0))
    request = story.book.requests[1]

    assert surplus(story.book, rules, request, selected(story.book, Rules(), request)) == [
        Evict(name, ("surplus",), 0, 0) for name in expected
    ]


def test_validation_has_no_surplus() -> None:
    story = sync_story(good=2)
    story.record(ev.BatchRequested(1, "val", 4, 0))

    assert surplus(story.book, SYNC, story.book.requests[1], []) == []


@pytest.mark.parametrize(
    ("lines", "demands", "hopeless"),
    [
        (["exhausted"], [2], None),
        (["exhausted"], [3], None),
        (["exhausted"], [4], 1),
        ([], [4], None),
        (["exhausted"], [2, 1], None),
        (["exhausted"], [2, 2], 2),
        (["exhausted"], [4, 1], 1),
        (["exhausted"], [1, 1, 1, 1], 4),
        (["exhausted"], [], None),
    ],
)
def test_a_waiter_is_hopeless_if_what_older_ones_leave_is_too_little(
    lines: list[str], demands: list[int], hopeless: int | None
) -> None:
    story = sync_story(*lines, good=2, running=1)
    for number, size in enumerate(demands, 1):
        story.record(ev.BatchRequested(number, "train", size, 0))
    found = unservable(story.book, Rules())

    assert (None if found is None else found.request) == hopeless


def test_while_credit_is_outstanding_nobody_is_hopeless() -> None:
    story = owing(sync_story("sample 3", "exhausted"), 1)

    assert unservable(story.book, Rules()) is None


def test_a_source_that_gives_nothing_any_more_is_as_good_as_exhausted() -> None:
    book = sync_story("sample 3", good=2).book

    assert unservable(book, Rules()) is None
    assert unservable(book, Rules(), no_more=True) == book.requests[1]


def test_validation_is_never_hopeless() -> None:
    assert unservable(sync_story("sample 3 partition=val", "exhausted").book, Rules()) is None


@pytest.mark.parametrize(
    ("rules", "partition", "version", "for_now"),
    [(Rules(), "train", 0, True), (EXACT, "train", 0, False), (EXACT, "train", 1, True), (EXACT, "val", 0, True)],
    ids=["any version", "another version", "its version", "validation"],
)
def test_only_training_groups_that_are_made_for_another_version_are_not_for_now(
    rules: Rules, partition: str, version: int, for_now: bool
) -> None:
    story = play(f"submit g/1 partition={partition} stamp=1", f"publish {version}")

    assert is_for_now(story.book, rules, story.group("g")) is for_now
