"""What holds for the tests themselves."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

COLLECTED = re.compile(r"^ *(?:(?:async )?def test_|class Test|Test\w* = )", re.MULTILINE)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_every_file_of_tests_has_some(path: Path) -> None:
    """An empty one passes without a word, whatever it was there for."""
    assert COLLECTED.search(path.read_text())
