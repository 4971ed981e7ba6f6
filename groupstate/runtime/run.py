"""A run: the log, the ledger, the rules, the rollout and the sampler under one roof.

Rule 1: `open_run` is the only way in and out; leaving it leaves a log that can be opened again.
Rule 2: what a caller was told is durable first: batches, marks, commits.
"""

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import anyio
import anyio.abc
import anyio.from_thread

from groupstate.batch import Batch
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.explain import Explanation
from groupstate.core.phases import Phase
from groupstate.core.prompt import GROUP_SIZE_MAX, Prompt, as_prompt, decoded_prompt, encoded_prompt
from groupstate.core.rules import Rules
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import (
    BadSettings,
    GroupstateError,
    IllegalTransition,
    LogFailed,
    RolloutDied,
    RunIsClosed,
    Unsupported,
)
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.port import Durability, EventLog
from groupstate.log.rundir import RunDir
from groupstate.runtime import recovery
from groupstate.runtime.controller import Controller
from groupstate.runtime.handles import GroupHandle
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.logs import Logger
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.rollout import Rollout
from groupstate.runtime.sampler import Sampler, check_partition
from groupstate.runtime.session import SessionFunction, describe
from groupstate.runtime.sources import Source, as_source

T = TypeVar("T")
log = Logger("groupstate.run")

NEVER = 2**62
"""A number that no event of a log will have."""


