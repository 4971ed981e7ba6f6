"""What `sample(64)` costs, by how many groups are sampleable.

Each repetition claims the 64 oldest groups and gives them back. The log is in memory, and `lag_max` is set, so
that the look for stale groups is part of it.
"""

import time

from benchmarks.measure import Measurement, Result, frozen_heap, interleaved, ratio_of_pairs
from groupstate import Rules, Run, open_run
from groupstate.core import events as ev

BATCH_SIZE = 64
RATIO_MAX = 2.0

ROW = ev.TrajectoryRecord(0, {"reward": 1.0}, 100, 400, (ev.VersionSpan(0, 400, 0),))


async def measure(
    *, small: int = 1_000, large: int = 100_000, batch_size: int = BATCH_SIZE, repetitions: int = 51
) -> Result:
    """
    Args:
        small: sampleable groups of the one run.
        large: of the other.
    """
    rules = Rules(lag_max=4, filter_metric="reward", on_singleton="keep")
    async with open_run(rules=rules) as few, open_run(rules=rules) as many:
        load(few, small)
        load(many, large)
        with frozen_heap():
            variants = {
                f"{small:,} sampleable": _sample(few, batch_size),
                f"{large:,} sampleable": _sample(many, batch_size),
            }
            for variant in variants.values():
                await variant()
            spreads = await interleaved(variants, repetitions)
        assert (few.sampleable_count(), many.sampleable_count()) == (small, large)
    ratio, text = ratio_of_pairs(*spreads.values())
    return Result(f"sample({batch_size})", spreads, ratio, RATIO_MAX, "times", [text])


def load(run: Run, count: int) -> None:
    """Sampleable groups of one session each."""
    for number in range(count):
        name = f"g{number}"
        run.ledger.record(ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit"))
        run.ledger.record(ev.SessionStarted(name, 0, 1))
        run.ledger.record(ev.SessionFinished(name, 0, 1, (ROW,)))
    run.ledger.settle()


def _sample(run: Run, batch_size: int) -> Measurement:
    async def measured() -> float:
        begin = time.perf_counter()
        batch = await run.sample(batch_size)
        spent = time.perf_counter() - begin
        await run.release(batch)
        return spent

    return measured
