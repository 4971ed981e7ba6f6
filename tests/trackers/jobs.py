"""What the processes of these tests do: runs with every tracker, and reading back what the trackers kept.

Importing the packages of all trackers takes seconds, so one process imports them and is forked for each job. It takes
jobs as lines of JSON, and answers with lines of JSON; `tests/trackers/conftest.py` is the other end.
"""

import asyncio
import gc
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupstate import Rules, Trajectory, open_run
from groupstate import sync as blocking
from groupstate.errors import RunIsClosed
from groupstate.integrations.trackers import JsonLines, MLflow, TensorBoard, Tracker, WandB

STEPS = 3

ODD_NAMES = ("/a//b/../.", "..c", "d/", "x" * 249 + "/y")
"""MLflow takes none of them."""

DATABASE = b""
"""Of MLflow, with its tables and nothing in them."""


# Runs ------------------------------------------------------------------------------------------------


def every_tracker(folder: Path) -> list[Tracker]:
    return [
        WandB(project="tests", mode="offline", dir=str(folder)),
        TensorBoard(folder / "tensorboard"),
        MLflow(
            "tests",
            run_name="one",
            tracking_uri=f"sqlite:///{folder}/mlflow.db",
            artifact_location=str(folder / "artifacts"),
        ),
        JsonLines(folder / "metrics.jsonl"),
    ]


async def session(ctx: Any) -> Trajectory:
    """Each third prompt's answers end alike, at 0 or at 1."""
    number = ctx.prompt.content
    return Trajectory(response_ids=[1], reward=float(ctx.session if number % 3 else number % 2))


def options(folder: Path) -> dict[str, Any]:
    rules = Rules(filter_metric="reward", batch_size=2)
    return {"rules": rules, "source": range(600), "session": session, "group_size": 2, "grace_s": 0.2}


async def train(folder: Path, ending: str) -> None:
    close_on = ["SIGTERM"] if ending == "close_on" else []
    async with open_run(trackers=every_tracker(folder), close_on=close_on, **options(folder)) as run:
        for version in range(STEPS):
            batch = await run.sample(2, weight_version=version)
            run.track({"loss": 1 / (1 + version)})
            await run.commit(batch)
        if ending == "error":
            raise KeyError("planted")
        if ending == "success":
            return
        say({"ready": True})
        # Nobody submits validation prompts: it waits until a signal ends it.
        await run.sample(2, partition="val")


def async_run(folder: str, ending: str) -> None:
    try:
        asyncio.run(train(Path(folder), ending))
    except RunIsClosed:
        assert ending == "close_on"


def blocking_run(folder: str, ending: str) -> None:
    with blocking.open_run(trackers=every_tracker(Path(folder)), **options(Path(folder))) as run:
        for version in range(STEPS):
            run.commit(run.sample(2, weight_version=version))
        say({"ready": True})
        while True:
            # Not signal.pause(): a signal that comes just before it would be noticed only with the next one.
            time.sleep(0.05)


def used_by_hand(folder: str) -> None:
    """Every adapter without a run: many steps of one table, odd numbers and names, steps that go back."""
    for tracker in every_tracker(Path(folder)):
        for step in [*range(104), 3]:
            tracker.log({"odd": float("nan" if step == 1 else "inf" if step == 2 else step)}, step)
            tracker.log_table("values", ("step", "value", "groups"), [(step, 0.5, 1), (step, 1.0, 2)], step)
        tracker.log({"datasets/a+b (c)/sampled": 1.0, **dict.fromkeys(ODD_NAMES, 2.0)}, 105)
        tracker.finish(1)


def gone_on_with(folder: str) -> None:
    """A second process that goes on in the same MLflow run, and one in a W&B run that is somebody else's."""
    uri = f"sqlite:///{folder}/mlflow.db"
    first = MLflow("tests", tracking_uri=uri, tags={"who": "me"})
    first.log({"loss": 2.0}, 0)
    first.finish(143)
    second = MLflow("tests", tracking_uri=uri, run_id=first.run_id)
    second.log({"loss": 1.0}, 1)
    second.finish(0)
    import wandb

    run = wandb.init(project="tests", mode="offline", dir=folder)
    mine = WandB(run=run)
    mine.log({"loss": 1.0}, 1)
    mine.finish(1)
    run.log({"after": 1.0})
    run.finish()
    never_used = WandB(project="tests")
    never_used.finish(0)
    again_folder = Path(folder) / "again"
    again_folder.mkdir()
    again = WandB(project="tests", mode="offline", dir=str(again_folder))
    for step in range(2):
        again.log({"loss": 5.0}, step)
        again.log_table("values", ("step", "value"), [(step, 0.5)], step)
        again.finish(0)


def old_wandb(folder: str) -> None:
    """A W&B that knows no incremental tables: its Table takes no log_mode, as that of wandb 0.19."""
    import logging

    import wandb

    logging.basicConfig(filename=Path(folder) / "warnings.log", level=logging.WARNING)

    class OldTable(wandb.Table):  # type: ignore[misc]
        def __init__(self, columns: Any = None, data: Any = None) -> None:
            super().__init__(columns=columns, data=data)

    wandb.Table = OldTable  # type: ignore[misc]
    tracker = WandB(project="tests", mode="offline", dir=folder)
    for step in range(3):
        tracker.log_table("values", ("step", "value"), [(step, 0.5)], step)
    tracker.finish(0)


