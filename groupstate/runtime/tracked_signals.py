"""Signals that end a program while trackers are open.

Rule 1: whoever handles a signal goes on handling it; what came is only noted, for the exit code.
Rule 2: of a SIGTERM that nobody handles the process dies, as it would without trackers, but they are finished before.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    def __init__(self, note: Callable[[int], None], last: Callable[[int], None]) -> None:
        """
        Args:
            note: told of each signal that comes.
            last: called before the process dies of one.
        """
        self._note = note
        self._last = last
        self._process = os.getpid()
        self._ours: dict[signal.Signals, tuple[Any, Any]] = {}
        """Our handler of each signal, and whose place it took."""

    def install(self) -> None:
        """Stand before the handlers that there are now; again where others came and went. Off the main thread, which
        alone may do it, nothing happens."""
        if not _on_main_thread():
            return
        for number in ENDING:
            before = signal.getsignal(number)
            if before in (None, signal.SIG_IGN, self._handler(number)):
                continue
            handler = functools.partial(self._came, before)
            self._ours[number] = handler, before
            signal.signal(number, handler)

    def remove(self) -> None:
        if not _on_main_thread():
            return
        for number, (handler, before) in self._ours.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)

    def _handler(self, number: signal.Signals) -> Any:
        return self._ours.get(number, (None, None))[0]

    def _came(self, before: Any, number: int, frame: FrameType | None) -> None:
        # A process that was forked off has the handlers, and none of the threads.
        here = os.getpid() == self._process
        if here:
            self._note(number)
        if callable(before):
            before(number, frame)
            return
        if here:
            self._last(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
