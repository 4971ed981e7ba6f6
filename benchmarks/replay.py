"""How many events a second one core replays: read from segment files, checked, decoded, and applied to a book.

Processor time is measured, since the machine may have other work; and the best repetition counts, since others only
make it slower. Reading alone and applying alone are measured in turn with the whole.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import stream
from benchmarks.measure import Measurement, Result, frozen_heap, interleaved
from groupstate.core.events import Record
from groupstate.core.folding import replayed
from groupstate.log.file import FileLog
from groupstate.log.reading import read_log

RATE_MIN = 250_000.0
COMMIT = 64
"""Events in a commit."""


async def measure(folder: Path, *, groups: int = 6_400, repetitions: int = 11) -> Result:
    """
    Args:
        groups: that the run took to their commit, but for the last few batches.
    """
    records = list(stream.records(stream.run(groups)))
    with TemporaryDirectory(dir=folder) as place:
        run = Path(place) / "run"
        await asyncio.to_thread(write, run, records)
        size = sum(file.stat().st_size for file in (run / "log").glob("*.seg")) / len(records)
        with frozen_heap():
            variants = {
                "read and decoded": _per_event(lambda: sum(1 for _ in read_log(run)), len(records)),
                "applied": _per_event(lambda: replayed(records), len(records)),
                "replayed": _per_event(lambda: replayed(read_log(run)), len(records)),
            }
            spreads = await interleaved(variants, repetitions)
    best = {name: min(spread.values) for name, spread in spreads.items()}
    rates = ", ".join(f"{name} {1 / seconds:,.0f}" for name, seconds in best.items())
    notes = [f"{len(records):,} events of {size:.0f} bytes", f"events a second, best repetition: {rates}"]
    return Result(
        "replay, processor time per event",
        spreads,
        1 / best["replayed"],
        RATE_MIN,
        "events a second",
        notes,
        least=True,
    )


def write(run: Path, records: Iterable[Record]) -> int:
    """A log in files with these records, in commits of many; gives how many there were."""
    log = FileLog.create(run, inline=True, durability="os")
    source, count = iter(records), 0
    while some := list(islice(source, COMMIT)):
        log.post(some)
        count += len(some)
    asyncio.run(log.aclose())
    return count


def _per_event(work: Callable[[], object], count: int) -> Measurement:
    async def measured() -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) / count

    return measured
