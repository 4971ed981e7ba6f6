"""One session of a group in flight: its attempts one after another, and the end that is recorded of each.

Rule 1: every attempt that was started ends as an event, whatever happens to its task.
Rule 2: what user code raises is data; only what no session can go on from is its group's fault.
Rule 3: one task an attempt, the user's. All else is a callback or a timer: a second task would cost as much as all that
a session does.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import Concatenate, Final, ParamSpec

import attrs

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.prompt import Prompt
from groupstate.core.trajectory import Yielded, yielded
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import (
    BadSettings,
    EngineDied,
    EngineUnavailable,
    GroupstateError,
    RequestRefused,
    UnusableResult,
)
from groupstate.logs import Logger
from groupstate.runtime.controller import Controller
from groupstate.runtime.deadlines import timed_out
from groupstate.runtime.ledger import Ledger, retry_delay_s
from groupstate.runtime.session import RetryableError, SessionContext, SessionFunction, describe
from groupstate.runtime.siblings import Siblings

log = Logger("groupstate.rollout")

LOST: Final = object()
"""What came of a session that ignored its cancellation."""


class _NotAsync(BadSettings):
    """The session function isn't one; told as `BadSettings`. A session may raise that as any other error."""


_BREAKING: Final = (EngineDied, _NotAsync, KeyboardInterrupt, SystemExit)
"""No session can end any more. Nothing is held against this one: it starts over with the run."""


P = ParamSpec("P")


@attrs.frozen(eq=False)
class Terms:
    """What the sessions of a rollout have in common."""

    controller: Controller
    function: SessionFunction
    engine: Engine | None
    deadline_s: float | None
    cancel_grace_s: float
    stubborn: set["asyncio.Task[Yielded]"] = attrs.field(factory=set, init=False)
    """Tasks that ignored their cancellation; kept from the garbage collector until they end."""

    @property
    def version(self) -> int | None:
        """The weight version that an attempt begins with, as far as it is known."""
        return None if self.engine is None else self.engine.weight_version


