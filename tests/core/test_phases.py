"""Every cell of the table: what leads where, and that everything else is refused and leaves no trace."""

import msgspec
import pytest

from groupstate.core import events as ev
from groupstate.core.phases import IN_FLIGHT, TERMINAL, TRANSITIONS, Phase, Restored, kept_empty, next_phase
from groupstate.errors import DuplicateGroup, GroupstateError, IllegalTransition, UnknownBatch
from groupstate.testing.notation import Story, play

ABOUT_GROUPS = [
    ev.GroupSubmitted,
    ev.SessionStarted,
    ev.SessionFinished,
    ev.SessionFailed,
    ev.GroupFinished,
    ev.GroupFailed,
    ev.GroupRequeued,
    ev.GroupEvicted,
    ev.BatchSampled,
    ev.BatchReturned,
    ev.BatchCommitted,
    ev.RunRewound,
    ev.ResultFenced,
]
"""Kinds that have a cell somewhere."""

PHASES: list[Phase | None] = [None, *Phase]

DESIGNED = {
    None: {"GroupSubmitted": "pending"},
    Phase.PENDING: {
        "SessionStarted": "running",
        "SessionFailed": "pending",
        "GroupFailed": "failure",
        "GroupRequeued": "pending",
    },
    Phase.RUNNING: {
        "SessionStarted": "running",
        "SessionFinished": "running",
        "SessionFailed": "running",
        "GroupFinished": "finished",
        "GroupFailed": "failure",
        "GroupRequeued": "pending",
    },
    Phase.FINISHED: {"GroupEvicted": "evicted", "BatchSampled": "sampled"},
    Phase.FAILURE: {"GroupEvicted": "evicted", "BatchSampled": "sampled", "GroupRequeued": "pending"},
    Phase.SAMPLED: {"BatchReturned": "back", "BatchCommitted": "committed"},
    Phase.EVICTED: {},
    Phase.COMMITTED: {"RunRewound": "back"},
}
"""The table as it was designed, written down a second time. ResultFenced changes nothing anywhere."""

STORIES: dict[Phase | None, list[str]] = {
    None: [],
    Phase.PENDING: ["submit g/2"],
    Phase.RUNNING: ["submit g/2", "start g"],
    Phase.FINISHED: ["submit g/2", "start g", "finish g reward=1"],
    Phase.FAILURE: ["submit g/2", "start g", "finish g.0 reward=1", "fail g.1"],
    Phase.SAMPLED: ["submit g/2", "start g", "finish g reward=1", "sample 1"],
    Phase.EVICTED: ["submit g/2", "start g", "finish g reward=1", "evict g stale"],
    Phase.COMMITTED: ["mark", "submit g/2", "start g", "finish g reward=1", "sample 1", "commit 1"],
}
"""How a real book gets a group `g` into each phase."""

PREPARED: dict[tuple[Phase, type[ev.Event]], list[str]] = {
    (Phase.PENDING, ev.SessionStarted): ["submit g/2"],
    (Phase.PENDING, ev.GroupFailed): ["submit g/2", "fail g.0 cancelled", "fail g.1 cancelled"],
    (Phase.RUNNING, ev.SessionStarted): ["submit g/2", "start g.0"],
    (Phase.RUNNING, ev.GroupFinished): ["submit g/2", "start g", "finish g reward=1"],
    (Phase.RUNNING, ev.GroupFailed): ["submit g/2", "start g", "finish g.0 reward=1", "fail g.1"],
}
"""Where a legal cell needs more than the phase. The ledger writes terminal events by itself: see below."""


def event_of(kind: type[ev.Event], story: Story) -> ev.AnyEvent:
    """An event of `kind` about group `g` that fits the story as well as it can."""
    made: dict[type[ev.Event], ev.AnyEvent] = {
        ev.GroupSubmitted: ev.GroupSubmitted("g", 2, "train", 0, 1, "submit"),
        ev.SessionStarted: ev.SessionStarted("g", 1, 1),
        ev.SessionFinished: ev.SessionFinished("g", 1, 1, (ev.TrajectoryRecord(0),)),
        ev.SessionFailed: ev.SessionFailed("g", 1, 1, "error"),
        ev.GroupFinished: ev.GroupFinished("g"),
        ev.GroupFailed: ev.GroupFailed("g"),
        ev.GroupRequeued: ev.GroupRequeued("g"),
        ev.GroupEvicted: ev.GroupEvicted("g", ("failed",), 0, 0),
        ev.BatchSampled: ev.BatchSampled(
            story.book.last_batch + 1, story.book.last_request, "train", ("g",), story.book.weight_version, (0,)
        ),
        ev.BatchReturned: ev.BatchReturned(1),
        ev.BatchCommitted: ev.BatchCommitted(1),
        ev.RunRewound: ev.RunRewound(1, story.book.marks[0].seq if story.book.marks else 0, 0, 2),
        ev.ResultFenced: ev.ResultFenced("g", 0, 1, "finished", "duplicate"),
    }
    return made[kind]


