"""Starts the sessions of every group that is pending, and reports how each of them ends.

Takes: groups that were submitted or requeued, from the ledger. Makes: session events. Blocked by: nothing
of its own; admission decides what is submitted. Unblocked by: the ledger's records.

Rule 1: every attempt that was started ends as an event, whatever happens to its task.
Rule 2: what user code raises is data; a fault of the rollout itself reaches every waiting sampler.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from types import CoroutineType
from typing import Final

import anyio
import anyio.abc

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.core.prompt import Prompt, decoded_prompt
from groupstate.engines.port import Engine, Mortal, SamplingParams
from groupstate.engines.tasks import ended, loose
from groupstate.errors import (
    BadSettings,
    DamagedPayload,
    EngineDied,
    EngineUnavailable,
    GroupstateError,
    RequestRefused,
    UnusableResult,
)
from groupstate.logs import Logger
from groupstate.runtime.controller import Controller, Signal
from groupstate.runtime.deadlines import timed_out
from groupstate.runtime.functions import is_async
from groupstate.runtime.ledger import DOUBLINGS_MAX, Ending
from groupstate.runtime.session import RetryableError, SessionContext, SessionFunction, SessionResult, describe
from groupstate.runtime.siblings import Siblings

log = Logger("groupstate.rollout")

LOST: Final = object()

_OF_SESSIONS: Final = frozenset({ev.SessionStarted, ev.SessionFinished, ev.SessionFailed})
"""Most events. What is done about them is done where they are recorded."""


class _NotAsync(BadSettings):
    """The session function isn't one."""


