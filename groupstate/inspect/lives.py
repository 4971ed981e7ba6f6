"""What a log's events tell of groups, attempts, waits and batches as wholes, each with its beginning and its end.

Traces and tables are made of them, in one pass over the records.

Rule 1: what is held is what is open, and what a way back to a mark could still bring back.
Rule 2: nothing is decided or checked here; what can't follow is an error that names the event.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.core.held import MARKS_KEPT
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase, kept_empty
from groupstate.errors import LogError

REQUEUED: Final = "requeued"
"""How an attempt ended that was open when its group was started over; all others end as `FailureKind` or `finished`."""


@attrs.define(eq=False)
class Attempt:
    """One try of one session."""

    life: "Life"
    session: int
    attempt: int
    seq: int = 0
    """Event with which it began; 0 where it ended before."""
    at_ns: int | None = None
    worker: str = ""
    started_version: int | None = None
    """Weight version of the first token, where it was known at the start."""
    current_version: int = 0
    """Weight version that was current at the start."""
    observed: bool = False
    ended_seq: int | None = None
    ended_ns: int | None = None
    outcome: str = ""
    """`finished`, a `FailureKind`, or `requeued`; empty while it is open."""
    message: str = ""
    retry_in_s: float | None = None
    trajectories: tuple[ev.TrajectoryRecord, ...] = ()
    payload_bytes: int | None = None


@attrs.define(eq=False)
class Life:
    """One group, from its submission on."""

    number: int
    """Groups that were heard of before it."""
    group_id: str
    size: int
    partition: ev.Partition
    dataset: str
    cause: ev.Cause
    source_position: int
    prompt_length: int
    stamp: int
    lineage: int | None
    target_version: int | None
    oversample: int
    submitted_seq: int
    submitted_ns: int
    phase: Phase = Phase.PENDING
    phase_ns: int = 0
    phase_seq: int = 0
    open: dict[int, Attempt] = attrs.field(factory=dict)
    """By session."""
    retries: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    """Sessions that wait for another attempt: when the last one failed, and its number."""
    begun_ns: int | None = None
    """When its first attempt began, ever."""
    terminal: Phase | None = None
    terminal_seq: int | None = None
    terminal_ns: int | None = None
    partial: bool = False
    cancelled: bool = False
    ready: bool = False
    """It can be sampled."""
    rows: int = 0
    """Trajectories since it was last started over."""
    response_tokens: int = 0
    """In them."""
    dropped_tokens: int = 0
    """In those before."""
    finished_count: int = 0
    failed_count: int = 0
    """Attempts that failed, retried ones included."""
    attempt_count: int = 0
    """Attempts that began."""
    requeue_count: int = 0
    rewards: dict[int, float] = attrs.field(factory=dict)
    """The metric `reward` of the last trajectory, by session."""
    batch: int | None = None
    """The last one that took it."""
    lag: int | None = None
    """With which it was sampled or evicted."""
    sampled_ns: int | None = None
    evicted: ev.GroupEvicted | None = None
    left_seq: int | None = None
    left_ns: int | None = None
    place: Any = None
    """For the listener to keep something in."""


@attrs.define(eq=False)
class Draw:
    """One `sample()`, and the batch that it got."""

    request: int
    partition: ev.Partition
    size: int
    requested_version: int
    requested_seq: int
    requested_ns: int | None
    batch: int | None = None
    weight_version: int | None = None
    lives: tuple[Life, ...] = ()
    lags: tuple[int, ...] = ()
    sampled_seq: int | None = None
    sampled_ns: int | None = None
    outcome: str = ""
    """`committed`, `returned`, `cancelled`; `lost` where the process of who waited was gone; `undone` where the run
    went back behind the commit; empty while it is open."""
    reason: str = ""
    ended_seq: int | None = None
    ended_ns: int | None = None
    place: Any = None


@attrs.frozen
class Version:
    """A weight version while it was the current one."""

    weight_version: int
    lineage: int
    cause: str
    """`started`, `published`, `recovered`, `rewound`; `snapshot` where its beginning is gone."""
    seq: int
    at_ns: int | None
    ended_ns: int | None = None


class Listener:
    """Is told of each whole when it ends. Those that are open at the log's end come with `close`, without an end."""

    def submitted(self, life: Life) -> None: ...

    def phase_ended(self, life: Life, at_ns: int) -> None:
        """It is about to leave `life.phase`, where it was since `life.phase_ns`."""

    def retried(self, life: Life, session: int, at_ns: int) -> None:
        """A session's wait for another attempt is over."""

    def attempt_ended(self, attempt: Attempt) -> None: ...

    def left(self, life: Life) -> None:
        """It was evicted or committed."""

    def came_back(self, life: Life) -> None:
        """The run went back behind its commit."""

    def group_final(self, life: Life) -> None:
        """Nothing will change it any more."""

    def wait_ended(self, draw: Draw) -> None: ...

    def batch_ended(self, draw: Draw) -> None: ...

    def draw_final(self, draw: Draw) -> None: ...

    def version_ended(self, version: Version) -> None: ...


