"""`python -m benchmarks [--quick] [--dir DIR] [--events N] [NAME ...]`.

Exits 1 if a bound isn't met. `--quick` runs tiny sizes, to see that everything still runs: its numbers say nothing.
"""

import argparse
import asyncio
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    decision,
    durable,
    exporting,
    footprint,
    latency,
    opening,
    page,
    publish,
    record,
    replay,
    sample,
    sessions,
    simulated,
    statistics,
    telemetry,
    tensors,
    trackers,
    trajectory,
    travel,
    verl_buffer,
    versus,
)
from benchmarks.measure import Result, hardware

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_VERL = all(importlib.util.find_spec(name) is not None for name in ("verl", "transfer_queue"))

Benchmarks = dict[str, list[Callable[[], Awaitable[Result | list[Result]]]]]


def full(folder: Path, events: int = opening.EVENTS) -> Benchmarks:
    return {
        "record": [record.measure],
        "latency": [latency.measure_memory, lambda: latency.measure_file(folder)],
        "sample": [sample.measure],
        "decision": [decision.measure, decision.measure_left],
        "publish": [publish.measure],
        "rescan": [versus.measure],
        "replay": [lambda: replay.measure(folder)],
        "exports": [lambda: exporting.measure(folder)],
        "memory": [footprint.measure],
        "durable": [lambda: durable.measure(folder)],
        "opening": [lambda: opening.measure(folder, events=events)],
        "trajectory": [lambda: trajectory.measure(folder), lambda: trajectory.measure_opening(folder)],
        "travel": [
            lambda: travel.measure(folder, events=events),
            lambda: travel.measure(folder, events=events // 8, kept=150),
        ],
        "stats": [lambda: statistics.measure(folder)],
        "report": [lambda: page.measure(folder)],
        "view": [lambda: page.measure_view(folder)],
        "simulated": [simulated.measure],
        "telemetry": [lambda: telemetry.measure(folder)],
        "trackers": [lambda: trackers.measure(folder)],
        **({"tensors": [tensors.measure]} if HAS_TORCH else {}),
        **({"sessions": [lambda: sessions.measure(folder)]} if HAS_TORCH else {}),
        **({"sessions-vllm": [lambda: sessions.measure_vllm(folder)]} if HAS_VLLM else {}),
        **({"verl": [lambda: verl_buffer.measure(folder)]} if HAS_VERL else {}),
    }


def quick(folder: Path) -> Benchmarks:
    return {
        "record": [lambda: record.measure(small=10, large=40, lives=3, repetitions=3)],
        "latency": [
            lambda: latency.measure_memory(repetitions=3),
            lambda: latency.measure_file(folder, repetitions=3),
        ],
        "sample": [lambda: sample.measure(small=10, large=40, batch_size=4, repetitions=3)],
        "decision": [
            lambda: decision.measure(small=10, large=40, decisions=3, repetitions=3),
            lambda: decision.measure_left(count=10, left=100, decisions=3, repetitions=3),
        ],
        "publish": [lambda: publish.measure(small=10, large=40, few=3, many=10, versions=3, repetitions=3)],
        "rescan": [lambda: versus.measure(count=40, repetitions=3)],
        "replay": [lambda: replay.measure(folder, groups=640, repetitions=3)],
        "exports": [lambda: exporting.measure(folder, groups=640, repetitions=3)],
        "memory": [lambda: footprint.measure(groups=200, running=200, repetitions=1)],
        "durable": [lambda: durable.measure(folder, events=((1, 10), (64, 128)), repetitions=3)],
        "opening": [lambda: opening.measure(folder, events=2_000, groups=20, tail=10, repetitions=3)],
        "trajectory": [
            lambda: trajectory.measure(folder, count=64, repetitions=3),
            lambda: trajectory.measure_opening(folder, groups=70, repetitions=3),
        ],
        "travel": [lambda: travel.measure(folder, events=3_000, places=2, repetitions=1, spacing=1_000)],
        "stats": [lambda: statistics.measure(folder, groups=640, repetitions=3)],
        "report": [lambda: page.measure(folder, groups=640, repetitions=3)],
        "view": [lambda: page.measure_view(folder, batches=4, repetitions=1)],
        "simulated": [lambda: simulated.measure(hours=0.02, repetitions=1)],
        "telemetry": [lambda: telemetry.measure(folder, live=3, lives=3, repetitions=3)],
        "trackers": [lambda: trackers.measure(folder, steps=4, compared=2)],
        **({"tensors": [lambda: tensors.measure(groups=2, tokens=16, repetitions=3)]} if HAS_TORCH else {}),
        **({"sessions": [lambda: sessions.measure(folder, **SMALL)]} if HAS_TORCH else {}),
    }


SMALL: dict[str, Any] = {"at_once": (8, 16), "tokens": 4, "width": 16, "repetitions": 3}


async def measured(benchmarks: Benchmarks, names: Sequence[str]) -> list[Result]:
    results: list[Result] = []
    for name in names or benchmarks:
        for benchmark in benchmarks[name]:
            found = await benchmark()
            for result in [found] if isinstance(found, Result) else found:
                print(result, end="\n\n", flush=True)
                results.append(result)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what a run costs.")
    parser.add_argument("names", nargs="*", metavar="|".join(full(Path())), help="which ones; without any, all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the numbers say nothing")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where files are written and flushed")
    parser.add_argument(
        "--events", type=int, default=opening.EVENTS, help="of `opening`, `travel`: how long the log is"
    )
    options = parser.parse_args(arguments)
    benchmarks = quick(options.dir) if options.quick else full(options.dir, options.events)
    if unknown := [name for name in options.names if name not in benchmarks]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(benchmarks)}")
    print(hardware(options.dir))
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
    results = asyncio.run(measured(benchmarks, options.names))
    missed = [result.name for result in results if not result.met]
    if missed and not options.quick:
        print(f"not met: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
