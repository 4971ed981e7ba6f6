"""Ends what takes longer than the rules allow: attempts of sessions, and whole groups.

Rule 1: time is the event loop's, which never jumps; the wall clock of the records decides nothing.
Rule 2: an expiry is an event like any other end, so a replay needs no clock.
Rule 3: attempts that a rollout runs are timed by the rollout, which sees its task to the end first.
"""

import heapq
import itertools
from collections.abc import Callable

import anyio
import attrs

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.errors import LogFailed
from groupstate.logs import Logger
from groupstate.runtime.controller import Controller, Signal
from groupstate.runtime.ledger import Ending

log = Logger("groupstate.deadlines")

SWEEP_AT = 1_000

GROUP = -1
"""In place of a session's number: the deadline is the group's."""


@attrs.frozen(order=True)
class Deadline:
    at_s: float
    number: int
    group_id: str
    session: int
    attempt: int
    """Of the session; for a group how often it was requeued."""


class Deadlines:
    def __init__(
        self,
        controller: Controller,
        *,
        now: Callable[[], float],
        runs_here: Callable[[str], bool] = lambda group_id: False,
    ) -> None:
        """
        Args:
            now: the clock, in seconds.
            runs_here: whether a rollout runs the sessions of a group, and so times their attempts.
        """
        self._controller = controller
        self._ledger = controller.ledger
        self._book = controller.book
        self._session_s = controller.rules.session_deadline_s
        self._group_s = controller.rules.group_deadline_s
        self._now = now
        self._runs_here = runs_here
        self._heap: list[Deadline] = []
        self._sweep_at = SWEEP_AT
        """Length of the heap at which those of ended groups are thrown out."""
        self._numbers = itertools.count()
        self._sooner = Signal()
        if self._session_s is not None:
            self._ledger.listen(self._note_start, (ev.SessionStarted,))
        if self._group_s is not None:
            self._ledger.listen(self._note_group, (ev.GroupSubmitted, ev.GroupRequeued))
        for group in self._book.in_phase(Phase.PENDING):
            # Nobody was there to see to it before the run was opened, so its time begins anew.
            self._watch_group(group)

    @property
    def needed(self) -> bool:
        return self._session_s is not None or self._group_s is not None

    @property
    def watched(self) -> int:
        """Deadlines that are kept in mind."""
        return len(self._heap)

    def _note_start(self, record: ev.Record) -> None:
        event = record.event
        assert self._session_s is not None
        assert isinstance(event, ev.SessionStarted)
        if not self._runs_here(event.group_id):
            self._add(self._session_s, event.group_id, event.session, event.attempt)

    def _note_group(self, record: ev.Record) -> None:
        assert isinstance(record.event, ev.GroupSubmitted | ev.GroupRequeued)
        self._watch_group(self._book.groups[record.event.group_id])

    def _watch_group(self, group: Group) -> None:
        if self._group_s is not None:
            self._add(self._group_s, group.group_id, GROUP, group.requeue_count)

    def _add(self, in_s: float, group_id: str, session: int, attempt: int) -> None:
        deadline = Deadline(self._now() + in_s, next(self._numbers), group_id, session, attempt)
        if len(self._heap) >= self._sweep_at:
            self._heap = [known for known in self._heap if self._is_due_yet(known)]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEEP_AT, 2 * len(self._heap))
        heapq.heappush(self._heap, deadline)
        if self._heap[0] is deadline:
            self._sooner.set()

    def _is_due_yet(self, deadline: Deadline) -> bool:
        """Whether what it is for is still under way."""
        group = self._book.groups.get(deadline.group_id)
        if group is None or not group.in_flight:
            return False
        if deadline.session == GROUP:
            return group.requeue_count == deadline.attempt
        session = group.sessions[deadline.session]
        return session.attempt == deadline.attempt and session.state == "open"

    def next_s(self) -> float:
        """Seconds until the next deadline; infinite without one."""
        return self._heap[0].at_s - self._now() if self._heap else float("inf")

    def expire(self) -> None:
        """End what is past its deadline."""
        while self._heap and self._heap[0].at_s <= self._now():
            deadline = heapq.heappop(self._heap)
            group = self._book.groups.get(deadline.group_id)
            if group is not None and group.in_flight and not self._controller.closing:
                if deadline.session == GROUP:
                    self._end_group(group, deadline)
                else:
                    self._end_session(group, deadline)

    def _end_group(self, group: Group, deadline: Deadline) -> None:
        if group.requeue_count != deadline.attempt:
            return
        log.warning("group timed out", group=group.group_id, deadline_s=self._group_s)
        self._controller.end(
            group.group_id, Ending("timeout", f"the group did not end within group_deadline_s {self._group_s:g}")
        )

    def _end_session(self, group: Group, deadline: Deadline) -> None:
        session = group.sessions[deadline.session]
        if session.attempt != deadline.attempt or session.state != "open":
            return
        log.warning(
            "session timed out",
            group=group.group_id,
            session=deadline.session,
            attempt=deadline.attempt,
            deadline_s=self._session_s,
        )
        self._ledger.fail(
            group.group_id, deadline.session, deadline.attempt, "timeout", timed_out(self._session_s), retryable=True
        )

    async def run(self) -> None:
        """Expire until cancelled, or until nothing can be recorded any more."""
        while True:
            try:
                self.expire()
            except LogFailed as error:
                self._controller.die(error)
                return
            with anyio.move_on_after(max(0.0, self.next_s())):
                await self._sooner.wait()


def timed_out(deadline_s: float | None) -> str:
    """The failure's text."""
    return f"no result within session_deadline_s {deadline_s:g}"
