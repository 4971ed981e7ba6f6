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
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from groupstate.errors import GroupstateError

T = TypeVar("T")

EPOCH_NS = 1_700_000_000_000_000_000
"""Where the virtual wall clock starts, nanoseconds."""

RESOLUTION_S = 1e-9


class Deadlock(GroupstateError):
    """Every task is blocked and no timer is pending, or there are only timers, without an end."""


class _Timer(asyncio.TimerHandle):
    """Of those that are due at the same time the first that was set comes first, so that a run can be repeated."""

    __slots__ = ("number",)

    def __lt__(self, other: "_Timer") -> bool:  # type: ignore[override]
        return (self._when, self.number) < (other._when, other.number)

    _when: float
    _scheduled: bool
    number: int


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer once every task is blocked."""

    _clock_resolution: float
    """asyncio's own."""

    def __init__(self, now_s: float = 0.0, *, until_s: float = math.inf) -> None:
        """
        Args:
            now_s: where the clock begins.
            until_s: what takes longer has no end: `Deadlock`.
        """
        self.now_s = now_s
        self.until_s = until_s
        self._numbers = itertools.count()
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    _check_closed: Callable[[], None]
    _scheduled: list[asyncio.TimerHandle]

    def clock_ns(self) -> int:
        """A wall clock that goes with the loop's."""
        return EPOCH_NS + round(self.now_s * 1e9)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 and len(self.get_map()) == 1:
            # Callbacks are due, and nobody but the loop itself could be heard: a call of the system costs more than
            # they do.
            return []
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise Deadlock("every task is blocked and no timer is pending")
        if self._loop.now_s > self._loop.until_s:
            raise Deadlock(f"the clock is past {self._loop.until_s:g} s, and there is no end")
        now_s = self._loop.now_s = self._loop.now_s + max(timeout, 0.0)
        # asyncio runs the timers that lie before now + resolution. Far out a float has no number between the two.
        self._loop._clock_resolution = max(RESOLUTION_S, math.ulp(now_s))
        return []


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` on a new virtual loop.

    Raises:
        Deadlock: everybody waits for something that can't come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
