"""What the page shows of a run, as tables: groups, their phases, attempts, evictions, batches, weight versions.

Rule 1: one pass over the records; an event costs the same however long the log is.
Rule 2: every row says from which event on it holds, so the page can show the run as it was after any event.
Rule 3: the log is followed, not judged: whether it can be true is what the invariants say.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, get_args

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.errors import LogError
from groupstate.inspect.report_tables import Columns, Measured, Table, Texts

PHASES: Final = tuple(str(phase) for phase in Phase)
OUTCOMES: Final = ("finished", *get_args(ev.FailureKind), "requeued")
"""How an attempt ended; `requeued`: it was open when its group started over."""
REASONS: Final = get_args(ev.EvictReason)
CAUSES: Final = get_args(ev.Cause)
TURNS: Final = ("started", "published", "opened again", "gone back")
"""How a weight version came to be the current one."""

METRICS_MAX: Final = 12
"""Metrics that the page has. A session has few; who logs hundreds looks at them elsewhere."""
MESSAGE_CHARS_MAX: Final = 600
FLUSH_EVENTS: Final = 8_192

_PHASE: Final = {phase: number for number, phase in enumerate(Phase)}
_OUTCOME: Final = {name: number for number, name in enumerate(OUTCOMES)}
_REASON_BIT: Final = {name: 1 << number for number, name in enumerate(REASONS)}
_PENDING, _RUNNING = _PHASE[Phase.PENDING], _PHASE[Phase.RUNNING]
_FINISHED, _FAILURE = _PHASE[Phase.FINISHED], _PHASE[Phase.FAILURE]
_SAMPLED, _EVICTED, _COMMITTED = _PHASE[Phase.SAMPLED], _PHASE[Phase.EVICTED], _PHASE[Phase.COMMITTED]


class Tables:
    """What there is of a run on the page, table by table."""

    def __init__(self) -> None:
        self.groups = Table(
            seq="I", size="H", partition="H", dataset="I", stamp="q", cause="B", position="q", length="q"
        )
        self.phases = Table(seq="I", group="I", phase="B")
        self.attempts = Measured(
            METRICS_MAX,
            seq="I",
            start="I",
            group="I",
            session="H",
            attempt="I",
            outcome="B",
            again="B",
            rows="I",
            tokens="q",
            worker="I",
            message="I",
        )
        """Those that have ended, by their end."""
        self.evictions = Table(seq="I", group="I", reasons="H", lag="q", credit="I", message="I")
        self.batches = Table(seq="I", requested="I", batch="q", partition="H", version="q", size="I")
        self.taken = Table(seq="I", group="I", batch="q", lag="q")
        """Groups of the batches."""
        self.versions = Table(seq="I", version="q", lineage="q", turn="B")
        self.requeues = Table(seq="I", group="I", message="I")
        self.fenced = Table(seq="I", group="I", session="H", attempt="I", what="I")
        self.events = Table(seq="I", at_us="q")
        self._tables: dict[str, Table] = dict(vars(self))
        """All of these, by name."""

    def since(self, seq: int) -> dict[str, Columns]:
        """What came after event `seq`, by table."""
        return {name: table.since(seq) for name, table in self._tables.items()}

    def _flush(self) -> None:
        for table in self._tables.values():
            table.flush()


class Gathered(Tables):
    """The tables of a run, up to the last record that was fed."""

    def __init__(self, base: Book | None = None) -> None:
        """
        Args:
            base: the book before the first record; None where the records are all that there were.
        """
        super().__init__()
        self.texts = Texts()
        self.group_ids: list[str] = []
        self.prompts: list[ev.PayloadRef | None] = []
        """By group."""
        self.partitions: list[str] = []
        self.datasets: list[str] = []
        self.totals: Counter[str] = Counter()
        """The counts that `groupstate show` has too."""
        self.run_id = self.library = self.held_reason = ""
        self.rules: dict[str, Any] = {}
        self.closed = self.source_exhausted = False
        self.openings = 0
        self.weight_version, self.lineage = 0, 1
        self.started_at_ns = self.last_at_ns = 0
        self.first_seq = self.last_seq = 0 if base is None else base.last_seq
        """The event after which the page begins, and the one after which it ends."""
        self._origin_us = self._at_us = 0
        self._numbers: dict[str, int] = {}
        self._partition_numbers: dict[str, int] = {}
        self._dataset_numbers: dict[str, int] = {}
        self._sizes: list[int] = []
        self._now = bytearray()
        """Per group: its phase."""
        self._ended = bytearray()
        """Per group: the terminal phase that it reached."""
        self._open: dict[tuple[str, int], tuple[int, int, int]] = {}
        """Attempts under way: when they began, which, and on which worker."""
        self._owed = 0
        self._requests: dict[int, tuple[int, str, int]] = {}
        self._batches_out: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._commits: list[tuple[int, str, tuple[str, ...]]] = []
        """Those that a mark could undo: the event, the partition, the groups."""
        self._marks: list[int] = []
        if base is not None:
            self._begin_with(base)

    # Reading -----------------------------------------------------------------------------------------

    def phase_counts(self) -> dict[str, Counter[str]]:
        """Per partition: groups by phase, those that have left included."""
        counts: dict[str, Counter[str]] = {}
        for partition, phase in zip(self.groups.columns["partition"], self._now, strict=True):
            counts.setdefault(self.partitions[partition], Counter())[PHASES[phase]] += 1
        return counts

    def under_way(self) -> list[list[Any]]:
        """Attempts that haven't ended: group, session, attempt, its first event, worker."""
        return [
            [self._numbers[group_id], session, attempt, start, worker]
            for (group_id, session), (start, attempt, worker) in self._open.items()
        ]

    def waiting(self) -> list[tuple[int, str, int]]:
        """Waiting `sample()` calls: the event, the partition, groups wanted."""
        return list(self._requests.values())

    # Writing -----------------------------------------------------------------------------------------

    def feed(self, records: Iterable[ev.Record]) -> "Gathered":
        """Take the records in that follow.

        Raises:
            LogError: one can't be followed; what came before it is there.
        """
        source = iter(records)
        try:
            while self._some(islice(source, FLUSH_EVENTS)):
                self._flush()
        finally:
            self._flush()
        return self

    def _some(self, records: Iterable[ev.Record]) -> bool:
        """Take the records in; False where there were none. A clock that is set back stands still on the page until it
        is where it was."""
        handlers, at_us, first = _HANDLERS, self._at_us, self.last_seq
        seqs, moments = list[int](), list[int]()
        seq_at, moment_at = seqs.append, moments.append
        try:
            for record in records:
                seq, event = record.seq, record.event
                at_ns = record.at_ns
                now_us = at_ns // 1000
                if now_us > at_us:
                    if not at_us:
                        self._origin_us = now_us
                    at_us = now_us
                seq_at(seq)
                moment_at(at_us - self._origin_us)
                self.last_seq, self.last_at_ns = seq, at_ns
                try:
                    handlers[type(event)](self, event, seq)
                except (LookupError, ValueError, OverflowError) as error:
                    self.last_seq = seq - 1
                    raise LogError(
                        f"event {seq} ({type(event).__name__}) can't follow what the log says before it: {error!r}. "
                        "`groupstate check` lists everything that is wrong with a log"
                    ) from error
        finally:
            self.events.extend(seqs, moments)
        self._at_us = at_us
        return self.last_seq > first

    @property
    def origin_ms(self) -> float:
        """The wall clock where the page's times begin, milliseconds since the epoch."""
        return self._origin_us / 1e3

    def _text(self, text: str, seq: int) -> int:
        return self.texts.number(text if len(text) <= MESSAGE_CHARS_MAX else text[:MESSAGE_CHARS_MAX] + "...", seq)

    # From a snapshot

    def _begin_with(self, base: Book) -> None:
        """The groups that a book has, as if all of it had happened at its last event."""
        seq = base.last_seq
        self.last_at_ns = base.last_at_ns
        self._origin_us = self._at_us = base.last_at_ns // 1000
        self.events.add((seq, 0))
        self.totals.update(base.totals)
        self.run_id, self.library, self.rules = base.run_id, base.library, base.rules
        self.openings, self.closed, self.held_reason = base.openings, base.closed, base.held_reason
        self.source_exhausted, self.started_at_ns = base.source_exhausted, base.started_at_ns
        self._at_version(seq, base.weight_version, base.lineage, 0)
        self._owed = len(base.credits)
        for group in [*base.aside.values(), *base.groups.values()]:
            self._group(seq, group, group.partition, group.dataset)
            number = self._numbers[group.group_id]
            self._ended[number] = _PHASE[group.terminal] if group.terminal else _PENDING
            self._move(number, _PHASE[group.phase], seq)
            for session, state in enumerate(group.sessions):
                if state.state == "open":
                    self._open[group.group_id, session] = (seq, state.attempt, 0)
                elif state.state != "waiting":
                    outcome = "finished" if state.state == "finished" else state.failure
                    rows = state.trajectories
                    tokens = sum(row.response_tokens for row in rows)
                    metrics = rows[-1].metrics if rows else {}
                    numbers = (seq, seq, number, session, state.attempt, _OUTCOME[outcome or "error"], 0)
                    message = self._text(state.message, seq)
                    self.attempts.add((*numbers, len(rows), tokens, 0, message, metrics))
        for request in base.requests.values():
            self._requests[request.request] = (seq, request.partition, request.size)
        for batch in base.batches.values():
            self._batches_out[batch.batch] = (batch.partition, batch.group_ids)
            for group_id, lag in zip(batch.group_ids, batch.lags, strict=True):
                self.taken.add((seq, self._numbers[group_id], batch.batch, lag))
        self._marks = [mark.seq for mark in base.marks]
        self._commits = [(group.last_seq, group.partition, (group.group_id,)) for group in base.aside.values()]
        self._flush()

    # Groups

    def _group(self, seq: int, group: Any, partition: str, dataset: str) -> None:
        """A row for a group: what was submitted, or what a book has of it."""
        stamp = group.weight_version if isinstance(group, ev.GroupSubmitted) else group.stamp
        self._numbers[group.group_id] = len(self.group_ids)
        self.group_ids.append(group.group_id)
        self.prompts.append(group.prompt)
        self._sizes.append(group.size)
        self._now.append(_PENDING)
        self._ended.append(_PENDING)
        cause = CAUSES.index(group.cause)
        places = (self._partition(partition), self._dataset(dataset))
        self.groups.add((seq, group.size, *places, stamp, cause, group.source_position, group.prompt_length))

    def _partition(self, name: str) -> int:
        if name not in self._partition_numbers:
            self._partition_numbers[name] = len(self.partitions)
            self.partitions.append(name)
        return self._partition_numbers[name]

    def _dataset(self, name: str) -> int:
        if name not in self._dataset_numbers:
            self._dataset_numbers[name] = len(self.datasets)
            self.datasets.append(name)
        return self._dataset_numbers[name]

    def _move(self, number: int, phase: int, seq: int) -> None:
        self._now[number] = phase
        self.phases.add((seq, number, phase))

    def _submitted(self, event: ev.GroupSubmitted, seq: int) -> None:
        self._group(seq, event, event.partition, event.dataset)
        self._move(self._numbers[event.group_id], _PENDING, seq)
        self.totals["submitted"] += 1
        if event.cause == "refill":
            self._owed -= 1
            self.totals["refills"] += 1
        if event.source_position >= 0:
            self.totals["drawn"] += 1

    def _ends(self, event: ev.GroupFinished | ev.GroupFailed, seq: int) -> None:
        number = self._numbers[event.group_id]
        phase = _FINISHED if isinstance(event, ev.GroupFinished) else _FAILURE
        self._ended[number] = phase
        self._move(number, phase, seq)

    def _evicted(self, event: ev.GroupEvicted, seq: int) -> None:
        number = self._numbers[event.group_id]
        reasons = 0
        for reason in event.reasons:
            reasons |= _REASON_BIT[reason]
            self.totals[f"evicted/{reason}"] += 1
        self.evictions.add((seq, number, reasons, event.lag, event.credit, self._text(event.message, seq)))
        self._move(number, _EVICTED, seq)
        self.totals["evicted"] += 1
        self.totals["credit"] += event.credit
        self._owed += event.credit

    def _requeued(self, event: ev.GroupRequeued, seq: int) -> None:
        number = self._numbers[event.group_id]
        for session in range(self._sizes[number]):
            if (begun := self._open.pop((event.group_id, session), None)) is not None:
                start, attempt, worker = begun
                outcome = _OUTCOME["requeued"]
                self.attempts.add((seq, start, number, session, attempt, outcome, 0, 0, 0, worker, 0, {}))
        self.requeues.add((seq, number, self._text(event.reason, seq)))
        self._move(number, _PENDING, seq)

    def _forfeited(self, event: ev.RefillForfeited, seq: int) -> None:
        lost = min(event.count, self._owed)
        self._owed -= lost
        if lost > 0:
            self.totals["forfeited"] += lost

    # Sessions

    def _session_started(self, event: ev.SessionStarted, seq: int) -> None:
        worker = self.texts.numbers.get(event.worker)
        if worker is None:
            worker = self._text(event.worker, seq)
        number = self._numbers[event.group_id]
        self._open[event.group_id, event.session] = (seq, event.attempt, worker)
        if self._now[number] == _PENDING:
            self._move(number, _RUNNING, seq)

    def _session_finished(self, event: ev.SessionFinished, seq: int) -> None:
        start, attempt, worker = self._open.pop((event.group_id, event.session), (0, event.attempt, 0))
        rows = event.trajectories
        tokens, metrics = 0, {}
        for row in rows:
            tokens += row.response_tokens
            metrics = row.metrics
        number = self._numbers[event.group_id]
        self.attempts.add((seq, start, number, event.session, attempt, 0, 0, len(rows), tokens, worker, 0, metrics))
        self.totals["sessions_finished"] += 1
        self.totals["response_tokens"] += tokens

    def _session_failed(self, event: ev.SessionFailed, seq: int) -> None:
        start, attempt, worker = self._open.pop((event.group_id, event.session), (0, event.attempt, 0))
        number = self._numbers[event.group_id]
        again = event.retry_in_s is not None
        message = self._text(event.message, seq)
        ended = (seq, start, number, event.session, attempt, _OUTCOME[event.failure], again)
        self.attempts.add((*ended, 0, 0, worker, message, {}))
        self.totals[f"session_failed/{event.failure}"] += 1

    def _fenced(self, event: ev.ResultFenced, seq: int) -> None:
        self.totals["fenced"] += 1
        number = self._numbers.get(event.group_id)
        if number is not None:  # of a group that had left before the page begins nothing is shown
            what = self._text(f"{event.result}: {event.reason}", seq)
            self.fenced.add((seq, number, event.session, event.attempt, what))

    # Batches

    def _requested(self, event: ev.BatchRequested, seq: int) -> None:
        self._requests[event.request] = (seq, event.partition, event.size)

    def _request_cancelled(self, event: ev.BatchRequestCancelled, seq: int) -> None:
        self._requests.pop(event.request, None)

    def _sampled(self, event: ev.BatchSampled, seq: int) -> None:
        requested, _, _ = self._requests.pop(event.request, (seq, "", 0))
        partition = self._partition(event.partition)
        size = len(event.group_ids)
        self.batches.add((seq, requested, event.batch, partition, event.weight_version, size))
        for group_id, lag in zip(event.group_ids, event.lags, strict=True):
            number = self._numbers[group_id]
            self.taken.add((seq, number, event.batch, lag))
            self._move(number, _SAMPLED, seq)
        self._batches_out[event.batch] = (event.partition, event.group_ids)
        self.totals["batches"] += 1

    def _returned(self, event: ev.BatchReturned, seq: int) -> None:
        _, group_ids = self._batches_out.pop(event.batch)
        for group_id in group_ids:
            number = self._numbers[group_id]
            self._move(number, self._ended[number], seq)
        self.totals["batches_returned"] += 1

    def _committed(self, event: ev.BatchCommitted, seq: int) -> None:
        partition, group_ids = self._batches_out.pop(event.batch)
        for group_id in group_ids:
            self._move(self._numbers[group_id], _COMMITTED, seq)
        self._commits.append((seq, partition, group_ids))
        self.totals["committed"] += len(group_ids)
        self.totals[f"committed/{partition}"] += len(group_ids)
        self.totals["batches_committed"] += 1

    # Run

    def _run_started(self, event: ev.RunStarted, seq: int) -> None:
        self.run_id, self.library, self.rules = event.run_id, event.library, event.rules
        self.openings, self.started_at_ns = 1, self.last_at_ns
        self._at_version(seq, event.weight_version, event.lineage, 0)

    def _recovered(self, event: ev.RunRecovered, seq: int) -> None:
        self.library, self.rules = event.library, event.rules
        self.openings += 1
        self.closed = self.source_exhausted = False
        self._requests.clear()
        self._at_version(seq, event.weight_version, event.lineage, 2)

    def _published(self, event: ev.WeightsPublished, seq: int) -> None:
        self._at_version(seq, event.weight_version, event.lineage, 1)

    def _rewound(self, event: ev.RunRewound, seq: int) -> None:
        """Commits since the mark are undone."""
        undone = [commit for commit in self._commits if commit[0] > event.mark_seq]
        self._commits = [commit for commit in self._commits if commit[0] <= event.mark_seq]
        for _, partition, group_ids in undone:
            for group_id in group_ids:
                number = self._numbers[group_id]
                self._move(number, self._ended[number], seq)
            self.totals["committed"] -= len(group_ids)
            self.totals[f"committed/{partition}"] -= len(group_ids)
        self._at_version(seq, event.weight_version, event.lineage, 3)

    def _marked(self, event: ev.CheckpointMarked, seq: int) -> None:
        """What was committed before the last but one mark can't come back."""
        self._marks = [*self._marks[-1:], seq]
        if self._commits and self._commits[0][0] <= self._marks[0]:
            self._commits = [commit for commit in self._commits if commit[0] > self._marks[0]]

    def _at_version(self, seq: int, version: int, lineage: int, turn: int) -> None:
        self.weight_version, self.lineage = version, lineage
        self.versions.add((seq, version, lineage, turn))

    def _exhausted(self, event: ev.SourceExhausted, seq: int) -> None:
        self.source_exhausted = True

    def _held(self, event: ev.AdmissionHeld, seq: int) -> None:
        self.held_reason = event.reason

    def _starved(self, event: ev.DatasetStarved, seq: int) -> None:
        self.totals["starved"] += 1

    def _closed(self, event: ev.RunClosed, seq: int) -> None:
        self.closed = True

    def _nothing(self, event: ev.SourceOpened, seq: int) -> None:
        """Where the source begins isn't on the page."""


