"""What changed between two places of a run, with the events that changed it.

Rule: what is told of both ends comes from their books; what happened between them is read event by event, unless so
much lies between that nobody would read the answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.errors import BadInput
from groupstate.inspect.places import Run, book_after
from groupstate.inspect.words import counted, in_words, joined, kind_of, kind_of_type
from groupstate.log.reading import read_log

EVENTS_READ_MAX: Final = 500_000
"""Events between two places that are read one by one; about a second's worth. Beyond, only the two books are
compared."""

GONE = "left"
"""Where a group went, where the events that say so weren't read."""

OTHERS = (
    ev.SourceExhausted,
    ev.SourceOpened,
    ev.AdmissionHeld,
    ev.CheckpointMarked,
    ev.DatasetStarved,
    ev.RunStarted,
    ev.RunRecovered,
    ev.RunRewound,
    ev.RunClosed,
)
"""Kinds that are told as they are."""


@attrs.frozen
class Place:
    seq: int
    at_ns: int
    weight_version: int
    lineage: int


@attrs.frozen
class GroupChange:
    group_id: str
    partition: str
    before: str
    """Its phase at the first place; empty where it wasn't submitted yet."""
    after: str
    """Its phase at the second; `evicted` and `committed` of groups that left, `left` where nobody read how."""
    seq: int | None
    """The last event that moved it; None where nobody read which one that was."""
    why: str
    """What that event says: reasons, lag, batch."""


@attrs.frozen
class Version:
    seq: int
    weight_version: int
    lineage: int
    how: str
    """`published`, or how a lineage began."""


@attrs.frozen
class BatchChange:
    batch: int
    partition: str
    groups: int
    sampled_seq: int
    ended_seq: int | None
    now: str
    """`with the trainer`, `committed`, `returned: reason`; of those whose end nobody read, `no longer with it`."""


@attrs.frozen
class Wait:
    """A `sample()` that waited at one of the places, or between them."""

    request: int
    partition: str
    size: int
    begun_seq: int
    ended_seq: int | None
    waited_s: float | None
    """Until it ended, or until the second place; None where nobody read when it ended."""
    now: str
    """`waits`, `batch 3`, `cancelled: reason`, `gone with its process`; `ended` where nobody read how."""


@attrs.frozen
class CreditStep:
    seq: int
    what: str
    """`earned` by an eviction, `spent` on a refill, `forfeited`."""
    count: int
    about: str
    """The group evicted or submitted, or why it was forfeited."""


@attrs.frozen
class RuleChange:
    seq: int | None
    """The opening that brought it; None where nobody read which one."""
    setting: str
    before: Any
    after: Any
    """None where the log's rules don't have the setting, which then is at its default."""


@attrs.frozen
class Other:
    seq: int
    kind: str
    text: str


@attrs.frozen
class Diff:
    first: Place
    last: Place
    seconds: float
    read: bool
    """The events between were read. If not, whatever came and went between the places is only in the totals."""
    kinds: dict[str, int]
    """Events between, by kind, most first; empty where they weren't read."""
    totals: dict[str, tuple[int, int]]
    """Those that changed: before, after."""
    phases: dict[str, dict[str, tuple[int, int]]]
    """Live groups by partition and phase, where their number changed."""
    owed: tuple[int, int]
    """Refills that are owed."""
    groups: tuple[GroupChange, ...]
    """Groups that entered, left, or are in another phase, in the order of the events that moved them."""
    versions: tuple[Version, ...]
    batches: tuple[BatchChange, ...]
    waits: tuple[Wait, ...]
    credits: tuple[CreditStep, ...]
    rules: tuple[RuleChange, ...]
    others: tuple[Other, ...]

    @property
    def entered(self) -> list[GroupChange]:
        return [change for change in self.groups if not change.before and change.after not in LEFT]

    @property
    def left(self) -> list[GroupChange]:
        return [change for change in self.groups if change.before and change.after in LEFT]

    @property
    def moved(self) -> list[GroupChange]:
        return [change for change in self.groups if change.before and change.after not in LEFT]

    @property
    def passed(self) -> list[GroupChange]:
        """Groups that came and went between the places."""
        return [change for change in self.groups if not change.before and change.after in LEFT]


LEFT: Final = frozenset({str(Phase.EVICTED), str(Phase.COMMITTED), GONE})


