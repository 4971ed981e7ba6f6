"""Tasks that wait until a number is reached, woken from whichever thread reaches it.

Rule 1: every waiter has a future of its own: cancelling one task must not cancel another's wait.
Rule 2: a future only wakes; the waiter then looks for itself what has happened.
"""

import asyncio
import heapq
import itertools
import threading


class Waiters:
    """Futures ordered by the number they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._heap: list[tuple[float, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def add(self, number: float) -> asyncio.Future[None]:
        """A future that is done once `wake` was called with `number` or more. Call it in the waiting task."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            heapq.heappush(self._heap, (number, next(self._order), loop, future))
        return future

    def wake(self, number: float) -> None:
        """Wake all that wait for `number` or less. Any thread may call it."""
        due: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with self._lock:
            while self._heap and self._heap[0][0] <= number:
                _, _, loop, future = heapq.heappop(self._heap)
                due.setdefault(loop, []).append(future)
        for loop, futures in due.items():
            try:
                loop.call_soon_threadsafe(_finish, futures)
            except RuntimeError:
                pass  # that loop is closed, and its tasks with it


def _finish(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
