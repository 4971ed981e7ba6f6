"""What happened to a run from outside, taken from its log: prompts, how their sessions went, what the trainer did.

Rule 1: everything that the rules decide is left out, so that other rules can decide it.
Rule 2: times are kept as distances from what they followed: a session's from what had its group submitted, the
trainer's from what it had done before or from the batch that it had waited for. So they move with what moves.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.rules import Rules
from groupstate.core.select import why_held
from groupstate.core.supply import admissible, refills_now, shortage
from groupstate.errors import (
    BadInput,
    CustomRuleError,
    EvictionStreak,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RunIsClosed,
)
from groupstate.inspect.replay import applied
from groupstate.runtime.ledger import CANCELLED
from groupstate.runtime.recovery import stored_rules
from groupstate.runtime.sources import MixedSource

CUT = frozenset({"spare", "cancelled", "lost", "timeout"})
"""Failures of sessions that were ended from outside: how they would have gone on isn't known."""

REFUSALS = frozenset(
    refusal.__name__
    for refusal in (CustomRuleError, EvictionStreak, MissingMetric, NotEnoughGroups, RefillLimitExceeded)
)
"""Errors with which the rules answer a sampler. Other reasons of its end come from outside."""

FOLLOWS = (ev.GroupFinished, ev.GroupFailed, ev.GroupEvicted, ev.RefillForfeited, ev.DatasetStarved, ev.AdmissionHeld)
"""What follows from something else, so that more may follow yet."""

CLOSED = "the run closed"
RECOVERY = "recovery"
GROUP_TIMED_OUT = "the group did not end within group_deadline_s"


@attrs.define
class Attempt:
    """One try of a session."""

    start_after_ns: int
    """Since what made it due: the submission or requeue of its group, or the end of the try before."""
    start_seq: int
    version_behind: int | None
    """The first token's weight version below the current one; None if it wasn't told."""
    started_at_ns: int
    duration_ns: int = 0
    """Until it ended or was cut off."""
    end: ev.SessionFinished | ev.SessionFailed | None = None
    """None: it was still running when the run ended, or its group started over."""
    end_seq: int = 0
    version_at_end: int = 0

    @property
    def is_whole(self) -> bool:
        """It ended by itself."""
        if isinstance(self.end, ev.SessionFinished):
            return True
        return self.end is not None and self.end.failure not in CUT


@attrs.define
class Arrival:
    """A prompt, and how the sessions of its group went."""

    group_id: str
    dataset: str
    needed: int
    """Finished sessions that the group needs."""
    sessions: list[list[Attempt]]
    cancel: tuple[int, int] | None = None
    """`run.cancel`: how long after the submission, and the seq of the last end that it made."""
    requeues: list[tuple[int, int, int | None]] = attrs.Factory(list)
    """`run.requeue`: how long after the submission, the seq, and the new stamp where there is one."""
    spare: dict[int, tuple[int, int]] = attrs.Factory(dict)
    """How long the sessions that weren't needed took to end, and the seq of the last end; by how often the group had
    started over."""
    timeouts: dict[int, tuple[int, int]] = attrs.Factory(dict)
    """Expiry of the group's deadline: how long after the submission or requeue, and the seq; by the same."""


ActKind: TypeAlias = Literal[
    "begin",
    "submit",
    "publish",
    "request",
    "answer",
    "withdraw",
    "commit",
    "release",
    "closing",
    "close",
    "restart",
    "end",
]
"""A run draws nothing more from `closing` on; with `close` what is still under way is put back."""


@attrs.frozen
class Act:
    """Something that the trainer did, or that was done to the run."""

    kind: ActKind
    seq: int
    after_ns: int
    """Since the act before it. An answer comes when the rules give it, and then it is what the next counts from."""
    value: Any = None
    error: str = ""
    """Of an answer: the class of the error that the sampler got in place of a batch."""


@attrs.define
class Recorded:
    rules: Rules
    weight_version: int
    started_at_ns: int
    duration_ns: int = 0
    arrivals: dict[str, Arrival] = attrs.Factory(dict)
    drawn: list[str] = attrs.Factory(list)
    """Groups whose prompts came from the source, in order."""
    has_source: bool = False
    mixed: bool = False
    """The source was one of several datasets, that were drawn from by turns."""
    exhausted: bool = False
    """The source ran dry."""
    acts: list[Act] = attrs.Factory(list)
    records: list[ev.Record] = attrs.Factory(list)
    """The part of the log that this is taken from."""
    until: str = ""
    """Why the rest of the log is left out; empty if all of it is in."""


