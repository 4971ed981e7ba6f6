"""Where commands write to: a place that can't be written, one that is taken, and standard output."""

from pathlib import Path

import click
import pytest

from groupstate.cli import COMMANDS, main

from .test_commands import call


@pytest.mark.parametrize("folder", ["none", "file"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("report",), ("-o", "x.html")),
        (("trace",), ("-o", "x.json")),
        (("export",), ("--redact", "x.tar.gz")),
        (("export",), ("--redact", "copy")),
        (("scenario", "--from"), ("--group", "p7", "--out", "x.toml")),
    ],
    ids=["report", "trace", "redact packed", "redact", "scenario"],
)
def test_a_place_that_can_not_be_written_is_told_by_its_name(
    tmp_path: Path, folder: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    run = Path(__file__).parent.parent / "broken_runs" / "dry_source"
    (tmp_path / "file").write_text("")
    out = tmp_path / folder / after[-1]

    result = call(*before, run, *after[:-1], out)

    why = {"none": "No such file or directory", "file": "Not a directory"}[folder]
    assert (result.exit_code, result.stderr) == (2, f"groupstate: {out} can't be written: {why}\n")


PLACES = ("--out", "--parquet", "--redact")
WRITING = [
    (name, option)
    for name in COMMANDS
    for param in main.get_command(click.Context(main), name).params
    for option in sorted({*param.opts} & {*PLACES})
]


def test_the_commands_that_write_are_found() -> None:
    assert {name for name, _ in WRITING} == {
        "run",
        "report",
        "trace",
        "export",
        "repair",
        "scenario",
        "simulate",
        "demo",
    }


@pytest.mark.parametrize(("command", "option"), WRITING)
def test_a_dash_is_not_taken_for_the_name_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = [Path(__file__).parent.parent / "broken_runs" / "dry_source"]
    result = call(command, *([] if command in ("run", "demo", "simulate") else run), option, "-")

    assert result.exit_code == 2
    assert "'-' is no place to write to; name one ('./-' where it is to be called so)." in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [("report", "-o", "x"), ("trace", "-o", "x"), ("export", "--redact", "x.tar.gz"), ("export", "--parquet", "out")],
    ids=["report", "trace", "redact", "parquet"],
)
def test_what_is_there_already_is_replaced_only_with_force(
    driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    if "--parquet" in command:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert call(name, driven, *options).exit_code == 0
    before = (tmp_path / options[-1]).stat().st_ino
    refused = call(name, driven, *options)

    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"groupstate: {options[-1]} is there already; name another, or pass --force\n"
    assert (tmp_path / options[-1]).stat().st_ino == before
    assert call(name, driven, *options, "--force").exit_code == 0
    assert (tmp_path / options[-1]).stat().st_ino != before
