"""How many events a second become durable while many tasks each wait for their own.

Each producer hands in one event, waits until it is durable, and hands in the next. Six ways take the same events in
turn, on the same disk:

raw: the encoded events, one write and one `fdatasync` for as many as there are producers, in one thread, nobody waits.
raw, as the log: the same for the events of each of the log's commits.
bare: the least that asyncio and a thread can do: a future and the ready bytes per event, one write and one flush for
what has gathered. It checks, encodes and numbers nothing.
log: `post` and `durable` of a `FileLog`, records made beforehand.
ledger: `record` and `durable`: checks, the book and the rules' bookkeeping are in it.
SQLite: one row per event in a transaction per commit (WAL, synchronous=FULL), gathered by the log's own thread.
"""

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import stream
from benchmarks.measure import Measurement, Result, Spread, interleaved, ratio_of_pairs
from groupstate import Rules
from groupstate.core import events as ev
from groupstate.log.codec import encode_items
from groupstate.log.commit import Commit
from groupstate.log.file import FileLog
from groupstate.runtime.ledger import Ledger

SHARE_MIN = 0.4
"""Of the raw limit, at 64 producers. How near the log comes to it is the disk's matter too: where a flush takes 0.15
ms, waking 64 tasks takes longer, and the bare group commit itself hardly gets there."""


async def measure(
    folder: Path, *, events: Sequence[tuple[int, int]] = ((1, 100), (64, 3_200), (512, 10_240)), repetitions: int = 31
) -> list[Result]:
    """
    Args:
        events: per number of producers, how many events a repetition makes durable.
    """
    return [await _with(producers, count, folder, repetitions) for producers, count in events]


async def _with(producers: int, count: int, folder: Path, repetitions: int) -> Result:
    records = _records(count)
    with TemporaryDirectory(dir=folder) as place:
        ways = _Ways(Path(place), records, producers)
        variants = {
            "raw": ways.measured(ways.raw),
            "log": ways.measured(ways.log),
            "raw, as the log": ways.measured(ways.raw_as_the_log),
            "bare": ways.measured(ways.bare),
            "ledger": ways.measured(ways.ledger),
            "SQLite": ways.measured(ways.sqlite),
        }
        for name in ("log", "raw"):
            await variants[name]()
        spreads = await interleaved(variants, repetitions)
    share, text = ratio_of_pairs(spreads["log"], spreads["raw"])
    notes = [
        f"log by the raw limit, {text}",
        f"log by the bare group commit: {_share(spreads, 'log', 'bare')}",
        f"events a second: {', '.join(f'{name} {1 / spread.median:,.0f}' for name, spread in spreads.items())}",
        f"events in a commit of the log: {len(records) / len(ways.commits):.1f}",
        f"of the raw limit: ledger {_share(spreads, 'ledger', 'raw')}; "
        f"of the raw limit for its own commits: log {_share(spreads, 'log', 'raw, as the log')}",
        f"the bare group commit of the raw limit: {_share(spreads, 'bare', 'raw')}",
        f"SQLite's events a second by the log's: {_share(spreads, 'SQLite', 'log')}",
    ]
    bound = SHARE_MIN if producers == 64 else 0.0
    title = f"durable events, {producers} producer{'s' if producers > 1 else ''}, per event"
    return Result(title, spreads, share, bound, "of the raw limit", notes, least=True)


def _share(spreads: dict[str, Spread], of: str, by: str) -> str:
    median, text = ratio_of_pairs(spreads[of], spreads[by])
    return f"{median:.2f} ({text.partition('(')[2]}"


def _records(count: int) -> list[ev.Record]:
    events = stream.run(count)
    return list(stream.records(event for event, _ in zip(events, range(count), strict=False)))


