"""Whether a log can be true: checks over its records in order, with one sentence for each thing that is wrong.

Rule 1: everything is counted here anew, from the events alone; a `Book` is driven beside it and compared with
the counts, so that neither is trusted.
Rule 2: an event costs the same however long the log is.
Rule 3: a broken log never stops the checker: it says what is wrong and follows the log.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.held import UNDELIVERED, Window
from groupstate.core.misfits import wrong_end, wrong_taking
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase
from groupstate.core.rules import Capacity, Rules, Slots, recorded_rules
from groupstate.core.standing import Standing
from groupstate.core.tracked import Tracked
from groupstate.errors import BadSettings

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
        self._seq = 0
        self._rules = Rules()
        self._recorded: dict[str, Any] | None = None
        """The rules as the log has them: reading them takes longer than a thousand events."""
        self._version = 0
        self._groups: dict[str, Tracked] = {}
        self._counts: Counter[tuple[ev.Partition, Phase]] = Counter()
        self._ready: Counter[ev.Partition] = Counter()
        self._ages: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """Training groups in flight by dataset, and in there by the version that their lag is counted from."""
        self._owed: deque[tuple[str, int, int]] = deque()
        """Credit not spent yet: the group evicted, its size and the event, oldest first."""
        self._spent: tuple[int, ...] = ()
        """The eviction that earned the credit that was spent last, and the event that spent it."""
        self._rules_seq = 0
        """The event that the rules in force are of."""
        self._version_seq = 0
        """The event that the current version is of."""
        self._rewound_seq = 0
        self._request_seqs: dict[int, int] = {}
        """The event that each request was opened or, once it is over, ended by."""
        self._batch_seqs: dict[int, int] = {}
        """The event that each batch was sampled or, once it isn't out any more, ended by."""
        self._builds_on: tuple[int, ...] = ()
        """Earlier events that the event at hand goes on from."""
        self._requests: dict[int, ev.BatchRequested] = {}
        self._batches: dict[int, ev.BatchSampled] = {}
        self._commits: list[tuple[int, ev.BatchSampled]] = []
        self._windows: defaultdict[ev.Partition, Counter[str]] = defaultdict(Counter)
        self._reported: dict[int, Counter[str]] = {}
        """Counts that the metrics of each batch that is out were made of."""
        self._gone: Counter[Phase] = Counter()
        """Groups that have left, of all partitions."""
        self._moved: dict[tuple[ev.Partition, Phase], None] = {}
        """What of the counts has changed since the book was last compared with it."""
        self._must_end = ""
        """The group whose last session has just ended."""
        self._abandoned: set[str] = set()
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
        if seq != self._seq + 1 or (self._seq == 0) is not (kind is ev.RunStarted):
            self._check_place(record)
        self._seq = seq
        self._builds_on = ()
        if self._must_end:
            self._check_end_follows(event)
        if self._abandoned:
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
            self._wrong(*problem)
        return self.found[before:]

    def add_to(self, standing: Standing, event: Any) -> None:
        """Fold in what the event that was taken last led to, as a replay does of its book (see `Standing`).

        Args:
            event: none of the kinds in `UNCOUNTED`.
        """
        if type(event) in MOVES_ONE:
            standing.add_group(self._seq, self._groups[event.group_id].phase)
        else:
            window = self._reported[event.batch] if type(event) is ev.BatchSampled else None
            standing.add(self._seq, self._counts.items(), self._totals(), window)

    def _totals(self) -> tuple[int, ...]:
        submitted, evicted, committed = len(self._groups), self._gone[Phase.EVICTED], self._gone[Phase.COMMITTED]
        return submitted, evicted, committed, submitted - evicted - committed, len(self._owed)

    def finish(self) -> list[Violation]:
        """Everything that was found wrong, in the order of the log."""
        return self.found

    # Around every event ------------------------------------------------------------------------------

    def _wrong(self, invariant: int, text: str, group_id: str = "", *others: int) -> None:
        """
        Args:
            others: events that can't be true beside the one at hand; 0 is none.
        """
        witness = tuple(sorted({*others, self._seq} - {0}))
        self.found.append(Violation(invariant, self._seq, group_id, text, witness))

    def _check_place(self, record: ev.Record) -> None:
        before, self._seq = self._seq, record.seq
        if record.seq != before + 1:
            text = f"event {record.seq} comes after event {before}, so what lies between can't be replayed"
            self._wrong(9, text, "", before)
            self._book = None
        else:
            text = f"event {record.seq} is {_kind(record.event)}, and RunStarted is the first event, once"
            self._wrong(9, text, "", before and 1)

    def _check_end_follows(self, event: ev.AnyEvent) -> None:
        group_id, self._must_end = self._must_end, ""
        if not (isinstance(event, ev.GroupFinished | ev.GroupFailed) and event.group_id == group_id):
            self._wrong(
                1,
                f"the last session of group {group_id!r} ended at event {self._seq - 1}, and the next event is "
                f"{_kind(event)} instead of the group's end",
                group_id,
                self._seq - 1,
            )

    def _check_abandoned_leave(self, event: ev.AnyEvent) -> None:
        """A run that goes back and evicts does so before anything else; only its death leaves some over."""
        if isinstance(event, ev.GroupEvicted):
            return
        if not isinstance(event, ev.RunRecovered):
            name = min(self._abandoned)
            text = f"the run went back and evicts what ended since, and group {name!r} is still there at "
            self._wrong(6, f"{text}{_kind(event)}", name, self._groups[name].left_seq, self._rewound_seq)
        self._abandoned.clear()

    def _replay(self, book: Book, record: ev.Record) -> None:
        """Let the book follow, and compare."""
        try:
            book.apply(record)
        except Exception as error:
            # Whatever it is, a replay of this log ends here.
            why = str(error) or type(error).__name__
            same = next((found.witness for found in self.found[-1:] if found.seq == record.seq), self._builds_on)
            self._wrong(9, f"a replay stops here: {why}", getattr(record.event, "group_id", ""), *same)
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
            places = self._moved if kind in OF_ONE_GROUP else self._counts.keys()
        problem = self._difference(book, places)
        self._moved.clear()
        if problem is not None:
            self._wrong(*problem)
            self._book = None

    def _difference(self, book: Book, places: Collection[tuple[ev.Partition, Phase]]) -> tuple[int, str] | None:
        """Where the book's counts aren't those of the events; of the phases only `places`."""
        counts = self._counts
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

    def _known(self, group_id: str) -> Tracked | None:
        group = self._groups.get(group_id)
        if group is None:
            self._wrong(3, f"event {self._seq} names group {group_id!r}, which was never submitted", group_id)
        return group

    # Moving groups between the counts ----------------------------------------------------------------

    def _lift(self, group: Tracked) -> None:
        self._count(group, -1)

    def _place(self, group: Tracked, phase: Phase) -> None:
        group.phase = phase
        self._count(group, 1)

    def _count(self, group: Tracked, one: int) -> None:
        phase = group.phase
        place = (group.partition, phase)
        self._moved[place] = None
        self._counts[place] += one
        if phase in IN_FLIGHT:
            self._age(group, one)
        elif phase in TERMINAL:
            if group.is_ready:
                self._ready[group.partition] += one
        elif phase is not Phase.SAMPLED:
            self._gone[phase] += one

    def _age(self, group: Tracked, one: int) -> None:
        if group.partition == ev.TRAIN:
            ages = self._ages[group.dataset]
            left = ages.get(group.aged_from, 0) + one
            if left:
                ages[group.aged_from] = left
            else:
                del ages[group.aged_from]

    def _in_flight(self, partition: ev.Partition) -> int:
        return self._counts[partition, Phase.PENDING] + self._counts[partition, _RUNNING]

    def _lag(self, group: Tracked) -> int:
        return max(0, self._version - group.aged_from) if group.kept_lag is None else group.kept_lag

    def _lag_seqs(self, group: Tracked) -> tuple[int, ...]:
        """The events that its lag is the difference of; of one whose batch came back the one that it was sampled in."""
        return (group.aged_seq, self._version_seq) if group.kept_lag is None else (group.sampled_seq,)

    def _window(self, partition: ev.Partition) -> Counter[str]:
        return self._windows[partition]

    # The run -----------------------------------------------------------------------------------------

    def _in_force(self, event: ev.RunStarted | ev.RunRecovered) -> None:
        if event.rules != self._recorded:
            self._rules_seq = self._seq
            self._recorded = event.rules
            try:
                self._rules = recorded_rules(event.rules)
            except BadSettings as error:
                self._wrong(9, f"the rules of the run can't be read: {error}")
        self._version, self._version_seq = event.weight_version, self._seq
        self._request_seqs.update(dict.fromkeys(self._requests, self._seq))
        self._requests.clear()

    def _published(self, event: ev.WeightsPublished) -> None:
        self._version, self._version_seq = event.weight_version, self._seq

    def _rewound(self, event: ev.RunRewound) -> None:
        self._version, self._version_seq, self._rewound_seq = event.weight_version, self._seq, self._seq
        self._builds_on = tuple(self._batch_seqs[number] for number in self._batches)[:1]
        for group in self._groups.values():
            if self._too_new(group) and group.phase not in (Phase.EVICTED, Phase.COMMITTED):
                self._lift(group)
                self._rewind(group)
                self._place(group, group.phase)
        while self._commits and self._commits[-1][0] > event.mark_seq:
            _, batch = self._commits.pop()
            for group in self._of_batch(batch, Phase.COMMITTED):
                if self._too_new(group):
                    self._rewind(group)
                self._bring_back(group)
        if event.evicts:
            self._abandoned = {
                group.group_id
                for group in self._groups.values()
                if group.phase in TERMINAL
                and group.partition == ev.TRAIN
                and (group.submitted_seq > event.mark_seq or group.stamp > event.weight_version)
            }

    def _rewind(self, group: Tracked) -> None:
        group.aged_from = group.rewound_to = self._version
        group.aged_seq = group.rewound_seq = self._seq

    def _too_new(self, group: Tracked) -> bool:
        """Made for a version of the abandoned line, and not waiting for the new line to reach it."""
        return group.aged_from > self._version and group.target_version is None

    # Groups ------------------------------------------------------------------------------------------

    def _submitted(self, event: ev.GroupSubmitted) -> None:
        known = self._groups.get(event.group_id)
        if known is not None:
            text = f"group {event.group_id!r} is submitted again; the first time was event {known.submitted_seq}"
            self._wrong(3, text, event.group_id, known.submitted_seq)
            return
        group = Tracked(
            event.group_id,
            event.size,
            event.partition,
            event.weight_version,
            self._seq,
            event.weight_version if event.target_version is None else event.target_version,
            event.dataset,
            event.oversample,
            event.target_version,
        )
        group.begin([1] * event.size, self._seq)
        group.aged_seq = group.stamped_seq = self._seq
        self._groups[event.group_id] = group
        self._place(group, Phase.PENDING)
        window = self._window(event.partition)
        window["submitted"] += 1
        if event.cause == "refill":
            window["refills"] += 1
            self._check_refill(event)
        if event.cause != "submit":
            self._check_bounds(event)

    def _check_refill(self, event: ev.GroupSubmitted) -> None:
        name = event.group_id
        if event.partition != ev.TRAIN:
            self._wrong(8, f"group {name!r} of partition {event.partition!r} is submitted as a refill", name)
        if not self._owed:
            self._wrong(5, f"group {name!r} is submitted as a refill, and no credit is left", name, *self._spent)
            return
        evicted, size, earned = self._owed.popleft()
        self._spent = (earned, self._seq)
        needed = event.size - event.oversample
        if size != needed:
            text = f"refill {name!r} needs {needed} sessions, and group {evicted!r}, which it replaces, needed {size}"
            self._wrong(5, text, name, self._groups[evicted].submitted_seq, earned)

    def _check_bounds(self, event: ev.GroupSubmitted) -> None:
        """The groups that the user did not submit obey the bounds."""
        rules, flying, ready = self._rules, self._in_flight(ev.TRAIN), self._ready[ev.TRAIN]
        who, name = f"{event.cause} {event.group_id!r}", event.group_id
        if event.cause == "refill" and rules.drains:
            bound = rules.in_flight_batches_max * (rules.batch_size or 0)
            if flying > bound:
                text = f"{who} takes the training groups in flight to {flying}, past {bound}"
                self._wrong(7, text, name, *self._filling(name, IN_FLIGHT))
        most = getattr(rules.admission, "in_flight_max", None)
        if most is not None and flying > most:
            text = f"{who} takes the training groups in flight to {flying}, past {most}"
            self._wrong(7, text, name, *self._filling(name, IN_FLIGHT))
        wanted = sum(request.size for request in self._requests.values() if request.partition == ev.TRAIN)
        awaited = rules.targets_versions and event.target_version == self._version and wanted > 0
        if wanted >= ready + flying or awaited:
            # A waiting sample() needs this very group, whatever admission would rather keep ahead.
            return
        rule = rules.admission
        if isinstance(rule, Slots) and (flying > rule.n or flying + ready > rule.n + rule.ready_max):
            text = (
                f"{who} takes the training groups to {flying} in flight and {ready} sampleable, "
                f"past slots of n {rule.n} and ready_max {rule.ready_max}"
            )
            self._wrong(7, text, name, *self._filling(name, IN_FLIGHT | TERMINAL))
        elif isinstance(rule, Capacity):
            bound = (rule.lag_max + self._version + 1) * (rules.batch_size or 0)
            used = flying + ready + self._counts[ev.TRAIN, Phase.SAMPLED] + self._counts[ev.TRAIN, Phase.COMMITTED]
            if used > bound:
                text = f"{who} makes {used} training groups, past the capacity of {bound}"
                counted = IN_FLIGHT | TERMINAL | {Phase.SAMPLED, Phase.COMMITTED}
                self._wrong(7, text, name, *self._filling(name, counted))

    def _filling(self, name: str, phases: frozenset[Phase]) -> tuple[int, ...]:
        """The event that the rules are of, and the one that took the last place before the group at hand."""
        taken = (
            group.begun_seq
            for group in reversed(self._groups.values())
            if group.group_id != name and group.partition == ev.TRAIN and group.phase in phases
            if group.is_ready or group.phase not in TERMINAL
        )
        return self._rules_seq, next(taken, 0)

    def _ended(self, event: ev.GroupFinished | ev.GroupFailed) -> None:
        group = self._known(event.group_id)
        if group is None:
            return
        if group.phase not in IN_FLIGHT:
            self._wrong(2, self._too_late(group, _kind(event)), group.group_id, group.left_seq)
            return
        phase = Phase.FINISHED if isinstance(event, ev.GroupFinished) else Phase.FAILURE
        misfit = wrong_end(group, event, survivors_min=self._rules.survivors_min, rules_seq=self._rules_seq)
        if misfit is not None:
            text, seqs = misfit
            self._wrong(1, f"group {group.group_id!r} becomes {phase} although {text}", group.group_id, *seqs)
        self._lift(group)
        group.ending, group.left_seq = phase, self._seq
        group.age(self._rules.basis)
        group.kept_empty = phase in self._rules.kept_empty and not group.rows and group.partition == ev.TRAIN
        self._place(group, phase)

    def _too_late(self, group: Tracked, what: str) -> str:
        return f"{what} comes after group {group.group_id!r} was {_past(group.phase)} at event {group.left_seq}"

    def _evicted(self, event: ev.GroupEvicted) -> None:
        group = self._known(event.group_id)
        if group is None:
            return
        name = group.group_id
        if group.phase is Phase.EVICTED:
            self._wrong(
                5, f"group {name!r} is evicted again; the first time was event {group.left_seq}", name, group.left_seq
            )
            return
        if group.phase in IN_FLIGHT:
            self._wrong(1, f"group {name!r} is evicted while it is {group.phase}", name, group.open_seq)
        elif group.phase not in TERMINAL:
            text = f"group {name!r} is evicted although it was {_past(group.phase)} with batch {group.batch}"
            self._wrong(4, text, name, group.sampled_seq, group.left_seq)
        if group.partition != ev.TRAIN:
            self._wrong(8, f"group {name!r} of partition {group.partition!r} is evicted", name, group.submitted_seq)
        self._check_credit(event)
        self._check_eviction_lag(group, event)
        window = self._window(group.partition)
        window["evicted_groups"] += 1
        window.update(f"evicted/{reason}" for reason in event.reasons)
        if "stale" in event.reasons:
            window[f"evicted/stale with lag {event.lag}"] += 1
        if event.shared_value is not None:
            window[_filtered(event.shared_value)] += 1
        self._owed.extend([(name, group.needed, self._seq)] * event.credit)
        self._lift(group)
        group.left_seq = self._seq
        group.attempts, group.outcomes = [], []
        self._place(group, Phase.EVICTED)

    def _check_credit(self, event: ev.GroupEvicted) -> None:
        name, reasons = event.group_id, event.reasons
        if not reasons or len(set(reasons)) < len(reasons):
            text = f"group {name!r} is evicted for {list(reasons)}; a reason is needed, and each counts once"
            self._wrong(5, text, name)
        most = 2 if self._rules.mode == "sync" and "zero_variance" in reasons else 0 if "surplus" in reasons else 1
        if not 0 <= event.credit <= most:
            why = " and ".join(reasons)
            text = (
                f"evicting group {name!r} earns {event.credit} refills; {why} in {self._rules.mode} mode earns {most}"
            )
            # In the other mode a group without variance would have earned this.
            mode_decides = "zero_variance" in reasons and event.credit == 2
            self._wrong(5, text, name, self._rules_seq if mode_decides else 0)

    def _check_eviction_lag(self, group: Tracked, event: ev.GroupEvicted) -> None:
        name, lag = group.group_id, self._lag(group)
        if event.lag != lag:
            text = f"group {name!r} is evicted with lag {event.lag}, and its lag is {lag}"
            self._wrong(11, text, name, *self._lag_seqs(group))
        abandoned = name in self._abandoned
        self._abandoned.discard(name)
        if "stale" not in event.reasons or abandoned or self._rules.has_own_selection:
            # A rule of the user's own says by itself what is stale.
            return
        bound = self._rules.lag_bound(group.dataset) if self._rules.drops_stale else None
        if bound is None:
            text = f"group {name!r} is evicted as stale under rules that drop nothing for its lag"
            self._wrong(6, text, name, self._rules_seq)
        elif lag <= bound:
            text = f"group {name!r} is evicted as stale with lag {lag}, and lag_max {bound} is kept"
            self._wrong(6, text, name, self._rules_seq)

    def _requeued(self, event: ev.GroupRequeued) -> None:
        group = self._known(event.group_id)
        if group is None:
            return
        if group.phase not in IN_FLIGHT and group.phase not in TERMINAL:
            self._wrong(2, self._too_late(group, _kind(event)), group.group_id, group.left_seq)
            return
        if event.by_rule:
            self._check_requeue(group)
        self._lift(group)
        group.begin([attempt + 1 for attempt in group.attempts], self._seq)
        if event.weight_version is not None:
            group.stamp, group.stamped_seq, group.rewound_to = event.weight_version, self._seq, None
        group.aged_from, group.aged_seq = group.counts_from, group.stamped_seq
        if group.rewound_to is not None and group.rewound_to < group.aged_from:
            group.aged_from, group.aged_seq = group.rewound_to, group.rewound_seq
        self._place(group, Phase.PENDING)

    def _check_requeue(self, group: Tracked) -> None:
        """The rules start only failed groups over, and not without end."""
        name = group.group_id
        group.rule_requeues += 1
        self._window(group.partition)["requeued"] += 1
        if group.phase is not Phase.FAILURE:
            seq = group.open_seq if group.phase in IN_FLIGHT else group.left_seq
            self._wrong(2, f"the rules start group {name!r} over while it is {group.phase}", name, seq)
        if group.rule_requeues > self._rules.requeues_max:
            text = f"the rules start group {name!r} over {group.rule_requeues} times, and requeues_max is "
            self._wrong(2, f"{text}{self._rules.requeues_max}", name, self._rules_seq, group.started_over_seq)
        group.started_over_seq = self._seq

    def _starved(self, event: ev.DatasetStarved) -> None:
        self._window(ev.TRAIN)[f"starved/{event.dataset}"] += 1

    def _forfeited(self, event: ev.RefillForfeited) -> None:
        self._window(ev.TRAIN)["forfeited"] += event.count
        if event.count > len(self._owed):
            earned = (self._owed[-1][2],) if self._owed else self._spent
            self._wrong(5, f"{event.count} refills are forfeited, and {len(self._owed)} are owed", "", *earned)
        for _ in range(min(event.count, len(self._owed))):
            self._spent = (self._owed.pop()[2], self._seq)

    # Sessions ----------------------------------------------------------------------------------------

    def _in_session(self, event: ev.SessionStarted | ev.SessionFinished | ev.SessionFailed) -> Tracked | None:
        """The group, if its session can have an event now."""
        group = self._groups.get(event.group_id) or self._known(event.group_id)
        if group is None:
            return None
        session, seqs = event.session, group.last_seqs
        if group.phase not in IN_FLIGHT:
            text = self._too_late(group, f"{_kind(event)} of session {session}")
            self._wrong(2, text, group.group_id, group.left_seq)
            return None
        if not 0 <= session < group.size:
            # The replay stops at it, and says so.
            self._builds_on = (group.submitted_seq,)
            return None
        self._builds_on = (seqs[session],)
        seqs[session] = self._seq
        return group

    def _session_started(self, event: ev.SessionStarted) -> None:
        group = self._in_session(event)
        if group is not None:
            session = event.session
            if event.attempt > group.attempts[session]:
                group.attempts[session] = event.attempt
            group.outcomes[session] = ""
            group.starts[session] = event.weight_version
            if group.phase is not _RUNNING:
                self._lift(group)
                self._place(group, _RUNNING)

    def _session_finished(self, event: ev.SessionFinished) -> None:
        group = self._in_session(event)
        if group is not None:
            group.take_rows(event.session, event.trajectories, self._seq)
            self._settle(group, event, "finished")

    def _session_failed(self, event: ev.SessionFailed) -> None:
        group = self._in_session(event)
        if group is None:
            return
        self._window(group.partition)[f"failed/{event.failure}"] += 1
        if event.retry_in_s is not None:
            group.attempts[event.session] = event.attempt + 1
        else:
            self._settle(group, event, "failed")

    def _settle(self, group: Tracked, event: ev.SessionFinished | ev.SessionFailed, outcome: str) -> None:
        if event.attempt != group.attempts[event.session]:
            # An attempt that is over already can't end the latest one.
            return
        group.outcomes[event.session] = outcome
        if "" not in group.outcomes:
            self._must_end = group.group_id

    def _fenced(self, event: ev.ResultFenced) -> None:
        group = self._known(event.group_id)
        if group is not None and group.phase not in (Phase.EVICTED, Phase.COMMITTED):
            self._window(group.partition)["fenced"] += 1

    # Batches -----------------------------------------------------------------------------------------

    def _requested(self, event: ev.BatchRequested) -> None:
        self._builds_on = (next(reversed(self._request_seqs.values()), 0),)
        self._requests[event.request] = event
        self._request_seqs[event.request] = self._seq

    def _request_cancelled(self, event: ev.BatchRequestCancelled) -> None:
        self._close_request(event.request)

    def _close_request(self, number: int) -> None:
        self._builds_on = (self._request_seqs.get(number, 0),)
        if self._requests.pop(number, None) is not None:
            self._request_seqs[number] = self._seq

    def _sampled(self, event: ev.BatchSampled) -> None:
        if event.request in self._requests:
            self._builds_on = (next(reversed(self._batch_seqs.values()), 0),)
            self._requests.pop(event.request)
            self._request_seqs[event.request] = self._seq
        else:
            self._builds_on = (self._request_seqs.get(event.request, 0),)
        self._reported[event.batch] = self._check_window(event.partition)
        if event.partition == ev.TRAIN:
            self._check_wait(event)
        if len(event.lags) != len(event.group_ids):
            self._wrong(11, f"batch {event.batch} has {len(event.group_ids)} groups and {len(event.lags)} lags")
        for group_id, lag in zip(event.group_ids, event.lags, strict=False):
            group = self._known(group_id)
            if group is not None:
                for text, seqs in wrong_taking(group, event):
                    self._wrong(4, text, group_id, *seqs)
                self._check_sampled_lag(group, event, lag)
                self._lift(group)
                group.batch, group.sampled_lag = event.batch, lag
                group.sampled_seq = group.left_seq = self._seq
                self._place(group, Phase.SAMPLED)
        self._batches[event.batch] = event
        self._batch_seqs[event.batch] = self._seq

    def _check_sampled_lag(self, group: Tracked, event: ev.BatchSampled, lag: int) -> None:
        name, counted = group.group_id, self._lag(group)
        if lag != counted:
            text = f"batch {event.batch} gives group {name!r} with lag {lag}, and its lag is {counted}"
            self._wrong(11, text, name, *self._lag_seqs(group))
        if event.partition != ev.TRAIN:
            return
        if self._rules.targets_versions and group.counts_from != event.weight_version:
            text = f"batch {event.batch} of version {event.weight_version} takes group {name!r}, which is made for "
            self._wrong(6, f"{text}version {group.counts_from}", name, group.submitted_seq)
        bound = self._rules.lag_bound(group.dataset) if self._rules.drops_stale else None
        if bound is not None and lag > bound:
            text = f"batch {event.batch} takes group {name!r} with lag {lag}, past lag_max {bound}"
            self._wrong(6, text, name, self._rules_seq)

    def _check_wait(self, event: ev.BatchSampled) -> None:
        """With `wait`, no batch is given out while a group in flight is at its bound."""
        if not self._rules.waits_for_stale:
            return
        for dataset, ages in self._ages.items():
            bound = self._rules.lag_bound(dataset)
            if bound is None or not ages or self._version - min(ages) < bound:
                continue
            oldest = next(
                group
                for group in self._groups.values()
                if group.phase in IN_FLIGHT
                and (group.partition, group.dataset, group.aged_from) == (ev.TRAIN, dataset, min(ages))
            )
            self._wrong(
                6,
                f"batch {event.batch} is sampled while group {oldest.group_id!r} in flight has lag "
                f"{self._lag(oldest)}, and at lag_max {bound} sampling waits",
                oldest.group_id,
                *self._lag_seqs(oldest),
            )

    def _check_window(self, partition: ev.Partition) -> Counter[str]:
        """The counts that the batch's metrics are made of, since the previous batch."""
        counted = +self._windows.pop(partition, Counter())
        window = self._booked_window(partition)
        if window is None:
            return counted
        booked = flat(window)
        for name in sorted(counted.keys() | booked.keys()):
            if counted[name] != booked[name]:
                text = f"the metrics of this batch count {booked[name]} {name}, the log holds {counted[name]}"
                self._wrong(11, text)
        return counted

    def _booked_window(self, partition: ev.Partition) -> Window | None:
        """What the book counts for the batch that is being sampled; None where there is no book."""
        return None if self._book is None else self._book.windows.get(partition, Window())

    def _returned(self, event: ev.BatchReturned) -> None:
        batch = self._out(event.batch, "returned")
        reported = self._reported.pop(event.batch, Counter())
        if batch is not None:
            if event.reason in UNDELIVERED:
                # Its metrics reached nobody: the next batch reports them.
                self._window(batch.partition).update(reported)
            for group in self._of_batch(batch, Phase.SAMPLED):
                self._bring_back(group)

    def _committed(self, event: ev.BatchCommitted) -> None:
        batch = self._out(event.batch, "committed")
        self._reported.pop(event.batch, None)
        if batch is None:
            return
        self._commits.append((self._seq, batch))
        for group in self._of_batch(batch, Phase.SAMPLED):
            self._lift(group)
            group.left_seq = self._seq
            self._place(group, Phase.COMMITTED)

    def _out(self, number: int, done: str) -> ev.BatchSampled | None:
        batch = self._batches.pop(number, None)
        if batch is None:
            self._wrong(4, f"batch {number} is {done}, and no such batch is out", "", self._batch_seqs.get(number, 0))
        else:
            self._batch_seqs[number] = self._seq
        return batch

    def _of_batch(self, batch: ev.BatchSampled, phase: Phase) -> list[Tracked]:
        """The batch's groups that are still where it put them; in a broken log some may not be."""
        groups = [self._groups[group_id] for group_id in batch.group_ids if group_id in self._groups]
        return [group for group in groups if group.phase is phase and group.batch == batch.batch]

    def _bring_back(self, group: Tracked) -> None:
        """Sampleable again, with the lag that it was sampled with."""
        self._lift(group)
        group.kept_lag = None if self._rules.basis == "target_version" else group.sampled_lag
        group.batch, group.left_seq = 0, self._seq
        self._place(group, group.ending)


