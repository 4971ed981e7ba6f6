"""A book that was kept and restored is the book."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupstate.core import events as ev
from groupstate.core import snapshot
from groupstate.core.book import Book
from groupstate.core.departed import Departed, Left
from groupstate.core.folding import replayed
from groupstate.core.group import Group
from groupstate.core.rules import PerDataset, Rules
from groupstate.core.shelf import Shelf
from groupstate.core.snapshot import (
    STATE_VERSION,
    BookState,
    Capture,
    LaterState,
    capture,
    capture_live,
    decoded,
    encoded,
    restore,
)
from groupstate.testing.notation import Story, play

from .test_histories import History

LIFE = (
    "publish 1", "submit a/2 dataset=math position=3", "submit b/2", "submit v/1 partition=val", "start a", "start b",
    "finish a.0 acc=0 versions=1,1", "finish a.1 acc=1", "fail b", "sample 1", "submit c/1", "start c",
    "finish c acc=1", "mark first", "commit 1", "sample 1", "submit d/3", "start d.1", "start v", "finish v acc=1",
    "sample 4", "publish 3", "submit e/1 dataset=code",
)  # fmt: skip


def again(book: Book) -> Book:
    """Through bytes and back."""
    return restore(decoded(encoded(capture(book))))


def everything(book: Book) -> dict[str, Any]:
    """All attributes, those of the indexes included; but for what the last preview said, which isn't of the book."""
    plain = {name: value for name, value in vars(book).items() if name not in {"shelves", "previewed"}}
    return plain | {
        f"shelf {name}": [shelf.phases, list(shelf.ready), shelf.aging.state(), shelf.in_flight.state()]
        for name, shelf in book.shelves.items()
    }


def life() -> Story:
    rules = Rules(lag_max=4, datasets={"math": PerDataset(lag_max=9)}, starvation_versions=2, filter_metric="acc")
    return play(*LIFE, rules=rules, source=["r1"])


def test_every_attribute_is_restored() -> None:
    book = life().book

    assert everything(again(book)) == everything(book)
    assert again(book).digest() == book.digest()


def test_a_new_book_is_restored_as_one() -> None:
    assert everything(again(Book())) == everything(Book())


@pytest.mark.parametrize("seq", range(1, 60))
def test_from_wherever_it_was_kept_the_rest_of_the_log_leads_to_the_same(seq: int) -> None:
    story = life()
    records = list(story.log.read())
    kept = again(replayed(records[:seq]))
    for record in records[seq:]:
        kept.apply(record)
        kept.released.clear()

    assert everything(kept) == everything(story.book)


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_random_histories_go_on_from_any_place(data: st.DataObject) -> None:
    history = History(data)
    for _ in range(data.draw(st.integers(5, 60), "steps")):
        data.draw(st.sampled_from(History.COMMANDS), "command")(history)
    records = list(history.log.read())
    seq = data.draw(st.integers(0, len(records)), "kept at")
    kept = again(replayed(records[:seq]))
    for record in records[seq:]:
        kept.apply(record)
        kept.released.clear()

    assert kept.digest() == history.book.digest()


def test_what_was_captured_does_not_change_with_the_book() -> None:
    story = life()
    taken, digest = capture(story.book), story.book.digest()
    story.tell(
        "submit z/1", "start z", "finish z acc=0", "publish 4", "start e", "finish e acc=1", "sample 1", "commit 2"
    )

    assert restore(decoded(encoded(taken))).digest() == digest != story.book.digest()


def test_datasets_with_bounds_of_their_own_are_apart_in_the_restored_indexes() -> None:
    story = life()
    restored = again(story.book)

    assert [[g.group_id for g in groups] for groups in restored.in_flight_by_age()] == [
        [g.group_id for g in groups] for groups in story.book.in_flight_by_age()
    ]


def test_a_later_state_is_not_misread() -> None:
    later = BookState(version=STATE_VERSION + 1)

    text = f"its state is of version {STATE_VERSION + 1}; this version .* reads up to version {STATE_VERSION}"
    with pytest.raises(LaterState, match=text):
        decoded(encoded(Capture(later, [], [], Departed())))


def test_a_later_state_is_told_from_a_bad_one_whatever_else_it_is_made_of() -> None:
    strange = msgspec.msgpack.encode({"version": STATE_VERSION + 1, "groups": 7, "marks": "none"})
    with pytest.raises(LaterState):
        decoded(iter([(1, strange)]))


def test_an_older_state_is_read_with_defaults_for_what_it_lacks() -> None:
    book = life().book
    parts = dict(encoded(capture(book)))
    state = msgspec.msgpack.decode(parts[1])
    known = {name: state[name] for name in state if name not in ("rules_version", "uses", "held_reason")}
    old = decoded(iter([(1, msgspec.msgpack.encode(known)), (2, parts[2])]))

    assert (old.state.rules_version, old.state.uses, old.state.held_reason) == (1, {}, "")
    assert restore(old).last_seq == book.last_seq


