"""What a book counts of groups, credit, datasets and the source: each thing once, and what happens twice twice."""

from collections import Counter

import pytest

from groupstate.core import events as ev
from groupstate.core.held import Credit, DatasetUse, Window
from groupstate.core.rules import RULES_VERSION
from groupstate.testing.notation import Story, play
from groupstate.version import VERSION

from .scenes import conserved, done

# Credit -----------------------------------------------------------------------------------------------


def test_a_refill_needs_credit() -> None:
    with pytest.raises(AssertionError, match="a refill without credit"):
        play("submit g/1 cause=refill")


def test_credit_is_earned_spent_first_in_first_out_and_forfeited_from_the_end() -> None:
    story = play(
        "submit a/3 dataset=math", "submit b/2 dataset=code", "start a", "start b", "fail a", "fail b",
        "evict a empty credit=2", "evict b empty credit=1",
    )  # fmt: skip
    earned = list(story.book.credits)
    story.tell("submit r1/3 cause=refill", "forfeit 1")

    assert earned == [Credit(3, "math", "a"), Credit(3, "math", "a"), Credit(2, "code", "b")]
    assert list(story.book.credits) == [Credit(3, "math", "a")]
    assert (story.book.totals["credit"], story.book.totals["refills"], story.book.totals["forfeited"]) == (3, 1, 1)
    assert (story.book.window("train").refills, story.book.window("train").forfeited) == (1, 1)


def test_more_can_be_forfeited_than_is_owed_and_only_what_was_owed_is_taken_off() -> None:
    story = play("submit a/1", "start a", "fail a", "evict a empty credit=1", "forfeit 3")

    assert not story.book.credits
    assert story.book.totals["forfeited"] == 1
    assert story.book.window("train").forfeited == 3


def test_nothing_is_no_forfeit() -> None:
    with pytest.raises(AssertionError):
        play("forfeit 0")


# The source -------------------------------------------------------------------------------------------


def test_the_source_goes_on_behind_the_furthest_prompt() -> None:
    story = play("submit a/1 position=4", "submit b/1 position=2", "submit c/1")

    assert story.book.source_position == 5


def test_a_position_that_was_drawn_late_takes_no_dataset_back() -> None:
    story = play("submit a/1 dataset=math position=3", "submit b/1 dataset=math position=1")

    assert (story.book.source_positions, story.book.source_position) == ({"math": 4}, 4)


# Groups and datasets ----------------------------------------------------------------------------------


def test_data_sets_count_what_became_of_their_groups() -> None:
    story = play(
        "submit a/1 dataset=math", "submit b/1 dataset=math", "submit c/1", "start a", "start b", "finish a reward=1",
        "finish b reward=1", "evict b stale", "sample 1", "commit 1",
    )  # fmt: skip

    assert story.book.datasets == {
        "math": {"submitted": 2, "evicted": 1, "sampled": 1, "committed": 1},
        "": {"submitted": 1},
    }


def test_a_window_counts_until_a_batch_of_its_partition_is_sampled() -> None:
    story = play(
        "submit v/1 partition=val", *done("a", "b"), "submit f/2", "start f", "fail f.0 timeout", "fail f.0 timeout",
        "fail f.1", "evict f empty,stale lag=4 credit=1", "submit r/2 cause=refill", "start r",
        "sample 1 partition=val",
    )  # fmt: skip
    before = story.book.window("train")
    counts = (before.submitted, before.refills, before.fenced, before.evicted_groups, before.stale_lags)
    by_name = dict(before.evicted), dict(before.sessions_failed)
    story.tell("sample 1")

    assert counts == (4, 1, 1, 1, [4])
    assert by_name == ({"empty": 1, "stale": 1}, {"timeout": 1, "error": 1})
    assert story.book.window("train") == Window()
    assert story.book.window("val").submitted == 1


def test_a_fenced_result_counts_in_the_partition_of_its_group_and_for_none_that_left() -> None:
    story = play(
        *done("a", "b"), "submit v/1 partition=val", "start v", "finish v reward=1", "finish v.0 reward=1",
        "evict b stale", "finish b.0 reward=1",
    )  # fmt: skip

    assert (story.book.window("val").fenced, story.book.window("train").fenced) == (1, 0)
    assert story.book.totals["fenced"] == 2


def test_totals_count_the_whole_run() -> None:
    story = play(
        *done("a", "b", "c"), "submit f/1", "start f", "fail f timeout", "evict f empty", "sample 2", "release 1",
        "sample 2", "commit 2", "finish a.0 reward=1",
    )  # fmt: skip

    expected = {
        "submitted": 4,
        "session_failed/timeout": 1,
        "evicted": 1,
        "evicted/empty": 1,
        "credit": 0,
        "batches": 2,
        "batches_returned": 1,
        "batches_committed": 1,
        "committed": 2,
        "fenced": 1,
    }

    assert {name: story.book.totals[name] for name in expected} == expected
    assert conserved(story.book)


