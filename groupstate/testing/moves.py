"""What can happen to a run, one method each, with choices as plain values: for random stories.

Rule 1: a move is possible if its `can_` says so, and then it can't be wrong.
Rule 2: a `pick` counts through what there is to choose from, over and over, so that every number is a choice and 0 the
plainest.
"""

from collections.abc import Sequence
from typing import TypeVar

from groupstate.core import events as ev
from groupstate.testing.plain.run import Group, Row
from groupstate.testing.twin import Twin

T = TypeVar("T")

GROUPS_MAX = 24
"""Groups that are submitted at most in a story, refills and admitted ones not counted."""

WAITERS_MAX = 3
"""Samplers that wait at once in a partition."""

LATE_MAX = 30
"""Late results to choose from."""


class Moves:
    def __init__(self, twin: Twin, *, values: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)) -> None:
        """
        Args:
            values: of the metric, for `end_well`.
        """
        self.twin = twin
        self.values = values
        self._submitted = 0

    # Groups and sessions -----------------------------------------------------------------------------

    def can_submit(self) -> bool:
        return self._alive and self._submitted < GROUPS_MAX

    def submit(self, size: int, partition: str = ev.TRAIN, dataset: str = "") -> None:
        self._submitted += 1
        self.twin.submit(f"g{self._submitted}", size, partition=partition, dataset=dataset)

    def can_start(self) -> bool:
        return self._alive and bool(self._with_waiting())

    def start(self, pick: int, alone: bool = False) -> None:
        """All sessions of a group that wait, or one."""
        group = nth(self._with_waiting(), pick)
        waiting = [number for number, session in enumerate(group.sessions) if session.state == "waiting"]
        if not alone and len(waiting) == len(group.sessions):
            self.twin.start(group.name)
        else:
            self.twin.start(group.name, waiting[0])

    def can_finish(self) -> bool:
        return self._alive and bool(self.twin.in_flight)

    def finish(self, pick: int, values: Sequence[float | Row | None], versions: Sequence[int] = ()) -> None:
        """One session, which is started if it waits.

        Args:
            values: of the metric, one for each trajectory, or a row; None for one that lacks it.
            versions: of the tokens of each, as steps from the current version.
        """
        group = nth(self.twin.in_flight, pick)
        number = self._unsettled(group)
        if group.sessions[number].state == "waiting":
            self.twin.start(group.name, number)
        if not self.twin.died and group.sessions[number].state == "open":
            current = self.twin.model.version
            used = [max(0, current + step) for step in versions]
            self.twin.finish(group.name, number, [self._row(value, used) for value in values])

    def _row(self, value: float | Row | None, versions: list[int]) -> Row:
        if isinstance(value, Row):
            return Row(value.metrics, versions[: value.tokens], value.tokens)
        return Row({"other": 1.0} if value is None else {self.twin.metric: value}, list(versions))

    def can_finish_group(self) -> bool:
        return self._alive and (bool(self.twin.in_flight) or self.can_submit())

    def finish_group(self, pick: int, values: Sequence[float | Row], partition: str = ev.TRAIN) -> None:
        """All of a group; a new one if none is in flight in the partition."""
        flying = [group for group in self.twin.in_flight if group.partition == partition]
        if not flying:
            if not self.can_submit():
                return
            self.submit(len(values), partition)
            if self.twin.died:
                return
            flying = [self.twin.model.groups[f"g{self._submitted}"]]
        self.twin.finish_group(nth(flying, pick).name, values)

    def fail(self, pick: int, kind: str, retryable: bool) -> None:
        group = nth(self.twin.in_flight, pick)
        self.twin.fail(group.name, self._unsettled(group), kind, retryable=retryable)

    def fail_group(self, pick: int) -> None:
        """All that hasn't settled of a group."""
        group = nth(self.twin.in_flight, pick)
        requeues = group.requeues
        for number in range(len(group.sessions)):
            if self.twin.died or not group.in_flight or group.requeues != requeues:
                return
            if group.sessions[number].state in ("waiting", "open"):
                self.twin.fail(group.name, number)

    def can_be_late(self) -> bool:
        return self._alive and bool(self._late())

    def late(self, pick: int) -> None:
        """A result of another attempt, the same once more, or one after the group's end."""
        self.twin.late(*nth(self._late(), pick))

    def cancel(self, pick: int) -> None:
        self.twin.cancel(nth(self.twin.in_flight, pick).name)

    def can_requeue(self) -> bool:
        return self._alive and bool(self.twin.named("pending", "running", "failure"))

    def requeue(self, pick: int) -> None:
        self.twin.requeue(nth(self.twin.named("pending", "running", "failure"), pick))

    # Weights, time, batches --------------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self._alive

    def publish(self, step: int) -> None:
        self.twin.publish(self.twin.model.version + step)

    def wait(self, seconds: float) -> None:
        self.twin.wait(seconds)

    def can_sample(self, partition: str = ev.TRAIN) -> bool:
        sync = partition == ev.TRAIN and self.twin.rules.mode == "sync"
        return self._alive and len(self.twin.model.waiting(partition)) < (1 if sync else WAITERS_MAX)

    def sample(self, size: int, partition: str = ev.TRAIN) -> None:
        if not self.can_sample(partition):
            return
        most = self.twin.rules.batch_size
        if partition == ev.TRAIN and self.twin.rules.mode == "sync" and most is not None:
            size = min(size, most)
        self.twin.sample(size, partition)

    def can_withdraw(self) -> bool:
        return self._alive and bool(self.twin.model.requests)

    def withdraw(self, pick: int) -> None:
        self.twin.withdraw(nth(self.twin.model.requests, pick).number)

    def has_batch(self) -> bool:
        return self._alive and bool(self.twin.model.batches)

    def commit(self, pick: int) -> None:
        self.twin.commit(nth(sorted(self.twin.model.batches), pick))

    def release(self, pick: int) -> None:
        self.twin.release(nth(sorted(self.twin.model.batches), pick))

    def can_be_undelivered(self) -> bool:
        return self._alive and bool(self._undelivered())

    def undelivered(self, pick: int) -> None:
        """A sampler is cancelled before he has the batch that was claimed for him."""
        self.twin.undelivered(nth(self._undelivered(), pick))

    # The process -------------------------------------------------------------------------------------

    def recover(self, step: int, dies: int | None = None) -> None:
        """The process dies, if it hasn't yet, and the run is opened again at another version of the trainer."""
        model = self.twin.model
        if step < 0 and (model.version + step < 0 or self.twin.rules.targets_versions):
            step = 0
        self.twin.recover(version=model.version + step if step else None, dies=dies)

    def can_recover(self) -> bool:
        return True

    def can_die(self) -> bool:
        return self._alive and self.twin.model.writes_left is None

    def die(self, writes: int) -> None:
        self.twin.dies(writes)

    # Choosing ----------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        return not self.twin.died

    def _with_waiting(self) -> list[Group]:
        return [group for group in self.twin.in_flight if group.count("waiting")]

    @staticmethod
    def _unsettled(group: Group) -> int:
        return next(at for at, session in enumerate(group.sessions) if session.state in ("waiting", "open"))

    def _late(self) -> list[tuple[str, int, int, str]]:
        """The groups that moved last come first."""
        model = self.twin.model
        found: list[tuple[str, int, int, str]] = []
        for group in sorted(model.groups.values(), key=lambda group: -group.came)[:LATE_MAX]:
            for number, session in enumerate(group.sessions[:2]):
                for attempt in (session.attempt, session.attempt - 1):
                    found += [
                        (group.name, number, attempt, result)
                        for result in ("finished", "failed", "started")
                        if attempt and model.why_late(group.name, number, attempt, result)
                    ]
        return found[:LATE_MAX]

    def _undelivered(self) -> list[int]:
        story = self.twin.story
        waiters = [] if story is None else story.waiters
        claimed = [waiter.claim.batch for waiter in waiters if waiter.claim is not None]
        return [batch for batch in claimed if batch in self.twin.model.batches]


def nth(options: Sequence[T], pick: int) -> T:
    return options[pick % len(options)]
