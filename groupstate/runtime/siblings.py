"""The sessions of one group as tasks: they begin together, and who waits for them waits for all.

Rule 1: none outlives `run`, whoever is cancelled meanwhile.
Rule 2: a cancellation reaches each once, in the order of their numbers, and where it waits: who has what it waited for
goes on to its next wait, and who hasn't begun yet begins.
Rule 3: what one raises ends the others, and is raised once all have ended.

A task group does the same for any tasks; what it needs for that costs more than all else that a session does.
"""

import asyncio
import inspect
from collections.abc import Coroutine, Iterable
from typing import Any

from groupstate.engines.tasks import settled


class Siblings:
    def __init__(self) -> None:
        self._cancelled = False
        self._tasks: list[asyncio.Task[None]] = []
        self._unreached: list[asyncio.Task[None]] = []
        """Those that the cancellation has yet to reach."""
        self._left = 0
        self._ended: asyncio.Future[None]
        self._errors: list[BaseException] = []

    def cancel(self) -> None:
        """End all of them."""
        if not self._cancelled:
            self._cancelled = True
            self._unreached = self._tasks
            self._reach()

    async def run(self, works: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
        """See them all to their end.

        Args:
            works: each with the name of its task.

        Raises:
            BaseExceptionGroup: what they raised.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for name, work in works:
            task = loop.create_task(work, name=name)
            task.add_done_callback(self._note)
            self._tasks.append(task)
        self._left = len(self._tasks)
        assert self._tasks, "a group has a session"
        if self._cancelled:
            self._unreached = self._tasks
            self._reach()
        try:
            await self._ended
        except asyncio.CancelledError:
            self.cancel()
            for task in self._tasks:
                await settled(task)
            raise
        if self._errors:
            raise BaseExceptionGroup("sessions of a group failed the rollout", self._errors)

    def _reach(self) -> None:
        current = asyncio.current_task()
        unreached = []
        for task in self._unreached:
            if task.done():
                continue
            waits_for = task._fut_waiter  # type: ignore[attr-defined]
            goes_on = waits_for.done() if waits_for is not None else task is current or not _has_begun(task)
            if goes_on:
                unreached.append(task)
            else:
                task.cancel()
        self._unreached = unreached
        if unreached:
            asyncio.get_running_loop().call_soon(self._reach)

    def _note(self, task: "asyncio.Task[None]") -> None:
        self._left -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._errors.append(error)
            self.cancel()
        if not self._left and not self._ended.done():
            self._ended.set_result(None)


def _has_begun(task: "asyncio.Task[None]") -> bool:
    return inspect.getcoroutinestate(task.get_coro()) != inspect.CORO_CREATED  # type: ignore[arg-type]
