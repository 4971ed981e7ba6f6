"""A group as a value: what each event makes of it, what it refuses, and when it is terminal."""

from typing import Literal

import pytest
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.group import (
    Group,
    Session,
    SessionState,
    evolve,
    fence_reason,
    forget_unpacked,
    submitted,
    terminal_event,
    versions_used,
    widened,
    without_yield,
)
from groupstate.core.phases import Phase
from groupstate.errors import IllegalTransition, SessionStateError
from groupstate.testing.notation import play

PROMPT = ev.PayloadRef(1, 10, 99)
ANSWER = ev.PayloadRef(2, 20, 77)


def pending(size: int = 2, **fields: object) -> Group:
    event = ev.GroupSubmitted("g", size, "train", 5, 1, "submit", dataset="math", source_position=3, prompt=PROMPT)
    return replace(submitted(event, 7, 1_000), **fields)


def row(index: int = 0, *spans: tuple[int, int, int], **metrics: float) -> ev.TrajectoryRecord:
    return ev.TrajectoryRecord(index, metrics, spans=tuple(ev.VersionSpan(*span) for span in spans))


def after(group: Group, *events: ev.Event) -> Group:
    for seq, event in enumerate(events, group.last_seq + 1):
        group = evolve(group, event, seq, seq * 1_000)
    return group


def started(session: int, attempt: int = 1) -> ev.SessionStarted:
    return ev.SessionStarted("g", session, attempt)


def finished(session: int, *rows: ev.TrajectoryRecord, attempt: int = 1) -> ev.SessionFinished:
    return ev.SessionFinished("g", session, attempt, rows or (row(reward=1.0),), ANSWER)


def failed(session: int, attempt: int = 1, *, retry_in_s: float | None = None) -> ev.SessionFailed:
    return ev.SessionFailed("g", session, attempt, "error", "boom", retry_in_s)


# From event to event ---------------------------------------------------------------------------------


def test_a_submitted_group_waits_with_every_session_in_its_first_attempt() -> None:
    group = pending(3)

    assert (group.phase, group.size, group.sessions) == (Phase.PENDING, 3, (Session(),) * 3)
    assert (group.stamp, group.aged_from, group.submitted_seq, group.last_seq) == (5, 5, 7, 7)
    assert (group.dataset, group.source_position, group.prompt) == ("math", 3, PROMPT)
    assert group.in_flight
    assert not group.settled


@pytest.mark.parametrize(("target", "version"), [(None, 5), (8, 8)])
def test_a_submitted_group_holds_all_that_its_event_says(target: int | None, version: int) -> None:
    event = ev.GroupSubmitted("g", 3, "train", 5, 1, "refill", "math", 4, PROMPT, 12, target, 1, True)

    assert submitted(event, 7, 1_000) == Group(
        group_id="g",
        size=3,
        phase=Phase.PENDING,
        partition="train",
        dataset="math",
        stamp=5,
        version=version,
        aged_from=version,
        submitted_seq=7,
        submitted_at_ns=1_000,
        cause="refill",
        source_position=4,
        prompt=PROMPT,
        prompt_length=12,
        target_version=target,
        kept=(Session(),) * 3,
        oversample=1,
        last_seq=7,
        last_at_ns=1_000,
        validation_round=True,
    )


HISTORY: list[tuple[ev.Event, Phase]] = [
    (failed(1, retry_in_s=1.0), Phase.PENDING),
    (started(0), Phase.RUNNING),
    (started(1, 2), Phase.RUNNING),
    (failed(0), Phase.RUNNING),
    (failed(1, 2), Phase.RUNNING),
    (ev.GroupFailed("g"), Phase.FAILURE),
    (ev.GroupRequeued("g"), Phase.PENDING),
    (failed(0, 2), Phase.PENDING),
    (started(1, 3), Phase.RUNNING),
    (finished(1, attempt=3), Phase.RUNNING),
    (ev.GroupFinished("g", partial=True), Phase.FINISHED),
    (ev.BatchSampled(1, 1, "train", ("g",), 5, (0,)), Phase.SAMPLED),
    (ev.BatchReturned(1, "closed"), Phase.FINISHED),
    (ev.GroupEvicted("g", ("stale",), 3, 1), Phase.EVICTED),
]