class Run:
    """An open run. Made by `open_run`; its plain methods may be called from any thread."""

    def __init__(
        self, ledger: Ledger, controller: Controller, rollout: Rollout | None, engine: Engine | None, grace_s: float
    ) -> None:
        self.ledger = ledger
        self.engine = engine
        self._controller = controller
        self._rollout = rollout
        self._sampler = Sampler(controller)
        self._grace_s = grace_s
        self._thread = threading.get_ident()
        self._publishing = anyio.Lock()
        """One publication at a time, or the engine could end with other weights than the run says."""
        self._closing: asyncio.Task[None] | None = None
        self._close_told = False
        self._log_gone = False
        self._rollout_scope = anyio.CancelScope()
        self._rollout_ended = anyio.Event()
        self.portal: anyio.from_thread.BlockingPortal | None = None
        """Runs functions on the run's event loop, from other threads."""

    # Looking -----------------------------------------------------------------------------------------

    @property
    def book(self) -> Book:
        """The projection, for looking only."""
        return self.ledger.book

    @property
    def id(self) -> str:
        return self.book.run_id

    @property
    def rules(self) -> Rules:
        return self.ledger.rules

    @property
    def weight_version(self) -> int:
        """The current version: what was last published."""
        return self.book.weight_version

    def sampleable_count(self, partition: str = ev.TRAIN) -> int:
        """Groups that could be sampled now."""
        return self._sampler.sampleable_count(partition)

    async def wait_sampleable(self, count: int, partition: str = ev.TRAIN) -> int:
        """Wait until `count` groups are sampleable; takes nothing.

        Raises:
            RunIsClosed: the run closes first.
        """
        return await self._sampler.wait_sampleable(count, partition)

    def explain(self, partition: str = ev.TRAIN) -> Explanation:
        """What the oldest waiting `sample()` waits for, as a value; `str()` of it is a text."""
        return self._sampler.explain(partition)

    # Driving -----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        *,
        n: int | None = None,
        group_id: str | None = None,
        partition: str = ev.TRAIN,
        dataset: str | None = None,
        weight_version: int | None = None,
    ) -> GroupHandle:
        """Submit a prompt: a new group, pending.

        Args:
            prompt: a `Prompt` or its content.
            n: sessions; None takes the prompt's, then the run's.
            group_id: None makes one.
            weight_version: the stamp; leave it out outside of imports and tests.

        Raises:
            DuplicateGroup: the id is taken.
            BadInput: the prompt can't be stored.
            RunIsClosed: the run is closing.
        """
        given = as_prompt(prompt)
        whole = Prompt(
            given.content,
            given.dataset if dataset is None else dataset,
            given.n if n is None else n,
            given.group_id if group_id is None else group_id,
            given.extra,
        )

        check_partition(partition)

        def record() -> GroupHandle:
            self._need_open("submit")
            new = self._controller.submit(whole, partition=partition, weight_version=weight_version)
            self._controller.settle()
            return GroupHandle(new, self._size(new), whole, self)

        return self.in_loop(record)

    def _size(self, group_id: str) -> int:
        return self.book.group(group_id).size

    def pending(self) -> list[GroupHandle]:
        """Groups that nobody has started, oldest first: for users who dispatch sessions themselves."""

        def look() -> list[GroupHandle]:
            groups = sorted(self.book.in_phase(Phase.PENDING), key=lambda group: group.submitted_seq)
            return [GroupHandle(g.group_id, g.size, self._prompt_of(g.group_id), self) for g in groups]

        return self.in_loop(look)

    def _prompt_of(self, group_id: str) -> Prompt:
        known = self._controller.prompts.get(group_id)
        if known is not None:
            return known
        group = self.book.group(group_id)
        if group.prompt is None:
            return Prompt(None, group.dataset, group.size, group_id)
        data = self.ledger.log.payloads.get(group.prompt)
        return decoded_prompt(data, dataset=group.dataset, n=group.size, group_id=group_id)

    async def wait_changed(self) -> None:
        """Wait until something has happened in the run.

        Raises:
            RunIsClosed: the run is closed.
            LogFailed: the log has failed.
        """
        self._need_log("wait for a change")
        self._need_sound_log()
        await self._controller.changed.wait()
        self._need_sound_log()

    async def sample(
        self,
        batch_size: int,
        *,
        weight_version: int | None = None,
        partition: str = ev.TRAIN,
        timeout_s: float | None = None,
    ) -> Batch:
        """Claim the oldest `batch_size` groups, waiting until there are so many. See `Sampler.sample`."""
        return await self._sampler.sample(
            batch_size, weight_version=weight_version, partition=partition, timeout_s=timeout_s
        )

    async def commit(self, batch: Batch | int) -> None:
        """The trainer is done with a batch, for good: a checkpoint holds what was learned from it.

        Raises:
            UnknownBatch: it was never sampled, or is committed or returned already.
        """
        seq = self._record(ev.BatchCommitted(_number(batch)), "commit")
        await self.ledger.log.durable(seq)

    async def release(self, batch: Batch | int) -> None:
        """Give a batch back untrained: its groups are sampleable again, with the lag they had.

        Raises:
            UnknownBatch: it was never sampled, or is committed or returned already.
        """
        seq = self._record(ev.BatchReturned(_number(batch), "released"), "release")
        await self.ledger.log.durable(seq)

    async def publish_weights(self, weight_version: int, weights: Mapping[str, Any] | None = None) -> None:
        """Make a weight version the current one, in the engine first.

        Args:
            weights: for the run's engine; None where the engine gets them by another way.

        Raises:
            WeightVersionError: the version is below the current one.
            EngineError: the engine refused the weights; the version is not published.
        """
        async with self._publishing:
            self._need_log("publish weights")
            if weights is not None and weight_version >= self.weight_version:
                if self.engine is None:
                    raise BadSettings("this run has no engine to give the weights to; leave weights out")
                await self.engine.publish_weights(weights, weight_version)
            self.ledger.publish(weight_version)

    def cancel(self, group_id: str) -> None:
        """Give a group up: its sessions are cancelled, each end is recorded, then the group fails.

        Raises:
            UnknownGroup: it isn't in the book.
            IllegalTransition: it is terminal already.
        """

        def give_up() -> None:
            group = self.book.group(group_id, "cancel")
            if not group.in_flight:
                raise IllegalTransition(group_id, str(group.phase), "a cancellation", ["GroupEvicted", "BatchSampled"])
            if self._rollout is None or not self._rollout.cancel(group_id):
                self.ledger.give_up(group_id, "cancelled by run.cancel")

        self.in_loop(give_up)

    def requeue(self, group_id: str, reason: str = "asked for") -> None:
        """Start a group over: the same prompt, a new attempt for every session.

        Raises:
            UnknownGroup: it isn't in the book.
            IllegalTransition: it is finished or sampled.
        """

        def again() -> None:
            self.book.group(group_id, "requeue")
            self._record(ev.GroupRequeued(group_id, reason), "requeue")

        self.in_loop(again)

    async def validate(self, prompts: Any, *, n: int | None = None, timeout_s: float | None = None) -> Batch:
        """Submit validation prompts and wait for all of them; never filtered, evicted or refilled.

        The groups get ids of their own, since the same prompts are used again and again; an id that a prompt
        brings along is in its `extra["group_id"]`.
        """
        source = as_source(prompts)
        drawn = list(iter(source.draw, None))
        for prompt in drawn:
            encoded_prompt(prompt, "validation")
        groups = []
        for prompt in drawn:
            extra = dict(prompt.extra) if prompt.group_id is None else {**prompt.extra, "group_id": prompt.group_id}
            fresh = Prompt(prompt.content, prompt.dataset, prompt.n, None, extra)
            groups.append(self.submit(fresh, n=n, partition=ev.VALIDATION).id)
        batch = await self._sampler.sample(
            len(groups), partition=ev.VALIDATION, timeout_s=timeout_s, wanted=frozenset(groups)
        )
        await self.commit(batch)
        return batch

    async def checkpoint(self, name: str = "") -> CheckpointMark:
        """Mark this place in the log. Keep the mark beside the weights; `open_run(resume_at=mark)` goes back."""
        book = self.book
        number, version, lineage = book.last_mark + 1, book.weight_version, book.lineage
        seq = self._record(ev.CheckpointMarked(number, version, lineage, name), "mark a checkpoint")
        await self.ledger.log.durable(seq)
        return CheckpointMark(
            run_id=book.run_id, mark=number, seq=seq, weight_version=version, lineage=lineage, name=name
        )

    async def close(self, reason: str = "closed") -> None:
        """Stop admitting, let sessions end within the grace, put the rest back, keep everything. Idempotent.

        Cancelling it doesn't stop the closing; the end of `open_run`'s block waits for it.

        Raises:
            LogFailed: something could not be kept. It is raised once.
        """
        if self._closing is None:
            self._controller.closing = True
            # A task of its own: a closing that was cut short would leave the lock behind, or events unkept.
            self._closing = asyncio.ensure_future(self._close(reason))
        await asyncio.wait({self._closing})
        if not self._close_told:
            self._close_told = True
            self._closing.result()

    async def _close(self, reason: str) -> None:
        try:
            if not isinstance(self._controller.dead, LogFailed):
                self._controller.settle()
            if self._rollout is not None:
                await self._settle_rollout()
            if not isinstance(self._controller.dead, LogFailed):
                self._put_back(reason)
                # The end of a run says that all of it is kept, so it waits to know.
                await self.ledger.log.durable(self.book.last_seq)
        finally:
            self._log_gone = True
            self._controller.changed.set()
            await self.ledger.log.aclose()

    async def close_whatever_comes(self, reason: str) -> BaseException | None:
        """Close, and wait for it though cancelled; what came of it, if it wasn't well."""
        came: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while self._closing is None or not self._closing.done() or not self._close_told:
                try:
                    await self.close(reason)
                except (GroupstateError, asyncio.CancelledError) as error:
                    came = error
        return came

    async def _settle_rollout(self) -> None:
        assert self._rollout is not None
        with anyio.move_on_after(self._grace_s):
            while self._rollout.busy and not self._rollout_ended.is_set():
                await self._controller.changed.wait()
        self._rollout_scope.cancel()
        await self._rollout_ended.wait()

    def _put_back(self, reason: str) -> None:
        """Groups still under way start over when the run is opened again."""
        for group in list(self.book.in_phase(Phase.RUNNING)):
            self.ledger.record(ev.GroupRequeued(group.group_id, f"the run closed: {reason}"))
        self.ledger.record(ev.RunClosed(reason))

    def hurry(self) -> None:
        """Give sessions no time to end when the run closes."""
        self._grace_s = 0.0

    def _raise_untold(self) -> None:
        """Raise the rollout's death if no sampler was told of it.

        Raises:
            RolloutDied: it died and nobody waited.
            LogFailed: the log failed and nobody waited.
        """
        dead = self._controller.dead
        if dead is None or self._controller.death_told:
            return
        if isinstance(dead, LogFailed):
            raise dead
        raise RolloutDied(f"the rollout died while nobody waited for it: {describe(dead)}") from dead

    # Inside ------------------------------------------------------------------------------------------

    def in_loop(self, function: Callable[[], T]) -> T:
        """Call a plain function on the run's event loop, from whatever thread this is.

        Raises:
            RunIsClosed: the run is closed.
        """
        self._need_log("reach the run")
        if threading.get_ident() == self._thread:
            return function()
        assert self.portal is not None
        return self.portal.call(function)

    def _record(self, event: ev.AnyEvent, tried: str) -> int:
        self._need_log(tried)
        seq = self.ledger.record(event)
        self._controller.settle()
        return seq

    def _need_log(self, tried: str) -> None:
        if self._log_gone:
            raise RunIsClosed(f"cannot {tried}: the run is closed; open it again")

    def _need_sound_log(self) -> None:
        if isinstance(self._controller.dead, LogFailed):
            raise self._controller.dead

    def _need_open(self, tried: str) -> None:
        if self._controller.closing:
            raise RunIsClosed(f"cannot {tried}: the run is closing; open it again")

    async def _watch_log(self) -> None:
        """Wait for the log to fail, and tell whoever waits: nobody else may be writing."""
        try:
            await self.ledger.log.durable(NEVER)
        except LogFailed as error:
            if self._closing is None:
                log.error("the log failed", error=str(error))
                self._controller.die(error)

    async def _run_rollout(self) -> None:
        """Run the rollout until the run closes; its death reaches every waiting sampler."""
        assert self._rollout is not None
        self._controller.admits = True
        try:
            with self._rollout_scope:
                self._controller.settle()
                await self._rollout.run()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            cause = _first_cause(error)
            log.error("the rollout died", error=describe(cause))
            self._controller.die(cause)
        finally:
            self._controller.admits = False
            self._rollout_ended.set()


