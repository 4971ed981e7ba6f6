"""Validation groups that nobody waits for any more: their sessions are ended, and they leave the book.

Rule 1: they leave by a batch that nobody gets. Evicted they may not be, and no other event takes them out.
Rule 2: nobody else is given them, neither before nor after they have ended.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from groupstate.core import events as ev
from groupstate.errors import LogFailed
from groupstate.runtime.ledger import ABANDONED

if TYPE_CHECKING:
    from groupstate.runtime.controller import Controller


class Abandoned:
    def __init__(self, controller: "Controller") -> None:
        self._controller = controller
        self._book = controller.book
        self.groups: dict[str, None] = {}
        """All of them that are in the book, oldest first."""
        self._ending: set[str] = set()
        """Those that are still in flight."""

    def note(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.GroupFinished | ev.GroupFailed):
            self._ending.discard(event.group_id)
        elif isinstance(event, ev.GroupRequeued) and event.group_id in self.groups:
            self._ending.add(event.group_id)

    def add(self, group_ids: Iterable[str]) -> None:
        """End the sessions of these groups, as far as they are in the book. A broken log changes nothing for the
        caller, who has an error of his own to tell; who waits for the run hears of it."""
        try:
            self._add(group_ids)
        except LogFailed as error:
            self._controller.die(error)

    def _add(self, group_ids: Iterable[str]) -> None:
        groups = [self._book.groups[group_id] for group_id in group_ids if group_id in self._book.groups]
        groups.sort(key=lambda group: group.submitted_seq)
        self.groups.update((group.group_id, None) for group in groups)
        in_flight = [group.group_id for group in groups if group.in_flight]
        self._ending.update(in_flight)
        for group_id in in_flight:
            self._controller.end(group_id, ABANDONED)
        self._controller.settle()

    def clear(self) -> bool:
        """Once all of them have ended, let them leave, all at once."""
        if self._ending or not self.groups:
            return False
        ended = [self._book.groups[group_id] for group_id in self.groups]
        self.groups.clear()
        self._controller.discard(ended)
        return True
