"""Tasks that wait until a number is reached, woken from whichever thread reaches it.

Rule 1: every waiter has a future of its own: cancelling one task must not cancel another's wait.
Rule 2: a future only wakes; the waiter then looks for itself what has happened.
Rule 3: a line belongs to one event loop and changes in that loop's thread only, so it needs no lock. The thread that
reaches a number looks whether somebody is due, and leaves the waking to the loop.
"""

import asyncio
import heapq
import itertools
from asyncio import get_running_loop
from collections import deque

FAR = 1 << 40
"""No log has so many events: who waits for such a number waits for the end, and nobody queues up behind."""


class _Line:
    """Those who wait in one event loop, by the number that they wait for."""

    def __init__(self) -> None:
        self.in_order: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Those that came in the order of their numbers, as nearly all do."""
        self._others: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap; of equal numbers the first that came is the first."""
        self._arrivals = itertools.count()

    def add_other(self, number: float, future: asyncio.Future[None]) -> None:
        heapq.heappush(self._others, (number, next(self._arrivals), future))

    def is_due(self, number: float) -> bool:
        """Whether somebody waits for `number` or less. Any thread may ask."""
        for waiters in (self.in_order, self._others):
            try:
                if waiters and waiters[0][0] <= number:
                    return True
            except IndexError:
                pass  # nobody any more
        return False

    def wake(self, number: float) -> None:
        others = self._others
        while others and others[0][0] <= number:
            before, _, future = heapq.heappop(others)
            self._wake_in_order(before)
            if not future.done():
                future.set_result(None)
        self._wake_in_order(number)

    def _wake_in_order(self, number: float) -> None:
        in_order = self.in_order
        while in_order and in_order[0][0] <= number:
            future = in_order.popleft()[1]
            if not future.done():
                future.set_result(None)


class Waiters:
    """Futures ordered by the number they wait for."""

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    def add(self, number: float) -> asyncio.Future[None]:
        """A future that is done once `wake` was called with `number` or more. Call it in the waiting task."""
        loop = get_running_loop()
        line = self._lines.get(loop) or self._new_line(loop)
        future: asyncio.Future[None] = loop.create_future()
        in_order = line.in_order
        if (not in_order or in_order[-1][0] <= number) and number < FAR:
            in_order.append((number, future))
        else:
            line.add_other(number, future)
        return future

    def _new_line(self, loop: asyncio.AbstractEventLoop) -> _Line:
        for closed in [other for other in list(self._lines) if other.is_closed()]:
            self._lines.pop(closed, None)
        return self._lines.setdefault(loop, _Line())

    def wake(self, number: float) -> None:
        """Wake all that wait for `number` or less. Any thread may call it."""
        for loop, line in list(self._lines.items()):
            if line.is_due(number):
                try:
                    loop.call_soon_threadsafe(line.wake, number)
                except RuntimeError:
                    pass  # that loop is closed, and its tasks with it