def test_a_group_of_an_older_state_is_read_with_defaults_and_one_of_a_later_without_what_is_not_known() -> None:
    parts = dict(encoded(capture(life().book)))
    groups = msgspec.msgpack.decode(parts[2])
    required = sum(field.required for field in msgspec.structs.fields(Group))
    old = decoded(iter([(1, parts[1]), (2, msgspec.msgpack.encode([group[:required] for group in groups]))]))
    later = decoded(iter([(1, parts[1]), (2, msgspec.msgpack.encode([[*group, "later"] for group in groups]))]))

    assert old.groups[0].kept_lag is None
    assert list(later.groups) == list(life().book.groups.values())


@pytest.mark.parametrize(("parts", "problem"), [([], "no state"), ([(9, b"")], "a part of kind 9")])
def test_parts_that_are_no_capture_are_refused(parts: list[tuple[int, bytes]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decoded(iter(parts))


def test_a_shelf_that_is_filled_at_once_is_the_one_that_was_filled_one_by_one() -> None:
    book = life().book
    shelf = book.shelves[ev.TRAIN]
    filled = Shelf(book.lag_classes)
    filled.fill({phase: [book.groups[g] for g in ids] for phase, ids in shelf.phases.items()})

    assert (list(filled.ready), filled.aging.state()) == (list(shelf.ready), shelf.aging.state())
    assert filled.in_flight.state() == shelf.in_flight.state()


# In parts --------------------------------------------------------------------------------------------


def many() -> Book:
    """A book that has several of everything, and nothing that it begins with."""
    story = play("mark")
    story.record(ev.SourceOpened("prompts", "ListSource", {"size": 9}))
    for number in range(5):
        for kind in ("out", "gone", "here"):
            name = f"{kind}{number}"
            story.record(ev.GroupSubmitted(name, 1, "train", 0, 1, "submit", target_version=number))
            story.tell(f"start {name}", f"fail {name}" if kind == "gone" else f"finish {name} acc=1")
        story.tell(f"evict gone{number} stale lag={number}")
    story.tell("sample 5", "commit 1")
    for number in range(5):
        story.tell(f"submit x{number}/1", f"start x{number}", f"fail x{number}", f"evict x{number} failed,stale lag=3")
    story.record(ev.AdmissionHeld("a group is at the bound"))
    story.tell("close")
    story.book.rules_version = 5
    return story.book


def test_a_book_comes_back_from_however_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "GROUPS_PER_PART", 2)
    monkeypatch.setattr(snapshot, "IDS_PER_PART", 4)
    book = many()
    parts = list(encoded(capture(book)))

    sizes = {
        kind: [len(msgspec.msgpack.decode(data)) for of, data in parts if of == kind]
        for kind in (snapshot.GROUPS, snapshot.ASIDE)
    }
    left = [len(msgspec.msgpack.decode(data, type=Left).ids) for of, data in parts if of == snapshot.LEFT]

    assert everything(again(book)) == everything(book)
    assert (sizes, left) == ({snapshot.GROUPS: [2, 2, 1], snapshot.ASIDE: [2, 2, 1]}, [4, 4, 4, 3])
    assert [kind for kind, _ in parts] == [
        snapshot.STATE, *[snapshot.GROUPS] * 3, *[snapshot.ASIDE] * 3, *[snapshot.LEFT] * 4
    ]  # fmt: skip


def test_counts_that_were_captured_do_not_change_with_the_book() -> None:
    book = many()
    taken, before = capture(book), everything(book)["windows"]["train"]
    lags, reasons = list(before.stale_lags), dict(before.evicted)
    before.stale_lags.append(9)
    before.evicted["stale"] += 1
    window = restore(taken).windows["train"]

    assert (window.stale_lags, window.evicted) == (lags, reasons)


def test_ids_without_phases_are_no_capture() -> None:
    parts = dict(encoded(capture(many())))
    left = msgspec.msgpack.decode(parts[snapshot.LEFT], type=Left)

    for phases in (left.phases[:-1], left.phases + b"\0"):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer)"):
            decoded(iter([(1, parts[1]), (snapshot.LEFT, msgspec.msgpack.encode(Left(left.ids, phases)))]))


def test_a_finished_group_for_looking_has_its_counts_and_ranges_and_not_what_was_yielded() -> None:
    rows = (ev.TrajectoryRecord(0, {"reward": 0.5}, 3, 7),)
    book = Book()
    events = [
        *(ev.GroupSubmitted(name, 2, ev.TRAIN, 0, 1, "submit") for name in "ab"),
        *(ev.SessionStarted(name, session, 1) for name in "ab" for session in (0, 1)),
        *(ev.SessionFinished(name, 0, 1, rows) for name in "ab"),
        ev.SessionFinished("a", 1, 1, rows),
        ev.GroupFinished("a"),
        ev.SessionFailed("b", 1, 1, "error", "boom"),
        ev.GroupFailed("b"),
    ]
    for seq, event in enumerate(events, 1):
        book.apply(ev.Record(seq, seq, event))
    again = restore(decoded(encoded(capture_live(book))))
    a, b = again.groups["a"], again.groups["b"]

    assert a == msgspec.structs.replace(book.groups["a"], kept=a.kept)
    assert [(session.state, session.trajectories) for session in a.sessions] == [("finished", ())] * 2
    assert b == book.groups["b"], "a failed one may start over, so its sessions' attempts are needed"
    assert again.digest() == restore(capture_live(book)).digest() != book.digest()