def recorded(records: Iterable[ev.Record]) -> Recorded:
    """Take a log apart.

    Raises:
        BadInput: it doesn't begin with the beginning of the run, so that what was there before isn't known.
        LogError: it isn't one that a run wrote.
    """
    coming = iter(records)
    first = next(coming, None)
    if first is None:
        raise BadInput("the log has no event yet, so there is nothing to try other rules on")
    if not isinstance(first.event, ev.RunStarted):
        raise BadInput(
            f"the log begins with event {first.seq}: what arrived before isn't known any more, and other "
            "rules can only be tried on a run from its beginning; keep_log='all' or 'archive' keeps it"
        )
    rest = list(coming)
    reader = _Reader(first, _tails([first, *rest]))
    for record in rest:
        if not reader.take(record):
            break
    return reader.result()


def _tails(records: Iterable[ev.Record]) -> deque[tuple[int, int]]:
    """Of each closing the first and the last event of the stretch in which it may have begun.

    No event says when it began. A run that closes submits nothing, and no `sample()` of it begins or is served, so it
    was later than the last of these, and not after the first event that only a closing makes.
    """
    tails: deque[tuple[int, int]] = deque()
    since, closed = 0, False
    for record in records:
        event = record.event
        cancelled = isinstance(event, ev.BatchRequestCancelled)
        if _tells_of_closing(event):
            if not closed:
                tails.append((since + 1, record.seq))
            closed = True
        elif cancelled or isinstance(event, OPEN):
            since, closed = record.seq, False
    return tails


OPEN = (ev.RunStarted, ev.RunRecovered, ev.GroupSubmitted, ev.SourceExhausted, ev.BatchRequested, ev.BatchSampled)
"""What happens in a run that isn't closing."""


def _tells_of_closing(event: ev.AnyEvent) -> bool:
    if isinstance(event, ev.BatchRequestCancelled):
        return event.reason == RunIsClosed.__name__
    if isinstance(event, ev.GroupRequeued):
        return not event.by_rule and event.reason.startswith(CLOSED)
    return isinstance(event, ev.RunClosed)


@attrs.frozen
class _Place:
    """A place among what the trainer did."""

    seq: int
    at_ns: int
    act: int
    """Acts before it."""


