"""Runs that hold many groups: the book, the rules and a source, without a rollout.

The log is in memory. Of ten training groups two are pending, three are running with half of their sessions ended,
and five are sampleable. The lag bound is so far away that only groups that are submitted with an old version turn
stale; the rest stay what they are, however many versions are published.
"""

from collections.abc import Callable, Iterable
from typing import Final

import attrs

from groupstate.core import events as ev
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules
from groupstate.log.memory import MemoryLog
from groupstate.runtime import recovery
from groupstate.runtime.controller import Controller
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.sources import FunctionSource

SESSIONS: Final = 8
VERSION: Final = 1_000_000
LAG_MAX: Final = VERSION - 10
OF_LATE: Final = 4
"""Weight versions that the groups which stay are spread over."""
RULES: Final = Rules(lag_max=LAG_MAX, filter_metric="reward", eviction_streak_max=10**9)
"""The streak's bound is out of the way, since a benchmark evicts a thousand groups in a row and refills each."""

Rewards = Callable[[int], float]
"""Session -> its reward."""


def varied(session: int) -> float:
    return float(session % 2)


def flat(session: int) -> float:
    return 1.0


def _ended(group_id: str, session: int, rewards: Rewards) -> ev.SessionFinished:
    row = ev.TrajectoryRecord(0, {"reward": rewards(session)}, 100, 400, (ev.VersionSpan(0, 400, VERSION),))
    return ev.SessionFinished(group_id, session, 1, (row,))


@attrs.define(eq=False)
class Held:
    controller: Controller
    drawn: list[str] = attrs.field(factory=list)
    """Groups that the rules drew from the source, since `refilled` was last asked."""
    _made: int = 0

    @property
    def ledger(self) -> Ledger:
        return self.controller.ledger

    def submitted(self, count: int, *, lag: int = 0) -> list[str]:
        """New pending groups, submitted with a version that has this lag."""
        names = [f"new{self._made + number}" for number in range(count)]
        self._made += count
        version = self.ledger.book.weight_version - lag
        for name in names:
            self.ledger.record(ev.GroupSubmitted(name, SESSIONS, ev.TRAIN, version, 1, "submit"))
        return names

    def refilled(self) -> list[str]:
        """The pending groups that took the places of evicted ones since this was last asked."""
        names, self.drawn[:] = list(self.drawn), []
        return names

    def all_but_last(self, names: Iterable[str], rewards: Rewards) -> list[ev.SessionFinished]:
        """Take pending groups to where one session is open; gives the events that end it."""
        ends = []
        for name in names:
            for session in range(SESSIONS):
                self.ledger.record(ev.SessionStarted(name, session, 1))
            for session in range(SESSIONS - 1):
                self.ledger.record(_ended(name, session, rewards))
            ends.append(_ended(name, SESSIONS - 1, rewards))
        return ends

    def leave(self, names: Iterable[str]) -> None:
        """Take groups out, pending or terminal ones, so that nothing is drawn for them."""
        for name in names:
            if self.ledger.book.group(name).in_flight:
                for session in range(SESSIONS):
                    self.ledger.record(ev.SessionFailed(name, session, 1, "cancelled", ""))
            self.ledger.record(ev.GroupEvicted(name, ("surplus",), 0, 0))
        self.ledger.settle()


def held(count: int, rules: Rules = RULES) -> Held:
    """A run that holds `count` training groups and may draw prompts as it needs them."""
    drawn: list[str] = []

    def prompt(position: int) -> Prompt:
        drawn.append(f"drawn{position}")
        return Prompt("a prompt of some forty characters or so", group_id=drawn[-1])

    ledger = Ledger(MemoryLog(), rules)
    controller = Controller(ledger, FunctionSource(prompt), group_size=SESSIONS)
    controller.admits = True
    recovery.start(ledger, run_id="benchmark", weight_version=VERSION, seed=0)
    for number in range(count):
        _load(ledger, number)
    controller.settle()
    drawn.clear()
    assert len(ledger.book.groups) == count
    return Held(controller, drawn)


def _load(ledger: Ledger, number: int) -> None:
    name, place = f"held{number}", number % 10
    ledger.record(ev.GroupSubmitted(name, SESSIONS, ev.TRAIN, VERSION - number % OF_LATE, 1, "submit"))
    if place < 2:
        return
    for session in range(SESSIONS):
        ledger.record(ev.SessionStarted(name, session, 1))
    for session in range(SESSIONS // 2 if place < 5 else SESSIONS):
        ledger.record(_ended(name, session, varied))
