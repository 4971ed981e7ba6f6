"""Groups in flight that can't be sampled any more are cancelled at once, those that still can are left alone."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.evict import is_doomed
from groupstate.core.rules import PerDataset, Rules, recorded_rules
from groupstate.testing.notation import Story, play

AGE: dict[str, Any] = {"cancel_doomed": True, "lag_max": 1}
FAILS: dict[str, Any] = {"cancel_doomed": True}


def failures(story: Story) -> list[tuple[str, int, str]]:
    return [(event.group_id, event.session, event.failure) for event in story.events(ev.SessionFailed)]


# By age ----------------------------------------------------------------------------------------------


def test_a_new_version_cancels_the_groups_in_flight_that_it_makes_stale() -> None:
    story = play(
        "submit a/2", "start a.0", "submit b/1", "publish 1", "submit c/1", "publish 2",
        rules=Rules(**AGE), source=["r1"],
    )  # fmt: skip

    assert story.evicted() == {"a": ("cancelled", "stale"), "b": ("cancelled", "stale")}
    assert failures(story) == [("a", 0, "cancelled"), ("a", 1, "cancelled"), ("b", 0, "cancelled")]
    assert [(e.lag, e.credit) for e in story.events(ev.GroupEvicted)] == [(2, 1), (2, 1)]
    assert story.phase("c") == "pending"
    assert story.refills() == ["r1"]


def test_all_sessions_settle_before_the_group_is_evicted() -> None:
    story = play("submit a/2", "start a", "finish a.0 acc=1", "publish 2", rules=Rules(**AGE))
    names = [type(record.event).__name__ for record in story.log.read()]

    assert names[-4:] == ["SessionFailed", "GroupFailed", "GroupEvicted", "RefillForfeited"]
    assert story.evicted() == {"a": ("cancelled", "stale")}


@pytest.mark.parametrize(("stamp", "phase"), [(0, "evicted"), (1, "pending")])
def test_a_group_that_is_too_old_when_it_is_submitted_is_cancelled_then(stamp: int, phase: str) -> None:
    story = play("publish 2", f"submit a/1 stamp={stamp}", rules=Rules(**AGE))

    assert story.phase("a") == phase


def test_doomed_groups_end_oldest_first() -> None:
    rules = Rules(lag_max=0, cancel_doomed=True)
    story = play("submit b/1", "submit a/1 stamp=0", "publish 5", rules=rules, weight_version=1)

    assert list(story.evicted()) == ["a", "b"]


@pytest.mark.parametrize("basis", ["first_token", "oldest_token", "newest_token"])
@pytest.mark.parametrize(
    "lines",
    [
        ["submit a/2", "start a", "publish 5", "fail a.0"],
        ["publish 5", "submit a/2 stamp=0", "start a"],
        ["submit a/2", "start a", "publish 5"],
    ],
    ids=["failure", "submission", "publication"],
)
def test_where_the_tokens_say_the_age_nobody_is_doomed_before_they_are_known(basis: Any, lines: list[str]) -> None:
    story = play(*lines, rules=Rules(**AGE, basis=basis, survivors_min=1))

    assert story.phase("a") == "running"


def test_a_group_is_not_doomed_by_its_age_where_its_tokens_count() -> None:
    rules = Rules(lag_max=0, basis="newest_token", cancel_doomed=True, attempts_max=2)
    story = play("submit g/2", "start g", "publish 3", "fail g.0 retryable", rules=rules)
    story.tell("start g.0", "finish g reward=1 versions=0,3")

    assert story.ready() == ["g"]


@pytest.mark.parametrize(
    "rules",
    [Rules(lag_max=1), Rules(**AGE, on_stale="wait"), Rules(cancel_doomed=True)],
    ids=["not asked for", "wait", "no bound"],
)
def test_otherwise_groups_in_flight_may_end(rules: Rules) -> None:
    story = play("submit a/1", "start a", "publish 5", rules=rules)

    assert story.phase("a") == "running"


def test_each_dataset_has_its_own_bound() -> None:
    rules = Rules(**AGE, datasets={"math": PerDataset(lag_max=0)})
    story = play("submit a/1 dataset=math", "submit b/1", "publish 1", rules=rules)

    assert story.evicted() == {"a": ("cancelled", "stale")}
    assert story.phase("b") == "pending"


def test_a_group_in_flight_is_doomed_once_the_version_that_it_is_made_for_is_past() -> None:
    story = play("submit g/1", "start g", rules=Rules.in_order(1, cancel_doomed=True))
    assert story.phase("g") == "running"

    story.tell("publish 1")

    assert story.evicted() == {"g": ("cancelled", "stale")}


def test_validation_groups_may_end() -> None:
    story = play("submit v/2 partition=val", "start v", "publish 5", "fail v.0", rules=Rules(**AGE))

    assert story.phase("v") == "running"


def test_a_group_that_was_in_flight_when_the_run_ended_is_cancelled_when_it_is_opened() -> None:
    story = play("submit a/1", "start a", "submit b/1", rules=Rules(**AGE)).tell("recover version=2")

    assert story.evicted() == {"a": ("cancelled", "stale"), "b": ("cancelled", "stale")}


# By failures -----------------------------------------------------------------------------------------


def test_a_failure_that_can_not_be_made_up_for_cancels_the_siblings() -> None:
    story = play("submit a/3", "start a", "finish a.0 acc=1", "fail a.1", rules=Rules(**FAILS), source=["r1"])

    assert failures(story) == [("a", 1, "error"), ("a", 2, "cancelled")]
    assert [(e.reasons, e.credit) for e in story.events(ev.GroupEvicted)] == [(("cancelled",), 1)]
    assert story.refills() == ["r1"]


@pytest.mark.parametrize(
    ("more", "failed", "doomed"),
    [
        ({"survivors_min": 2}, 1, False),
        ({"survivors_min": 2}, 2, True),
        ({"survivors_min": 9}, 1, True),
        ({"oversample": 1}, 1, False),
        ({"oversample": 1}, 2, True),
        ({"oversample": 1, "survivors_min": 2}, 2, False),
        ({"oversample": 1, "survivors_min": 2}, 3, True),
        ({"requeues_max": 1}, 1, False),
    ],
    ids=str,
)
def test_it_is_made_up_for_by_survivors_spare_sessions_or_another_try(
    more: dict[str, Any], failed: int, doomed: bool
) -> None:
    story = play("submit a/3", "start a", *(f"fail a.{n}" for n in range(failed)), rules=Rules(**FAILS, **more))

    assert story.phase("a") == ("evicted" if doomed else "running")


def test_once_the_requeues_are_used_up_a_failure_dooms() -> None:
    story = play("submit a/2", "start a", "fail a", "start a", "fail a.0", rules=Rules(**FAILS, requeues_max=1))

    assert story.evicted() == {"a": ("cancelled",)}


def test_a_failure_with_a_retry_due_dooms_nobody() -> None:
    story = play("submit a/2", "start a", "fail a.0 retryable", rules=Rules(**FAILS, attempts_max=2))

    assert story.phase("a") == "running"


@pytest.mark.parametrize("doomed", [True, False])
def test_a_group_whose_sessions_fail_is_doomed_only_where_the_rules_cancel_doomed_groups(doomed: bool) -> None:
    story = play("submit g/2", "start g", "fail g.0")

    assert is_doomed(story.group("g"), 0, Rules(cancel_doomed=doomed)) is doomed


@pytest.mark.parametrize(("waiting", "credit"), [(["sample 1"], 1), ([], None)])
def test_in_sync_mode_what_is_lost_is_cancelled_and_refilled_while_a_sampler_waits(
    waiting: list[str], credit: int | None
) -> None:
    rules = Rules(**FAILS, mode="sync", failure="refill")
    story = play("submit a/2", "start a", *waiting, "fail a.0", rules=rules, source=["r1"])

    assert failures(story) == [("a", 0, "error"), ("a", 1, "cancelled")]
    assert [e.credit for e in story.events(ev.GroupEvicted)] == ([] if credit is None else [credit])


def test_in_sync_mode_nobody_is_too_old() -> None:
    story = play("submit a/1", "publish 9", rules=recorded_rules({**AGE, "mode": "sync", "failure": "refill"}))

    assert story.phase("a") == "pending"


def test_a_group_that_is_lost_twice_over_is_ended_once() -> None:
    story = play("submit a/2", "start a", rules=Rules(**AGE))
    story.ledger.record(ev.SessionFailed("a", 0, 1, "error", "told so"))
    story.tell("publish 9")

    assert failures(story) == [("a", 0, "error"), ("a", 1, "cancelled")]
    assert story.ledger.endings == {}
