"""Which prompts are done with: against a count made anew, over rewinds, by dataset."""

import itertools
import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.frontier import Positions, frontier
from groupstate.core.rules import RULES_VERSION
from groupstate.testing.notation import play
from tests.runtime.scenes import half_right, opened, virtual


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_ranges_hold_what_a_set_holds(steps):
    positions, numbers = Positions(), set()
    for adds, number in steps:
        (positions.add if adds else positions.discard)(number)
        (numbers.add if adds else numbers.discard)(number)
        ranges = positions.ranges()

        assert {n for start, stop in ranges for n in range(start, stop)} == numbers
        assert all(left[1] < right[0] for left, right in itertools.pairwise(ranges))


def log(*events):
    return [
        ev.Record(seq, seq, event) for seq, event in enumerate([ev.RunStarted("r", {}, RULES_VERSION, 0), *events], 1)
    ]


def submit(position, dataset="", name=None, partition=ev.TRAIN):
    return ev.GroupSubmitted(
        name or f"{dataset}{position}", 1, partition, 0, 1, "admission", dataset, source_position=position
    )


def batch(number, *names):
    return ev.BatchSampled(number, number, ev.TRAIN, names, 0, (0,) * len(names))


def evict(name):
    return ev.GroupEvicted(name, ("failed",), 0, 0)


def test_positions_by_what_became_of_them():
    records = log(
        *map(submit, range(6)), submit(0, name="v", partition=ev.VALIDATION), submit(-1, name="mine"),
        batch(1, "0", "1", "mine"), batch(2, "3"), batch(3, "5"), ev.BatchCommitted(1), ev.BatchReturned(3),
        evict("4"), evict("mine2"),
    )  # fmt: skip
    (place,) = frontier(records)

    assert (place.committed, place.open, place.evicted) == (((0, 2),), ((2, 4), (5, 6)), ((4, 5),))
    assert (place.next, place.lowest_open, place.size, place.left) == (6, 2, None, None)
    assert frontier(records, 3)[0].open == ((0, 2),)
    assert frontier(log()) == ()


def test_from_a_book_what_has_left_is_done_with_and_nothing_more_is_known_of_it():
    failing = [
        (ev.SessionStarted(name, 0, 1), ev.SessionFailed(name, 0, 1, "error"), ev.GroupFailed(name), evict(name))
        for name in ("1", "4")
    ]
    others = (submit(-1, name="mine"), submit(0, name="v", partition=ev.VALIDATION))
    records = log(*map(submit, range(5)), *others, *itertools.chain(*failing))
    (place,) = frontier([], base=replayed(records))

    assert (place.open, place.unknown, place.next) == (((0, 1), (2, 4)), ((1, 2), (4, 5)), 5)
    assert (place.committed, place.evicted) == ((), ())


def numbers(*many):
    return {n for ranges in many for start, stop in ranges for n in range(start, stop)}


@pytest.mark.parametrize("kind", ["ListSource", "MixedSource"])
def test_from_a_book_on_the_frontier_knows_what_is_open_and_what_was_committed_since(kind):
    story = play()
    details = {"a": {"size": 4}, "b": {"size": 4}} if kind == "MixedSource" else {"size": 8}
    story.record(ev.SourceOpened("prompts", kind, details))
    for number in range(4):
        for index, dataset in enumerate("ab"):
            name, position = f"{dataset}{number}", number if kind == "MixedSource" else 2 * number + index
            story.tell(
                f"submit {name}/1 dataset={dataset} position={position}", f"start {name}", f"finish {name} acc=1"
            )
    story.tell(
        "submit v/1 partition=val", "evict a0 stale", "mark", "sample 2", "commit 1", "evict b1 stale", "sample 1",
        "mark", "commit 2", "sample 1", "release 3", "sample 1", "commit 4", "recover at=2", "sample 1", "commit 5",
        "recover at=2", "sample 1", "commit 6", "mark", "sample 1", "recover",
    )  # fmt: skip
    records = list(story.log.read())
    whole = frontier(records)

    assert {place.dataset for place in whole} == ({"a", "b"} if kind == "MixedSource" else {""})
    for cut in range(3, len(records)):
        for place, since in zip(whole, frontier(records[cut:], base=replayed(records[:cut])), strict=True):
            assert (since.dataset, since.open, since.next) == (place.dataset, place.open, place.next)
            assert (since.lowest_open, since.size, since.since) == (place.lowest_open, place.size, cut + 1)
            assert numbers(since.committed, since.evicted) <= numbers(place.committed, place.evicted)
            assert numbers(since.committed, since.evicted, since.unknown) == numbers(place.committed, place.evicted)


