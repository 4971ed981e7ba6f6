"""Files and folders that are there whole or not at all, and what is removed beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupstate.errors import BadInput
from groupstate.inspect.writing import whole_file, whole_folder


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_killed_process_left_of_the_same_file_is_removed(tmp_path: Path, dead: int) -> None:
    (tmp_path / f".x.json.{dead}.tmp").write_text("half")
    with whole_file(tmp_path / "x.json", overwrite=False) as beside:
        beside.write_text("whole")

    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"x.json": "whole"}


def test_what_a_killed_process_left_of_the_same_folder_is_removed(tmp_path: Path, dead: int) -> None:
    (tmp_path / f".tables.{dead}.tmp").mkdir()
    (tmp_path / f".tables.{dead}.tmp" / "half").write_text("half")
    with whole_folder(tmp_path / "tables", "marker", overwrite=False) as beside:
        (beside / "marker").write_text("")

    assert os.listdir(tmp_path) == ["tables"]


def test_what_others_write_or_have_stays(tmp_path: Path, dead: int) -> None:
    kept = [
        f".x.json.{os.getppid()}.tmp",  # of a process that runs
        ".x.json.1.tmp",  # of somebody else's
        f".y.json.{dead}.tmp",
        f".xxjson.{dead}.tmp",
        f".x.json.{dead}.tmp.gz",
        f".x.json.{dead}0000000000.tmp",
        f".x.json.0{dead}.tmp",
        ".x.json.0.tmp",
        ".x.json.old.tmp",
    ]
    for name in kept:
        (tmp_path / name).write_text("")
    (tmp_path / f".x.json.{dead}.tmp").mkdir()
    (tmp_path / f".x.json.9{dead}.tmp").symlink_to(tmp_path / "elsewhere")
    before = set(os.listdir(tmp_path))
    with whole_file(tmp_path / "x.json", overwrite=False):
        pass

    assert set(os.listdir(tmp_path)) == before | {"x.json"}


def test_a_caller_is_told_the_argument_by_which_a_file_is_replaced(tmp_path: Path) -> None:
    taken = tmp_path / "page"
    taken.write_text("mine")

    text = r"page is there already; name another, or pass overwrite=True$"
    with pytest.raises(BadInput, match=text), whole_file(taken, overwrite=False):
        pass
