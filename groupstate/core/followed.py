"""A replay that folds where all groups are after each event into a number, to be held against a `Checker`'s own.

Rule: the checker counts the same log by itself (`Checker.add_to`), in whatever process and at whatever time; neither
looks at the other's counts.
"""

from typing import Any

from groupstate.core import events as ev
from groupstate.core.batch_invariants import flat
from groupstate.core.book import Book
from groupstate.core.folding import Replay
from groupstate.core.invariants import MOVES_ONE, UNCOUNTED
from groupstate.core.phases import Phase
from groupstate.core.standing import Standing, totals_of


class Followed:
    def __init__(self, book: Book) -> None:
        """
        Args:
            book: where the log begins; what it releases isn't noted, since nobody frees it.
        """
        book.notes_released = False
        self._book = book
        self._replay = Replay(book)
        self.standing = Standing()

    def take(self, record: ev.Record) -> None:
        """Apply the next record, and fold in what it led to.

        Raises:
            GroupstateError: the event can't happen now.
        """
        event: Any = record.event
        kind, book = type(event), self._book
        window = flat(book.window(event.partition)) if kind is ev.BatchSampled else None
        self._replay.apply(record)
        if kind in UNCOUNTED:
            return
        if kind in MOVES_ONE:
            self.standing.add_group(record.seq, self._phase(event.group_id))
        else:
            self.standing.add(record.seq, book.places(), totals_of(book), window)

    def _phase(self, group_id: str) -> Phase:
        group = self._book.groups.get(group_id)
        return self._book.departed[group_id] if group is None else group.phase

    def settle(self) -> Book:
        """The book, with all that was taken in it."""
        return self._replay.settle()