_RUNNING: Final = Phase.RUNNING
"""Looked up once: an event of a session asks for it, and a lookup in an enumeration takes longer than the question."""

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


def _kind(event: ev.AnyEvent) -> str:
    return type(event).__name__


def _miscounted(name: str, totals: Counter[str], count: int) -> str:
    return f"the book counts {totals[name]} {name} groups, the events make it {count}"


def _past(phase: Phase) -> str:
    return "failed" if phase is Phase.FAILURE else str(phase)


def _filtered(value: float) -> str:
    return f"evicted/zero_variance at {value + 0.0!r}"  # -0.0 is 0.0, here as in a Counter


def flat(window: Window) -> Counter[str]:
    """What a book counts for a batch, by the names under which the checker counts it."""
    counts = Counter(
        submitted=window.submitted,
        refills=window.refills,
        forfeited=window.forfeited,
        fenced=window.fenced,
        requeued=window.requeued,
        evicted_groups=window.evicted_groups,
    )
    counts.update({f"evicted/{reason}": count for reason, count in window.evicted.items()})
    counts.update({f"starved/{dataset}": count for dataset, count in window.starved.items()})
    counts.update({f"failed/{kind}": count for kind, count in window.sessions_failed.items()})
    counts.update(f"evicted/stale with lag {lag}" for lag in window.stale_lags)
    counts.update({_filtered(value): count for value, count in window.filtered_values.items()})
    return +counts