@pytest.mark.parametrize("count", range(1, len(HISTORY) + 1))
def test_each_event_leaves_the_phase_it_leads_to_and_when_it_came(count: int) -> None:
    group = after(pending(), *(event for event, _ in HISTORY[:count]))

    assert (group.phase, group.last_seq, group.last_at_ns) == (HISTORY[count - 1][1], 7 + count, (7 + count) * 1_000)


def test_a_failure_stamps_when_it_came_and_when_a_retry_began() -> None:
    group = after(pending(), started(0), failed(0, retry_in_s=1.0))
    session = group.sessions[0]

    assert (session.state, session.attempt, session.ended_at_ns, session.last_seq) == ("waiting", 2, 9_000, 9)


@pytest.mark.parametrize(("rewound_to", "aged_from"), [(None, 5), (3, 3), (9, 5)])
def test_a_requeue_leaves_nothing_of_what_the_group_had_become(rewound_to: int | None, aged_from: int) -> None:
    ended = after(pending(), started(0), started(1), finished(0), failed(1), ev.GroupFailed("g", cancelled=True))
    ended = replace(
        ended, version=9, aged_from=9, rewound_to=rewound_to, kept_lag=2, kept_empty=True, ended_version=6, partial=True
    )
    again = evolve(ended, ev.GroupRequeued("g", by_rule=True), 20, 20_000)

    assert again == pending(
        kept=(Session(attempt=2, first_attempt=2, last_seq=20),) * 2,
        aged_from=aged_from,
        rewound_to=rewound_to,
        requeue_count=1,
        rule_requeue_count=1,
        last_seq=20,
        last_at_ns=20_000,
    )


@pytest.mark.parametrize("rewound_to", [None, 3])
def test_a_requeue_under_a_later_version_stamps_the_group_anew(rewound_to: int | None) -> None:
    ended = after(pending(rewound_to=rewound_to), started(0), started(1), failed(0), failed(1), ev.GroupFailed("g"))
    again = evolve(ended, ev.GroupRequeued("g", weight_version=8), 20, 20_000)

    assert (again.group_id, again.stamp, again.version, again.aged_from, again.rewound_to) == ("g", 8, 8, 8, None)


def test_a_finished_group_without_its_yield_keeps_its_counts_and_ranges() -> None:
    running = after(pending(), started(0), started(1), finished(0), finished(1, row(reward=3.0)))
    ended = after(running, ev.GroupFinished("g"))
    slim = without_yield(ended)

    assert slim.sessions == (Session("finished"),) * 2
    assert replace(slim, kept=ended.kept) == ended
    assert without_yield(running) is running


def test_a_start_opens_the_attempt_and_stamps_when() -> None:
    group = after(pending(), ev.SessionStarted("g", 1, 1, weight_version=6))

    assert group.phase is Phase.RUNNING
    assert group.in_flight
    assert group.sessions[0] == Session()
    assert group.sessions[1] == Session("open", started_at_ns=8_000, last_seq=8, weight_version=6)


def test_a_finish_keeps_the_rows_and_counts_them() -> None:
    rows = (row(0, acc=0.0), row(1, acc=1.0))
    group = after(pending(), started(0), finished(0, *rows))
    session = group.sessions[0]

    assert (session.state, session.trajectories, session.payload) == ("finished", rows, ANSWER)
    assert (session.started_at_ns, session.ended_at_ns, session.last_seq) == (8_000, 9_000, 9)
    assert (group.settled_count, group.finished_count, group.failed_count, group.trajectory_count) == (1, 1, 0, 2)
    assert (group.last_seq, group.last_at_ns) == (9, 9_000)


def test_ranges_take_the_last_row_of_a_session_and_every_trajectory() -> None:
    group = after(
        pending(), started(0), started(1), finished(0, row(0, acc=0.0), row(1, acc=1.0)), finished(1, row(0, acc=3.0))
    )

    assert group.session_ranges == {"acc": (1.0, 3.0, 2)}
    assert group.trajectory_ranges == {"acc": (0.0, 3.0, 3)}


def test_widening_by_nothing_gives_the_same_ranges() -> None:
    ranges = {"acc": (0.0, 1.0, 2)}

    assert widened(ranges, ()) is ranges
    assert widened(ranges, (row(other=5.0),)) == {"acc": (0.0, 1.0, 2), "other": (5.0, 5.0, 1)}
    assert widened(ranges, (row(acc=-1.0), row(acc=0.5))) == {"acc": (-1.0, 1.0, 4)}