def diff(run: Run, first: int, last: int | None = None, *, read_max: int = EVENTS_READ_MAX) -> Diff:
    """What changed from the state after event `first` to that after event `last`; None for the end of the log.

    Args:
        read_max: the most events between that are read one by one.

    Raises:
        BadInput: an event isn't there, can't be told any more, or they are in the wrong order.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: the log can't be read.
        LogError: it isn't one that a run wrote.
    """
    if last is not None and last < first:
        raise BadInput(f"event {last} comes before event {first}; give the earlier place first")
    before, after = book_after(run, first), book_after(run, last)
    near = after.last_seq - before.last_seq <= read_max
    return compared(before, after, read_log(run, before.last_seq + 1, after.last_seq + 1) if near else None)


def compared(before: Book, after: Book, records: Iterable[ev.Record] | None) -> Diff:
    """What changed from one book of a run to a later one.

    Args:
        records: all that lie between; None where only the books are to be compared.
    """
    read, between = records is not None, _Between(before)
    for record in records or ():
        between.take(record)
    return Diff(
        first=_place(before),
        last=_place(after),
        seconds=(after.last_at_ns - before.last_at_ns) / 1e9,
        read=read,
        kinds={kind_of_type(kind): count for kind, count in between.kinds.most_common()},
        totals=_changed(before.totals, after.totals),
        phases=_phases(before, after),
        owed=(len(before.credits), len(after.credits)),
        groups=tuple(_groups(before, after, between if read else None)),
        versions=tuple(between.versions),
        batches=tuple(between.batches.values()) if read else tuple(_batches(before, after)),
        waits=tuple(between.waits_at(after.last_at_ns)) if read else tuple(_waits(before, after)),
        credits=tuple(between.credits),
        rules=tuple(between.rules) if read else tuple(_rules(None, before.rules, after.rules)),
        others=tuple(between.others),
    )


def _place(book: Book) -> Place:
    return Place(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)