def test_a_dataset_with_open_groups_counts_from_when_it_was_sampled() -> None:
    story = play(*done("a"), "submit b/1", "sample 1", "publish 3", "submit c/1")

    assert (story.book.uses[""].version, story.book.uses[""].told_version) == (0, 0)


# Twice ------------------------------------------------------------------------------------------------


def round_of_events(story: Story, number: int) -> None:
    evicted, failing = f"e{number}", f"f{number}"
    story.record(ev.GroupSubmitted(evicted, 1, "train", 0, 1, "submit", "math", target_version=7))
    story.tell(
        f"submit {failing}/2 dataset=math", f"submit s{number}/1 dataset=code", f"submit k{number}/1 dataset=code"
    )
    story.tell(f"start {evicted}", f"finish {evicted} acc=0.5 versions=0,0 | acc=1 versions=0")
    story.tell(f"start {failing}", f"fail {failing}")
    story.record(ev.GroupEvicted(evicted, ("stale", "zero_variance"), 3, 3, 0.5, "acc"))
    story.tell("forfeit 1", f"submit r{number}/1 dataset=drawn position={number - 1} cause=refill")
    story.record(ev.GroupRequeued(failing, "once more", True))
    story.record(ev.ResultFenced(failing, 0, 1, "finished", "attempt"))
    story.record(ev.DatasetStarved("math", 1, 1, 1))
    story.record(ev.GroupSubmitted(f"t{number}", 1, "val", 0, 1, "submit", "math", target_version=7))
    story.tell(f"start t{number}", f"fail t{number}", f"evict t{number} failed")


def test_what_happens_twice_is_counted_twice() -> None:
    story = play()
    for number in (1, 2):
        round_of_events(story, number)

    assert story.book.totals == {
        "submitted": 12, "sessions_finished": 2, "response_tokens": 6, "session_failed/error": 6, "evicted": 4,
        "credit": 6, "evicted/stale": 2, "evicted/zero_variance": 2, "evicted/failed": 2, "forfeited": 2, "fenced": 2,
        "starved": 2, "refills": 2, "drawn": 2,
    }  # fmt: skip
    assert story.book.datasets == {
        "math": {"submitted": 6, "evicted": 4}, "code": {"submitted": 4}, "drawn": {"submitted": 2}
    }  # fmt: skip
    assert story.book.uses == {
        "math": DatasetUse(4, 2, 2), "code": DatasetUse(4, 0, 4, 4), "drawn": DatasetUse(2, 0, 2, 2)
    }  # fmt: skip
    assert (story.book.source_position, story.book.source_positions) == (2, {"drawn": 2})
    assert story.book.targets == {7: 0}
    assert list(story.book.credits) == [Credit(1, "math", "e2", 7)] * 2
    assert story.book.window("train") == Window(
        evicted=Counter(stale=2, zero_variance=2),
        evicted_groups=2,
        stale_lags=[3, 3],
        submitted=10,
        refills=2,
        forfeited=2,
        fenced=2,
        requeued=2,
        sessions_failed=Counter(error=4),
        starved=Counter(math=2),
        filtered_values=Counter({0.5: 2}),
    )


def test_batches_that_go_out_come_back_and_are_committed_twice_are_counted_twice() -> None:
    story = play("submit v/1 partition=val", "start v", "finish v acc=1", "sample 1 partition=val", "release 1")
    for number in (1, 2):
        name, batch = f"s{number}", story.book.last_batch + 1
        story.tell(f"submit {name}/1 dataset=code", f"start {name}", f"finish {name} acc=1", "sample 1")
        story.tell(f"release {batch}", "sample 1", f"commit {batch + 1}")
    story.tell("recover", "recover")

    assert story.book.totals == {
        "submitted": 3, "sessions_finished": 3, "response_tokens": 0, "batches": 5, "batches_returned": 3,
        "committed": 2, "committed/train": 2, "batches_committed": 2,
    }  # fmt: skip
    assert story.book.datasets == {
        "": {"submitted": 1, "sampled": 1}, "code": {"submitted": 2, "sampled": 4, "committed": 2}
    }  # fmt: skip
    assert story.book.uses == {"code": DatasetUse(2)}
    assert not story.book.windows_out
    assert (story.book.openings, story.book.rules_version, story.book.library) == (3, RULES_VERSION, VERSION)
