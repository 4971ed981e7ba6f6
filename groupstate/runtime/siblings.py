"""The sessions of one group: they begin together, and who waits for them waits for all.

Rule 1: none outlives `run`, whoever is cancelled meanwhile.
Rule 2: a cancellation reaches each once, in the order of their numbers.
Rule 3: what one can't go on from ends the others, and is raised once all have ended.

A task group does the same for any tasks; what it needs for that costs more than all else that a session does.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from groupstate.engines.tasks import settled
from groupstate.runtime.session import Encoded, SessionContext


class Sibling(Protocol):
    def begin(self) -> None:
        """It calls `Siblings.over` once, when it has ended: within this call or later."""

    def cancel(self) -> None:
        """End it soon; one that hasn't begun or has ended is left alone."""


class Siblings:
    def __init__(self) -> None:
        self.cancelled = False
        self.endings: list[tuple[SessionContext, object]] = []
        """How cancelled sessions ended that returned something all the same, or ignored it."""
        self.encoded = Encoded()
        self._sessions: list[Sibling] = []
        self._left = 0
        self._ended: asyncio.Future[None]
        self._errors: list[BaseException] = []

    def cancel(self) -> None:
        """End all of them. Who hasn't begun never will."""
        if not self.cancelled:
            self.cancelled = True
            for session in self._sessions:
                session.cancel()

    def over(self, error: BaseException | None = None) -> None:
        """One of them has ended."""
        self._left -= 1
        if error is not None:
            self._errors.append(error)
            self.cancel()
        if not self._left and not self._ended.done():
            self._ended.set_result(None)

    async def run(self, sessions: Iterable[Sibling]) -> None:
        """See them all to their end.

        Raises:
            BaseExceptionGroup: what they can't go on from.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self._sessions = list(sessions)
        self._left = len(self._sessions)
        assert self._sessions, "a group has a session"
        for session in self._sessions:
            if self.cancelled:
                self.over()
            else:
                session.begin()
        try:
            # Not shielded: that would keep everything of the group in a cycle, for the garbage collector to find.
            await self._ended
        except asyncio.CancelledError:
            await self._cancelled_ends()
            raise
        finally:
            # They know of this as well: without it none is freed before the collector comes.
            self._sessions = []
        if self._errors:
            raise BaseExceptionGroup("sessions of a group failed the rollout", self._errors)

    async def _cancelled_ends(self) -> None:
        """End them, and wait for it."""
        if self._left:
            # The other one was cancelled with who waits for it.
            self._ended = asyncio.get_running_loop().create_future()
            self.cancel()
            await settled(self._ended)