def in_phase(phase: Phase | None, kind: type[ev.Event]) -> Story:
    """A story with `g` in `phase`, up to just before the event that is tried."""
    lines = PREPARED.get((phase, kind), STORIES[phase]) if phase is not None else []
    story = play(*lines)
    if kind is ev.BatchSampled:
        story.record(ev.BatchRequested(story.book.last_request + 1, "train", 1, story.book.weight_version))
    return story


def where(story: Story) -> str:
    aside = story.book.aside.get("g")
    return str(aside.phase) if aside is not None else story.phase("g")


def test_the_table_is_the_one_that_was_designed() -> None:
    table = {
        phase: {
            kind.__name__: "back" if isinstance(target, Restored) else str(target)
            for kind, target in cells.items()
            if kind is not ev.ResultFenced
        }
        for phase, cells in TRANSITIONS.items()
    }

    assert table == DESIGNED


def test_a_fenced_result_leaves_every_phase_as_it_is() -> None:
    unchanged = {phase: cells.get(ev.ResultFenced) for phase, cells in TRANSITIONS.items()}

    assert unchanged == {phase: phase for phase in PHASES}


def test_kinds_without_a_cell_are_the_ones_about_the_whole_run() -> None:
    with_cell = {kind for cells in TRANSITIONS.values() for kind in cells}

    assert with_cell == set(ABOUT_GROUPS)
    assert {kind.__name__ for kind in set(ev.EVENT_TYPES) - with_cell} == {
        "RunStarted",
        "WeightsPublished",
        "SourceExhausted",
        "AdmissionHeld",
        "DatasetStarved",
        "SourceOpened",
        "CheckpointMarked",
        "RunRecovered",
        "RunClosed",
        "RefillForfeited",
        "BatchRequested",
        "BatchRequestCancelled",
    }


def test_pending_and_running_are_in_flight_and_finished_and_failure_are_terminal() -> None:
    assert {Phase.PENDING, Phase.RUNNING} == IN_FLIGHT
    assert {Phase.FINISHED, Phase.FAILURE} == TERMINAL


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"mode": "sync", "empty": "keep"}, [Phase.FAILURE]),
        ({"mode": "sync", "empty": "keep_finished"}, [Phase.FINISHED]),
        ({"mode": "sync", "empty": "keep_all"}, [Phase.FINISHED, Phase.FAILURE]),
        ({"mode": "sync", "empty": "refill"}, []),
        ({"mode": "sync"}, []),
        ({"mode": "async", "empty": "keep"}, []),
        ({"mode": "async", "empty": "keep_finished"}, [Phase.FINISHED]),
        ({"mode": "async", "empty": "keep_all"}, []),
        ({"empty": "keep_all"}, []),
        ({}, []),
    ],
    ids=str,
)
def test_the_mode_and_what_is_said_of_empty_groups_say_which_stay_without_a_trajectory(
    rules: dict[str, str], kept: list[Phase]
) -> None:
    assert kept_empty(rules) == set(kept)


