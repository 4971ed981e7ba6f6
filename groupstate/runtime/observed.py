"""Groups whose sessions run outside, known only by what a system outside lists: a status and trajectories.

The listing of such a system (verl's TransferQueue) is taken again and again by a plain loop; what changed since the
last one is recorded as events of sessions that are marked `observed`. No event loop is needed or used, so the log must
keep what is posted on the caller's thread: `MemoryLog`, or `FileLog(inline=True)`. One thread calls.

Rule 1: a session's end is recorded only once its group's status is terminal: before that nobody knows whether its
trajectories are all there. Then the ends of all sessions are recorded at once, in order. In a failed group a session
without trajectories has failed: whether it ended well with none can't be told from a status.
Rule 2: a listing is whole. What isn't in it any more was removed outside: a group in flight is lost by that, and one
that was sampleable is evicted as damaged. A group in a batch may be removed at any time.
Rule 3: what can't be true is passed over with one warning and harms no other group. A trajectory that can't be
recorded costs its session, as that of any other session does.

Refills: credit is left to the caller, who alone knows where prompts come from. `take_refills()` says how many he
should dispatch now; as many of the next new training ids in a listing are recorded as those refills, in order. One that
comes when the rules have no place for it, or with another size than the evicted group had, is a group like any other,
and its credit is forfeited. `give_up_refills()` forfeits what is owed when there are no more prompts. How many refills
were taken isn't in the log: after a run was opened again, those whose ids had not shown up are owed anew.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.arguments import integer, integer_or_none
from groupstate.core.book import Book
from groupstate.core.explain import Explanation
from groupstate.core.group import SETTLED, Group
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import Rules
from groupstate.core.supply import refill_room
from groupstate.core.trajectory import WEIGHT_VERSION_MAX, record_without_tokens
from groupstate.errors import BadInput, BadSettings, LogError, LogFailed, UnusableResult
from groupstate.log.port import EventLog
from groupstate.logs import Logger
from groupstate.runtime import recovery
from groupstate.runtime.controller import Claim, Controller
from groupstate.runtime.keeping import EVENTS_PER_SNAPSHOT, Keeping, checked_events
from groupstate.runtime.ledger import MESSAGE_CHARS_MAX, Ledger
from groupstate.runtime.sampler import Sampler

log = Logger("groupstate.observed")

STATUSES: Final = ("pending", "running", "finished", "failure")
ENDED: Final = ("finished", "failure")

SIZE_MAX: Final = 65_536
"""Sessions of a group; a larger size is a tag that was misread."""


@attrs.frozen(order=True)
class RowKey:
    """Names one trajectory; `str()` of it is the text form."""

    group_id: str
    session: int
    index: int

    def __str__(self) -> str:
        return f"{self.group_id}_{self.session}_{self.index}"


def split_key(text: str) -> RowKey:
    """Read `{group_id}_{session}_{index}` from the right, since a group id may hold underscores.

    Whether a key is that of a trajectory at all can't be seen from its text: only its tags say so.

    Raises:
        BadInput: it doesn't end in two numbers.
    """
    group_id, *numbers = text.rsplit("_", 2)
    if not group_id or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise BadInput(f"key {text!r} is none of a trajectory; it must be '<group id>_<session>_<index>'")
    return RowKey(group_id, int(numbers[0]), int(numbers[1]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


@attrs.frozen(kw_only=True)
class ReportedRow:
    """What is known of one trajectory; its tokens stay outside."""

    metrics: Mapping[str, float] = attrs.field(factory=dict)
    prompt_tokens: int = 0
    response_tokens: int = 0
    spans: tuple[ev.VersionSpan, ...] = ()
    versions: tuple[int, int] | None = None
    """Oldest and newest weight version of its tokens, in place of spans where that is all that is known. Which
    tokens were the newest version's is not known then; the last one stands for them."""


@attrs.frozen(kw_only=True)
class Reported:
    """One group of a listing. Nothing is checked here: whatever was read outside may be put in."""

    status: str
    """`pending`, `running`, `finished` or `failure`."""
    stamp: int
    """Weight version at dispatch."""
    size: int | None = None
    """Sessions; None where it isn't known."""
    partition: str = ev.TRAIN
    rows: Mapping[tuple[int, int], ReportedRow] = attrs.field(factory=dict)
    """Trajectories by (session, index)."""


