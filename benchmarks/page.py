"""The page of a run: what making it takes, and what watching a run takes from the run.

Report: from segment files to the tables and to the whole page, by the wall clock, since the verdict is the work of two
other processes; the best repetition counts, and the bound is for the page as it is made by default, with the verdict.

View: a run with its log in files goes as fast as it can, alone and while another process serves its page and a third
asks for what is new each second, as a browser does. What counts is what the run makes of it: events a second by the
wall clock, in turn, so that whatever else the machine does hits both.
"""

import asyncio
import json
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import stream
from benchmarks.measure import Measurement, Result, frozen_heap, interleaved, ratio_of_pairs
from benchmarks.replay import write
from groupstate import Rules, Run, SessionContext, Trajectory, open_run
from groupstate.inspect.report import Gathered
from groupstate.inspect.report_page import report
from groupstate.log.reading import read_log

RATE_MIN = 200_000.0
KEPT_MIN = 0.95
"""Of the run's events a second, while it is watched."""
ASK_S = 1.0


async def measure(folder: Path, *, groups: int = 88_000, repetitions: int = 3) -> Result:
    """
    Args:
        groups: of eight sessions; 18 events each, about.
    """
    with TemporaryDirectory(dir=folder) as place:
        run = Path(place) / "run"
        count = await asyncio.to_thread(write, run, stream.records(stream.run(groups)))
        with frozen_heap():
            variants = {
                "tables": _per_event(lambda: Gathered().feed(read_log(run)), count),
                "page without the verdict": _per_event(lambda: report(run, check=False).html(), count),
                "page": _per_event(lambda: report(run).html(), count),
            }
            spreads = await interleaved(variants, repetitions)
        size = len(report(run, check=False).html())
    best = {name: min(spread.values) for name, spread in spreads.items()}
    rates = ", ".join(f"{name} {1 / seconds:,.0f}" for name, seconds in best.items())
    notes = [
        f"{count:,} events; the page has {size / count:.1f} bytes an event",
        f"events a second, best repetition: {rates}",
    ]
    title = "report, per event"
    return Result(title, spreads, 1 / best["page"], RATE_MIN, "events a second", notes, least=True)


def _per_event(work: Callable[[], object], count: int) -> Measurement:
    async def measured() -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) / count

    return measured


# View -----------------------------------------------------------------------------------------------------


async def measure_view(folder: Path, *, batches: int = 60, repetitions: int = 15) -> Result:
    """
    Args:
        batches: of 16 groups of 8 sessions, that a repetition takes to their commit.
    """
    with TemporaryDirectory(dir=folder) as place:
        runs = _Runs(Path(place), batches)
        variants = {"alone": runs.alone, "watched": runs.watched}
        for warm_up in variants.values():
            await warm_up()
        spreads = await interleaved(variants, repetitions)
    figure, text = ratio_of_pairs(spreads["watched"], spreads["alone"])
    rates = ", ".join(f"{name} {1 / spread.median:,.0f}" for name, spread in spreads.items())
    spent = [statistics.median(runs.spent_us[watched]) for watched in (False, True)]
    notes = [
        text,
        f"{runs.events:,} events a repetition; events a second: {rates}",
        f"processor time of the run's own process: {spent[0]:.1f} us an event alone, {spent[1]:.1f} us watched",
    ]
    return Result(
        "a run watched by view, per event", spreads, figure, KEPT_MIN, "of the events of a run alone", notes, least=True
    )


async def _session(ctx: SessionContext) -> Trajectory:
    await asyncio.sleep(0)
    return Trajectory(reward=float(ctx.session), text="an answer of some words " * 8)


class _Runs:
    def __init__(self, folder: Path, batches: int) -> None:
        self._folder = folder
        self._batches = batches
        self._made = 0
        self._attached_s = 0.0
        """How long the run waited for who watches it, the last time."""
        self.events = 0
        """Of a repetition."""
        self.spent_us: dict[bool, list[float]] = {False: [], True: []}
        """Processor time of the run's process per event, alone and watched."""

    async def alone(self) -> float:
        async with self._run() as (run, _):
            await asyncio.sleep(self._attached_s)  # what the disk still does for the beginning is over in both
            return await self._timed(run, watched=False)

    async def watched(self) -> float:
        async with self._run() as (run, path):
            begin = time.perf_counter()
            async with _watched(path):
                self._attached_s = time.perf_counter() - begin
                return await self._timed(run, watched=True)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[tuple[Run, Path]]:
        self._made += 1
        path = self._folder / str(self._made)
        source = ({"prompt": f"what is {number} and {number}?"} for number in range(10**9))
        rules = Rules(batch_size=16, lag_max=4)
        async with open_run(path, rules=rules, source=source, session=_session, group_size=8) as run:
            await self._train(run, 2)
            yield run, path

    async def _timed(self, run: Run, *, watched: bool) -> float:
        begin, spent, first = time.perf_counter(), time.process_time(), run.ledger.book.last_seq
        await self._train(run, self._batches)
        self.events = run.ledger.book.last_seq - first
        self.spent_us[watched].append((time.process_time() - spent) / self.events * 1e6)
        return (time.perf_counter() - begin) / self.events

    async def _train(self, run: Run, batches: int) -> None:
        for _ in range(batches):
            batch = await run.sample(16)
            await run.publish_weights(batch.weight_version + 1)
            await run.commit(batch)


@asynccontextmanager
async def _watched(path: Path) -> AsyncIterator[None]:
    """A process that serves the run's page, and one that asks for it."""
    async with _process("-m", "groupstate", "view", str(path)) as view:
        address = (await view.readline()).decode().strip()
        async with _process("-m", "benchmarks.page", address) as asking:
            await asking.readline()  # it has its first answer
            yield


@asynccontextmanager
async def _process(*args: str) -> AsyncIterator[asyncio.StreamReader]:
    """A Python of its own while the block runs; gives what it prints."""
    process = await asyncio.create_subprocess_exec(sys.executable, *args, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.terminate()
        await process.communicate()


def ask(address: str) -> None:
    """Ask for what is new, again and again."""
    last, state = 0, -1
    while True:
        with urllib.request.urlopen(f"{address}data?after={last}&state={state}") as answer:
            data = answer.read()
        if data:
            raw = zlib.decompress(data)
            (length,) = struct.unpack("<I", raw[-4:])
            header = json.loads(raw[-4 - length : -4])
            last, state = header["last_seq"], header["state"]
        print(last, flush=True)
        time.sleep(ASK_S)


if __name__ == "__main__":
    ask(sys.argv[1])
