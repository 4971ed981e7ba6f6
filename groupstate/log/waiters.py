"""Tasks that wait until a number is reached, woken from whichever thread reaches it.

Rule 1: every waiter has a future of its own: cancelling one task must not cancel another's wait.
Rule 2: a future only wakes; the waiter then looks for itself what has happened.
"""

import asyncio
import heapq
import itertools
import threading
from collections import defaultdict, deque
from operator import itemgetter
from typing import TypeAlias

_Waiter: TypeAlias = tuple[float, int, asyncio.AbstractEventLoop, asyncio.Future[None]]
"""Number, order of arrival, and whom to wake."""


class Waiters:
    """Futures ordered by the number they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._line: deque[_Waiter] = deque()
        """Those that came in the order of their numbers, as nearly all do."""
        self._heap: list[_Waiter] = []
        """The others."""

    def add(self, number: float) -> asyncio.Future[None]:
        """A future that is done once `wake` was called with `number` or more. Call it in the waiting task."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            waiter = (number, next(self._order), loop, future)
            if not self._line or self._line[-1][0] <= number:
                self._line.append(waiter)
            else:
                heapq.heappush(self._heap, waiter)
        return future

    def wake(self, number: float) -> None:
        """Wake all that wait for `number` or less. Any thread may call it."""
        woken: list[_Waiter] = []
        with self._lock:
            while self._heap and self._heap[0][0] <= number:
                woken.append(heapq.heappop(self._heap))
            in_order = not woken
            while self._line and self._line[0][0] <= number:
                woken.append(self._line.popleft())
        if not in_order:
            woken.sort(key=itemgetter(0, 1))
        due: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
        for _, _, loop, future in woken:
            due[loop].append(future)
        for loop, futures in due.items():
            try:
                loop.call_soon_threadsafe(_finish, futures)
            except RuntimeError:
                pass  # that loop is closed, and its tasks with it


def _finish(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
