"""Runs the rules when something happens, and records what they want.

Rule 1: everything here is synchronous: between reading the book and recording the result nothing suspends.
Rule 2: `settle` goes on until nothing more follows; each round does something finite, so it ends.
Rule 3: waiters are served in order of arrival, partition by partition.
"""

from collections import Counter
from collections.abc import Mapping

import anyio
import attrs

from groupstate.core import events as ev
from groupstate.core.decide import (
    Evict,
    Missing,
    admissible,
    forfeits,
    held_by_stale,
    judged,
    newly_stale,
    refills_now,
    selected,
    shortage,
    surplus,
    unjudged_count,
    unservable,
    why_not,
)
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.metrics import batch_metrics
from groupstate.core.phases import TERMINAL
from groupstate.core.prompt import Prompt, encoded_prompt, prompt_length
from groupstate.core.rules import PerBatch, Slots
from groupstate.errors import (
    DuplicateGroup,
    EvictionStreak,
    LogFailed,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RolloutDied,
    RunIsClosed,
    SampleError,
    SourceFailed,
)
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.logs import Logger
from groupstate.runtime.session import describe
from groupstate.runtime.sources import Source

log = Logger("groupstate.controller")


@attrs.frozen
class Claim:
    """What a served `sample()` gets: groups as they were when they were claimed."""

    batch: int
    seq: int
    groups: tuple[Group, ...]
    lags: tuple[int, ...]
    weight_version: int
    metrics: dict[str, float]


@attrs.define(eq=False)
class Waiter:
    """A `sample()` that waits; exactly one of `claim` and `error` is set before `answered`."""

    request: int
    wanted: frozenset[str] | None = None
    answered: anyio.Event = attrs.field(factory=anyio.Event)
    claim: Claim | None = None
    error: Exception | None = None


