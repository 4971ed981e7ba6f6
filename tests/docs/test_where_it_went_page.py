"""What docs/where-it-went.md shows is what the commands say of the run that it makes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from groupstate.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "where-it-went.md").read_text(encoding="utf-8")
DOTS = "..."


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command, with the lines below it."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield command, lines


SHOWN = dict(shown())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's first example has made its run."""
    path = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        exec(compile(blocks("python")[0], "where-it-went.md", "exec"), {"__name__": "__main__"})
    return path


def pattern(lines: list[str]) -> str:
    """Of an output that the lines are, where dots stand for any that are left out, with one kind of space."""
    return "".join("(?:.*\n)*?" if line == DOTS else re.escape(" ".join(line.split())) + "\n" for line in lines)


@pytest.mark.parametrize("command", SHOWN)
def test_the_output_is_what_the_command_says(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    output = "".join(" ".join(line.split()) + "\n" for line in result.output.splitlines())

    assert result.exit_code == 0, result.output
    assert re.fullmatch(pattern(SHOWN[command]), output), result.output


def test_every_section_of_stats_is_told(folder: Path) -> None:
    output = CliRunner().invoke(main, ["stats", str(folder / "runs" / "told")]).output
    sections = {line.removeprefix("# ").split("\t")[0].partition(" by ")[0] for line in output.splitlines()}

    assert {name for name in sections if f"\n| {name} |" not in PAGE} <= {"slowest sessions"}
