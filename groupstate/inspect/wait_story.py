"""What a `sample()` waited for, what happened meanwhile, and what ended the wait.

Rule: what it waited for is `explain()`'s value at that event, so that a log tells what the run itself would have told.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.explain import Explanation
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.phases import TERMINAL
from groupstate.core.rules import Rules, known_rules
from groupstate.core.select import in_flight_for, ready_for, why_not
from groupstate.errors import BadInput
from groupstate.inspect.overview import explained
from groupstate.inspect.replay import applied
from groupstate.inspect.story import slowest
from groupstate.inspect.words import counted, in_words, joined, kind_of, name_of, span_of
from groupstate.log.reading import beginning, read_book, read_log


@attrs.frozen
class WaitStep:
    """Something that happened while it waited and that can change what it waits for."""

    seq: int
    at_ns: int
    since_s: float
    """Seconds since it began to wait."""
    kind: str
    sampleable: int
    """After it, of those that were asked for."""
    in_flight: int
    text: str


@attrs.frozen
class WaitStory:
    seq: int
    """The event that was asked about."""
    request: int
    request_seq: int
    partition: str
    size: int
    waited_s: float
    """From the request to that event."""
    behind: tuple[int, ...]
    """Requests of the partition that had come before and still waited at that event."""
    then: Explanation
    """What the oldest of the partition waited for at that event."""
    steps: tuple[WaitStep, ...]
    sessions: dict[str, int]
    """Sessions that started, finished, failed and were fenced while it waited."""
    told_from: int
    """The first event that was looked at: what came before isn't among the steps."""
    let_go_seq: int
    """The event behind which nothing held it any more; 0 where there is none."""
    let_go: str
    ended_seq: int
    """0 where it waits still."""
    ended: str
    """How, as a sentence."""
    lasted_s: float
    """From the request to its end, or to the end of the log."""
    at_end: Explanation
    """The same as `then`, just before the wait ended, or at the end of the log."""
    seen_at_ns: int = 0
    """When the log's last event was written, which the wait is counted up to; 0 where it has ended."""


def wait_story(records: Iterable[ev.Record], seq: int, base: Book | None = None) -> WaitStory:
    """Tell of the `sample()` that waited at event `seq`: of the one that the event is about, else of the one of the
    training partition that had waited longest, else of the one that had.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        BadInput: there is no such event, it can't be told of any more, or nobody waited then.
        LogError: the log isn't one that a run wrote.
    """
    follower = _Follower(Book() if base is None else base)
    if seq < follower.book.last_seq:
        raise BadInput(f"what was at event {seq} can't be told any more: the first is event {follower.book.last_seq}")
    remaining = iter(records)
    moment = follower.moment() if seq == follower.book.last_seq else follower.moment_at(remaining, seq)
    if moment is None:
        raise BadInput(f"no sample() waited at event {seq}; {follower.neighbours(remaining)}")
    for record in remaining if not moment.wait.ended_seq else ():
        follower.take(record, moment.wait)
        if moment.wait.ended_seq:
            break
    return follower.told(moment)


def wait_story_of(path: str | os.PathLike[str], seq: int) -> WaitStory:
    """The same of a run directory: no more is replayed than what follows the nearest snapshot before the wait began.

    Raises:
        BadInput, LogError: see `wait_story`.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    near = read_book(path, seq - 1) if seq > start else None
    if near is not None and near.requests:
        # Whoever is asked about may have waited there already.
        near = read_book(path, min(request.seq for request in near.requests.values()) - 1)
    if near is not None and near.last_seq >= start:
        base, start = near, near.last_seq + 1
    return wait_story(read_log(path, start), seq, base)


# One wait --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Wait:
    """One `sample()` and what has happened since."""

    request: OpenRequest
    steps: list[tuple[ev.Record, int, int]] = attrs.Factory(list)
    """What happened, and how many groups were sampleable and in flight after it."""
    sessions: Counter[str] = attrs.Factory(Counter)
    blocked: bool = True
    let_go: ev.Record | None = None
    let_go_group: Group | None = None
    ended_seq: int = 0
    ended_at_ns: int = 0
    ended: str = ""
    at_end: Explanation | None = None


@attrs.frozen
class _Moment:
    """The event that is asked about."""

    seq: int
    at_ns: int
    wait: _Wait
    then: Explanation
    behind: tuple[int, ...]


_SESSIONS: Final[dict[type[ev.Event], str]] = {
    ev.SessionStarted: "started",
    ev.SessionFinished: "finished",
    ev.SessionFailed: "failed",
    ev.ResultFenced: "fenced",
}

_UNCHANGING: Final = frozenset({ev.CheckpointMarked, ev.BatchCommitted, ev.SourceOpened})
"""Events that change nothing for anybody who waits."""


def _blocked(book: Book, rules: Rules, request: OpenRequest) -> bool:
    """Something keeps it from being served. What a rule of the run's own will say, nobody knows."""
    if any(older.request < request.request for older in book.waiting(request.partition)):
        return True
    if rules.has_own_selection and request.partition == ev.TRAIN:
        return ready_for(book, rules) < request.size
    return why_not(book, rules, request) is not None


