"""How many events a second one core makes into a trace, into tables, and into a copy for a bug report.

Read from segment files, made, and written to files. Processor time is measured, and the best repetition counts, as for
`replay`. The tables need pyarrow and are left out without it.
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import replay, stream
from benchmarks.measure import Measurement, Result, frozen_heap, interleaved
from groupstate.inspect.redact import redact
from groupstate.inspect.tables import write_tables
from groupstate.inspect.trace import write_trace
from groupstate.log.reading import read_log

RATE_MIN = 50_000.0
"""Of the slowest: a log of ten million events in some minutes."""


async def measure(folder: Path, *, groups: int = 3_200, repetitions: int = 7) -> Result:
    """
    Args:
        groups: that the run took to their commit, but for the last few batches.
    """
    records = list(stream.records(stream.run(groups)))
    count = len(records)
    with TemporaryDirectory(dir=folder) as place:
        run, out = Path(place) / "run", Path(place)
        await asyncio.to_thread(replay.write, run, records)
        del records
        variants: dict[str, Callable[[], object]] = {
            "trace": lambda: write_trace(read_log(run), out / "t.json", overwrite=True),
            "trace, lanes": lambda: write_trace(read_log(run), out / "l.json", tracks="lane", overwrite=True),
            "trace, packed": lambda: write_trace(read_log(run), out / "p.json.gz", tracks="lane", overwrite=True),
            "copy": lambda: redact(run, out / "copy", overwrite=True),
        }
        if importlib.util.find_spec("pyarrow") is not None:
            variants["tables"] = lambda: write_tables(read_log(run), out / "tables", overwrite=True)
        with frozen_heap():
            spreads = await interleaved({name: _per_event(work, count) for name, work in variants.items()}, repetitions)
        sizes = await asyncio.to_thread(_sizes, out, count)
    best = {name: min(spread.values) for name, spread in spreads.items()}
    rates = ", ".join(f"{name} {1 / seconds:,.0f}" for name, seconds in best.items())
    notes = [
        f"{count:,} events; bytes of a trace for each: {', '.join(sizes)}",
        f"events a second, best repetition: {rates}",
    ]
    figure = 1 / max(best.values())
    return Result("exports, processor time per event", spreads, figure, RATE_MIN, "events a second", notes, least=True)


def _sizes(folder: Path, count: int) -> list[str]:
    return [f"{file.name} {file.stat().st_size / count:.0f}" for file in sorted(folder.glob("*.json*"))]


def _per_event(work: Callable[[], object], count: int) -> Measurement:
    async def measured() -> float:
        begin = time.process_time()
        work()
        return (time.process_time() - begin) / count

    return measured
