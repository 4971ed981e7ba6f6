"""Starts the sessions of every group that is pending, and sees each group to its end.

Takes: groups that were submitted or requeued, from the ledger. Makes: session events. Blocked by: nothing
of its own; admission decides what is submitted. Unblocked by: the ledger's records.

Rule: a fault of the rollout itself reaches every waiting sampler.
"""

import asyncio
from collections import deque
from typing import Final

import anyio

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.engines.port import Engine, Mortal, SamplingParams
from groupstate.engines.tasks import settled
from groupstate.errors import DamagedPayload
from groupstate.logs import Logger
from groupstate.runtime.attempts import Session, Terms, record_endings
from groupstate.runtime.controller import Controller, Signal
from groupstate.runtime.functions import is_async
from groupstate.runtime.ledger import Ending
from groupstate.runtime.session import SessionFunction
from groupstate.runtime.siblings import Siblings

log = Logger("groupstate.rollout")

_OF_SESSIONS: Final = frozenset({ev.SessionStarted, ev.SessionFinished, ev.SessionFailed})
"""Most events. What is done about them is done where they are recorded."""


AT_ONCE: Final = 64
"""Groups that begin in one turn of the event loop: whatever else runs there would wait for seconds on ten thousand."""


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
        self._engine = engine
        self._terms = Terms(controller, session, engine, controller.rules.session_deadline_s, cancel_grace_s)
        self.params = params
        self.params_of: dict[str, SamplingParams] = {}
        """Of groups in flight whose sessions generate in another way."""
        self._queue: deque[str] = deque()
        self._wake = Signal()
        self._siblings: dict[str, Siblings] = {}
        self._groups: dict[asyncio.Task[None], None] = {}
        """Tasks of groups, in the order in which they began. Plain ones: a task group costs each more than its work."""
        self._faults: list[BaseException] = []
        """What ended one of them though nothing of a session's may."""
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
        try:
            async with anyio.create_task_group() as tasks:
                if isinstance(self._engine, Mortal) and is_async(self._engine.died):
                    # Its death ends the sessions that ask nothing of it now, too.
                    tasks.start_soon(self._engine.died, name="the engine's death")
                await self._dispatch_until_a_fault()
                tasks.cancel_scope.cancel()
        finally:
            await self._end_groups()

    async def _dispatch_until_a_fault(self) -> None:
        while not self._faults:
            for _ in range(min(len(self._queue), AT_ONCE)):
                if not self._controller.closing:
                    self._dispatch(self._queue.popleft())
            if self._queue and not self._controller.closing:
                await asyncio.sleep(0)
            else:
                await self._wake.wait()

    def _dispatch(self, group_id: str) -> None:
        group = self._book.groups.get(group_id)
        if group is None or not group.in_flight or group_id in self._siblings:
            return
        siblings = Siblings()
        self._siblings[group_id] = siblings
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run_group(group, siblings), name=f"group {group_id}")
        self._groups[task] = None
        task.add_done_callback(self._group_ended)

    def _group_ended(self, task: "asyncio.Task[None]") -> None:
        del self._groups[task]
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._faults.append(fault)
            self._wake.set()

    async def _end_groups(self) -> None:
        """End them in order, and see to it that they have.

        Raises:
            BaseExceptionGroup: the faults of this rollout, those that come meanwhile among them.
        """
        groups = list(self._groups)
        for task in groups:
            task.cancel()
        for task in groups:
            await settled(task)
        if self._faults:
            raise BaseExceptionGroup("groups failed the rollout", self._faults)

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
            prompt = self._controller.drawing.prompt_of(group)
        except DamagedPayload as error:
            del self._siblings[group.group_id]
            self._controller.fail_unreadable(group, error)
            return
        try:
            params = self.params_of.get(group.group_id, self.params)
            # One that was cancelled before this has sessions that never begin.
            is_open = not siblings.cancelled and self._ledger.start_all(group.group_id, version=self._terms.version)
            now = self._book.groups.get(group.group_id, group)
            await siblings.run(
                Session(self._terms, siblings, now, number, prompt, params, is_open=is_open)
                for number in range(group.size)
            )
        finally:
            current = self._siblings.get(group.group_id) is siblings
            if current:
                del self._siblings[group.group_id]
            record_endings(self._terms, siblings.endings)
            ending = self._ledger.endings.get(group.group_id)
            if ending is not None and current:
                # What has no end of its own was cancelled, before its first step or in the middle. If the group
                # started over meanwhile, its ending is the matter of whoever runs it now.
                self._ledger.end(group.group_id, ending)
            self._controller.changed.set()
