"""How long a run takes to open, and what memory, when its log is long and a snapshot lies near its end.

The history before the live groups is written as frames directly, of a few kinds of events over and over: opening
doesn't read it. The ids of the groups that left are in the book. Each opening is one of a copy of the run, with
`open_run`, in a fresh process.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import zlib
from itertools import cycle, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from benchmarks import stream
from benchmarks.measure import Measurement, Result, Spread, interleaved, ratio_of_pairs
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.book_changes import DEPARTED_IDS_MAX
from groupstate.core.phases import Phase
from groupstate.core.snapshot import capture, encoded
from groupstate.log.codec import encode_items
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.frames import checksum_seed
from groupstate.log.head import HeadWriter, Watermark
from groupstate.log.process import boot_id
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.segments import SEGMENT_BYTES, SegmentWriter
from groupstate.log.snapshots import SnapshotInfo

EVENTS = 10_000_000
SECONDS_MAX = 2.0
MEGABYTES_MAX = 300.0
RATIO_MAX = 1.05
FRAME = 1_000
"""Events in a frame of the history."""
EVENTS_PER_GROUP = 20
PAYLOAD = b"payload " * 8

OPEN = """
import asyncio, resource, sys, time
from pathlib import Path
import groupstate as gs
def peak_mib():
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # macOS; where the other is there it is better, since it doesn't count the parent's before the exec
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / (1 << 10)
async def main():
    begin, began = time.perf_counter(), time.process_time()
    async with gs.open_run(sys.argv[1], durability="os") as run:
        seconds, busy = time.perf_counter() - begin, time.process_time() - began
        assert len(run.book.groups) == int(sys.argv[2]), len(run.book.groups)
        print(seconds, busy, peak_mib())
