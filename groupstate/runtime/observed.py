"""Groups whose sessions run outside, known only by what a system outside lists: a status and trajectories.

The listing of such a system (verl's TransferQueue) is taken again and again by a plain loop; what changed since the
last one is recorded as events of sessions that are marked `observed`. No event loop is needed or used, so the log must
keep what is posted on the caller's thread: `MemoryLog`, `FileLog(inline=True)`, or `FileLog(later=steps)` with `Steps`,
which makes one commit of what one listing led to. One thread calls.

Rule 1: a session's end is recorded only once its group's status is terminal: before that nobody knows whether its
trajectories are all there. What the ends are is told by `reported_ends`.
Rule 2: a listing is whole. What isn't in it any more was removed outside: a group in flight is lost by that, and one
that was sampleable is evicted as damaged. A group in a batch may be removed at any time.
Rule 3: what can't be true is passed over with one warning and harms no other group.

Refills: credit is left to the caller, who alone knows where prompts come from. `take_refills()` says how many he
should dispatch now; as many of the next new training ids in a listing are recorded as those refills, in order. One that
comes when the rules have no place for it, or with another size than the evicted group had, is a group like any other,
and its credit is forfeited. `give_up_refills()` forfeits what is owed when there are no more prompts. How many refills
were taken isn't in the log: after a run was opened again, those whose ids had not shown up are owed anew.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import attrs

from groupstate.core import events as ev
from groupstate.core.arguments import integer, integer_or_none
from groupstate.core.book import Book
from groupstate.core.evict import Missing, reasons_of
from groupstate.core.explain import Explanation
from groupstate.core.group import Group
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import Rules
from groupstate.core.select import at_lag_bound
from groupstate.core.supply import refill_room
from groupstate.errors import BadSettings, LogError, LogFailed, MissingMetric
from groupstate.log.port import EventLog
from groupstate.logs import Logger
from groupstate.runtime import recovery
from groupstate.runtime.controller import Claim, Controller, Waiter
from groupstate.runtime.keeping import EVENTS_PER_SNAPSHOT, Keeping, checked_events
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.refusals import why_never
from groupstate.runtime.reported import (
    ENDED,
    SIZE_MAX,
    Listing,
    Mark,
    Reported,
    RowKey,
    malformed,
    mark_of,
)
from groupstate.runtime.reported import ReportedRow as ReportedRow  # Whoever makes a listing imports all from here.
from groupstate.runtime.reported_ends import record_ends, record_loss, record_starts
from groupstate.runtime.sampler import Sampler

log = Logger("groupstate.observed")


class Steps:
    """The steps of a `FileLog(later=steps)`, taken when the feed says so: what was posted since becomes one commit."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def __call__(self, step: Callable[[], None]) -> None:
        self._due.append(step)

    def take(self) -> None:
        """Keep all that was posted. What goes wrong is the log's, which says so to whoever needs it kept."""
        while self._due:
            self._due.pop()()


@attrs.frozen
class Sampled:
    """A batch that `sample_now` claimed."""

    batch: int
    groups: tuple[Group, ...]
    lags: tuple[int, ...]
    weight_version: int
    metrics: dict[str, float]
    keys: tuple[RowKey, ...]
    """All trajectories, in the order of the groups, then by session and index."""
    run_id: str = attrs.field(default="", kw_only=True, eq=False, repr=False)
    """See `groupstate.Batch`."""

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]


@attrs.define
class _Seen:
    """What a listing said of a group last."""

    mark: Mark | None = None
    """When it was taken in; None if it never was, or must be looked at again."""
    keys: frozenset[tuple[int, int]] | None = None
    """Trajectories that were known once the group had ended."""
    problem: str = ""
    """What was warned of last."""


