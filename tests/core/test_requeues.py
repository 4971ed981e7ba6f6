"""Failed groups that start over by the rules, and how often."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.evict import Judgement, judged
from groupstate.core.rules import Rules
from groupstate.runtime.controller import Controller
from groupstate.testing.notation import Story, play

TWICE = Rules(requeues_max=2)
FAIL = ["start g", "fail g"]


def requeues(story: Story) -> list[tuple[str, str, bool]]:
    return [(event.group_id, event.reason, event.by_rule) for event in story.events(ev.GroupRequeued)]


def test_a_failed_group_starts_over_with_the_same_prompt() -> None:
    story = play(
        "submit g/2 stamp=0 content=hello", "publish 3", "start g", "finish g.0 acc=1", "fail g.1", rules=TWICE
    )
    group = story.group("g")

    assert requeues(story) == [("g", "1 of its sessions failed; requeue 1 of 2", True)]
    assert (group.phase, group.stamp, group.trajectory_count) == ("pending", 0, 0)
    assert [session.attempt for session in group.sessions] == [2, 2]
    assert group.prompt is not None
    assert story.log.payloads.get(group.prompt) == b"hello"


def test_it_starts_over_so_often_and_then_fails() -> None:
    story = play("submit g/2", *FAIL, *FAIL, *FAIL, rules=TWICE, source=["r1"])

    assert [reason for _, reason, _ in requeues(story)] == [
        "2 of its sessions failed; requeue 1 of 2",
        "2 of its sessions failed; requeue 2 of 2",
    ]
    assert story.evicted() == {"g": ("empty",)}
    assert story.refills() == ["r1"]


def test_a_group_that_then_finishes_is_sampleable() -> None:
    story = play("submit g/1", *FAIL, "start g", "finish g acc=1", rules=TWICE)

    assert story.ready() == ["g"]


@pytest.mark.parametrize("lines", [["requeue g"], ["start g", "recover"]], ids=["asked for", "recovery"])
def test_other_requeues_do_not_count(lines: list[str]) -> None:
    story = play("submit g/1", *lines, *FAIL, *FAIL, rules=TWICE)

    assert story.group("g").requeue_count == 3
    assert story.group("g").rule_requeue_count == 2
    assert story.phase("g") == "pending"


def test_how_often_it_started_over_is_known_after_a_restart() -> None:
    story = play("submit g/1", *FAIL, *FAIL, "recover", *FAIL, rules=TWICE)

    assert story.evicted() == {"g": ("empty",)}


def test_a_group_that_has_failed_when_the_run_is_opened_starts_over_then() -> None:
    story = play("submit g/1", *FAIL, rules=TWICE, controlled=False)
    before = story.phase("g")
    story._controlled = True
    story.tell("recover")

    assert (before, story.phase("g")) == ("failure", "pending")


@pytest.mark.parametrize(
    ("lines", "rules", "reasons"),
    [
        (["start g", "cancel g"], TWICE, ("cancelled",)),
        (["start g", "publish 1", "fail g"], Rules(requeues_max=2, lag_max=0), ("empty", "stale")),
        (FAIL, Rules(), ("empty",)),
        (["start g", "finish g nothing"], Rules(requeues_max=2, empty_session="allow"), ("empty",)),
        (
            ["start g", "finish g.0 acc=1", "finish g.1 acc=1"],
            Rules(requeues_max=2, filter_metric="acc"),
            ("zero_variance",),
        ),
    ],
    ids=["cancelled", "stale", "none allowed", "finished without rows", "filtered"],
)
def test_a_group_that_did_not_fail_by_itself_or_is_too_old_does_not_start_over(
    lines: list[str], rules: Rules, reasons: tuple[str, ...]
) -> None:
    story = play("submit g/2", *lines, rules=rules)

    assert requeues(story) == []
    assert story.evicted() == {"g": reasons}


def test_a_damaged_group_does_not_start_over() -> None:
    story = play("submit g/1", *FAIL, rules=TWICE, controlled=False)
    group = story.group("g")

    assert judged(story.book, TWICE, [group], demand=None).requeues != ()
    (evict,) = judged(story.book, TWICE, [group], demand=None, damaged={"g": "gone"}).evictions
    assert evict.reasons == ("damaged",)


def test_a_lag_of_exactly_the_bound_may_start_over() -> None:
    story = play("submit g/1", "publish 1", *FAIL, rules=Rules(requeues_max=1, lag_max=1))

    assert story.phase("g") == "pending"


def test_enough_survivors_leave_nothing_to_start_over() -> None:
    story = play("submit g/2", "start g", "finish g.0 acc=1", "fail g.1", rules=Rules(requeues_max=1, survivors_min=1))

    assert (story.ready(), requeues(story)) == (["g"], [])


def test_too_few_survivors_start_over() -> None:
    rules = Rules(requeues_max=1, survivors_min=2)
    story = play("submit g/3", "start g", "finish g.0 acc=1", "fail g.1", "fail g.2", rules=rules)

    assert story.phase("g") == "pending"


def test_validation_groups_fail_at_once() -> None:
    story = play("submit g/1 partition=val", *FAIL, rules=TWICE)

    assert (story.ready("val"), requeues(story)) == (["g"], [])


# Sync mode -------------------------------------------------------------------------------------------

SYNC: dict[str, Any] = {"mode": "sync", "requeues_max": 1}


def test_in_sync_mode_it_starts_over_once_a_sampler_waits() -> None:
    story = play("submit g/2", "start g", "finish g.0 acc=1", "fail g.1", rules=Rules(**SYNC))
    before = (story.phase("g"), story.ready())
    story.tell("sample 1")

    assert before == ("failure", ["g"])
    assert (story.phase("g"), story.batches()) == ("pending", [])


def test_in_sync_mode_a_group_that_starts_over_leaves_the_demand_unmet() -> None:
    rules = Rules(mode="sync", requeues_max=1, filter_metric="acc", batch_size=2)
    story = play(
        "submit good/2", "start good", "finish good.0 acc=0", "finish good.1 acc=1",
        "submit again/2", "start again", "finish again.0 acc=1", "fail again.1",
        "submit same/2", "start same", "finish same acc=1", "sample 2",
        rules=rules, source=["r1", "r2", "r3"],
    )  # fmt: skip

    assert [(e.group_id, e.credit) for e in story.events(ev.GroupEvicted)] == [("same", 2)]
    assert story.refills() == ["r1"]


# What is counted -------------------------------------------------------------------------------------


def test_requeues_by_the_rules_are_a_metric_of_the_next_batch() -> None:
    story = play(
        "submit g/1", *FAIL, *FAIL, "requeue g", "start g", "finish g acc=1", "sample 1",
        "submit h/1", "start h", "finish h acc=1", "sample 1", rules=TWICE,
    )  # fmt: skip
    counts = [waiter.claim and waiter.claim.metrics["training/groups/requeued"] for waiter in story.waiters]

    assert counts == [2.0, 0.0]


def streak(story: Story) -> int:
    assert isinstance(story.controller, Controller)
    return story.controller.streak


def test_a_requeue_neither_counts_for_the_streak_nor_ends_it() -> None:
    story = play("submit a/1", "start a", "fail a", "start a", "fail a", rules=Rules(requeues_max=1))
    evicted = streak(story)
    story.tell("submit g/1", *FAIL)
    again = streak(story)
    story.tell(*FAIL)

    assert (evicted, again, streak(story)) == (1, 1, 2)


def test_groups_that_are_not_terminal_are_left_alone() -> None:
    story = play("submit g/1", "start g", rules=TWICE)

    assert judged(story.book, TWICE, [story.group("g")], demand=None) == Judgement((), (), ())
