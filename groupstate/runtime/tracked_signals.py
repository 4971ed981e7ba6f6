"""Signals that end a program while trackers are open.

Rule 1: whoever handles a signal goes on handling it; what came is only noted, for the exit code.
Rule 2: of a SIGTERM that nobody handles the process dies, as it would without trackers, but they are finished before.
Rule 3: runs may be open at the same time and close in any order: whoever gets a signal tells all of them.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import attrs

ENDING: Final = (signal.SIGINT, signal.SIGTERM)


def _nothing() -> None:
    pass


class SignalWatch:
    def __init__(
        self, note: Callable[[int], None], last: Callable[[int], object], wait: Callable[[], None] = _nothing
    ) -> None:
        """
        Args:
            note: told of each signal that comes.
            last: called before the process dies of one; it doesn't wait.
            wait: called then, once every watch had its `last`.
        """
        self.note = note
        self.last = last
        self.wait = wait
        self._process = os.getpid()
        self._installed = False

    @property
    def is_live(self) -> bool:
        """It is installed, and this isn't a process that was forked off: that has the handlers, and none of the
        threads."""
        return self._installed and os.getpid() == self._process

    def install(self) -> None:
        """Stand before the handlers that there are now; again where others came and went. Off the main thread, which
        alone may do it, nothing happens."""
        if not _on_main_thread():
            return
        self._installed = True
        for number in ENDING:
            before = signal.getsignal(number)
            if before in (None, signal.SIG_IGN) or any(handler.watch is self for handler in _chain(before)):
                continue
            signal.signal(number, _Handler(self, before))

    def remove(self) -> None:
        if not _on_main_thread():
            return
        self._installed = False
        for number in ENDING:
            top = signal.getsignal(number)
            for handler in _chain(top):
                handler.before = _first_live(handler.before)
            if _first_live(top) is not top:
                signal.signal(number, _first_live(top))


@attrs.define(eq=False)
class _Handler:
    """Stands before another handler, which may be one like it, of a run that was opened earlier."""

    watch: SignalWatch
    before: Any

    def __call__(self, number: int, frame: FrameType | None) -> None:
        chain = _chain(self)
        watches = [handler.watch for handler in chain if handler.watch.is_live]
        for watch in watches:
            watch.note(number)
        before = chain[-1].before
        if callable(before):
            before(number, frame)
            return
        for watch in watches:
            watch.last(number)
        for watch in watches:
            watch.wait()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _chain(handler: Any) -> list[_Handler]:
    """Our handlers from this one on, up to the first that is another's."""
    found: list[_Handler] = []
    while isinstance(handler, _Handler):
        found.append(handler)
        handler = handler.before
    return found


def _first_live(handler: Any) -> Any:
    """The handler itself, or behind it the first one that isn't of a watch that was removed."""
    while isinstance(handler, _Handler) and not handler.watch._installed:
        handler = handler.before
    return handler


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