def examples_of_the_page(folder: str) -> None:
    """All of them in order, those that need packages too."""
    from tests.test_docs import ROOT, blocks, run_python

    page = blocks(ROOT / "docs" / "integrations" / "trackers.md")
    run_python([b for b in page if b.kind == "python" and "trackio" not in b.not_run], {"__name__": "__main__"})


# Reading back ----------------------------------------------------------------------------------------


def read_back(folder: str) -> dict[str, Any]:
    readers = {"wandb": read_wandb, "tensorboard": read_tensorboard, "mlflow": read_mlflow, "json lines": read_lines}
    return {name: read(Path(folder)) for name, read in readers.items()}


def read_wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    logged, tables, codes, sizes, over = [], [], [], [], {}
    for data in leveldb_records(path.read_bytes()[7:]):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("exit"):
            codes.append(record.exit.exit_code)
        if record.HasField("metric"):
            over[record.metric.name] = record.metric.step_metric
        if record.HasField("history"):
            row = history_row(record)
            sizes.append(len(data))
            step = row.pop("groupstate/step", None)
            for name, value in row.items():
                if isinstance(value, dict):
                    file = json.loads((path.parent / "files" / value["path"]).read_text())
                    tables.append({"name": name, "step": step, "kind": value["_type"], "rows": file["data"]})
                elif not name.startswith("_"):
                    logged.append([name, value, step])
    return {"codes": codes, "logged": logged, "tables": tables, "record_bytes_max": max(sizes), "over": over}


def history_row(record: Any) -> dict[str, Any]:
    """What was logged at once. A value that is a dict comes as its parts."""
    row: dict[str, Any] = {}
    for item in record.history.item:
        name, *inner = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if inner:
            row.setdefault(name, {})["/".join(inner)] = value
        else:
            row[name] = value
    return row


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in the format of LevelDB, in blocks of 32 KiB; the first lacks the file's 7 byte header."""
    at, parts, block = 0, b"", 32 * 1024
    while at + 7 <= len(data):
        left = block - (at + 7) % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboardX.proto.event_pb2 import Event

    logged, tables = [], []
    for path in sorted((folder / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                if value.HasField("tensor"):
                    text = value.tensor.string_val[0].decode()
                    tables.append({"name": value.tag.removesuffix("/text_summary"), "step": event.step, "text": text})
                else:
                    logged.append([value.tag, value.simple_value, event.step])
    codes = [value for name, value, _ in logged if name == "status/exit_code"]
    return {"codes": codes, "logged": logged, "tables": tables}


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    logged = [
        [name, metric.value, metric.step]
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    tables = [
        {"name": str(file.relative_to(root).parent), "part": file.name, "rows": json.loads(file.read_text())["data"]}
        for file in sorted(root.rglob("*.json"))
    ]
    end = {"status": run.info.status, "code": run.data.tags["exit_code"], "has_ended": run.info.end_time is not None}
    return {"codes": [end], "logged": logged, "tables": tables, "tags": dict(run.data.tags)}


def read_lines(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "codes": [line["exit_code"] for line in lines if "exit_code" in line],
        "logged": [[name, value, line["step"]] for line in lines for name, value in line.get("metrics", {}).items()],
        "tables": [
            {"name": line["table"], "step": line["step"], "columns": line["columns"], "rows": line["rows"]}
            for line in lines
            if "table" in line
        ],
    }


# The process that is forked --------------------------------------------------------------------------


def say(told: dict[str, Any]) -> None:
    os.write(1, (json.dumps(told) + "\n").encode())


JOBS = {
    job.__name__: job
    for job in (
        async_run,
        blocking_run,
        used_by_hand,
        gone_on_with,
        old_wandb,
        examples_of_the_page,
        read_back,
        read_wandb,
        read_mlflow,
    )
}


def do(job: str, folder: str, arguments: list[str]) -> None:
    from wandb.sdk.data_types import _private

    # The first process that was forked took it along when it ended.
    os.makedirs(_private.MEDIA_TMP.name, exist_ok=True)
    if not Path(folder, "mlflow.db").exists():
        Path(folder, "mlflow.db").write_bytes(DATABASE)
    # A group of its own, so that a signal to the group is what a terminal's Ctrl-C is.
    os.setsid()
    os.chdir(folder)
    with open("stderr.txt", "ab") as file:
        os.dup2(file.fileno(), 2)
    # What trackers print to the standard output would be taken for answers.
    sys.stdout = sys.stderr
    if job.startswith("read"):
        say({"found": JOBS[job](Path(folder))})  # type: ignore[operator]
        # There is nothing to put away, and to take the interpreter down costs more than the reading.
        os._exit(0)
    else:
        JOBS[job](folder, *arguments)  # type: ignore[operator]


def main() -> None:
    # Neither is needed to write files, and both take seconds to import.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import mlflow.entities
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking
    import tensorboardX
    import wandb

    assert tensorboardX
    assert wandb
    global DATABASE
    with tempfile.TemporaryDirectory() as folder:
        # To make its tables takes MLflow longer than all else that is done here.
        mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
        DATABASE = Path(folder, "mlflow.db").read_bytes()
    # The children leave what was loaded alone, and so it stays shared.
    gc.freeze()
    say({"imported": True})
    for line in sys.stdin:
        asked = json.loads(line)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            # What it answers comes after its number.
            os.read(told, 1)
            sys.stdin.close()
            do(**asked)
            return
        say({"process": child})
        os.write(tell, b".")
        os.close(told)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        say({"code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
