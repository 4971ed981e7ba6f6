"""The snapshot nearest before something happened, so that no more of a long log is replayed than what follows it.

Rule: who asks for something that, once it has happened, shows in every later book.
"""

import os
from bisect import bisect_left
from collections.abc import Callable

from groupstate.core.book import Book
from groupstate.log.disk import OsDisk
from groupstate.log.reading import read_book
from groupstate.log.rundir import RunDir
from groupstate.log.snapshots import list_snapshots


def book_before(path: str | os.PathLike[str], has_happened: Callable[[Book], bool]) -> Book | None:
    """The book of the last snapshot before that; None where there is none."""

    def shows(seq: int) -> bool:
        book = read_book(path, seq)
        return book is not None and has_happened(book)

    seqs = list_snapshots(OsDisk(), RunDir.at(path))
    before = bisect_left(seqs, True, key=shows)
    return read_book(path, seqs[before - 1]) if before else None
