"""The crash of an engine, told to those who wait for it while they ask nothing of the engine.

Rule: a crash may come in any thread, and whoever waits may do so in any event loop.
"""

import asyncio
import threading

import attrs


@attrs.define(eq=False)
class Death:
    """Whether an engine has crashed. It happens once, and stays so."""

    happened: bool = attrs.field(default=False, init=False)
    _waiting: "list[asyncio.Future[None]]" = attrs.field(factory=list, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.happened:
                return
            self._waiting.append(future)
        try:
            await future
        finally:
            with self._lock:
                self._waiting = [other for other in self._waiting if other is not future]

    def happen(self) -> None:
        """Let everybody know, from any thread."""
        with self._lock:
            self.happened = True
            waiting = list(self._waiting)
        for future in waiting:
            try:
                future.get_loop().call_soon_threadsafe(_settle, future)
            except RuntimeError:
                pass  # The loop is closed: nobody waits there any more.


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
