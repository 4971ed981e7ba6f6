"""What a sampler waited for at an event, what happened meanwhile, and what ended the wait."""

from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.explain import explain
from groupstate.core.folding import replayed
from groupstate.core.rules import Rules
from groupstate.errors import BadInput
from groupstate.inspect.wait_story import WaitStory, wait_story
from groupstate.testing.notation import Story, play

SLOW = ("submit a/1", "submit b/2", "start a", "start b", "wait 1", "sample 2", "wait 2", "finish a.0 acc=1")
"""A wait for two groups since event 7, of which one is there at event 9."""


def told(story: Story, seq: int) -> WaitStory:
    return wait_story(story.log.read(), seq)


def slow(*lines: str, rules: Rules | None = None, **more: Any) -> Story:
    return play(*SLOW, *lines, rules=rules or Rules(), **more)


# What it waited for ----------------------------------------------------------------------------------


def test_what_it_waited_for_is_what_the_run_would_have_told() -> None:
    story = slow()
    live = explain(
        story.book, story.rules, partition="train", now_ns=story.book.last_at_ns, has_source=False, dispatches=False
    )
    seen = told(story, story.book.last_seq)

    assert seen.then == live
    assert seen.then.blocked_by == "1 of 2 groups are sampleable"
    assert (seen.request, seen.request_seq, seen.size, seen.partition, seen.waited_s) == (1, 7, 2, "train", 2.0)


def test_a_request_is_told_of_from_its_own_event() -> None:
    seen = told(slow(), 7)

    assert (seen.waited_s, seen.then.sampleable, seen.then.in_flight_count) == (0.0, 0, 2)


def test_the_end_of_a_wait_is_told_with_what_it_was_just_before() -> None:
    story = slow("wait 5", "finish b.0 acc=1", "wait 3", "finish b.1 acc=0")
    seen = told(story, 13)

    assert isinstance(list(story.log.read())[12].event, ev.BatchSampled)
    assert (seen.request, seen.waited_s, seen.then.sampleable, seen.then.in_flight_count) == (1, 10.0, 2, 0)
    assert seen.at_end == seen.then


def test_of_several_the_one_that_an_event_is_about_is_told_of_else_the_oldest_of_training() -> None:
    story = play("submit a/1", "sample 1 partition=val", "sample 2", "sample 3", "publish 1", rules=Rules())

    assert [told(story, seq).request for seq in (3, 4, 5, 6)] == [1, 2, 3, 2]
    assert told(story, 5).behind == (2,)
    assert told(story, 6).behind == ()
    assert told(play("sample 1 partition=val", "publish 1", rules=Rules()), 3).partition == "val"


# What ended it ---------------------------------------------------------------------------------------


def test_the_event_that_let_it_go_names_the_session_that_kept_it() -> None:
    story = slow("wait 5", "finish b.0 acc=1", "wait 3", "finish b.1 acc=0")
    seen = told(story, 9)

    assert (seen.let_go_seq, seen.ended_seq, seen.lasted_s) == (12, 13, 10.0)
    assert seen.let_go == ("group_finished after 10.000 s, b; session 1 ended last, 3.000 s after the one before it")
    assert seen.ended == "it got batch 1 of 2 groups: a and b"
    assert seen.sessions == {"finished": 3}


def test_what_happened_meanwhile_is_told_with_what_was_there_after_it() -> None:
    story = slow("submit c/1", "publish 1", "mark", "submit v/1 partition=val", "start c", "finish c.0 acc=1")
    seen = told(story, 8)

    assert [(step.kind, step.sampleable, step.in_flight, step.since_s) for step in seen.steps] == [
        ("group_finished", 1, 1, 2.0),
        ("group_submitted", 1, 2, 2.0),
        ("weights_published", 1, 2, 2.0),
        ("group_finished", 2, 1, 2.0),
    ]
    assert (seen.let_go_seq, seen.ended_seq) == (16, 17)


def test_evictions_hold_it_again() -> None:
    rules = Rules(filter_metric="acc", lag_max=1)
    story = slow("finish b.0 acc=1", "finish b.1 acc=1", "submit c/1", "start c", "finish c acc=1", rules=rules)
    seen = told(story, 7)

    assert (seen.let_go_seq, seen.let_go.split(" after")[0]) == (18, "group_finished")
    assert [step.sampleable for step in seen.steps] == [1, 2, 1, 1, 1, 2]


def test_what_is_held_again_and_given_up_was_let_go_by_nothing() -> None:
    story = slow("finish b.0 acc=1", "finish b.1 acc=1", "withdraw", rules=Rules(filter_metric="acc", lag_max=1))
    seen = told(story, 7)

    assert [step.sampleable for step in seen.steps][:3] == [1, 2, 1]
    assert (seen.let_go_seq, seen.let_go) == (0, "")


def test_a_group_at_the_bound_holds_it_with_on_stale_wait() -> None:
    rules = Rules(lag_max=1, on_stale="wait", batch_size=1)
    story = play(
        "submit old/1", "submit a/1 stamp=1", "start old", "start a", "finish a acc=1", "publish 1", "sample 1",
        "wait 60", "finish old acc=1", rules=rules,
    )  # fmt: skip
    seen = told(story, 9)

    assert seen.then.blocked_by == "group 'old' in flight has lag 1, the bound is 1"
    assert "must end before anything is sampled" in str(seen.then.unblocked_by)
    assert (seen.let_go_seq, seen.lasted_s) == (11, 60.0)


