"""The rescan that the rules are compared with comes to their decisions, on random small books.

Asked two ways: of the book as it stands, all groups put before the rules; and beside a controller, which looks only
at what changed and must find all that a look at everything finds.
"""

import random
from collections import Counter
from typing import Any, get_args

import pytest

from benchmarks.rescan import rescan
from benchmarks.versus import by_indexes
from groupstate.core import events as ev
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots, recorded_rules
from groupstate.core.trajectory import Trajectory
from groupstate.errors import BadSettings
from groupstate.log.memory import MemoryLog
from groupstate.runtime import controller as controller_module
from groupstate.runtime import recovery
from groupstate.runtime.admission import Admission
from groupstate.runtime.controller import Controller, Waiter
from groupstate.runtime.ledger import CANCELLED, Ledger
from groupstate.runtime.sources import ListSource

SETTINGS: dict[str, list[Any]] = {
    "mode": ["async", "sync"],
    "batch_size": [None, 1, 2, 3],
    "lag_max": [None, 0, 1, 2],
    "on_stale": ["drop", "drop", "wait"],
    "basis": ["dispatch", "oldest_token"],
    "filter_metric": [None, "acc", "acc"],
    "per": ["session", "trajectory"],
    "tolerance": [0.0, 0.5],
    "on_singleton": ["keep", "evict"],
    "on_missing": ["error", "keep", "evict"],
    "failure": ["keep", "refill"],
    "empty": ["refill", "drop"],
    "empty_session": ["fail", "allow"],
    "survivors_min": [None, 1, 2],
    "admission": [None, PerBatch(warmup=2), Slots(n=3, ready_max=2), Capacity(lag_max=1)],
    "eviction_streak_max": [None, 1_000],
}
METRICS = [{"acc": 0.0}] * 4 + [{"acc": 0.4}] * 2 + [{"acc": 1.0}] * 2
COMMANDS = ["submit", "start", "end", "publish", "sample", "back", "give_up", "requeue", "withdraw", "mark", "rewind"]
HISTORIES = 80
WEIGHTS = [2, 6, 8, 1, 2, 2, 1, 1, 1, 1, 1]


class Watched(Controller):
    """Asks a rescan before each step of the rules and compares what they do."""

    found: Counter[str]
    """How often each kind of decision was compared."""

    def compare(self) -> None:
        assert rescan(self.book, self.rules, damaged=self.damaged) == by_indexes(self.book, self.rules, self.damaged)

    def settle(self) -> None:
        self.compare()
        super().settle()
        self.compare()
        after = rescan(self.book, self.rules, damaged=self.damaged)
        if self._judges():
            assert not after.evictions
            assert after.missing == frozenset(self.missing.values())
        if not self.missing:
            assert not after.picks

    def _judges(self) -> bool:
        """Sync mode judges nothing while nobody waits."""
        return self.rules.mode == "async" or bool(self.book.waiting())

    def _evict(self) -> bool:
        expected = rescan(self.book, self.rules, damaged=self.damaged)
        first, judges = self.book.last_seq + 1, self._judges()
        done = super()._evict()
        evicted = {
            (e.group_id, e.reasons, e.lag, e.credit, e.shared_value, e.message)
            for e in since(self.ledger, first, ev.GroupEvicted)
        }
        assert evicted == (
            {(e.group_id, e.reasons, e.lag, e.credit, e.shared_value, e.message) for e in expected.evictions}
            if judges
            else set()
        )
        self.found.update(reason for e in expected.evictions for reason in e.reasons)
        self.found["missing"] += len(expected.missing)
        return done

    def _serve(self) -> bool:
        self.compare()
        expected = rescan(self.book, self.rules)
        first = self.book.last_seq + 1
        done = super()._serve()
        served: dict[str, tuple[int, tuple[str, ...]]] = {}
        for event in since(self.ledger, first, ev.BatchSampled):
            served.setdefault(event.partition, (event.request, event.group_ids))
        if self.missing:
            assert ev.TRAIN not in served
            return done
        assert sorted(served.values()) == sorted((request, names) for request, names, _ in expected.picks)
        discarded = {e.group_id for e in since(self.ledger, first, ev.GroupEvicted)}
        assert discarded >= {name for _, _, rest in expected.picks for name in rest}
        self.found.update(served=len(served), surplus=len(discarded))
        return done


class WatchedAdmission(Admission):
    """The same of refills."""

    def __init__(self, controller: Watched) -> None:
        super().__init__(controller, controller.drawing)
        self.watched = controller

    def refill(self) -> bool:
        controller = self.watched
        expected = rescan(controller.book, controller.rules).refills
        may, first = self.may_draw(), controller.book.last_seq + 1
        done = super().refill()
        refills = [e for e in since(controller.ledger, first, ev.GroupSubmitted) if e.cause == "refill"]
        assert len(refills) == (expected if may else 0) or controller.book.source_exhausted
        controller.found["refills"] += len(refills)
        return done


def since(ledger: Ledger, first: int, kind: type[Any]) -> list[Any]:
    return [record.event for record in ledger.log.read(first) if isinstance(record.event, kind)]


