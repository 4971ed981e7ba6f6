"""`import groupstate` is cheap: what only some users need is imported when they use it."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "vllm",
    "numpy",
    "click",
    "rich",
    "pyarrow",
    "hypothesis",
    "httpx",
    "structlog",
    "pytest",
    "matplotlib",
    "reasoning_gym",
    "wandb",
    "mlflow",
    "tensorboardX",
    "transfer_queue",
    "ray",
}

MODULES_MAX = 450
"""Modules in a process that has imported groupstate. Some 360 today, most of them anyio's, attrs' and
msgspec's."""


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module",
    [
        "groupstate",
        "groupstate.sync",
        "groupstate.testing",
        "groupstate.integrations.trackers",
        "groupstate.integrations.verl",
    ],
)
def test_importing_groupstate_brings_in_nothing_heavy(module: str) -> None:
    heavy = HEAVY & modules_after(f"import {module}")

    assert not heavy, f"import {module} must stay light, but it brings in {', '.join(sorted(heavy))}"


def test_importing_groupstate_takes_a_bounded_number_of_modules() -> None:
    count = len(modules_after("import groupstate"))

    assert count <= MODULES_MAX, f"import groupstate takes {count} modules; {MODULES_MAX} are allowed"


def test_a_run_that_is_open_has_loaded_what_its_log_lines_need() -> None:
    opened = "async def main():\n  async with groupstate.open_run(): pass\nasyncio.run(main())"
    statement = f"import asyncio, groupstate\n{opened}\nimport sys"

    assert {"structlog", "structlog.stdlib", "structlog.processors"} <= modules_after(statement)
