"""The waiting side of sampling.

Rule 1: `sample()` waits on the ledger, never on a clock; the controller answers it.
Rule 2: a batch leaves the process only once its claim is durable.
Rule 3: cancelled at whatever point, it gives back what it had.
"""

import math
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from groupstate.batch import Batch, BatchGroup
from groupstate.core.arguments import integer, integer_or_none, seconds, shown
from groupstate.core.book import Book
from groupstate.core.events import TRAIN, VALIDATION, PayloadRef
from groupstate.core.explain import Explanation, explain
from groupstate.core.group import Group
from groupstate.core.prompt import Prompt, decoded_prompt
from groupstate.core.trajectory import Trajectory, restored
from groupstate.engines.port import Engine
from groupstate.errors import BadSettings, DamagedPayload, RunIsClosed, SampleError, SamplerBusy, SampleTimeout
from groupstate.logs import Logger
from groupstate.runtime.controller import Claim, Controller, Waiter
from groupstate.runtime.refusals import last_failure, why_never

log = Logger("groupstate.sampler")


class Sampler:
    def __init__(self, controller: Controller, engine: Engine | None = None) -> None:
        self._controller = controller
        self._engine = engine
        self._ledger = controller.ledger
        self._book: Book = controller.book
        self.given: list[Callable[[Batch], None]] = []
        """Called with each batch before its sampler has it; they take note and never raise."""

    async def sample(
        self,
        batch_size: int,
        *,
        weight_version: int | None = None,
        partition: str = TRAIN,
        timeout_s: float | None = None,
        wanted: frozenset[str] | None = None,
    ) -> Batch:
        """Claim the oldest `batch_size` groups, waiting until there are so many.

        Args:
            batch_size: groups.
            weight_version: the trainer's version; above the current one it is published first.
            partition: `"train"` or `"val"`.
            timeout_s: seconds after which `SampleTimeout` says what is missing; 0 takes only what is there, None and
                infinity wait for ever.
            wanted: the very groups to claim, for validation; None for whichever come first.

        Raises:
            WeightVersionError: `weight_version` is below the current one.
            SampleError: the batch can't come (see its subclasses); what is sampleable stays so.
            BadInput, BadSettings: an argument that can't be; nothing was published.
            RunIsClosed: the run is closed.
            DamagedPayload: of a validation group; a damaged training group is evicted and another awaited.
            LogFailed: the log is broken.
        """
        batch_size = self.check(batch_size, partition)
        weight_version = integer_or_none("weight_version", weight_version)
        patience = Patience.of(timeout_s)
        if weight_version is not None:
            self._ledger.publish(weight_version)
        while True:
            batch = await self._claimed(batch_size, partition, patience, wanted)
            if batch is not None:
                for observer in self.given:
                    observer(batch)
                return batch

    async def _claimed(
        self, batch_size: int, partition: str, patience: "Patience", wanted: frozenset[str] | None
    ) -> Batch | None:
        """One claim and its batch; None if something in it was damaged and has been evicted."""
        waiter = self._controller.request(batch_size, partition, wanted)
        try:
            await self._answered(waiter, partition, patience)
            if waiter.error is not None:
                raise waiter.error
            assert waiter.claim is not None
            await self._ledger.log.durable(waiter.claim.seq)
            data, damaged = await self._payloads(waiter.claim)
            if not damaged:
                return _batch(waiter.claim, partition, data, self._ledger.run_key)
            if partition != TRAIN:
                group_id, text = next(iter(damaged.items()))
                raise DamagedPayload(f"validation group {group_id!r}: {text}")
            self._controller.give_back_damaged(waiter.claim, damaged)
            return None
        except SampleTimeout:
            self._controller.withdraw(waiter, "timeout")
            raise
        except BaseException:
            self._controller.withdraw(waiter, "cancelled")
            raise

    async def wait_sampleable(self, count: int, partition: str = TRAIN, *, timeout_s: float | None = None) -> int:
        """Wait until `count` groups are sampleable; takes nothing. Returns how many there are.

        Raises:
            SampleTimeout: not within `timeout_s` seconds; it says what is missing.
            SampleError: there never will be so many.
        """
        check_partition(partition)
        count = integer("count", count, least=0)
        patience = Patience.of(timeout_s)
        if partition != TRAIN:
            return await self._watch(count, partition, patience)
        self._controller.watched.append(count)
        try:
            self._controller.settle()
            return await self._watch(count, partition, patience)
        finally:
            self._controller.watched.remove(count)

    async def _watch(self, count: int, partition: str, patience: "Patience") -> int:
        def explained() -> Explanation:
            found = self.explain(partition)
            blocked = found.blocked_by or f"{found.sampleable} of {count} groups are sampleable"
            return attrs.evolve(found, needed=found.needed or count, blocked_by=blocked)

        quiet = Quiet(self._controller, patience, "wait_sampleable()", explained)
        while self.sampleable_count(partition) < count:
            never = why_never(self._controller, count, partition)
            if never is not None:
                raise never
            await quiet.wait(self._controller.changed.wait, lambda: self.sampleable_count(partition) >= count)
        return self.sampleable_count(partition)

    def sampleable_count(self, partition: str = TRAIN) -> int:
        check_partition(partition)
        return self._controller.sampleable_count(partition)

    def explain(self, partition: str = TRAIN) -> Explanation:
        """What the oldest waiting `sample()` waits for."""
        check_partition(partition)
        explanation = explain(
            self._book,
            self._controller.rules,
            partition=partition,
            now_ns=self._ledger.clock_ns(),
            has_source=self._controller.source is not None,
            dispatches=self._controller.admits,
            observed=self._controller.admission.refills_outside,
        )
        if told := last_failure(self._controller, dict(explanation.evicted)):
            explanation = attrs.evolve(explanation, last_failure=told)
        if explanation.unblocked_by and (still := self._standing_still()):
            explanation = attrs.evolve(explanation, unblocked_by=(still, *explanation.unblocked_by))
        return explanation

    def _standing_still(self) -> str:
        """What must happen before the engine generates again; empty where it does."""
        if self._controller.turn is not None:
            return "the trainer's turn must end: until then the engine generates nothing"
        state = getattr(self._engine, "state", "generating")
        if state == "generating":
            return ""
        return f"the engine is {state}, by a call from outside: until it is resumed it generates nothing"

    def check(self, batch_size: int, partition: str) -> int:
        """The batch size, as Python's own integer.

        Raises:
            SampleError, BadSettings, RunIsClosed: such a batch can't be asked for now.
        """
        check_partition(partition)
        if self._controller.closing:
            raise RunIsClosed("the run is closed; open it again to sample")
        batch_size = integer("batch_size", batch_size, least=1, error=SampleError)
        rules = self._controller.rules
        if partition != TRAIN or rules.mode != "sync":
            return batch_size
        if self._book.waiting(TRAIN):
            raise SamplerBusy("a sample() of the training partition waits already; in sync mode one may wait at a time")
        if rules.batch_size is not None and batch_size > rules.batch_size:
            raise SampleError(
                f"sample({batch_size}) is above the rules' batch_size {rules.batch_size}, which bounds the refills "
                "of sync mode; ask for less or raise batch_size"
            )
        return batch_size

    async def _answered(self, waiter: Waiter, partition: str, patience: "Patience") -> None:
        """Wait for the answer; warn each time that nothing has happened for `stall_s`."""
        quiet = Quiet(self._controller, patience, "sample()", lambda: self.explain(partition))
        while not waiter.answered.is_set():
            await quiet.wait(waiter.answered.wait, waiter.answered.is_set)
        # A set event is passed without suspending; the caller's cancellation must still be seen.
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _payloads(self, claim: Claim) -> tuple[dict[int, bytes], dict[str, str]]:
        """Payloads by key, and the groups of which one can't be read."""
        store = self._ledger.log.payloads
        refs = [(group.group_id, group.payloads()) for group in claim.groups]
        data: dict[int, bytes] = {}
        damaged: dict[str, str] = {}

        def read() -> None:
            for group_id, of_group in refs:
                try:
                    data.update([(ref.key, store.get(ref)) for ref in of_group])
                except DamagedPayload as error:
                    damaged[group_id] = str(error)

        if store.blocks and not all(store.in_memory(ref) for _, of_group in refs for ref in of_group):
            await anyio.to_thread.run_sync(read)
        else:
            read()
        return data, damaged


