"""Whether a log can be true: checks over its records in order, with one sentence for each thing that is wrong.

Rule 1: everything is counted here anew, from the events alone; a `Book` is driven beside it and compared with
the counts, so that neither is trusted.
Rule 2: an event costs the same however long the log is.
Rule 3: a broken log never stops the checker: it says what is wrong and follows the log.
Rule 4: here are the counts, and what holds around every event; what one event can break is in `group_invariants` and
`batch_invariants`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any, Final

import attrs

from groupstate.core import batch_invariants, group_invariants
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group_invariants import type_name
from groupstate.core.held import Window
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase
from groupstate.core.rules import Rules
from groupstate.core.standing import Standing
from groupstate.core.tracked import Tracked

INVARIANTS: Final[dict[int, str]] = {
    1: "a group ends right after the latest attempt of every session has ended, never before",
    2: "an ended group is only evicted, sampled, returned, committed, requeued or fenced",
    3: "every submitted group is in exactly one phase",
    4: "a group is in one batch at most, whole and with a trajectory",
    5: "refills submitted, forfeited and owed are the credit of the evictions, one eviction per group",
    6: "no group is sampled, or evicted as stale, against the lag bound",
    7: "no refill or admission takes the groups in flight past their bound",
    8: "validation groups are neither evicted nor refilled",
    9: "every prefix of the log replays",
    11: "what the metrics count is what the log holds",
}
"""What `Violation.invariant` refers to. 10 (crashes) and 12 (waits) can't be read off a log."""


@attrs.frozen
class Violation:
    invariant: int
    """Key of `INVARIANTS`."""
    seq: int
    """The event at which it shows."""
    group_id: str
    """The group concerned; empty where it is none in particular."""
    text: str
    """One sentence: what the log says that can't all be true."""
    witness: tuple[int, ...] = ()
    """The events that can't all be true, in order, that at which it shows among them; two or three, mostly."""

    def __str__(self) -> str:
        return f"event {self.seq}: invariant {self.invariant}: {self.text}"