_HANDLERS: Final[dict[type[ev.Event], Callable[[Checker, Any], None]]] = {
    ev.RunStarted: Checker._in_force,
    ev.RunRecovered: Checker._in_force,
    ev.RunRewound: Checker._rewound,
    ev.WeightsPublished: Checker._published,
    ev.DatasetStarved: Checker._starved,
    ev.GroupSubmitted: Checker._submitted,
    ev.GroupFinished: Checker._ended,
    ev.GroupFailed: Checker._ended,
    ev.GroupEvicted: Checker._evicted,
    ev.GroupRequeued: Checker._requeued,
    ev.RefillForfeited: Checker._forfeited,
    ev.SessionStarted: Checker._session_started,
    ev.SessionFinished: Checker._session_finished,
    ev.SessionFailed: Checker._session_failed,
    ev.ResultFenced: Checker._fenced,
    ev.BatchRequested: Checker._requested,
    ev.BatchRequestCancelled: Checker._request_cancelled,
    ev.BatchSampled: Checker._sampled,
    ev.BatchReturned: Checker._returned,
    ev.BatchCommitted: Checker._committed,
}


def violations(records: Iterable[ev.Record]) -> list[Violation]:
    """All that is wrong with a log, in its order; empty for a log that can be true."""
    checker = Checker()
    for record in records:
        checker.feed(record)
    return checker.finish()
