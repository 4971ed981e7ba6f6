"""Which group of the log a uid of TransferQueue is.

A trainer that goes back to a checkpoint dispatches anew what was in flight then, also what has ended in the log since:
that is another group there, `<uid>+2`, then `+3`.

Rule: which one it is can be told from the log and a listing alone, so that a process that goes on finds it again.
"""

from groupstate.core.book import Book
from groupstate.logs import Logger

log = Logger("groupstate.verl")


class Lives:
    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """By uid, where it isn't the uid."""
        self._uids: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def id_of(self, uid: str) -> str:
        """The group of the log that is listed now."""
        return self._ids.get(uid, uid)

    def uid_of(self, group_id: str) -> str | None:
        """What a group is listed as; None for one in whose place another one is."""
        uid = self._uids.get(group_id, group_id)
        return uid if self.id_of(uid) == group_id else None

    def before(self, uid: str) -> str | None:
        """The group that it was before this process found it dispatched anew; None if it didn't."""
        return self._before.get(uid)

    @staticmethod
    def latest(book: Book, uid: str) -> str:
        """The last group that a uid was in a log."""
        number, found = 1, uid
        while book.is_taken(f"{uid}+{number + 1}") is not None:
            number += 1
            found = f"{uid}+{number}"
        return found

    def find(self, book: Book, uid: str, *, in_flight: bool) -> None:
        """Find out which group a uid is, at the first look: the last that it was, or the next where that has ended and
        it is listed as in flight."""
        latest = self.latest(book, uid)
        group = book.groups.get(latest)
        ended = book.is_taken(latest) is not None if group is None else not group.in_flight
        if in_flight and ended:
            number = int(latest.removeprefix(uid).lstrip("+") or 1) + 1
            before, latest = latest, f"{uid}+{number}"
            text = "the log has what comes of it as another group"
            log.warning("a prompt that has ended was dispatched anew", group=before, other=latest, consequence=text)
            self._before[uid] = before
        if latest != uid:
            self._ids[uid], self._uids[latest] = latest, uid
