"""What docs/testing-your-rules.md says of pytest: its examples are a test file, and the failures read as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing-your-rules.md").read_text(encoding="utf-8")
BLOCKS = [
    text for reason, text in re.findall(r"(<!-- not run.*?-->\n\n)?```python\n(.*?)```", PAGE, re.DOTALL) if not reason
]


def pytest_run(folder: Path, *arguments: str, more: str = "") -> tuple[int, str]:
    (folder / "test_in_band.py").write_text("\n".join(BLOCKS).replace("max_examples=200", "max_examples=20") + more)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_the_examples_are_a_test_file_that_passes(tmp_path: Path) -> None:
    status, output = pytest_run(tmp_path)

    assert status == 0, output
    assert int(re.findall(r"(\d+) passed", output)[0]) > 25


@pytest.mark.long
def test_the_failure_reads_as_it_is_shown(tmp_path: Path) -> None:
    more = "\nTestOffByOne = OffByOne.TestCase\n"
    more += "TestOffByOne.settings = settings(TestOffByOne.settings, derandomize=True)\n"

    status, output = pytest_run(tmp_path, "-k", "OffByOne", more=more)

    assert status == 1
    assert "BrokenStory: The rule off_by_one broke its promise: assert not 0.25 <= 0.75" in output
    assert re.search(r"'finish \w+\.\d reward=0\.25'", output)
    assert re.search(r"It was asked for \d of these groups:", output)
    assert "and answered " in output
    assert len(output.splitlines()) < 60, "pytest shows the kit's own code"


def test_the_table_names_what_a_machine_has() -> None:
    from groupstate.testing import GroupMachine

    table = PAGE.partition("## What you can say")[2].partition("Settings alone")[0]
    names = re.findall(
        r"`(\w+)(?: = \w+|\(\w+\))?`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
    )

    assert {name for name in names if not hasattr(GroupMachine, name)} == set()


SCENARIO = """
rules = { selection = "my_rules:in_band" }
steps = [
  { submit = "a" }, { start = "a" }, { finish = "a/0", metrics = { reward = 1.0 } },
  { sample = 1, expect = { evicted = { a = ["custom"] } } },
]
"""

PLAN = """
seed = 1
hours = 0.05
rules = { batch_size = 4, selection = "my_rules:in_band" }
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["scenario", "mine.toml"],
        ["explore", "drop", "--set", "selection=my_rules:in_band"],
        ["simulate", "--plan", "mine.plan.toml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_commands_play_a_rule_from_where_they_are_called(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "my_rules.py").write_text(BLOCKS[0])
    (tmp_path / "mine.toml").write_text(SCENARIO)
    (tmp_path / "mine.plan.toml").write_text(PLAN)
    command = [sys.executable, "-m", "groupstate", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    assert done.returncode == 0, done.stdout + done.stderr