_HANDLERS: Final[dict[type[ev.Event], Callable[[Gathered, Any, int], None]]] = {
    ev.RunStarted: Gathered._run_started,
    ev.WeightsPublished: Gathered._published,
    ev.SourceExhausted: Gathered._exhausted,
    ev.AdmissionHeld: Gathered._held,
    ev.DatasetStarved: Gathered._starved,
    ev.SourceOpened: Gathered._nothing,
    ev.CheckpointMarked: Gathered._marked,
    ev.RunRecovered: Gathered._recovered,
    ev.RunRewound: Gathered._rewound,
    ev.RunClosed: Gathered._closed,
    ev.GroupSubmitted: Gathered._submitted,
    ev.GroupFinished: Gathered._ends,
    ev.GroupFailed: Gathered._ends,
    ev.GroupEvicted: Gathered._evicted,
    ev.GroupRequeued: Gathered._requeued,
    ev.RefillForfeited: Gathered._forfeited,
    ev.SessionStarted: Gathered._session_started,
    ev.SessionFinished: Gathered._session_finished,
    ev.SessionFailed: Gathered._session_failed,
    ev.ResultFenced: Gathered._fenced,
    ev.BatchRequested: Gathered._requested,
    ev.BatchRequestCancelled: Gathered._request_cancelled,
    ev.BatchSampled: Gathered._sampled,
    ev.BatchCommitted: Gathered._committed,
    ev.BatchReturned: Gathered._returned,
}