@attrs.frozen
class Patience:
    """How long one `sample()` waits, however often it has to begin anew for a damaged group."""

    timeout_s: float
    until: float
    """On the event loop's clock."""

    @classmethod
    def of(cls, timeout_s: float | None) -> "Patience":
        """
        Raises:
            BadInput: no duration.
        """
        checked_s = math.inf if timeout_s is None else seconds("timeout_s", timeout_s, endless=True)
        return cls(checked_s, anyio.current_time() + checked_s)


class Quiet:
    """One wait: it warns each time that nothing has happened for `stall_s`, and runs out of patience in the end."""

    def __init__(
        self, controller: Controller, patience: Patience, what: str, explained: Callable[[], Explanation]
    ) -> None:
        self._controller = controller
        self._patience = patience
        self._what = what
        self._explained = explained
        self._now_ns = controller.ledger.clock_ns
        self._told_at_ns = self._now_ns()

    async def wait(self, event: Callable[[], Awaitable[object]], came: Callable[[], bool]) -> None:
        """Wait for the event, or until a warning is due.

        Raises:
            SampleTimeout: the time is over, and what is waited for hasn't come.
        """
        stall_s = self._controller.rules.stall_s or math.inf
        quiet_s = (self._now_ns() - max(self._told_at_ns, self._controller.progress_at_ns)) / 1e9
        if quiet_s >= stall_s:
            log.warning("a wait is stalled", call=self._what, explanation=str(self._explained()))
            self._told_at_ns = self._now_ns()
            quiet_s = 0.0
        left = self._patience.until - anyio.current_time()
        with anyio.move_on_after(max(0.0, min(left, stall_s - quiet_s))):
            await event()
        if not came() and anyio.current_time() >= self._patience.until:
            raise SampleTimeout(self._patience.timeout_s, self._explained())


