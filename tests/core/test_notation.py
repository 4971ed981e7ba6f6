"""The notation itself: what tests rely on without looking."""

import pytest

from groupstate.core import events as ev
from groupstate.core.rules import Rules
from groupstate.core.trajectory import restored
from groupstate.testing.notation import START_NS, play


def test_an_unknown_verb_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ValueError, match="line 'jump g' begins with 'jump'; verbs are submit, start, "):
        play("jump g")


def test_a_mark_that_never_was_can_not_be_recovered_at() -> None:
    with pytest.raises(ValueError, match="the story has no mark 3"):
        play("mark", "recover at=3")


def test_a_bare_group_id_means_all_its_sessions() -> None:
    story = play("submit g/3", "start g", "fail g timeout")

    assert [session.failure for session in story.group("g").sessions] == ["timeout"] * 3


def test_a_dot_in_an_id_is_not_taken_for_a_session() -> None:
    story = play("submit a.b/2", "start a.b.1", "submit c.d/1", "start c.d")

    assert [session.state for session in story.group("a.b").sessions] == ["waiting", "open"]
    assert story.phase("c.d") == "running"


def test_rows_are_apart_by_a_bar_and_versions_make_spans() -> None:
    story = play("submit g/1", "start g", "finish g reward=0.5 versions=3,3,4 | acc=1")
    session = story.group("g").sessions[0]
    assert session.payload is not None
    first, second = restored(session.trajectories, story.log.payloads.get(session.payload))

    assert (first.metrics, first.spans) == ({"reward": 0.5}, (ev.VersionSpan(0, 2, 3), ev.VersionSpan(2, 3, 4)))
    assert (second.metrics, second.spans) == ({"acc": 1.0}, ())


def test_attempts_can_be_named() -> None:
    story = play(
        "submit g/1", "start g.0 attempt=1", "fail g.0 retryable attempt=1", "start g.0 attempt=2",
        "finish g.0 attempt=1 reward=1", "finish g.0 attempt=2 reward=0",
        rules=Rules(attempts_max=2), controlled=False,
    )  # fmt: skip

    assert story.fenced == [None, None, None, "attempt", None]
    assert story.group("g").sessions[0].trajectories[0].metrics == {"reward": 0.0}


def test_time_moves_when_told() -> None:
    story = play("submit a/1", "wait 1.5", "submit b/1")

    assert story.group("a").submitted_at_ns == START_NS
    assert story.group("b").submitted_at_ns == START_NS + 1_500_000_000


def test_a_sample_may_bring_the_trainers_version() -> None:
    assert play("sample 1 version=4").book.weight_version == 4


def test_a_story_with_rules_goes_on_after_its_process_died() -> None:
    story = play("submit a/1", "start a", "fail a", rules=Rules(), source=["r1", "r2"])
    story.tell("start r1", "recover", "start r1", "fail r1")

    assert story.refills() == ["r1", "r2"]
    assert story.group("r2").submitted_seq > story.events(ev.RunRecovered)[0].lineage


def test_a_controller_can_be_kept_out() -> None:
    story = play("submit a/1", "start a", "fail a", rules=Rules(), controlled=False)

    assert story.phase("a") == "failure"
    assert story.controller is None


def test_a_latest_sampler_or_a_numbered_one_is_withdrawn() -> None:
    with_rules = play("sample 1", "sample 2", "sample 3", "withdraw", "withdraw 1", rules=Rules())
    without = play("sample 1", "sample 2", "sample 3", "withdraw", "withdraw 1")

    assert [request.size for request in with_rules.book.waiting()] == [2]
    assert [request.size for request in without.book.waiting()] == [2]


def test_a_replay_that_differs_fails_the_test() -> None:
    story = play("submit a/1")
    story.book.totals["submitted"] = 7
    with pytest.raises(AssertionError, match="the replay differs after Record"):
        story.tell("start a")


# Deaths ----------------------------------------------------------------------------------------------


def test_a_process_dies_after_so_many_writes_in_the_middle_of_a_line() -> None:
    story = play("submit a/2", "start a", "dies 1", "finish a reward=1")

    assert story.died
    assert story.group("a").finished_count == 1
    assert story.tell("recover").phase("a") == "pending"
    assert not story.died


def test_writes_are_counted_over_lines() -> None:
    story = play("dies 3", "submit a/1", "start a", "finish a reward=1")

    assert story.died
    assert story.tell("recover").phase("a") == "finished"


def test_it_may_die_while_it_recovers() -> None:
    story = play("submit a/1", "start a", "recover dies=1")
    before = (story.died, story.phase("a"))
    story.tell("recover")

    assert before == (True, "running")
    assert story.phase("a") == "pending"


def test_after_a_death_only_recovery_can_follow() -> None:
    with pytest.raises(ValueError, match="'publish 2' comes after the process died; the next line is 'recover'"):
        play("dies 1", "publish 1", "publish 2")


def test_a_sampler_of_a_process_that_died_is_counted() -> None:
    story = play("dies 1", "sample 1", "recover", "sample 1", rules=Rules(), source=["r1"])

    assert [waiter.claim for waiter in story.waiters] == [None, None]
    assert story.tell("withdraw 2").book.requests == {}


def test_an_answer_is_as_long_as_is_said_and_its_last_version_is_that_of_the_rest() -> None:
    story = play("submit g/2", "start g", "finish g.0 reward=1 tokens=5", "finish g.1 reward=1 versions=3,4 tokens=4")

    long, mixed = (session.trajectories[0] for session in story.group("g").sessions)
    assert (long.response_tokens, long.spans) == (5, ())
    assert (mixed.response_tokens, mixed.spans) == (4, (ev.VersionSpan(0, 1, 3), ev.VersionSpan(1, 4, 4)))


def test_more_versions_than_tokens_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="2 versions for 1 tokens"):
        play("submit g/1", "start g", "finish g versions=3,4 tokens=1")