def _first_cause(error: BaseException) -> BaseException:
    """The first error inside of the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _number(batch: Batch | int) -> int:
    return batch if isinstance(batch, int) else batch.number


@contextlib.asynccontextmanager
async def open_run(
    path: str | Path | None = None,
    *,
    rules: Rules | None = None,
    source: Any = None,
    session: SessionFunction | None = None,
    engine: Engine | None = None,
    params: SamplingParams | None = None,
    group_size: int = 8,
    weight_version: int | None = None,
    resume_at: CheckpointMark | None = None,
    grace_s: float = 10.0,
    cancel_grace_s: float = 5.0,
    durability: Durability = "fsync",
    take_over: bool = False,
    log: EventLog | None = None,
    seed: int = 0,
    clock_ns: Callable[[], int] = time.time_ns,
) -> AsyncIterator[Run]:
    """Open a run, new or again, and close it at the end of the block.

    Args:
        path: run directory, made if it isn't there; None keeps everything in memory.
        rules: None takes the log's, or the defaults for a new run.
        source: where prompts come from: a `Source`, a .jsonl or .parquet file, any iterable; None if only
            `run.submit` brings prompts.
        session: `async def session(ctx) -> Trajectory | list[Trajectory]`, run for each session of each group;
            None if the sessions are dispatched by the caller.
        engine: what `ctx.generate` uses. It is not closed with the run.
        params: how it generates.
        group_size: sessions per group, where the prompt doesn't say.
        weight_version: the trainer's version; None is 0 for a new run, the last published for an old one.
        resume_at: go back to this mark.
        grace_s: seconds that sessions get to end when the run closes; then they start over on the next opening.
        cancel_grace_s: seconds that a cancelled session gets to end before it is given up as lost.
        durability: what acknowledged events survive: `fsync` the machine, `os` the process, `memory` nothing.
        take_over: take the run from a writer on another host, of whom nobody here can tell whether it lives.
        log: an event log to use instead of `path`.

    Raises:
        LogInUse: another process writes this run.
        NotARun: the path holds something else.
        CorruptLog, LostEvents, UnsupportedLog: the log can't be trusted; nothing was changed.
        BadMark: `resume_at` doesn't fit this log.
        RolloutDied: in place of `SampleError` where nobody waited when the rollout died.
    """
    _need_asyncio()
    event_log = log
    try:
        _check_settings(group_size, grace_s, cancel_grace_s)
        prompts = None if source is None else as_source(source)
        if event_log is None:
            event_log = _open_log(path, durability, take_over)
        run = _made(event_log, rules, prompts, session, engine, params, group_size, cancel_grace_s, grace_s, clock_ns)
        _begin(run, event_log, weight_version, resume_at, seed)
    except BaseException:
        if event_log is not None:
            with anyio.CancelScope(shield=True):
                await event_log.aclose()
        raise
    failure: BaseException | None = None
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        run.portal = portal
        tasks.start_soon(run._watch_log)
        if session is not None:
            tasks.start_soon(run._run_rollout)
        try:
            yield run
        except BaseException as error:
            # Raised again below, outside of the task groups, which would wrap it.
            failure = error
            run.hurry()
        came = await run.close_whatever_comes("closed" if failure is None else type(failure).__name__)
        failure = failure or came
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    run._raise_untold()


def _need_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise Unsupported(
            "groupstate runs on asyncio; start it with asyncio.run() or anyio.run(..., backend='asyncio')"
        ) from error
    if not hasattr(signal, "SIGKILL"):
        raise Unsupported("groupstate needs Linux or macOS: its locks and durability are not made for Windows")


def _check_settings(group_size: int, grace_s: float, cancel_grace_s: float) -> None:
    """What can be wrong is told before anything is written."""
    if not isinstance(group_size, int) or not 1 <= group_size <= GROUP_SIZE_MAX:
        raise BadSettings(f"group_size is {group_size!r}; it must be an integer from 1 to {GROUP_SIZE_MAX}")
    for name, value in (("grace_s", grace_s), ("cancel_grace_s", cancel_grace_s)):
        if not math.isfinite(value) or value < 0:
            raise BadSettings(f"{name} is {value}; it must be finite and at least 0")


def _open_log(path: str | Path | None, durability: Durability, take_over: bool) -> EventLog:
    if durability not in get_args(Durability):
        raise BadSettings(f"durability is {durability!r}; it is one of {', '.join(get_args(Durability))}")
    if path is None:
        return MemoryLog()
    exists = os.path.lexists(RunDir.at(path).marker)
    if durability == "memory":
        if exists:
            raise BadSettings(
                f"{path} holds a run on disk; durability 'memory' would pass it over, so leave the path out"
            )
        return MemoryLog()
    if exists:
        return FileLog.open(path, durability=durability, take_over=take_over)
    return FileLog.create(path, durability=durability)


def _made(
    event_log: EventLog,
    rules: Rules | None,
    source: Source | None,
    session: SessionFunction | None,
    engine: Engine | None,
    params: SamplingParams | None,
    group_size: int,
    cancel_grace_s: float,
    grace_s: float,
    clock_ns: Callable[[], int],
) -> Run:
    ledger = Ledger(event_log, rules or Rules(), clock_ns=clock_ns)
    recovery.load(ledger)
    if rules is None and ledger.book.run_id:
        ledger.rules = recovery.stored_rules(ledger.book)
    controller = Controller(ledger, source, group_size=group_size)
    rollout = None
    if session is not None:
        rollout = Rollout(
            controller, session, engine=engine, params=params or SamplingParams(), cancel_grace_s=cancel_grace_s
        )
    return Run(ledger, controller, rollout, engine, grace_s)


def _begin(
    run: Run, event_log: EventLog, weight_version: int | None, resume_at: CheckpointMark | None, seed: int
) -> None:
    """Write what the log begins or goes on with, and bring the source to its place."""
    book, controller = run.book, run._controller
    if not book.run_id:
        if resume_at is not None:
            raise BadSettings("resume_at needs a run that was begun; this one is new")
        run_id = getattr(event_log, "log_id", "memory")
        recovery.start(run.ledger, run_id=str(run_id), weight_version=weight_version or 0, seed=seed)
    else:
        recovery.recover(
            run.ledger,
            torn_bytes=getattr(event_log, "torn_bytes", 0),
            weight_version=weight_version,
            resume_at=resume_at,
        )
        recovery.keep_live_payloads(book, event_log)
        controller.rejudge()
    if controller.source is not None and book.source_position:
        controller.source.seek(book.source_position)
    controller.settle()