class Signal:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def set(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class Controller:
    def __init__(self, ledger: Ledger, source: Source | None, *, group_size: int) -> None:
        self.ledger = ledger
        self.book = ledger.book
        self.rules = ledger.rules
        self.source = source
        self.group_size = group_size
        """Sessions of a group whose prompt doesn't say."""
        self.admits = False
        """A rollout is running that may be given new prompts; else only refills and shortages are drawn."""
        self.refills_outside = False
        """Somebody outside finds the prompts for refills, so that credit is kept for him though there is no source."""
        self.closing = False
        self.dead: BaseException | None = None
        """Why the rollout ended, once it died."""
        self.death_told = False
        self.source_error: Exception | None = None
        """What the source raised; nothing is drawn from it any more."""
        self.source_failed_at = 0
        self.waiters: dict[int, Waiter] = {}
        self.prompts: dict[str, Prompt] = {}
        """Prompts of the groups in flight."""
        self.changed = Signal()
        self.watched: list[int] = []
        """Training groups that each `wait_sampleable` looks out for."""
        self.missing: dict[str, Missing] = {}
        self.damaged: dict[str, str] = {}
        """Groups of which a payload can't be read, with what is wrong."""
        self.streak = 0
        """Training groups evicted since the last one became sampleable."""
        self.streak_reasons: Counter[str] = Counter()
        self.progress_at_ns = ledger.clock_ns()
        self._unjudged: dict[str, None] = {}
        self._aged = False
        self._settling = False
        ledger.observers.append(self._note)
        ledger.settle = self.settle

    # What happened -----------------------------------------------------------------------------------

    def _note(self, record: ev.Record) -> None:
        event = record.event
        self.progress_at_ns = record.at_ns
        if isinstance(event, ev.GroupFinished | ev.GroupFailed):
            self._unjudged[event.group_id] = None
            self.prompts.pop(event.group_id, None)
        elif isinstance(event, ev.WeightsPublished | ev.BatchReturned | ev.RunRewound | ev.BatchRequested):
            self._aged = True
        elif isinstance(event, ev.GroupEvicted):
            self.missing.pop(event.group_id, None)
            self.damaged.pop(event.group_id, None)

    def rejudge(self) -> None:
        """Put every terminal group before the rules again (after recovery)."""
        self._unjudged.update(
            dict.fromkeys(g.group_id for phase in sorted(TERMINAL) for g in self.book.in_phase(phase))
        )

    def settle(self) -> None:
        """Do all that follows from the book under the rules."""
        if self._settling or isinstance(self.dead, LogFailed):
            return
        self._settling = True
        try:
            while any((self._evict(), self._forfeit(), self._refill(), self._serve(), self._admit(), self._refuse())):
                pass
        finally:
            self._settling = False
        self.changed.set()

    # What follows, one step each; True if something was recorded ---------------------------------------

    def _evict(self) -> bool:
        demand = self._demand()
        if self.rules.mode == "sync" and demand is None:
            return False
        candidates = [self.book.groups[g] for g in self._unjudged if g in self.book.groups]
        self._unjudged.clear()
        if self._aged:
            self._aged = False
            seen = {group.group_id for group in candidates}
            candidates += [group for group in newly_stale(self.book, self.rules) if group.group_id not in seen]
        if not candidates:
            return False
        judgement = judged(self.book, self.rules, candidates, demand=demand, damaged=self.damaged)
        for missing in judgement.missing:
            self.missing[missing.group_id] = missing
        if judgement.kept:
            self.streak = 0
            self.streak_reasons.clear()
        for evict in judgement.evictions:
            self._record_eviction(evict)
            self.streak += 1
            self.streak_reasons.update(evict.reasons)
        return bool(judgement.evictions)

    def _record_eviction(self, evict: Evict) -> None:
        log.info("group evicted", group=evict.group_id, reasons=evict.reasons, lag=evict.lag, credit=evict.credit)
        metric = self.rules.filter_metric if evict.shared_value is not None else None
        self.ledger.record(
            ev.GroupEvicted(
                evict.group_id, evict.reasons, evict.lag, evict.credit, evict.shared_value, metric or "", evict.message
            )
        )

    def _forfeit(self) -> bool:
        found = forfeits(self.book, self.rules)
        if found is None and self.book.credits and not self._can_draw() and not self.refills_outside:
            found = len(self.book.credits), "no source" if self.source is None else "source failed"
        if found is None:
            return False
        self.ledger.record(ev.RefillForfeited(*found))
        return True

    def _refill(self) -> bool:
        if self.closing or not self._can_draw() or self._is_streak():
            return False
        count = refills_now(self.book, self.rules)
        for _ in range(count):
            if not self._draw("refill"):
                return True
        return count > 0

    def _admit(self) -> bool:
        if self.closing or not self._can_draw() or self._is_streak():
            return False
        count = max(shortage(self.book, self.rules), self._watched_shortage())
        if self.admits:
            count = max(count, admissible(self.book, self.rules))
        held = held_by_stale(self.book, self.rules)
        if held:
            count = 0
        self._hold("a group in flight is at the lag bound" if held and self.admits else "")
        for _ in range(count):
            if not self._draw("admission"):
                return True
        return count > 0

    def _watched_shortage(self) -> int:
        """What `wait_sampleable` looks out for is drawn too, as far as admission's bounds allow."""
        if not self.watched or self._unjudged_streak():
            return 0
        there = self.book.ready_count() + self.book.in_flight_count() + len(self.book.credits)
        short = max(self.watched) - there
        rule = self.rules.admission_rule
        if isinstance(rule, PerBatch):
            return short
        if isinstance(rule, Slots):
            return min(short, rule.n - self.book.in_flight_count())
        return min(short, admissible(self.book, self.rules))

    def _unjudged_streak(self) -> bool:
        """Sync mode evicts nothing while no `sample()` waits, so the streak shows in what has heaped up."""
        return unjudged_count(self.book) >= self.rules.streak_bound(max(self.watched, default=1))

    def _hold(self, reason: str) -> None:
        """Write down where a hold begins, once."""
        if reason != self.book.held_reason:
            self.ledger.record(ev.AdmissionHeld(reason))

    def _draw(self, cause: ev.Cause) -> bool:
        """Submit the source's next prompt; False once there is none."""
        assert self.source is not None
        position = self.source.position
        try:
            prompt = self.source.draw()
            if prompt is None:
                log.info("source exhausted", source=self.source.name, position=position)
                self.ledger.record(ev.SourceExhausted(self.source.name, position))
                return False
            size = self.book.credits[0].size if cause == "refill" else None
            self.submit(prompt, cause=cause, size=size, source_position=position)
        except LogFailed:
            raise
        except Exception as error:
            # The source is user code: what it raises, or gives wrongly, must reach whoever waits for it.
            log.error("the source failed", source=self.source.name, position=position, error=describe(error))
            self.source_error = error
            self.source_failed_at = position
            return False
        return True

    def _can_draw(self) -> bool:
        return self.source is not None and not self.book.source_exhausted and self.source_error is None

    def _is_streak(self) -> bool:
        """Group after group was evicted: nothing more is drawn until a sampler has been told."""
        return self.streak >= self.rules.streak_bound(self._demand() or max(self.watched, default=1))

    def _serve(self) -> bool:
        served = False
        for partition in self.book.partitions():
            held = False
            for request in self.book.waiting(partition):
                takes_any = self.waiters[request.request].wanted is None
                if held and takes_any:
                    continue  # A later one doesn't overtake.
                if self._serve_one(request):
                    served = True
                elif takes_any:
                    held = True
        return served

    def _serve_one(self, request: OpenRequest) -> bool:
        if request.partition == ev.TRAIN and self.missing:
            return False
        waiter = self.waiters.get(request.request)
        assert waiter is not None, "a request without a waiter"
        if why_not(self.book, self.rules, request) is not None:
            return False
        reserved = frozenset(group_id for other in self.waiters.values() for group_id in other.wanted or ())
        groups = selected(self.book, request, wanted=waiter.wanted, reserved=reserved)
        if len(groups) < request.size:
            return False
        for evict in surplus(self.book, self.rules, request, groups):
            self._record_eviction(evict)
        lags = tuple(self.book.lag(group) for group in groups)
        version = self.book.weight_version
        metrics = batch_metrics(request.partition, self.book.window(request.partition), groups, lags, version)
        ids = tuple(group.group_id for group in groups)
        batch = self.book.last_batch + 1
        seq = self.ledger.record(ev.BatchSampled(batch, request.request, request.partition, ids, version, lags))
        waiter.claim = Claim(batch, seq, tuple(groups), lags, version, metrics)
        self._answer(waiter)
        return True

    def _refuse(self) -> bool:
        """Tell waiters whose batch can't come."""
        refused = False
        for request in list(self.book.requests.values()):
            error = self._hopeless(request)
            if error is not None:
                self.ledger.record(ev.BatchRequestCancelled(request.request, type(error).__name__))
                waiter = self.waiters[request.request]
                waiter.error = error
                self._answer(waiter)
                refused = True
                if isinstance(error, EvictionStreak):
                    # It has been told. Whoever samples again means to go on.
                    self.streak = 0
                    self.streak_reasons.clear()
        return refused

    def _hopeless(self, request: OpenRequest) -> Exception | None:
        if self.closing:
            return RunIsClosed("the run is closing, so no more batches are given out; what is sampleable stays so")
        if self.dead is not None:
            return self._death()
        if request.partition != ev.TRAIN:
            return None
        return self._training_hopeless(request)

    def _death(self) -> Exception:
        assert self.dead is not None
        self.death_told = True
        if isinstance(self.dead, LogFailed):
            return self.dead
        error = RolloutDied(f"the rollout died, so what is waited for will not come: {describe(self.dead)}")
        error.__cause__ = self.dead
        return error

    def die(self, error: BaseException) -> None:
        """The rollout or the log is gone: tell everybody who waits."""
        if self.dead is None:
            self.dead = error
        if not isinstance(self.dead, LogFailed):
            self.settle()
            return
        # Nothing can be recorded any more, that they were told included.
        for waiter in list(self.waiters.values()):
            waiter.error = self._death()
            self._answer(waiter)
        self.changed.set()

    def why_never(self, count: int, partition: ev.Partition) -> Exception | None:
        """Why `count` groups will not be sampleable together, as far as that is certain; None if they may be."""
        if self.closing:
            return RunIsClosed("the run is closing: no more groups become sampleable")
        if self.dead is not None:
            return self._death()
        if partition == ev.TRAIN and (stuck := self._stuck(count)) is not None:
            return stuck
        if partition == ev.TRAIN and self._unjudged_streak():
            heap = unjudged_count(self.book)
            text = f"{heap} groups ended without a trajectory and none became sampleable; every session fails"
            return EvictionStreak(heap, self.rules.streak_bound(count), {"empty": heap}, text)
        rule = self.rules.admission_rule
        if partition == ev.TRAIN and self.admits and isinstance(rule, Slots) and count > rule.n + rule.ready_max:
            counts = {"needed": count, "admitted": rule.n + rule.ready_max}
            text = (
                f"admission 'slots' lets {rule.n} + {rule.ready_max} groups be ready or in flight, {count} are wanted"
            )
            return NotEnoughGroups(count, counts, f"{text}; raise ready_max, or sample instead of waiting")
        left = self.book.ready_count(partition) + self.book.in_flight_count(partition) + len(self.book.credits)
        if partition != ev.TRAIN or self.source is None or self._can_draw() or count <= left:
            return None
        counts = {"needed": count, "sampleable": self.sampleable_count(partition), "left": left}
        end = "is exhausted" if self.source_error is None else f"failed: {describe(self.source_error)}"
        return NotEnoughGroups(
            count, counts, f"the source {end}, and no more than {left} groups are left; {count} wanted"
        )

    def _stuck(self, size: int) -> SampleError | None:
        """Why training groups don't become sampleable; None if they do."""
        if self.missing:
            first = next(iter(self.missing.values()))
            return MissingMetric(first.group_id, first.session, first.metric, first.present)
        bound = self.rules.streak_bound(size)
        if self.streak >= bound:
            why = ", ".join(f"{reason} {count}" for reason, count in sorted(self.streak_reasons.items()))
            text = (
                f"{self.streak} groups in a row were evicted and none became sampleable (bound {bound}): {why}. "
                "The tasks are all too easy or too hard, the reward is constant, or every session fails; "
                "raise eviction_streak_max to go on longer"
            )
            return EvictionStreak(self.streak, bound, self.streak_reasons, text)
        return None

    def _training_hopeless(self, request: OpenRequest) -> SampleError | None:
        if (stuck := self._stuck(request.size)) is not None:
            return stuck
        window = self.book.window(ev.TRAIN)
        limit = self.rules.generated_groups_max
        if limit is not None and window.submitted > limit:
            why = ", ".join(f"{reason} {count}" for reason, count in sorted(window.evicted.items())) or "none evicted"
            text = f"this batch took {window.submitted} groups, generated_groups_max is {limit}; evicted: {why}"
            return RefillLimitExceeded(window.submitted, limit, window.evicted, text)
        if self.source_error is not None and unservable(self.book, no_more=True) == request:
            assert self.source is not None
            failed = SourceFailed(f"source {self.source.name!r} failed at prompt {self.source_failed_at}: "
                                  f"{describe(self.source_error)}")  # fmt: skip
            failed.__cause__ = self.source_error
            return failed
        if self.source is not None and unservable(self.book) == request:
            return self._not_enough(request)
        return None

    def _not_enough(self, request: OpenRequest) -> NotEnoughGroups:
        ready, flying = self.book.ready_count(), self.book.in_flight_count()
        ahead = sum(r.size for r in self.book.waiting() if r.request < request.request)
        counts = {"needed": request.size, "sampleable": ready, "in_flight": flying, "older_waiters": ahead}
        older = f", of which older samplers wait for {ahead}" if ahead else ""
        left = ready + flying - ahead
        advice = (
            f"sample a batch of at most {left}" if left > 0 else "nothing is left: give more prompts, or end the loop"
        )
        return NotEnoughGroups(
            request.size,
            counts,
            f"sample({request.size}) can't be met: the source is exhausted, {ready} groups are sampleable and "
            f"{flying} in flight{older}; they stay so: {advice}",
        )

    def _answer(self, waiter: Waiter) -> None:
        del self.waiters[waiter.request]
        waiter.answered.set()

    # Asked from outside ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        cause: ev.Cause = "submit",
        size: int | None = None,
        partition: ev.Partition = ev.TRAIN,
        source_position: int = -1,
        weight_version: int | None = None,
    ) -> str:
        """Record a new group; returns its id."""
        group_id = self._free_id() if prompt.group_id is None else prompt.group_id
        encoded = encoded_prompt(prompt, group_id)
        where = self.book.is_taken(group_id)
        if where is not None:
            raise DuplicateGroup(group_id, where)
        ref = self.ledger.log.payloads.put(encoded) if prompt.content is not None or prompt.extra else None
        self.ledger.record(
            ev.GroupSubmitted(
                group_id,
                size or prompt.n or self.group_size,
                partition,
                self.book.weight_version if weight_version is None else weight_version,
                self.book.lineage,
                cause,
                prompt.dataset,
                source_position,
                ref,
                prompt_length(prompt),
            )
        )
        self.prompts[group_id] = prompt
        return group_id

    def _free_id(self) -> str:
        number = self.book.totals["submitted"] + 1
        while self.book.is_taken(f"g{number}") is not None:
            number += 1
        return f"g{number}"

    def request(self, size: int, partition: ev.Partition, wanted: frozenset[str] | None = None) -> Waiter:
        """Open a `sample()`; the waiter may be answered before this returns.

        Args:
            wanted: the very groups to sample, for validation; None for whichever come first.
        """
        number = self.book.last_request + 1
        waiter = Waiter(number, wanted)
        self.ledger.record(ev.BatchRequested(number, partition, size, self.book.weight_version))
        self.waiters[number] = waiter
        self.settle()
        return waiter

    def give_back_damaged(self, claim: Claim, damaged: Mapping[str, str]) -> None:
        """A claim of which payloads can't be read goes back; the next round of the rules evicts what is damaged."""
        for group_id, text in damaged.items():
            log.warning("a payload can't be read, so its group is evicted", group=group_id, error=text)
        self.mark_damaged(damaged)
        self.ledger.record(ev.BatchReturned(claim.batch, "damaged"))
        self.settle()

    def mark_damaged(self, damaged: Mapping[str, str]) -> None:
        """What can't be had of these groups any more; the next round of the rules evicts those that have ended."""
        self.damaged.update(damaged)
        self._unjudged.update(dict.fromkeys(damaged))

    def withdraw(self, waiter: Waiter, reason: str) -> None:
        """A sampler stopped waiting: what it had been given goes back. Why it stopped is not lost to a broken log."""
        try:
            self._withdraw(waiter, reason)
        except LogFailed as error:
            self.waiters.pop(waiter.request, None)
            self.die(error)

    def _withdraw(self, waiter: Waiter, reason: str) -> None:
        if waiter.claim is not None:
            if waiter.claim.batch in self.book.batches:
                self.ledger.record(ev.BatchReturned(waiter.claim.batch, "cancelled"))
        elif waiter.error is None:
            del self.waiters[waiter.request]
            self.ledger.record(ev.BatchRequestCancelled(waiter.request, reason))
        self.settle()

    def sampleable_count(self, partition: ev.Partition) -> int:
        """Groups that could be sampled now; one that lacks the filter's metric can't."""
        missing = sum(1 for group_id in self.missing if self.book.groups[group_id].partition == partition)
        return self.book.ready_count(partition) - missing

    def _demand(self) -> int | None:
        request = self._oldest(ev.TRAIN)
        return None if request is None else request.size

    def _oldest(self, partition: ev.Partition) -> OpenRequest | None:
        return next((r for r in self.book.requests.values() if r.partition == partition), None)