class _Ways:
    def __init__(self, folder: Path, records: list[ev.Record], producers: int) -> None:
        self._folder = folder
        self._producers = producers
        self._records = records
        self._items = [encode_items([record]) for record in records]
        self._made = 0
        self.commits: list[int] = []
        """Events in each commit of the last log."""

    def measured(self, way: Callable[[Path], Awaitable[float]]) -> Measurement:
        async def one() -> float:
            self._made += 1
            return await way(self._folder / str(self._made)) / len(self._records)

        return one

    async def raw(self, path: Path) -> float:
        step = self._producers
        return await asyncio.to_thread(self._raw, path, [step] * -(-len(self._items) // step))

    async def raw_as_the_log(self, path: Path) -> float:
        return await asyncio.to_thread(self._raw, path, self.commits)

    def _raw(self, path: Path, commits: Sequence[int]) -> float:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.fsync(fd)
            begin = time.perf_counter()
            at = 0
            for count in commits:
                os.write(fd, b"".join(self._items[at : at + count]))
                os.fdatasync(fd)
                at += count
            return time.perf_counter() - begin
        finally:
            os.close(fd)

    async def bare(self, path: Path) -> float:
        loop = asyncio.get_running_loop()
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        gathered: list[tuple[asyncio.Future[None], bytes]] = []
        ready: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def tell(commit: list[tuple[asyncio.Future[None], bytes]]) -> None:
            for future, _ in commit:
                future.set_result(None)

        def work() -> None:
            while ready.get():
                commit = gathered[:]
                del gathered[: len(commit)]
                os.write(fd, b"".join([items for _, items in commit]))
                os.fdatasync(fd)
                loop.call_soon_threadsafe(tell, commit)

        async def one(record: ev.Record) -> None:
            future = loop.create_future()
            gathered.append((future, self._items[record.seq - 1]))
            if len(gathered) == 1:
                ready.put(True)
            await future

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return await self._produce(one, self._records)
        finally:
            ready.put(False)
            thread.join()
            os.close(fd)

    async def log(self, path: Path) -> float:
        log = FileLog.create(path)
        commits: list[int] = []
        write = log._commit._write

        def counted(commit: Commit) -> None:
            commits.append(commit.count)
            write(commit)

        log._commit._write = counted
        spent = await self._posted(log)
        self.commits = commits
        return spent

    async def sqlite(self, path: Path) -> float:
        """The same log, but for what its thread does with a commit."""
        log = FileLog.create(path)
        database = sqlite3.connect(path / "events.db", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, event BLOB)")

        def write(commit: Commit) -> None:
            rows = enumerate(commit.items, log.durable_seq + 1)
            database.execute("BEGIN")
            database.executemany("INSERT INTO events VALUES (?, ?)", rows)
            database.execute("COMMIT")

        log._commit._write = write
        spent = await self._posted(log)
        assert database.execute("SELECT count(*) FROM events").fetchone() == (len(self._records),)
        database.close()
        return spent

    async def _posted(self, log: FileLog) -> float:
        async def one(record: ev.Record) -> None:
            log.post([record])
            await log.durable(record.seq)

        spent = await self._produce(one, self._records)
        await log.aclose()
        return spent

    async def ledger(self, path: Path) -> float:
        log = FileLog.create(path)
        ledger = Ledger(log, Rules())

        async def one(record: ev.Record) -> None:
            await log.durable(ledger.record(record.event))

        spent = await self._produce(one, [record for record in self._records if not _follows(record.event)])
        assert ledger.book.last_seq >= len(self._records) - 1
        await log.aclose()
        return spent

    async def _produce(self, one: Callable[[ev.Record], Awaitable[None]], records: Sequence[ev.Record]) -> float:
        left: Iterator[ev.Record] = iter(records)

        async def producer() -> None:
            for record in left:
                await one(record)

        begin = time.perf_counter()
        await asyncio.gather(*(producer() for _ in range(self._producers)))
        return time.perf_counter() - begin


def _follows(event: ev.AnyEvent) -> bool:
    """The ledger writes it itself, behind the end of a group's last session."""
    return isinstance(event, ev.GroupFinished)