def _changed(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    return {name: (before[name], after[name]) for name in sorted({*before, *after}) if before[name] != after[name]}


def _phases(before: Book, after: Book) -> dict[str, dict[str, tuple[int, int]]]:
    found = {}
    for partition in sorted({*before.partitions(), *after.partitions()}):
        counts = {str(phase): tuple(b.count(phase, partition=partition) for b in (before, after)) for phase in Phase}
        changed = {phase: (was, now) for phase, (was, now) in counts.items() if was != now}
        if changed:
            found[partition] = changed
    return found


def _rules(seq: int | None, before: dict[str, Any], after: dict[str, Any]) -> Iterator[RuleChange]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield RuleChange(seq, name, before.get(name), after.get(name))


# Groups ---------------------------------------------------------------------------------------------------


def _groups(before: Book, after: Book, between: "_Between | None") -> list[GroupChange]:
    moves: dict[str, _Move] = {} if between is None else between.moves
    found = []
    for group_id in dict.fromkeys([*before.groups, *after.groups, *moves]):
        was, now = before.groups.get(group_id), after.groups.get(group_id)
        move = moves.get(group_id)
        phase = str(now.phase) if now is not None else move.phase if move is not None else GONE
        if was is not None:
            started = str(was.phase)
        elif between is not None and group_id not in between.submitted:
            started = str(Phase.COMMITTED)  # and brought back by going back to a mark
        else:
            started = "" if now is None or now.submitted_seq > before.last_seq else str(Phase.COMMITTED)
        if started != phase:
            found.append(
                _group(group_id, was or now, started, phase, move, None if now is None else _moved_seq(now, after))
            )
    return sorted(found, key=lambda change: (change.seq is None, change.seq or 0))


def _group(
    group_id: str, known: Group | None, started: str, phase: str, move: "_Move | None", seq: int | None
) -> GroupChange:
    if move is not None:
        return GroupChange(group_id, move.partition, started, phase, move.seq, move.why)
    return GroupChange(group_id, "" if known is None else known.partition, started, phase, seq, "")


def _moved_seq(group: Group, book: Book) -> int | None:
    """The event that brought a live group to its phase, as far as the group says so itself."""
    if group.phase is Phase.SAMPLED:
        return book.batches[group.batch].seq
    if group.phase in (Phase.FINISHED, Phase.FAILURE) and group.kept_lag is None:
        return group.terminal_seq
    if group.phase is Phase.PENDING and not group.requeue_count:
        return group.submitted_seq
    return None


def _batches(before: Book, after: Book) -> Iterator[BatchChange]:
    for number, batch in {**before.batches, **after.batches}.items():
        there, here = number in before.batches, number in after.batches
        if there != here:
            now = "with the trainer" if here else "no longer with it"
            yield BatchChange(number, batch.partition, len(batch.group_ids), batch.seq, None, now)


def _waits(before: Book, after: Book) -> Iterator[Wait]:
    for number, request in {**before.requests, **after.requests}.items():
        here = number in after.requests
        waited = (after.last_at_ns - request.at_ns) / 1e9 if here else None
        now = "waits" if here else "ended"
        yield Wait(number, request.partition, request.size, request.seq, None, waited, now)


# What lies between ----------------------------------------------------------------------------------------


@attrs.frozen
class _Move:
    seq: int
    phase: str
    why: str
    partition: str


@attrs.define
class _Open:
    """A waiting `sample()`."""

    partition: str
    size: int
    seq: int
    at_ns: int


class _Between:
    """Takes the events between two places, in order."""

    def __init__(self, before: Book) -> None:
        self.moves: dict[str, _Move] = {}
        self.versions: list[Version] = []
        self.credits: list[CreditStep] = []
        self.rules: list[RuleChange] = []
        self.others: list[Other] = []
        self.batches: dict[int, BatchChange] = {}
        self.kinds: Counter[type[ev.Event]] = Counter()
        self.submitted: set[str] = set()
        self._waits: list[Wait] = []
        self._rules_now = before.rules
        self._partitions = {group_id: group.partition for group_id, group in before.groups.items()}
        self._phases = {group_id: str(group.phase) for group_id, group in before.groups.items()}
        self._open = {r.request: _Open(r.partition, r.size, r.seq, r.at_ns) for r in before.requests.values()}
        self._out = {number: batch.group_ids for number, batch in before.batches.items()}
        self._terminal = {group_id: str(group.terminal) for group_id, group in before.groups.items() if group.terminal}
        self._terminal |= {group_id: str(group.terminal) for group_id, group in before.aside.items()}
        self._partitions |= {group_id: group.partition for group_id, group in before.aside.items()}
        self._commits = [(group.last_seq, group_id) for group_id, group in before.aside.items()]
        """Those that going back to a mark may undo."""
        self._was_out = dict(before.batches)

    def take(self, record: ev.Record) -> None:
        event = record.event
        self.kinds[type(event)] += 1
        if isinstance(event, OTHERS):
            self.others.append(Other(record.seq, kind_of(event), in_words(event)))
        step = _STEPS.get(type(event))
        if step is not None:
            step(self, record, event)

    def waits_at(self, at_ns: int) -> list[Wait]:
        """All of them, those that still wait included."""
        return [
            *self._waits,
            *(
                Wait(number, each.partition, each.size, each.seq, None, (at_ns - each.at_ns) / 1e9, "waits")
                for number, each in self._open.items()
            ),
        ]

    def _moved(self, group_id: str, seq: int, phase: str, why: str = "") -> None:
        """A group has come to a phase, maybe the one that it was in."""
        if self._phases.get(group_id) != phase:
            self._phases[group_id] = phase
            self.moves[group_id] = _Move(seq, phase, why, self._partitions.get(group_id, ""))

    def _submitted(self, record: ev.Record, event: ev.GroupSubmitted) -> None:
        self.submitted.add(event.group_id)
        self._partitions[event.group_id] = event.partition
        self._moved(event.group_id, record.seq, "pending", f"by {event.cause}")
        if event.cause == "refill":
            self.credits.append(CreditStep(record.seq, "spent", 1, event.group_id))

    def _session_started(self, record: ev.Record, event: ev.SessionStarted) -> None:
        self._moved(event.group_id, record.seq, "running")

    def _finished(self, record: ev.Record, event: ev.GroupFinished) -> None:
        self._ended(record, event.group_id, "finished", "partial" if event.partial else "")

    def _failed(self, record: ev.Record, event: ev.GroupFailed) -> None:
        self._ended(record, event.group_id, "failure", "cancelled" if event.cancelled else "")

    def _ended(self, record: ev.Record, group_id: str, phase: str, why: str) -> None:
        self._terminal[group_id] = phase
        self._moved(group_id, record.seq, phase, why)

    def _requeued(self, record: ev.Record, event: ev.GroupRequeued) -> None:
        self._moved(event.group_id, record.seq, "pending", f"requeued: {event.reason or 'no reason given'}")

    def _evicted(self, record: ev.Record, event: ev.GroupEvicted) -> None:
        message = f": {event.message}" if event.message else ""
        self._moved(event.group_id, record.seq, "evicted", f"{joined(event.reasons)}, lag {event.lag}{message}")
        if event.credit:
            self.credits.append(CreditStep(record.seq, "earned", event.credit, event.group_id))

    def _forfeited(self, record: ev.Record, event: ev.RefillForfeited) -> None:
        self.credits.append(CreditStep(record.seq, "forfeited", event.count, event.reason))

    def _requested(self, record: ev.Record, event: ev.BatchRequested) -> None:
        self._open[event.request] = _Open(event.partition, event.size, record.seq, record.at_ns)

    def _end_wait(self, record: ev.Record, request: int, now: str) -> None:
        wait = self._open.pop(request, None)
        if wait is not None:
            waited = (record.at_ns - wait.at_ns) / 1e9
            self._waits.append(Wait(request, wait.partition, wait.size, wait.seq, record.seq, waited, now))

    def _cancelled(self, record: ev.Record, event: ev.BatchRequestCancelled) -> None:
        self._end_wait(record, event.request, f"cancelled: {event.reason}")

    def _sampled(self, record: ev.Record, event: ev.BatchSampled) -> None:
        self._end_wait(record, event.request, f"batch {event.batch}")
        self._out[event.batch] = event.group_ids
        self.batches[event.batch] = BatchChange(
            event.batch, event.partition, len(event.group_ids), record.seq, None, "with the trainer"
        )
        for group_id, lag in zip(event.group_ids, event.lags, strict=True):
            self._moved(group_id, record.seq, "sampled", f"batch {event.batch}, lag {lag}")

    def _committed(self, record: ev.Record, event: ev.BatchCommitted) -> None:
        self._end_batch(record, event.batch, "committed")
        for group_id in self._out.pop(event.batch, ()):
            self._commits.append((record.seq, group_id))
            self._moved(group_id, record.seq, "committed", f"batch {event.batch}")

    def _returned(self, record: ev.Record, event: ev.BatchReturned) -> None:
        reason = event.reason or "no reason given"
        self._end_batch(record, event.batch, f"returned: {reason}")
        for group_id in self._out.pop(event.batch, ()):
            phase = self._terminal.get(group_id, "finished")
            self._moved(group_id, record.seq, phase, f"batch {event.batch} came back: {reason}")

    def _end_batch(self, record: ev.Record, number: int, now: str) -> None:
        known = self.batches.get(number)
        if known is not None:
            self.batches[number] = attrs.evolve(known, ended_seq=record.seq, now=now)
        elif number in self._was_out:
            batch = self._was_out[number]
            self.batches[number] = BatchChange(
                number, batch.partition, len(batch.group_ids), batch.seq, record.seq, now
            )

    def _published(self, record: ev.Record, event: ev.WeightsPublished) -> None:
        self.versions.append(Version(record.seq, event.weight_version, event.lineage, "published"))

    def _opened(self, record: ev.Record, event: ev.RunRecovered) -> None:
        for request in list(self._open):
            self._end_wait(record, request, "gone with its process")
        self.rules += _rules(record.seq, self._rules_now, event.rules)
        self._rules_now = event.rules
        self.versions.append(Version(record.seq, event.weight_version, event.lineage, "opened"))

    def _rewound(self, record: ev.Record, event: ev.RunRewound) -> None:
        how = f"gone back to mark {event.mark}"
        self.versions.append(Version(record.seq, event.weight_version, event.lineage, how))
        for seq, group_id in self._commits:
            if seq > event.mark_seq:
                self._moved(group_id, record.seq, self._terminal[group_id], how)
        self._commits = [(seq, group_id) for seq, group_id in self._commits if seq <= event.mark_seq]


_STEPS: Final[dict[type[ev.Event], Any]] = {
    ev.GroupSubmitted: _Between._submitted,
    ev.SessionStarted: _Between._session_started,
    ev.GroupFinished: _Between._finished,
    ev.GroupFailed: _Between._failed,
    ev.GroupRequeued: _Between._requeued,
    ev.GroupEvicted: _Between._evicted,
    ev.RefillForfeited: _Between._forfeited,
    ev.BatchRequested: _Between._requested,
    ev.BatchRequestCancelled: _Between._cancelled,
    ev.BatchSampled: _Between._sampled,
    ev.BatchCommitted: _Between._committed,
    ev.BatchReturned: _Between._returned,
    ev.WeightsPublished: _Between._published,
    ev.RunRecovered: _Between._opened,
    ev.RunRewound: _Between._rewound,
}


def in_short(changes: list[GroupChange]) -> str:
    """How many went where, as `12 committed, 3 evicted`."""
    counts = Counter(change.after for change in changes)
    return ", ".join(f"{count} {phase}" for phase, count in counts.most_common()) or counted(0, "group")
