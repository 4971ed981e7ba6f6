"""Where all groups are after each event, folded into one number: two that follow a log in different processes compare
it at the end, instead of each other's counts on the way.
"""

import functools
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Final

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase

Place = tuple[ev.Partition, Phase]

LEFT: Final = frozenset({Phase.EVICTED, Phase.COMMITTED})
"""Phases of groups that a book holds no longer; they are in the totals."""

BASE: Final = 1_000_003
PRIME: Final = 2**61 - 1


class Standing:
    def __init__(self) -> None:
        self.number = 0
        """A polynomial of all that was folded in, in its order, modulo a prime: equal for equal counts, and for others
        with a chance of one in 2**61 or so."""

    def add_group(self, seq: int, phase: Phase) -> None:
        """Fold in the phase to which event `seq` brought the group that it is about."""
        self._fold(8 * seq + _NUMBERS[phase])

    def add(
        self,
        seq: int,
        places: Iterable[tuple[Place, int]],
        totals: Iterable[int],
        window: Counter[str] | None = None,
    ) -> None:
        """Fold in all counts after event `seq`.

        Args:
            places: groups by partition and phase, in any order; zeros may be left out.
            window: what the metrics of the batch that it samples are made of; zeros may be left out.
        """
        self._fold(seq)
        self._fold(sum(count * _weight(place) for place, count in places))
        for total in totals:
            self._fold(total)
        if window is not None:
            self._fold(zlib.crc32(repr(sorted((+window).items())).encode()))

    def _fold(self, value: int) -> None:
        self.number = (self.number * BASE + value) % PRIME


def totals_of(book: Book) -> tuple[int, ...]:
    """Groups submitted, evicted, committed and held, and the refills owed."""
    totals = book.totals
    return (totals["submitted"], totals["evicted"], totals["committed"], len(book.groups), len(book.credits))


_NUMBERS: Final = {phase: number for number, phase in enumerate(Phase)}


@functools.cache
def _weight(place: Place) -> int:
    partition, phase = place
    return 0 if phase in LEFT else zlib.crc32(f"{partition}/{phase}".encode())
