"""Going to a place in a log."""

from pathlib import Path

import pytest

from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.errors import BadInput, LogError
from groupstate.inspect.replay import between, book_at, books
from groupstate.log.reading import read_log


def test_the_book_at_an_event_is_that_of_the_log_up_to_it(driven: Path) -> None:
    records = list(read_log(driven))

    assert book_at(records, 20).digest() == replayed(records[:20]).digest()
    assert book_at(records).digest() == replayed(records).digest()
    assert [(record.seq, book.last_seq) for record, book in books(records)] == [(r.seq, r.seq) for r in records]


def test_an_event_that_is_not_there_is_refused(driven: Path) -> None:
    records = list(read_log(driven))

    with pytest.raises(BadInput, match=f"there is no event 9999: the log has events 1 to {len(records)}"):
        book_at(records, 9999)


def test_the_records_between_two_events(driven: Path) -> None:
    records = list(read_log(driven))

    assert [record.seq for record in between(records, 5, 8)] == [5, 6, 7, 8]
    assert list(between(records, 3)) == records[2:]


@pytest.mark.parametrize(
    "event", [ev.GroupFinished("x"), ev.BatchRequestCancelled(1), ev.BatchRequested(2, "train", 1, 0)]
)
def test_a_log_that_no_run_wrote_says_where_it_goes_wrong(event: ev.AnyEvent) -> None:
    records = [ev.Record(1, 0, ev.RunStarted("r", {}, 1, 0)), ev.Record(2, 0, event)]

    with pytest.raises(LogError, match=f"event 2 \\({type(event).__name__}\\) can't follow .* `groupstate check`"):
        book_at(records)
