"""Marks of a book and going back to them, and a run that is opened again."""

import pytest

from groupstate.core import book_changes
from groupstate.core import events as ev
from groupstate.core.held import MARKS_KEPT, Mark
from groupstate.errors import BadMark
from groupstate.testing.notation import play

from .scenes import conserved, done

# Marks and going back ---------------------------------------------------------------------------------


def test_the_last_two_marks_are_kept() -> None:
    story = play("mark first", "publish 1", "mark second", "publish 2", "mark third")

    assert MARKS_KEPT == 2
    assert story.book.marks == [Mark(2, 4, 1, 1, "second"), Mark(3, 6, 2, 1, "third")]
    assert story.book.last_mark == 3


def test_without_a_mark_nothing_is_kept_aside() -> None:
    story = play(*done("a"), "sample 1", "commit 1", "mark")

    assert story.book.aside == {}


def test_going_back_undoes_the_commits_after_the_mark_and_no_others() -> None:
    story = play(*done("a", "b", "c"), "mark", "sample 1", "commit 1", "mark", "sample 1", "commit 2", "recover at=2")

    assert story.phase("a") == "committed"
    assert story.ready() == ["b", "c"]
    assert list(story.book.aside) == ["a"]
    assert story.book.totals["committed"] == 1
    assert story.book.datasets[""]["committed"] == 1
    assert conserved(story.book)


def test_going_back_to_the_older_mark_forgets_the_younger_one() -> None:
    story = play(*done("a", "b", "c"), "mark", "sample 1", "commit 1", "mark", "sample 1", "commit 2", "recover at=1")

    assert story.ready() == ["a", "b", "c"]
    assert [mark.mark for mark in story.book.marks] == [1]
    assert conserved(story.book)


def test_a_commit_that_came_back_has_left_nowhere() -> None:
    story = play("mark", *done("a"), "submit v/1 partition=val", "start v", "finish v reward=1", "sample 1", "commit 1")
    story.tell("sample 1 partition=val", "commit 2")
    before = {name: story.book.totals[name] for name in ("committed", "committed/train", "committed/val")}
    story.tell("recover at=1")

    assert before == {"committed": 2, "committed/train": 1, "committed/val": 1}
    assert {name: story.book.totals[name] for name in before} == dict.fromkeys(before, 0)
    assert (story.book.departed, story.book.aside) == ({}, {})
    assert story.book.is_taken("a") == "it is finished"


def test_a_commit_comes_back_once() -> None:
    story = play("mark", *done("a", "b"), "sample 1", "commit 1", "recover at=1")
    story.tell("sample 1", "commit 2", "mark", "recover at=2")

    assert story.phase("a") == "committed"
    assert story.ready() == ["b"]
    assert story.batches() == [("a",), ("a",)]


def test_a_commit_that_came_back_can_come_back_again_after_a_second_commit() -> None:
    story = play("mark", *done("a"), "sample 1", "commit 1", "recover at=1", "sample 1", "commit 2", "recover at=1")

    assert story.ready() == ["a"]
    assert conserved(story.book)


def test_an_eviction_after_the_mark_is_not_undone() -> None:
    story = play("mark", *done("a"), "evict a stale", "recover at=1")

    assert story.phase("a") == "evicted"
    assert story.ready() == []


def test_an_uncommitted_batch_comes_back_before_the_run_goes_back() -> None:
    story = play(*done("a"), "mark", "sample 1", "recover at=1")

    assert story.ready() == ["a"]
    assert story.events(ev.BatchReturned) == [ev.BatchReturned(1, "recovery")]


def test_a_new_lineage_begins_with_the_version_of_the_mark() -> None:
    story = play("publish 3", "mark", "publish 7", "recover at=1")

    assert (story.book.weight_version, story.book.lineage) == (3, 2)


def test_work_of_the_abandoned_line_counts_its_lag_from_the_mark() -> None:
    story = play("publish 3", "mark", "publish 7", *done("new", stamp=7), "submit old/1 stamp=2", "recover at=1")
    story.tell("publish 5")

    assert story.book.lag(story.group("new")) == 2
    assert story.book.lag(story.group("old")) == 3


