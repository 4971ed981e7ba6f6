"""The process in which trackers run: see `jobs.py`."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

ANSWER_S = 90.0
"""Until a job that says nothing is killed, so that its test fails and the ones behind it don't."""


class Forks:
    """A process that has imported every tracker's package, and is forked for each job."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trackers.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._job: int | None = None
        """The process of the job that runs."""
        assert self._heard() == {"imported": True}

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        patience = threading.Timer(ANSWER_S, self._kill)
        patience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            patience.cancel()
        assert line, "the process of the trackers died"
        return json.loads(line)

    def _kill(self) -> None:
        os.kill(self._process.pid if self._job is None else self._job, signal.SIGKILL)

    def begin(self, job: str, folder: Path, *arguments: str) -> int:
        """Begin a job; the number of its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "folder": str(folder), "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        self._job = int(self._heard()["process"])
        return self._job

    def end(self) -> int:
        """Wait for the job; its exit code, or minus the signal that it died of."""
        code = int(self._heard()["code"])
        self._job = None
        return code

    def done(self, job: str, folder: Path, *arguments: str) -> int:
        self.begin(job, folder, *arguments)
        return self.end()

    def signalled(self, job: str, folder: Path, ending: str, number: signal.Signals) -> int:
        """Wait until a run is under way, and send its process group a signal."""
        process = self.begin(job, folder, ending)
        heard = self._heard()
        if "code" in heard:
            self._job = None
        assert heard == {"ready": True}, (folder / "stderr.txt").read_text()
        os.killpg(process, number)
        return self.end()

    def read(self, folder: Path, job: str = "read_back") -> Any:
        self.begin(job, folder)
        found = self._heard()
        if "code" in found:
            self._job = None
        assert "found" in found, (folder / "stderr.txt").read_text()
        assert self.end() == 0
        return found["found"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    for package in ("wandb", "mlflow", "tensorboardX", "sqlalchemy"):
        pytest.importorskip(package, reason="make test installs every tracker's package")
    process = Forks()
    yield process
    process.close()