def test_a_failure_without_retry_settles_the_session() -> None:
    group = after(pending(), started(0), failed(0))
    session = group.sessions[0]

    assert (session.state, session.failure, session.message, session.attempt) == ("failed", "error", "boom", 1)
    assert (group.settled_count, group.finished_count, group.failed_count) == (1, 0, 1)


def test_a_failure_with_a_retry_due_has_not_settled_and_raises_the_attempt() -> None:
    group = after(pending(), started(0), failed(0, retry_in_s=2.0))
    session = group.sessions[0]

    assert (session.state, session.attempt, session.failure) == ("waiting", 2, "error")
    assert group.settled_count == 0
    assert group.phase is Phase.RUNNING


def test_a_retry_that_starts_has_no_failure_any_more() -> None:
    group = after(pending(), started(0), failed(0, retry_in_s=2.0), started(0, 2))

    assert (group.sessions[0].state, group.sessions[0].failure) == ("open", None)


def test_a_session_may_fail_before_it_began() -> None:
    group = after(pending(), failed(1))

    assert group.phase is Phase.PENDING
    assert group.sessions[1].state == "failed"


def test_a_terminal_event_keeps_where_the_group_came_to_rest() -> None:
    whole = after(pending(1), started(0), finished(0), ev.GroupFinished("g"))
    partial = after(pending(), started(0), finished(0), failed(1), ev.GroupFinished("g", partial=True))
    given_up = after(pending(1), failed(0), ev.GroupFailed("g", cancelled=True))

    assert (whole.phase, whole.terminal, whole.terminal_seq, whole.partial) == (
        Phase.FINISHED,
        Phase.FINISHED,
        10,
        False,
    )
    assert (partial.phase, partial.partial, partial.cancelled) == (Phase.FINISHED, True, False)
    assert (given_up.phase, given_up.terminal, given_up.cancelled) == (Phase.FAILURE, Phase.FAILURE, True)
    assert not whole.in_flight


def test_a_requeue_ends_every_attempt_and_drops_all_that_was_yielded() -> None:
    group = after(
        pending(), started(0), started(1), finished(0, row(acc=1.0)), failed(1, retry_in_s=1.0), ev.GroupRequeued("g")
    )

    assert group.phase is Phase.PENDING
    assert group.sessions == (
        Session(attempt=2, first_attempt=2, last_seq=12),
        Session(attempt=3, first_attempt=3, last_seq=12),
    )
    assert (group.settled_count, group.finished_count, group.trajectory_count) == (0, 0, 0)
    assert (group.session_ranges, group.trajectory_ranges, group.requeue_count) == ({}, {}, 1)
    assert group.payloads() == [PROMPT]


def test_a_requeue_of_a_failed_group_takes_its_end_back() -> None:
    dead = replace(
        after(pending(), failed(0), failed(1), ev.GroupFailed("g", cancelled=True)), partial=True, aged_from=9
    )
    group = after(dead, ev.GroupRequeued("g"))

    assert (group.terminal, group.terminal_seq, group.partial, group.cancelled) == (None, 0, False, False)
    assert (group.aged_from, group.stamp) == (5, 5)


def test_a_requeued_group_can_run_to_its_end_again() -> None:
    group = after(
        pending(1),
        started(0),
        failed(0),
        ev.GroupFailed("g"),
        ev.GroupRequeued("g"),
        started(0, 2),
        finished(0, attempt=2),
    )

    assert (group.phase, group.settled, group.finished_count) == (Phase.RUNNING, True, 1)


def test_a_groups_payloads_are_its_prompt_and_its_answers() -> None:
    group = after(pending(), started(0), finished(0))

    assert group.payloads() == [PROMPT, ANSWER]
    assert replace(group, prompt=None).payloads() == [ANSWER]
    assert replace(pending(), prompt=None).payloads() == []


def test_evolving_leaves_the_group_before_as_it_was() -> None:
    before = pending()
    again = pending()
    after(before, started(0), finished(0, row(acc=1.0)))

    assert before == again


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [-1, 2, 99])
@pytest.mark.parametrize("kind", ["start", "finish", "fail"])
def test_there_is_no_session_outside_of_the_group(session: int, kind: str) -> None:
    group = after(pending(), started(0))
    event = {"start": started(session), "finish": finished(session), "fail": failed(session)}[kind]
    with pytest.raises(SessionStateError, match=f"group 'g' has sessions 0 to 1, so there is no session {session}"):
        evolve(group, event, 9, 0)


