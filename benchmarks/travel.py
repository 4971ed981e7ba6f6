"""How long it takes to see where a run stood at any event of a long log, and what of the disk that takes.

The log is written with snapshots and waypoints as a run writes them, in small commits. Then `groupstate show --at` is
called for places all over it, each time in a process of its own, start of Python included. Its modules are compiled
once, as those of an installed package are.
"""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks import stream
from benchmarks.measure import Result, Spread
from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.snapshot import capture, capture_live, encoded
from groupstate.log.file import FileLog
from groupstate.log.snapshots import SnapshotInfo
from groupstate.runtime.keeping import EVENTS_PER_LIVE_GROUP, EVENTS_PER_SNAPSHOT, WAYPOINTS_PER_SNAPSHOT

EVENTS = 10_000_000
SECONDS_MAX = 1.0
COMMIT = 4
"""Events in a commit, as in a run whose sessions end one by one."""


async def measure(
    folder: Path,
    *,
    events: int = EVENTS,
    places: int = 20,
    repetitions: int = 3,
    spacing: int = EVENTS_PER_SNAPSHOT,
    kept: int = stream.WAITING,
) -> list[Result]:
    """
    Args:
        places: drawn from the log, beside its first and its last event.
        spacing: events between two snapshots.
        kept: batches of groups that are sampleable at a time.
    """
    with TemporaryDirectory(dir=folder) as made:
        run = Path(made) / "run"
        groups = await asyncio.to_thread(write, run, events, spacing, kept)
        sizes = {suffix: _bytes(run, suffix) for suffix in (".seg", ".snap", ".way")}
        waypoints = len(list((run / "log").glob("*.way")))
        rng = Random(1)
        seqs = [1, *(rng.randint(1, events) for _ in range(places)), events]
        walls, busy = await asyncio.to_thread(_looked, run, seqs, repetitions)
    share = sizes[".way"] / sizes[".seg"]
    notes = [
        f"commits of {COMMIT} events; start of Python included",
        f"the slowest of {len(seqs)} places counts, by its best of {repetitions} repetitions",
        f"log {sizes['.seg'] / 1e6:,.1f} MB, snapshots {sizes['.snap'] / 1e6:,.1f} MB, "
        f"{waypoints} waypoints {sizes['.way'] / 1e6:,.1f} MB ({share:.1%} of the log)",
    ]
    spreads = {"from call to end": Spread(tuple(walls)), "processor time": Spread(tuple(busy))}
    title = f"show --at in a log of {events:,} events, {groups:,} live groups, processor time"
    return [Result(title, spreads, max(busy), SECONDS_MAX, "seconds", notes)]


def _looked(run: Path, seqs: Iterable[int], repetitions: int) -> tuple[list[float], list[float]]:
    """The best wall time and processor time for each place."""
    walls, busy = [], []
    for seq in seqs:
        times = [looked_once(run, seq) for _ in range(repetitions)]
        walls.append(min(wall for wall, _ in times))
        busy.append(min(used for _, used in times))
    return walls, busy


def looked_once(run: Path, seq: int) -> tuple[float, float]:
    """Seconds and processor seconds of one `show --at`."""
    command = [sys.executable, "-m", "groupstate", "show", str(run), "--at", str(seq), "--json"]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    assert f'"seq":{seq},' in done.stdout
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write(run: Path, events: int, spacing: int = EVENTS_PER_SNAPSHOT, kept: int = stream.WAITING) -> int:
    """A run of so many events, with what a run keeps beside them; says how many groups are live at its end."""
    log, book = FileLog.create(run, inline=True, durability="os"), Book()
    book.notes_released = False
    records = stream.records(stream.run(events, kept=kept))
    snapshot_seq = waypoint_seq = 0
    while book.last_seq < events and (some := list(islice(records, min(COMMIT, events - book.last_seq)))):
        _keep(log, book, some)
        if book.last_seq - snapshot_seq >= spacing:
            snapshot_seq = book.last_seq
            log.keep_snapshot(_info(book), encoded(capture(book)), limit=snapshot_seq, spacing=spacing)
        behind = max(spacing / WAYPOINTS_PER_SNAPSHOT, EVENTS_PER_LIVE_GROUP * len(book.groups))
        if book.last_seq - waypoint_seq >= behind:
            waypoint_seq = book.last_seq
            log.keep_waypoint(_info(book), encoded(capture_live(book)))
    asyncio.run(log.aclose())
    return len(book.groups)


def _keep(log: FileLog, book: Book, records: list[Record]) -> None:
    log.post(records)
    for record in records:
        book.apply(record)


def _info(book: Book) -> SnapshotInfo:
    return SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)


def _bytes(run: Path, suffix: str) -> int:
    return sum(file.stat().st_size for file in (run / "log").glob(f"*{suffix}"))
