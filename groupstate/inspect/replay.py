"""The book that a run had at an event, and the events between two places."""

from collections.abc import Iterable, Iterator

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.errors import BadInput, GroupstateError, LogError, UnsupportedLog


def applied(book: Book, record: Record) -> Book:
    """The book after one more record.

    Raises:
        LogError: the record can't follow what came before, so the log isn't one that a run wrote.
        UnsupportedLog: it says what this version doesn't know.
    """
    try:
        book.apply(record)
    except UnsupportedLog:
        raise
    except (GroupstateError, AssertionError, LookupError, ValueError) as error:
        why = str(error) or type(error).__name__
        kind = type(record.event).__name__
        raise LogError(
            f"event {record.seq} ({kind}) can't follow what the log says before it: {why}. "
            "`groupstate check` lists everything that is wrong with a log"
            + (f", `groupstate show RUN --at {record.seq - 1}` how it stood before" if record.seq > 1 else "")
        ) from error
    book.released.clear()
    return book


def books(records: Iterable[Record], base: Book | None = None) -> Iterator[tuple[Record, Book]]:
    """Each record with the book after it. It is one book, changed on the way: look, and go on.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        LogError: see `applied`.
    """
    book = Book() if base is None else base
    for record in records:
        yield record, applied(book, record)


def book_at(records: Iterable[Record], seq: int | None = None, base: Book | None = None) -> Book:
    """The book after event `seq`; None for the end.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        BadInput: the log has no such event.
        LogError: see `applied`.
    """
    book = Book() if base is None else base
    for record in records:
        if seq is not None and record.seq > seq:
            break
        applied(book, record)
    if seq is not None and not 1 <= seq <= book.last_seq:
        raise BadInput(f"there is no event {seq}: the log has events 1 to {book.last_seq}")
    return book


def between(records: Iterable[Record], first: int = 1, last: int | None = None) -> Iterator[Record]:
    """Events `first` to `last`, both included; None for the end."""
    for record in records:
        if last is not None and record.seq > last:
            return
        if record.seq >= first:
            yield record
