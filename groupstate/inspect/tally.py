"""The one pass over a run's events that `stats` makes.

Rule 1: what is remembered is the live groups, those that a mark could bring back, and aggregates.
Rule 2: no book is made, since that would take most of the time; that both count alike is tested.
"""

import heapq
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.held import MARKS_KEPT
from groupstate.core.phases import Phase, kept_empty
from groupstate.errors import BadInput
from groupstate.inspect.followed import Followed
from groupstate.inspect.tallies import (
    REQUEUED,
    UNDONE,
    UNTIMED,
    Bucket,
    Failure,
    Fates,
    Interval,
    Slow,
    Stats,
    length_bucket,
    reward_bucket,
    whole_of,
)
from groupstate.inspect.unknown import unknown_metric
from groupstate.inspect.words import one_line

INTERVALS_MAX: Final = 40
"""Intervals told where nobody says how many versions one has; then neighbours are put together."""

MESSAGES_MAX: Final = 200
"""Messages of failures that are told apart; the others are counted together."""

MESSAGE_CHARS: Final = 160

SLOWEST: Final = 10
"""Sessions that are named as the slowest."""

OTHER_MESSAGES: Final = "(other messages)"

SESSIONS_WAIT: Final = "sessions under way"
UNSTARTED_WAIT: Final = "groups of which no session has begun"
HELD_WAIT: Final = "admission, which is held"
EXHAUSTED_WAIT: Final = "groups, and the source is exhausted"
NOTHING_WAIT: Final = "groups, and none is in flight"
RULES_WAIT: Final = "the rules or the call itself: enough groups are sampleable"
"""What a training `sample()` waits for."""

_NUMBER: Final = re.compile(r"\d+")


@attrs.define
class _Request:
    partition: str
    size: int
    at_ns: int


