"""Counts what a run records, for a monitoring system that asks from another thread, at any moment.

Rule 1: for the start and the end of a session, which most events are, nothing is done, and what the book counts by
itself is read there. So recording pays for a look at the sessions of a group that ends, and for little else.
Rule 2: one thread counts, the one that records, without a lock. Whoever reads takes only what he read between two
steps: counts and gauges belong to the same event, and never to the middle of a step.
Rule 3: counts begin with the watching; gauges come from the book.
"""

import contextlib
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, get_args

from groupstate.core import events as ev
from groupstate.core.arguments import shown
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.core.select import ready_for
from groupstate.errors import BadSettings, RunIsClosed
from groupstate.integrations.figures import (
    DIGITS_MIN,
    FATES,
    LAGS,
    LIVE,
    METRICS,
    OUTCOMES,
    PARTITIONS,
    SECONDS,
    Distribution,
    Labels,
    Reading,
    Value,
    Values,
)
from groupstate.logs import Logger
from groupstate.runtime.ledger import Ledger

T = TypeVar("T")
log = Logger("groupstate.metrics")

LOOSE_MAX: Final = 1_024
"""Durations that wait to be sorted into their histogram."""

TRIES_MAX: Final = 50
"""Looks at a run that is in the middle of a step. A step takes microseconds; so many take a run that is broken."""

ANSWER_S: Final = 0.01
"""How long the recording thread is given to read for somebody else, at its next event, before he looks again."""


class Watchable(Protocol):
    """What can be watched: a `Run`, or a `StatusFeed`."""

    @property
    def ledger(self) -> Ledger: ...


def behind(run: Any) -> Any:
    """What records: of the blocking twin of a run the run itself.

    Raises:
        BadSettings: it is nothing that records.
    """
    recording = getattr(run, "_inner", run)
    if not isinstance(getattr(recording, "ledger", None), Ledger):
        text = f"run is {shown(run)}; it must be a run that is open, blocking or not, or a StatusFeed"
        if isinstance(run, contextlib.AbstractContextManager | contextlib.AbstractAsyncContextManager):
            text += ". What open_run gives is opened by a block: `with open_run(...) as run:`, and `run` is the run"
        raise BadSettings(text)
    return recording


def in_recording_thread(run: Any) -> Callable[[Callable[[], T]], T]:
    """Calls functions where `run` records, from whatever thread; in this one if it is closed or has no loop.

    Raises:
        BadSettings: it is nothing that records.
    """
    in_loop = getattr(behind(run), "in_loop", None)

    def call(function: Callable[[], T]) -> T:
        if in_loop is None:
            return function()
        try:
            return in_loop(function)  # type: ignore[no-any-return]
        except RunIsClosed:
            return function()

    return call


class _Lags:
    """A histogram of lags."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LAGS) + 1)
        self._total = 0

    def take(self, lags: Iterable[int]) -> None:
        for lag in lags:
            self._counts[bisect_left(LAGS, lag)] += 1
            self._total += lag

    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), float(self._total))


class _Durations:
    """A histogram of times in nanoseconds. Its bounds are powers of two, since Python tells a number's at once."""

    def __init__(self) -> None:
        self.loose: list[int] = []
        """Times that are still to be sorted in: many at once cost a fraction of what they cost one by one."""
        self._counts: Counter[int] = Counter()
        """By number of binary digits."""
        self._total_ns = 0

    def take(self, time_ns: int) -> None:
        self.loose.append(time_ns)
        if len(self.loose) > LOOSE_MAX:
            self.tidy()

    def tidy(self) -> None:
        """Sort in what is loose."""
        times_ns = _none_below_zero(self.loose)
        self._counts.update(map(int.bit_length, times_ns))
        self._total_ns += sum(times_ns)
        self.loose.clear()

    def distribution(self) -> Distribution:
        times_ns = _none_below_zero(self.loose[:])
        counts = [0] * (len(SECONDS) + 1)
        for digits, count in (self._counts + Counter(map(int.bit_length, times_ns))).items():
            counts[min(max(0, digits - DIGITS_MIN), len(SECONDS))] += count
        return Distribution(tuple(counts), (self._total_ns + sum(times_ns)) / 1e9)


