"""What it costs to record while a run's numbers are kept ready for Prometheus or OpenTelemetry.

One run takes turns with itself: in one repetition it is watched, in the next it isn't, so that both have the same
memory and the same log. It is kept on the disk, as `open_run` opens it, with half of some groups' sessions under way. A
repetition takes new groups of eight sessions through a whole life, as in `record`. The time is the recording thread's
own: what the log's thread does at the same time would only add noise. Measured beside it: a run that is kept in memory,
where there is less to do for an event, and a reading by itself.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Measurement, Result, frozen_heap, interleaved, ratio_of_pairs
from benchmarks.record import SESSIONS, life
from groupstate import Run, open_run
from groupstate.integrations.counting import Figures

RATIO_MAX = 1.05
"""The metrics may cost a twentieth of what recording costs."""


async def measure(folder: Path, *, live: int = 300, lives: int = 150, repetitions: int = 61) -> Result:
    """
    Args:
        live: groups that are there all the time, half of their sessions open.
        lives: groups that a repetition takes through their lives.
    """
    async with contextlib.AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        variants: dict[str, Measurement] = {}
        for kept, path in (("on the disk", place / "run"), ("in memory", None)):
            run = await stack.enter_async_context(open_run(path, group_size=SESSIONS))
            for number in range(live):
                for event in itertools.islice(life(f"live{number}"), 1 + SESSIONS + SESSIONS // 2):
                    run.ledger.record(event)
            names = map("new{}".format, itertools.count())
            variants[f"{kept}, not counted"] = _lives(run, names, lives, counted=False)
            variants[f"{kept}, counted"] = _lives(run, names, lives, counted=True)
        with frozen_heap():
            for variant in variants.values():
                await variant()
            spreads = await interleaved(variants, repetitions)
        reading = _reading(Figures(run))
    plain, counted, plain_in_memory, counted_in_memory = spreads.values()
    ratio, text = ratio_of_pairs(plain, counted)
    _, memory = ratio_of_pairs(plain_in_memory, counted_in_memory)
    notes = [text, f"in memory, {memory}", f"a reading of {live:,} running groups takes {reading * 1e3:.2g} ms"]
    return Result("record() with metrics, per event", spreads, ratio, RATIO_MAX, "times", notes)


def _lives(run: Run, names: Iterator[str], count: int, *, counted: bool) -> Measurement:
    ledger = run.ledger

    async def measured() -> float:
        events = [event for name in itertools.islice(names, count) for event in life(name)]
        first = ledger.book.last_seq
        figures = Figures(run) if counted else None
        begin = time.thread_time()
        for event in events:
            ledger.record(event)
        spent = time.thread_time() - begin
        if figures is not None:
            figures.detach()
        await ledger.log.durable(ledger.book.last_seq)
        return spent / (ledger.book.last_seq - first)

    return measured


def _reading(figures: Figures) -> float:
    begin = time.perf_counter()
    figures.read()
    return time.perf_counter() - begin