asyncio.run(main())
"""


async def measure(
    folder: Path, *, events: int = EVENTS, groups: int = 10_000, tail: int = 20_000, repetitions: int = 5
) -> list[Result]:
    """
    Args:
        events: before the live groups; the other run has twice as many.
        groups: that are live.
        tail: events behind the snapshot.
    """
    with TemporaryDirectory(dir=folder) as place:
        runs = {"once": Path(place) / "once", "twice": Path(place) / "twice"}
        for name, run in runs.items():
            await asyncio.to_thread(write, run, events * (1 + (name == "twice")), groups, tail)
        walls: dict[str, list[float]] = {name: [] for name in runs}
        peaks: dict[str, list[float]] = {name: [] for name in runs}

        def opening(name: str) -> Measurement:
            async def opened() -> float:
                wall, busy, peak = await asyncio.to_thread(opened_once, runs[name], groups)
                walls[name].append(wall)
                peaks[name].append(peak)
                return busy

            return opened

        busy = await interleaved({name: opening(name) for name in runs}, repetitions)
    ratio, note = ratio_of_pairs(busy["once"], busy["twice"])
    title = f"opening, {groups:,} live groups behind {events:,} events, or twice as many"
    time = {name: Spread(tuple(found)) for name, found in walls.items()}
    memory = {name: Spread(tuple(found), "MiB") for name, found in peaks.items()}
    notes = [f"{tail:,} events behind the snapshot; the best repetition of the shorter log counts"]
    return [
        Result(f"{title}: time", time, min(walls["once"]), SECONDS_MAX, "seconds", notes),
        Result(f"{title}: memory", memory, max(peaks["twice"]), MEGABYTES_MAX, "MiB"),
        Result(f"{title}: processor time", busy, ratio, RATIO_MAX, "times", [note]),
    ]


def opened_once(run: Path, groups: int) -> tuple[float, float, float]:
    """Seconds, processor seconds and MiB of an opening of a copy, in a process of its own. The copy shares full
    segments."""
    copy = run.with_name(f"{run.name}-copy")
    last = max((run / "log").glob("*.seg"))

    def shared(source: str, target: str) -> None:
        sealed = source.endswith((".seg", ".snap")) and Path(source) != last
        (os.link if sealed else shutil.copyfile)(source, target)

    shutil.copytree(run, copy, copy_function=shared)
    try:
        command = [sys.executable, "-c", OPEN, str(copy), str(groups)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(copy)
    seconds, busy, peak = map(float, done.stdout.split())
    return seconds, busy, peak


def write(run: Path, events: int, groups: int, tail: int) -> None:
    """A run of so many events, so many live groups, a snapshot, and a tail."""
    asyncio.run(FileLog.create(run, inline=True, durability="os").aclose())
    _write_history(RunDir.at(run), events)
    log = FileLog.open(run, inline=True, durability="os")
    book = _book(events, log.log_id)
    for event in _live(log, groups, Random(2)):
        _post(log, book, event)
    info = SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)
    log.keep_snapshot(info, encoded(capture(book)), limit=0)
    _post_tail(log, book, groups, tail)
    asyncio.run(log.aclose())


def _write_history(place: RunDir, events: int) -> None:
    disk = OsDisk()
    log_id = read_run_info(disk, place).log_id
    segments = SegmentWriter(disk, place, log_id, None, segment_bytes=SEGMENT_BYTES, sync=False)
    some = cycle(list(islice(stream.run(64), 1, 1 + EVENTS_PER_GROUP * 64)))
    for first in range(1, events + 1, FRAME):
        count = min(FRAME, events + 1 - first)
        records = [
            ev.Record(first + at, stream.BEGIN_NS + first, event) for at, event in enumerate(islice(some, count))
        ]
        segments.append([encode_items(records)], count, first, stream.BEGIN_NS)
    segments.close()
    mark = Watermark(events, False, zlib.crc32(boot_id().encode()))
    HeadWriter(disk, place.head, mark, checksum_seed(log_id)).close()


def _book(events: int, run_id: str) -> Book:
    book = Book()
    book.apply(ev.Record(1, stream.BEGIN_NS, ev.RunStarted(run_id, {}, 1, 0)))
    book.last_seq = events
    left = min(events // EVENTS_PER_GROUP, DEPARTED_IDS_MAX)
    book.departed.update((f"left-{number:08d}", Phase.COMMITTED) for number in range(left))
    return book


def _live(log: FileLog, groups: int, rng: Random) -> stream.Events:
    """Four of five groups have ended; half of the sessions of the others run. Each payload is in the store."""
    ended = groups * 4 // 5
    for event in stream.ended(range(ended), 0, rng):
        yield _stored(log, event)
    for number in range(ended, groups):
        yield _stored(log, next(stream.ended([number], 0, rng)))
        for session in range(stream.SESSIONS):
            yield ev.SessionStarted(stream.name(number), session, 1, "worker-3", 0)
        for session in range(stream.SESSIONS // 2):
            yield _stored(log, stream.finished(number, session, 0, rng))


def _stored(log: FileLog, event: ev.AnyEvent) -> ev.AnyEvent:
    if isinstance(event, ev.GroupSubmitted):
        return msgspec.structs.replace(event, prompt=log.payloads.put(PAYLOAD))
    if isinstance(event, ev.SessionFinished):
        return msgspec.structs.replace(event, payload=log.payloads.put(PAYLOAD))
    return event


def _post(log: FileLog, book: Book, event: ev.AnyEvent) -> None:
    record = ev.Record(book.last_seq + 1, stream.BEGIN_NS + book.last_seq, event)
    book.apply(record)
    log.post([record])


def _post_tail(log: FileLog, book: Book, groups: int, tail: int) -> None:
    """Groups that come, end and are evicted, until the tail is long enough."""
    stop, number, rng = book.last_seq + tail, groups, Random(3)
    while book.last_seq < stop:
        for event in stream.ended([number], 0, rng):
            _post(log, book, _stored(log, event))
        _post(log, book, ev.GroupEvicted(stream.name(number), ("stale",), 0, 0))
        number += 1