@pytest.mark.parametrize("terminal", sorted(TERMINAL))
@pytest.mark.parametrize("kind", ev.EVENT_TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_each_cell_leads_where_the_table_says_or_is_refused(
    phase: Phase | None, kind: type[ev.Event], terminal: Phase
) -> None:
    target = TRANSITIONS[phase].get(kind)
    if target is not None:
        expected = terminal if isinstance(target, Restored) else target

        assert next_phase(phase, kind, "g", terminal=terminal) is expected
        return
    with pytest.raises(IllegalTransition) as refused:
        next_phase(phase, kind, "g", terminal=terminal)

    assert refused.value.group_id == "g"
    assert refused.value.phase == (None if phase is None else str(phase))
    assert refused.value.event == kind.__name__
    assert refused.value.legal == tuple(sorted(DESIGNED[phase]))


LEGAL_CELLS = [
    (phase, kind)
    for phase in Phase
    for kind in ABOUT_GROUPS
    if kind in TRANSITIONS[phase] and kind not in (ev.GroupFinished, ev.GroupFailed)
]


@pytest.mark.parametrize(("phase", "kind"), LEGAL_CELLS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_real_book_follows_each_legal_cell(phase: Phase, kind: type[ev.Event]) -> None:
    story = in_phase(phase, kind)
    before = where(story)
    story.record(event_of(kind, story))
    target = TRANSITIONS[phase][kind]

    assert before == phase
    assert where(story) == ("finished" if isinstance(target, Restored) else target)


def test_a_submission_leads_from_nothing_to_pending() -> None:
    assert play("submit g/2").phase("g") == "pending"


@pytest.mark.parametrize(
    ("lines", "event", "phase"),
    [
        (["submit g/1", "start g", "finish g reward=1"], "GroupFinished", "finished"),
        (["submit g/1", "start g", "fail g"], "GroupFailed", "failure"),
        (["submit g/1", "fail g cancelled"], "GroupFailed", "failure"),
    ],
    ids=["running to finished", "running to failure", "pending to failure"],
)
def test_the_terminal_event_is_the_record_behind_the_last_sessions_end(
    lines: list[str], event: str, phase: str
) -> None:
    story = play(*lines)
    kinds = [type(record.event).__name__ for record in story.log.read()]

    assert kinds[-2:] in (["SessionFinished", event], ["SessionFailed", event])
    assert story.phase("g") == phase


@pytest.mark.parametrize("terminal", [Phase.FINISHED, Phase.FAILURE])
def test_a_returned_group_is_again_what_it_was(terminal: Phase) -> None:
    story = play(*STORIES[terminal], "sample 1", "release 1")

    assert story.phase("g") == terminal


@pytest.mark.parametrize("terminal", [Phase.FINISHED, Phase.FAILURE])
def test_a_rewound_group_is_again_what_it_was(terminal: Phase) -> None:
    story = play("mark", *STORIES[terminal], "sample 1", "commit 1", "recover at=1")

    assert story.phase("g") == terminal


ILLEGAL_CELLS = [
    (phase, kind)
    for phase in PHASES
    for kind in ABOUT_GROUPS
    if kind not in TRANSITIONS[phase] and kind is not ev.RunRewound
]
"""RunRewound is about the run: it passes by the groups that it has no cell for. See test_book_marks.py."""


def refusal_of(phase: Phase | None, kind: type[ev.Event]) -> type[GroupstateError]:
    if kind is ev.GroupSubmitted:
        return DuplicateGroup
    if kind in (ev.BatchReturned, ev.BatchCommitted):
        return UnknownBatch
    return IllegalTransition


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL_CELLS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_real_book_refuses_each_other_cell_and_nothing_has_changed(phase: Phase | None, kind: type[ev.Event]) -> None:
    story = in_phase(phase, kind)
    before, kept = story.book.state(), story.log.last_seq
    with pytest.raises(refusal_of(phase, kind)) as refused:
        story.record(event_of(kind, story))

    assert story.book.state() == before
    assert story.log.last_seq == kept
    if isinstance(refused.value, IllegalTransition):
        state = "was never submitted" if phase is None else f"is {phase}"
        legal = ", ".join(sorted(DESIGNED[phase])) or "nothing: that is the end of it"
        assert str(refused.value) == f"group 'g' {state}, so {kind.__name__} cannot happen; it accepts {legal}"


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL_CELLS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_apply_itself_refuses_what_preview_refuses(phase: Phase | None, kind: type[ev.Event]) -> None:
    story = in_phase(phase, kind)
    before = story.book.state()
    record = ev.Record(story.book.last_seq + 1, story.now_ns, event_of(kind, story))
    with pytest.raises(refusal_of(phase, kind)):
        story.book.apply(record)

    assert story.book.state() == before


def test_a_fenced_result_of_a_group_that_never_was_is_refused() -> None:
    story = play()
    with pytest.raises(IllegalTransition, match="group 'ghost' was never submitted"):
        story.record(ev.ResultFenced("ghost", 0, 1, "finished", "gone"))

    assert story.book.totals["fenced"] == 0


@pytest.mark.parametrize(
    ("lines", "was"),
    [(STORIES[Phase.EVICTED], "it was evicted"), (STORIES[Phase.COMMITTED], "it was committed")],
    ids=["evicted", "committed"],
)
def test_a_group_that_left_is_not_in_the_book_and_the_error_says_how_it_left(lines: list[str], was: str) -> None:
    story = play(*lines)
    with pytest.raises(GroupstateError, match=f"cannot look up: group 'g' is not in the book; {was} and has left"):
        story.group("g")

    assert "g" not in story.book.groups


def test_the_legal_kinds_in_an_error_read_like_the_table() -> None:
    with pytest.raises(IllegalTransition) as refused:
        next_phase(Phase.SAMPLED, ev.GroupEvicted, "g")

    assert refused.value.legal == ("BatchCommitted", "BatchReturned")


def test_phases_are_plain_strings_in_a_log_and_in_json() -> None:
    assert msgspec.json.encode(list(Phase)) == (
        b'["pending","running","finished","failure","sampled","evicted","committed"]'
    )