def _none_below_zero(times_ns: list[int]) -> list[int]:
    """A wall clock may have been set back meanwhile."""
    return [max(0, time_ns) for time_ns in times_ns] if min(times_ns, default=0) < 0 else times_ns


class _Part:
    """Counts of one partition."""

    def __init__(self) -> None:
        self.whole = 0
        """Groups of which every session finished; the others that ended are counted by outcome."""
        self.ended = _zeros(OUTCOMES)
        self.requeued = self.sampled = 0
        """Groups."""
        self.batches = _zeros(("sampled", "committed", "returned"))
        self.failures = _zeros(get_args(ev.FailureKind))
        self.fates = _zeros(FATES)
        """Tokens."""
        self.finished = _Durations()
        self.failed = _Durations()
        self.waits = _Durations()
        self.lags = _Lags()


def _zeros(names: Sequence[str]) -> Counter[str]:
    """Nothing of each: who asks for a rate must see the first one come."""
    return Counter(dict.fromkeys(names, 0))


class _Asked:
    """Somebody in another thread who waits for a reading."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.reading: Reading | None = None
        self.problem: Exception | None = None


class Figures:
    """Counts what a run records from here on, and reads its gauges from its book."""

    def __init__(self, watched: Watchable) -> None:
        """Attach. Call it in the thread that records."""
        self.ledger = watched.ledger
        self._count_sampleable: Callable[[str], int] = getattr(
            watched, "sampleable_count", lambda partition: ready_for(self.ledger.book, self.ledger.rules, partition)
        )
        book = self.ledger.book
        self._first_seq = book.last_seq
        self._first = _from_book(book)
        """What the book counts by itself, since before this began."""
        self._retried: set[tuple[str, int]] = set()
        """Sessions that wait for another attempt: in the book they still have the times of the one before."""
        self._known: dict[str, tuple[int, int, int]] = {}
        """Of live groups the last event, open attempts and tokens, as they were read last."""
        self._asked: list[_Asked] = []
        self._batch_tokens = {
            each.batch: sum(_tokens(book.groups[group_id]) for group_id in each.group_ids)
            for each in book.batches.values()
        }
        self._first_held = self._census()[1]
        self._requests = {each.request: each.at_ns for each in book.requests.values()}
        self._batches = {each.batch: each.partition for each in book.batches.values()}
        self._parts = {name: _Part() for name in PARTITIONS}
        self._fenced = _zeros(get_args(ev.FenceReason))
        self._told = False
        self.ledger.listen(self._note, _COUNTED)
        for group in book.in_phase(Phase.RUNNING):
            for number, session in enumerate(group.sessions):
                if session.state == "waiting" and session.started_at_ns:
                    self._await_start((group.group_id, number))
        self._latest = self._reading(self._first_seq)

    def detach(self) -> None:
        """Count no more. Call it in the thread that records; a second time does nothing."""
        self.ledger.unlisten(self._note, _COUNTED)
        self.ledger.unlisten(self._note_start, (ev.SessionStarted,))

    # Counting ----------------------------------------------------------------------------------------

    def _note(self, record: ev.Record) -> None:
        _COUNTED[type(record.event)](self, record.event, record.at_ns)
        if self._asked:
            self._answer()

    def _note_start(self, record: ev.Record) -> None:
        event: Any = record.event
        self._await_no_start((event.group_id, event.session))

    def _session_failed(self, event: ev.SessionFailed, at_ns: int) -> None:
        group, key = self.ledger.book.groups[event.group_id], (event.group_id, event.session)
        part = self._parts[group.partition]
        part.failures[event.failure] += 1
        began = 0 if key in self._retried else group.sessions[event.session].started_at_ns
        if began:
            part.failed.take(at_ns - began)
        self._await_no_start(key)
        if event.retry_in_s is not None:
            self._await_start(key)

    def _await_no_start(self, key: tuple[str, int]) -> None:
        if key in self._retried:
            self._retried.remove(key)
            if not self._retried:
                self.ledger.unlisten(self._note_start, (ev.SessionStarted,))

    def _await_start(self, key: tuple[str, int]) -> None:
        if not self._retried:
            self.ledger.listen(self._note_start, (ev.SessionStarted,))
        self._retried.add(key)

    def _finished(self, event: ev.GroupFinished, at_ns: int) -> None:
        # As it was before, its sessions are not packed yet.
        group = self.ledger.book.before(event)
        if group is None or group.finished_count < group.size:
            self._ended(event, "partial" if event.partial else "finished")
            return
        # As most groups end.
        part = self._parts[group.partition]
        part.whole += 1
        loose = part.finished.loose
        loose += [session.ended_at_ns - session.started_at_ns for session in group.sessions]
        if len(loose) > LOOSE_MAX:
            part.finished.tidy()

    def _failed(self, event: ev.GroupFailed, at_ns: int) -> None:
        self._ended(event, "cancelled" if event.cancelled else "failed")

    def _ended(self, event: ev.GroupFinished | ev.GroupFailed, outcome: str) -> None:
        group = self.ledger.book.before(event) or self.ledger.book.groups[event.group_id]
        part = self._parts[group.partition]
        part.ended[outcome] += 1
        _note_durations(group, part)

    def _requeued(self, event: ev.GroupRequeued, at_ns: int) -> None:
        before = self.ledger.book.before(event)
        assert before is not None, "a requeue is previewed"
        part = self._parts[before.partition]
        part.requeued += 1
        part.fates["requeued"] += _tokens(before)
        if before.terminal is None:
            _note_durations(before, part)

    def _fence(self, event: ev.ResultFenced, at_ns: int) -> None:
        self._fenced[event.reason] += 1

    def _request(self, event: ev.BatchRequested, at_ns: int) -> None:
        self._requests[event.request] = at_ns

    def _withdraw(self, event: ev.BatchRequestCancelled, at_ns: int) -> None:
        del self._requests[event.request]

    def _sample(self, event: ev.BatchSampled, at_ns: int) -> None:
        part = self._parts[event.partition]
        self._batches[event.batch] = event.partition
        self._batch_tokens[event.batch] = sum(_tokens(self.ledger.book.groups[name]) for name in event.group_ids)
        part.batches["sampled"] += 1
        part.sampled += len(event.group_ids)
        part.waits.take(at_ns - self._requests.pop(event.request))
        part.lags.take(event.lags)

    def _return(self, event: ev.BatchReturned, at_ns: int) -> None:
        self._parts[self._batches.pop(event.batch)].batches["returned"] += 1
        del self._batch_tokens[event.batch]

    def _commit(self, event: ev.BatchCommitted, at_ns: int) -> None:
        part = self._parts[self._batches.pop(event.batch)]
        part.batches["committed"] += 1
        part.fates["committed"] += self._batch_tokens.pop(event.batch)

    # Reading -----------------------------------------------------------------------------------------

    def read(self) -> Reading:
        """The numbers of now, from any thread. It waits for nobody's event loop.

        Of a run that stays in the middle of a step, as one whose log has failed may, they are those of the last time
        that they could be read.
        """
        problem: Exception | None = None
        for _ in range(TRIES_MAX):
            try:
                if (reading := self._whole()) is not None:
                    self._latest = reading
                    return reading
            except Exception as error:  # An index that is read while it changes may raise anything.
                problem = error
            # Events come faster than they can be looked at: whoever records them looks himself.
            asked = _Asked()
            self._asked.append(asked)
            if asked.answered.wait(ANSWER_S):
                if asked.reading is not None:
                    self._latest = asked.reading
                    return asked.reading
                problem = asked.problem
        if not self._told:
            self._told = True
            log.warning("the numbers of a run can't be read any more", seq=self._latest.seq, error=repr(problem))
        return self._latest

    def _answer(self) -> None:
        """Read for those who asked, unless this is the middle of a step."""
        if self.ledger.log.last_seq != self.ledger.book.last_seq:
            return
        waiting, self._asked[:] = self._asked[:], []
        reading, problem = None, None
        try:
            reading = self._reading(self.ledger.book.last_seq)
        except Exception as error:  # Theirs to hear of: recording goes on.
            problem = error
        for asked in waiting:
            asked.reading, asked.problem = reading, problem
            asked.answered.set()

    def _whole(self) -> Reading | None:
        """The numbers of now; None while a step is being taken in."""
        event_log = self.ledger.log
        # What is posted is done next, so both are equal only between two steps.
        seq = event_log.last_seq
        if self.ledger.whole_seq != seq:
            return None
        reading = self._reading(seq)
        return reading if event_log.last_seq == seq else None

    def _census(self) -> tuple[dict[str, int], int]:
        """Open attempts by partition, and the tokens of all groups that are there."""
        known, now = self._known, {}
        opened, held = dict.fromkeys(PARTITIONS, 0), 0
        for group_id, group in list(self.ledger.book.groups.items()):
            found = known.get(group_id)
            if found is None or found[0] != group.last_seq:
                found = group.last_seq, _open(group) if group.in_flight else 0, _tokens(group)
            now[group_id] = found
            opened[group.partition] += found[1]
            held += found[2]
        self._known = now
        return opened, held

    def _gauges(self, opened: Mapping[str, int]) -> Values:
        book = self.ledger.book
        waiting = Counter(request.partition for request in list(book.requests.values()))
        lags: dict[Labels, Value] = {}
        for name in PARTITIONS:
            for state, classes in (("in_flight", book.in_flight_by_age(name)), ("sampleable", book.by_age(name))):
                lags[name, state] = max((book.lag(next(groups)) for groups in classes), default=0)
        return {
            "groupstate_groups": {
                (n, phase.value): book.count(phase, partition=n) for n in PARTITIONS for phase in LIVE
            },
            "groupstate_groups_in_flight": {(name,): book.in_flight_count(name) for name in PARTITIONS},
            "groupstate_groups_sampleable": {(name,): self._count_sampleable(name) for name in PARTITIONS},
            "groupstate_sessions_in_flight": {(name,): opened[name] for name in PARTITIONS},
            "groupstate_oldest_lag_versions": lags,
            "groupstate_samplers_waiting": {(name,): waiting[name] for name in PARTITIONS},
            "groupstate_refills_owed": {(): len(book.credits)},
            "groupstate_admission_held": {(): int(bool(book.held_reason))},
            "groupstate_weight_version": {(): book.weight_version},
            "groupstate_events_unsynced": {(): max(0, book.last_seq - self.ledger.log.durable_seq)},
        }

    def _reading(self, seq: int) -> Reading:
        parts = self._parts
        opened, held = self._census()
        values = self._gauges(opened) | _less(_from_book(self.ledger.book), self._first)
        fates = _by(parts, "fates")
        # What was generated and is neither here nor has left another way.
        generated: Any = values["groupstate_tokens_generated"][()]
        fates[ev.TRAIN, "evicted"] = generated - (held - self._first_held) - sum(fates.values())
        counts: Values = {
            "groupstate_events": {(): seq - self._first_seq},
            "groupstate_groups_ended": {
                (name, outcome): count + (part.whole if outcome == "finished" else 0)
                for name, part in parts.items()
                for outcome, count in part.ended.items()
            },
            "groupstate_groups_requeued": {(name,): part.requeued for name, part in parts.items()},
            "groupstate_groups_sampled": {(name,): part.sampled for name, part in parts.items()},
            "groupstate_batches": _by(parts, "batches"),
            "groupstate_session_failures": _by(parts, "failures"),
            "groupstate_results_fenced": {(reason,): count for reason, count in self._fenced.items()},
            "groupstate_tokens": fates,
            "groupstate_session_seconds": {
                (name, outcome): tally.distribution()
                for name, part in parts.items()
                for outcome, tally in (("finished", part.finished), ("failed", part.failed))
            },
            "groupstate_sample_wait_seconds": {(name,): part.waits.distribution() for name, part in parts.items()},
            "groupstate_sampled_lag_versions": {(name,): part.lags.distribution() for name, part in parts.items()},
        }
        values |= counts
        return Reading(seq, {metric.name: values[metric.name] for metric in METRICS})


def _by(parts: Mapping[str, _Part], field: str) -> dict[Labels, Any]:
    return {(name, key): count for name, part in parts.items() for key, count in getattr(part, field).items()}


def _from_book(book: Book) -> dict[str, dict[Labels, int]]:
    """What the book counts by itself, so that nothing has to be done for each event."""
    totals = book.totals
    committed = {name: totals[f"committed/{name}"] for name in PARTITIONS}
    left = {ev.TRAIN: committed[ev.TRAIN] + totals["evicted"], ev.VALIDATION: committed[ev.VALIDATION]}
    return {
        # Whoever was submitted is there, or has left.
        "groupstate_groups_submitted": {(name,): left[name] + book.count(*LIVE, partition=name) for name in PARTITIONS},
        "groupstate_groups_evicted": {(ev.TRAIN,): totals["evicted"]},
        "groupstate_evictions": {
            (ev.TRAIN, reason): totals[f"evicted/{reason}"] for reason in get_args(ev.EvictReason)
        },
        "groupstate_refills": {(): totals["refills"]},
        "groupstate_refills_forfeited": {(): totals["forfeited"]},
        "groupstate_groups_committed": {(name,): committed[name] for name in PARTITIONS},
        "groupstate_sessions_finished": {(): totals["sessions_finished"]},
        "groupstate_tokens_generated": {(): totals["response_tokens"]},
    }


def _less(now: Mapping[str, Mapping[Labels, int]], first: Mapping[str, Mapping[Labels, int]]) -> Values:
    return {name: {key: value - first[name][key] for key, value in values.items()} for name, values in now.items()}


def _open(group: Group) -> int:
    return sum([session.state == "open" for session in group.sessions])


def _note_durations(group: Group, part: _Part) -> None:
    """Of the sessions that finished; `group` is as it was before it ended or started over."""
    sessions = group.sessions
    if group.finished_count < len(sessions):
        sessions = tuple(session for session in sessions if session.state == "finished")
    part.finished.loose += [session.ended_at_ns - session.started_at_ns for session in sessions]
    if len(part.finished.loose) > LOOSE_MAX:
        part.finished.tidy()


def _tokens(group: Group) -> int:
    if not group.trajectory_count:
        return 0
    return sum([row.response_tokens for session in group.sessions for row in session.trajectories])


_COUNTED: Final[dict[type[ev.Event], Callable[[Figures, Any, int], None]]] = {
    ev.SessionFailed: Figures._session_failed,
    ev.GroupFinished: Figures._finished,
    ev.GroupFailed: Figures._failed,
    ev.GroupRequeued: Figures._requeued,
    ev.ResultFenced: Figures._fence,
    ev.BatchRequested: Figures._request,
    ev.BatchRequestCancelled: Figures._withdraw,
    ev.BatchSampled: Figures._sample,
    ev.BatchReturned: Figures._return,
    ev.BatchCommitted: Figures._commit,
}
