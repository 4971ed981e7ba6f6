"""How long after a group's last session a waiting `sample()` has its batch.

The clock starts before the last session's result is handed in and stops when `sample()` has returned. With the
log in files that takes flushes of the disk, which are counted and timed where they happen. A bare flush on the
same disk is measured in turn, to say what the disk alone takes.
"""

import asyncio
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Measurement, Result, Spread, interleaved
from groupstate import Batch, Run, Trajectory, open_run
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog

MEMORY_MAX_S = 1e-3
FLUSHES_MAX = 2.0
"""One for the session's payload and one for the events, the claim's among them. Their time is the disk's and the
rest is mostly threads that wait for a free core, so it is the number of flushes that is bounded."""

WRITE_BYTES = 512
"""About what a commit of a session's end appends to the log."""

SESSIONS = 8


class TimedDisk(OsDisk):
    """The real disk; counts flushes and the time in them."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[tuple[int, float]] = []
        """(flushes, seconds in them) between each `start` and `stop`."""
        self._flushes: list[float] = []

    def start(self) -> None:
        self._flushes = []

    def stop(self) -> None:
        self.measured.append((len(self._flushes), sum(self._flushes)))

    def fdatasync(self, fd: int) -> None:
        begin = time.perf_counter()
        super().fdatasync(fd)
        self._flushes.append(time.perf_counter() - begin)


async def measure_memory(*, repetitions: int = 201) -> Result:
    async with open_run() as run:
        spreads = await interleaved({"memory log": _latency(run)}, repetitions)
    return Result(
        "last session to sample(), log in memory", spreads, spreads["memory log"].median, MEMORY_MAX_S, "seconds"
    )


async def measure_file(folder: Path, *, repetitions: int = 101) -> Result:
    disk = TimedDisk()
    with TemporaryDirectory(dir=folder) as place:
        bare = BareFlush(Path(place) / "bare")
        async with open_run(log=FileLog.create(Path(place) / "run", disk=disk)) as run:
            variants = {"file log": _latency(run, disk), "one bare flush": bare.measured}
            spreads = await interleaved(variants, repetitions)
        bare.close()
    inside = Spread(tuple(spent for _, spent in disk.measured))
    outside = Spread(tuple(a - b for a, b in zip(spreads["file log"].values, inside.values, strict=True)))
    return Result(
        "last session to sample(), log in files",
        {**spreads, "in flushes": inside, "outside of flushes": outside},
        statistics.median(count for count, _ in disk.measured),
        FLUSHES_MAX,
        "flushes one after the other",
    )


def _latency(run: Run, disk: TimedDisk | None = None) -> Measurement:
    rows = [
        Trajectory(prompt_ids=range(100), response_ids=range(400), log_probs=[-0.5] * 400, reward=float(number % 2))
        for number in range(SESSIONS)
    ]

    async def measured() -> float:
        group = run.submit("a prompt of some forty characters or so", n=SESSIONS)
        attempts = [group.start(session) for session in range(SESSIONS)]
        for attempt, row in zip(attempts[:-1], rows, strict=False):
            attempt.finish(row)
        waiting = asyncio.ensure_future(_sampled(run))
        await asyncio.sleep(0)
        await run.ledger.log.durable(run.ledger.log.last_seq)
        if disk is not None:
            disk.start()
        begin = time.perf_counter()
        attempts[-1].finish(rows[-1])
        batch, end = await waiting
        if disk is not None:
            disk.stop()
        await run.commit(batch)
        return end - begin

    return measured


async def _sampled(run: Run) -> tuple[Batch, float]:
    batch = await run.sample(1)
    return batch, time.perf_counter()


class BareFlush:
    """Appends to a file of its own and flushes it."""

    def __init__(self, path: Path) -> None:
        self._disk = OsDisk()
        self._file = self._disk.open(str(path), create=True)
        self._offset = 0

    async def measured(self) -> float:
        begin = time.perf_counter()
        self._offset += self._disk.pwrite(self._file, bytes(WRITE_BYTES), self._offset)
        self._disk.fdatasync(self._file)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._disk.close(self._file)
