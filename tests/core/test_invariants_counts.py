"""The checker catches books that lose groups or count wrong, logs that can't be replayed, and lags that aren't so."""

import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.invariants import Checker, Violation, violations
from groupstate.core.rules import RULES_VERSION, Rules

from .handmade_logs import (
    Miscounting,
    done,
    evict,
    fail,
    failed,
    log,
    sample,
    sampled,
    start,
    submit,
    want,
    whole,
    wrong,
)

# 3: conservation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        start("x"), fail("x"), done("x"), evict("x"), ev.GroupRequeued("x"),
        ev.ResultFenced("x", 0, 1, "finished", "gone"),
    ],
)  # fmt: skip
def test_an_event_of_a_group_that_was_never_submitted_is_caught(event: ev.AnyEvent) -> None:
    assert wrong(log(event), 3) == ["event 2 names group 'x', which was never submitted"]


def test_a_batch_with_a_group_that_was_never_submitted_is_caught() -> None:
    records = log(whole("a"), sample(1, "a", "x"), ev.BatchReturned(1), sample(2, "a"))

    assert wrong(records, 3) == ["event 7 names group 'x', which was never submitted"]


def test_a_group_submitted_twice_is_caught() -> None:
    assert wrong(log(submit("a"), submit("a")), 3) == ["group 'a' is submitted again; the first time was event 2"]


@pytest.mark.parametrize(
    ("fault", "invariant", "text"),
    [
        ("phase", 3, "the book holds 0 running groups of 'train', the events make it 1"),
        ("total", 3, "the book counts 2 submitted groups, the events make it 1"),
        ("phantom", 3, "the book holds 2 groups, the events make it 1"),
        ("evicted", 3, "the book counts 0 evicted groups, the events make it 1"),
        ("committed", 3, "the book counts 2 committed groups, the events make it 0"),
        ("credits", 5, "the book owes 0 refills, the events make it 1"),
        ("window", 11, "the metrics of this batch count 1 evicted/stale, the log holds 0"),
        ("lag", 11, "the metrics of this batch count 1 evicted/stale with lag 3, the log holds 0"),
        ("filtered", 11, "the metrics of this batch count 1 evicted/zero_variance at 0.5, the log holds 0"),
    ],
)
def test_a_book_that_counts_wrong_is_caught(fault: str, invariant: int, text: str) -> None:
    checker = Checker(Miscounting(fault))
    for record in log(failed("a"), evict("a", credit=1), whole("b"), sample(1, "b"), whole("c"), sample(2, "c")):
        checker.feed(record)

    assert [(found.invariant, found.text) for found in checker.finish()] == [(invariant, text)]


@pytest.mark.parametrize("fault", ["phase", "total", "phantom", "evicted", "committed", "credits"])
def test_a_book_that_others_drive_is_held_against_the_counts(fault: str) -> None:
    book, checker = Miscounting(fault), Checker(replays=False)
    found: list[Violation] = []
    for record in log(failed("a"), evict("a", credit=1), whole("b")):
        assert checker.feed(record) == []
        book.apply(record)
        found = checker.compare(book)
        if found:
            break

    assert len(found) == 1
    assert found[0].text.startswith("the book ")


def test_a_book_that_others_drive_is_right() -> None:
    book, checker = Book(), Checker(replays=False)
    for record in log(failed("a"), evict("a", credit=1), whole("b"), sample(1, "b"), whole("c"), sample(2, "c")):
        checker.feed(record)
        book.apply(record)

        assert checker.compare(book) == []


def test_feeding_gives_only_what_the_record_makes_wrong() -> None:
    checker = Checker()
    counts = [len(checker.feed(record)) for record in log(failed("a"), evict("a", lag=3), submit("b"))]

    assert counts == [0, 0, 0, 0, 0, 1, 0]


class Losing(Book):
    """A book that loses a group when weights are published."""

    def apply(self, record: ev.Record) -> None:
        super().apply(record)
        if isinstance(record.event, ev.WeightsPublished):
            group = self.groups.pop("a")
            self.shelves[group.partition].remove(group)