class Rollout:
    def __init__(
        self,
        controller: Controller,
        session: SessionFunction,
        *,
        engine: Engine | None,
        params: SamplingParams,
        cancel_grace_s: float,
    ) -> None:
        self._controller = controller
        self._ledger = controller.ledger
        self._book = controller.book
        self._function = session
        self._engine = engine
        self.params = params
        self.params_of: dict[str, SamplingParams] = {}
        """Of groups in flight whose sessions generate in another way."""
        self._cancel_grace_s = cancel_grace_s
        self._deadline_s = controller.rules.session_deadline_s
        self._queue: deque[str] = deque()
        self._wake = Signal()
        self._siblings: dict[str, Siblings] = {}
        self._stubborn: set[asyncio.Task[SessionResult]] = set()
        """Tasks that ignored their cancellation; kept from the garbage collector until they end."""
        self._endings: dict[str, list[tuple[SessionContext, object]]] = {}
        """How cancelled sessions of a group ended: what they returned all the same, or `LOST`."""
        self._ledger.observers.append(self._note)

    @property
    def busy(self) -> bool:
        return bool(self._siblings)

    def _note(self, record: ev.Record) -> None:
        event = record.event
        if type(event) in _OF_SESSIONS:
            return
        if isinstance(event, ev.GroupSubmitted):
            self._queue.append(event.group_id)
        elif isinstance(event, ev.GroupRequeued):
            siblings = self._siblings.pop(event.group_id, None)
            if siblings is not None:
                siblings.cancel()
            self._queue.append(event.group_id)
        else:
            if self.params_of and isinstance(event, ev.GroupFinished | ev.GroupFailed):
                self.params_of.pop(event.group_id, None)
            return
        self._wake.set()

    async def run(self) -> None:
        """Dispatch until cancelled. An error in here is the rollout's death."""
        queued = set(self._queue)
        self._queue.extend(
            group.group_id for group in self._book.in_phase(Phase.PENDING) if group.group_id not in queued
        )
        async with anyio.create_task_group() as tasks:
            if isinstance(self._engine, Mortal) and is_async(self._engine.died):
                # Its death ends the sessions that ask nothing of it now, too.
                tasks.start_soon(self._engine.died, name="the engine's death")
            while True:
                while self._queue and not self._controller.closing:
                    self._dispatch(tasks, self._queue.popleft())
                await self._wake.wait()

    def _dispatch(self, tasks: anyio.abc.TaskGroup, group_id: str) -> None:
        group = self._book.groups.get(group_id)
        if group is None or not group.in_flight or group_id in self._siblings:
            return
        siblings = Siblings()
        self._siblings[group_id] = siblings
        tasks.start_soon(self._run_group, group, siblings, name=f"group {group_id}")

    def end(self, group_id: str, ending: Ending) -> bool:
        """Cancel the open sessions of a group; each is recorded as its end. False if they don't run here."""
        siblings = self._siblings.get(group_id)
        if siblings is None:
            return False
        self._ledger.mark_ending(group_id, ending)
        siblings.cancel()
        return True

    def runs(self, group_id: str) -> bool:
        return group_id in self._siblings

    # One group ---------------------------------------------------------------------------------------

    async def _run_group(self, group: Group, siblings: Siblings) -> None:
        if self._siblings.get(group.group_id) is not siblings:
            return  # it started over, or ended, before this had its first step
        try:
            prompt = self._prompt(group)
        except DamagedPayload as error:
            del self._siblings[group.group_id]
            self._controller.fail_unreadable(group, error)
            return
        try:
            await siblings.run(
                (f"{group.group_id}/{session}", self._run_session(group, session, prompt))
                for session in range(group.size)
            )
        finally:
            current = self._siblings.get(group.group_id) is siblings
            if current:
                del self._siblings[group.group_id]
            self._record_endings(group)
            ending = self._ledger.endings.get(group.group_id)
            if ending is not None and current:
                # What has no end of its own was cancelled, before its first step or in the middle. If the group
                # started over meanwhile, its ending is the matter of whoever runs it now.
                self._ledger.end(group.group_id, ending)
            self._controller.changed.set()

    def _record_endings(self, group: Group) -> None:
        """Ends of cancelled sessions, by session number: tasks are cancelled in no order that could be repeated."""
        for ctx, result in sorted(self._endings.pop(group.group_id, []), key=lambda ending: ending[0].session):
            if result is not LOST:
                self._finish(ctx, result)
            elif self._current(ctx) and not self._controller.closing:
                who = (ctx.group_id, ctx.session, ctx.attempt)
                self._ledger.fail(*who, "lost", f"it ignored its cancellation for {self._cancel_grace_s} s")

    def _prompt(self, group: Group) -> Prompt:
        known = self._controller.prompts.get(group.group_id)
        if known is not None:
            return known
        if group.prompt is None:
            return Prompt(None, group.dataset, group.needed, group.group_id)
        data = self._ledger.log.payloads.get(group.prompt)
        return decoded_prompt(data, dataset=group.dataset, n=group.needed, group_id=group.group_id)

    # One session -------------------------------------------------------------------------------------

    async def _run_session(self, group: Group, session: int, prompt: Prompt) -> None:
        attempt = group.sessions[session].attempt
        while True:
            version = self._engine.weight_version if self._engine is not None else None
            if self._ledger.start(group.group_id, session, attempt, version=version) is None:
                return
            ctx = SessionContext(
                group.group_id,
                session,
                attempt,
                group.size,
                prompt,
                self._book.weight_version,
                self._engine,
                self.params_of.get(group.group_id, self.params),
            )
            try:
                await self._attempt(ctx)
            finally:
                ctx.end()
            delay = self._retry_due(group.group_id, session, attempt)
            if delay is None:
                return
            attempt += 1
            await anyio.sleep(delay)

    def _retry_due(self, group_id: str, session: int, attempt: int) -> float | None:
        group = self._book.groups.get(group_id)
        if group is None or not group.in_flight:
            return None
        now = group.sessions[session]
        if now.attempt != attempt + 1 or now.state != "waiting" or now.failure is None:
            return None
        return float(self._ledger.rules.retry_delay_s * 2 ** min(now.tries - 2, DOUBLINGS_MAX))

    async def _attempt(self, ctx: SessionContext) -> None:
        """Run the user's function once and record its end."""
        who = (ctx.group_id, ctx.session, ctx.attempt)
        # A task of its own, because a task group would wait for ever for one that ignores its cancellation.
        task = loose(self._call(ctx))
        try:
            done = await ended(task, self._deadline_s)
            if not done and self._controller.closing:
                # The end of the run is its deadline now, and no failure: it starts over with the run.
                done = await ended(task)
            elif not done:
                await self._end_late(task)
        except asyncio.CancelledError:
            await self._end_cancelled(task, ctx)
            raise
        if not done and _gave_nothing(task):
            self._expire(task, ctx)
            return
        if task.cancelled():
            self._ledger.fail(*who, "cancelled", "the session cancelled itself")
            return
        error = task.exception()
        if error is None:
            self._finish(ctx, task.result())
        elif isinstance(error, EngineDied | _NotAsync):
            # No session can end any more. Nothing is held against this one: it starts over with the run.
            raise error
        else:
            kind: ev.FailureKind = "refused" if isinstance(error, RequestRefused) else "error"
            retryable = isinstance(error, RetryableError | EngineUnavailable)
            self._ledger.fail(*who, kind, describe(error), retryable=retryable)
            if not isinstance(error, Exception):
                raise error

    async def _end_late(self, task: "asyncio.Task[SessionResult]") -> None:
        """Cancel a session that is past its deadline, and give it the grace to end."""
        task.cancel()
        await ended(task, self._cancel_grace_s)

    def _expire(self, task: "asyncio.Task[SessionResult]", ctx: SessionContext) -> None:
        """A session past its deadline that gave no result all the same."""
        log.warning(
            "session timed out",
            group=ctx.group_id,
            session=ctx.session,
            attempt=ctx.attempt,
            deadline_s=self._deadline_s,
        )
        if not task.done():
            self._give_up(task, ctx)
        who = (ctx.group_id, ctx.session, ctx.attempt)
        self._ledger.fail(*who, "timeout", timed_out(self._deadline_s), retryable=True)

    async def _call(self, ctx: SessionContext) -> SessionResult:
        coming = self._function(ctx)
        if type(coming) is not CoroutineType and not isinstance(coming, Awaitable):
            # Every session would end so, and each would take a prompt with it.
            raise _NotAsync(
                f"the session function returned {type(coming).__name__} and nothing to await; "
                "write: async def session(ctx): ..."
            )
        return await coming

    def _finish(self, ctx: SessionContext, result: object) -> None:
        try:
            self._ledger.finish(ctx.group_id, ctx.session, ctx.attempt, result)
        except UnusableResult as error:
            # It is recorded as the session's failure; a siblings' matter it is not.
            log.warning(
                "a session's result was refused",
                group=ctx.group_id,
                session=ctx.session,
                attempt=ctx.attempt,
                error=str(error),
            )

    async def _end_cancelled(self, task: "asyncio.Task[SessionResult]", ctx: SessionContext) -> None:
        """See a cancelled session to its end; past the grace it is lost and what it yet returns is fenced."""
        task.cancel()
        done = await ended(task, self._cancel_grace_s)
        endings = self._endings.setdefault(ctx.group_id, [])
        if not done:
            self._give_up(task, ctx)
            endings.append((ctx, LOST))
        elif not task.cancelled() and task.exception() is None:
            # It had its result before the cancellation reached it.
            endings.append((ctx, task.result()))

    def _give_up(self, task: "asyncio.Task[SessionResult]", ctx: SessionContext) -> None:
        """Wait no longer for a session that ignores its cancellation."""
        self._stubborn.add(task)
        task.add_done_callback(lambda _: self._late(task, ctx))
        log.warning("a session ignores its cancellation", group=ctx.group_id, session=ctx.session, attempt=ctx.attempt)

    def _late(self, task: "asyncio.Task[SessionResult]", ctx: SessionContext) -> None:
        """A session that was given up as lost has ended after all: what it yields is fenced."""
        self._stubborn.discard(task)
        ended = not task.cancelled() and task.exception() is None
        if self._controller.closing or not ended:
            return
        try:
            self._finish(ctx, task.result())
        except GroupstateError as error:
            log.error(
                "a late result can't be recorded",
                group=ctx.group_id,
                session=ctx.session,
                attempt=ctx.attempt,
                error=str(error),
            )

    def _current(self, ctx: SessionContext) -> bool:
        """Whether this attempt is still the open one (a requeue has ended it otherwise)."""
        group = self._book.groups.get(ctx.group_id)
        if group is None or not group.in_flight:
            return False
        session = group.sessions[ctx.session]
        return session.attempt == ctx.attempt and session.state == "open"


def _gave_nothing(task: "asyncio.Task[SessionResult]") -> bool:
    """A task that was cancelled has no result, nor an error that concerns more than itself."""
    if not task.done() or task.cancelled():
        return True
    error = task.exception()
    return isinstance(error, Exception) and not isinstance(error, EngineDied | _NotAsync)
