"""Plays a recorded run again under rules of one's choice, on the real ledger and rules, event by event.

Rule 1: time is a number in nanoseconds that jumps to the next thing to do; of two at the same time the one that the log
has first comes first. So under the run's own rules everything happens when it happened.
Rule 2: what the log doesn't know (prompts beyond those drawn, sessions that were cut off) is drawn from what it does
know, from a seed, and counted.
"""

import asyncio
import functools
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import attrs

from groupstate.core import events as ev
from groupstate.core.custom import CustomRule
from groupstate.core.events import VersionSpan
from groupstate.core.explain import explain
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules
from groupstate.log.memory import MemoryLog
from groupstate.logs import hushed
from groupstate.runtime.controller import Controller, Waiter
from groupstate.runtime.deadlines import timed_out
from groupstate.runtime.ledger import CANCELLED, SPARE, Ending, Ledger
from groupstate.runtime.recovery import start
from groupstate.runtime.sources import IteratorSource, MixedSource, Source
from groupstate.simulate.whatif.recorded import (
    GROUP_TIMED_OUT,
    RECOVERY,
    Act,
    Arrival,
    Attempt,
    Recorded,
    whole_attempts,
)

LATER = 1 << 62
"""Place among what happens at the same time of what the log doesn't have."""

LONGER_MAX = 50
"""A play that takes so many times as long as the run did is given up."""

DRAWN_PROMPTS_MAX = 1_000_000
"""Prompts that are made up, at most: rules under which every group is thrown away would never end."""


@attrs.frozen
class Played:
    records: list[ev.Record]
    stopped: str
    """Why it ended before the trainer had done all that it did; empty if it didn't."""
    drawn: dict[str, int]
    """What the log didn't know: how much was made up, by kind."""


def play(found: Recorded, rules: Rules, custom: CustomRule | None = None, *, seed: int = 0) -> Played:
    """
    Args:
        custom: the function that the rules' `selection` names, where that is the user's own.
    """

    async def main() -> Played:
        return _Play(found, rules, custom, seed).played()

    with hushed():
        return asyncio.run(main())


def _never_began(attempt: Attempt) -> bool:
    """It failed before it began."""
    return attempt.end is not None and bool(attempt.started_at_ns) and attempt.end_seq == attempt.start_seq


def _begin_together(attempts: Sequence[Attempt], *, recorded: bool) -> bool:
    """The sessions of a group begin in one step, and the rules are asked once they have.

    Args:
        recorded: they are as the log has them: then nothing may have come between their starts.
    """
    first = attempts[0]
    return not any(map(_never_began, attempts)) and all(
        attempt.start_after_ns == first.start_after_ns
        and (not recorded or attempt.start_seq == first.start_seq + number)
        for number, attempt in enumerate(attempts)
    )