@pytest.mark.parametrize(("before", "val"), [([], False), ([*failed("b"), evict("b")], True)], ids=["train", "val"])
def test_a_group_that_is_lost_at_an_event_of_no_group_is_caught_there(before: list[ev.AnyEvent], val: bool) -> None:
    checker = Checker(Losing())
    for record in log(before, submit("a", val=val), ev.WeightsPublished(1)):
        checker.feed(record)

    partition = ev.VALIDATION if val else ev.TRAIN
    assert [(found.seq, found.text) for found in checker.finish()] == [
        (len(before) + 3, f"the book holds 0 pending groups of {partition!r}, the events make it 1")
    ]


def test_a_checker_without_a_book_replays_nothing() -> None:
    checker = Checker(replays=False)
    for record in log(whole("a"), done("a")):
        checker.feed(record)

    assert [found.invariant for found in checker.finish()] == [2]


def test_a_log_without_a_beginning_is_followed_under_the_rules_by_default_and_from_version_0() -> None:
    records = [ev.Record(seq, seq, event) for seq, event in enumerate([*whole("a"), *sample(1, "a")], 1)]

    assert [found.invariant for found in violations(records)] == [9]


def test_a_comparison_gives_only_what_it_found_itself() -> None:
    book, checker = Book(), Checker(replays=False)
    for record in log(failed("a"), evict("a", lag=3)):
        checker.feed(record)
        book.apply(record)

    assert [found.invariant for found in checker.found] == [11]
    assert checker.compare(book) == []


def test_lags_and_filtered_values_are_counted_by_both_sides_alike() -> None:
    stale = ev.GroupEvicted("a", ("stale", "zero_variance"), 2, 0, -0.0, "acc")
    flat = ev.GroupEvicted("b", ("zero_variance",), 2, 0, 0.0, "acc")
    records = log(
        whole("a"), whole("b"), whole("c"), ev.WeightsPublished(2), stale, flat, want(), sampled(1, "c", lags=(2,)),
        rules=Rules(lag_max=1, filter_metric="acc"),
    )  # fmt: skip

    assert wrong(records, 11) == []


# 9: replay -----------------------------------------------------------------------------------------------


def test_a_session_that_the_group_does_not_have_stops_the_replay() -> None:
    records = log(submit("a"), ev.SessionStarted("a", 7, 1), ev.SessionFailed("a", -1, 1, "error"))

    assert wrong(records, 9) == ["a replay stops here: group 'a' has sessions 0 to 0, so there is no session 7"]


def test_a_fault_without_a_text_is_named_by_its_kind() -> None:
    records = log(whole("a"), sampled(1, "a"))

    assert wrong(records, 9) == ["a replay stops here: AssertionError"]


def test_a_gap_is_caught() -> None:
    records = log(submit("a"), submit("b"), start("a"))

    assert wrong(records[:2] + records[3:], 9) == [
        "event 4 comes after event 2, so what lies between can't be replayed"
    ]


def test_run_started_is_the_first_event_and_no_other() -> None:
    started = log()[0].event

    assert "RunStarted is the first event" in wrong([ev.Record(1, 0, submit("a"))], 9)[0]
    assert "event 2 is RunStarted" in wrong(log(started), 9)[0]


def test_rules_that_cannot_be_read_are_named() -> None:
    records = [ev.Record(1, 0, ev.RunStarted("r", {"lag_maxx": 1}, RULES_VERSION, 0))]

    assert "did you mean 'lag_max'?" in wrong(records, 9)[0]


# 11: numbers ---------------------------------------------------------------------------------------------


def test_a_lag_that_is_not_what_the_versions_say_is_caught() -> None:
    evicted = log(failed("a"), evict("a", lag=3))

    assert wrong(evicted, 11) == ["group 'a' is evicted with lag 3, and its lag is 0"]
    assert wrong(log(whole("a"), sample(1, "a", lags=(3,))), 11) == [
        "batch 1 gives group 'a' with lag 3, and its lag is 0"
    ]


def test_a_lag_is_given_for_each_group() -> None:
    records = log(whole("a"), whole("b"), want(), sampled(1, "a", "b", lags=(0,)), want(2), sampled(2, "b"))

    assert wrong(records, 11) == ["batch 1 has 2 groups and 1 lags"]