class StatusFeed:
    def __init__(
        self,
        ledger: Ledger,
        controller: Controller,
        *,
        group_size: int,
        steps: Steps | None = None,
        restamps: bool = False,
    ) -> None:
        """
        Args:
            controller: one without a source.
            group_size: sessions of a group whose size isn't reported.
            steps: what the log was given as `later`.
            restamps: a group in flight that is reported with another stamp than it has was dispatched anew: it starts
                over and counts from that stamp. Else it keeps its own.

        Raises:
            BadSettings: the log needs an event loop, or the controller draws prompts by itself.
        """
        if ledger.log.payloads.blocks:
            raise BadSettings(
                "a status feed needs a log that keeps events on the caller's thread: FileLog(inline=True) or (later=)"
            )
        if controller.source is not None:
            raise BadSettings("a status feed needs a controller without a source: prompts are dispatched outside")
        self.ledger = ledger
        self.controller = controller
        self.book: Book = ledger.book
        self.rules = ledger.rules
        self.group_size = integer("group_size", group_size, least=1, most=SIZE_MAX, error=BadSettings)
        self.explanation: Explanation | None = None
        """Why the latest `sample_now` had nothing to give; None if it gave a batch."""
        self._steps = steps or Steps()
        self._restamps = restamps
        self._sampler = Sampler(controller)
        self._seen: dict[str, _Seen] = {group_id: _Seen() for group_id in self.book.groups}
        self._evicted: dict[str, None] = {}
        self._taken = 0
        """Refills that were taken and whose ids have not shown up."""
        self._in_vain: tuple[int, int, str] | None = None
        """The latest `sample_now` that had nothing to give: last event, groups, partition."""
        controller.admission.refills_outside = True
        ledger.observers.append(self._note)

    @classmethod
    def begin(
        cls,
        event_log: EventLog,
        rules: Rules,
        *,
        group_size: int,
        weight_version: int | None = None,
        resume: Callable[[Ledger], CheckpointMark | None] = lambda ledger: None,
        steps: Steps | None = None,
        restamps: bool = False,
        snapshot_events: int = EVENTS_PER_SNAPSHOT,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> "StatusFeed":
        """A feed on a log, which is new or is gone on with.

        Args:
            resume: says which mark to go back to in a log that is gone on with; None for none. The mark's weight
                version then counts, in place of `weight_version`. It may commit batches that would come back.
            steps: what the log was given as `later`.
            restamps: see the constructor.
            snapshot_events: events between two snapshots, which make beginning again quick; written on this thread.
        """
        snapshot_events = checked_events(snapshot_events)
        weight_version = integer_or_none("weight_version", weight_version, error=BadSettings)
        ledger = Ledger(event_log, rules, clock_ns=clock_ns)
        recovery.load(ledger)
        controller = Controller(ledger, None, group_size=group_size)
        feed = cls(ledger, controller, group_size=group_size, steps=steps, restamps=restamps)
        Keeping(ledger, events=snapshot_events)
        if not feed.book.run_id:
            run_id = str(getattr(event_log, "log_id", "memory"))
            recovery.start(ledger, run_id=run_id, weight_version=weight_version or 0, seed=0)
        else:
            torn_bytes = getattr(event_log, "torn_bytes", 0)
            mark = resume(ledger)
            version = weight_version if mark is None else None
            recovery.recover(ledger, torn_bytes=torn_bytes, weight_version=version, resume_at=mark)
            feed.controller.rejudge()
        ledger.settle()
        feed._steps.take()
        return feed

    def close(self, reason: str = "closed") -> None:
        """Close the run and its log. Batches that are out come back when it is opened again."""
        self.ledger.record(ev.RunClosed(reason))
        with suppress(StopIteration):
            # Such a log has nothing to wait for, so its coroutine ends at once.
            self.ledger.log.aclose().send(None)

    def _note(self, record: ev.Record) -> None:
        if isinstance(record.event, ev.GroupEvicted):
            self._evicted[record.event.group_id] = None
        elif isinstance(record.event, ev.RefillForfeited):
            self._taken = min(self._taken, len(self.book.credits))

    # Listings ----------------------------------------------------------------------------------------

    def observe(self, listing: Listing) -> None:
        """Take in what changed since the listing before. Costs one look at each group, and work for those that
        changed: another status, another number of trajectories, or another stamp.

        Raises:
            LogFailed: the log is broken.
        """
        self.observe_changes(listing, [group_id for group_id in self._seen if group_id not in listing])

    def observe_changes(self, changed: Listing, removed: Iterable[str] = ()) -> None:
        """The same for a caller that knows what has changed. Costs what is given.

        Args:
            changed: groups that are listed and may have changed; others are as they were.
            removed: groups that aren't listed any more.

        Raises:
            LogFailed: the log is broken.
        """
        for group_id, report in changed.items():
            seen = self._seen.setdefault(group_id, _Seen())
            if seen.mark is None or seen.mark != mark_of(report):
                self._take(group_id, report, seen)
        for group_id in removed:
            self._seen.pop(group_id, None)
            self._removed(group_id)
        # Once, since rules and samplers must see the whole listing: what comes last in it may be the oldest.
        self.ledger.settle()
        self._steps.take()

    def _take(self, group_id: str, report: Reported, seen: _Seen) -> None:
        problem = malformed(group_id, report)
        if not problem:
            problem = self._step(group_id, report, seen)
            seen.mark = mark_of(report)
        else:
            # What is put right later may look the same from afar.
            seen.mark = None
        if problem and problem != seen.problem:
            log.warning("a reported group is passed over", group=group_id, problem=problem)
        seen.problem = problem

    def _step(self, group_id: str, report: Reported, seen: _Seen) -> str:
        """Record what a report says that is new; returns what is wrong with it."""
        if self.book.is_taken(group_id) is None:
            try:
                self._submit(group_id, report)
            except LogFailed:
                raise
            except LogError as error:
                return str(error)
        group = self.book.groups.get(group_id)
        if group is None or not group.in_flight:
            return self._after_end(group_id, group, report, seen)
        if self._restamps and report.stamp != group.stamp:
            text = "its prompt was dispatched anew outside"
            self.ledger.record(ev.GroupRequeued(group_id, text, weight_version=report.stamp))
            group = self.book.groups[group_id]
        if report.status in ENDED:
            seen.keys = frozenset(report.rows)
            record_ends(self.ledger, group, report)
        elif report.status == "running":
            record_starts(self.ledger, group)
        elif group.phase is Phase.RUNNING:
            return "it is reported as pending, and was running"
        return ""

    def _submit(self, group_id: str, report: Reported) -> None:
        refills = self._taken > 0 and report.partition == ev.TRAIN
        size = report.size
        if refills and size is None:
            size = self.book.credits[0].size
        fits = refills and refill_room(self.book, self.rules) > 0 and size == self.book.credits[0].size
        self.ledger.record(
            ev.GroupSubmitted(
                group_id,
                size or self.group_size,
                report.partition,
                report.stamp,
                self.book.lineage,
                "refill" if fits else "submit",
            )
        )
        if refills:
            self._taken -= 1
        if refills and not fits:
            self.ledger.record(ev.RefillForfeited(1, "it came without a place, or with another size"))

    def _after_end(self, group_id: str, group: Group | None, report: Reported, seen: _Seen) -> str:
        """A report of a group that has ended here: what is new of it comes too late."""
        if report.status not in ENDED:
            return f"it is reported as {report.status}, and has ended: {self.book.is_taken(group_id)}"
        keys = frozenset(report.rows)
        known = seen.keys
        if known is None and group is not None:
            rows = [(number, row) for number, session in enumerate(group.sessions) for row in session.trajectories]
            known = frozenset((number, row.index) for number, row in rows)
        elif known is None:
            # Of a group that has left, the first listing of this feed can't be told from what was there before.
            known = keys if seen.mark is None else frozenset()
        late = keys - known
        for session in sorted({session for session, _ in late}):
            attempt = 0
            if group is not None and session < group.size:
                attempt = group.sessions[session].attempt
            reason: ev.FenceReason = "gone" if group is None else "terminal"
            self.ledger.record(ev.ResultFenced(group_id, session, attempt, "finished", reason))
        if known - keys and group is not None:
            self._damaged(group, f"{len(known - keys)} of its trajectories were removed outside")
        if self.book.departed.get(group_id) is Phase.EVICTED and (late or seen.keys is None):
            self._evicted[group_id] = None  # There is something to clear, again.
        seen.keys = keys
        return ""

    def _removed(self, group_id: str) -> None:
        """A group isn't listed any more."""
        group = self.book.groups.get(group_id)
        if group is None:
            return
        if group.in_flight:
            log.warning("a group in flight was removed outside", group=group_id)
            record_loss(self.ledger, group, "its group was removed outside")
            group = self.book.groups[group_id]
        else:
            self._damaged(group, "it was removed outside")
        if group.partition == ev.VALIDATION and group.phase in TERMINAL:
            # The rules evict none, so it leaves by a batch that nobody gets.
            self.controller.discard([group])

    def _damaged(self, group: Group, text: str) -> None:
        """Trajectories of a group that could be sampled are gone: the rules evict it."""
        if group.phase not in TERMINAL or group.group_id in self.controller.damaged:
            return
        log.warning("a group lost trajectories", group=group.group_id, text=text)
        self.controller.mark_damaged({group.group_id: text})
        self._in_vain = None

    # Batches -----------------------------------------------------------------------------------------

    def ask(self, batch_size: int, *, weight_version: int | None = None, partition: str = ev.TRAIN) -> Waiter:
        """Wait for the oldest `batch_size` groups while listings come in: `answer` has them once there are so many.

        Raises:
            WeightVersionError: `weight_version` is below the current one.
            SampleError: such a batch can't be asked for.
            LogFailed: the log is broken.
        """
        batch_size = self._sampler.check(batch_size, partition)
        self.publish(weight_version)
        return self.controller.request(batch_size, partition)

    def answer(self, waiter: Waiter) -> Sampled | None:
        """The batch that was asked for; None if it isn't there yet, and `explain` says why.

        Raises:
            SampleError: the batch can't come (see its subclasses); what is sampleable stays so.
            LogFailed: the log is broken.
        """
        if waiter.error is not None:
            raise waiter.error
        if waiter.claim is None:
            return None
        self._need_kept(waiter.claim.seq)
        return _sampled(waiter.claim, self.ledger.run_key)

    def withdraw(self, waiter: Waiter, reason: str) -> None:
        """Whoever asked doesn't wait any more; a batch that he was given goes back."""
        self.controller.withdraw(waiter, reason)
        self._steps.take()

    def publish(self, weight_version: int | None) -> None:
        """Make a weight version the current one; None leaves it as it is.

        Raises:
            WeightVersionError: it is below the current one.
        """
        weight_version = integer_or_none("weight_version", weight_version)
        if weight_version is not None:
            self.ledger.publish(weight_version)

    def sampleable(self, *, weight_version: int | None = None, partition: str = ev.TRAIN) -> list[str]:
        """Groups that could be sampled, oldest first; takes nothing.

        Args:
            weight_version: as if it were published, where it is above the current one.
        """
        ready = self.book.ready(partition)
        if partition != ev.TRAIN:
            return [group.group_id for group in ready]
        ahead = max(0, (weight_version or 0) - self.book.weight_version)
        return [group.group_id for group in ready if not self._reasons(group, ahead)]

    def _judged(self, group: Group) -> object:
        return self._reasons(group, 0)

    def _reasons(self, group: Group, ahead: int) -> object:
        """What would keep a group from being sampled so many weight versions later; falsy if nothing."""
        lag = self.book.lag(group)
        if group.kept_lag is None:
            # One that is newer than the current version has a lag of 0 for a while yet.
            lag = max(0, self.book.weight_version + ahead - group.aged_from)
        return reasons_of(group, lag, self.rules, damaged=group.group_id in self.controller.damaged)

    def held_by(self, partition: str = ev.TRAIN) -> str | None:
        """The group in flight that `on_stale="wait"` waits for, by itself or with whoever samples; None if none."""
        group = at_lag_bound(self.book, self.rules, partition)
        return None if group is None else group.group_id

    def why_never(self, count: int, partition: str = ev.TRAIN) -> Exception | None:
        """What keeps `count` groups from ever being sampleable together, as far as that is certain; None if they may
        be. What lacks the filter's metric is told in sync mode too, where nothing is judged before somebody samples."""
        judged = map(self._judged, self.book.ready(partition)) if partition == ev.TRAIN else ()
        if (lacking := next((verdict for verdict in judged if isinstance(verdict, Missing)), None)) is not None:
            return MissingMetric(lacking.group_id, lacking.session, lacking.metric, lacking.present)
        return why_never(self.controller, count, partition)

    def explain(self, partition: str = ev.TRAIN) -> Explanation:
        """What the oldest batch that was asked for waits for."""
        return self._sampler.explain(partition)

    def sample_now(
        self, batch_size: int, *, weight_version: int | None = None, partition: str = ev.TRAIN
    ) -> Sampled | None:
        """Claim the oldest `batch_size` groups if that can be had now; else None, and `explanation` says why.

        To ask again when nothing has happened since writes nothing, so a loop may ask as often as it likes.

        Args:
            weight_version: the trainer's version; above the current one it is published first.

        Raises:
            WeightVersionError: `weight_version` is below the current one.
            SampleError: the batch can't come (see its subclasses); what is sampleable stays so.
            LogFailed: the log is broken.
        """
        batch_size = self._sampler.check(batch_size, partition)
        self.publish(weight_version)
        if self._in_vain == (self.book.last_seq, batch_size, partition):
            return None
        waiter = self.controller.request(batch_size, partition)
        sampled = self.answer(waiter)
        self.explanation = None if sampled else self.explain(partition)
        if sampled is None:
            self.withdraw(waiter, "nothing now")
            self._in_vain = self.book.last_seq, batch_size, partition
        return sampled

    def commit(self, batch: Sampled | int) -> None:
        """The trainer is done with a batch, for good.

        Raises:
            UnknownBatch: it was never sampled, is committed or returned already, or is another run's.
            LogFailed: the log is broken.
        """
        seq = self.ledger.commit(*_named(batch))
        self.ledger.settle()
        self._need_kept(seq)

    def mark(self, name: str = "") -> CheckpointMark:
        """Mark this place in the log; `begin(resume=...)` goes back to it.

        Raises:
            LogFailed: the log is broken.
        """
        mark = recovery.mark(self.ledger, name)
        self.ledger.settle()
        self._need_kept(mark.seq)
        return mark

    def release(self, batch: Sampled | int) -> None:
        """Give a batch back untrained. A group of it that isn't listed any more is evicted as damaged.

        Raises:
            UnknownBatch: it was never sampled, is committed or returned already, or is another run's.
            LogFailed: the log is broken.
        """
        number, run_key = _named(batch)
        out = self.book.batches.get(number)
        seq = self.ledger.release(number, run_key)
        for group_id in () if out is None else out.group_ids:
            if group_id not in self._seen:
                self._damaged(self.book.group(group_id), "it was removed outside")
        self.ledger.settle()
        self._need_kept(seq)

    def _need_kept(self, seq: int) -> None:
        self._steps.take()
        if self.ledger.log.durable_seq < seq:
            # Such a log has nothing to wait for: it has failed, and says so to whoever posts.
            self.ledger.log.post([])
        assert self.ledger.log.durable_seq >= seq, "a log that keeps events on this thread has kept what it took"

    # What the caller has to do outside -----------------------------------------------------------------

    def take_evicted(self) -> list[str]:
        """Groups that were evicted since this was asked last, in order: nobody needs their rows any more. One that
        gets rows after that, or that an earlier process evicted and that is still listed, is named again."""
        evicted, self._evicted = list(self._evicted), {}
        return evicted

    def take_refills(self) -> int:
        """How many prompts to dispatch now in the place of evicted groups, beyond those that were taken before."""
        count = max(0, min(len(self.book.credits), refill_room(self.book, self.rules)) - self._taken)
        count -= count % self.rules.refill_multiple
        self._taken += count
        return count

    def return_refills(self, count: int) -> None:
        """So many of the refills that were taken were not dispatched: they are owed again.

        Raises:
            BadInput: there aren't so many.
        """
        self._taken -= integer("count", count, least=0, most=self._taken)

    def give_up_refills(self, reason: str = "no more prompts") -> int:
        """Forfeit all refills that are owed, those that were taken and did not show up included; says how many."""
        count = len(self.book.credits)
        if count:
            self.ledger.record(ev.RefillForfeited(count, reason))
            self.ledger.settle()
        return count


def _sampled(claim: Claim, run_key: str) -> Sampled:
    keys = tuple(
        RowKey(group.group_id, number, row.index)
        for group in claim.groups
        for number, session in enumerate(group.sessions)
        for row in session.trajectories
    )
    return Sampled(claim.batch, claim.groups, claim.lags, claim.weight_version, claim.metrics, keys, run_id=run_key)


def _named(batch: Sampled | int) -> tuple[int, str]:
    """Its number, and the run that it is from as far as that is known."""
    if isinstance(batch, Sampled):
        return batch.batch, batch.run_id
    return integer("batch", batch, wanted="a batch or its number"), ""