class _Play:
    def __init__(self, found: Recorded, rules: Rules, custom: CustomRule | None, seed: int) -> None:
        self.found = found
        self.rules = rules
        self.seed = seed
        self.now_ns = found.started_at_ns
        self.pools = whole_attempts(found)
        self.whole = {id(attempt) for pool in self.pools.values() for attempt in pool}
        self.arrivals = dict(found.arrivals)
        self.made_up: Counter[str] = Counter()
        self.log = MemoryLog()
        self.ledger = Ledger(self.log, rules, clock_ns=lambda: self.now_ns)
        self.book = self.ledger.book
        source = self._source() if found.has_source else None
        self.controller = Controller(self.ledger, source, group_size=1, custom=custom)
        self.controller.runner = self
        self.ledger.observers.append(self._note)
        self.heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.tries: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Tries of each session that were begun."""
        self.submitted_ns: dict[str, int] = {}
        self.act = 0
        """Index of the trainer's next act."""
        self.act_due = False
        """It has its time, and is not done yet."""
        self.act_ns = self.now_ns
        self.waiters: dict[int, Waiter] = {}
        """By the recorded number of the request."""
        self.answered_ns: dict[int, int] = {}
        self.batches: dict[int, int] = {}
        """Recorded number of a batch -> recorded number of its request."""
        self.stopped = ""
        self.over = False

    def played(self) -> Played:
        start(self.ledger, run_id="what-if", weight_version=self.found.weight_version, seed=self.seed)
        self.controller.settle()
        self._advance()
        while self.heap and not self.over:
            at_ns, _, _, do = heapq.heappop(self.heap)
            self.now_ns = max(self.now_ns, at_ns)
            if self.now_ns - self.found.started_at_ns > LONGER_MAX * max(self.found.duration_ns, 1):
                self.stopped = f"it takes more than {LONGER_MAX} times as long as the run did"
                break
            do()
            self._look()
        if not self.over and not self.stopped:
            sourced = self.found.has_source
            waits = explain(self.book, self.rules, now_ns=self.now_ns, has_source=sourced, dispatches=sourced)
            self.stopped = f"the trainer would wait without an end: {waits}"
        return Played(list(self.log.read()), self.stopped, dict(sorted(self.made_up.items())))

    def _at(self, at_ns: int, seq: int, do: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (at_ns, seq, next(self.count), do))

    # Prompts -----------------------------------------------------------------------------------------

    def _source(self) -> Source:
        names = list(dict.fromkeys(self.arrivals[group_id].dataset for group_id in self.found.drawn))
        if self.found.mixed or self.rules.datasets:
            return MixedSource({name: self._prompts(name) for name in names}, name="recorded")
        return IteratorSource(self._prompts(None), name="recorded")

    def _prompts(self, dataset: str | None) -> Iterator[Prompt]:
        """Those that were drawn, in their order; then, unless the source had ended, more like them."""
        known = [
            group_id for group_id in self.found.drawn if dataset is None or self.arrivals[group_id].dataset == dataset
        ]
        for group_id in known:
            yield self._prompt(self.arrivals[group_id])
        chance = random.Random(f"{self.seed}/prompts/{dataset}")
        while not self.found.exhausted and self.made_up["prompts"] < DRAWN_PROMPTS_MAX:
            like = self.arrivals[chance.choice(known)]
            self.made_up["prompts"] += 1
            group_id = f"{like.group_id}+{self.made_up['prompts']}"
            self.arrivals[group_id] = attrs.evolve(like, group_id=group_id, cancel=None, requeues=[])
            yield self._prompt(self.arrivals[group_id])

    @staticmethod
    def _prompt(arrival: Arrival) -> Prompt:
        return Prompt(None, arrival.dataset, arrival.needed, arrival.group_id)

    # Groups and sessions -----------------------------------------------------------------------------

    def _note(self, record: ev.Record) -> None:
        event = record.event
        if isinstance(event, ev.GroupSubmitted):
            self._submitted(event.group_id)
        elif isinstance(event, ev.GroupRequeued):
            self._due(event.group_id)
        elif isinstance(event, ev.SessionFailed) and event.retry_in_s is not None:
            self._retry(event, event.retry_in_s)

    def _submitted(self, group_id: str) -> None:
        arrival = self.arrivals[group_id]
        self.submitted_ns[group_id] = self.now_ns
        if arrival.cancel is not None:
            after_ns, seq = arrival.cancel
            self._at(self.now_ns + after_ns, seq, lambda: self._end(group_id, CANCELLED))
        for after_ns, seq, stamp in arrival.requeues:
            self._at(self.now_ns + after_ns, seq, functools.partial(self._requeue, group_id, stamp))
        self._due(group_id)

    def _due(self, group_id: str) -> None:
        """All sessions of a group are to begin."""
        group = self.book.groups[group_id]
        attempts = [self._next(group_id, session) for session in range(group.size)]
        known = group_id in self.found.arrivals and all(attempt.end_seq != LATER for attempt in attempts)
        if _begin_together(attempts, recorded=group_id in self.found.arrivals):
            first, due = attempts[0], [session.attempt for session in group.sessions]
            together = functools.partial(self._start_all, group_id, group.requeue_count, due, attempts)
            self._at(self.now_ns + first.start_after_ns, first.start_seq, together)
        else:
            for session, attempt in enumerate(attempts):
                self._start_at(group_id, session, attempt, self.now_ns + attempt.start_after_ns)
        self._limit(group_id, group.requeue_count, known=known)

    def _limit(self, group_id: str, requeues: int, *, known: bool) -> None:
        """Have the group's deadline expire, where it has one.

        Args:
            known: its sessions go as the log says, so under the same deadline it expires if it did.
        """
        deadline_s = self.rules.group_deadline_s
        if deadline_s is None:
            return
        after_ns, seq = round(deadline_s * 1e9), LATER
        if deadline_s == self.found.rules.group_deadline_s:
            if known and requeues not in self.arrivals[group_id].timeouts:
                return
            after_ns, seq = self.arrivals[group_id].timeouts.get(requeues, (after_ns, seq))
        ending = Ending("timeout", f"{GROUP_TIMED_OUT} {deadline_s:g}")
        self._at(self.now_ns + after_ns, seq, lambda: self._expire(group_id, requeues, ending))

    def _retry(self, event: ev.SessionFailed, retry_in_s: float) -> None:
        attempt = self._next(event.group_id, event.session)
        delay_ns = attempt.start_after_ns
        if self.rules.retry_delay_s != self.found.rules.retry_delay_s or delay_ns < retry_in_s * 1e9:
            delay_ns = round(retry_in_s * 1e9)
        self._start_at(event.group_id, event.session, attempt, self.now_ns + delay_ns)

    def _next(self, group_id: str, session: int) -> Attempt:
        """How the next try of a session goes."""
        tried = self.tries[group_id, session]
        self.tries[group_id, session] += 1
        arrival = self.arrivals[group_id]
        chance = random.Random(f"{self.seed}/{group_id}/{session}/{tried}")
        if session < len(arrival.sessions) and tried < len(arrival.sessions[session]):
            attempt = arrival.sessions[session][tried]
            return attempt if self._is_known(attempt) else self._drawn(arrival, chance, attempt)
        return self._drawn(arrival, chance, None)

    def _is_known(self, attempt: Attempt) -> bool:
        if id(attempt) in self.whole:
            return True
        # One that ran into the deadline does so again, where that is the same.
        return (
            isinstance(attempt.end, ev.SessionFailed)
            and attempt.end.failure == "timeout"
            and not attempt.end.message.startswith(GROUP_TIMED_OUT)
            and self.rules.session_deadline_s == self.found.rules.session_deadline_s
        )

    def _drawn(self, arrival: Arrival, chance: random.Random, cut: Attempt | None) -> Attempt:
        """A try that the log doesn't know, or of which it doesn't know the end: one of the same dataset, of the same
        group where there is one, that took at least as long."""
        least_ns = 0 if cut is None else cut.duration_ns
        own = [attempt for attempts in arrival.sessions for attempt in attempts if id(attempt) in self.whole]
        for pool in (own, self.pools[arrival.dataset], *self.pools.values()):
            longer = [attempt for attempt in pool if attempt.duration_ns >= least_ns]
            if not longer:
                continue
            self.made_up["sessions" if cut is None else "ends of sessions"] += 1
            like = chance.choice(longer)
            if cut is None:
                return like
            return attrs.evolve(
                like,
                start_after_ns=cut.start_after_ns,
                start_seq=cut.start_seq,
                version_behind=cut.version_behind,
                end_seq=LATER,
            )
        self.made_up["sessions without an end"] += 1
        return Attempt(0, LATER, None, 0, end_seq=LATER) if cut is None else attrs.evolve(cut, end=None, end_seq=LATER)

    def _start_at(self, group_id: str, session: int, attempt: Attempt, at_ns: int) -> None:
        group = self.book.groups[group_id]
        requeues, number = group.requeue_count, group.sessions[session].attempt
        self._at(at_ns, attempt.start_seq, lambda: self._start(group_id, session, number, requeues, attempt))

    def _start(self, group_id: str, session: int, number: int, requeues: int, attempt: Attempt) -> None:
        group = self.book.groups.get(group_id)
        if group is None or not group.in_flight or group.requeue_count != requeues:
            return
        now = group.sessions[session]
        if now.state != "waiting" or now.attempt != number:
            return
        if _never_began(attempt):
            self._finish(group_id, session, number, attempt)
            return
        self.ledger.start(group_id, session, number, version=self._first_version(attempt))
        self._end_at(group_id, session, number, attempt)

    def _start_all(self, group_id: str, requeues: int, due: list[int], attempts: list[Attempt]) -> None:
        """Begin all sessions of a group before the rules are asked what follows."""
        group = self.book.groups.get(group_id)
        if group is None or not group.in_flight or group.requeue_count != requeues:
            return
        for session, (number, attempt) in enumerate(zip(due, attempts, strict=True)):
            now = group.sessions[session]
            if now.state == "waiting" and now.attempt == number:
                self.ledger.record(ev.SessionStarted(group_id, session, number, "", self._first_version(attempt)))
                self._end_at(group_id, session, number, attempt)
        self.ledger.settle()

    def _first_version(self, attempt: Attempt) -> int | None:
        """Weight version of an attempt's first token: as far behind the current one as it was."""
        behind = attempt.version_behind
        return None if behind is None else max(0, self.book.weight_version - behind)

    def _end_at(self, group_id: str, session: int, number: int, attempt: Attempt) -> None:
        deadline_s = self.rules.session_deadline_s
        if deadline_s is not None and (deadline_s != self.found.rules.session_deadline_s or attempt.end is None):
            limit_ns = round(deadline_s * 1e9)
            if attempt.end is None or attempt.duration_ns > limit_ns:
                self._at(self.now_ns + limit_ns, LATER, lambda: self._time_out(group_id, session, number))
                return
        if attempt.end is not None:
            at_ns = self.now_ns + attempt.duration_ns
            self._at(at_ns, attempt.end_seq, lambda: self._finish(group_id, session, number, attempt))

    def _is_open(self, group_id: str, session: int, number: int) -> bool:
        group = self.book.groups.get(group_id)
        if group is None or not group.in_flight:
            return False
        now = group.sessions[session]
        return now.attempt == number and now.state in {"open", "waiting"}

    def _time_out(self, group_id: str, session: int, number: int) -> None:
        # At the end of a run its end is the deadline.
        if self._is_open(group_id, session, number) and not self.controller.closing:
            text = timed_out(self.rules.session_deadline_s)
            self.ledger.fail(group_id, session, number, "timeout", text, retryable=True)

    def _finish(self, group_id: str, session: int, number: int, attempt: Attempt) -> None:
        if not self._is_open(group_id, session, number):
            return
        end = attempt.end
        assert end is not None
        if isinstance(end, ev.SessionFailed):
            allowed = end.failure == "empty" and self.rules.empty_session == "allow"
            if not allowed:
                retryable = self._is_retryable(end)
                self.ledger.fail(group_id, session, number, end.failure, end.message, retryable=retryable)
                return
        rows = end.trajectories if isinstance(end, ev.SessionFinished) else ()
        if self.book.groups[group_id].filled:
            self.ledger.fail(group_id, session, number, SPARE.failure, SPARE.message)
        elif not rows and self.rules.empty_session == "fail":
            self.ledger.fail(group_id, session, number, "empty", "it returned no trajectory")
        else:
            rows = tuple(self._told(row, attempt) for row in rows)
            self.ledger.record(ev.SessionFinished(group_id, session, number, rows))
            self.ledger.settle()

    def _told(self, row: ev.TrajectoryRecord, attempt: Attempt) -> ev.TrajectoryRecord:
        """A row with the weight versions that its tokens would have: as far behind the current one as they were."""
        moved = self.book.weight_version - attempt.version_at_end
        if not moved or not row.spans:
            return row
        spans = tuple(VersionSpan(span.start, span.stop, max(0, span.weight_version + moved)) for span in row.spans)
        return ev.TrajectoryRecord(
            row.index, row.metrics, row.prompt_tokens, row.response_tokens, spans, row.environment
        )

    def _is_retryable(self, end: ev.SessionFailed) -> bool:
        """Where the run had no retries, nothing says which errors it would have tried again: time-outs are."""
        return end.retry_in_s is not None or end.failure in {"timeout", "lost"}

    def _end(self, group_id: str, ending: Ending) -> None:
        group = self.book.groups.get(group_id)
        if group is not None and group.in_flight:
            self.ledger.end(group_id, ending)

    def _expire(self, group_id: str, requeues: int, ending: Ending) -> None:
        group = self.book.groups.get(group_id)
        due = group is not None and group.in_flight and group.requeue_count == requeues
        if due and not self.controller.closing:
            self.controller.end(group_id, ending)

    def _requeue(self, group_id: str, stamp: int | None) -> None:
        group = self.book.groups.get(group_id)
        if group is not None and group.in_flight:
            self.ledger.record(ev.GroupRequeued(group_id, "requeued", weight_version=stamp))
            self.ledger.settle()

    def end(self, group_id: str, ending: Ending) -> bool:
        """Asked by the rules: end the open sessions of a group. They take as long to end as they did."""
        told = self.arrivals[group_id].spare.get(self.book.groups[group_id].requeue_count)
        if ending is not SPARE or told is None:
            return False
        after_ns, seq = told
        self.ledger.mark_ending(group_id, ending)
        self._at(self.now_ns + after_ns, seq, lambda: self._end(group_id, ending))
        return True

    # The trainer -------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See which samplers have been answered."""
        for request, waiter in self.waiters.items():
            if request not in self.answered_ns and waiter.answered.is_set():
                self.answered_ns[request] = self.now_ns
        self._advance()

    def _advance(self) -> None:
        """Have the trainer's next act done when it is its time."""
        while self.act < len(self.found.acts) and not self.act_due:
            act = self.found.acts[self.act]
            if act.kind != "answer":
                self.act += 1
                self.act_due = True
                self.act_ns = max(self.now_ns, self.act_ns + act.after_ns)
                self._at(self.act_ns, act.seq, functools.partial(self._do, act))
                return
            request, batch = act.value
            if request not in self.answered_ns:
                if request in self.waiters:
                    return
                self.answered_ns[request] = self.act_ns
            waiter = self.waiters.get(request)
            if waiter is not None and waiter.error is not None and type(waiter.error).__name__ != act.error:
                self.stopped = f"sample() raises {type(waiter.error).__name__}: {waiter.error}"
                self.over = True
                return
            if batch is not None:
                self.batches[batch] = request
            self.act_ns = max(self.act_ns, self.answered_ns[request])
            self.act += 1

    def _do(self, act: Act) -> None:
        self.act_due = False
        if act.kind == "end":
            self.over = True
            return
        getattr(self, f"_{act.kind}")(act)

    def _begin(self, act: Act) -> None:
        self.controller.admits = True
        self.controller.settle()

    def _submit(self, act: Act) -> None:
        group_id, stamp, target = act.value
        arrival = self.arrivals[group_id]
        target = target if self.rules.targets_versions else None
        self.controller.drawing.submit(self._prompt(arrival), weight_version=stamp, target_version=target)
        self.controller.settle()

    def _publish(self, act: Act) -> None:
        self.ledger.publish(max(act.value, self.book.weight_version))

    def _request(self, act: Act) -> None:
        request, size = act.value
        if size == self.found.rules.batch_size and self.rules.batch_size:
            size = self.rules.batch_size
        self.waiters[request] = self.controller.request(size, ev.TRAIN)

    def _withdraw(self, act: Act) -> None:
        kind, number = act.value
        waiter = self.waiters.get(number if kind == "request" else self.batches.get(number, -1))
        if waiter is not None and waiter.error is None:
            self.controller.withdraw(waiter, "cancelled")
            self.controller.settle()

    def _batch(self, number: int) -> int | None:
        """What the batch of the log is here, where it is still with the trainer."""
        waiter = self.waiters.get(self.batches.get(number, -1))
        batch = None if waiter is None or waiter.claim is None else waiter.claim.batch
        return batch if batch in self.book.batches else None

    def _commit(self, act: Act) -> None:
        if (batch := self._batch(act.value)) is not None:
            self.ledger.record(ev.BatchCommitted(batch))
            self.controller.settle()

    def _release(self, act: Act) -> None:
        if (batch := self._batch(act.value)) is not None:
            self.ledger.record(ev.BatchReturned(batch, "released"))
            self.controller.settle()

    def _closing(self, act: Act) -> None:
        self.controller.closing = True

    def _close(self, act: Act) -> None:
        self.controller.closing = True
        self._start_over("the run closed")

    def _restart(self, act: Act) -> None:
        self.controller.admits = self.controller.closing = False
        for batch in list(self.book.batches):
            self.ledger.record(ev.BatchReturned(batch, RECOVERY))
        self._start_over(RECOVERY)
        self.controller.rejudge()
        self.controller.settle()

    def _start_over(self, reason: str) -> None:
        """The process ends: nobody waits any more, and sessions that ran begin again."""
        for waiter in list(self.controller.waiters.values()):
            self.controller.withdraw(waiter, "cancelled")
        for group in list(self.book.groups.values()):
            if group.in_flight and any(session.state != "waiting" for session in group.sessions):
                self.ledger.record(ev.GroupRequeued(group.group_id, reason))
