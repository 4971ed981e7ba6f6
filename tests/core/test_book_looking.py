"""Looking into a book: groups by phase, partition and version, and their last change; nothing changes by it."""

import msgspec

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.held import MARKS_REMEMBERED, Window
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.core.shelf import Shelf
from groupstate.testing.notation import Story, play

from .scenes import done


def test_a_new_book_is_empty() -> None:
    book = Book()

    assert (book.last_seq, book.weight_version, book.lineage, book.run_id) == (0, 0, 1, "")
    assert (book.ready_count(), book.in_flight_count(), list(book.in_flight_by_age())) == (0, 0, [])
    assert (book.waiting(), book.partitions(), list(book.ready())) == ([], [], [])
    assert book.state()["run"] == ["", 0, 0, "", {}, 1, 0, 1, 0, 0, 0, 0, 0, {}, False, None, "", False]
    assert (book.last_at_ns, book.mark_seqs.maxlen) == (0, MARKS_REMEMBERED)


def test_a_run_begins_with_its_rules_and_its_version() -> None:
    story = play(weight_version=5)

    assert (story.book.run_id, story.book.weight_version, story.book.lineage) == ("story", 5, 1)
    assert story.book.rules == Rules().to_dict()


def test_a_group_in_flight_that_counts_from_another_version_comes_to_another_place() -> None:
    book = play("submit a/1 stamp=3", "submit b/1 stamp=5", weight_version=5).book
    shelf = Shelf()
    for group_id in ("a", "b"):
        shelf.add(book.group(group_id))
    shelf.move(book.group("a"), msgspec.structs.replace(book.group("a"), phase=Phase.RUNNING, aged_from=9))

    assert [list(group_ids) for _, group_ids in shelf.in_flight.by_class()] == [["b", "a"]]
    assert list(shelf.phases[Phase.RUNNING]) == ["a"]


def test_an_observer_is_told_how_the_group_of_an_event_was_before_it() -> None:
    story = Story()
    seen: list[tuple[str, str, int]] = []

    def note(record: ev.Record) -> None:
        group = story.book.before(record.event)  # type: ignore[arg-type]
        if group is not None:
            seen.append((type(record.event).__name__, str(group.phase), group.settled_count))

    assert Book().before(ev.GroupFinished("a")) is None
    story.ledger.observers.append(note)
    story.tell("submit a/2", "start a.0", "fail a.0", "fail a.1", "requeue a", "submit b/1")

    assert seen == [
        ("SessionStarted", "pending", 0),
        ("SessionFailed", "running", 0),
        ("SessionFailed", "running", 1),
        ("GroupFailed", "running", 2),
        ("GroupRequeued", "failure", 2),
    ]
    assert story.book.before(ev.GroupFinished("b")) is None


def test_counts_are_by_phase_and_partition() -> None:
    story = play("submit a/1", "submit b/1", "submit v/1 partition=val", "start b")
    book = story.book

    assert book.count(Phase.PENDING) == 2
    assert book.count(Phase.PENDING, Phase.RUNNING) == 3
    assert book.count(Phase.PENDING, partition="train") == 1
    assert book.count(Phase.RUNNING, partition="val") == 0
    assert book.count(Phase.PENDING, Phase.RUNNING, partition="train") == 2
    assert book.count(Phase.PENDING, Phase.RUNNING, partition="val") == 1
    assert book.count(Phase.PENDING, partition="test") == book.count(*Phase, partition="test") == 0
    assert book.in_flight_count() == 2
    assert book.in_flight_count("val") == 1
    assert book.partitions() == ["train", "val"]


def test_groups_of_a_phase_come_in_the_order_in_which_they_came_to_it() -> None:
    story = play("submit a/1", "submit b/1", "submit c/1 partition=val", "start c", "start b", "start a")

    assert [group.group_id for group in story.book.in_phase(Phase.RUNNING, "train")] == ["b", "a"]
    assert sorted(group.group_id for group in story.book.in_phase(Phase.RUNNING)) == ["a", "b", "c"]


def test_a_window_of_a_partition_nothing_happened_in_is_empty() -> None:
    assert play().book.window("val") == Window()


def test_looking_changes_nothing() -> None:
    book = play("publish 1").book
    before = book.digest()
    book.window("train")
    book.ready_count("val")
    book.count(Phase.PENDING, partition="test")

    assert book.digest() == before


def test_groups_are_found_by_the_version_that_they_are_of() -> None:
    story = play(
        "publish 9", *done("d", stamp=4), *done("b", "c", stamp=2), *done("a", stamp=1),
        "submit x/1 stamp=2", "submit y/1 stamp=2", "submit z/1 stamp=4",
    )  # fmt: skip
    book = story.book

    assert [[group.group_id for group in book.ready_at(version)] for version in range(6)] == [
        [], ["a"], ["b", "c"], [], ["d"], [],
    ]  # fmt: skip
    assert [book.ready_count_at(version) for version in range(6)] == [0, 1, 2, 0, 1, 0]
    assert [book.in_flight_count_at(version) for version in range(6)] == [0, 0, 2, 0, 1, 0]
    assert [group.group_id for group in book.freshest()] == ["d", "b", "c", "a"]
    assert [list(book.state()[index]["train"]) for index in ("aging", "in_flight")] == [[""], [""]]


def test_a_group_says_which_event_changed_it_last_and_when() -> None:
    story = play("mark", "submit g/1", "start g", "fail g")
    told = []
    for lines in (["requeue g"], ["start g", "finish g acc=1", "sample 1"], ["release 1"], ["sample 1", "commit 2"]):
        story.tell("wait 1", *lines)
        group = story.book.groups.get("g") or story.book.aside["g"]
        told.append((group.last_seq, group.last_at_ns) == (story.book.last_seq, story.book.last_at_ns))
    story.tell("wait 1", "recover at=1")
    rewound = next(record for record in story.log.read() if isinstance(record.event, ev.RunRewound))
    group = story.group("g")

    assert told == [True] * 4
    assert (group.last_seq, group.last_at_ns) == (rewound.seq, rewound.at_ns)


def test_the_state_of_a_book_names_its_parts_and_holds_sessions_unpacked() -> None:
    story = play("submit g/1", "start g", "finish g acc=1", "submit x/1", "start x", "fail x", "evict x failed")
    source = ev.SourceOpened("prompts", "ListSource", {"size": 3})
    before = story.book.state()["run"]
    story.record(source)
    state = story.book.state()

    assert list(state) == [
        "groups", "aside", "departed", "ready", "aging", "in_flight", "phases", "requests", "batches", "credits",
        "marks", "mark_seqs", "windows", "totals", "datasets", "uses", "targets", "run",
    ]  # fmt: skip
    assert state["departed"] == {"x": "evicted"}
    assert {phase: ids for phase, ids in state["phases"]["train"].items() if ids} == {"finished": ["g"]}
    assert [session[:2] for session in state["groups"][0][15]] == [["finished", 1]]
    assert (before[-3], state["run"][-3]) == (None, [10, "prompts", "ListSource", {"size": 3}])