def test_the_first_and_the_last_session_are_inside() -> None:
    group = after(pending(3), started(0), started(2))

    assert [session.state for session in group.sessions] == ["open", "waiting", "open"]


OPEN = after(pending(), started(0))
WAITING = after(pending(), started(1))
DONE = after(pending(), started(0), finished(0))
FAILED = after(pending(), started(0), failed(0))


@pytest.mark.parametrize(
    ("group", "event", "text"),
    [
        (OPEN, started(0), "session 0 of group 'g' is open in attempt 1, so SessionStarted of attempt 1 cannot happen"),
        (DONE, started(0), "is finished in attempt 1, so SessionStarted of attempt 1 cannot happen"),
        (FAILED, started(0), "is failed in attempt 1, so SessionStarted of attempt 1 cannot happen"),
        (WAITING, started(0, 2), "is waiting in attempt 1, so SessionStarted of attempt 2 cannot happen"),
        (WAITING, finished(0), "is waiting in attempt 1, so SessionFinished of attempt 1 cannot happen"),
        (DONE, finished(0), "is finished in attempt 1, so SessionFinished of attempt 1 cannot happen"),
        (FAILED, finished(0), "is failed in attempt 1, so SessionFinished of attempt 1 cannot happen"),
        (OPEN, finished(0, attempt=2), "is open in attempt 1, so SessionFinished of attempt 2 cannot happen"),
        (DONE, failed(0), "is finished in attempt 1, so SessionFailed of attempt 1 cannot happen"),
        (FAILED, failed(0), "is failed in attempt 1, so SessionFailed of attempt 1 cannot happen"),
        (OPEN, failed(0, 2), "is open in attempt 1, so SessionFailed of attempt 2 cannot happen"),
    ],
)
def test_a_session_out_of_order_is_refused_with_its_state_and_what_it_needs(
    group: Group, event: ev.Event, text: str
) -> None:
    with pytest.raises(SessionStateError) as refused:
        evolve(group, event, group.last_seq + 1, 0)

    assert text in str(refused.value)
    needed = {"SessionStarted": "waiting", "SessionFinished": "open", "SessionFailed": "open or waiting"}
    assert str(refused.value).endswith(f"it needs attempt 1 to be {needed[type(event).__name__]}")


@pytest.mark.parametrize("event", [ev.GroupFinished("g"), ev.GroupFailed("g")], ids=["finished", "failed"])
def test_a_group_is_not_terminal_before_all_siblings_have_settled(event: ev.Event) -> None:
    group = after(pending(3), started(0), started(1), finished(1))
    with pytest.raises(SessionStateError, match=r"group 'g' cannot be terminal: sessions \[0, 2\] have not settled"):
        evolve(group, event, group.last_seq + 1, 0)


def test_a_retry_that_is_due_holds_the_group_open() -> None:
    group = after(pending(1), started(0), failed(0, retry_in_s=0.0))
    with pytest.raises(SessionStateError, match=r"sessions \[0\] have not settled"):
        evolve(group, ev.GroupFailed("g"), group.last_seq + 1, 0)


def test_an_event_without_a_cell_is_refused_before_anything_is_looked_at() -> None:
    with pytest.raises(IllegalTransition, match="group 'g' is pending, so SessionFinished cannot happen"):
        evolve(pending(), finished(99), 8, 0)


# The end of a group ----------------------------------------------------------------------------------


def ended(finished_count: int, failed_count: int, *, unsettled: int = 0) -> Group:
    size = finished_count + failed_count + unsettled
    return replace(pending(size), settled_count=finished_count + failed_count, finished_count=finished_count)


