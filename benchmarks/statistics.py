"""How many events a second one core counts for `groupstate stats`, read from segment files, and what it remembers.

Processor time is measured, and the best repetition counts. One variant has a trainer that always waits, as then each
event asks what it waits for. Memory is what the counting holds at its most, beside what Python allocates for reading.
"""

import asyncio
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import stream
from benchmarks.measure import Measurement, Result, frozen_heap, interleaved
from benchmarks.replay import write
from groupstate.inspect.stats import stats
from groupstate.log.reading import read_log

RATE_MIN = 200_000.0


async def measure(folder: Path, *, groups: int = 6_400, repetitions: int = 9) -> Result:
    """
    Args:
        groups: that the run took to their commit, but for the last few batches.
    """
    with TemporaryDirectory(dir=folder) as place:
        runs = {"trainer busy": Path(place) / "busy", "trainer always waits": Path(place) / "waits"}
        counts = {}
        for name, run in runs.items():
            records = list(stream.records(stream.run(groups, asked=name != "trainer busy")))
            counts[name] = len(records)
            await asyncio.to_thread(write, run, records)
        del records
        with frozen_heap():
            variants = {name: _per_event(_counting(run), counts[name]) for name, run in runs.items()}
            spreads = await interleaved(variants, repetitions)
        peak = _peak_bytes(_counting(runs["trainer always waits"]))
    best = {name: min(spread.values) for name, spread in spreads.items()}
    rates = ", ".join(f"{name} {1 / seconds:,.0f}" for name, seconds in best.items())
    notes = [
        f"{counts['trainer busy']:,} events; events a second, best repetition: {rates}",
        f"held at the most, a segment being read included: {peak / 2**20:.1f} MiB",
    ]
    rate = 1 / max(best.values())
    return Result("stats, processor time per event", spreads, rate, RATE_MIN, "events a second", notes, least=True)


def _counting(run: Path) -> Callable[[], object]:
    return lambda: stats(read_log(run))


def _per_event(work: Callable[[], object], count: int) -> Measurement:
    async def measured() -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) / count

    return measured


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
