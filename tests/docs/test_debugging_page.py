"""What docs/debugging.md shows of the runs in tests/broken_runs is what the commands say; it lists every invariant."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from groupstate.cli import main
from groupstate.core.invariants import INVARIANTS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "debugging.md"
KEPT = "tests/broken_runs/"
DOTS = "..."


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command on a kept run, with the lines below it."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            if KEPT in command:
                yield command, lines


SHOWN = dict(shown())


def plain(line: str) -> str:
    """Without what differs from day to day, and with one kind of space."""
    return re.sub(r"\s+", " ", re.sub(r"\d+ d \d+ h ago", "a while ago", line)).strip()


def matches(lines: list[str], output: list[str]) -> bool:
    """Whether the lines are the output, where dots stand for any that are left out."""
    pattern = "".join("(?:.*\n)*?" if line == DOTS else re.escape(plain(line)) + "\n" for line in lines)
    return re.fullmatch(pattern, "".join(plain(line) + "\n" for line in output)) is not None


@pytest.mark.parametrize("command", SHOWN)
def test_the_output_is_what_the_command_says(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, shlex.split(command)[1:])

    assert matches(SHOWN[command], result.output.splitlines()), result.output


def test_every_kept_run_is_on_the_page() -> None:
    names = {marker.parent.name for marker in (ROOT / KEPT).glob("*/run.json")}

    assert {command.split(KEPT)[1].split()[0] for command in SHOWN} == names


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        (["a  b", "c"], True),
        (["a b", DOTS], True),
        ([DOTS, "c"], True),
        ([DOTS], True),
        (["a b"], False),
        (["a b", "d"], False),
        (["c", DOTS], False),
    ],
)
def test_dots_stand_for_what_is_left_out(lines: list[str], same: bool) -> None:
    assert matches(lines, ["a\tb", "c"]) is same


def test_the_page_on_debugging_lists_the_invariants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")

    assert "".join(f"| {number} | {sentence} |\n" for number, sentence in INVARIANTS.items()) in page
