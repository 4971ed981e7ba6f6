"""Records make the same book each time, in their order; a preview is what its event will make of a group."""

import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.phases import Phase
from groupstate.testing.notation import play

# Replay -----------------------------------------------------------------------------------------------


def test_records_are_applied_in_order_and_none_twice() -> None:
    story = play("submit a/1")
    record = next(story.log.read(start=2))
    with pytest.raises(AssertionError, match="event 2 after event 2"):
        story.book.apply(record)

    assert story.book.last_seq == 2


def test_equal_books_have_equal_digests_and_different_ones_do_not() -> None:
    lines = ["submit a/2", "start a", "finish a.0 reward=1"]

    assert play(*lines).book.digest() == play(*lines).book.digest()
    assert play(*lines).book.digest() != play(*lines, "finish a.1 reward=1").book.digest()
    assert play(*lines).book.digest() != play("publish 0", *lines[:2], "finish a.0 reward=0").book.digest()


EVERYTHING = [
    "submit a/2 content=hello dataset=math", "submit b/1", "submit v/1 partition=val", "start a", "start v",
    "finish a.0 reward=1 versions=1,2 | reward=0", "fail a.1 timeout", "finish v reward=1", "mark", "sample 1",
    "commit 1", "sample 1 partition=val", "release 2", "sample 5", "start b", "fail b", "evict b empty credit=2",
    "submit r/1 cause=refill", "forfeit 1", "publish 4", "finish b.0 reward=1", "recover at=1", "requeue r", "close",
]  # fmt: skip
"""A story in which every kind of event happens, but holds and exhaustion."""


def test_any_prefix_of_a_log_replays_to_the_book_that_was_there() -> None:
    story = play(*EVERYTHING)
    records = list(story.log.read())
    book = Book()
    for count, record in enumerate(records, 1):
        book.apply(record)
        book.released.clear()

        assert replayed(records[:count]).digest() == book.digest()
    assert len({type(record.event) for record in records}) >= 16


def test_a_replay_is_the_same_each_time_and_holds_no_payloads_to_free() -> None:
    records = list(play(*EVERYTHING).log.read())

    assert len({replayed(records).digest() for _ in range(3)}) == 1
    assert replayed(records).released == []


# Previews ---------------------------------------------------------------------------------------------


def test_a_preview_is_the_group_as_it_would_be() -> None:
    story = play("submit g/1")
    group = story.book.preview(ev.SessionStarted("g", 0, 1), 9, 99)

    assert group is not None
    assert (group.phase, group.last_seq, group.last_at_ns) == (Phase.RUNNING, 9, 99)
    assert story.phase("g") == "pending"


def test_a_group_that_was_previewed_is_not_made_a_second_time_by_its_event() -> None:
    book = play("submit g/2", "start g.0").book
    event, seq = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    previewed = book.preview(event, seq, 99)
    book.apply(ev.Record(seq, 99, event))

    assert book.group("g") is previewed


@pytest.mark.parametrize(
    ("session", "ahead", "at_ns"),
    [
        pytest.param(2, 0, 99, id="another event"),
        pytest.param(1, 1, 99, id="the same event with another number"),
        pytest.param(1, 0, 98, id="the same event at another time"),
    ],
)
def test_a_preview_of_something_else_is_not_taken_for_the_event(session: int, ahead: int, at_ns: int) -> None:
    book = play("submit g/3", "start g.0").book
    event, now = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    book.preview(event if session == 1 else ev.SessionStarted("g", session, 1), now + ahead, at_ns)
    book.apply(ev.Record(now, 99, event))

    group = book.group("g")
    assert [session.state for session in group.sessions] == ["open", "open", "waiting"]
    assert (group.last_seq, group.last_at_ns) == (now, 99)


def test_a_preview_of_a_group_that_has_changed_since_is_not_taken_for_the_event() -> None:
    book = play("submit g/3", "start g.0").book
    event, now = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    book.preview(event, now + 1, 99)
    book.apply(ev.Record(now, 98, ev.SessionStarted("g", 2, 1)))
    book.apply(ev.Record(now + 1, 99, event))

    assert [session.state for session in book.group("g").sessions] == ["open", "open", "open"]