def test_an_older_one_that_is_served_lets_the_next_go() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "sample 1", "sample 1", "finish a acc=1", "finish b acc=1",
        rules=Rules(),
    )  # fmt: skip
    seen = told(story, 7)

    assert seen.behind == (1,)
    assert [step.kind for step in seen.steps][1] == "batch_sampled"
    assert (seen.let_go_seq, seen.ended) == (12, "it got batch 2 of 1 group: b")


def test_a_rule_of_the_runs_own_is_waited_for_once_enough_is_there() -> None:
    rules = Rules(selection="my:rule")
    story = slow("finish b acc=1", rules=rules, selection=lambda book, rules, request: [])
    seen = told(story, story.book.last_seq)

    assert seen.ended_seq == 0
    assert seen.let_go_seq == 12
    assert seen.at_end.blocked_by == "selection 'my:rule' has taken none of the 2 sampleable groups"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["withdraw"], "it raised told so: 1 of 2 groups were sampleable, 1 in flight"),
        (["recover"], "its process was gone: the run was opened again, and nobody waited any more"),
    ],
)
def test_a_wait_that_came_to_nothing(lines: list[str], text: str) -> None:
    seen = told(slow("wait 4", *lines), 8)

    assert (seen.ended, seen.lasted_s, seen.let_go_seq) == (text, 6.0, 0)
    assert seen.at_end.sampleable == 1


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("timeout", "its timeout_s was over (SampleTimeout): 0 of 2 groups were sampleable, 1 in flight"),
        ("cancelled", "its caller was cancelled: 0 of 2 groups were sampleable, 1 in flight"),
        (
            "RunIsClosed",
            "it raised RunIsClosed, because the run was being closed: 0 of 2 groups were sampleable, 1 in flight",
        ),
        ("NotEnoughGroups", "it raised NotEnoughGroups: no prompts come, 0 of 2 groups were sampleable, 1 in flight"),
    ],
)
def test_each_way_to_give_up_is_told(reason: str, text: str) -> None:
    story = play("submit a/1", "sample 2")
    story.record(ev.BatchRequestCancelled(1, reason))

    assert told(story, 3).ended == text
    assert told(story, 4).ended == text


def test_a_source_that_ran_dry_is_named_with_its_event_and_what_was_evicted() -> None:
    rules = Rules(filter_metric="acc", lag_max=1, batch_size=2)
    story = play("sample 2", "start r1", "finish r1 acc=1", rules=rules, source=["r1", "r2"], group_size=2)
    story.tell("start r2", "finish r2.0 acc=0", "finish r2.1 acc=1")
    seen = told(story, 2)
    dry = next(r.seq for r in story.log.read() if isinstance(r.event, ev.SourceExhausted))

    assert seen.ended == (
        f"it raised NotEnoughGroups: the source was exhausted at event {dry}, 0 of 2 groups were sampleable, "
        "1 in flight; evicted since the last batch: zero_variance 1"
    )


def test_a_wait_that_never_ended_says_what_would_end_it() -> None:
    seen = told(slow("wait 100", "publish 1"), 8)

    assert (seen.ended_seq, seen.ended) == (0, "it waits still, at the end of the log")
    assert seen.lasted_s == 102.0
    assert [way.split(" (")[0] for way in seen.at_end.unblocked_by] == ["sessions in flight must end"]
    assert told(play("submit a/1", "sample 2", "close"), 3).ended == "it waited when the run was closed"


def test_what_is_served_at_once_waited_for_nothing() -> None:
    seen = told(play("submit a/1", "start a", "finish a acc=1", "sample 1", rules=Rules()), 6)

    assert (seen.then.blocked_by, seen.lasted_s, seen.let_go_seq, seen.steps) == ("", 0.0, 0, ())
    assert seen.ended_seq == 7


# What can't be told ----------------------------------------------------------------------------------


def test_an_event_at_which_nobody_waited_names_the_waits_around_it() -> None:
    story = slow("finish b acc=1", "publish 1", "sample 1")

    with pytest.raises(BadInput) as caught:
        told(story, 14)
    assert str(caught.value) == (
        "no sample() waited at event 14; request 1 waited before, events 7 to 13; one waits from event 15 on"
    )
    with pytest.raises(BadInput, match="event 2; there is no wait from event 1 on"):
        told(play("submit a/1"), 2)
    with pytest.raises(BadInput, match="there is no event 99: the last one is event 15"):
        told(story, 99)


def test_behind_a_beginning_that_is_gone_a_wait_is_told_from_there() -> None:
    story = slow("wait 5", "finish b acc=0")
    rest = list(story.log.read(9))

    seen = wait_story(rest, 9, replayed(story.log.read(stop=9)))
    assert (seen.request_seq, seen.told_from, seen.ended_seq, seen.lasted_s) == (7, 9, 13, 7.0)
    assert wait_story(rest, 8, replayed(story.log.read(stop=9))).then.sampleable == 0
    with pytest.raises(BadInput, match="what was at event 7 can't be told any more: the first is event 8"):
        wait_story(rest, 7, replayed(story.log.read(stop=9)))


def test_a_source_that_ran_dry_before_what_is_told_is_said_to_be_so() -> None:
    story = play("submit a/1", "exhausted", "sample 2")
    story.record(ev.BatchRequestCancelled(1, "NotEnoughGroups"))
    told = wait_story(story.log.read(4), 5, replayed(story.log.read(stop=4)))

    assert told.ended.startswith("it raised NotEnoughGroups: the source was exhausted before event 4, 0 of 2 groups")


def test_a_sampler_that_died_with_its_process_is_told_from_before_the_next_opening() -> None:
    story = slow("recover", "sample 1")

    assert told(story, 9).ended_seq == 10
    assert told(story, story.book.last_seq - 1).request == 2