def _kept(step: "Callable[Concatenate[Session, P], None]") -> "Callable[Concatenate[Session, P], None]":
    """A step that the loop takes: nobody but the group can be told what it raises."""

    def kept(session: "Session", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(session, *args, **kwargs)
        except BaseException as error:
            session.over(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    return kept


class Session:
    """One session of a group, from its first attempt in this process to the end of its last."""

    __slots__ = (
        "_cancelled",
        "_ctx",
        "_group",
        "_late",
        "_number",
        "_open",
        "_params",
        "_prompt",
        "_siblings",
        "_task",
        "_terms",
        "_timer",
    )

    def __init__(
        self,
        terms: Terms,
        siblings: Siblings,
        group: Group,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        is_open: bool,
    ) -> None:
        """
        Args:
            is_open: its first attempt is recorded as begun already, with those of its siblings.
        """
        self._terms = terms
        self._siblings = siblings
        self._group = group
        self._number = number
        self._prompt = prompt
        self._params = params
        self._open = is_open
        """The attempt that is due is recorded as begun."""
        self._ctx: SessionContext
        """Of the attempt that runs, or ran last."""
        self._task: asyncio.Task[Yielded] | None = None
        """The attempt that runs."""
        self._timer: asyncio.TimerHandle | None = None
        """While an attempt runs, its deadline or the end of its grace; else when the next one begins."""
        self._late = False
        """It was cancelled at its deadline."""
        self._cancelled = False
        """It was cancelled with its group."""

    @_kept
    def begin(self) -> None:
        """Start the attempt that is due."""
        self._start(self._group.sessions[self._number].attempt)

    def cancel(self) -> None:
        """End it, within the grace. An attempt that has ended is recorded as what it is, and none follows."""
        task = self._task
        if task is None:
            if self._timer is not None:
                self.over()
        elif not task.done():
            self._cancelled = True
            task.cancel()
            self._wait(self._terms.cancel_grace_s, self._stayed)

    def over(self, error: BaseException | None = None) -> None:
        """No attempt of it runs or follows.

        Args:
            error: what its group, and with it the rollout, can't go on from.
        """
        self._end_wait()
        self._siblings.over(error)

    def _start(self, attempt: int) -> None:
        terms, group = self._terms, self._group
        controller, engine = terms.controller, terms.engine
        if not self._open:
            ledger, version = controller.ledger, terms.version
            is_fenced = ledger.start(group.group_id, self._number, attempt, version=version) is None
            # What followed from the start may have cancelled them, when there was no task yet to be cancelled.
            if is_fenced or self._siblings.cancelled:
                self.over()
                return
        self._open = False
        self._ctx = ctx = SessionContext(
            group.group_id,
            self._number,
            attempt,
            group.size,
            self._prompt,
            controller.book.weight_version,
            engine,
            self._params,
            self._siblings.encoded,
        )
        name = f"{group.group_id}/{self._number}"
        self._task = task = asyncio.get_running_loop().create_task(_yielded(terms.function, ctx), name=name)
        task.add_done_callback(self._ended)
        if terms.deadline_s is not None:
            self._wait(terms.deadline_s, self._was_late)

    @_kept
    def _again(self) -> None:
        self._timer = None
        self._late = False
        self._start(self._ctx.attempt + 1)

    @_kept
    def _ended(self, task: "asyncio.Task[Yielded]") -> None:
        self._end_wait()
        self._task = None
        self._ctx.end()
        if self._cancelled:
            if not task.cancelled() and task.exception() is None:
                # It had its result before the cancellation reached it.
                self._siblings.endings.append((self._ctx, task.result()))
            self.over()
        elif self._late and _gave_nothing(task):
            self._expire()
        else:
            self._record(task)

    def _record(self, task: "asyncio.Task[Yielded]") -> None:
        ctx, ledger = self._ctx, self._terms.controller.ledger
        who = (ctx.group_id, ctx.session, ctx.attempt)
        if task.cancelled():
            ledger.fail(*who, "cancelled", "the session cancelled itself")
            self.over()
            return
        error = task.exception()
        if error is None:
            _finish(ledger, ctx, task.result())
            self.over()
        elif isinstance(error, _BREAKING):
            self.over(BadSettings(str(error)) if isinstance(error, _NotAsync) else error)
        else:
            kind: ev.FailureKind = "refused" if isinstance(error, RequestRefused) else "error"
            retryable = isinstance(error, RetryableError | EngineUnavailable)
            ledger.fail(*who, kind, describe(error), retryable=retryable)
            if isinstance(error, Exception):
                self._go_on()
            else:
                self.over(error)

    def _was_late(self) -> None:
        """Cancel an attempt that is past its deadline, and give it the grace to end."""
        self._timer = None
        task = self._task
        assert task is not None
        # At the end of a run its end is the deadline, and no failure: the session starts over with the run.
        if not task.done() and not self._terms.controller.closing:
            self._late = True
            task.cancel()
            self._wait(self._terms.cancel_grace_s, self._stayed)

    @_kept
    def _stayed(self) -> None:
        """Wait no longer for one that ignores its cancellation."""
        self._timer = None
        task, ctx, terms = self._task, self._ctx, self._terms
        assert task is not None
        if task.done():
            return
        self._task = None
        ctx.end()
        task.remove_done_callback(self._ended)
        terms.stubborn.add(task)
        task.add_done_callback(functools.partial(_came_late, terms, ctx))
        log.warning("a session ignores its cancellation", group=ctx.group_id, session=ctx.session, attempt=ctx.attempt)
        if self._cancelled:
            self._siblings.endings.append((ctx, LOST))
            self.over()
        else:
            self._expire()

    def _expire(self) -> None:
        """It is past its deadline and gave no result all the same."""
        ctx, terms = self._ctx, self._terms
        log.warning(
            "session timed out",
            group=ctx.group_id,
            session=ctx.session,
            attempt=ctx.attempt,
            deadline_s=terms.deadline_s,
        )
        who = (ctx.group_id, ctx.session, ctx.attempt)
        terms.controller.ledger.fail(*who, "timeout", timed_out(terms.deadline_s), retryable=True)
        self._go_on()

    def _go_on(self) -> None:
        """Behind a failure: with the next attempt, if there is one."""
        delay_s = None if self._siblings.cancelled else self._retry_in_s()
        if delay_s is None:
            self.over()
        else:
            self._wait(delay_s, self._again)

    def _retry_in_s(self) -> float | None:
        ledger, ctx = self._terms.controller.ledger, self._ctx
        group = ledger.book.groups.get(ctx.group_id)
        if group is None or not group.in_flight:
            return None
        now = group.sessions[ctx.session]
        if now.attempt != ctx.attempt + 1 or now.state != "waiting" or now.failure is None:
            return None
        # The one that is due counts as a try already.
        return retry_delay_s(ledger.rules, now.tries - 1)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._end_wait()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _yielded(function: SessionFunction, ctx: SessionContext) -> Yielded:
    """What the function gives, whatever kind of callable it is.

    It is checked here and not where it is recorded, some hundred other sessions later: what was just made needn't be
    fetched from memory once more.
    """
    coming = function(ctx)
    if type(coming) is not CoroutineType and not isinstance(coming, Awaitable):
        # Every session would end so, and each would take a prompt with it.
        raise _NotAsync(
            f"the session function returned {type(coming).__name__} and nothing to await; "
            "write: async def session(ctx): ..."
        )
    result = await coming
    try:
        return yielded(result, session=ctx.session, group_id=ctx.group_id)
    except UnusableResult as error:
        return Yielded(error=str(error))


def record_endings(terms: Terms, endings: list[tuple[SessionContext, object]]) -> None:
    """How cancelled sessions of a group ended, by session number: tasks end in no order that could be repeated."""
    ledger = terms.controller.ledger
    for ctx, result in sorted(endings, key=lambda ending: ending[0].session):
        if result is not LOST:
            _finish(ledger, ctx, result)
        elif _is_open(ledger, ctx) and not terms.controller.closing:
            who = (ctx.group_id, ctx.session, ctx.attempt)
            ledger.fail(*who, "lost", f"it ignored its cancellation for {terms.cancel_grace_s} s")


def _is_open(ledger: Ledger, ctx: SessionContext) -> bool:
    """Whether this attempt is still the one that runs (a requeue has ended it otherwise)."""
    group = ledger.book.groups.get(ctx.group_id)
    if group is None or not group.in_flight:
        return False
    session = group.sessions[ctx.session]
    return session.attempt == ctx.attempt and session.state == "open"


def _finish(ledger: Ledger, ctx: SessionContext, result: object) -> None:
    try:
        ledger.finish(ctx.group_id, ctx.session, ctx.attempt, result)
    except UnusableResult as error:
        # It is recorded as the session's failure; a siblings' matter it is not.
        log.warning(
            "a session's result was refused",
            group=ctx.group_id,
            session=ctx.session,
            attempt=ctx.attempt,
            error=str(error),
        )


def _came_late(terms: Terms, ctx: SessionContext, task: "asyncio.Task[Yielded]") -> None:
    """A session that was given up as lost has ended after all: what it yields is fenced."""
    terms.stubborn.discard(task)
    ended = not task.cancelled() and task.exception() is None
    if terms.controller.closing or not ended:
        return
    try:
        _finish(terms.controller.ledger, ctx, task.result())
    except GroupstateError as error:
        log.error(
            "a late result can't be recorded",
            group=ctx.group_id,
            session=ctx.session,
            attempt=ctx.attempt,
            error=str(error),
        )


def _gave_nothing(task: "asyncio.Task[Yielded]") -> bool:
    """A task that was cancelled has no result, nor an error that concerns more than itself."""
    if task.cancelled():
        return True
    error = task.exception()
    return isinstance(error, Exception) and not isinstance(error, _BREAKING)
