"""A replay leaves and raises what applying the events one by one leaves and raises."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import Replay, replayed
from groupstate.errors import GroupstateError
from groupstate.testing import play, strategies
from groupstate.testing.notation import Story

ONE = ("submit a/2", "start a", "finish a.0 reward=1")


def one_by_one(records: list[ev.Record]) -> tuple[Book, str]:
    """The book, and what was raised."""
    book = Book()
    try:
        for record in records:
            book.apply(record)
    except (GroupstateError, AssertionError, LookupError) as error:
        return book, f"{type(error).__name__}: {error}"
    return book, ""


def folded(records: list[ev.Record], *, looks: frozenset[int] = frozenset()) -> tuple[Book, str]:
    """The same by a replay, which is settled after each of the events in `looks`, as after an error."""
    replay = Replay(Book())
    try:
        for record in records:
            replay.apply(record)
            if record.seq in looks:
                replay.settle()
    except (GroupstateError, AssertionError, LookupError) as error:
        return replay.book, f"{type(error).__name__}: {error}"
    return replay.settle(), ""


def same(records: list[ev.Record], **options: Any) -> None:
    (one, raised), (other, raised_too) = one_by_one(records), folded(records, **options)
    assert raised_too == raised
    assert other.state() == one.state()
    assert (other.last_seq, other.last_at_ns, other.released) == (one.last_seq, one.last_at_ns, one.released)


def log_of(*story: str) -> list[ev.Record]:
    played: Story = play(*story)
    return list(played.log.read())


@given(strategies.logs(moves_max=40), st.data())
def test_of_any_history(records: list[ev.Record], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(records)))
    looks = data.draw(st.frozensets(st.integers(1, len(records)), max_size=3))

    same(records[:stop], looks=looks)


@given(strategies.logs(moves_max=40), st.data())
def test_of_a_history_with_an_event_that_is_missing_twice_there_or_another(
    records: list[ev.Record], data: st.DataObject
) -> None:
    assume(len(records) > 1)
    place = data.draw(st.integers(1, len(records) - 1))
    event = records[place].event
    change = data.draw(st.sampled_from(["gone", "twice", "attempt", "session", "rows"]))
    events = [record.event for record in records]
    if change == "gone":
        del events[place]
    elif change == "twice":
        events.insert(place, event)
    elif isinstance(event, ev.SessionStarted | ev.SessionFinished | ev.SessionFailed):
        if change == "session":
            events[place] = replace(event, session=event.session + 1)
        elif change == "attempt":
            events[place] = replace(event, attempt=event.attempt + 1)
        elif isinstance(event, ev.SessionFinished):
            events[place] = replace(event, trajectories=event.trajectories * data.draw(st.sampled_from([0, 2])))

    same([ev.Record(seq, 1_000 + seq, event) for seq, event in enumerate(events, 1)])


def test_a_group_that_is_looked_at_on_the_way_is_the_one_of_then() -> None:
    records = log_of(*ONE)
    replay = Replay(Book())
    for record in records:
        replay.apply(record)

    before = replay.book.groups["a"].finished_count
    after = replay.settle().groups["a"].finished_count

    assert (before, after) == (0, 1)


def test_after_a_settling_it_goes_on() -> None:
    records = log_of(*ONE, "finish a.1 reward=0")

    same(records, looks=frozenset(record.seq for record in records))


def test_of_sessions_with_several_trajectories_ranges_are_apart_again() -> None:
    records = log_of(*ONE)
    finished = records[-1].event
    assert isinstance(finished, ev.SessionFinished)
    (row,) = finished.trajectories
    rows = (replace(row, metrics={"reward": 5.0}), replace(row, index=1, metrics={"reward": 0.0}))
    two = ev.Record(records[-1].seq, records[-1].at_ns, replace(finished, trajectories=rows))
    more = ev.Record(two.seq + 1, two.at_ns, replace(finished, session=1))

    same([*records[:-1], two, more])
    assert replayed([*records[:-1], two]).groups["a"].session_ranges == {"reward": (0.0, 0.0, 1)}


def test_a_record_that_is_out_of_its_place_is_refused_and_the_book_is_settled() -> None:
    *records, last = log_of(*ONE)
    replay = Replay(Book())
    for record in records:
        replay.apply(record)

    with pytest.raises(AssertionError, match=f"event {last.seq + 1} after event {last.seq - 1}"):
        replay.apply(ev.Record(last.seq + 1, last.at_ns, last.event))

    assert replay.book.state() == one_by_one(records)[0].state()


def test_what_a_replay_frees_is_noted_by_the_book_that_it_is_given_and_not_by_replayed() -> None:
    records = log_of("submit a/1 content=x", "start a", "finish a reward=1", "sample 1", "commit 1")

    assert one_by_one(records)[0].released != []
    assert folded(records)[0].released == one_by_one(records)[0].released
    assert replayed(records).released == []
    assert replayed(records).notes_released


@pytest.mark.parametrize("session", [0, 1, 2])
def test_only_what_brings_a_group_to_another_phase_is_in_the_book_at_once(session: int) -> None:
    first = (session + 1) % 3
    records = log_of("submit a/3", f"start a.{first}", f"start a.{session}", f"finish a.{session} reward=1")
    replay, states = Replay(Book()), []
    for record in records:
        replay.apply(record)
        if "a" in replay.book.groups:
            sessions = replay.book.groups["a"].sessions
            states.append((sessions[first].state, sessions[session].state))

    assert states == [("waiting", "waiting"), *[("open", "waiting")] * 3]
    assert replay.settle().groups["a"].sessions[session].state == "finished"


ROW = (ev.TrajectoryRecord(0, {"reward": 1.0}),)


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize(
    "event",
    [
        ev.SessionStarted("a", 2, 1),
        ev.SessionStarted("a", -1, 1),
        ev.SessionStarted("a", 0, 1),
        ev.SessionStarted("a", 1, 1),
        ev.SessionStarted("a", 1, 2),
        ev.SessionStarted("b", 0, 1),
        ev.SessionFinished("a", 2, 1, ROW),
        ev.SessionFinished("a", -1, 1, ROW),
        ev.SessionFinished("a", 0, 1, ROW),
        ev.SessionFinished("a", 1, 2, ROW),
        ev.SessionFinished("a", 1, 1, ROW),
        ev.SessionFinished("b", 0, 1, ROW),
    ],
    ids=str,
)
def test_an_event_that_cannot_happen_is_refused_as_the_book_refuses_it(event: ev.AnyEvent, *, settled: bool) -> None:
    records = log_of(*ONE)
    last = records[-1].seq

    same([*records, ev.Record(last + 1, 9, event)], looks=frozenset([last] if settled else []))


def test_a_run_that_goes_back_finds_the_groups_that_it_caps() -> None:
    events: list[ev.AnyEvent] = [
        ev.RunStarted("r", {}, 1, 0),
        ev.CheckpointMarked(1, 0, 1, "first"),
        ev.WeightsPublished(3),
        ev.GroupSubmitted("a", 2, "train", 3, 1, "submit"),
        ev.SessionStarted("a", 0, 1),
        ev.SessionStarted("a", 1, 1),
        ev.SessionFinished("a", 1, 1, ROW),
        ev.RunRewound(1, 2, 0, 2),
        ev.SessionFinished("a", 0, 1, ROW),
        ev.GroupFinished("a"),
    ]
    records = [ev.Record(seq, seq, event) for seq, event in enumerate(events, 1)]

    assert one_by_one(records)[1] == ""
    same(records)


@pytest.mark.parametrize("event", [ev.RunRecovered({}, 1, 0, 1), ev.WeightsPublished(1)])
def test_an_event_about_no_group_finds_the_book_as_it_needs_it(event: ev.AnyEvent) -> None:
    records = log_of(*ONE)
    more = [event, ev.SessionFailed("a", 1, 1, "error")]

    same(records + [ev.Record(records[-1].seq + n, 5_000, e) for n, e in enumerate(more, 1)])