@pytest.mark.parametrize(
    ("group", "survivors_min", "cancelled", "expected"),
    [
        (ended(1, 0, unsettled=1), None, False, None),
        (ended(0, 1, unsettled=1), 1, True, None),
        (ended(2, 0), None, False, ev.GroupFinished("g")),
        (ended(2, 0), 2, False, ev.GroupFinished("g")),
        (ended(2, 0), 3, False, ev.GroupFinished("g")),
        (ended(2, 0), None, True, ev.GroupFinished("g")),
        (ended(1, 1), None, False, ev.GroupFailed("g")),
        (ended(0, 2), None, False, ev.GroupFailed("g")),
        (ended(1, 1), None, True, ev.GroupFailed("g", cancelled=True)),
        (ended(3, 1), 2, True, ev.GroupFailed("g", cancelled=True)),
        (ended(3, 1), 2, False, ev.GroupFinished("g", partial=True)),
        (ended(2, 2), 2, False, ev.GroupFinished("g", partial=True)),
        (ended(1, 3), 2, False, ev.GroupFailed("g")),
        (ended(0, 4), 1, False, ev.GroupFailed("g")),
    ],
)
def test_what_the_last_settled_session_makes_of_the_group(
    group: Group, survivors_min: int | None, cancelled: bool, expected: ev.Event | None
) -> None:
    assert terminal_event(group, survivors_min=survivors_min, cancelled=cancelled) == expected


def test_a_group_that_is_terminal_ends_no_second_time() -> None:
    group = replace(ended(1, 1), terminal=Phase.FAILURE)

    assert terminal_event(group, survivors_min=None, cancelled=False) is None


@pytest.mark.parametrize("ending", [ev.GroupFinished("g"), ev.GroupFailed("g", cancelled=True)])
def test_a_terminal_group_packs_its_sessions_and_gives_back_the_same(ending: ev.Event) -> None:
    rows = (row(0, (0, 3, 5), (3, 9, 6), acc=0.25, length=-1.5), row(1, acc=1.0))
    running = after(pending(3), started(0), started(1), failed(2), finished(0, *rows), failed(1, retry_in_s=1.0))
    settled = after(running, failed(1, attempt=2))
    ended = after(settled, ending)

    assert isinstance(settled.kept, tuple)
    assert isinstance(ended.kept, bytes)
    assert ended.sessions == settled.sessions
    assert ended.sessions is ended.sessions
    assert ended.payloads() == settled.payloads() == [PROMPT, ANSWER]


def test_a_requeued_group_has_its_sessions_unpacked_again() -> None:
    ended = after(pending(1), failed(0), ev.GroupFailed("g"))

    again = after(ended, ev.GroupRequeued("g"))

    assert again.kept == (Session(attempt=2, last_seq=again.last_seq, first_attempt=2),)
    assert after(again, started(0, attempt=2)).sessions[0].state == "open"


def test_one_range_serves_for_sessions_and_trajectories_while_they_are_the_same() -> None:
    one = after(pending(3), started(0), finished(0, row(acc=0.5)), started(1))
    two = after(one, finished(1, row(acc=0.0), row(acc=1.0)))

    assert one.session_ranges is one.trajectory_ranges
    assert (two.session_ranges, two.trajectory_ranges) == ({"acc": (0.5, 1.0, 2)}, {"acc": (0.0, 1.0, 3)})


# Fencing ---------------------------------------------------------------------------------------------

Result = Literal["finished", "failed", "started"]
RESULTS: list[Result] = ["started", "finished", "failed"]

FENCES: dict[tuple[SessionState, bool], dict[Result, str | None]] = {
    ("waiting", True): {"started": None, "finished": None, "failed": None},
    ("open", True): {"started": "duplicate", "finished": None, "failed": None},
    ("finished", True): {"started": "settled", "finished": "duplicate", "failed": "settled"},
    ("failed", True): {"started": "settled", "finished": "settled", "failed": "duplicate"},
    ("finished", False): {"started": "terminal", "finished": "duplicate", "failed": "terminal"},
    ("failed", False): {"started": "terminal", "finished": "terminal", "failed": "duplicate"},
}
"""By the session's state and whether the group is in flight: why a result of the current attempt is fenced."""


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize(("state", "in_flight"), list(FENCES))
def test_each_result_of_the_current_attempt_is_taken_or_fenced(
    state: SessionState, in_flight: bool, result: Result
) -> None:
    phase = Phase.RUNNING if in_flight else Phase.FAILURE
    group = replace(pending(), phase=phase, kept=(Session(), Session(state, attempt=2)))

    assert fence_reason(group, 1, 2, result) == FENCES[state, in_flight][result]


