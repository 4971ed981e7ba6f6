"""Random runs, told to the real rules and to the plain model, and compared after every thing that happens.

Rule: a scene is two lists of numbers, one for the settings and one for the steps; a lower number stands for a plainer
choice, and a shorter list for a shorter run. So a scene shrinks by itself.
"""

from collections.abc import Sequence
from typing import Any

from groupstate.core import events as ev
from groupstate.core.explain import explain
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules
from groupstate.core.trajectory import Trajectory
from groupstate.log.memory import MemoryLog
from groupstate.runtime import recovery
from groupstate.runtime.controller import Controller, Waiter
from groupstate.runtime.deadlines import Deadlines
from groupstate.runtime.ledger import CANCELLED, Ledger
from groupstate.testing.plain.model import Model
from groupstate.testing.plain.run import Group, Row
from groupstate.testing.plain.settings import METRIC, Tape, prompts_of, rules_of, source_of
from groupstate.testing.plain.told import difference, told

STEP_MAX = 2**24 - 1
"""The highest number of a step. Hypothesis draws higher ones less evenly."""

GROUPS_MAX = 40
"""Groups that are submitted at most in a scene, refills and admitted ones not counted."""


# Both sides ------------------------------------------------------------------------------------------


class Scene:
    """A run on both sides. Each method is one thing from outside, done to both and then compared."""

    def __init__(self, settings: Sequence[int]) -> None:
        rules = rules_of(settings)
        self.possible = rules is not None
        self.rules = rules or Rules()
        self.now = 0.0
        self.log = MemoryLog()
        self.waiters: dict[int, Waiter] = {}
        self.compared = 0
        group_size = 2 + settings[-1] % 2
        self.model = Model(self.rules, prompts_of(settings[-4:-1]), group_size=group_size)
        self.prompts, self.group_size = prompts_of(settings[-4:-1]), group_size
        self._open()
        recovery.start(self.ledger, run_id="scene", weight_version=0, seed=0)
        self.compared = 1
        self.admit(settings[-1] // 2 % 3 > 0)

    def _open(self) -> None:
        self.ledger = Ledger(self.log, self.rules, clock_ns=lambda: self.log.last_seq * 1_000)
        recovery.load(self.ledger)
        self.controller = Controller(self.ledger, source_of(self.prompts), group_size=self.group_size)
        self.deadlines = Deadlines(self.controller, now=lambda: self.now)

    def compare(self) -> None:
        records = list(self.log.read(self.compared + 1))
        self.compared += len(records)
        real, plain = [told(record.event) for record in records], self.model.said()
        assert real == plain, difference(real, plain)
        self.check_waiters()

    def check_waiters(self) -> None:
        """Nobody waits for what can't come: with a source, whoever waits has something in flight to wait for;
        without one, and for validation, the explanation says what he waits for."""
        book = self.ledger.book
        assert {request.number for request in self.model.requests} == set(book.requests) == set(self.controller.waiters)
        for partition in sorted({request.partition for request in book.requests.values()}):
            if partition == "train" and self.prompts is not None:
                assert book.in_flight_count(), f"{book.waiting()} wait, and nothing is under way"
            else:
                explained = explain(
                    book,
                    self.rules,
                    partition=partition,
                    now_ns=0,
                    has_source=self.prompts is not None,
                    dispatches=False,
                )
                assert explained.blocked_by
                assert explained.unblocked_by

    def check_log(self) -> None:
        records = list(self.log.read())
        assert violations(records) == []
        assert replayed(records).state() == self.ledger.book.state()

    # From outside

    def submit(self, n: int, partition: str, dataset: str, stamp: int | None, target: int | None) -> None:
        prompt = Prompt(None, dataset, n)
        self.controller.drawing.submit(prompt, partition=partition, weight_version=stamp, target_version=target)
        self.controller.settle()
        self.model.submit(n, partition=partition, dataset=dataset, stamp=stamp, target=target)
        self.compare()

    def start(self, g: Group, number: int, version: int | None) -> None:
        self.ledger.start(g.name, number, version=version)
        self.model.start(g.name, number, version)
        self.compare()

    def finish(self, g: Group, number: int, rows: list[Row]) -> None:
        self.ledger.finish(g.name, number, None, [_trajectory(row) for row in rows])
        self.model.finish(g.name, number, rows)
        self.compare()

    def fail(self, g: Group, number: int, kind: Any, *, retryable: bool) -> None:
        self.ledger.fail(g.name, number, None, kind, retryable=retryable)
        self.model.fail(g.name, number, kind, retryable=retryable)
        self.compare()

    def cancel(self, name: str) -> None:
        self.controller.end(name, CANCELLED)
        self.model.cancel(name)
        self.compare()

    def requeue(self, name: str) -> None:
        self.ledger.record(ev.GroupRequeued(name))
        self.ledger.settle()
        self.model.requeue(name)
        self.compare()

    def publish(self, version: int) -> None:
        self.ledger.publish(version)
        self.model.publish(version)
        self.compare()

    def admit(self, admits: bool) -> None:
        self.controller.admits = admits
        self.controller.settle()
        self.model.admit(admits)
        self.compare()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.deadlines.expire()
        self.model.wait(seconds)
        self.compare()

    def sample(self, size: int, partition: str) -> None:
        waiter = self.controller.request(size, partition)
        self.waiters[waiter.request] = waiter
        self.model.sample(size, partition)
        self.compare()

    def withdraw(self, request: int) -> None:
        self.controller.withdraw(self.waiters[request], "told so")
        self.model.withdraw(request)
        self.compare()

    def undelivered(self, batch: int, damaged: tuple[str, ...]) -> None:
        """A batch comes back that its sampler never got: he was cancelled, or payloads can't be read."""
        waiter = next(w for w in self.waiters.values() if w.claim is not None and w.claim.batch == batch)
        if damaged and waiter.claim is not None:
            self.controller.give_back_damaged(waiter.claim, dict.fromkeys(damaged, "told so"))
        else:
            self.controller.withdraw(waiter, "told so")
        self.model.give_back(batch, "damaged" if damaged else "cancelled", damaged)
        self.compare()

    def commit(self, batch: int) -> None:
        self.ledger.record(ev.BatchCommitted(batch))
        self.ledger.settle()
        self.model.commit(batch)
        self.compare()

    def release(self, batch: int) -> None:
        self.ledger.record(ev.BatchReturned(batch, "released"))
        self.ledger.settle()
        self.model.give_back(batch, "released")
        self.compare()

    def recover(self, version: int) -> None:
        admits = self.controller.admits
        self._open()
        recovery.recover(self.ledger, torn_bytes=0, weight_version=version)
        self.controller.admits = admits
        self.controller.rejudge()
        self.controller.drawing.seek()
        self.controller.settle()
        self.model.recover(version)
        self.compare()


def _trajectory(row: Row) -> Trajectory:
    spans = [ev.VersionSpan(i, i + 1, version) for i, version in enumerate(row.versions)]
    return Trajectory(response_ids=[1] * len(spans), spans=spans, metrics=row.metrics)


# Steps -----------------------------------------------------------------------------------------------


def step(scene: Scene, number: int) -> None:
    """One thing that happens, or a few; nothing if what was chosen can't happen now."""
    tape = Tape(number)
    tape.one_of(_STEPS)(scene, tape)


def _submit(scene: Scene, tape: Tape) -> None:
    model = scene.model
    if len(model.groups) >= GROUPS_MAX:
        return
    n = tape.one_of([2, 1, 3])
    partition = tape.one_of(["train", "train", "train", "val"])
    dataset = tape.one_of(["", "math", "code"])
    stamp = tape.one_of([None, None, None, max(0, model.version - 2), model.version + 1])
    exact = scene.rules.selection == "exact_version" and partition == "train"
    target = tape.one_of([None, None, model.version, model.version + 1]) if exact else None
    scene.submit(n, partition, dataset, stamp, target)


def _flying(scene: Scene, tape: Tape) -> Group | None:
    groups = [g for g in scene.model.groups.values() if g.in_flight]
    return tape.one_of(groups) if groups else None


def _one_session(scene: Scene, tape: Tape) -> None:
    g = _flying(scene, tape)
    if g is not None:
        number = tape.one_of([i for i, s in enumerate(g.sessions) if s.state in ("waiting", "open")])
        _go_on(scene, tape, g, number, tape.upto(4))


def _start_all(scene: Scene, tape: Tape) -> None:
    g = _flying(scene, tape)
    if g is not None:
        version = tape.one_of([None, scene.model.version])
        for number in range(len(g.sessions)):
            if g.in_flight and g.sessions[number].state == "waiting":
                scene.start(g, number, version)


def _to_the_end(scene: Scene, tape: Tape) -> None:
    """A whole group, all alike or each session by itself."""
    g = _flying(scene, tape)
    if g is None:
        return
    outcome, seed = tape.upto(6), tape.number
    requeues = g.requeues
    for number in range(len(g.sessions)):
        own = Tape(seed if outcome < 4 else seed // (number + 1))
        for _ in range(3):
            if g.in_flight and g.requeues == requeues and g.sessions[number].state in ("waiting", "open"):
                if outcome == 0:
                    _end(scene, g, number, [Row({METRIC: number / 2})])
                else:
                    _go_on(scene, own, g, number, outcome if outcome < 3 else own.upto(4))


def _end(scene: Scene, g: Group, number: int, rows: list[Row]) -> None:
    if g.sessions[number].state == "waiting":
        scene.start(g, number, None)
    if g.sessions[number].state == "open":
        scene.finish(g, number, rows)


def _go_on(scene: Scene, tape: Tape, g: Group, number: int, outcome: int) -> None:
    if outcome == 2:
        scene.fail(g, number, tape.one_of(["error", "lost"]), retryable=tape.one_of([False, True]))
    elif outcome == 3 and tape.upto(3) == 0:
        _end(scene, g, number, [])
    elif g.sessions[number].state == "waiting" and tape.upto(3) == 2:
        scene.start(g, number, tape.one_of([None, scene.model.version]))
    else:
        _end(scene, g, number, _rows(scene, tape))


def _rows(scene: Scene, tape: Tape) -> list[Row]:
    rows = []
    for _ in range(1 + (tape.upto(4) == 3)):
        metrics = {METRIC: tape.one_of([1.0, 0.0, 0.5, 0.75])} if tape.upto(8) < 7 else {"other": 1.0}
        current = scene.model.version
        versions = tape.one_of([[], [], [current], [max(0, current - 1), current], [current + 1, current]])
        rows.append(Row(metrics, versions))
    return rows


def _sample(scene: Scene, tape: Tape) -> None:
    partition = tape.one_of(["train", "train", "train", "train", "val"])
    usual = scene.rules.batch_size or 2
    size = tape.one_of([usual, usual, 1, usual + 1])
    waiting = scene.model.waiting(partition)
    if partition == "train" and scene.rules.mode == "sync":
        if waiting:
            return
        size = min(size, scene.rules.batch_size or size)
    if len(waiting) < 3:
        scene.sample(size, partition)


def _withdraw(scene: Scene, tape: Tape) -> None:
    if scene.model.requests:
        scene.withdraw(tape.one_of(scene.model.requests).number)


def _commit(scene: Scene, tape: Tape) -> None:
    if scene.model.batches:
        scene.commit(tape.one_of(sorted(scene.model.batches)))


def _give_back(scene: Scene, tape: Tape) -> None:
    if not scene.model.batches:
        return
    batch = tape.one_of(sorted(scene.model.batches))
    partition, names, _ = scene.model.batches[batch]
    how = tape.upto(4)
    mine = any(w.claim is not None and w.claim.batch == batch for w in scene.waiters.values())
    if how < 2 or not mine:
        scene.release(batch)
    else:
        scene.undelivered(batch, (names[0],) if how == 3 and partition == "train" else ())


def _cancel(scene: Scene, tape: Tape) -> None:
    g = _flying(scene, tape)
    if g is not None:
        scene.cancel(g.name)


def _requeue(scene: Scene, tape: Tape) -> None:
    groups = [g for g in scene.model.groups.values() if g.phase in ("pending", "running", "failure")]
    if groups:
        scene.requeue(tape.one_of(groups).name)


def _publish(scene: Scene, tape: Tape) -> None:
    scene.publish(scene.model.version + tape.one_of([1, 1, 2, 0]))


def _wait(scene: Scene, tape: Tape) -> None:
    scene.wait(tape.one_of([3.0, 6.0, 1.0]))


def _recover(scene: Scene, tape: Tape) -> None:
    model = scene.model
    lower = 0 if scene.rules.selection == "exact_version" else min(1, model.version)
    scene.recover(model.version + tape.one_of([0, 1, -lower]))


def _admit(scene: Scene, tape: Tape) -> None:
    scene.admit(not scene.model.admits)


_STEPS = [
    *[_to_the_end] * 12,
    *[_submit] * 5,
    *[_sample] * 6,
    *[_one_session] * 7,
    *[_start_all] * 2,
    *[_publish] * 4,
    *[_commit] * 2,
    *[_give_back] * 2,
    _withdraw,
    _cancel,
    _requeue,
    _wait,
    _wait,
    _recover,
    _admit,
]


ROUNDS_MAX = 150
"""Times that everything in flight is finished, at the end of a scene, before whoever waits must have his answer."""


def finish_all(scene: Scene) -> None:
    """Everything in flight ends well, again and again: with a source, whoever waits for training gets an answer."""
    for _ in range(ROUNDS_MAX):
        flying = [g for g in scene.model.groups.values() if g.in_flight]
        if not flying:
            return
        for g in flying:
            for number in range(len(g.sessions)):
                if g.in_flight:
                    _end(scene, g, number, [Row({METRIC: float(number)})])
        if not scene.model.waiting() or scene.prompts is None:
            return
    assert not scene.model.waiting(), f"{scene.model.waiting()} wait though everything goes well"


def played(settings: Sequence[int], steps: Sequence[int]) -> list[ev.Record]:
    """Play a scene on both sides; returns what was recorded, nothing if the settings contradict each other."""
    scene = Scene(settings)
    if not scene.possible:
        return []
    for number in steps:
        step(scene, number)
    finish_all(scene)
    scene.check_log()
    return list(scene.log.read())
