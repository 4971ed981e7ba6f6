"""The version that a group's lag counts from, by each basis."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.rules import Rules
from groupstate.testing.notation import play


@pytest.mark.parametrize(
    ("basis", "version"), [("dispatch", 1), ("first_token", 4), ("oldest_token", 2), ("newest_token", 6)]
)
def test_lag_counts_from_what_the_basis_names(basis: Any, version: int) -> None:
    rules = Rules(basis=basis)
    story = play(
        "submit g/2 stamp=1", "start g", "publish 6", "finish g.0 versions=4,2,6", "finish g.1 versions=5,5",
        rules=rules,
    )  # fmt: skip

    assert (story.group("g").stamp, story.group("g").version, story.group("g").aged_from) == (1, version, version)
    assert story.book.lag(story.group("g")) == 6 - version


@pytest.mark.parametrize("basis", ["first_token", "oldest_token", "newest_token"])
def test_without_token_versions_the_stamp_stands_in(basis: Any) -> None:
    story = play("submit g/1 stamp=1", "start g", "publish 6", "finish g reward=1", rules=Rules(basis=basis))

    assert story.book.lag(story.group("g")) == 5


def test_a_first_token_version_known_at_the_start_counts_without_spans() -> None:
    story = play("submit g/1", "publish 4", "start g version=4", "finish g reward=1", rules=Rules(basis="first_token"))

    assert story.book.lag(story.group("g")) == 0


def test_a_version_known_at_the_start_stands_in_for_its_session_alone() -> None:
    story = play(
        "submit g/2", "publish 6", "start g.0 version=4", "start g.1 version=6", "finish g.0 reward=1",
        "finish g.1 versions=5", rules=Rules(basis="newest_token"),
    )  # fmt: skip

    assert story.group("g").version == 5


def test_a_session_without_rows_has_no_version() -> None:
    story = play(
        "submit g/2", "publish 6", "start g.0 version=4", "start g.1 version=6", "finish g.0 nothing",
        "finish g.1 reward=1", rules=Rules(basis="oldest_token", empty_session="allow"),
    )  # fmt: skip

    assert story.group("g").version == 6


def test_a_requeued_group_does_not_count_from_tokens_that_were_dropped() -> None:
    story = play(
        "submit a/2 stamp=5", "publish 5", "start a", "finish a.0 versions=3", "fail a.1", "requeue a",
        rules=Rules(basis="oldest_token"), controlled=False,
    )  # fmt: skip

    assert story.group("a").aged_from == 5


def test_an_undone_commit_that_is_requeued_counts_from_the_mark() -> None:
    story = play(
        "publish 3", "mark", "publish 7", "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "sample 1",
        "commit 1", "recover at=1", "requeue a", "publish 5",
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 2


def test_in_flight_the_lag_counts_from_the_stamp_whatever_the_basis() -> None:
    story = play("submit g/1 stamp=1", "start g", "publish 6", rules=Rules(basis="newest_token"))

    assert story.book.lag(story.group("g")) == 5


def test_the_order_of_sampling_is_by_the_basis() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "publish 5", "finish a versions=5", "finish b versions=3",
        rules=Rules(basis="oldest_token"),
    )  # fmt: skip

    assert story.ready() == ["b", "a"]


def test_a_returned_group_is_not_counted_by_its_tokens_again() -> None:
    story = play(
        "submit a/1", "start a", "publish 5", "finish a versions=3", "sample 1", "publish 9", "release 1",
        rules=Rules(basis="oldest_token"),
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 2
    assert story.group("a").version == 3


def test_a_group_that_was_out_under_another_basis_comes_back_as_it_was() -> None:
    story = play("submit a/1 stamp=1", "start a", "publish 5", "finish a versions=3", "sample 1")
    story.record(ev.RunRecovered(Rules(basis="oldest_token").to_dict(), 1, 5, 2))
    story.tell("release 1")

    assert (story.group("a").version, story.group("a").aged_from) == (1, 1)


def test_a_requeued_group_counts_from_its_stamp_again() -> None:
    story = play(
        "submit a/2 stamp=1", "start a", "publish 5", "finish a.0 versions=3", "fail a.1", "requeue a",
        rules=Rules(basis="oldest_token"), controlled=False,
    )  # fmt: skip

    assert (story.group("a").version, story.group("a").aged_from) == (1, 1)


@pytest.mark.parametrize("basis", ["dispatch", "oldest_token"])
def test_one_whose_prompt_is_dispatched_anew_counts_from_the_version_of_then(basis: Any) -> None:
    story = play(
        "submit a/1 stamp=1", "start a", "publish 5", "requeue a stamp=4", rules=Rules(basis=basis), controlled=False
    )
    group = story.group("a")

    assert (group.stamp, group.version, group.aged_from, story.book.lag(group)) == (4, 4, 4, 1)
    story.tell("requeue a")
    assert (story.group("a").stamp, story.group("a").aged_from) == (4, 4)


def test_so_does_one_that_had_not_begun_and_it_is_younger_among_those_in_flight() -> None:
    story = play("submit a/1 stamp=1", "submit b/1 stamp=2", "publish 5", "requeue a stamp=5")

    assert story.phase("a") == "pending"
    assert [[group.group_id for group in groups] for groups in story.book.in_flight_by_age()] == [["b", "a"]]


def test_an_undone_commit_that_is_dispatched_anew_counts_from_the_version_of_then() -> None:
    story = play(
        "publish 3", "mark", "publish 7", "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "sample 1",
        "commit 1", "recover at=1", "requeue a stamp=4", "publish 5", "requeue a",
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 1


def test_a_group_made_for_a_version_keeps_it_whatever_its_tokens_say() -> None:
    rules = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1)
    story = play("submit g/1 target=2", "start g", "finish g acc=1 versions=0,1", rules=rules)

    assert (story.group("g").version, story.group("g").aged_from) == (2, 2)