# The log ---------------------------------------------------------------------------------------------------


class _Follower:
    """Follows a log, and everybody who waits in it."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.rules = known_rules(book.rules)
        self.start = book.last_seq + 1
        self.waits = {number: _Wait(request) for number, request in book.requests.items()}
        self.last_wait = ""
        """The last wait that is over, in words."""
        self.exhausted_seq = 0

    def moment(self, record: ev.Record | None = None) -> _Moment | None:
        """Now, for whoever `record` is about, or has waited longest; None where nobody waits."""
        waiting = sorted(self.waits.values(), key=lambda wait: (wait.request.partition != ev.TRAIN, wait.request.seq))
        number = getattr(None if record is None else record.event, "request", None)
        wait = self.waits.get(number, next(iter(waiting), None))  # type: ignore[arg-type]
        if wait is None:
            return None
        partition = wait.request.partition
        older = (r.request for r in self.book.waiting(partition) if r.request < wait.request.request)
        seq, at_ns = (self.book.last_seq, self.book.last_at_ns) if record is None else (record.seq, record.at_ns)
        return _Moment(seq, at_ns, wait, explained(self.book, self.rules, partition), tuple(older))

    def moment_at(self, records: Iterator[ev.Record], seq: int) -> _Moment | None:
        """Take events in up to `seq`.

        Raises:
            BadInput: the log has no such event.
        """
        for record in records:
            if record.seq < seq:
                self.take(record)
                continue
            if isinstance(record.event, ev.BatchSampled | ev.BatchRequestCancelled):
                # The end of a wait: what it waited for is what it was just before.
                found = self.moment(record)
                self.take(record, None if found is None else found.wait)
                return found
            self.take(record)
            return self.moment(record)
        raise BadInput(f"there is no event {seq}: the last one is event {self.book.last_seq}")

    def take(self, record: ev.Record, asked: _Wait | None = None) -> None:
        """Apply a record, and note what it means for those who wait.

        Args:
            asked: whose end is to be explained.
        """
        event = record.event
        over = self._over(event)
        for wait in over:
            wait.ended_seq, wait.ended_at_ns, wait.ended = record.seq, record.at_ns, self._how(event, wait)
            if wait is asked:
                wait.at_end = explained(self.book, self.rules, wait.request.partition)
            del self.waits[wait.request.request]
            span = f"events {wait.request.seq} to {record.seq}"
            self.last_wait = f"request {wait.request.request} waited before, {span}"
        partition = self._partition(event)
        applied(self.book, record)
        partition = partition or self._partition(event)
        if isinstance(event, ev.RunStarted | ev.RunRecovered):
            self.rules = known_rules(event.rules)
        if isinstance(event, ev.SourceExhausted):
            self.exhausted_seq = record.seq
        for wait in self.waits.values():
            if partition in ("", wait.request.partition):
                self._note(wait, record)
        if isinstance(event, ev.BatchRequested):
            self.waits[event.request] = _Wait(self.book.requests[event.request])
            self.waits[event.request].blocked = _blocked(self.book, self.rules, self.book.requests[event.request])

    def _over(self, event: ev.AnyEvent) -> list[_Wait]:
        """Whose wait the event ends."""
        if isinstance(event, ev.RunRecovered):
            return list(self.waits.values())
        if isinstance(event, ev.BatchSampled | ev.BatchRequestCancelled) and event.request in self.waits:
            return [self.waits[event.request]]
        return []

    def _partition(self, event: ev.AnyEvent) -> str:
        """The partition that alone is concerned; empty for an event of the run."""
        partition: str = getattr(event, "partition", "")
        group = self.book.groups.get(getattr(event, "group_id", ""))
        return partition or ("" if group is None else group.partition)

    def _note(self, wait: _Wait, record: ev.Record) -> None:
        kind = _SESSIONS.get(type(record.event))
        if kind is not None:
            wait.sessions[kind] += 1
        if type(record.event) in _UNCHANGING:
            return
        blocked = _blocked(self.book, self.rules, wait.request)
        if wait.blocked and not blocked:
            wait.let_go = record
            wait.let_go_group = self.book.groups.get(getattr(record.event, "group_id", ""))
        elif blocked:
            wait.let_go = wait.let_go_group = None
        wait.blocked = blocked
        if kind is None:
            ready = ready_for(self.book, self.rules, wait.request.partition)
            wait.steps.append((record, ready, in_flight_for(self.book, self.rules, wait.request.partition)))

    # Telling -----------------------------------------------------------------------------------------------

    def _how(self, event: ev.AnyEvent, wait: _Wait) -> str:
        if isinstance(event, ev.BatchSampled):
            groups = f"{counted(len(event.group_ids), 'group')}: {joined(map(name_of, event.group_ids))}"
            return f"it got batch {event.batch} of {groups}"
        if isinstance(event, ev.RunRecovered):
            return "its process was gone: the run was opened again, and nobody waited any more"
        assert isinstance(event, ev.BatchRequestCancelled)
        return self._cancelled(event.reason, wait.request)

    def _cancelled(self, reason: str, request: OpenRequest) -> str:
        ready = ready_for(self.book, self.rules, request.partition)
        flying = in_flight_for(self.book, self.rules, request.partition)
        there = f"{ready} of {request.size} groups were sampleable, {flying} in flight"
        gone = joined(f"{why} {count}" for why, count in sorted(self.book.window(request.partition).evicted.items()))
        evicted = f"; evicted since the last batch: {gone}" if gone else ""
        if reason == "timeout":
            return f"its timeout_s was over (SampleTimeout): {there}"
        if reason == "cancelled":
            return f"its caller was cancelled: {there}"
        if reason == "NotEnoughGroups":
            dry = f"the source was exhausted{self._since_when()}" if self.book.source_exhausted else "no prompts come"
            return f"it raised NotEnoughGroups: {dry}, {there}{evicted}"
        if reason == "RunIsClosed":
            return f"it raised RunIsClosed, because the run was being closed: {there}"
        return f"it raised {reason}: {there}{evicted}"

    def _since_when(self) -> str:
        return f" at event {self.exhausted_seq}" if self.exhausted_seq else f" before event {self.start}"

    def told(self, moment: _Moment) -> WaitStory:
        wait, book = moment.wait, self.book
        request = wait.request
        ended_at_ns = wait.ended_at_ns if wait.ended_seq else book.last_at_ns
        let_go = wait.let_go
        at_end = explained(book, self.rules, request.partition) if wait.at_end is None else wait.at_end
        return WaitStory(
            seq=moment.seq,
            request=request.request,
            request_seq=request.seq,
            partition=request.partition,
            size=request.size,
            waited_s=(moment.at_ns - request.at_ns) / 1e9,
            behind=moment.behind,
            then=moment.then,
            steps=tuple(_step(record, ready, flying, request) for record, ready, flying in wait.steps),
            sessions=dict(wait.sessions),
            told_from=self.start,
            let_go_seq=0 if let_go is None else let_go.seq,
            let_go="" if let_go is None else _let_go(let_go, wait.let_go_group, request),
            ended_seq=wait.ended_seq,
            ended=wait.ended or _still(book),
            lasted_s=(ended_at_ns - request.at_ns) / 1e9,
            at_end=at_end,
            seen_at_ns=0 if wait.ended_seq or book.closed else book.last_at_ns,
        )

    def neighbours(self, remaining: Iterator[ev.Record]) -> str:
        """The waits before and after, for whoever asks about an event at which nobody waited."""
        after = next((r for r in remaining if isinstance(r.event, ev.BatchRequested)), None)
        following = "" if after is None else f"one waits from event {after.seq} on"
        known = "; ".join(filter(None, (self.last_wait, following)))
        return known or f"there is no wait from event {self.start} on"


def _step(record: ev.Record, ready: int, flying: int, request: OpenRequest) -> WaitStep:
    since_s = (record.at_ns - request.at_ns) / 1e9
    return WaitStep(record.seq, record.at_ns, since_s, kind_of(record.event), ready, flying, in_words(record.event))


def _let_go(record: ev.Record, group: Group | None, request: OpenRequest) -> str:
    """What happened in the event behind which nothing held it, and who had kept it so long."""
    since = f"{kind_of(record.event)} after {span_of((record.at_ns - request.at_ns) / 1e9)}, {in_words(record.event)}"
    last = "" if group is None or group.phase not in TERMINAL else slowest(group)
    return f"{since}; {last}" if last else since


def _still(book: Book) -> str:
    return "it waited when the run was closed" if book.closed else "it waits still, at the end of the log"
