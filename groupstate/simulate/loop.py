"""An event loop whose clock jumps: hours of waiting take no time, and a deadlock is an error at once.

It knows no threads: a call into a worker thread looks like a deadlock. Runs on it use a memory log, or a
file log that is inline or written by the loop's own timers (`later=`).
"""

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

import msgspec

from groupstate.errors import GroupstateError
from groupstate.simulate.blocked import blocked_tasks

T = TypeVar("T")

EPOCH_NS = 1_700_000_000_000_000_000
"""Where the virtual wall clock starts, nanoseconds."""

RESOLUTION_S = 1e-9

WAIT_MAX_S = 86_400.0
"""The furthest jump."""


class Deadlock(GroupstateError):
    """Every task is blocked and no timer is pending, or there are only timers, without an end.

    Its notes say where the tasks wait.
    """


TIMERS_CANCELLED_MAX = 100
"""Cancelled timers that are kept until their time comes; once there are more, and more than of the others, they go."""

JUMPS_UNHEARD = 64
"""Jumps after which the loop listens to its own pipe, through which it hears of signals: a call of the system costs
more than a jump."""


class _Handle(msgspec.Struct, eq=False):
    """A callback for the next round, or for later: what asyncio's own two do, made in one step."""

    _callback: Callable[..., Any] | None
    _args: tuple[Any, ...] | None
    _context: contextvars.Context
    _loop: "VirtualLoop"
    _when: float = 0.0
    _scheduled: bool = False
    """It is a timer that isn't due yet."""
    _cancelled: bool = False

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None
            if self._scheduled:
                self._loop._cancelled_count += 1

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        """When a timer is due, on the loop's clock."""
        return self._when


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer once every task is blocked."""

    def __init__(self, now_s: float = 0.0, *, until_s: float = math.inf) -> None:
        """
        Args:
            now_s: where the clock begins.
            until_s: what takes longer has no end: `Deadlock`.
        """
        self.now_s = now_s
        self.until_s = until_s
        self.explainers: list[Callable[[], str]] = []
        """Say of a deadlock what is waited for."""
        self._resolution_s = RESOLUTION_S
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, _Handle]] = []
        """A heap. Of those that are due at the same time the first that was set comes first, so that a run can be
        repeated."""
        self._cancelled_count = 0
        """Timers in there that were cancelled."""
        self._jump_count = 0
        self._clock: tuple[float, int] = (now_s, EPOCH_NS + round(now_s * 1e9))
        selector = selectors.SelectSelector()
        self._heard: dict[int, selectors.SelectorKey] = selector._fd_to_key  # type: ignore[attr-defined]
        """Who may be heard: the loop itself, and files and sockets of others, which are rare. The selector's own
        dictionary, since its mapping of it is slow to say how many they are."""
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._closed or self._debug:
            return super().call_soon(callback, *args, context=context)
        handle = _Handle(callback, args, copy_context() if context is None else context, self)
        self._ready.append(handle)
        return handle  # type: ignore[return-value]

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._thread_id != threading.get_ident():
            return super().call_soon_threadsafe(callback, *args, context=context)
        # In its own thread the loop need not be woken, which takes two calls of the system.
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            self._check_closed()
        timer = _Handle(callback, args, copy_context() if context is None else context, self, when, True)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer  # type: ignore[return-value]

    _check_closed: Callable[[], None]
    _closed: bool
    _debug: bool
    _ready: deque[Any]
    """What runs in this round, or the next."""
    _stopping: bool
    _thread_id: int | None
    _selector: selectors.BaseSelector
    _process_events: Callable[[list[tuple[selectors.SelectorKey, int]]], None]

    def clock_ns(self) -> int:
        """A wall clock that goes with the loop's."""
        now_s, ns = self._clock
        if now_s != self.now_s:
            ns = EPOCH_NS + round(self.now_s * 1e9)
            self._clock = (self.now_s, ns)
        return ns

    def close(self) -> None:
        super().close()
        self._timers.clear()

    # What asyncio's loop does, on this clock --------------------------------------------------------------

    def _run_once(self) -> None:
        """Rounds of what is due, with a jump of the clock where nothing is, until the loop is stopped."""
        ready, timers, heard = self._ready, self._timers, self._heard
        while True:
            if self._cancelled_count:
                self._sweep()
            if len(heard) > 1:
                self._listen()
            if not ready and not self._stopping:
                self._jump()
            due_s = self.now_s + self._resolution_s
            while timers and timers[0][0] < due_s:
                timer = heapq.heappop(timers)[2]
                timer._scheduled = False
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._failed(handle, error)
            if self._stopping:
                return

    def _failed(self, handle: asyncio.Handle, error: BaseException) -> None:
        """A callback raised, which is nobody's but the loop's to hear."""
        self.call_exception_handler(
            {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        )

    def _sweep(self) -> None:
        """Take out timers that were cancelled: those that come first, and all once they are many."""
        timers = self._timers
        if self._cancelled_count > TIMERS_CANCELLED_MAX and 2 * self._cancelled_count > len(timers):
            timers[:] = [entry for entry in timers if not entry[2]._cancelled]
            heapq.heapify(timers)
            self._cancelled_count = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._cancelled_count -= 1

    def _listen(self) -> None:
        self._process_events(self._selector.select(0))

    def _deadlock(self, text: str) -> Deadlock:
        """With who waits where, and what the runs say of it, as notes."""
        error = Deadlock(text)
        for note in (*blocked_tasks(self), *(explain() for explain in self.explainers)):
            error.add_note(note)
        return error

    def _jump(self) -> None:
        """
        Raises:
            Deadlock: there is nothing to jump to.
        """
        self._jump_count += 1
        if not self._timers or self._jump_count % JUMPS_UNHEARD == 0:
            self._listen()
            if self._ready:
                return
        if not self._timers:
            raise self._deadlock("every task is blocked and no timer is pending")
        if self.now_s > self.until_s:
            raise self._deadlock(f"the clock is past {self.until_s:g} s, and there is no end")
        wait_s = self._timers[0][0] - self.now_s
        if wait_s > 0.0:
            self.now_s += wait_s if wait_s < WAIT_MAX_S else WAIT_MAX_S
            # The timers that lie before now + resolution run. Far out a float has no number between the two.
            self._resolution_s = max(RESOLUTION_S, math.ulp(self.now_s))


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` on a new virtual loop.

    Raises:
        Deadlock: everybody waits for something that can't come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
