"""The number in which two that follow a log, one by its replay and one by counting, find out whether they agree."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.followed import Followed
from groupstate.core.invariants import UNCOUNTED, Checker
from groupstate.core.phases import Phase
from groupstate.core.standing import BASE, PRIME, Standing, totals_of
from groupstate.testing import play, strategies


def number(*folds: Callable[[Standing], None]) -> int:
    standing = Standing()
    for fold in folds:
        fold(standing)
    return standing.number


def test_it_tells_what_was_folded_in_and_when() -> None:
    places = [(("train", Phase.RUNNING), 2), (("val", Phase.RUNNING), 1)]
    numbers = [
        number(),
        number(lambda s: s.add_group(1, Phase.PENDING)),
        number(lambda s: s.add_group(1, Phase.RUNNING)),
        number(lambda s: s.add_group(2, Phase.PENDING)),
        number(lambda s: s.add(1, places, (3, 0))),
        number(lambda s: s.add(1, places, (0, 3))),
        number(lambda s: s.add(2, places, (3, 0))),
        number(lambda s: s.add(1, [(("train", Phase.RUNNING), 1), (("val", Phase.RUNNING), 2)], (3, 0))),
        number(lambda s: s.add(1, [(("train", Phase.PENDING), 2), (("val", Phase.RUNNING), 1)], (3, 0))),
    ]

    assert len(set(numbers)) == len(numbers)
    assert {type(one) for one in numbers} == {int}
    assert number(lambda s: s.add(1, places[::-1], (3, 0))) == numbers[4]
    assert number(lambda s: s.add(1, [*places, (("train", Phase.COMMITTED), 9)], (3, 0))) == numbers[4]


def test_a_window_is_its_counts_without_zeros() -> None:
    one, other = Counter(submitted=2, refills=0), Counter(submitted=2)

    assert number(lambda s: s.add(5, [], (), one)) == number(lambda s: s.add(5, [], (), other))
    assert number(lambda s: s.add(5, [], (), one)) != number(lambda s: s.add(5, [], (), Counter(submitted=1)))
    assert number(lambda s: s.add(5, [], (), one)) != number(lambda s: s.add(6, [], (), one))
    assert number(lambda s: s.add(5, [], (), one)) != number(lambda s: s.add(5, [], ()))


def test_of_groups_it_is_a_polynomial_of_events_and_phases_in_their_order() -> None:
    moves = [(3, Phase.FINISHED), (7, Phase.EVICTED), (10**6, Phase.PENDING)]
    values = [8 * seq + list(Phase).index(phase) for seq, phase in moves]
    expected = (values[0] * BASE**2 + values[1] * BASE + values[2]) % PRIME

    assert number() == 0
    assert number(*(lambda s, move=move: s.add_group(*move) for move in moves)) == expected


# Of a book and of a checker -------------------------------------------------------------------------------


def of_checker(records: Sequence[ev.Record]) -> list[int]:
    """The number after each event after which it may be another."""
    checker, standing, numbers = Checker(replays=False), Standing(), []
    for record in records:
        checker.take(record)
        if type(record.event) not in UNCOUNTED:
            checker.add_to(standing, record.event)
            numbers.append(standing.number)
    assert checker.found == []
    return numbers


def of_book(records: Sequence[ev.Record]) -> list[int]:
    """The same of their replay."""
    book, numbers = Book(), []
    followed = Followed(book)
    for record in records:
        followed.take(record)
        if type(record.event) not in UNCOUNTED:
            numbers.append(followed.standing.number)
    assert followed.settle().digest() == replayed(records).digest()
    assert book.released == []
    return numbers


@pytest.mark.slow
@given(strategies.logs(moves_max=40))
def test_a_book_and_a_checker_agree_after_every_event_of_a_run(records: list[ev.Record]) -> None:
    assert of_book(records) == of_checker(records)


def test_they_agree_on_a_run_with_all_that_is_counted() -> None:
    story = play(
        "submit a/1", "submit b/1", "submit c/1", "submit v/1 partition=val", "start a", "finish a reward=1",
        "start b", "fail b", "evict b failed credit=1", "start c", "fail c", "evict c failed credit=1",
        "submit d/1 cause=refill", "forfeit 1", "start v", "finish v", "sample 1", "publish 1",
        "sample 1 partition=val", "commit 1", "release 2",
    )  # fmt: skip
    records = list(story.log.read())

    assert totals_of(story.book) == (5, 2, 1, 2, 0)
    assert of_book(records) == of_checker(records)
    assert len(set(of_book(records))) == len(of_book(records))
