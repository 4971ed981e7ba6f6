"""The checker catches groups that end too early or go on behind their end, and validation treated as training."""

import pytest

from groupstate.core import events as ev
from groupstate.core.invariants import Checker, Violation, violations
from groupstate.core.rules import Rules
from groupstate.core.tracked import Tracked

from .handmade_logs import done, evict, fail, failed, finish, log, sample, start, submit, whole, wrong

# 1: the end after every session --------------------------------------------------------------------------


def test_a_group_that_ends_before_its_sessions_is_caught() -> None:
    records = log(submit("a", 2), start("a", 0), finish("a", 0), done("a"))

    assert violations(records)[0] == Violation(
        1, 5, "a", "group 'a' becomes finished although session 1 has not ended: attempt 1 is its latest", (2, 5)
    )
    assert str(violations(records)[0]).startswith("event 5: invariant 1: group 'a'")


def test_a_retry_that_is_due_has_not_ended() -> None:
    records = log(submit("a"), start("a"), fail("a", retry=1.0), ev.GroupFailed("a"))

    assert "attempt 2 is its latest" in wrong(records, 1)[0]


def test_a_group_that_was_started_over_waits_for_its_next_attempts() -> None:
    records = log(failed("a"), ev.GroupRequeued("a"), ev.GroupFailed("a"))

    assert "attempt 2 is its latest" in wrong(records, 1)[0]


def test_a_result_of_an_old_attempt_does_not_end_the_session() -> None:
    records = log(submit("a"), start("a"), fail("a", retry=1.0), start("a", 0, 2), finish("a", 0, 1), done("a"))

    assert "session 0 has not ended: attempt 2" in wrong(records, 1)[0]


def test_an_end_that_does_not_follow_its_last_session_is_caught() -> None:
    records = log(submit("a"), start("a"), finish("a"), ev.WeightsPublished(1), done("a"))

    assert wrong(records, 1) == [
        "the last session of group 'a' ended at event 4, and the next event is WeightsPublished instead of the "
        "group's end"
    ]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ev.GroupFinished("a"), "1 of its 2 sessions failed"),
        (ev.GroupFinished("a", partial=True), "1 sessions finished, and survivors_min is 2"),
    ],
)
def test_a_group_that_finished_although_sessions_failed_is_caught(end: ev.AnyEvent, text: str) -> None:
    two = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]

    assert text in wrong(log(two, end, rules=Rules(survivors_min=2)), 1)[0]


def test_enough_survivors_finish_a_group() -> None:
    two = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0), fail("a", 1)]

    assert violations(log(two, ev.GroupFinished("a", partial=True), rules=Rules(survivors_min=1))) == []


def test_a_group_that_failed_although_all_sessions_finished_is_caught() -> None:
    assert "all its sessions finished" in wrong(log(submit("a"), start("a"), finish("a"), ev.GroupFailed("a")), 1)[0]


def test_a_running_group_is_not_evicted() -> None:
    assert wrong(log(submit("a"), start("a"), evict("a")), 1) == ["group 'a' is evicted while it is running"]


# 2: nothing after the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [start("a"), finish("a"), fail("a"), done("a")])
def test_what_happens_to_a_group_after_its_end_is_caught(late: ev.AnyEvent) -> None:
    assert "after group 'a' was finished at event 5" in wrong(log(whole("a"), late), 2)[0]


def test_what_a_session_did_after_the_end_of_its_group_is_said() -> None:
    assert wrong(log(whole("a"), fail("a")), 2) == [
        "SessionFailed of session 0 comes after group 'a' was finished at event 5"
    ]


def test_a_failed_group_that_fails_again_is_caught() -> None:
    assert "GroupFailed comes after group 'a' was failed" in wrong(log(failed("a"), ev.GroupFailed("a")), 2)[0]


def test_a_group_that_is_with_the_trainer_is_not_requeued() -> None:
    assert wrong(log(whole("a"), sample(1, "a"), ev.GroupRequeued("a")), 2) == [
        "GroupRequeued comes after group 'a' was sampled at event 7"
    ]


# 8: validation -------------------------------------------------------------------------------------------


def test_a_validation_group_is_not_evicted() -> None:
    records = log(whole("v", val=True), evict("v", "zero_variance"))

    assert wrong(records, 8) == ["group 'v' of partition 'val' is evicted"]


def test_a_validation_group_is_no_refill() -> None:
    records = log(failed("a"), evict("a", credit=1), submit("v", val=True, cause="refill"))

    assert wrong(records, 8) == ["group 'v' of partition 'val' is submitted as a refill"]


# What the checker knows of a group -----------------------------------------------------------------------


def test_the_checker_counts_rows_and_takes_the_version_of_the_start_where_a_session_has_no_spans() -> None:
    group = Tracked("g", 2, "train", 5, 3, 5, kept_empty=True)
    group.begin([1, 1], 3)
    group.starts[0] = 7
    group.take_rows(0, (ev.TrajectoryRecord(0),), 4)
    alone = (group.first_version, group.oldest_version, group.newest_version)
    group.starts[1] = 2
    group.take_rows(1, (ev.TrajectoryRecord(0, spans=(ev.VersionSpan(0, 1, 9),)), ev.TrajectoryRecord(1)), 5)

    assert (alone, group.rows, group.kept_empty) == ((7, 7, 7), 3, False)
    assert (group.first_version, group.oldest_version, group.newest_version) == (7, 7, 9)


def test_a_session_without_a_trajectory_has_no_version_though_one_is_known_of_its_start() -> None:
    group = Tracked("g", 1, "train", 5, 3, 5)
    group.begin([1], 3)
    group.starts[0] = 7
    group.take_rows(0, (), 4)

    assert (group.rows, group.first_version, group.version_seqs) == (0, None, {})


def test_a_trajectory_of_which_no_version_is_known_has_none() -> None:
    group = Tracked("g", 1, "train", 5, 3, 5)
    group.begin([1], 3)
    group.starts[0] = None
    group.take_rows(0, (ev.TrajectoryRecord(0),), 4)

    assert (group.rows, group.first_version, group.version_seqs) == (1, None, {})


@pytest.mark.parametrize("versions", [(4, 6), (6, 4)])
def test_of_two_versions_the_event_with_each_that_is_the_oldest_the_newest_or_the_first_is_known(
    versions: tuple[int, int],
) -> None:
    group = Tracked("g", 2, "train", 5, 3, 5)
    group.begin([1, 1], 3)
    row = ev.TrajectoryRecord(0, spans=tuple(ev.VersionSpan(n, n + 1, version) for n, version in enumerate(versions)))
    group.take_rows(0, (row,), 8)
    group.take_rows(1, (row,), 9)

    assert (group.first_version, group.oldest_version, group.newest_version) == (versions[0], 4, 6)
    assert group.version_seqs == {"first_token": 8, "oldest_token": 8, "newest_token": 8}


def test_a_session_that_starts_in_a_later_attempt_is_followed() -> None:
    """The replay says that it can't; the counts go on from what the log says."""
    row = (ev.TrajectoryRecord(0, {"reward": 1.0}),)
    records = log(submit("a"), ev.SessionStarted("a", 0, 2), ev.SessionFinished("a", 0, 2, row), ev.GroupFinished("a"))
    checker = Checker(replays=False)
    for record in records:
        checker.take(record)

    assert checker.found == []
    assert [found.invariant for found in violations(records)] == [9]