class Checker:
    """Takes a log's records one by one and collects what is wrong."""

    def __init__(self, book: Book | None = None, *, replays: bool = True) -> None:
        """
        Args:
            book: the empty book that is driven beside the checks; a new one by default.
            replays: False drives none, so that neither the replay nor what it counts for the metrics is checked; the
                counts can be held against a book that others drive (`compare`).
        """
        self.found: list[Violation] = []
        self._book: Book | None = (Book() if book is None else book) if replays else None
        """None once it can't follow the log any more."""
        self.seq = 0
        self.rules = Rules()
        self.recorded: dict[str, Any] | None = None
        """The rules as the log has them: reading them takes longer than a thousand events."""
        self.version = 0
        self.groups: dict[str, Tracked] = {}
        self.counts: Counter[tuple[ev.Partition, Phase]] = Counter()
        self.ready: Counter[ev.Partition] = Counter()
        self.ages: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """Training groups in flight by dataset, and in there by the version that their lag is counted from."""
        self.owed: deque[tuple[str, int, int]] = deque()
        """Credit not spent yet: the group evicted, its size and the event, oldest first."""
        self.spent: tuple[int, ...] = ()
        """The eviction that earned the credit that was spent last, and the event that spent it."""
        self.rules_seq = 0
        """The event that the rules in force are of."""
        self.version_seq = 0
        """The event that the current version is of."""
        self.rewound_seq = 0
        self.request_seqs: dict[int, int] = {}
        """The event that each request was opened or, once it is over, ended by."""
        self.batch_seqs: dict[int, int] = {}
        """The event that each batch was sampled or, once it isn't out any more, ended by."""
        self.builds_on: tuple[int, ...] = ()
        """Earlier events that the event at hand goes on from."""
        self.requests: dict[int, ev.BatchRequested] = {}
        self.batches: dict[int, ev.BatchSampled] = {}
        self.commits: list[tuple[int, ev.BatchSampled]] = []
        self.windows: defaultdict[ev.Partition, Counter[str]] = defaultdict(Counter)
        self.reported: dict[int, Counter[str]] = {}
        """Counts that the metrics of each batch that is out were made of."""
        self._gone: Counter[Phase] = Counter()
        """Groups that have left, of all partitions."""
        self._moved: dict[tuple[ev.Partition, Phase], None] = {}
        """What of the counts has changed since the book was last compared with it."""
        self.must_end = ""
        """The group whose last session has just ended."""
        self.abandoned: set[str] = set()
        """Groups that the run went back from and that are evicted next."""

    def feed(self, record: ev.Record) -> list[Violation]:
        """Take the next record in; returns what it makes wrong."""
        before = len(self.found)
        self.take(record)
        return self.found[before:]

    def take(self, record: ev.Record) -> None:
        """Take the next record in; what it makes wrong is in `found`."""
        event, seq = record.event, record.seq
        kind = type(event)
        if seq != self.seq + 1 or (self.seq == 0) is not (kind is ev.RunStarted):
            self._check_place(record)
        self.seq = seq
        self.builds_on = ()
        if self.must_end:
            self._check_end_follows(event)
        if self.abandoned:
            self._check_abandoned_leave(event)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, event)
        if self._book is not None:
            self._replay(self._book, record)

    def compare(self, book: Book) -> list[Violation]:
        """Hold the counts against a book that has taken in the same events; returns what it makes wrong."""
        before = len(self.found)
        problem = self._difference(book, self._moved)
        self._moved.clear()
        if problem is not None:
            self.wrong(*problem)
        return self.found[before:]

    def add_to(self, standing: Standing, event: Any) -> None:
        """Fold in what the event that was taken last led to, as a replay does of its book (see `Standing`).

        Args:
            event: none of the kinds in `UNCOUNTED`.
        """
        if type(event) in MOVES_ONE:
            standing.add_group(self.seq, self.groups[event.group_id].phase)
        else:
            window = self.reported[event.batch] if type(event) is ev.BatchSampled else None
            standing.add(self.seq, self.counts.items(), self._totals(), window)

    def _totals(self) -> tuple[int, ...]:
        submitted, evicted, committed = len(self.groups), self._gone[Phase.EVICTED], self._gone[Phase.COMMITTED]
        return submitted, evicted, committed, submitted - evicted - committed, len(self.owed)

    def finish(self) -> list[Violation]:
        """Everything that was found wrong, in the order of the log."""
        return self.found

    # Around every event ------------------------------------------------------------------------------

    def wrong(self, invariant: int, text: str, group_id: str = "", *others: int) -> None:
        """
        Args:
            others: events that can't be true beside the one at hand; 0 is none.
        """
        witness = tuple(sorted({*others, self.seq} - {0}))
        self.found.append(Violation(invariant, self.seq, group_id, text, witness))

    def _check_place(self, record: ev.Record) -> None:
        before, self.seq = self.seq, record.seq
        if record.seq != before + 1:
            text = f"event {record.seq} comes after event {before}, so what lies between can't be replayed"
            self.wrong(9, text, "", before)
            self._book = None
        else:
            text = f"event {record.seq} is {type_name(record.event)}, and RunStarted is the first event, once"
            self.wrong(9, text, "", before and 1)

    def _check_end_follows(self, event: ev.AnyEvent) -> None:
        group_id, self.must_end = self.must_end, ""
        if not (isinstance(event, ev.GroupFinished | ev.GroupFailed) and event.group_id == group_id):
            self.wrong(
                1,
                f"the last session of group {group_id!r} ended at event {self.seq - 1}, and the next event is "
                f"{type_name(event)} instead of the group's end",
                group_id,
                self.seq - 1,
            )

    def _check_abandoned_leave(self, event: ev.AnyEvent) -> None:
        """A run that goes back and evicts does so before anything else; only its death leaves some over."""
        if isinstance(event, ev.GroupEvicted):
            return
        if not isinstance(event, ev.RunRecovered):
            name = min(self.abandoned)
            text = f"the run went back and evicts what ended since, and group {name!r} is still there at "
            self.wrong(6, f"{text}{type_name(event)}", name, self.groups[name].left_seq, self.rewound_seq)
        self.abandoned.clear()

    def _replay(self, book: Book, record: ev.Record) -> None:
        """Let the book follow, and compare."""
        try:
            book.apply(record)
        except Exception as error:
            # Whatever it is, a replay of this log ends here.
            why = str(error) or type(error).__name__
            same = next((found.witness for found in self.found[-1:] if found.seq == record.seq), self.builds_on)
            self.wrong(9, f"a replay stops here: {why}", getattr(record.event, "group_id", ""), *same)
            self._book = None
            return
        if book.released:
            book.released.clear()
        kind = type(record.event)
        if kind in WITHIN:
            if not self._moved:
                # Most events: the group stays where it is, and what it is compared by with it.
                return
            places: Collection[tuple[ev.Partition, Phase]] = self._moved
        else:
            places = self._moved if kind in OF_ONE_GROUP else self.counts.keys()
        problem = self._difference(book, places)
        self._moved.clear()
        if problem is not None:
            self.wrong(*problem)
            self._book = None

    def _difference(self, book: Book, places: Collection[tuple[ev.Partition, Phase]]) -> tuple[int, str] | None:
        """Where the book's counts aren't those of the events; of the phases only `places`."""
        counts = self.counts
        for partition, phase in places:
            if phase is Phase.EVICTED or phase is Phase.COMMITTED:
                continue
            held, count = book.count(phase, partition=partition), counts[partition, phase]
            if held != count:
                return 3, f"the book holds {held} {phase} groups of {partition!r}, the events make it {count}"
        submitted, evicted, committed, live, owed = self._totals()
        totals = book.totals
        if totals["submitted"] != submitted:
            return 3, _miscounted("submitted", totals, submitted)
        if totals["evicted"] != evicted:
            return 3, _miscounted("evicted", totals, evicted)
        if totals["committed"] != committed:
            return 3, _miscounted("committed", totals, committed)
        if len(book.groups) != live:
            return 3, f"the book holds {len(book.groups)} groups, the events make it {live}"
        if len(book.credits) != owed:
            return 5, f"the book owes {len(book.credits)} refills, the events make it {owed}"
        return None

    def known(self, group_id: str) -> Tracked | None:
        group = self.groups.get(group_id)
        if group is None:
            self.wrong(3, f"event {self.seq} names group {group_id!r}, which was never submitted", group_id)
        return group

    # Moving groups between the counts ----------------------------------------------------------------

    def lift(self, group: Tracked) -> None:
        """Take a group out of the counts, to change what it is counted by; `place` puts it back."""
        self._count(group, -1)

    def place(self, group: Tracked, phase: Phase) -> None:
        group.phase = phase
        self._count(group, 1)

    def _count(self, group: Tracked, one: int) -> None:
        phase = group.phase
        place = (group.partition, phase)
        self._moved[place] = None
        self.counts[place] += one
        if phase in IN_FLIGHT:
            self._age(group, one)
        elif phase in TERMINAL:
            if group.is_ready:
                self.ready[group.partition] += one
        elif phase is not Phase.SAMPLED:
            self._gone[phase] += one

    def _age(self, group: Tracked, one: int) -> None:
        if group.partition == ev.TRAIN:
            ages = self.ages[group.dataset]
            left = ages.get(group.aged_from, 0) + one
            if left:
                ages[group.aged_from] = left
            else:
                del ages[group.aged_from]

    def in_flight(self, partition: ev.Partition) -> int:
        return self.counts[partition, Phase.PENDING] + self.counts[partition, Phase.RUNNING]

    def lag(self, group: Tracked) -> int:
        return max(0, self.version - group.aged_from) if group.kept_lag is None else group.kept_lag

    def lag_seqs(self, group: Tracked) -> tuple[int, ...]:
        """The events that its lag is the difference of; of one whose batch came back the one that it was sampled in."""
        return (group.aged_seq, self.version_seq) if group.kept_lag is None else (group.sampled_seq,)

    def booked_window(self, partition: ev.Partition) -> Window | None:
        """What the book counts for the batch that is being sampled; None where there is no book."""
        return None if self._book is None else self._book.windows.get(partition, Window())


