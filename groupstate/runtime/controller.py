"""Runs the rules when something happens, and records what they want.

Rule 1: everything here is synchronous: between reading the book and recording the result nothing suspends.
Rule 2: `settle` goes on until nothing more follows; each round does something finite, so it ends.
Rule 3: waiters are served in order of arrival, partition by partition.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio
import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.custom import Answer, CustomRule, WrongAnswer, checked
from groupstate.core.evict import Evict, Missing, credit_of, doomed_by_age, is_doomed, judged, newly_stale
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.metrics import Tally, batch_tally
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.prompt import Prompt
from groupstate.core.select import is_for_now, ready_for, selected, surplus, why_held, why_not
from groupstate.core.shelf import has_rows
from groupstate.core.supply import starving
from groupstate.errors import CustomRuleError, DamagedPayload, EvictionStreak, LogFailed
from groupstate.log.space import Space
from groupstate.logs import Logger
from groupstate.runtime import refusals
from groupstate.runtime.abandoned import Abandoned
from groupstate.runtime.admission import Admission
from groupstate.runtime.drawing import Drawing
from groupstate.runtime.ledger import DOOMED, SPARE, Ending, Ledger, cut
from groupstate.runtime.session import describe
from groupstate.runtime.sources import Source

log = Logger("groupstate.controller")

_GROUP_ENDS = (ev.GroupFinished, ev.GroupFailed)
_MAKES_SUSPECT = (ev.GroupSubmitted, ev.SessionFailed, ev.GroupRequeued)
_AGES = (ev.WeightsPublished, ev.BatchReturned, ev.RunRewound, ev.BatchRequested)


@attrs.frozen
class Claim:
    """What a served `sample()` gets: groups as they were when they were claimed."""

    batch: int
    seq: int
    groups: tuple[Group, ...]
    lags: tuple[int, ...]
    weight_version: int
    tally: Tally

    @property
    def metrics(self) -> dict[str, float]:
        return self.tally.flat()


@attrs.define(eq=False)
class Waiter:
    """A `sample()` that waits; exactly one of `claim` and `error` is set before `answered`."""

    request: int
    wanted: frozenset[str] | None = None
    """The very groups that it waits for; if it doesn't get them, nobody does."""
    unended: list[str] = attrs.field(init=False)
    """Of these, those that hadn't ended when somebody last looked: each end is found once, however many there are."""
    answered: anyio.Event = attrs.field(factory=anyio.Event)
    claim: Claim | None = None
    error: Exception | None = None

    @unended.default
    def _all(self) -> list[str]:
        return sorted(self.wanted or ())

    def may_be_served(self, book: Book) -> bool:
        """Whether none of the groups that it waits for is in flight any more."""
        while self.unended:
            group = book.groups.get(self.unended[-1])
            if group is not None and group.in_flight:
                return False
            self.unended.pop()
        return True


class Signal:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None
        """asyncio's own, which is made in a fifth of the time: one is for each change that somebody waits for."""
        self.count = 0
        """Changes so far."""

    def set(self) -> None:
        self.count += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()


class Runner(Protocol):
    """Whoever runs the sessions of a group as tasks."""

    def end(self, group_id: str, ending: Ending) -> bool:
        """See the group's sessions to their end; False if they don't run here."""
        ...