def test_running_work_of_the_abandoned_line_counts_its_lag_from_the_mark_too() -> None:
    story = play("publish 3", "mark", "publish 7", "submit new/1", "start new", "recover at=1", "publish 5")

    assert story.book.lag(story.group("new")) == 2


def test_a_commit_that_is_undone_keeps_the_lag_that_it_was_sampled_with() -> None:
    story = play(
        "publish 3", "mark", "publish 7", *done("new", stamp=7), *done("old", stamp=2), "sample 2", "commit 1",
        "recover at=1",
    )  # fmt: skip
    story.tell("publish 4")

    assert story.book.lag(story.group("new")) == 0
    assert story.book.lag(story.group("old")) == 5


@pytest.mark.parametrize(
    ("lines", "kept"),
    [([], "none"), (["mark", "mark", "mark"], "2 (event 3), 3 (event 4)")],
    ids=["none", "pruned"],
)
def test_a_mark_that_is_not_kept_can_not_be_gone_back_to(lines: list[str], kept: str) -> None:
    story = play(*lines)
    before, posted = story.book.digest(), story.log.last_seq
    with pytest.raises(BadMark) as refused:
        story.record(ev.RunRewound(1, 2, 0, 2))

    assert str(refused.value) == f"mark 1 at event 2 can't be gone back to; marks that are kept: {kept}"
    assert (story.book.digest(), story.log.last_seq) == (before, posted)


def test_going_back_with_a_batch_out_is_our_own_fault() -> None:
    story = play(*done("a"), "mark", "sample 1")
    mark = story.book.marks[0]
    with pytest.raises(AssertionError, match="batches come back before the run is rewound"):
        story.record(ev.RunRewound(1, mark.seq, 0, 2))

    assert story.phase("a") == "sampled"


def test_going_back_leaves_groups_that_are_not_committed_where_they_are() -> None:
    story = play("mark", "submit p/1", *done("f"), "submit x/1", "start x", "fail x", "recover at=1")

    assert (story.phase("p"), story.phase("f"), story.phase("x")) == ("pending", "finished", "failure")


def test_going_back_undoes_commits_to_the_last_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 1)
    story = play(
        "publish 2", *done("old", stamp=1), *done("at", stamp=2), "mark", "publish 4", *done("new", stamp=4),
        "sample 2", "commit 1", "sample 1", "commit 2",
    )  # fmt: skip
    marked = list(story.book.mark_seqs)
    story.tell("recover at=1")
    groups = [story.group(name) for name in ("old", "at", "new")]

    assert [(group.ended_version, group.aged_from, group.rewound_to) for group in groups] == [
        (2, 1, None), (2, 2, None), (2, 2, 2),
    ]  # fmt: skip
    assert list(story.book.mark_seqs)[:1] == marked
    assert (story.book.datasets[""]["committed"], story.book.totals["committed"]) == (0, 0)
    assert story.book.uses[""].open == 3


# Opening again ----------------------------------------------------------------------------------------


def test_a_run_that_is_opened_again_has_no_waiters_and_a_source_to_ask() -> None:
    story = play("sample 2", "exhausted", "close")
    closed = (story.book.closed, story.book.source_exhausted, len(story.book.requests))
    story.tell("recover")

    assert closed == (True, True, 1)
    assert (story.book.closed, story.book.source_exhausted, len(story.book.requests)) == (False, False, 0)
    assert story.book.lineage == 2


def test_running_groups_are_requeued_with_their_stamp_and_pending_ones_wait() -> None:
    story = play("submit a/2", "submit b/1", "start a.0", "publish 3", "recover")

    assert (story.phase("a"), story.group("a").stamp, story.book.lag(story.group("a"))) == ("pending", 0, 3)
    assert [session.attempt for session in story.group("a").sessions] == [2, 2]
    assert [session.attempt for session in story.group("b").sessions] == [1]


def test_a_hold_is_remembered() -> None:
    story = play()
    story.record(ev.AdmissionHeld("lag"))

    assert story.book.held_reason == "lag"
