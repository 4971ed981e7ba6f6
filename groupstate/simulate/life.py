"""One life of a simulated process: the real run on a disk in memory, from its opening until it ends or is killed.

Rule 1: a kill takes nothing along but what the disk keeps: it is copied in that moment, and what the old process does
while it is taken down happens on a disk that nobody reads again.
Rule 2: an event is taken in, by the checker and by the witness, when it is durable; a crash takes none of it back.
"""

import asyncio
import random
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

import anyio
import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.invariants import UNCOUNTED, Checker
from groupstate.core.standing import Standing
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadSettings, GroupstateError, LogError, LogFailed, RolloutDied
from groupstate.log.file import FileLog
from groupstate.runtime.opening import open_run
from groupstate.runtime.run import Run
from groupstate.simulate import sessions, storm, trainer
from groupstate.simulate.faults import Fault, FaultyDisk
from groupstate.simulate.loop import VirtualLoop
from groupstate.simulate.lots import Lots
from groupstate.simulate.plan import Plan
from groupstate.simulate.prompts import source_of
from groupstate.simulate.witness import Breach, Witness

RUN = "/runs/simulated"
LOG_ID = "51301a7e51301a7e51301a7e51301a7e"
"""The same in every run, since its bytes are in the log."""

ENDLESS_S = 30 * 86_400.0
"""Seconds after the faults' end in which a run has to be done. A session takes a day at most."""

End: TypeAlias = Literal["killed", "power", "closed", "died", "log failed", "done", "breach"]

_OPENING, _DISK, _COMMIT, _DEATH = range(700, 704)
_OF_SESSIONS = frozenset({ev.SessionStarted, ev.SessionFinished, ev.SessionFailed})
"""Most events, of which a life takes no note."""


class _Killed(BaseException):
    """Leaves the run's block at once."""


@attrs.define
class History:
    """What is known of a run over all its lives."""

    witness: Witness = attrs.Factory(Witness)
    checker: Checker = attrs.Factory(lambda: Checker(replays=False))
    """Of what can be read off the events; their replay is held against it at the end."""
    standing: Standing = attrs.Factory(Standing)
    """What the checker counted, folded."""
    kept: list[ev.Record] = attrs.Factory(list)
    """Every durable event."""
    told: Counter[str] = attrs.Factory(Counter)
    """What happened, counted."""

    def has_enough(self, plan: Plan) -> bool:
        """So many groups were submitted that the faults may stop."""
        return self.witness.log.groups >= plan.lifetimes

    def take(self, record: ev.Record) -> None:
        """
        Raises:
            Breach: it can't be.
        """
        self.kept.append(record)
        found = self.checker.feed(record)
        if found:
            raise Breach(f"invariant {found[0].invariant}", str(found[0]), record.seq)
        event = record.event
        if type(event) not in UNCOUNTED:
            self.checker.add_to(self.standing, event)
        self.witness.log.feed(record)

    def compare(self, book: Book) -> None:
        """
        Raises:
            Breach: a book that has taken in the events that were kept, and no more, isn't what they make it.
        """
        found = self.checker.compare(book)
        if found:
            raise Breach(f"invariant {found[0].invariant}", str(found[0]), len(self.kept))


