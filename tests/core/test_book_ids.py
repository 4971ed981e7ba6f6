"""Ids in a book: each is used once, those that left are forgotten at a bound, and what isn't there is told so."""

import itertools
import time

import pytest

from groupstate.core import book_changes
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.errors import DuplicateGroup, IllegalTransition, UnknownGroup
from groupstate.testing.notation import play

from .scenes import done

# Taken, free, forgotten -------------------------------------------------------------------------------


def test_a_free_id_is_not_taken() -> None:
    story = play(*done("a", "b", "c"), "evict a stale", "sample 1", "commit 1")
    book = story.book

    assert book.is_taken("new") is None
    assert book.is_taken("a") == "it was evicted and has left the book"
    assert book.is_taken("b") == "it was committed and has left the book"
    assert book.is_taken("c") == "it is finished"


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (["submit g/1"], "it is pending"),
        (done("g"), "it is finished"),
        ([*done("g"), "sample 1"], "it is sampled"),
        ([*done("g"), "evict g stale"], "it was evicted and has left the book"),
        ([*done("g"), "sample 1", "commit 1"], "it was committed and has left the book"),
        (["mark", *done("g"), "sample 1", "commit 1"], "it was committed and has left the book"),
    ],
    ids=["pending", "finished", "sampled", "evicted", "committed", "aside"],
)
def test_an_id_is_used_once_in_a_run_even_after_its_group_left(lines: list[str], where: str) -> None:
    story = play(*lines)
    before = story.book.digest()
    with pytest.raises(DuplicateGroup) as refused:
        story.tell("submit g/1")

    assert str(refused.value).startswith(f"group id 'g' is taken: {where};")
    assert refused.value.group_id == "g"
    assert story.book.digest() == before


def test_ids_are_opaque() -> None:
    names = ["math", "math_1", "math_1_0", "a/b", "a:b", "é中🙂", "0"]
    story = play(*done(*names), "evict math stale")

    assert story.ready() == names[1:]


def test_the_oldest_departed_ids_are_forgotten_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 2)
    story = play(*done("a", "b", "c"), "evict a stale", "evict b stale", "evict c stale")

    assert list(story.book.departed) == ["b", "c"]
    assert story.book.is_taken("a") is None


def test_a_group_that_came_back_is_forgotten_in_the_order_in_which_it_leaves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 2)
    story = play(*done("a", "b", "c", "d"), "evict a stale", "mark", "sample 1", "commit 1", "evict c stale")
    assert list(story.book.departed) == ["b", "c"]
    story.tell("recover at=1", "evict d stale", "evict b stale")

    assert list(story.book.departed) == ["d", "b"]


def test_forgetting_a_departed_id_costs_the_same_however_many_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 50_000)
    book = Book()
    names = iter(range(100_000))

    def depart(count: int) -> float:
        begin = time.thread_time()
        for name in itertools.islice(names, count):
            book_changes.depart(book, f"g{name}", Phase.COMMITTED)
        return time.thread_time() - begin

    depart(50_000)
    early = min(depart(100) for _ in range(5))
    depart(34_000)
    late = min(depart(100) for _ in range(5))

    assert late < 5 * early


def test_ids_are_forgotten_in_the_order_in_which_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 1)
    story = play()
    for name in "abcd":
        story.tell(f"submit {name}/1", f"start {name}", f"fail {name}", f"evict {name} failed")

    assert list(story.book.departed) == ["d"]


# Groups that are not there ----------------------------------------------------------------------------


def test_an_unknown_group_was_never_submitted() -> None:
    with pytest.raises(UnknownGroup) as refused:
        play().book.group("ghost", "requeue")

    assert str(refused.value) == "cannot requeue: group 'ghost' is not in the book; it was never submitted"
    assert refused.value.group_id == "ghost"
    assert refused.value.tried == "requeue"


def test_a_group_that_is_not_there_is_told_by_what_became_of_it() -> None:
    story = play("submit g/1", "start g", "fail g", "evict g failed")

    with pytest.raises(UnknownGroup, match=r"look up.*'g'.*it was evicted and has left"):
        story.book.group("g")
    with pytest.raises(UnknownGroup, match=r"'other'.*it was never submitted"):
        story.book.group("other")


@pytest.mark.parametrize("event", [ev.SessionStarted("g", 0, 1), ev.GroupEvicted("g", ("failed",), 0, 0)])
@pytest.mark.parametrize(
    ("lines", "phase"), [(["submit g/1", "start g", "fail g", "evict g failed"], "evicted"), ([], None)]
)
def test_an_event_about_a_group_that_is_not_there_is_refused(
    lines: list[str], phase: str | None, event: ev.Event
) -> None:
    book = play(*lines).book
    for attempt in (lambda: book.preview(event, 99, 99), lambda: book.apply(ev.Record(book.last_seq + 1, 0, event))):
        with pytest.raises(IllegalTransition) as refused:
            attempt()

        assert (refused.value.group_id, refused.value.phase) == ("g", phase)
        assert type(event).__name__ in str(refused.value)


def test_what_happens_to_a_group_that_has_left_is_told_by_its_name() -> None:
    story = play("submit g/1", "start g", "fail g", "evict g failed")

    with pytest.raises(IllegalTransition, match="GroupEvicted"):
        story.record(ev.GroupEvicted("g", ("failed",), 0, 0))
    with pytest.raises(IllegalTransition, match="GroupRequeued"):
        story.record(ev.GroupRequeued("g"))
