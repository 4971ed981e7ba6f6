"""What holds for the tests themselves."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

COLLECTED = re.compile(r"^ *(?:(?:async )?def test_|class Test|Test\w* = )", re.MULTILINE)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_every_file_of_tests_has_some(path: Path) -> None:
    """An empty one passes without a word, whatever it was there for."""
    assert COLLECTED.search(path.read_text())


def test_processes_of_tests_can_be_interrupted_where_the_tests_themselves_were_started_so_that_they_cannot() -> None:
    code = "import signal, tests.conftest; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True, timeout=60
        )
    finally:
        signal.signal(signal.SIGINT, before)

    assert done.stdout == "True\n"