WITHIN: Final = frozenset({ev.SessionStarted, ev.SessionFinished, ev.SessionFailed, ev.ResultFenced})
"""Events after which a group may be in the same phase as before. A book that moved it all the same is found out at the
next event that moves one."""

OF_ONE_GROUP: Final = frozenset(
    {ev.GroupSubmitted, ev.GroupFinished, ev.GroupFailed, ev.GroupEvicted, ev.GroupRequeued}
)
"""Events after which only the phases that their group comes from and goes to are compared, beside the totals. All of
them are after the others, of which some come with each batch."""


MOVES_ONE: Final = OF_ONE_GROUP - {ev.GroupSubmitted}
"""Events that take one group to another phase."""

UNCOUNTED: Final = WITHIN | {ev.GroupSubmitted}
"""Events behind which a `Standing` isn't told: what they lead to shows with the next other one."""


def _miscounted(name: str, totals: Counter[str], count: int) -> str:
    return f"the book counts {totals[name]} {name} groups, the events make it {count}"


_HANDLERS: Final = {**group_invariants.HANDLERS, **batch_invariants.HANDLERS}


def violations(records: Iterable[ev.Record]) -> list[Violation]:
    """All that is wrong with a log, in its order; empty for a log that can be true."""
    checker = Checker()
    for record in records:
        checker.feed(record)
    return checker.finish()
