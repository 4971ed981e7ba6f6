"""Resident memory that a group takes in the book, prompts and payloads aside, which lie elsewhere.

Each repetition is a process of its own: it makes some groups first, so that everything is loaded and warm, and then
divides what many more add by their number. Groups have eight sessions of one trajectory with two metrics.
"""

import asyncio
import gc
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks import stream
from benchmarks.measure import Result, Spread
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.log.codec import read_back

BYTES_MAX = 5_000.0
ROOT = Path(__file__).parents[1]
AT_ONCE = 64


async def measure(*, groups: int = 100_000, running: int = 20_000, repetitions: int = 3) -> Result:
    """
    Args:
        groups: terminal ones, as wait to be sampled.
        running: groups with all sessions ended but one, measured beside them.
    """
    spreads = {}
    for kind, count in (("terminal", groups), ("running", running)):
        values = [await _in_a_process(kind, count) for _ in range(repetitions)]
        spreads[f"{kind}, {count:,} of them"] = Spread(tuple(values), "bytes")
    figure = next(iter(spreads.values())).median
    return Result("resident memory per group in the book", spreads, figure, BYTES_MAX, "bytes")


async def _in_a_process(kind: str, count: int) -> float:
    command = [sys.executable, "-m", "benchmarks.footprint", kind, str(count)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return float(out)


def bytes_per_group(kind: str, count: int) -> float:
    rng, book = random.Random(1), Book()
    _apply(book, iter([ev.RunStarted("benchmark", {}, 1, 0)]))
    warm = 1_000
    _fill(book, range(warm), kind, rng)
    before = _resident()
    _fill(book, range(warm, warm + count), kind, rng)
    added = _resident() - before
    assert len(book.groups) == warm + count
    return added / count


def _fill(book: Book, numbers: range, kind: str, rng: random.Random) -> None:
    for begin in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(begin, min(begin + AT_ONCE, numbers.stop))
        events = stream.ended(some, 300 + begin // 1_000, rng)
        _apply(book, events if kind == "terminal" else _but_the_last(events))


def _but_the_last(events: Iterator[ev.AnyEvent]) -> Iterator[ev.AnyEvent]:
    """Without the end of each group's last session, and so without the group's."""
    held: dict[str, ev.SessionFinished] = {}
    for event in events:
        if isinstance(event, ev.SessionFinished):
            if event.group_id in held:
                yield held[event.group_id]
            held[event.group_id] = event
        elif not isinstance(event, ev.GroupFinished):
            yield event


def _apply(book: Book, events: Iterator[ev.AnyEvent]) -> None:
    """As a log gives them: each decoded anew, so that nothing is shared that wouldn't be."""
    while records := list(islice(stream.records(events, book.last_seq + 1), AT_ONCE)):
        for record in read_back(records):
            book.apply(record)


def _resident() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1_024
    raise RuntimeError("this system doesn't tell how much memory is resident")


if __name__ == "__main__":
    print(bytes_per_group(sys.argv[1], int(sys.argv[2])))