class Controller:
    def __init__(
        self, ledger: Ledger, source: Source | None, *, group_size: int, custom: CustomRule | None = None
    ) -> None:
        """
        Args:
            custom: the function that `selection` names, where that is the user's own.
        """
        self.ledger = ledger
        self.book = ledger.book
        self.rules = ledger.rules
        self.custom = custom
        self.drawing = Drawing(ledger, source, group_size=group_size)
        self.admission = Admission(self, self.drawing)
        self.runner: Runner | None = None
        self.admits = False
        """A rollout is running that may be given new prompts; else only refills and shortages are drawn."""
        self.abandoned = Abandoned(self)
        self.turn: object | None = None
        """The trainer's turn that is on: the engine generates nothing until it ends."""
        self.closing = False
        self.dead: BaseException | None = None
        """Why the rollout ended, once it died."""
        self.death_told = False
        self.waiters: dict[int, Waiter] = {}
        self.changed = Signal()
        self.watched: list[int] = []
        """Training groups that each `wait_sampleable` looks out for."""
        self.space: Space | None = None
        """Says when there is no room for more on the disk."""
        self.missing: dict[str, Missing] = {}
        self.damaged: dict[str, str] = {}
        """Groups of which a payload can't be read, with what is wrong."""
        self.wrong_answers: dict[int, CustomRuleError] = {}
        """What was wrong with the user's own rule, by the request for which it was asked."""
        self.streak = 0
        """Training groups evicted since the last one became sampleable."""
        self.streak_reasons: Counter[str] = Counter()
        self.last_failure: ev.SessionFailed | None = None
        """Of the failures that nobody asked for, the last."""
        self.progress_at_ns = ledger.clock_ns()
        self._unjudged: dict[str, None] = {}
        self._filled: dict[str, None] = {}
        """Groups that have all the sessions they need, while others are still open."""
        self._suspects: dict[str, None] = {}
        """Groups in flight of which something happened that may have doomed them."""
        self._aged = False
        self._aged_in_flight = False
        self._published = False
        self._settling = False
        self._stirred = True
        """Something has changed from which anything may follow, since the rules last looked."""
        ledger.observers.append(self._note)
        ledger.settle = self._follow

    @property
    def source(self) -> Source | None:
        return self.drawing.source

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Prompts of the groups in flight."""
        return self.drawing.prompts

    # What happened -----------------------------------------------------------------------------------

    def _note(self, record: ev.Record) -> None:
        event = record.event
        self.progress_at_ns = record.at_ns
        kind = type(event)
        if kind is ev.SessionStarted:
            return
        if kind is ev.SessionFinished:
            if self.book.groups[event.group_id].filled:  # type: ignore[union-attr]
                self._filled[event.group_id] = None  # type: ignore[union-attr]
                self._stirred = True
            return
        self._stirred = True
        if self.abandoned.groups:
            self.abandoned.note(event)
        if isinstance(event, _GROUP_ENDS):
            self._unjudged.pop(event.group_id, None)
            self._unjudged[event.group_id] = None
            self.prompts.pop(event.group_id, None)
        elif isinstance(event, _MAKES_SUSPECT):
            self._suspects[event.group_id] = None
            if isinstance(event, ev.GroupRequeued):
                # What can't be read is of the attempts before. Of a prompt it is found again.
                self.damaged.pop(event.group_id, None)
            elif isinstance(event, ev.SessionFailed) and not self._asked_for(event):
                self.last_failure = event
        elif isinstance(event, ev.GroupEvicted):
            self.missing.pop(event.group_id, None)
            self.damaged.pop(event.group_id, None)
        elif isinstance(event, _AGES):
            self._aged = self._aged_in_flight = True
            self._published |= isinstance(event, ev.WeightsPublished)

    def _asked_for(self, failed: ev.SessionFailed) -> bool:
        """It was ended from here; a session that gives up by a cancellation of its own was not."""
        return failed.failure == "spare" or (failed.failure == "cancelled" and failed.group_id in self.ledger.endings)

    def rejudge(self) -> None:
        """Put every terminal group before the rules again (after recovery)."""
        self._unjudged.update(
            dict.fromkeys(g.group_id for phase in sorted(TERMINAL) for g in self.book.in_phase(phase))
        )
        self._suspects.update(dict.fromkeys(g.group_id for g in self.book.in_phase(Phase.PENDING)))
        self._stirred = True

    def _follow(self) -> None:
        """A step of a session is recorded: do what follows from it.

        While its group needs further sessions nothing does: what the rules go by counts groups and their ends. A rule
        of the user's own may go by anything, and so may whoever says whether there is room.
        """
        if self._stirred or self.custom is not None or self.space is not None:
            self.settle()
        else:
            self.changed.set()

    def settle(self) -> None:
        """Do all that follows from the book under the rules."""
        if self._settling or isinstance(self.dead, LogFailed):
            return
        self._settling = True
        try:
            while any(
                (
                    self._end_early(),
                    self._evict(),
                    self.admission.forfeit(),
                    self.admission.refill(),
                    self.abandoned.clear(),
                    self._serve(),
                    self.admission.admit(),
                    self._refuse(),
                    self._starve(),
                )
            ):
                pass
            self._stirred = False
        finally:
            self._settling = False
        self.changed.set()

    # What follows, one step each; True if something was recorded ---------------------------------------

    def _end_early(self) -> bool:
        """End the sessions that nobody needs: of groups that are full, and of groups that are doomed."""
        if not (self._filled or self._suspects or self._aged_in_flight):
            return False
        before = self.book.last_seq
        filled, suspects = list(self._filled), list(self._suspects)
        self._filled.clear()
        self._suspects.clear()
        for group_id in filled:
            if (group := self.book.groups.get(group_id)) is not None and group.in_flight:
                self.end(group_id, SPARE)
        if self.rules.cancel_doomed:
            doomed = dict.fromkeys(group_id for group_id in suspects if self._is_doomed(group_id))
            if self._aged_in_flight:
                doomed.update(dict.fromkeys(group.group_id for group in doomed_by_age(self.book, self.rules)))
            groups = [self.book.groups[group_id] for group_id in doomed]
            for group in sorted(groups, key=lambda group: (group.aged_from, group.submitted_seq)):
                if group.group_id not in self.ledger.endings:
                    self.end(group.group_id, DOOMED)
        self._aged_in_flight = False
        return self.book.last_seq > before

    def _is_doomed(self, group_id: str) -> bool:
        group = self.book.groups.get(group_id)
        return group is not None and is_doomed(group, self.book.lag(group), self.rules)

    def end(self, group_id: str, ending: Ending) -> None:
        """Have the open sessions of a group ended, by whoever runs them."""
        if self.runner is None or not self.runner.end(group_id, ending):
            self.ledger.end(group_id, ending)

    def _evict(self) -> bool:
        if not (self._unjudged or self._aged):
            return False
        demand = self.demand()
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
        if judgement.kept and self.custom is None:
            self._end_streak()
        for evict in judgement.evictions:
            self._record_eviction(evict)
            if "damaged" not in evict.reasons:
                # A lost file takes many groups with it, and says nothing of tasks, rewards and sessions.
                self.streak += 1
                self.streak_reasons.update(evict.reasons)
        for requeue in judgement.requeues:
            seq = self.ledger.record(ev.GroupRequeued(requeue.group_id, requeue.reason, by_rule=True))
            log.info("failed group starts over", group=requeue.group_id, reason=requeue.reason, seq=seq)
        return bool(judgement.evictions or judgement.requeues)

    def _end_streak(self) -> None:
        """A group became sampleable. With a selection of the user's own that is known once it was selected."""
        self.streak = 0
        self.streak_reasons.clear()

    def _record_eviction(self, evict: Evict) -> None:
        metric = self.rules.filter_metric if evict.shared_value is not None else None
        seq = self.ledger.record(
            ev.GroupEvicted(
                evict.group_id, evict.reasons, evict.lag, evict.credit, evict.shared_value, metric or "", evict.message
            )
        )
        log.info(
            "group evicted",
            group=evict.group_id,
            reasons=evict.reasons,
            lag=evict.lag,
            credit=evict.credit,
            seq=seq,
        )

    def _starve(self) -> bool:
        if not self._published:
            return False
        self._published = False
        found = starving(self.book, self.rules)
        for starved in found:
            seq = self.ledger.record(ev.DatasetStarved(*attrs.astuple(starved)))
            log.warning(
                "no group of a dataset was sampled",
                dataset=starved.dataset,
                versions=starved.versions,
                open_groups=starved.open_groups,
                evicted=starved.evicted,
                seq=seq,
            )
        return bool(found)

    def _serve(self) -> bool:
        if self._must_judge_first():
            return True
        if not self.book.requests:
            return False
        served = False
        for partition in self.book.partitions():
            held = False
            for request in self.book.waiting(partition):
                takes_any = self.waiters[request.request].wanted is None
                if held and takes_any:
                    continue  # A later one doesn't overtake.
                if self._serve_one(request):
                    served = True
                if takes_any and request.request in self.book.requests:
                    held = True
        return served

    def _must_judge_first(self) -> bool:
        """A source is user code: one that ended a session or published a version while it was drawn from has changed
        the book since the rules last looked, and selection must see what eviction saw."""
        return bool(self._unjudged or self._aged) and not (self.rules.mode == "sync" and self.demand() is None)

    def _serve_one(self, request: OpenRequest) -> bool:
        if request.partition == ev.TRAIN and self.missing:
            return False
        waiter = self.waiters.get(request.request)
        assert waiter is not None, "a request without a waiter"
        if self.custom is not None and request.partition == ev.TRAIN:
            return self._serve_by_custom(self.custom, request, waiter)
        if why_not(self.book, self.rules, request) is not None or not waiter.may_be_served(self.book):
            return False
        reserved = self._reserved() if waiter.wanted is None else frozenset[str]()
        groups = selected(self.book, self.rules, request, wanted=waiter.wanted, reserved=reserved)
        if len(groups) < request.size:
            return False
        for evict in surplus(self.book, self.rules, request, groups):
            self._record_eviction(evict)
        self._claim(request, waiter, groups)
        return True

    def _reserved(self) -> frozenset[str]:
        """Groups that somebody waits for by name, or nobody any more."""
        awaited = (group_id for waiter in self.waiters.values() for group_id in waiter.wanted or ())
        return frozenset((*awaited, *self.abandoned.groups))

    def _serve_by_custom(self, custom: CustomRule, request: OpenRequest, waiter: Waiter) -> bool:
        """Ask the user's own rule; what it drops is evicted, what it selects is the batch."""
        if why_held(self.book, self.rules) or (self.rules.drains and self.book.in_flight_count()):
            return False
        answer = self._asked(custom, request)
        if answer is None:
            return False
        leaving = sum(has_rows(group) for group, _ in answer.drops)
        unmet = self.book.ready_count() - leaving < request.size
        for group, drop in answer.drops:
            credit = credit_of((drop.reason,), self.rules, unmet=unmet)
            self._record_eviction(
                Evict(group.group_id, (drop.reason,), self.book.lag(group), credit, message=cut(drop.message))
            )
            self.streak += 1
            self.streak_reasons[drop.reason] += 1
        if answer.selected:
            self._end_streak()
            self._claim(request, waiter, answer.selected)
        return bool(answer.drops or answer.selected)

    def _asked(self, custom: CustomRule, request: OpenRequest) -> Answer | None:
        """What the user's rule wants; None if that can't be done, which its sampler is told."""
        before = self.book.last_seq
        try:
            answer = checked(self.book, request, custom(self.book, self.rules, request))
            if self.book.last_seq > before:
                raise WrongAnswer("it changed the run while it was asked; a rule only looks at the book")
            return answer
        except WrongAnswer as error:
            text = f"selection {self.rules.selection!r} can't be followed: {error}; nothing was changed"
            wrong = CustomRuleError(text)
        except Exception as error:
            # It is user code: whatever it raises must reach whoever waits for its answer.
            wrong = CustomRuleError(f"selection {self.rules.selection!r} raised {describe(error)}")
            wrong.__cause__ = error
        log.error("the selection rule failed", selection=self.rules.selection, error=str(wrong))
        self.wrong_answers[request.request] = wrong
        return None

    def _claim(self, request: OpenRequest, waiter: Waiter, groups: Sequence[Group]) -> None:
        lags = tuple(self.book.lag(group) for group in groups)
        version = self.book.weight_version
        tally = batch_tally(request.partition, self.book.window(request.partition), groups, lags, version)
        ids = tuple(group.group_id for group in groups)
        batch = self.book.last_batch + 1
        seq = self.ledger.record(ev.BatchSampled(batch, request.request, request.partition, ids, version, lags))
        waiter.claim = Claim(batch, seq, tuple(groups), lags, version, tally)
        self._answer(waiter)

    def _refuse(self) -> bool:
        """Tell waiters whose batch can't come."""
        if not self.book.requests:
            return False
        refused = False
        for request in list(self.book.requests.values()):
            error = refusals.refusal(self, request)
            if error is not None:
                self.ledger.record(ev.BatchRequestCancelled(request.request, type(error).__name__))
                waiter = self.waiters[request.request]
                waiter.error = error
                self._answer(waiter)
                self.abandoned.add(waiter.wanted or ())
                refused = True
                if isinstance(error, EvictionStreak):
                    # It has been told. Whoever samples again means to go on.
                    self._end_streak()
        return refused

    def die(self, error: BaseException) -> None:
        """The rollout or the log is gone: tell everybody who waits."""
        if self.dead is None:
            self.dead = error
        if not isinstance(self.dead, LogFailed):
            self.settle()
            return
        # Nothing can be recorded any more, that they were told included.
        for waiter in list(self.waiters.values()):
            waiter.error = refusals.death(self)
            self._answer(waiter)
        self.changed.set()

    def _answer(self, waiter: Waiter) -> None:
        del self.waiters[waiter.request]
        waiter.answered.set()

    # Asked from outside ------------------------------------------------------------------------------

    def request(self, size: int, partition: ev.Partition, wanted: frozenset[str] | None = None) -> Waiter:
        """Open a `sample()`; the waiter may be answered before this returns.

        Args:
            wanted: the very groups to sample, for validation; None for whichever come first.
        """
        waiter = self._requested(size, partition, wanted)
        try:
            self.settle()
        except BaseException:
            # User code raised in the middle, or the log broke: whoever asked never gets to hold the waiter.
            try:
                self._take_back(waiter, "error")
            except LogFailed as error:
                self.waiters.pop(waiter.request, None)
                self.die(error)
            raise
        return waiter

    def _requested(self, size: int, partition: ev.Partition, wanted: frozenset[str] | None) -> Waiter:
        number = self.book.last_request + 1
        self.ledger.record(ev.BatchRequested(number, partition, size, self.book.weight_version))
        self.waiters[number] = Waiter(number, wanted)
        return self.waiters[number]

    def discard(self, ended: Sequence[Group]) -> None:
        """Let validation groups leave by a batch that nobody gets."""
        waiter = self._requested(len(ended), ev.VALIDATION, None)
        self._claim(self.book.requests[waiter.request], waiter, ended)
        assert waiter.claim is not None
        self.ledger.record(ev.BatchCommitted(waiter.claim.batch))

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
        self._stirred = True

    def fail_unreadable(self, group: Group, error: DamagedPayload) -> None:
        """A group whose prompt can't be read: nobody can run it, so it ends."""
        log.warning("the prompt can't be read, so the group fails", group=group.group_id, error=str(error))
        self.damaged[group.group_id] = str(error)
        self.ledger.end(group.group_id, Ending("error", describe(error)))

    def withdraw(self, waiter: Waiter, reason: str) -> None:
        """A sampler stopped waiting: what it had been given goes back. Why it stopped is not lost to a broken log."""
        try:
            self._withdraw(waiter, reason)
        except LogFailed as error:
            self.waiters.pop(waiter.request, None)
            self.die(error)

    def _withdraw(self, waiter: Waiter, reason: str) -> None:
        self._take_back(waiter, reason)
        # Before anybody else could be given them.
        self.abandoned.add(waiter.wanted or ())

    def _take_back(self, waiter: Waiter, reason: str) -> None:
        if waiter.claim is not None:
            if waiter.claim.batch in self.book.batches:
                self.ledger.record(ev.BatchReturned(waiter.claim.batch, "cancelled"))
        elif waiter.error is None:
            del self.waiters[waiter.request]
            self.ledger.record(ev.BatchRequestCancelled(waiter.request, reason))

    def sampleable_count(self, partition: ev.Partition) -> int:
        """Groups that could be sampled now; one that lacks the filter's metric can't."""
        lacking = [self.book.groups[group_id] for group_id in self.missing]
        missing = sum(group.partition == partition and is_for_now(self.book, self.rules, group) for group in lacking)
        return max(0, ready_for(self.book, self.rules, partition) - missing)

    def demand(self) -> int | None:
        request = self._oldest(ev.TRAIN)
        return None if request is None else request.size

    def _oldest(self, partition: ev.Partition) -> OpenRequest | None:
        return next((r for r in self.book.requests.values() if r.partition == partition), None)