def check_partition(partition: str) -> None:
    """
    Raises:
        BadSettings: no such partition.
    """
    if partition not in (TRAIN, VALIDATION):
        raise BadSettings(f"there is no partition {shown(partition)}; it is {TRAIN!r} or {VALIDATION!r}")


def _batch(claim: Claim, partition: str, data: dict[int, bytes], run_key: str) -> Batch:
    groups = tuple(_batch_group(g, lag, data) for g, lag in zip(claim.groups, claim.lags, strict=True))
    return Batch(claim.batch, partition, groups, claim.weight_version, claim.tally, run_id=run_key)


def _batch_group(group: Group, lag: int, data: dict[int, bytes]) -> BatchGroup:
    return BatchGroup(
        group_id=group.group_id,
        size=group.needed,
        phase=str(group.phase),
        partial=group.partial,
        dataset=group.dataset,
        weight_version=group.stamp,
        lag=lag,
        sessions=tuple(_sessions(group, data)),
        prompt=_prompt(group, data),
    )


def _sessions(group: Group, data: dict[int, bytes]) -> Sequence[tuple[int, tuple[Trajectory, ...]]]:
    return [
        (number, restored(session.trajectories, data[session.payload.key] if session.payload else None))
        for number, session in enumerate(group.sessions)
        if session.state == "finished"
    ]


def _prompt(group: Group, data: dict[int, bytes]) -> Prompt | None:
    ref: PayloadRef | None = group.prompt
    if ref is None:
        return None
    return decoded_prompt(data[ref.key], dataset=group.dataset, n=group.needed, group_id=group.group_id)
