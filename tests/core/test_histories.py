"""Random legal histories through the ledger, against a plain model that keeps everything the long way."""

from collections import Counter
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.core.trajectory import Trajectory
from groupstate.log.memory import MemoryLog
from groupstate.runtime import recovery
from groupstate.runtime.ledger import CANCELLED, Ledger

PARTITIONS = ["train", "val"]
DATA_SETS = ["", "math"]
BASES = ["dispatch", "first_token", "oldest_token", "newest_token"]


@attrs.define
class Told:
    """A group as the model knows it."""

    partition: str
    dataset: str
    version: int
    """What the order of sampling goes by, and what the lag counts from: kept apart below."""
    aged_from: int
    stamp: int
    order: int
    sessions: list[str]
    attempts: list[int]
    firsts: list[int]
    """The attempt of each session that the submission or the latest requeue made due."""
    rows: list[int]
    tokens: list[list[int]]
    phase: str = "pending"
    terminal: str = ""
    lag_when_sampled: int = 0
    kept_lag: int | None = None
    rewound_to: int | None = None
    ended_version: int = 0


class Model:
    """What should be, told by the commands and never by the book."""

    def __init__(self, basis: str, survivors_min: int | None) -> None:
        self.basis = basis
        self.survivors_min = survivors_min
        self.groups: dict[str, Told] = {}
        self.version = 0
        self.credits: list[tuple[int, str, str]] = []
        self.earned = self.spent = self.forfeited = self.fenced = 0
        self.batches: dict[int, list[str]] = {}
        self.marks: list[tuple[int, int]] = []
        """(mark, version), the kept ones."""
        self.commits: list[tuple[int, str]] = []
        """(marks there were, group), of the commits that a kept mark could undo."""
        self.mark_count = 0
        self.datasets: dict[str, Counter[str]] = {}

    def in_phase(self, *phases: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.phase in phases]

    def lag(self, name: str) -> int:
        group = self.groups[name]
        return max(0, self.version - group.aged_from) if group.kept_lag is None else group.kept_lag

    def ready(self, partition: str) -> list[str]:
        found = [
            name
            for name in self.in_phase("finished", "failure")
            if self.groups[name].partition == partition and (partition == "val" or sum(self.groups[name].rows))
        ]
        return sorted(found, key=lambda name: (self.groups[name].version, self.groups[name].order))

    def in_flight(self, partition: str) -> list[str]:
        found = [n for n in self.in_phase("pending", "running") if self.groups[n].partition == partition]
        return sorted(found, key=lambda name: (self.groups[name].aged_from, self.groups[name].order))

    def settle(self, name: str) -> None:
        """What the end of a session makes of its group."""
        group = self.groups[name]
        if not set(group.sessions) <= {"finished", "failed"}:
            return
        finished = group.sessions.count("finished")
        whole = finished == len(group.sessions)
        partial = self.survivors_min is not None and finished >= self.survivors_min
        group.phase = group.terminal = "finished" if whole or partial else "failure"
        group.ended_version = self.version
        used = [version for tokens in group.tokens for version in tokens]
        if self.basis != "dispatch" and used:
            firsts = [tokens[0] for tokens in group.tokens if tokens]
            group.version = {"first_token": min(firsts), "oldest_token": min(used), "newest_token": max(used)}[
                self.basis
            ]
            group.aged_from = group.version

    def requeue(self, name: str) -> None:
        group = self.groups[name]
        size = len(group.sessions)
        group.sessions = ["waiting"] * size
        group.attempts = [attempt + 1 for attempt in group.attempts]
        group.firsts = list(group.attempts)
        group.rows = [0] * size
        group.tokens = [[] for _ in range(size)]
        group.version = group.stamp
        group.aged_from = group.stamp if group.rewound_to is None else min(group.stamp, group.rewound_to)
        group.phase, group.terminal, group.kept_lag = "pending", "", None
        group.ended_version = 0

    def back(self, name: str) -> None:
        group = self.groups[name]
        group.phase = group.terminal
        group.kept_lag, group.lag_when_sampled = group.lag_when_sampled, 0