def test_the_same_mark_can_be_gone_back_to_twice():
    story = play(
        "submit a/1 position=0", "start a", "finish a acc=1", "mark", "sample 1", "commit 1", "recover at=1",
        "sample 1", "commit 2", "recover at=1",
    )  # fmt: skip
    (place,) = frontier(story.log.read())

    assert (place.committed, place.open, place.lowest_open) == ((), ((0, 1),), 0)


def test_a_rewind_opens_what_was_committed_behind_the_mark_and_no_more():
    records = log(
        *map(submit, range(4)),
        ev.CheckpointMarked(1, 0, 1), batch(1, "0"), ev.BatchCommitted(1),
        ev.CheckpointMarked(2, 0, 1), batch(2, "1"), ev.BatchCommitted(2),
        ev.CheckpointMarked(3, 0, 1), batch(3, "2"), ev.BatchCommitted(3),
        ev.RunRewound(2, 9, 0, 2), batch(4, "1"), ev.BatchCommitted(4),
    )  # fmt: skip
    (undone,) = frontier(records, 15)
    (place,) = frontier(records)

    assert (undone.committed, undone.open, undone.lowest_open) == (((0, 1),), ((1, 4),), 1)
    assert (place.committed, place.open) == (((0, 2),), ((2, 4),))


@pytest.mark.parametrize(
    ("details", "size"),
    [({"size": 9, "epochs": 2}, 18), ({"size": 9}, 9), ({"size": 9, "epochs": None}, None), ({}, None)],
)
def test_what_is_left_follows_from_what_the_source_says(details, size):
    (place,) = frontier(log(ev.SourceOpened("list", "ListSource", details), submit(3, "math")))

    assert (place.dataset, place.size, place.left) == ("", size, None if size is None else size - 4)


def test_a_mixed_source_counts_per_dataset_and_a_source_before_it_does_not():
    mixed = ev.SourceOpened("mixed", "MixedSource", {"a": {"size": 5}, "b": {}})
    places = frontier(log(submit(0, name="old"), mixed, submit(0, "a"), submit(1, "b"), evict("a0")))

    assert [(p.dataset, p.open, p.evicted, p.next, p.left) for p in places] == [
        ("", ((0, 1),), (), 1, None),
        ("a", (), ((0, 1),), 1, 4),
        ("b", ((1, 2),), (), 2, None),
    ]
    assert [p.lowest_open for p in places] == [0, 1, 0]


def test_a_mixed_source_may_have_prompts_of_no_dataset():
    mixed = ev.SourceOpened("list", "MixedSource", {"": {"size": 3}, "a": {"size": 2, "epochs": 2}})
    places = frontier(log(mixed, submit(0), submit(1, "a")))

    assert [(p.dataset, p.left) for p in places] == [("", 2), ("a", 2)]


def test_a_dataset_of_a_source_that_is_gone_has_no_size():
    mixed = ev.SourceOpened("mixed", "MixedSource", {"a": {"size": 2}})
    places = frontier(log(mixed, submit(0, "a"), ev.SourceOpened("list", "ListSource", {"size": 9}), submit(1, "a")))

    assert [(p.dataset, p.next, p.left) for p in places] == [("", 2, 7), ("a", 1, None)]


@virtual
async def test_an_open_run_has_its_frontier_and_keeps_it(loop, tmp_path):
    source = gs.MixedSource({"a": range(4), "b": range(2)})
    async with opened(loop, tmp_path / "run", source=source, session=half_right, group_size=2) as run:
        await run.commit(await run.sample(2))
        first = run.frontier()
        await run.commit(await run.sample(2))
        last = run.frontier()

        assert first != last == frontier(run.ledger.log.read())
        assert [place.committed for place in last] == [((0, 2),), ((0, 2),)]

    shown = CliRunner().invoke(main, ["show", str(tmp_path / "run"), "--frontier"])
    assert shown.output.splitlines()[:6] == [
        "# frontier\tdataset\twhat\tpositions",
        "frontier\ta\tcommitted\t0-1",
        "frontier\ta\topen\tnone" if not last[0].open else "frontier\ta\topen\t2",
        "frontier\ta\tevicted\tnone",
        f"frontier\ta\tnot yet drawn\tfrom {last[0].next} on, {last[0].left} left",
        "frontier\ta\tlowest not resolved\t2",
    ]
    as_json = CliRunner().invoke(main, ["show", str(tmp_path / "run"), "--frontier", "--at", "1", "--json"])
    assert json.loads(as_json.output) == []


@pytest.mark.parametrize("around", [[], [2], [9], [2, 9], [0], [20], [0, 2, 9, 20]])
def test_a_range_is_added_like_its_numbers(around: list[int]) -> None:
    one, other = Positions(), Positions()
    for number in around:
        one.add(number)
        other.add(number)
    one.add_range(3, 9)
    for number in range(3, 9):
        other.add(number)

    assert one.ranges() == other.ranges()