@attrs.define(eq=False)
class Life:
    plan: Plan
    number: int
    """Of this life, from 1."""
    disk: FaultyDisk
    history: History
    loop: VirtualLoop
    calm_at_s: float
    """When the faults stop, on the loop's clock."""
    kill_at_s: float | None
    kill_how: Literal["killed", "power", "closed"]
    calm: bool = False
    """The faults have stopped: nothing more goes wrong, and no prompts come any more."""
    how: End | None = None
    over: bool = False
    """Nobody hears what happens from here on."""
    breach: Breach | None = None
    left: FaultyDisk | None = None
    """What a kill left."""
    calmed: anyio.Event = attrs.field(factory=anyio.Event)
    engine: ScriptedEngine | None = None
    engine_died: bool = False
    asking: Callable[[int], None] | None = None
    """Told the number of the next request: it is whose who asks now."""
    scopes: dict[int, anyio.CancelScope] = attrs.field(factory=dict)
    """Of the samplers that wait, by request, where they may be cancelled."""
    _workers: list[anyio.CancelScope] = attrs.field(factory=list)
    """Of the tasks that train, in the order in which they began: a task group would cancel them in no order."""
    _strikers: list[anyio.CancelScope] = attrs.field(factory=list)
    """Of those that stir."""
    _ended: anyio.Event = attrs.field(factory=anyio.Event)
    _run: Run | None = None
    _log: FileLog | None = None
    _pending: deque[ev.Record] = attrs.field(factory=deque)
    _disk_had_failed: bool = False
    """Before the faults stopped."""
    _struck: anyio.Event = attrs.field(factory=anyio.Event)

    # Asked by its tasks -----------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run

    @property
    def witness(self) -> Witness:
        return self.history.witness

    def lots(self, *key: int) -> Lots:
        """A stream of draws of this life."""
        return Lots(self.plan.seed, self.number, *key)

    def count(self, what: str) -> None:
        self.history.told[what] += 1

    def finish(self, how: End) -> None:
        """End the process in good order, as far as its log lets it."""
        if self.how is None:
            self.how = how
            self._ended.set()

    def breached(self, breach: Breach) -> None:
        if self.breach is None and not self.over:
            self.breach = breach
            self.how = "breach"
            self._ended.set()

    def log_failed(self, error: LogError) -> None:
        """Somebody was told that the log is broken."""
        if not self.over and not self._disk_failed:
            self.breached(Breach("error LogFailed", f"the log failed, and no disk did: {error}"))
        self.finish("log failed")

    @property
    def _disk_failed(self) -> bool:
        fault = self.disk.fault
        return self._disk_had_failed or (fault is not None and self.disk.operation_count >= fault.at)

    def unexpected(self, who: str, error: BaseException) -> None:
        """An error that nothing in the plan explains."""
        if not self.over:
            place = "".join(traceback.format_exception(error)[-6:])
            kind = type(error).__name__
            self.breached(Breach(f"error {kind}", f"{who} raised {kind}: {error}\n{place}"))

    # The life ---------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """From opening to end; what became of it is in `how`, `breach` and `left`.

        Raises:
            BadSettings: no run can be opened with the settings of the plan.
        """
        self.loop.set_exception_handler(self._unhandled)
        self._plan_faults()
        try:
            await self._live()
        except _Killed:
            pass
        except LogError as error:
            if not self.over:
                self.log_failed(error)
        except Breach as breach:
            self.breached(breach)
        except BadSettings as error:
            if self._run is None and not self.history.kept:
                raise BadSettings(f"no run can be opened so: {error}") from error
            self.unexpected("the run", error)
        except GroupstateError as error:
            # That the rollout died is told at the end where nobody waited for it.
            if not (isinstance(error, RolloutDied) and self.engine_died):
                self.unexpected("the run", error)
        if not self.over and self.breach is None:
            self._pump()
        self.over = True

    async def _live(self) -> None:
        self._log = log = self._opened_log()
        mark = None
        for record in log.read(len(self.history.kept) + 1):
            self._pending.append(record)
        self._pump()
        opening = self.lots(_OPENING)
        if self.history.kept and opening.chance(self.plan.trainer.rewind):
            mark = self.witness.best_mark()
        version = self.witness.log.version if mark is None else mark.weight_version
        self.witness.began.clear()
        if self.plan.engine is not None:
            self.engine = sessions.engine_of(self.plan, version)
        async with open_run(
            log=log,
            rules=self.plan.made_rules(),
            source=source_of(self.plan, lambda: self.calm),
            session=sessions.session_of(self),
            engine=self.engine,
            group_size=self.plan.group_size,
            resume_at=mark,
            on_rewind="evict" if self.plan.trainer.rewind_evicts else "keep",
            snapshot_events=self.plan.storage.snapshot_events,
            grace_s=opening.pick((0.0, 1.0, 30.0)),
            clock_ns=self.loop.clock_ns,
        ) as run:
            self._run = run
            first = self._pending[-1].seq + 1 if self._pending else len(self.history.kept) + 1
            for record in log.read(first):
                self._note(record)
            run.ledger.observers.append(self._note)
            await self._until_ended()
            if self.over:
                raise _Killed

    async def _until_ended(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            await self._ended.wait()
            self.stop()
            tasks.cancel_scope.cancel()

    async def _work(self) -> None:
        """What the process does: storms, until the faults stop, and training."""
        try:
            assert self._log is not None
            await self._log.durable(self._log.last_seq)
            self._pump()
            if self.number > 1:
                self.witness.recovers()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._storm_until_calm)
                await trainer.train(self)
                if not self.calm:
                    self.finish("closed")
                else:
                    await trainer.see_to_the_end(self)
                    self.finish("done")
                tasks.cancel_scope.cancel()
        except Exception as error:
            self._hear(_first_of(error))

    def _hear(self, error: BaseException) -> None:
        if isinstance(error, Breach):
            self.breached(error)
        elif isinstance(error, LogFailed):
            self.log_failed(error)
        else:
            self.unexpected("the trainer", error)

    async def _storm_until_calm(self) -> None:
        if self.calm:
            return
        timer = self.loop.call_at(self.kill_at_s, self._strike) if self.kill_at_s is not None else None
        async with anyio.create_task_group() as tasks:
            storm.begin(self, tasks)
            with anyio.move_on_after(max(0.0, self.calm_at_s - self.loop.now_s)):
                await self._struck.wait()
            for scope in list(self._strikers):
                scope.cancel()
            tasks.cancel_scope.cancel()
        if timer is not None:
            timer.cancel()
        self._calm_down()

    def _calm_down(self) -> None:
        """The faults stop, where none has ended this life. One of the disk's needn't have: it may have hit what can do
        without, such as a snapshot."""
        if self.how is not None or self.engine_died or isinstance(self.run._controller.dead, LogFailed):
            return
        self._disk_had_failed = self._disk_failed
        self.disk.fault = None
        self.calm = True
        self.calmed.set()
        # No more prompts: what waits for more than there will be is told so.
        self.run._controller.settle()

    async def works(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do a part of the training, until the life ends."""
        await _scoped(self._workers, work, *arguments)

    async def strikes(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do something that ends when the faults stop."""
        await _scoped(self._strikers, work, *arguments)

    def stop(self) -> None:
        """End all of it, always in the same order."""
        for scope in (*self._workers, *self._strikers):
            scope.cancel()

    def stop_striking(self) -> None:
        """From here on nothing more happens from outside, so who waits in vain is found out."""
        self._struck.set()

    def _strike(self) -> None:
        """Its end, by the plan."""
        if self.over or self.how is not None:
            return
        if self.kill_how == "closed":
            self.finish("closed")
            return
        self.how = self.kill_how
        chance = random.Random(self.lots(_DEATH).below(1 << 50))
        self.left = self.disk.copy() if self.kill_how == "killed" else self.disk.crash(chance=chance)
        self.over = True
        self._ended.set()

    def after_failure(self) -> FaultyDisk:
        """The disk as the next process finds it."""
        if self.left is not None:
            return self.left
        lots = self.lots(_DEATH)
        if self.how == "log failed" and lots.chance(self.plan.crash.power):
            return self.disk.crash(chance=random.Random(lots.below(1 << 50)))
        return self.disk.copy()

    # Log and disk -----------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        crash, lots = self.plan.crash, self.lots(_DISK)
        if self.calm or not (crash.disk_fault_every or crash.in_recovery):
            return
        once, torn_bytes = lots.chance(crash.fault_once), lots.pick((0, 0, 7, 100, 5_000))
        if self.number > 1 and lots.chance(crash.in_recovery):
            within = 1 + lots.below(25)
        elif crash.disk_fault_every:
            within = 30 + int(lots.waiting_s(crash.disk_fault_every))
        else:
            return
        self.disk.fault = Fault(self.disk.operation_count + within, once=once, torn_bytes=torn_bytes)

    def _opened_log(self) -> FileLog:
        storage, lots = self.plan.storage, self.lots(_COMMIT)

        def later(step: Callable[[], None]) -> None:
            self.loop.call_later(storage.commit.draw(lots), self._committed, step)

        options: dict[str, Any] = {
            "disk": self.disk,
            "later": later,
            "segment_bytes": storage.segment_bytes,
            "payload_file_bytes": storage.payload_file_bytes,
            "keep": storage.keep,
            "now_ns": self.loop.clock_ns,
        }
        kept = self.history.kept
        if not self.disk.exists(f"{RUN}/run.json"):
            if kept:
                raise Breach("lost", f"{len(kept)} events were acknowledged, and the run is gone")
            return FileLog.create(RUN, log_id=LOG_ID, **options)
        try:
            log = FileLog.open(RUN, **options)
        except LogError as error:
            if self._disk_failed:
                raise
            raise Breach("lost", f"what a crash left can't be opened: {type(error).__name__}: {error}") from error
        if log.recovered_seq < len(kept):
            text = f"event {len(kept)} was acknowledged, and the log that a crash left ends at {log.recovered_seq}"
            raise Breach("lost", text, len(kept))
        if kept and next(log.read(len(kept), len(kept) + 1)) != kept[-1]:
            raise Breach("lost", f"event {len(kept)} is another than the one that was acknowledged", len(kept))
        return log

    def _committed(self, step: Callable[[], None]) -> None:
        step()
        try:
            self._pump()
        except Breach as breach:
            self.breached(breach)

    def _pump(self) -> None:
        """Take in what has become durable.

        Raises:
            Breach: it can't be.
        """
        pending = self._pending
        if self.over or self.breach is not None or self._log is None or not pending:
            return
        durable_seq, take = self._log.durable_seq, self.history.take
        while pending and pending[0].seq <= durable_seq:
            take(pending.popleft())
        if not pending and self._run is not None:
            self.history.compare(self._run.book)

    def _note(self, record: ev.Record) -> None:
        self._pending.append(record)
        event = record.event
        if type(event) in _OF_SESSIONS:
            return
        if isinstance(event, ev.BatchRequested):
            if self.asking is not None and event.partition == ev.TRAIN:
                self.asking(event.request)
        elif isinstance(event, ev.BatchSampled):
            scope = self.scopes.pop(event.request, None)
            if scope is not None:
                trainer.cancel_at_claim(self, scope)
        elif isinstance(event, ev.BatchRequestCancelled):
            self.scopes.pop(event.request, None)
        elif isinstance(event, ev.GroupSubmitted) and self.history.has_enough(self.plan):
            self.stop_striking()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.over or isinstance(error, LogError):
            return
        self.unexpected(str(context.get("message")), error or RuntimeError("no exception"))


async def _scoped(scopes: list[anyio.CancelScope], work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    with anyio.CancelScope() as scope:
        scopes.append(scope)
        try:
            await work(*arguments)
        finally:
            scopes.remove(scope)


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