class Lives:
    """Takes the records of a log one by one."""

    def __init__(self, listener: Listener, base: Book | None = None) -> None:
        """
        Args:
            base: the book before the first record, where those before it are gone or left out.
        """
        self.groups: dict[str, Life] = {}
        """All that haven't left."""
        self.waiting: dict[int, Draw] = {}
        self.batches: dict[int, Draw] = {}
        self.in_flight: Counter[ev.Partition] = Counter()
        self.sampleable: Counter[ev.Partition] = Counter()
        self.version: Version | None = None
        self.openings = 0
        self.last_ns = 0
        self._listener = listener
        self._number = 0
        self._kept_empty: frozenset[Phase] = frozenset()
        self._marks: list[int] = []
        self._commits: deque[tuple[int, Draw | None, tuple[Life, ...]]] = deque()
        """Commits that a mark could undo."""
        if base is not None:
            self._begin(base)

    def feed(self, record: ev.Record, at_ns: int) -> None:
        """
        Args:
            at_ns: the record's time, as it is to be taken.

        Raises:
            LogError: the event can't follow what came before it.
        """
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            try:
                handler(self, record.event, record.seq, at_ns)
            except (LookupError, AttributeError) as error:
                raise LogError(
                    f"event {record.seq} ({type(record.event).__name__}) is about something that the log doesn't have "
                    "at that place. `groupstate check` lists everything that is wrong with a log"
                ) from error
        self.last_ns = at_ns

    def close(self) -> None:
        """The log is at its end: tell of what is open."""
        for life in self.groups.values():
            for attempt in life.open.values():
                self._listener.attempt_ended(attempt)
            self._listener.group_final(life)
        while self._commits:
            self._final(self._commits.popleft())
        for draw in (*self.batches.values(), *self.waiting.values()):
            self._listener.draw_final(draw)
        if self.version is not None:
            self._listener.version_ended(self.version)

    # Groups ------------------------------------------------------------------------------------------

    def _submitted(self, event: ev.GroupSubmitted, seq: int, at_ns: int) -> None:
        life = Life(
            self._number,
            event.group_id,
            event.size,
            event.partition,
            event.dataset,
            event.cause,
            event.source_position,
            event.prompt_length,
            event.weight_version,
            event.lineage,
            event.target_version,
            event.oversample,
            seq,
            at_ns,
            Phase.PENDING,
            at_ns,
            seq,
        )
        self._number += 1
        self.groups[event.group_id] = life
        self.in_flight[event.partition] += 1
        self._listener.submitted(life)

    def _move(self, life: Life, phase: Phase, seq: int, at_ns: int) -> None:
        """To another phase, with the counts of those in flight and sampleable."""
        self._listener.phase_ended(life, at_ns)
        self.in_flight[life.partition] += (phase in IN_FLIGHT) - (life.phase in IN_FLIGHT)
        life.phase, life.phase_ns, life.phase_seq = phase, at_ns, seq
        if phase not in TERMINAL:
            ready = False
        elif life.terminal_seq == seq:
            ready = life.rows > 0 or life.partition == ev.VALIDATION or phase in self._kept_empty
        else:
            ready = True  # it comes back from a batch, so it could be sampled
        self.sampleable[life.partition] += ready - life.ready
        life.ready = ready

    def _terminal(self, event: ev.GroupFinished | ev.GroupFailed, seq: int, at_ns: int) -> None:
        life = self.groups[event.group_id]
        life.terminal = Phase.FINISHED if isinstance(event, ev.GroupFinished) else Phase.FAILURE
        life.terminal_seq, life.terminal_ns = seq, at_ns
        life.partial = isinstance(event, ev.GroupFinished) and event.partial
        life.cancelled = isinstance(event, ev.GroupFailed) and event.cancelled
        self._move(life, life.terminal, seq, at_ns)

    def _evicted(self, event: ev.GroupEvicted, seq: int, at_ns: int) -> None:
        life = self.groups.pop(event.group_id)
        life.evicted, life.lag = event, event.lag
        self._leave(life, Phase.EVICTED, seq, at_ns)
        self._listener.group_final(life)

    def _leave(self, life: Life, phase: Phase, seq: int, at_ns: int) -> None:
        self._move(life, phase, seq, at_ns)
        life.left_seq, life.left_ns = seq, at_ns
        self._listener.left(life)

    def _requeued(self, event: ev.GroupRequeued, seq: int, at_ns: int) -> None:
        life = self.groups[event.group_id]
        for attempt in life.open.values():
            attempt.outcome, attempt.message = REQUEUED, event.reason
            self._end(attempt, seq, at_ns)
        life.open.clear()
        for session in life.retries:
            self._listener.retried(life, session, at_ns)
        life.retries.clear()
        life.requeue_count += 1
        life.stamp = life.stamp if event.weight_version is None else event.weight_version
        life.dropped_tokens += life.response_tokens
        life.rows = life.response_tokens = life.finished_count = 0
        life.rewards.clear()
        life.terminal = life.terminal_seq = life.terminal_ns = None
        life.partial = life.cancelled = False
        self._move(life, Phase.PENDING, seq, at_ns)

    # Attempts ----------------------------------------------------------------------------------------

    def _started(self, event: ev.SessionStarted, seq: int, at_ns: int) -> None:
        life = self.groups[event.group_id]
        if event.session in life.retries:
            self._listener.retried(life, event.session, at_ns)
            del life.retries[event.session]
        life.open[event.session] = Attempt(
            life,
            event.session,
            event.attempt,
            seq,
            at_ns,
            event.worker,
            event.weight_version,
            0 if self.version is None else self.version.weight_version,
            event.observed,
        )
        life.attempt_count += 1
        if life.begun_ns is None:
            life.begun_ns = at_ns
        if life.phase is Phase.PENDING:
            self._move(life, Phase.RUNNING, seq, at_ns)

    def _finished(self, event: ev.SessionFinished, seq: int, at_ns: int) -> None:
        life = self.groups[event.group_id]
        attempt = life.open.pop(event.session)
        rows = event.trajectories
        attempt.outcome, attempt.trajectories = "finished", rows
        attempt.observed = attempt.observed or event.observed
        attempt.payload_bytes = None if event.payload is None else event.payload.length
        life.finished_count += 1
        if rows:
            life.rows += len(rows)
            for row in rows:
                life.response_tokens += row.response_tokens
            if (reward := rows[-1].metrics.get("reward")) is not None:
                life.rewards[event.session] = reward
        self._end(attempt, seq, at_ns)

    def _failed(self, event: ev.SessionFailed, seq: int, at_ns: int) -> None:
        life = self.groups[event.group_id]
        if event.session in life.retries:
            self._listener.retried(life, event.session, at_ns)
            del life.retries[event.session]
        attempt = life.open.pop(event.session, None) or Attempt(life, event.session, event.attempt)
        attempt.outcome, attempt.message, attempt.retry_in_s = event.failure, event.message, event.retry_in_s
        attempt.observed = attempt.observed or event.observed
        life.failed_count += 1
        self._end(attempt, seq, at_ns)
        if event.retry_in_s is not None:
            life.retries[event.session] = (at_ns, event.attempt)

    def _end(self, attempt: Attempt, seq: int, at_ns: int) -> None:
        attempt.ended_seq, attempt.ended_ns = seq, at_ns
        self._listener.attempt_ended(attempt)

    # Batches -----------------------------------------------------------------------------------------

    def _requested(self, event: ev.BatchRequested, seq: int, at_ns: int) -> None:
        draw = Draw(event.request, event.partition, event.size, event.weight_version, seq, at_ns)
        self.waiting[event.request] = draw

    def _request_cancelled(self, event: ev.BatchRequestCancelled, seq: int, at_ns: int) -> None:
        self._give_up(self.waiting.pop(event.request), "cancelled", event.reason, seq, at_ns)

    def _give_up(self, draw: Draw, outcome: str, reason: str, seq: int, at_ns: int) -> None:
        draw.outcome, draw.reason, draw.ended_seq, draw.ended_ns = outcome, reason, seq, at_ns
        self._listener.wait_ended(draw)
        self._listener.draw_final(draw)

    def _sampled(self, event: ev.BatchSampled, seq: int, at_ns: int) -> None:
        draw = self.waiting.pop(event.request)
        draw.batch, draw.weight_version, draw.lags = event.batch, event.weight_version, event.lags
        draw.lives = tuple(self.groups[group_id] for group_id in event.group_ids)
        draw.sampled_seq, draw.sampled_ns = seq, at_ns
        self.batches[event.batch] = draw
        self._listener.wait_ended(draw)
        for life, lag in zip(draw.lives, event.lags, strict=False):
            life.batch, life.lag, life.sampled_ns = event.batch, lag, at_ns
            self._move(life, Phase.SAMPLED, seq, at_ns)

    def _committed(self, event: ev.BatchCommitted, seq: int, at_ns: int) -> None:
        draw = self._batch_ended(event.batch, "committed", "", seq, at_ns)
        for life in draw.lives:
            del self.groups[life.group_id]
            self._leave(life, Phase.COMMITTED, seq, at_ns)
        self._commits.append((seq, draw, draw.lives))
        self._forget()

    def _returned(self, event: ev.BatchReturned, seq: int, at_ns: int) -> None:
        draw = self._batch_ended(event.batch, "returned", event.reason, seq, at_ns)
        for life in draw.lives:
            self._move(life, life.terminal or Phase.FINISHED, seq, at_ns)
        self._listener.draw_final(draw)

    def _batch_ended(self, batch: int, outcome: str, reason: str, seq: int, at_ns: int) -> Draw:
        draw = self.batches.pop(batch)
        draw.outcome, draw.reason, draw.ended_seq, draw.ended_ns = outcome, reason, seq, at_ns
        self._listener.batch_ended(draw)
        return draw

    # Run ---------------------------------------------------------------------------------------------

    def _opened(self, event: ev.RunStarted | ev.RunRecovered, seq: int, at_ns: int) -> None:
        self.openings += 1
        self._kept_empty = kept_empty(event.rules)
        for draw in self.waiting.values():
            # Who waited has gone with his process; when, nobody wrote down: after the last event that it wrote.
            self._give_up(draw, "lost", "the process of who waited was gone", seq, self.last_ns)
        self.waiting.clear()
        cause = "started" if isinstance(event, ev.RunStarted) else "recovered"
        self._turn(event.weight_version, event.lineage, cause, seq, at_ns)

    def _published(self, event: ev.WeightsPublished, seq: int, at_ns: int) -> None:
        self._turn(event.weight_version, event.lineage, "published", seq, at_ns)

    def _turn(self, weight_version: int, lineage: int, cause: str, seq: int, at_ns: int) -> None:
        """Another version is the current one."""
        if self.version is not None:
            self._listener.version_ended(attrs.evolve(self.version, ended_ns=at_ns))
        self.version = Version(weight_version, lineage, cause, seq, at_ns)

    def _marked(self, event: ev.CheckpointMarked, seq: int, at_ns: int) -> None:
        self._marks.append(seq)
        del self._marks[:-MARKS_KEPT]
        self._forget()

    def _rewound(self, event: ev.RunRewound, seq: int, at_ns: int) -> None:
        self._turn(event.weight_version, event.lineage, "rewound", seq, at_ns)
        self._marks = [mark for mark in self._marks if mark <= event.mark_seq]
        undone = []
        while self._commits and self._commits[-1][0] > event.mark_seq:
            undone.append(self._commits.pop())
        for _, draw, lives in reversed(undone):
            for life in lives:
                self.groups[life.group_id] = life
                life.left_seq = life.left_ns = None
                self._move(life, life.terminal or Phase.FINISHED, seq, at_ns)
                self._listener.came_back(life)
            if draw is not None:
                draw.outcome = "undone"
                self._listener.draw_final(draw)

    def _forget(self) -> None:
        """Commits that no mark can undo any more are final."""
        while self._commits and (not self._marks or self._commits[0][0] <= self._marks[0]):
            self._final(self._commits.popleft())

    def _final(self, commit: tuple[int, Draw | None, tuple[Life, ...]]) -> None:
        _, draw, lives = commit
        for life in lives:
            self._listener.group_final(life)
        if draw is not None:
            self._listener.draw_final(draw)

    # From a book -------------------------------------------------------------------------------------

    def _begin(self, book: Book) -> None:
        """What a book knows of its live groups, waits and batches."""
        self.last_ns = book.last_at_ns
        self.openings = book.openings
        self._kept_empty = kept_empty(book.rules)
        self._marks = [mark.seq for mark in book.marks]
        self.version = Version(book.weight_version, book.lineage, "snapshot", book.last_seq, None)
        for group in sorted((*book.aside.values(), *book.groups.values()), key=lambda group: group.submitted_seq):
            self._take_over(book, group)
        for request in book.requests.values():
            self.waiting[request.request] = Draw(
                request.request, request.partition, request.size, request.weight_version, request.seq, request.at_ns
            )
        for batch in book.batches.values():
            lives = tuple(self.groups[group_id] for group_id in batch.group_ids)
            at_ns = max((life.phase_ns for life in lives), default=book.last_at_ns)
            self.batches[batch.batch] = Draw(
                0, batch.partition, len(lives), batch.weight_version, 0, None,
                batch.batch, batch.weight_version, lives, batch.lags, batch.seq, at_ns,
            )  # fmt: skip
        for seq, group_id in book.committed_at:
            life = self.groups.pop(group_id)
            life.left_seq, life.left_ns = seq, life.phase_ns
            self._listener.left(life)
            self._commits.append((seq, None, (life,)))

    def _take_over(self, book: Book, group: Group) -> None:
        sessions = group.sessions
        began = [session.started_at_ns for session in sessions if session.started_at_ns]
        life = Life(
            self._number, group.group_id, group.size, group.partition, group.dataset, group.cause,
            group.source_position, group.prompt_length, group.stamp, None, group.target_version, group.oversample,
            group.submitted_seq, group.submitted_at_ns, group.phase, _since_ns(group), group.last_seq,
        )  # fmt: skip
        self._number += 1
        life.begun_ns = min(began, default=None)
        life.terminal = group.terminal
        if group.terminal is not None:
            life.terminal_seq = group.terminal_seq
            life.terminal_ns = max((session.ended_at_ns for session in sessions), default=group.last_at_ns)
        life.partial, life.cancelled = group.partial, group.cancelled
        life.rows, life.finished_count = group.trajectory_count, group.finished_count
        life.requeue_count = group.requeue_count
        life.batch = group.batch or None
        life.lag = group.sampled_lag if group.batch else group.kept_lag
        self.groups[group.group_id] = life
        if group.phase is not Phase.COMMITTED:
            self.in_flight[group.partition] += group.in_flight
            life.ready = group.phase in TERMINAL and (
                group.trajectory_count > 0 or group.partition == ev.VALIDATION or group.kept_empty
            )
            self.sampleable[group.partition] += life.ready
        self._listener.submitted(life)
        for number, session in enumerate(sessions):
            if session.started_at_ns and session.state != "waiting":
                life.attempt_count += 1
                attempt = Attempt(life, number, session.attempt, 0, session.started_at_ns)
                attempt.started_version = session.weight_version
                self._take_over_attempt(life, attempt, session)
            elif session.failure is not None:
                life.failed_count += 1
                life.retries[number] = (session.ended_at_ns, session.attempt - 1)

    def _take_over_attempt(self, life: Life, attempt: Attempt, session: Any) -> None:
        if session.state == "open":
            life.open[attempt.session] = attempt
            return
        attempt.outcome, attempt.message = session.failure or "finished", session.message
        attempt.trajectories = session.trajectories
        attempt.payload_bytes = None if session.payload is None else session.payload.length
        attempt.ended_seq, attempt.ended_ns = session.last_seq, session.ended_at_ns
        life.failed_count += session.state == "failed"
        for row in session.trajectories:
            life.response_tokens += row.response_tokens
        if session.trajectories and (reward := session.trajectories[-1].metrics.get("reward")) is not None:
            life.rewards[attempt.session] = reward
        self._listener.attempt_ended(attempt)


