"""The two kinds of work that outlive who asked for them.

Rule: whoever starts one holds on to it, and sees to its end.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def loose(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that belongs to the engine, not to the call that made it needed."""
    return asyncio.get_running_loop().create_task(work)


async def carried(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end, then be cancelled, for what can't be left half done.

    A shielded scope alone holds off anyio's cancellations, not `task.cancel()`.
    """
    task = loose(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        task.exception()  # Nobody is left to hear of it.
        raise cancelled
    return task.result()