class History:
    """A random run under random rules."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rules = self._rules()
        self.ledger = Ledger(MemoryLog(), self.rules)
        source = ListSource([f"prompt {number}" for number in range(self.random.choice([0, 5, 60]))])
        self.controller = Watched(self.ledger, source, group_size=2)
        self.controller.admission = WatchedAdmission(self.controller)
        self.controller.found = Counter()
        self.controller.admits = self.random.random() < 0.3
        self.waiters: list[Waiter] = []
        recovery.start(self.ledger, run_id="random", weight_version=0, seed=0)

    def _rules(self) -> Rules:
        while True:
            try:
                return recorded_rules({name: self.random.choice(values) for name, values in SETTINGS.items()})
            except BadSettings:
                continue

    def play(self, commands: int) -> Counter[str]:
        for _ in range(commands):
            (command,) = self.random.choices(COMMANDS, WEIGHTS)
            getattr(self, command)()
        return self.controller.found

    def _sessions(self, *states: str) -> list[tuple[str, int]]:
        return [
            (group.group_id, number)
            for group in self.ledger.book.groups.values()
            if group.in_flight
            for number, session in enumerate(group.sessions)
            if session.state in states
        ]

    def submit(self) -> None:
        partition = ev.VALIDATION if self.random.random() < 0.15 else ev.TRAIN
        stamp = max(0, self.ledger.book.weight_version + self.random.choice([-1, 0, 0, 1]))
        prompt = Prompt("prompt", n=self.random.randint(1, 3))
        self.controller.drawing.submit(prompt, partition=partition, weight_version=stamp)
        self.controller.settle()

    def start(self) -> None:
        for group_id, session in self._sessions("waiting")[: self.random.randint(1, 3)]:
            self.ledger.start(group_id, session)

    def end(self) -> None:
        for group_id, session in self._sessions("open")[: self.random.randint(1, 3)]:
            if self.random.random() < 0.15:
                self.ledger.fail(group_id, session, None, "error", "boom")
            else:
                rows = [self._row() for _ in range(self.random.choice([0, 1, 1, 1, 1, 2]))]
                self.ledger.finish(group_id, session, None, rows)

    def _row(self) -> Trajectory:
        versions = range(self.random.randint(0, 2))
        spans = [ev.VersionSpan(place, place + 1, self.ledger.book.weight_version - place) for place in versions]
        metrics = {"other": 1.0} if self.random.random() < 0.03 else self.random.choice(METRICS)
        if any(span.weight_version < 0 for span in spans):
            spans = []
        return Trajectory(response_ids=[1] * len(spans), spans=spans, metrics=metrics)

    def publish(self) -> None:
        self.ledger.publish(self.ledger.book.weight_version + self.random.randint(1, 2))

    def sample(self) -> None:
        partition = self.random.choice([ev.TRAIN, ev.TRAIN, ev.TRAIN, ev.VALIDATION])
        book = self.ledger.book
        if book.waiting(partition) and (self.rules.mode == "sync" or len(book.requests) > 2):
            return
        self.waiters.append(self.controller.request(self.random.randint(1, self.rules.batch_size or 3), partition))

    def back(self) -> None:
        claims = [w.claim for w in self.waiters if w.claim is not None and w.claim.batch in self.ledger.book.batches]
        if not claims:
            return
        claim = self.random.choice(claims)
        ending = self.random.choice(["commit", "commit", "return", "damaged"])
        if ending == "damaged" and claim.groups[0].partition == ev.TRAIN:
            self.controller.give_back_damaged(claim, {claim.groups[0].group_id: "bad bytes"})
            return
        self.ledger.record(
            ev.BatchCommitted(claim.batch) if ending == "commit" else ev.BatchReturned(claim.batch, "released")
        )
        self.controller.settle()

    def give_up(self) -> None:
        if found := self._sessions("waiting", "open"):
            self.ledger.end(self.random.choice(found)[0], CANCELLED)

    def requeue(self) -> None:
        if (found := self._sessions("waiting", "open")) and self.random.random() < 0.3:
            self.ledger.record(ev.GroupRequeued(self.random.choice(found)[0], "asked for"))
            self.controller.settle()

    def withdraw(self) -> None:
        waiting = [waiter for waiter in self.waiters if waiter.claim is None and waiter.error is None]
        if waiting and self.random.random() < 0.3:
            waiter = self.random.choice(waiting)
            self.waiters.remove(waiter)
            self.controller.withdraw(waiter, "tired")

    def mark(self) -> None:
        book = self.ledger.book
        self.ledger.record(ev.CheckpointMarked(book.last_mark + 1, book.weight_version, book.lineage))

    def rewind(self) -> None:
        """As opening a run again at a mark does it: who waited is gone, batches come back, commits are undone."""
        if not self.ledger.book.marks or self.random.random() < 0.7:
            return
        mark = self.random.choice(self.ledger.book.marks)
        resume_at = recovery.CheckpointMark(
            run_id="random", mark=mark.mark, seq=mark.seq, weight_version=mark.weight_version, lineage=mark.lineage
        )
        recovery.recover(self.ledger, torn_bytes=0, resume_at=resume_at)
        self.waiters.clear()
        self.controller.waiters.clear()
        self.controller.rejudge()
        self.controller.settle()


def test_a_rescan_decides_as_the_rules_do() -> None:
    found: Counter[str] = Counter()
    for seed in range(HISTORIES):
        found += History(seed).play(80)

    # The histories come to every kind of decision.
    kinds = {*get_args(ev.EvictReason), "missing", "refills", "served"} - {"custom"}
    assert {kind for kind in kinds if found[kind] < 5} == set()


def test_a_decision_that_is_missed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that doesn't look for stale groups doesn't pass."""
    monkeypatch.setattr(controller_module, "newly_stale", lambda book, rules: [])

    with pytest.raises(AssertionError):
        for seed in range(HISTORIES):
            History(seed).play(80)
