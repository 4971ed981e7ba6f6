"""The same run for trainers that aren't async: every call blocks until it is answered.

The run lives on an event loop in a thread of its own; sessions and engines run there.
"""

import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.from_thread

from groupstate.batch import Batch
from groupstate.core.arguments import shown
from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.explain import Explanation
from groupstate.core.frontier import SourceFrontier
from groupstate.core.rules import Rules
from groupstate.engines.port import Engine, SamplingParams, Weights
from groupstate.errors import BadSettings, RunIsClosed
from groupstate.runtime import opening, turns
from groupstate.runtime.functions import call_problem, named
from groupstate.runtime.handles import GroupHandle
from groupstate.runtime.options import ENGINE_PARTS
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.run import Run as AsyncRun
from groupstate.runtime.tracking import TrackerState

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Run:
    """Blocking twin of `groupstate.Run`; see there for what the calls do and raise.

    All of them may be called from any thread but the one of the run's event loop, where sessions run. They are answered
    on that loop, between two events; only `book` is looked at from outside, and may be seen in the middle of a change:
    `run.in_loop(lambda: ...)` looks at it there.
    """

    def __init__(self, inner: AsyncRun, portal: anyio.from_thread.BlockingPortal) -> None:
        self._inner = inner
        self._portal = portal
        self._left = False
        self._seen = _Seen()

    def _call(self, function: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
        """Call on the run's event loop and wait.

        Raises:
            RunIsClosed: the block of `open_run` was left.
        """
        self._need_block()
        return self._portal.call(function, *args)

    def _need_block(self) -> None:
        if self._left:
            raise RunIsClosed("the run is closed: the block of open_run was left")

    def _look(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """The same for a plain function."""

        async def look() -> T:
            return function(*args)

        return self._call(look)

    def _leave(self) -> None:
        """The block is being left; nothing can be called from here on."""
        self._left = True

    @property
    def book(self) -> Book:
        return self._inner.book

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def rules(self) -> Rules:
        return self._inner.rules

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    @property
    def engine(self) -> Engine | None:
        return self._inner.engine

    def sampleable_count(self, partition: str = TRAIN) -> int:
        return self._look(self._inner.sampleable_count, partition)

    def wait_sampleable(self, count: int, partition: str = TRAIN, *, timeout_s: float | None = None) -> int:
        async def wait() -> int:
            return await self._inner.wait_sampleable(count, partition, timeout_s=timeout_s)

        return self._call(wait)

    def explain(self, partition: str = TRAIN) -> Explanation:
        return self._look(self._inner.explain, partition)

    def frontier(self) -> tuple[SourceFrontier, ...]:
        return self._inner.frontier()

    @property
    def trackers(self) -> tuple[TrackerState, ...]:
        return self._inner.trackers

    def track(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        self._inner.track(metrics, step=step)

    def submit(
        self,
        prompt: Any,
        *,
        n: int | None = None,
        group_id: str | None = None,
        partition: str = TRAIN,
        dataset: str | None = None,
        weight_version: int | None = None,
        target_version: int | None = None,
    ) -> GroupHandle:
        return self._inner.submit(
            prompt,
            n=n,
            group_id=group_id,
            partition=partition,
            dataset=dataset,
            weight_version=weight_version,
            target_version=target_version,
        )

    def pending(self, *, limit: int | None = None) -> list[GroupHandle]:
        self._need_block()
        changed = self._inner._controller.changed

        def look() -> tuple[int, list[GroupHandle]]:
            return changed.count, self._inner.pending(limit=limit)

        self._seen.count, groups = self._inner.in_loop(look)
        return groups

    def wait_changed(self, *, timeout_s: float | None = None) -> bool:
        """Wait until something has happened since this thread last called `pending` or `wait_changed`: what happens
        between the two calls of a loop isn't missed.

        Returns:
            False if nothing has within `timeout_s` seconds.
        """
        changed, seen = self._inner._controller.changed, self._seen.count

        async def wait() -> tuple[int, bool]:
            came = await self._inner._wait_changed(changed.count if seen is None else seen, timeout_s)
            return changed.count, came

        self._seen.count, came = self._call(wait)
        return came

    def sample(
        self,
        batch_size: int,
        *,
        weight_version: int | None = None,
        partition: str = TRAIN,
        timeout_s: float | None = None,
    ) -> Batch:
        async def sample() -> Batch:
            return await self._inner.sample(
                batch_size, weight_version=weight_version, partition=partition, timeout_s=timeout_s
            )

        return self._call(sample)

    def commit(self, batch: Batch | int) -> None:
        self._call(self._inner.commit, batch)

    def release(self, batch: Batch | int) -> None:
        self._call(self._inner.release, batch)

    def publish_weights(self, weight_version: int, weights: Weights | None = None) -> None:
        self._call(self._inner.publish_weights, weight_version, weights)

    @contextlib.contextmanager
    def trainer_turn(self, *, sleep: bool = True) -> Iterator["TrainerTurn"]:
        """`with run.trainer_turn() as turn:` and in it `turn.publish(version, weights)`."""
        self._need_block()
        with self._portal.wrap_async_context_manager(self._inner.trainer_turn(sleep=sleep)) as turn:
            yield TrainerTurn(turn, self)

    def cancel(self, group_id: str) -> None:
        self._inner.cancel(group_id)

    def requeue(self, group_id: str, reason: str = "asked for") -> None:
        self._inner.requeue(group_id, reason)

    def validate(
        self,
        prompts: Any,
        *,
        n: int | None = None,
        params: SamplingParams | None = None,
        greedy: bool = False,
        timeout_s: float | None = None,
    ) -> Batch:
        async def validate() -> Batch:
            return await self._inner.validate(prompts, n=n, params=params, greedy=greedy, timeout_s=timeout_s)

        return self._call(validate)

    def checkpoint(self, name: str = "") -> CheckpointMark:
        return self._call(self._inner.checkpoint, name)

    def close(self, reason: str = "closed", *, mark: bool = False) -> None:
        async def close() -> None:
            await self._inner.close(reason, mark=mark)

        if not self._left:
            self._call(close)

    @property
    def final_mark(self) -> CheckpointMark | None:
        return self._inner.final_mark

    def hurry(self) -> None:
        self._inner.hurry()

    def in_loop(self, function: Callable[[], T]) -> T:
        self._need_block()
        return self._inner.in_loop(function)


class _Seen(threading.local):
    """How many changes this thread has seen; None if it never looked."""

    count: int | None = None


class TrainerTurn:
    """Blocking twin of the turn that `groupstate.Run.trainer_turn` gives."""

    def __init__(self, inner: turns.TrainerTurn, run: Run) -> None:
        self._inner = inner
        self._run = run

    def publish(self, weight_version: int, weights: Weights | None = None) -> None:
        self._run._call(self._inner.publish, weight_version, weights)


EngineMaker = Callable[[], Any]
"""Gives an engine, something to await for one, or an async context manager around one."""


@contextlib.contextmanager
def open_run(path: Any = None, *, engine: Engine | EngineMaker | None = None, **options: Any) -> Iterator[Run]:
    """Open a run and close it at the end of the block. Takes what `groupstate.open_run` takes.

    Args:
        engine: what `ctx.generate` uses: an engine, which is not closed with the run, or a function without arguments
            that makes one. It is called on the run's event loop before the run is opened; what it gives is awaited if
            that can be, and entered if it is an async context manager. That engine is closed once the run is.

    Raises:
        What `groupstate.open_run` raises, and what the function does.
    """
    with (
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
        contextlib.ExitStack() as watching,
        portal.wrap_async_context_manager(_in_use(engine)) as used,
        portal.wrap_async_context_manager(opening.open_run(path, engine=used, **options)) as inner,
    ):
        # Left after the run, whose event loop is on another thread, which gets no signals.
        watching.enter_context(inner._tracking.on_main_thread())
        run = Run(inner, portal)
        try:
            yield run
        finally:
            run._leave()


@contextlib.asynccontextmanager
async def _in_use(engine: Engine | EngineMaker | None) -> AsyncIterator[Any]:
    """An engine that is given, as it is; one that is given to be made, until the end of the block."""
    if hasattr(engine, "generate") or isinstance(engine, type) or not callable(engine):
        yield engine  # What is none is refused where the run is opened.
        return
    if problem := call_problem(engine):
        raise BadSettings(f"engine {named(engine)} {problem}; what makes an engine is called without arguments")
    made = engine()
    if inspect.isawaitable(made):
        made = await made
    if hasattr(made, "__aenter__"):
        async with made as entered:
            yield _checked(entered, engine)
        return
    _checked(made, engine)
    try:
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            await made.aclose()


def _checked(made: Any, by: EngineMaker) -> Any:
    """The same, if it is an engine.

    Raises:
        BadSettings: it is none.
    """
    missing = [part for part in (*ENGINE_PARTS, "aclose") if not hasattr(made, part)]
    if missing:
        raise BadSettings(
            f"engine {named(by)} gave {shown(made)}, which has no {', no '.join(missing)}; it must give an engine, an "
            "object with what groupstate.Engine lists"
        )
    return made