class _Reader:
    def __init__(self, first: ev.Record, tails: deque[tuple[int, int]]) -> None:
        self.book = applied(Book(), first)
        self.found = Recorded(stored_rules(self.book), self.book.weight_version, first.at_ns, records=[first])
        self.tails = tails
        """Where a closing may have begun, of those that aren't passed."""
        self.moment = _Place(first.seq, first.at_ns, 0)
        """Before the last thing in such a stretch that didn't follow from another."""
        self.act_times: list[int] = []
        """When each act was."""
        self.closing = False
        """It has begun, as far as is known."""
        self.trigger_ns = first.at_ns
        """When something last happened that the rules didn't do."""
        self.act_ns = first.at_ns
        self.due_ns: dict[tuple[str, int], int] = {}
        """When the next try of a session became due."""
        self.open: dict[tuple[str, int], Attempt] = {}
        self.filled_ns: dict[str, int] = {}
        self.submitted_ns: dict[str, int] = {}
        self.begun_ns: dict[str, int] = {}
        """When a group was submitted or last started over."""
        self.validation: set[str] = set()
        self.admits = False

    def take(self, record: ev.Record) -> bool:
        """Take one more record; False if the part that can be told ends before it."""
        event = record.event
        self.found.until = self._why_not_further(record)
        if self.found.until:
            return False
        self._watch(record)
        short = shortage(self.book, self.found.rules) if isinstance(event, ev.GroupSubmitted) else 0
        version = self.book.weight_version
        applied(self.book, record)
        self.found.records.append(record)
        self.found.duration_ns = record.at_ns - self.found.started_at_ns
        if isinstance(event, ev.RunStarted | ev.RunRecovered):
            self.trigger_ns = record.at_ns
            self.closing = False
        if getattr(event, "group_id", None) in self.validation or getattr(event, "partition", ev.TRAIN) != ev.TRAIN:
            if isinstance(event, ev.GroupSubmitted):
                self.validation.add(event.group_id)
            return True
        if isinstance(event, ev.GroupSubmitted):
            self._submitted(record, event, short)
        elif isinstance(event, ev.SessionStarted | ev.SessionFinished | ev.SessionFailed):
            self._session(record, event, version)
        elif isinstance(event, ev.GroupRequeued):
            self._requeued(record, event)
        else:
            self._acted(record, event)
        return True

    def _why_not_further(self, record: ev.Record) -> str:
        event = record.event
        if isinstance(event, ev.RunRewound):
            return f"event {record.seq} goes back to a mark"
        if isinstance(event, ev.RunRecovered) and event.weight_version != self.book.weight_version:
            return f"event {record.seq} opens the run again at weight version {event.weight_version}, a line of its own"
        if isinstance(event, ev.RunRecovered) and event.rules != self.book.rules:
            return f"event {record.seq} opens the run again under other rules"
        return ""

    def result(self) -> Recorded:
        end_ns = self.found.started_at_ns + self.found.duration_ns
        self._act("end", self.book.last_seq, end_ns)
        for attempt in self.open.values():
            attempt.duration_ns = end_ns - attempt.started_at_ns
        self.found.exhausted = self.book.source_exhausted
        return self.found

    # Groups and sessions -----------------------------------------------------------------------------

    def _submitted(self, record: ev.Record, event: ev.GroupSubmitted, short: int) -> None:
        needed = event.size - event.oversample
        arrival = Arrival(event.group_id, event.dataset, needed, [[] for _ in range(event.size)])
        self.found.arrivals[event.group_id] = arrival
        if event.source_position >= 0:
            self.found.drawn.append(event.group_id)
            self.found.has_source = True
            if event.cause == "admission" and short <= 0 and not self.admits:
                # More than a waiting sampler lacked: a rollout had begun to be given prompts.
                self.admits = True
                self.trigger_ns = record.at_ns
                self._act("begin", record.seq, record.at_ns)
        else:
            self.trigger_ns = record.at_ns
            stamp = event.weight_version if event.weight_version != self.book.weight_version else None
            self._act("submit", record.seq, record.at_ns, (event.group_id, stamp, event.target_version))
        self.submitted_ns[event.group_id] = self.trigger_ns
        self._due(event.group_id, event.size)

    def _due(self, group_id: str, size: int) -> None:
        self.begun_ns[group_id] = self.trigger_ns
        for session in range(size):
            self.due_ns[group_id, session] = self.trigger_ns

    def _session(
        self, record: ev.Record, event: ev.SessionStarted | ev.SessionFinished | ev.SessionFailed, version: int
    ) -> None:
        who = event.group_id, event.session
        self.trigger_ns = record.at_ns
        arrival = self.found.arrivals[event.group_id]
        if isinstance(event, ev.SessionStarted):
            behind = None if event.weight_version is None else version - event.weight_version
            attempt = Attempt(record.at_ns - self.due_ns[who], record.seq, behind, record.at_ns)
            arrival.sessions[event.session].append(attempt)
            self.open[who] = attempt
            return
        ended = self.open.pop(who, None)
        if ended is None:
            # It ended before it began.
            ended = Attempt(record.at_ns - self.due_ns[who], record.seq, None, record.at_ns)
            if isinstance(event, ev.SessionFailed) and event.failure not in CUT:
                arrival.sessions[event.session].append(ended)
        ended.duration_ns = record.at_ns - ended.started_at_ns
        ended.end, ended.end_seq, ended.version_at_end = event, record.seq, version
        self.due_ns[who] = record.at_ns
        if isinstance(event, ev.SessionFailed):
            self._cut(record, event, arrival)
        elif (group := self.book.groups.get(event.group_id)) is not None and group.filled:
            self.filled_ns.setdefault(event.group_id, record.at_ns)

    def _cut(self, record: ev.Record, event: ev.SessionFailed, arrival: Arrival) -> None:
        """What ended sessions of a group from outside."""
        group = self.book.groups.get(event.group_id)
        again = 0 if group is None else group.requeue_count
        if event.group_id in self.filled_ns:
            arrival.spare[again] = record.at_ns - self.filled_ns[event.group_id], record.seq
        elif event.failure == "cancelled" and event.message == CANCELLED.message:
            arrival.cancel = record.at_ns - self.submitted_ns[event.group_id], record.seq
        elif event.failure == "timeout" and event.message.startswith(GROUP_TIMED_OUT):
            arrival.timeouts[again] = record.at_ns - self.begun_ns[event.group_id], record.seq

    def _requeued(self, record: ev.Record, event: ev.GroupRequeued) -> None:
        arrival = self.found.arrivals[event.group_id]
        if not event.by_rule:
            self.trigger_ns = record.at_ns
            if _tells_of_closing(event):
                self._close(record)
            elif event.reason != RECOVERY:
                after_ns = record.at_ns - self.submitted_ns[event.group_id]
                arrival.requeues.append((after_ns, record.seq, event.weight_version))
        for session in range(len(arrival.sessions)):
            attempt = self.open.pop((event.group_id, session), None)
            if attempt is not None:
                attempt.duration_ns = record.at_ns - attempt.started_at_ns
        self.filled_ns.pop(event.group_id, None)
        self._due(event.group_id, len(arrival.sessions))

    def _close(self, record: ev.Record) -> None:
        if not self.found.acts or self.found.acts[-1].kind != "close":
            self._act("close", record.seq, record.at_ns)

    def _watch(self, record: ev.Record) -> None:
        """Find when the run began to close: before prompts were to be drawn, and none was drawn any more."""
        if self.tails and record.seq > self.tails[0][1]:
            self.tails.popleft()
        if not self.tails or record.seq < self.tails[0][0]:
            return
        if record.seq == self.tails[0][0]:
            self.moment = _Place(record.seq - 1, self.found.records[-1].at_ns, len(self.found.acts))
        if isinstance(record.event, FOLLOWS):
            return
        if not self.closing and self._prompts_are_due():
            self._insert("closing", self.moment)
            self.closing = True
        self.moment = _Place(record.seq - 1, record.at_ns, len(self.found.acts))

    def _prompts_are_due(self) -> bool:
        book, rules = self.book, self.found.rules
        if not self.found.has_source or book.source_exhausted:
            return False
        if refills_now(book, rules) > 0:
            return True
        if why_held(book, rules) is not None:
            return False
        return shortage(book, rules) > 0 or (self.admits and admissible(book, rules) > 0)

    # The trainer -------------------------------------------------------------------------------------

    def _acted(self, record: ev.Record, event: ev.AnyEvent) -> None:
        seq, at_ns = record.seq, record.at_ns
        if isinstance(event, ev.BatchSampled):
            # The rules gave it, in the moment in which something had happened.
            self._act("answer", seq, self.trigger_ns, (event.request, event.batch))
            return
        if isinstance(event, ev.BatchRequestCancelled) and event.reason in REFUSALS:
            self._act("answer", seq, self.trigger_ns, (event.request, None), error=event.reason)
            return
        if isinstance(event, ev.SourceOpened):
            self.found.mixed = event.kind == MixedSource.__name__
        if isinstance(event, ev.RunClosed):
            self._close(record)
        elif _tells_of_closing(event) and not self.closing:
            self._act("closing", seq, at_ns)
            self.closing = True
        act = _acts(event)
        if act is None:
            return
        self.trigger_ns = at_ns
        self._act(act[0], seq, at_ns, act[1])
        if act[0] == "restart":
            self.admits = False

    def _act(self, kind: ActKind, seq: int, at_ns: int, value: Any = None, *, error: str = "") -> None:
        self.found.acts.append(Act(kind, seq, at_ns - self.act_ns, value, error))
        self.act_times.append(at_ns)
        self.act_ns = at_ns

    def _insert(self, kind: ActKind, place: _Place) -> None:
        """An act that is known of only now."""
        acts, times, number = self.found.acts, self.act_times, place.act
        before_ns = times[number - 1] if number else self.found.started_at_ns
        acts.insert(number, Act(kind, place.seq, place.at_ns - before_ns))
        times.insert(number, place.at_ns)
        if number + 1 < len(acts):
            acts[number + 1] = attrs.evolve(acts[number + 1], after_ns=times[number + 1] - place.at_ns)
        self.act_ns = times[-1]


def _acts(event: ev.AnyEvent) -> tuple[ActKind, Any] | None:
    if isinstance(event, ev.WeightsPublished):
        return "publish", event.weight_version
    if isinstance(event, ev.BatchRequested):
        return "request", (event.request, event.size)
    if isinstance(event, ev.BatchRequestCancelled):
        return "withdraw", ("request", event.request)
    if isinstance(event, ev.BatchCommitted):
        return "commit", event.batch
    if isinstance(event, ev.BatchReturned) and event.reason == "cancelled":
        return "withdraw", ("batch", event.batch)
    if isinstance(event, ev.BatchReturned) and event.reason not in {RECOVERY, "damaged"}:
        return "release", event.batch
    if isinstance(event, ev.RunRecovered):
        return "restart", None
    return None


def whole_attempts(found: Recorded) -> dict[str, list[Attempt]]:
    """Tries that ended by themselves, per dataset: what unknown ones are drawn from."""
    pools: dict[str, list[Attempt]] = defaultdict(list)
    for arrival in found.arrivals.values():
        for attempts in arrival.sessions:
            pools[arrival.dataset].extend(attempt for attempt in attempts if attempt.is_whole)
    return pools