class Tally:
    """Takes the events of a run, in order."""

    def __init__(self, base: Book | None, by: int | None, metric: str | None) -> None:
        self.steps: dict[type[ev.Event], Callable[[Any, ev.Record], None]] = {
            kind: getattr(self, name) for kind, name in _STEPS.items()
        }
        self.last: ev.Record | None = None
        self.waiting = False
        """A training `sample()` waits."""
        self._waited_until_ns = 0
        self._trainer_since_ns: int | None = None
        self._fixed = by is not None
        self._by = by or 1
        self._metric = "reward" if metric is None else metric
        self._metric_said = metric is not None
        self._metrics: set[str] | None = None if metric is None else set()
        """Those that sessions ended with, where one is asked for."""
        self._intervals: list[Interval] = []
        self._now = Interval(1, 0, 0, 1, 0, 0, 0)
        self._version = 0
        self._lineage = 1
        self._groups: dict[str, Followed] = {}
        self._aside: deque[tuple[int, str, Followed]] = deque()
        """Committed groups that a kept mark could bring back."""
        self._marks: deque[int] = deque(maxlen=MARKS_KEPT)
        self._requests: dict[int, _Request] = {}
        self._batches: dict[int, tuple[str, ...]] = {}
        self._owed = 0
        self._ready = self._in_flight = self._open = 0
        """Training groups that are sampleable or in flight, and their open attempts."""
        self._held = self._exhausted = False
        self._kept_empty: frozenset[Phase] = frozenset()
        self._survival: dict[str, dict[Any, Fates]] = {
            name: {} for name in ("dataset", "cause", "prompt_length", "answer_tokens", "reward")
        }
        self._failures: dict[tuple[str, str], list[int]] = {}
        self._slow: list[tuple[float, int, str, int, int]] = []
        if base is None:
            self._begin(1, 0)
        else:
            self._seed(base)

    # Where it begins and ends

    def _seed(self, book: Book) -> None:
        """Go on from a book, where the events before it are gone."""
        self._under(book.rules)
        self._version, self._lineage = book.weight_version, book.lineage
        self._begin(book.last_seq + 1, book.last_at_ns)
        self._owed = len(book.credits)
        self._held, self._exhausted = bool(book.held_reason), book.source_exhausted
        self._marks.extend(mark.seq for mark in book.marks)
        self._batches = {number: batch.group_ids for number, batch in book.batches.items()}
        self._requests = {r.request: _Request(r.partition, r.size, r.at_ns) for r in book.requests.values()}
        self._aside.extend(
            (group.last_seq, name, Followed.known(group, self._metric)) for name, group in book.aside.items()
        )
        for name, group in book.groups.items():
            known = self._groups[name] = Followed.known(group, self._metric)
            self._counted(known, 1)
            self._open += len(known.open) if known.train else 0
        for group in [*book.aside.values(), *book.groups.values()]:
            for session in group.sessions:
                self._note_metrics(session.trajectories)
        self._look_for_waits(book.last_at_ns)

    def _begin(self, seq: int, at_ns: int) -> None:
        """An interval begins with event `seq`."""
        first = self._version // self._by * self._by
        if self._intervals:
            self._trained_until(at_ns)
            now = self._now
            now.last_seq, now.last_at_ns = seq - 1, at_ns
            if (now.lineage, now.first_version // self._by * self._by) == (self._lineage, first):
                now.last_version = self._version
                return
        self._now = Interval(self._lineage, self._version, self._version, seq, seq, at_ns, at_ns)
        self._intervals.append(self._now)
        if not self._fixed and len(self._intervals) > INTERVALS_MAX:
            self._put_together()

    def _put_together(self) -> None:
        """Twice as many versions in each interval, as often as it takes; lineages stay apart."""
        lineages = len({interval.lineage for interval in self._intervals})
        while len(self._intervals) > max(INTERVALS_MAX, lineages):
            self._by *= 2
            put: list[Interval] = []
            for interval in self._intervals:
                before = put[-1] if put else None
                same = before is not None and before.lineage == interval.lineage
                if (
                    before is not None
                    and same
                    and before.first_version // self._by == interval.first_version // self._by
                ):
                    before.take(interval)
                else:
                    put.append(interval)
            self._intervals = put
        self._now = self._intervals[-1]

    def result(self) -> Stats:
        if self.last is None:
            raise BadInput("there is no event, so there is nothing to count")
        self._check_metric()
        self._trained_until(self.last.at_ns)
        self._now.last_seq, self._now.last_at_ns = self.last.seq, self.last.at_ns
        failures = [Failure(*key, *counts) for key, counts in self._failures.items()]
        validation = [group for group in self._groups.values() if not group.train]
        return Stats(
            first_seq=self._intervals[0].first_seq,
            last_seq=self.last.seq,
            metric=self._metric,
            by=self._by,
            whole=whole_of(self._intervals),
            intervals=tuple(self._intervals),
            survival=self._survival,
            failures=tuple(sorted(failures, key=lambda each: (-each.count, each.kind, each.message))),
            slowest=tuple(
                Slow(s, name, number, attempt, seq) for s, seq, name, number, attempt in sorted(self._slow)[::-1]
            ),
            live=Counter(str(group.phase) for group in self._groups.values()),
            held_tokens=sum(group.tokens for group in self._groups.values()),
            validation_live=Counter(str(group.phase) for group in validation),
            validation_held_tokens=sum(group.tokens for group in validation),
            owed=self._owed,
        )

    def _check_metric(self) -> None:
        """
        Raises:
            BadInput: one was asked for that no session ended with, though some have ended.
        """
        if self._metrics is None or self._metric in self._metrics:
            return
        if self._metrics or any(interval.totals["sessions_finished"] for interval in self._intervals):
            raise unknown_metric(self._metric, self._metrics)

    def _note_metrics(self, rows: tuple[ev.TrajectoryRecord, ...]) -> None:
        """A session ended with these."""
        if self._metrics is not None and rows:
            self._metrics.update(rows[-1].metrics)

    # Waiting

    def wait_until(self, at_ns: int) -> None:
        """Time went by while a training `sample()` waited."""
        self._now.waited_ns[self._waits_for()] += at_ns - self._waited_until_ns
        self._waited_until_ns = at_ns

    def _waits_for(self) -> str:
        wanted = next(request.size for request in self._requests.values() if request.partition == ev.TRAIN)
        if self._ready >= wanted:
            return RULES_WAIT
        if self._open:
            return SESSIONS_WAIT
        if self._in_flight:
            return UNSTARTED_WAIT
        if self._held:
            return HELD_WAIT
        return EXHAUSTED_WAIT if self._exhausted else NOTHING_WAIT

    def _look_for_waits(self, at_ns: int) -> None:
        """A request came or went."""
        waits = any(request.partition == ev.TRAIN for request in self._requests.values())
        if waits and not self.waiting:
            self._waited_until_ns = at_ns
            self._trained_until(at_ns)
            self._trainer_since_ns = None
        elif self.waiting and not waits:
            self._trainer_since_ns = at_ns
        self.waiting = waits

    def _trained_until(self, at_ns: int) -> None:
        """Time went by in which the trainer had a batch, or had given it back, and asked for none."""
        if self._trainer_since_ns is not None:
            self._now.trainer_ns += at_ns - self._trainer_since_ns
            self._trainer_since_ns = at_ns

    # Groups

    def _counted(self, group: Followed, one: int) -> None:
        """A group came to its phase, or goes from it."""
        if not group.train:
            return
        if group.phase is Phase.PENDING or group.phase is Phase.RUNNING:
            self._in_flight += one
        elif group.sampleable and group.phase is not Phase.SAMPLED:
            self._ready += one

    def _move(self, group: Followed, phase: Phase) -> None:
        self._counted(group, -1)
        group.phase = phase
        self._counted(group, 1)

    def _submitted(self, event: ev.GroupSubmitted, record: ev.Record) -> None:
        group = self._groups[event.group_id] = Followed(event, self._version, record.at_ns)
        self._counted(group, 1)
        totals = self._now.totals
        totals["submitted"] += 1
        if not group.train:
            self._now.validation["submitted"] += 1
        if event.cause == "refill":
            totals["refills"] += 1
            self._owed -= 1
        if event.source_position >= 0:
            totals["drawn"] += 1

    def _started(self, event: ev.SessionStarted, record: ev.Record) -> None:
        group = self._groups[event.group_id]
        group.open[event.session] = record.at_ns
        group.observed = group.observed or event.observed
        if group.train:
            self._open += 1
        if group.phase is Phase.PENDING:
            group.phase = Phase.RUNNING
            if not event.observed:
                self._now.pending_s.add((record.at_ns - group.submitted_at_ns) / 1e9)

    def _settled(self, group: Followed, event: ev.SessionFinished | ev.SessionFailed, at_ns: int) -> float | None:
        """An attempt has ended; how long it took, if it had begun and that is known."""
        group.settled += 1
        if group.settled == (group.size + 1) // 2:
            group.half_at_ns = at_ns
        return self._closed_attempt(group, event, at_ns)

    def _closed_attempt(
        self, group: Followed, event: ev.SessionFinished | ev.SessionFailed, at_ns: int
    ) -> float | None:
        group.observed = group.observed or event.observed
        begun = group.open.pop(event.session, None)
        if begun is None:
            return None
        if group.train:
            self._open -= 1
        if event.observed:
            # Recorded when somebody looked, with all its siblings.
            self._now.totals[UNTIMED] += 1
            return None
        return (at_ns - begun) / 1e9

    def _session_finished(self, event: ev.SessionFinished, record: ev.Record) -> None:
        group, now = self._groups[event.group_id], self._now
        seconds = self._settled(group, event, record.at_ns)
        if seconds is not None:
            now.sessions_s.add(seconds)
            slow = self._slow
            if len(slow) < SLOWEST or seconds > slow[0][0]:
                entry = (seconds, record.seq, event.group_id, event.session, event.attempt)
                (heapq.heappush if len(slow) < SLOWEST else heapq.heappushpop)(slow, entry)
        self._note_metrics(event.trajectories)
        tokens = group.take(event.trajectories, self._metric)
        now.totals["sessions_finished"] += 1
        now.totals["response_tokens"] += tokens
        if not group.train:
            now.validation["response_tokens"] += tokens

    def _session_failed(self, event: ev.SessionFailed, record: ev.Record) -> None:
        group = self._groups[event.group_id]
        if event.retry_in_s is None:
            seconds = self._settled(group, event, record.at_ns)
        else:
            seconds = self._closed_attempt(group, event, record.at_ns)
        if seconds is not None:
            self._now.failed_sessions_s.add(seconds)
        self._now.totals[f"session_failed/{event.failure}"] += 1
        message = _NUMBER.sub("#", one_line(event.message, MESSAGE_CHARS))
        key = (str(event.failure), message)
        if key not in self._failures and len(self._failures) >= MESSAGES_MAX:
            key = (str(event.failure), OTHER_MESSAGES)
        found = self._failures.setdefault(key, [0, 0, 0])
        found[0] += 1
        found[1] += event.retry_in_s is not None
        found[2] = record.seq

    def _finished(self, event: ev.GroupFinished, record: ev.Record) -> None:
        self._ended(self._groups[event.group_id], Phase.FINISHED, record)

    def _failed(self, event: ev.GroupFailed, record: ev.Record) -> None:
        self._ended(self._groups[event.group_id], Phase.FAILURE, record)

    def _ended(self, group: Followed, phase: Phase, record: ev.Record) -> None:
        group.sampleable = bool(group.rows) or phase in self._kept_empty
        group.terminal = phase
        self._move(group, phase)
        group.ended_at_ns, group.ended_version = record.at_ns, self._version
        now = self._now
        now.totals[str(phase)] += 1
        now.groups_s.add((record.at_ns - group.submitted_at_ns) / 1e9)
        if group.half_at_ns and group.size > 1 and not group.observed:
            now.tails_s.add((record.at_ns - group.half_at_ns) / 1e9)
        if group.train:
            now.in_flight_lags[max(0, self._version - group.version)] += 1

    def _requeued(self, event: ev.GroupRequeued, record: ev.Record) -> None:
        group = self._groups[event.group_id]
        if group.train:
            self._open -= len(group.open)
        self._now.totals[REQUEUED] += 1
        dropped = self._now.thrown_tokens if group.train else self._now.validation_tokens
        dropped[REQUEUED] += group.tokens
        self._counted(group, -1)
        group.start_over(event.weight_version)
        self._counted(group, 1)

    def _evicted(self, event: ev.GroupEvicted, record: ev.Record) -> None:
        group = self._groups.pop(event.group_id)
        self._counted(group, -1)
        totals = self._now.totals
        totals["evicted"] += 1
        totals["credit"] += event.credit
        self._owed += event.credit
        for reason in event.reasons:
            totals[f"evicted/{reason}"] += 1
        reasons = ", ".join(event.reasons)
        self._now.thrown_tokens[reasons] += group.tokens
        if group.train:
            for fates in self._kinds(group):
                fates.evicted[reasons] += 1

    def _kinds(self, group: Followed) -> list[Fates]:
        """Those that a group is counted under."""
        keys: tuple[str | Bucket, ...] = (
            group.dataset,
            group.cause,
            length_bucket(group.prompt_length),
            length_bucket(group.tokens / group.rows if group.rows else 0),
            reward_bucket(group.rewards / group.answers if group.answers else None),
        )
        found = []
        for kinds, key in zip(self._survival.values(), keys, strict=True):
            fates = kinds.get(key)
            if fates is None:
                fates = kinds[key] = Fates()
            found.append(fates)
        return found

    def _fenced(self, event: ev.ResultFenced, record: ev.Record) -> None:
        self._now.totals["fenced"] += 1
        self._now.fenced[event.reason] += 1

    def _forfeited(self, event: ev.RefillForfeited, record: ev.Record) -> None:
        spent = min(event.count, self._owed)
        self._owed -= spent
        self._now.totals["forfeited"] += spent
        self._now.forfeited[event.reason] += event.count

    # Batches

    def _requested(self, event: ev.BatchRequested, record: ev.Record) -> None:
        self._requests[event.request] = _Request(event.partition, event.size, record.at_ns)
        self._look_for_waits(record.at_ns)

    def _cancelled(self, event: ev.BatchRequestCancelled, record: ev.Record) -> None:
        del self._requests[event.request]
        self._look_for_waits(record.at_ns)

    def _sampled(self, event: ev.BatchSampled, record: ev.Record) -> None:
        now, at_ns = self._now, record.at_ns
        request = self._requests.pop(event.request)
        self._look_for_waits(at_ns)
        train = event.partition == ev.TRAIN
        if train:
            now.waits_s.add((at_ns - request.at_ns) / 1e9)
            now.sampled_lags.update(event.lags)
        self._batches[event.batch] = event.group_ids
        for group_id in event.group_ids:
            group = self._groups[group_id]
            self._move(group, Phase.SAMPLED)
            now.queued_s.add((at_ns - group.ended_at_ns) / 1e9)
            if train:
                now.queue_lags[max(0, self._version - group.ended_version)] += 1
        now.totals["sampled"] += len(event.group_ids)
        now.totals["batches"] += 1

    def _returned(self, event: ev.BatchReturned, record: ev.Record) -> None:
        for group_id in self._batches.pop(event.batch):
            group = self._groups[group_id]
            self._move(group, group.terminal)
        self._now.totals["batches_returned"] += 1

    def _committed(self, event: ev.BatchCommitted, record: ev.Record) -> None:
        now = self._now
        group_ids = self._batches.pop(event.batch)
        for group_id in group_ids:
            group = self._groups.pop(group_id)
            now.totals[f"committed/{group.partition}"] += 1
            if self._marks:
                self._aside.append((record.seq, group_id, group))
            if group.train:
                now.trained_tokens += group.tokens
                for fates in self._kinds(group):
                    fates.committed += 1
            else:
                now.validation["committed"] += 1
                now.validation_tokens["committed"] += group.tokens
        now.totals["committed"] += len(group_ids)
        now.totals["batches_committed"] += 1

    # The run

    def _under(self, rules: dict[str, Any]) -> None:
        if not self._metric_said and rules.get("filter_metric"):
            self._metric, self._metric_said = rules["filter_metric"], True
        self._kept_empty = kept_empty(rules)

    def _at_version(self, weight_version: int, lineage: int, record: ev.Record) -> None:
        self._version, self._lineage = weight_version, lineage
        self._begin(record.seq, record.at_ns)

    def _run_started(self, event: ev.RunStarted, record: ev.Record) -> None:
        self._intervals.clear()
        self._under(event.rules)
        self._at_version(event.weight_version, event.lineage, record)

    def _published(self, event: ev.WeightsPublished, record: ev.Record) -> None:
        self._at_version(event.weight_version, event.lineage, record)

    def _recovered(self, event: ev.RunRecovered, record: ev.Record) -> None:
        self._under(event.rules)
        if self.last is not None:
            gone = record.at_ns - self.last.at_ns
            self._now.down_ns += gone
            if self.waiting:
                self._now.waited_ns[self._waits_for()] -= gone  # nobody waited any more
            self._trained_until(self.last.at_ns)
        self._requests.clear()
        self.waiting = False
        self._trainer_since_ns = None
        self._exhausted = False
        self._at_version(event.weight_version, event.lineage, record)

    def _marked(self, event: ev.CheckpointMarked, record: ev.Record) -> None:
        self._marks.append(record.seq)
        while self._aside and self._aside[0][0] <= self._marks[0]:
            self._aside.popleft()

    def _rewound(self, event: ev.RunRewound, record: ev.Record) -> None:
        self._at_version(event.weight_version, event.lineage, record)
        self._marks = deque((seq for seq in self._marks if seq <= event.mark_seq), maxlen=MARKS_KEPT)
        kept = [entry for entry in self._aside if entry[0] <= event.mark_seq]
        for seq, group_id, group in self._aside:
            if seq > event.mark_seq:
                self._undone(seq, group_id, group)
        self._aside = deque(kept)

    def _undone(self, seq: int, group_id: str, group: Followed) -> None:
        """The commit that is event `seq` is taken back, in the interval that counted it."""
        self._groups[group_id] = group
        group.phase = group.terminal
        self._counted(group, 1)
        place = bisect_right(self._intervals, seq, key=lambda interval: interval.first_seq)
        if not place:
            return  # it came before the first event, so that none counted it
        then = self._intervals[place - 1]
        then.totals[UNDONE] += 1
        then.totals["committed"] -= 1
        then.totals[f"committed/{group.partition}"] -= 1
        if group.train:
            then.trained_tokens -= group.tokens
            then.undone_tokens += group.tokens
            for fates in self._kinds(group):
                fates.committed -= 1
        else:
            then.validation.update({UNDONE: 1, "committed": -1})
            then.validation_tokens.update({UNDONE: group.tokens, "committed": -group.tokens})

    def _exhausted_source(self, event: ev.SourceExhausted, record: ev.Record) -> None:
        self._exhausted = True

    def _held_admission(self, event: ev.AdmissionHeld, record: ev.Record) -> None:
        self._held = bool(event.reason)

    def _starved(self, event: ev.DatasetStarved, record: ev.Record) -> None:
        self._now.totals["starved"] += 1

    def _run_closed(self, event: ev.RunClosed, record: ev.Record) -> None:
        self._trained_until(record.at_ns)
        self._trainer_since_ns = None

    def _nothing(self, event: ev.Event, record: ev.Record) -> None:
        """It changes no count."""


_STEPS: Final[dict[type[ev.Event], str]] = {
    ev.RunStarted: "_run_started",
    ev.WeightsPublished: "_published",
    ev.SourceExhausted: "_exhausted_source",
    ev.AdmissionHeld: "_held_admission",
    ev.DatasetStarved: "_starved",
    ev.SourceOpened: "_nothing",
    ev.CheckpointMarked: "_marked",
    ev.RunRecovered: "_recovered",
    ev.RunRewound: "_rewound",
    ev.RunClosed: "_run_closed",
    ev.GroupSubmitted: "_submitted",
    ev.GroupFinished: "_finished",
    ev.GroupFailed: "_failed",
    ev.GroupEvicted: "_evicted",
    ev.GroupRequeued: "_requeued",
    ev.RefillForfeited: "_forfeited",
    ev.SessionStarted: "_started",
    ev.SessionFinished: "_session_finished",
    ev.SessionFailed: "_session_failed",
    ev.ResultFenced: "_fenced",
    ev.BatchRequested: "_requested",
    ev.BatchRequestCancelled: "_cancelled",
    ev.BatchSampled: "_sampled",
    ev.BatchCommitted: "_committed",
    ev.BatchReturned: "_returned",
}
