"""What recording an event costs, by how many groups are live.

One repetition takes new groups of eight sessions through a whole life: submitted, each session started and
finished, the group finished, evicted. So the number of live groups stays what it is. The log is in memory:
what is measured is the ledger's checks, the encoding and the book.
"""

import itertools
import time
from collections.abc import Iterator

from benchmarks.measure import Measurement, Result, frozen_heap, interleaved, ratio_of_pairs
from groupstate import Rules
from groupstate.core import events as ev
from groupstate.log.memory import MemoryLog
from groupstate.runtime import recovery
from groupstate.runtime.ledger import Ledger

SESSIONS = 8
RATIO_MAX = 1.5

ROW = ev.TrajectoryRecord(0, {"reward": 1.0}, 100, 400, (ev.VersionSpan(0, 400, 0),))


async def measure(*, small: int = 1_000, large: int = 100_000, lives: int = 200, repetitions: int = 9) -> Result:
    """
    Args:
        small: live groups of the one ledger.
        large: of the other.
        lives: groups that a repetition takes through their lives.
    """
    ledgers = {f"{count:,} live groups": loaded(count) for count in (small, large)}
    with frozen_heap():
        variants = {name: _lives(ledger, lives) for name, ledger in ledgers.items()}
        for variant in variants.values():
            await variant()
        spreads = await interleaved(variants, repetitions)
    for count, ledger in zip((small, large), ledgers.values(), strict=True):
        assert len(ledger.book.groups) == count
    ratio, text = ratio_of_pairs(*spreads.values())
    return Result("record(), per event", spreads, ratio, RATIO_MAX, "times", [text])


def loaded(count: int) -> Ledger:
    """A ledger with live groups: of ten, four pending, two running, four finished."""
    ledger = Ledger(MemoryLog(), Rules())
    recovery.start(ledger, run_id="benchmark", weight_version=0, seed=0)
    for number in range(count):
        events_of_one = life(f"live{number}")
        events = {0: 1, 1: 1, 2: 1, 3: 1, 4: 1 + SESSIONS, 5: 1 + SESSIONS}.get(number % 10, 1 + 2 * SESSIONS)
        for event in itertools.islice(events_of_one, events):
            ledger.record(event)
    return ledger


def life(group_id: str) -> Iterator[ev.AnyEvent]:
    yield ev.GroupSubmitted(group_id, SESSIONS, ev.TRAIN, 0, 1, "submit")
    for session in range(SESSIONS):
        yield ev.SessionStarted(group_id, session, 1)
    for session in range(SESSIONS):
        yield ev.SessionFinished(group_id, session, 1, (ROW,))
    yield ev.GroupEvicted(group_id, ("zero_variance",), 0, 0)


def _lives(ledger: Ledger, count: int) -> Measurement:
    names = itertools.count()

    async def measured() -> float:
        events = [event for _ in range(count) for event in life(f"new{next(names)}")]
        first = ledger.book.last_seq
        begin = time.perf_counter()
        for event in events:
            ledger.record(event)
        spent = time.perf_counter() - begin
        return spent / (ledger.book.last_seq - first)

    return measured
