"""An event loop whose clock jumps: hours of waiting take no time, and a deadlock is an error at once.

It knows no threads: a call into a worker thread looks like a deadlock. Runs on it use a memory log or an
inline file log.
"""

import asyncio
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
    """Every task is blocked and no timer is pending."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer once every task is blocked."""

    _clock_resolution: float
    """asyncio's own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s

    def clock_ns(self) -> int:
        """A wall clock that goes with the loop's."""
        return EPOCH_NS + round(self.now_s * 1e9)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise Deadlock("every task is blocked and no timer is pending")
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
