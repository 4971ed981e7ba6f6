"""Repeating, comparing and printing.

Rule 1: variants are measured in turn, one repetition each, so that whatever else the machine does hits both.
Rule 2: a number comes with its spread and the machine it was measured on.
"""

import contextlib
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

Measurement = Callable[[], Awaitable[float]]
"""One repetition; gives seconds."""

Meter = Callable[[Callable[[], object]], float]
"""Makes a call and says what it took."""


@attrs.frozen
class Spread:
    """Repetitions of one thing, in seconds or another unit."""

    values: tuple[float, ...]
    unit: str = "seconds"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        median, low, high = (shown(value, self.unit) for value in (self.median, low, high))
        return f"median {median} ({low} to {high}, {len(self.values)} repetitions)"


@attrs.frozen
class Result:
    """What a benchmark found."""

    name: str
    spreads: Mapping[str, Spread]
    figure: float
    """What the bound is about."""
    bound: float
    unit: str
    """Of both; `seconds` are shown in a readable scale."""
    notes: Sequence[str] = ()
    least: bool = False
    """The bound is the least that the figure may be, not the most."""

    @property
    def met(self) -> bool:
        return self.figure >= self.bound if self.least else self.figure <= self.bound

    def __str__(self) -> str:
        width = max(map(len, self.spreads))
        lines = [self.name]
        lines += [f"  {name:<{width}}  {spread}" for name, spread in self.spreads.items()]
        lines += [f"  {note}" for note in self.notes]
        bound = f"{'at least ' if self.least else ''}{shown(self.bound, self.unit)}"
        lines.append(f"  {shown(self.figure, self.unit)}, bound {bound}: {'met' if self.met else 'NOT MET'}")
        return "\n".join(lines)


def shown(value: float, unit: str) -> str:
    if unit == "seconds":
        return _time(value)
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def seconds(call: Callable[[], object]) -> float:
    """Meter: the time that a call takes, in seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def lines_run(call: Callable[[], object]) -> float:
    """Meter: lines of Python that a call runs, those in libraries too. Nothing else that the machine does changes it,
    but it is blind to what is done inside of one C call."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


async def interleaved(variants: Mapping[str, Measurement], repetitions: int) -> dict[str, Spread]:
    """Measure the variants in turn; the order alternates, so that neither always comes after the other."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions):
        names = list(variants)
        for name in names if repetition % 2 == 0 else reversed(names):
            values[name].append(await variants[name]())
    return {name: Spread(tuple(found)) for name, found in values.items()}


def ratio_of_pairs(small: Spread, large: Spread) -> tuple[float, str]:
    """Median of the ratios within pairs, and a text with their range."""
    ratios = [b / a for a, b in zip(small.values, large.values, strict=True)]
    median = statistics.median(ratios)
    return median, f"ratio of pairs: median {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """What was loaded is left alone by the garbage collector, as a long run would do it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def children_s() -> float:
    """Processor time of the processes that this one started, where the system tells."""
    pids = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
    return sum(map(_spent_by, pids))


def _spent_by(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def hardware(folder: Path) -> str:
    """The machine in three lines."""
    return "\n".join(
        (
            f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            f"disk of {folder}: {_file_system(folder)}",
            f"Python {platform.python_version()} ({platform.python_implementation()})",
        )
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """Device and kind of the file system that holds a folder, where the system tells."""
    best = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            device, place, kind = line.split()[:3]
            if folder.resolve().is_relative_to(place) and len(place) >= len(best[0]):
                best = (place, f"{device} ({kind})")
    return best[1]


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
