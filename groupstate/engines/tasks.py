"""Work that outlives who asked for it, or that must end in order whoever is cancelled.

Rule: whoever starts a task holds on to it, and sees to its end. A shielded scope alone holds off anyio's cancellations,
not `task.cancel()`; and httpx, cancelled once more while it closes a connection, leaves it open.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def loose(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that belongs to the engine, not to the call that made it needed."""
    return asyncio.get_running_loop().create_task(work)


async def carried(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end, then be cancelled, for what can't be left half done."""
    return await carried_on(loose(work))


async def carried_on(task: "asyncio.Task[T]") -> T:
    """The same of what somebody has begun."""
    if cancelled := await settled(task):
        raise cancelled
    return task.result()


async def guarded(work: Coroutine[Any, Any, T], end: Callable[[], None]) -> T:
    """Do it; a cancellation reaches it only as one call of `end`, and goes on once it has ended."""
    task = loose(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        end()
        await settled(task)
        raise
    return task.result()


async def settled(task: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait for its end, whatever comes; returns the cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.cancelled():
        task.exception()  # Looked at, also where nobody is left to hear of it.
    return cancelled