class History:
    """Commands drawn one by one, done to the ledger and told to the model, and compared after each event."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        basis = self.draw(st.sampled_from(BASES), "basis")
        survivors_min = self.draw(st.sampled_from([None, 1, 2]), "survivors_min")
        rules = Rules(basis=basis, survivors_min=survivors_min, attempts_max=2, empty_session="allow")  # type: ignore[arg-type]
        self.model = Model(basis, survivors_min)
        self.log = MemoryLog()
        self.ledger = Ledger(self.log, rules, clock_ns=lambda: self.log.last_seq * 1_000)
        self.second = Book()
        self.digests: list[str] = []
        self.ledger.observers.append(self.follow)
        recovery.start(self.ledger, run_id="history", weight_version=0, seed=0)

    @property
    def book(self) -> Book:
        return self.ledger.book

    def follow(self, record: ev.Record) -> None:
        """A second book, fed by the log alone, is the same after every event."""
        self.second.apply(record)
        self.second.released.clear()
        self.digests.append(self.book.digest())
        assert self.second.digest() == self.digests[-1]

    def one_of(self, names: list[str]) -> str:
        return self.draw(st.sampled_from(names), "group")

    # Commands: each is None where it can't be done now

    def submit(self) -> bool:
        if len(self.model.groups) >= 12:
            return False
        self._submit("submit", self.draw(st.integers(1, 3), "size"), self.draw(st.sampled_from(DATA_SETS)))
        return True

    def refill(self) -> bool:
        if not self.model.credits:
            return False
        size, dataset, _ = self.model.credits.pop(0)
        self.model.spent += 1
        self._submit("refill", size, dataset, partition="train")
        return True

    def _submit(self, cause: Any, size: int, dataset: str, partition: str | None = None) -> None:
        name = f"g{len(self.model.groups)}"
        partition = partition or self.draw(st.sampled_from(PARTITIONS), "partition")
        stamp = self.draw(st.integers(0, self.model.version + 1), "stamp")
        self.ledger.record(ev.GroupSubmitted(name, size, partition, stamp, self.book.lineage, cause, dataset))
        self.model.groups[name] = Told(
            partition, dataset, stamp, stamp, stamp, len(self.model.groups), ["waiting"] * size, [1] * size,
            [1] * size, [0] * size, [[] for _ in range(size)],
        )  # fmt: skip
        self.model.datasets.setdefault(dataset, Counter())["submitted"] += 1

    def _session(self, *states: str) -> tuple[str, int] | None:
        found = [
            (name, number)
            for name in self.model.in_phase("pending", "running")
            for number, state in enumerate(self.model.groups[name].sessions)
            if state in states
        ]
        return self.draw(st.sampled_from(found), "session") if found else None

    def start(self) -> bool:
        found = self._session("waiting")
        if found is None:
            return False
        name, number = found
        group = self.model.groups[name]
        assert self.ledger.start(name, number) == group.attempts[number]
        group.sessions[number], group.phase = "open", "running"
        return True

    def finish(self) -> bool:
        found = self._session("open")
        if found is None:
            return False
        name, number = found
        versions = self.draw(st.lists(st.integers(0, 4), max_size=3), "versions")
        rows = self.draw(st.integers(0, 2), "rows")
        result = [
            Trajectory(
                response_ids=[1] * len(versions),
                spans=[ev.VersionSpan(i, i + 1, version) for i, version in enumerate(versions)],
                reward=float(index),
            )
            for index in range(rows)
        ]
        assert self.ledger.finish(name, number, None, result) is None
        group = self.model.groups[name]
        group.sessions[number], group.rows[number] = "finished", rows
        group.tokens[number] = versions if rows else []
        self.model.settle(name)
        return True

    def fail(self) -> bool:
        found = self._session("open", "waiting")
        if found is None:
            return False
        name, number = found
        group = self.model.groups[name]
        retryable = self.draw(st.booleans(), "retryable")
        again = retryable and group.attempts[number] == group.firsts[number]
        assert self.ledger.fail(name, number, None, "error", retryable=retryable) is None
        if again:
            group.attempts[number] += 1
            group.sessions[number] = "waiting"
        else:
            group.sessions[number] = "failed"
            self.model.settle(name)
        return True

    def through(self) -> bool:
        """A whole group from its submission into a committed batch, so that such histories aren't rare."""
        if not self.submit():
            return False
        name = list(self.model.groups)[-1]
        group = self.model.groups[name]
        for number in range(len(group.sessions)):
            self.ledger.start(name, number)
            self.ledger.finish(name, number, None, Trajectory(reward=1.0))
            group.sessions[number], group.rows[number] = "finished", 1
            self.model.settle(name)
        return self.sample() and self.commit()

    def late(self) -> bool:
        """A result of an attempt that isn't open."""
        if not self.model.groups:
            return False
        name = self.one_of(list(self.model.groups))
        group = self.model.groups[name]
        live = group.phase not in ("evicted", "committed")
        attempt = self.draw(st.integers(1, 3), "attempt")
        number = self.draw(st.integers(0, len(group.sessions) - 1), "number")
        if live and group.attempts[number] == attempt and group.sessions[number] in ("open", "waiting"):
            return False
        assert self.ledger.finish(name, number, attempt, None) is not None
        self.model.fenced += 1
        return True

    def requeue(self) -> bool:
        names = self.model.in_phase("pending", "running", "failure")
        if not names:
            return False
        name = self.one_of(names)
        self.ledger.record(ev.GroupRequeued(name))
        self.model.requeue(name)
        return True

    def cancel(self) -> bool:
        names = self.model.in_phase("pending", "running")
        if not names:
            return False
        name = self.one_of(names)
        self.ledger.end(name, CANCELLED)
        group = self.model.groups[name]
        group.sessions = [state if state == "finished" else "failed" for state in group.sessions]
        survivors, self.model.survivors_min = self.model.survivors_min, None
        self.model.settle(name)
        self.model.survivors_min = survivors
        return True

    def evict(self) -> bool:
        names = self.model.in_phase("finished", "failure")
        if not names:
            return False
        name = self.one_of(names)
        credit = self.draw(st.integers(0, 2), "credit")
        group = self.model.groups[name]
        self.ledger.record(ev.GroupEvicted(name, ("stale",), self.model.lag(name), credit))
        group.phase = "evicted"
        self.model.earned += credit
        self.model.credits += [(len(group.sessions), group.dataset, name)] * credit
        self.model.datasets[group.dataset]["evicted"] += 1
        return True

    def forfeit(self) -> bool:
        if not self.model.credits:
            return False
        count = self.draw(st.integers(1, len(self.model.credits)), "count")
        self.ledger.record(ev.RefillForfeited(count, "told so"))
        del self.model.credits[-count:]
        self.model.forfeited += count
        return True

    def publish(self) -> bool:
        self.model.version += self.draw(st.integers(0, 2), "more")
        self.ledger.publish(self.model.version)
        return True

    def sample(self) -> bool:
        partition = self.draw(st.sampled_from(PARTITIONS), "partition")
        ready = self.model.ready(partition)
        if not ready:
            return False
        count = self.draw(st.integers(1, len(ready)), "count")
        names = ready[:count]
        lags = tuple(self.model.lag(name) for name in names)
        request, batch = self.book.last_request + 1, self.book.last_batch + 1
        self.ledger.record(ev.BatchRequested(request, partition, count, self.model.version))
        self.ledger.record(ev.BatchSampled(batch, request, partition, tuple(names), self.model.version, lags))
        self.model.batches[batch] = names
        for name, lag in zip(names, lags, strict=True):
            self.model.groups[name].phase = "sampled"
            self.model.groups[name].lag_when_sampled = lag
            self.model.datasets[self.model.groups[name].dataset]["sampled"] += 1
        return True

    def commit(self) -> bool:
        if not self.model.batches:
            return False
        batch = self.draw(st.sampled_from(sorted(self.model.batches)), "batch")
        self.ledger.record(ev.BatchCommitted(batch))
        for name in self.model.batches.pop(batch):
            self.model.groups[name].phase = "committed"
            self.model.commits.append((self.model.mark_count, name))
            self.model.datasets[self.model.groups[name].dataset]["committed"] += 1
        return True

    def release(self) -> bool:
        if not self.model.batches:
            return False
        self._release(self.draw(st.sampled_from(sorted(self.model.batches)), "batch"))
        return True

    def _release(self, batch: int) -> None:
        self.ledger.record(ev.BatchReturned(batch))
        for name in self.model.batches.pop(batch):
            self.model.back(name)

    def mark(self) -> bool:
        self.model.mark_count += 1
        number = self.model.mark_count
        self.ledger.record(ev.CheckpointMarked(number, self.model.version, self.book.lineage))
        self.model.marks = [*self.model.marks, (number, self.model.version)][-2:]
        return True

    def rewind(self) -> bool:
        if not self.model.marks:
            return False
        number, version = self.draw(st.sampled_from(self.model.marks), "mark")
        for batch in sorted(self.model.batches):
            self._release(batch)
        seq = next(mark.seq for mark in self.book.marks if mark.mark == number)
        self.ledger.record(ev.RunRewound(number, seq, version, self.book.lineage + 1))
        self.model.version = version
        self.model.marks = [mark for mark in self.model.marks if mark[0] <= number]
        undone = [name for marks, name in self.model.commits if marks >= number]
        self.model.commits = [(marks, name) for marks, name in self.model.commits if marks < number]
        self.model.mark_count = number
        for name, group in self.model.groups.items():
            live = group.phase not in ("evicted", "committed") or name in undone
            if live:
                group.ended_version = min(group.ended_version, version)
            if live and group.aged_from > version:
                group.aged_from = group.rewound_to = version
            if name in undone:
                self.model.back(name)
                self.model.datasets[group.dataset]["committed"] -= 1
        return True

    COMMANDS = (
        submit, submit, submit, refill, start, start, start, start, finish, finish, finish, finish, fail, late,
        requeue, cancel, evict, forfeit, publish, sample, sample, commit, release, mark, rewind,
        through, through, rewind,
    )  # fmt: skip

    # Comparing

    def compare(self) -> None:
        model, book = self.model, self.book
        live = {name: g.phase for name, g in model.groups.items() if g.phase not in ("evicted", "committed")}
        gone = {name: g.phase for name, g in model.groups.items() if g.phase in ("evicted", "committed")}
        assert {name: str(group.phase) for name, group in book.groups.items()} == live
        assert {name: str(phase) for name, phase in book.departed.items()} == gone
        for name in live:
            self.compare_group(model.groups[name], book.groups[name])
            assert book.lag(book.groups[name]) == model.lag(name)
        for partition in PARTITIONS:
            self.compare_indexes(partition)
        assert [attrs.astuple(credit)[:3] for credit in book.credits] == model.credits
        totals = book.totals
        counts = [totals["credit"], totals["refills"], totals["forfeited"], totals["fenced"]]
        assert counts == [model.earned, model.spent, model.forfeited, model.fenced]
        assert totals["credit"] == totals["refills"] + totals["forfeited"] + len(book.credits)
        for partition in PARTITIONS:
            here = [name for name, phase in gone.items() if model.groups[name].partition == partition]
            assert totals[f"committed/{partition}"] == sum(gone[name] == "committed" for name in here)
        assert totals["submitted"] == len(live) + totals["evicted"] + totals["committed"]
        assert {n: +c for n, c in book.datasets.items()} == {n: +c for n, c in model.datasets.items()}
        assert {n: list(b.group_ids) for n, b in book.batches.items()} == model.batches
        aside = {name for marks, name in model.commits if model.marks and marks >= model.marks[0][0]}
        assert set(book.aside) == aside

    def compare_group(self, told: Told, group: Group) -> None:
        assert [session.state for session in group.sessions] == told.sessions
        assert [session.attempt for session in group.sessions] == told.attempts
        assert [len(session.trajectories) for session in group.sessions] == told.rows
        assert group.finished_count == told.sessions.count("finished")
        assert group.settled_count == sum(state in ("finished", "failed") for state in told.sessions)
        assert group.trajectory_count == sum(told.rows)
        assert (group.version, group.aged_from, group.stamp) == (told.version, told.aged_from, told.stamp)
        assert group.ended_version == told.ended_version

    def compare_indexes(self, partition: str) -> None:
        model, book = self.model, self.book
        ready = model.ready(partition)
        assert [group.group_id for group in book.ready(partition)] == ready
        assert book.ready_count(partition) == len(ready)
        aging = [name for name in ready if model.groups[name].kept_lag is None]
        by_age = sorted(aging, key=lambda name: (model.groups[name].aged_from, model.groups[name].order))
        assert [group.group_id for groups in book.by_age(partition) for group in groups] == by_age
        in_flight = model.in_flight(partition)
        assert book.in_flight_count(partition) == len(in_flight)
        assert [group.group_id for groups in book.in_flight_by_age(partition) for group in groups] == in_flight
        for phase in Phase:
            if phase not in (Phase.EVICTED, Phase.COMMITTED):
                names = {n for n in model.in_phase(phase) if model.groups[n].partition == partition}
                assert {group.group_id for group in book.in_phase(phase, partition)} == names
                assert book.count(phase, partition=partition) == len(names)


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(st.data())
def test_the_book_agrees_with_a_plain_model_after_every_step(data: st.DataObject) -> None:
    history = History(data)
    for _ in range(data.draw(st.integers(5, 60), "steps")):
        command = data.draw(st.sampled_from(History.COMMANDS), "command")
        if command(history):
            history.compare()
    records = list(history.log.read())

    assert replayed(records).digest() == history.digests[-1]
    for count in range(0, len(records), 7):
        assert count == 0 or replayed(records[:count]).digest() == history.digests[count - 1]