@pytest.mark.parametrize("attempt", [1, 3])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize(("state", "in_flight"), list(FENCES))
def test_a_result_of_another_attempt_is_fenced_whatever_the_state(
    state: SessionState, in_flight: bool, result: Result, attempt: int
) -> None:
    phase = Phase.PENDING if in_flight else Phase.FINISHED
    group = replace(pending(), phase=phase, kept=(Session(), Session(state, attempt=2)))

    assert fence_reason(group, 1, attempt, result) == "attempt"


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.FAILURE, Phase.SAMPLED, Phase.COMMITTED])
def test_a_group_past_its_end_fences_as_terminal(phase: Phase) -> None:
    group = replace(pending(1), phase=phase, kept=(Session("finished"),))

    assert fence_reason(group, 0, 1, "failed") == "terminal"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["finish g.0 reward=1", "finish g.0 reward=1"], "duplicate"),
        (["fail g.0 error", "fail g.0 error"], "duplicate"),
        (["start g.0"], "duplicate"),
        (["finish g.0 reward=1", "fail g.0 cancelled"], "settled"),
        (["fail g.0", "finish g.0 reward=1"], "settled"),
        (["requeue g", "finish g.0 reward=1 attempt=1"], "attempt"),
        (["finish g.0 reward=1", "finish g.1 reward=1", "fail g.0 cancelled"], "terminal"),
        (["finish g.0 reward=1", "finish g.1 reward=1", "sample 1", "fail g.1"], "terminal"),
        (["finish g.0 reward=1", "finish g.1 reward=1", "evict g stale", "finish g.0 reward=1"], "gone"),
        (["finish g.0 reward=1", "finish g.1 reward=1", "evict g stale", "fail g.0"], "gone"),
        (["finish g.0 reward=1", "finish g.1 reward=1", "evict g stale", "start g.0"], "gone"),
    ],
)
def test_the_ledger_fences_a_late_result_and_changes_nothing_but_the_count(lines: list[str], reason: str) -> None:
    story = play("submit g/2", "start g", *lines[:-1])
    before = story.book.state()
    story.tell(lines[-1])
    after = story.book.state()
    changed = {name for name in before if before[name] != after[name]}

    assert story.fenced[-1] == reason
    assert story.events(ev.ResultFenced)[-1].reason == reason
    assert changed <= {"totals", "windows", "run"}
    assert story.book.totals["fenced"] == 1


def test_a_late_result_does_not_revive_an_evicted_group() -> None:
    story = play("submit g/1", "start g", "fail g", "evict g failed", "finish g.0 reward=0.75")

    assert story.phase("g") == "evicted"
    assert story.ready() == []


def test_a_late_cancellation_does_not_replace_a_success() -> None:
    story = play("submit g/1", "start g", "finish g reward=1", "fail g.0 cancelled")

    assert story.phase("g") == "finished"
    assert story.ready() == ["g"]


# Versions --------------------------------------------------------------------------------------------


def test_versions_are_those_of_the_first_the_oldest_and_the_newest_token() -> None:
    group = after(
        pending(),
        started(0),
        started(1),
        finished(0, row(0, (0, 2, 4), (2, 5, 6)), row(1, (0, 1, 2))),
        finished(1, row(0, (0, 3, 5), (3, 4, 9))),
    )

    assert versions_used(group) == (4, 2, 9)


def test_without_spans_no_version_is_known() -> None:
    group = after(pending(1), started(0), finished(0, row(reward=1.0)))

    assert versions_used(group) is None
    assert versions_used(pending()) is None


def test_the_version_of_the_start_counts_for_a_session_without_spans_and_for_no_other() -> None:
    group = after(
        pending(),
        ev.SessionStarted("g", 0, 1, weight_version=6),
        ev.SessionStarted("g", 1, 1, weight_version=7),
        finished(0, row(reward=1.0)),
    )
    assert versions_used(group) == (6, 6, 6)

    assert versions_used(after(group, finished(1, row(0, (0, 1, 9))))) == (6, 6, 9)


def test_the_first_token_that_is_known_counts_where_the_first_trajectory_has_no_spans() -> None:
    group = after(pending(1), started(0), finished(0, row(0), row(1, (0, 1, 8), (1, 2, 7))))

    assert versions_used(group) == (8, 7, 8)


def test_a_metric_that_was_changed_by_hand_is_the_recorded_one_once_it_is_unpacked_anew() -> None:
    story = play("submit a/1", "start a", "finish a reward=0.125")
    story.group("a").sessions[0].trajectories[0].metrics["reward"] = 7.0
    forget_unpacked()

    assert story.group("a").sessions[0].trajectories[0].metrics == {"reward": 0.125}
