"""The benchmarks at tiny sizes, so that none rots. Their numbers say nothing here, so no bound is checked."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    "record",
    "latency",
    "sample",
    "decision",
    "publish",
    "rescan",
    "replay",
    "exports",
    "memory",
    "durable",
    "opening",
    "trajectory",
    "travel",
    "stats",
    "report",
    "view",
    "simulated",
    "telemetry",
    "trackers",
    *(["tensors", "sessions"] if importlib.util.find_spec("torch") else []),
]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_names_the_machine(name, tmp_path):
    done = run("--quick", "--dir", str(tmp_path), name)

    assert done.returncode == 0, done.stderr
    assert "cores" in done.stdout
    assert f"disk of {tmp_path}" in done.stdout
    assert "median" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert not (ROOT / "mlruns").exists()


def test_an_unknown_benchmark_is_named():
    done = run("speed")

    assert done.returncode == 2
    assert f"there is no benchmark 'speed'; there are {', '.join(NAMES)}" in done.stderr
