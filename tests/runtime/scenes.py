"""Small helpers of the runtime's tests: virtual time, a run whose log is held against its book, sessions."""

import asyncio
import functools
import inspect
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from groupstate import GroupHandle, Run, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.log.file import FileLog
from groupstate.log.port import EventLog
from groupstate.simulate.loop import VirtualLoop, run_virtual

T = TypeVar("T")


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run `async def test(loop, ...)` on a virtual loop; the other arguments are fixtures and parameters."""

    @functools.wraps(test)
    def in_virtual_time(*args: Any, **kwargs: Any) -> None:
        run_virtual(lambda loop: test(loop, *args, **kwargs))

    signature = inspect.signature(test)
    in_virtual_time.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    del in_virtual_time.__wrapped__  # type: ignore[attr-defined]
    return in_virtual_time


@asynccontextmanager
async def opened(loop: VirtualLoop, path: Path | None = None, **options: Any) -> AsyncIterator[Run]:
    """A run on the virtual clock, of groups of one session; in the end its log must tell the same as its book."""
    if path is not None:
        options["log"] = file_log(path)
    settings = {"group_size": 1, "clock_ns": loop.clock_ns, **options}
    async with open_run(**settings) as run:
        try:
            yield run
        finally:
            check(run)
    check(run)


def check(run: Run) -> None:
    """The log replays to the book and breaks no invariant."""
    records = list(run.ledger.log.read())
    found = violations(records)
    assert not found, "\n".join(map(str, found))
    assert replayed(records).digest() == run.book.digest()


# Logs ------------------------------------------------------------------------------------------------


def file_log(path: Path) -> FileLog:
    """A file log that works without threads, new or opened again."""
    if (path / "run.json").exists():
        return FileLog.open(path, durability="os", inline=True)
    return FileLog.create(path, durability="os", inline=True)


_COPIES: Iterator[int] = iter(range(1, 1_000_000))


def killed(path: Path) -> Path:
    """The run directory as a kill at this moment would leave it."""
    copy = path.with_name(f"{path.name}-killed-{next(_COPIES)}")
    shutil.copytree(path, copy)
    (copy / "log" / "lock").unlink(missing_ok=True)
    return copy


def last_segment(path: Path) -> Path:
    return max((path / "log").glob("*.seg"))


def cut(path: Path, length: int) -> Path:
    """A copy whose last segment ends after `length` bytes, as an interrupted write leaves it."""
    copy = killed(path)
    os.truncate(last_segment(copy), length)
    # The watermark isn't flushed, so after a kill it may be behind, never ahead.
    (copy / "log" / "head").unlink(missing_ok=True)
    return copy


def events(source: Run | EventLog, *kinds: type[ev.Event]) -> list[Any]:
    """Events of the log in order, those of `kinds` only if any are named."""
    log = source.ledger.log if isinstance(source, Run) else source
    found = [record.event for record in log.read()]
    return [event for event in found if isinstance(event, kinds)] if kinds else found


def failures(run) -> list[tuple[int, int, str]]:
    return [(event.session, event.attempt, event.failure) for event in events(run, ev.SessionFailed)]


# Driving ---------------------------------------------------------------------------------------------


def finish(group: GroupHandle, *rewards: float) -> None:
    """Start and finish every session of a group, one reward each."""
    for session, reward in enumerate(rewards):
        group.start(session).finish(Trajectory(reward=reward))


def ready(run: Run, *names: str, n: int = 1) -> None:
    """Submit groups and finish them; their sessions differ in reward."""
    for name in names:
        finish(run.submit(name, n=n, group_id=name), *range(n))


def started(call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that has run until it waits for something, in the next turn of the loop."""
    return asyncio.get_running_loop().create_task(call)


async def quiet() -> None:
    """Let everything run until all tasks wait. In virtual time a moment passes."""
    await anyio.sleep(1e-6)


async def ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and see it to its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# Sessions --------------------------------------------------------------------------------------------


async def half_right(ctx: SessionContext) -> Trajectory:
    """Takes a second. The sessions of a group differ in reward."""
    await anyio.sleep(1)
    return Trajectory(reward=float(ctx.session % 2))


async def endless(ctx: SessionContext) -> Trajectory:
    await anyio.sleep_forever()
    raise AssertionError("nothing ends this but a cancellation")


def failing(error: BaseException) -> Callable[[SessionContext], Coroutine[Any, Any, Trajectory]]:
    """A session that raises after a second."""

    async def session(ctx: SessionContext) -> Trajectory:
        await anyio.sleep(1)
        raise error

    return session


def returning(result: Any) -> Callable[[SessionContext], Coroutine[Any, Any, Any]]:
    """A session that returns `result` after a second."""

    async def session(ctx: SessionContext) -> Any:
        await anyio.sleep(1)
        return result

    return session


Session = Callable[[SessionContext], Awaitable[Any]]


def raising(error: Exception) -> Session:
    """A session that raises at once."""

    async def session(ctx: SessionContext) -> None:
        raise error

    return session