def _since_ns(group: Group) -> int:
    """When a group of a book came to its phase."""
    if group.phase is Phase.PENDING:
        return group.submitted_at_ns if not group.requeue_count else group.last_at_ns
    if group.phase is Phase.RUNNING:
        began = [session.started_at_ns for session in group.sessions if session.started_at_ns]
        return min(began, default=group.submitted_at_ns)
    if group.phase in TERMINAL and group.kept_lag is None:
        return max((session.ended_at_ns for session in group.sessions), default=group.last_at_ns)
    return group.last_at_ns


_HANDLERS: Final[dict[type[ev.Event], Callable[[Lives, Any, int, int], None]]] = {
    ev.RunStarted: Lives._opened,
    ev.RunRecovered: Lives._opened,
    ev.WeightsPublished: Lives._published,
    ev.CheckpointMarked: Lives._marked,
    ev.RunRewound: Lives._rewound,
    ev.GroupSubmitted: Lives._submitted,
    ev.GroupFinished: Lives._terminal,
    ev.GroupFailed: Lives._terminal,
    ev.GroupEvicted: Lives._evicted,
    ev.GroupRequeued: Lives._requeued,
    ev.SessionStarted: Lives._started,
    ev.SessionFinished: Lives._finished,
    ev.SessionFailed: Lives._failed,
    ev.BatchRequested: Lives._requested,
    ev.BatchRequestCancelled: Lives._request_cancelled,
    ev.BatchSampled: Lives._sampled,
    ev.BatchCommitted: Lives._committed,
    ev.BatchReturned: Lives._returned,
}