Listing = Mapping[str, Reported]
"""By group id: every group that the system outside holds."""


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

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]


@attrs.define
class _Seen:
    """What a listing said of a group last."""

    mark: tuple[str, int] | None = None
    """Status and number of trajectories when it was taken in; None if it never was, or must be looked at again."""
    keys: frozenset[tuple[int, int]] | None = None
    """Trajectories that were known once the group had ended."""
    problem: str = ""
    """What was warned of last."""


class StatusFeed:
    def __init__(self, ledger: Ledger, controller: Controller, *, group_size: int) -> None:
        """
        Args:
            controller: one without a source.
            group_size: sessions of a group whose size isn't reported.

        Raises:
            BadSettings: the log needs an event loop, or the controller draws prompts by itself.
        """
        if ledger.log.payloads.blocks:
            raise BadSettings(
                "a status feed needs a log that keeps events on the caller's thread: FileLog(inline=True)"
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
        self._sampler = Sampler(controller)
        self._seen: dict[str, _Seen] = {group_id: _Seen() for group_id in self.book.groups}
        self._evicted: dict[str, None] = {}
        self._taken = 0
        """Refills that were taken and whose ids have not shown up."""
        self._in_vain: tuple[int, int, str] | None = None
        """The latest `sample_now` that had nothing to give: last event, groups, partition."""
        controller.refills_outside = True
        ledger.observers.append(self._note)

    @classmethod
    def begin(
        cls,
        event_log: EventLog,
        rules: Rules,
        *,
        group_size: int,
        weight_version: int | None = None,
        snapshot_events: int = EVENTS_PER_SNAPSHOT,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> "StatusFeed":
        """A feed on a log, which is new or is gone on with.

        Args:
            snapshot_events: events between two snapshots, which make beginning again quick; written on this thread.
        """
        snapshot_events = checked_events(snapshot_events)
        weight_version = integer_or_none("weight_version", weight_version, error=BadSettings)
        ledger = Ledger(event_log, rules, clock_ns=clock_ns)
        recovery.load(ledger)
        feed = cls(ledger, Controller(ledger, None, group_size=group_size), group_size=group_size)
        Keeping(ledger, events=snapshot_events)
        if not feed.book.run_id:
            run_id = str(getattr(event_log, "log_id", "memory"))
            recovery.start(ledger, run_id=run_id, weight_version=weight_version or 0, seed=0)
        else:
            torn_bytes = getattr(event_log, "torn_bytes", 0)
            recovery.recover(ledger, torn_bytes=torn_bytes, weight_version=weight_version)
            feed.controller.rejudge()
        ledger.settle()
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
        changed: another status, or another number of trajectories.

        Raises:
            LogFailed: the log is broken.
        """
        unseen, self._seen = self._seen, {}
        for group_id, report in listing.items():
            seen = self._seen[group_id] = unseen.pop(group_id) if group_id in unseen else _Seen()
            if seen.mark is None or seen.mark != _mark(report):
                self._take(group_id, report, seen)
        for group_id in unseen:
            self._removed(group_id)

    def _take(self, group_id: str, report: Reported, seen: _Seen) -> None:
        problem = _malformed(group_id, report)
        if not problem:
            problem = self._step(group_id, report, seen)
            seen.mark = _mark(report)
            self.ledger.settle()
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
        if report.status in ENDED:
            seen.keys = frozenset(report.rows)
            self._end(group, report)
        elif report.status == "running":
            self._start(group)
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

    def _start(self, group: Group) -> None:
        for number, session in enumerate(group.sessions):
            if session.state == "waiting":
                self.ledger.record(ev.SessionStarted(group.group_id, number, session.attempt, observed=True))

    def _end(self, group: Group, report: Reported) -> None:
        """Record how every session ended, as far as the status and the trajectories tell."""
        self._start(group)
        by_session: dict[int, dict[int, ReportedRow]] = {}
        for session, index in sorted(report.rows):
            by_session.setdefault(session, {})[index] = report.rows[session, index]
        more = max(report.size or 0, max(by_session, default=-1) + 1)
        if more > group.size or report.size not in (None, group.size):
            text = "trajectories of sessions beyond are left out"
            log.warning("a group has another size than it was submitted with", group=group.group_id,
                        submitted=group.size, reported=more, consequence=text)  # fmt: skip
        ends = [
            self._ending(group, number, by_session.get(number, {}), report.status)
            for number, session in enumerate(group.sessions)
            if session.state not in SETTLED
        ]
        failed = any(session.state == "failed" for session in group.sessions)
        if report.status == "failure" and not failed and all(isinstance(end, ev.SessionFinished) for end in ends):
            text = "its group is reported as failed, and every session has trajectories: the last one is taken to have"
            log.warning("a failed group has trajectories of every session", group=group.group_id, consequence=text)
            ends[-1] = _failure(group, ends[-1].session, "error", text)
        for end in ends:
            self._record_end(group, end)

    def _ending(
        self, group: Group, number: int, rows: Mapping[int, ReportedRow], status: str
    ) -> ev.SessionFinished | ev.SessionFailed:
        if not rows and status == "failure":
            return _failure(group, number, "error", "its group is reported as failed, and it has no trajectory")
        if not rows and self.rules.empty_session == "fail":
            return _failure(group, number, "empty", "its group is reported as finished, and it has no trajectory")
        who = f"of session {number} of group {group.group_id!r}"
        try:
            records = tuple(_record(index, row, f"trajectory {index} {who}") for index, row in rows.items())
        except UnusableResult as error:
            log.warning(
                "a reported trajectory is unusable",
                group=group.group_id,
                session=number,
                attempt=group.sessions[number].attempt,
                error=str(error),
            )
            return _failure(group, number, "refused", str(error))
        return ev.SessionFinished(group.group_id, number, group.sessions[number].attempt, records, observed=True)

    def _record_end(self, group: Group, end: ev.SessionFinished | ev.SessionFailed) -> None:
        try:
            self.ledger.record(end)
        except LogFailed:
            raise
        except LogError as error:
            # Nothing was written: what got past the door can't be kept, and that is this session's failure alone.
            log.warning(
                "a reported session can't be kept",
                group=group.group_id,
                session=end.session,
                attempt=end.attempt,
                error=str(error),
            )
            self.ledger.record(_failure(group, end.session, "refused", str(error)))

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
        if not group.in_flight:
            self._damaged(group, "it was removed outside")
            return
        log.warning("a group in flight was removed outside", group=group_id)
        for number, session in enumerate(group.sessions):
            if session.state not in SETTLED:
                self.ledger.record(_failure(group, number, "lost", "its group was removed outside"))
        self.ledger.settle()

    def _damaged(self, group: Group, text: str) -> None:
        """Trajectories of a group that could be sampled are gone: the rules evict it."""
        if group.phase not in TERMINAL or group.group_id in self.controller.damaged:
            return
        log.warning("a group lost trajectories", group=group.group_id, text=text)
        self.controller.mark_damaged({group.group_id: text})
        self._in_vain = None
        self.ledger.settle()

    # Batches -----------------------------------------------------------------------------------------

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
        weight_version = integer_or_none("weight_version", weight_version)
        if weight_version is not None:
            self.ledger.publish(weight_version)
        if self._in_vain == (self.book.last_seq, batch_size, partition):
            return None
        waiter = self.controller.request(batch_size, partition)
        if waiter.error is not None:
            raise waiter.error
        if waiter.claim is None:
            self.explanation = self._sampler.explain(partition)
            self.controller.withdraw(waiter, "nothing now")
            self._in_vain = self.book.last_seq, batch_size, partition
            return None
        self._need_kept(waiter.claim.seq)
        self.explanation = None
        return _sampled(waiter.claim)

    def commit(self, batch: Sampled | int) -> None:
        """The trainer is done with a batch, for good.

        Raises:
            UnknownBatch: it was never sampled, or is committed or returned already.
            LogFailed: the log is broken.
        """
        seq = self.ledger.record(ev.BatchCommitted(_number(batch)))
        self.ledger.settle()
        self._need_kept(seq)

    def release(self, batch: Sampled | int) -> None:
        """Give a batch back untrained. A group of it that isn't listed any more is evicted as damaged.

        Raises:
            UnknownBatch: it was never sampled, or is committed or returned already.
            LogFailed: the log is broken.
        """
        number = _number(batch)
        out = self.book.batches.get(number)
        seq = self.ledger.record(ev.BatchReturned(number, "released"))
        for group_id in () if out is None else out.group_ids:
            if group_id not in self._seen:
                self._damaged(self.book.group(group_id), "it was removed outside")
        self.ledger.settle()
        self._need_kept(seq)

    def _need_kept(self, seq: int) -> None:
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
        self._taken += count
        return count

    def give_up_refills(self, reason: str = "no more prompts") -> int:
        """Forfeit all refills that are owed, those that were taken and did not show up included; says how many."""
        count = len(self.book.credits)
        if count:
            self.ledger.record(ev.RefillForfeited(count, reason))
            self.ledger.settle()
        return count


def _mark(report: Any) -> tuple[str, int] | None:
    return (report.status, len(report.rows)) if isinstance(report, Reported) and _has_rows(report) else None


def _has_rows(report: Reported) -> bool:
    return isinstance(report.rows, Mapping)


def _malformed(group_id: Any, report: Any) -> str:
    """What is wrong with the form of a report, as text."""
    if not isinstance(group_id, str) or not group_id:
        return "its id must be a string that is not empty"
    if not isinstance(report, Reported) or not _has_rows(report):
        return f"its report is {type(report).__name__}; it must be a Reported, whose rows are a mapping"
    if report.status not in STATUSES:
        return f"its status is {report.status!r}; it must be one of {', '.join(STATUSES)}"
    if not _is_int(report.stamp, -WEIGHT_VERSION_MAX, WEIGHT_VERSION_MAX):
        return f"its stamp is {report.stamp!r}; it must be a weight version"
    if report.size is not None and not _is_int(report.size, 1, SIZE_MAX):
        return f"its size is {report.size!r}; it must be from 1 to {SIZE_MAX}, or None"
    if report.partition not in (ev.TRAIN, ev.VALIDATION):
        return f"its partition is {report.partition!r}; it must be {ev.TRAIN!r} or {ev.VALIDATION!r}"
    strange = [key for key in report.rows if not _is_place(key)]
    return f"it has a trajectory {strange[0]!r}; it must be (session, index)" if strange else ""


def _is_place(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(_is_int(number, 0, WEIGHT_VERSION_MAX) for number in key)


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _record(index: int, row: Any, who: str) -> ev.TrajectoryRecord:
    if not isinstance(row, ReportedRow):
        raise UnusableResult(f"{who} is {type(row).__name__}; it must be a ReportedRow")
    return record_without_tokens(
        index,
        metrics=row.metrics,
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        spans=row.spans if row.versions is None else _spans(row.versions, row.response_tokens, who),
        who=who,
    )


def _spans(versions: Any, count: Any, who: str) -> tuple[ev.VersionSpan, ...]:
    """The spans that stand for the oldest and the newest version."""
    try:
        oldest, newest = versions
        if oldest > newest:
            raise ValueError
        if oldest == newest or count < 2:
            return (ev.VersionSpan(0, count, oldest),) if count else ()
    except (TypeError, ValueError):
        raise UnusableResult(f"{who} has versions = {versions!r}; it must be (oldest, newest)") from None
    return ev.VersionSpan(0, count - 1, oldest), ev.VersionSpan(count - 1, count, newest)


def _failure(group: Group, number: int, failure: ev.FailureKind, message: str) -> ev.SessionFailed:
    text, attempt = message[:MESSAGE_CHARS_MAX], group.sessions[number].attempt
    return ev.SessionFailed(group.group_id, number, attempt, failure, text, observed=True)


def _sampled(claim: Claim) -> Sampled:
    keys = tuple(
        RowKey(group.group_id, number, row.index)
        for group in claim.groups
        for number, session in enumerate(group.sessions)
        for row in session.trajectories
    )
    return Sampled(claim.batch, claim.groups, claim.lags, claim.weight_version, claim.metrics, keys)


def _number(batch: Sampled | int) -> int:
    return batch.batch if isinstance(batch, Sampled) else integer("batch", batch, wanted="a batch or its number")
