"""How a run ends: nothing more is admitted, sessions get a grace, the rest is put back, all of it is kept.

Rule 1: a run closes once and to its end, whoever is cancelled while he waits for it.
Rule 2: what goes wrong in it is raised once.
"""

import asyncio

import anyio

from groupstate.core import events as ev
from groupstate.core.phases import Phase
from groupstate.errors import GroupstateError, LogFailed
from groupstate.runtime import recovery
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.rollout import Rollout


class Closing:
    def __init__(self, ledger: Ledger, controller: Controller, rollout: Rollout | None, grace_s: float) -> None:
        self._ledger = ledger
        self._controller = controller
        self._rollout = rollout
        self._grace_s = grace_s
        self.rollout_scope = anyio.CancelScope()
        """What the rollout runs in."""
        self.rollout_ended = anyio.Event()
        self.final_mark: CheckpointMark | None = None
        self.log_gone = False
        """The log is closed, or about to be, and takes nothing more."""
        self._task: asyncio.Task[None] | None = None
        self._told = False
        """What came of it was raised, or there was nothing to raise."""
        self._left = False
        """The block of `open_run` was left, so that nothing more comes from there."""

    @property
    def begun(self) -> bool:
        return self._task is not None

    @property
    def over(self) -> bool:
        return self._task is not None and self._task.done()

    async def close(self, reason: str, *, mark: bool = False) -> None:
        """Begin it, if nobody has, and wait for its end. See `Run.close`."""
        if self._task is None:
            self._controller.closing = True
            # A task of its own: a closing that was cut short would leave the lock behind, or events unkept.
            self._task = asyncio.ensure_future(self._close(reason, mark=mark))
        if not self._task.done():
            await asyncio.wait({self._task})
        if not self._told:
            self._told = True
            self._task.result()

    async def close_whatever_comes(self, reason: str) -> BaseException | None:
        """The same once the block was left, though cancelled; what came of it, if it wasn't well."""
        came: BaseException | None = None
        self._left = True
        self._controller.changed.set()
        with anyio.CancelScope(shield=True):
            while self._task is None or not self._task.done() or not self._told:
                try:
                    await self.close(reason)
                except (GroupstateError, asyncio.CancelledError) as error:
                    came = error
        return came

    def hurry(self) -> None:
        """Give sessions no time to end."""
        self._grace_s = 0.0

    async def _close(self, reason: str, *, mark: bool) -> None:
        try:
            if not isinstance(self._controller.dead, LogFailed):
                self._controller.settle()
            with anyio.move_on_after(self._grace_s):
                while self._may_yet_end(batches=mark):
                    await self._controller.changed.wait()
            if self._rollout is not None:
                self.rollout_scope.cancel()
                await self.rollout_ended.wait()
            if not isinstance(self._controller.dead, LogFailed):
                self._put_back(reason, mark=mark)
                # The end of a run says that all of it is kept, so it waits to know.
                await self._ledger.log.durable(self._ledger.book.last_seq)
        finally:
            self.log_gone = True
            self._controller.changed.set()
            await self._ledger.log.aclose()

    def _may_yet_end(self, *, batches: bool) -> bool:
        """Something is under way that the grace is for: sessions, and `batches` that somebody may yet commit."""
        out = self._ledger.book.batches
        if batches and out and not self._left and not isinstance(self._controller.dead, LogFailed):
            return True
        return self._rollout is not None and self._rollout.busy and not self.rollout_ended.is_set()

    def _put_back(self, reason: str, *, mark: bool) -> None:
        """Groups still under way start over when the run is opened again."""
        for group in list(self._ledger.book.in_phase(Phase.RUNNING)):
            self._ledger.record(ev.GroupRequeued(group.group_id, f"the run closed: {reason}"))
        if mark:
            self.final_mark = recovery.mark(self._ledger, reason)
        self._ledger.record(ev.RunClosed(reason))
