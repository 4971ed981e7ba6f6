"""Replays: many events into a book, sooner than one by one.

Most events of a log are about sessions of groups that run. Each makes a new `Group` of a book, since whoever drives a
run looks at it after every event. In a replay nobody does: here such a group is changed in a working copy, and the book
has it again when something else happens to it, or at the end (`settle`).

Rule: what is left behind, and what is raised at which event, is what `Book.apply` would leave and raise.
"""

from collections.abc import Iterable
from typing import Any, Final

from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.book_changes import count_finished
from groupstate.core.group import Group, Session, finished, shares_ranges, started, widen
from groupstate.core.phases import Phase


class Working:
    """A running group, changed in place."""

    __slots__ = ("at_ns", "finished", "group", "ranges", "seq", "sessions")

    def __init__(self, group: Group) -> None:
        self.group = group
        """As the book has it."""
        self.sessions: list[Session] = list(group.sessions)
        self.ranges = dict(group.session_ranges)
        self.finished = 0
        """Sessions that have finished since, with one trajectory each."""
        self.seq = self.at_ns = 0

    def start(self, event: ev.SessionStarted, seq: int, at_ns: int) -> bool:
        """Take the event in; False where it can't happen."""
        sessions, number = self.sessions, event.session
        if not 0 <= number < len(sessions):
            return False
        session = sessions[number]
        if session.state != "waiting" or session.attempt != event.attempt:
            return False
        sessions[number] = started(session, event, seq, at_ns)
        return True

    def finish(self, event: ev.SessionFinished, seq: int, at_ns: int) -> bool:
        """The same, and False for a session that doesn't have one trajectory."""
        sessions, number, rows = self.sessions, event.session, event.trajectories
        if not 0 <= number < len(sessions) or len(rows) != 1:
            return False
        session = sessions[number]
        if session.state != "open" or session.attempt != event.attempt:
            return False
        sessions[number] = finished(session, event, seq, at_ns)
        widen(self.ranges, rows[0].metrics)
        self.finished += 1
        return True

    def settled(self) -> Group:
        group, finished = self.group, self.finished
        return replace(
            group,
            kept=tuple(self.sessions),
            settled_count=group.settled_count + finished,
            finished_count=group.finished_count + finished,
            trajectory_count=group.trajectory_count + finished,
            session_ranges=self.ranges,
            trajectory_ranges=self.ranges,
            last_seq=self.seq,
            last_at_ns=self.at_ns,
        )


class Replay:
    """Applies the records of a log to a book, which must not be changed by others meanwhile."""

    def __init__(self, book: Book) -> None:
        self.book = book
        """Its groups and its totals of sessions are right after `settle`, all else at any time."""
        self._working: dict[str, Working] = {}
        self._finished = self._tokens = 0
        """Sessions that have finished and their tokens, not in the book's totals yet."""

    def apply(self, record: ev.Record) -> None:
        """Take one event in.

        Raises:
            GroupstateError: the event can't happen now; nothing has changed, and the book is settled.
        """
        event: Any = record.event
        kind = type(event)
        if kind is _FINISHED or kind is _STARTED:
            seq, at_ns, book = record.seq, record.at_ns, self.book
            working = self._working.get(event.group_id) or self._taken(event.group_id)
            if working is None or seq != book.last_seq + 1:
                pass
            elif kind is _STARTED:
                if working.start(event, seq, at_ns):
                    working.seq = book.last_seq = seq
                    working.at_ns = book.last_at_ns = at_ns
                    return
            elif working.finish(event, seq, at_ns):
                self._finished += 1
                self._tokens += event.trajectories[0].response_tokens
                working.seq = book.last_seq = seq
                working.at_ns = book.last_at_ns = at_ns
                return
        if self._working:
            self._settle_for(event)
        try:
            self.book.apply(record)
        except BaseException:
            self.settle()
            raise

    def settle(self) -> Book:
        """Bring the book's groups to where the events led them."""
        for working in self._working.values():
            self._give_back(working)
        self._working.clear()
        if self._finished:
            count_finished(self.book, self._finished, self._tokens)
            self._finished = self._tokens = 0
        return self.book

    def _taken(self, group_id: str) -> Working | None:
        """A working copy of the group, where its sessions' events can be folded into one."""
        group = self.book.groups.get(group_id)
        if group is None or group.phase is not _RUNNING or not shares_ranges(group):
            return None
        working = self._working[group_id] = Working(group)
        return working

    def _settle_for(self, event: ev.AnyEvent) -> None:
        """Bring back what the event may be about. All but two are about one group, or about ended ones and the run."""
        group_id = getattr(event, "group_id", None)
        if group_id is not None:
            working = self._working.pop(group_id, None)
            if working is not None:
                self._give_back(working)
        elif type(event) in _ABOUT_ALL:
            self.settle()

    def _give_back(self, working: Working) -> None:
        if working.seq:
            self.book.groups[working.group.group_id] = working.settled()


_STARTED, _FINISHED, _RUNNING = ev.SessionStarted, ev.SessionFinished, Phase.RUNNING
"""Looked up once, not for each event."""

_ABOUT_ALL: Final = frozenset({ev.RunRecovered, ev.RunRewound})


def replayed(records: Iterable[ev.Record]) -> Book:
    """The book that a log leads to."""
    replay = Replay(Book())
    replay.book.notes_released = False
    apply = replay.apply
    for record in records:
        apply(record)
    replay.book.notes_released = True
    return replay.settle()
