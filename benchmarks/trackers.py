"""What a step costs at a tracker, early in a run and late.

Each step logs sixty numbers and two new rows of the table of filtered values, one call after the other. What counts is
the processor time of this process, all of its threads together, since other work on the machine changes wall time many
times over; wall time is told beside it, and what processes of the tracker's own spent.
"""

import contextlib
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Result, Spread, children_s
from groupstate.integrations.trackers import JsonLines, MLflow, TensorBoard, Tracker, WandB
from groupstate.runtime.tracking import FILTERED_COLUMNS, FILTERED_VALUES

NUMBERS = 60
RATIO_MAX = 1.5
TABLE = f"training/{FILTERED_VALUES}"


def backends(folder: Path) -> dict[str, Callable[[], Tracker]]:
    """Those whose packages are installed."""
    folder = folder.resolve()
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    known: dict[str, tuple[str, Callable[[], Tracker]]] = {
        "JSON lines": ("json", lambda: JsonLines(folder / "metrics.jsonl")),
        "TensorBoard": ("tensorboardX", lambda: TensorBoard(folder / "tensorboard")),
        "MLflow, a database file": ("mlflow", lambda: mlflow_in(folder)),
        "W&B, offline": ("wandb", lambda: WandB(project="benchmark", mode="offline", dir=str(folder))),
    }
    return {name: make for name, (package, make) in known.items() if importlib.util.find_spec(package) is not None}


def mlflow_in(folder: Path) -> MLflow:
    return MLflow("benchmark", tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=f"{folder}/mlflow")


async def measure(folder: Path, *, steps: int = 2_000, compared: int = 200) -> list[Result]:
    """
    Args:
        steps: of one run.
        compared: how many of the first steps are set beside as many of the last.
    """
    found = []
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(dir=folder, prefix="trackers-", ignore_cleanup_errors=True) as inside,
        # MLflow puts artifacts beside whoever runs it.
        contextlib.chdir(inside),
    ):
        # What their packages complain of among themselves.
        warnings.simplefilter("ignore")
        for name, make in backends(Path.cwd()).items():
            found.append(_measured(name, make(), steps, compared))
    return found


def _measured(name: str, tracker: Tracker, steps: int, compared: int) -> Result:
    # The first call opens what the tracker writes to.
    tracker.log({"opened": 1.0}, 0)
    ends = (range(compared), range(steps - compared, steps))
    walls, spent, outside = [], [], [children_s()]
    for step in range(steps):
        wall_s, busy_s = _step(tracker, step)
        walls.append(wall_s)
        spent.append(busy_s)
        if step + 1 in (compared, steps - compared, steps):
            outside.append(children_s())
    begin = time.perf_counter()
    tracker.finish(0)
    finish_s = time.perf_counter() - begin
    titles = [f"first {compared} steps", f"last {compared} steps"]
    spreads = {title: Spread(tuple(spent[step] for step in end)) for title, end in zip(titles, ends, strict=True)}
    means = [[sum(of[step] for step in end) / compared for end in ends] for of in (spent, walls)]
    (first, last), (wall_first, wall_last) = means
    notes = [
        f"mean of the first {_ms(first)}, of the last {_ms(last)}; wall clock {_ms(wall_first)}, {_ms(wall_last)}",
        f"its own processes: {_ms((outside[1] - outside[0]) / compared)} a step at first, "
        f"{_ms((outside[-1] - outside[-2]) / compared)} at last",
        f"finish() took {finish_s:.3g} s",
    ]
    title = f"a step at a tracker, processor time: {name}, {steps:,} steps"
    return Result(title, spreads, last / first, RATIO_MAX, "times", notes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _step(tracker: Tracker, step: int) -> tuple[float, float]:
    """Seconds by the wall clock, and of the processor."""
    metrics = {f"training/metric_{number}": number + 1 / (1 + step) for number in range(NUMBERS)}
    rows = [(step, 0.0, 3), (step, 1.0, 2)]
    begin, busy = time.perf_counter(), time.process_time()
    tracker.log(metrics, step)
    tracker.log_table(TABLE, FILTERED_COLUMNS, rows, step)
    return time.perf_counter() - begin, time.process_time() - busy
