"""Which process is which."""

import os
import platform
import subprocess
import sys

import attrs
import pytest

from groupstate.log import process
from groupstate.log.process import boot_id, is_alive, start_time, this_process


def test_this_process_is_alive():
    assert is_alive(this_process())


def test_a_process_that_ended_is_dead():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert not is_alive(attrs.evolve(this_process(), pid=ended.pid))


def test_a_process_of_another_start_or_machine_is_not_known_to_live():
    own = this_process()

    assert not is_alive(attrs.evolve(own, started="before"))
    assert not is_alive(attrs.evolve(own, boot="before"))
    assert not is_alive(attrs.evolve(own, host="elsewhere"))


def test_a_process_that_may_not_be_asked_lives(monkeypatch):
    def refuse(pid, signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(this_process())


def test_a_process_whose_start_cannot_be_known_lives(monkeypatch):
    monkeypatch.setattr(process, "start_time", lambda pid: None)

    assert is_alive(attrs.evolve(this_process(), started="at some time"))


def test_the_start_time_is_found_behind_any_name(tmp_path):
    (tmp_path / "7").mkdir()
    fields = ["S", *(str(number) for number in range(1, 40))]
    (tmp_path / "7" / "stat").write_text(f"7 (a) b ( S)) {' '.join(fields)}")

    assert start_time(7, str(tmp_path)) == "19"
    (tmp_path / "7" / "stat").write_text(f"7 (a) {' '.join(['Z', *fields[1:]])}")
    assert start_time(7, str(tmp_path)) == ""


def test_without_proc_the_tools_of_the_system_are_asked(monkeypatch, tmp_path):
    answers = {"ps": "Sun Nov 29 10:00:00 2026\n", "sysctl": "SOME-UUID\n"}

    def answer(command, **options):
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[0]])

    monkeypatch.setattr(subprocess, "run", answer)
    assert start_time(os.getpid(), str(tmp_path)) == "Sun Nov 29 10:00:00 2026"
    assert boot_id(str(tmp_path / "none")) == "SOME-UUID"


def test_without_any_tool_the_start_is_unknown_and_the_boot_id_names_the_machine(monkeypatch, tmp_path):
    def fail(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", fail)
    assert start_time(os.getpid(), str(tmp_path)) is None
    assert boot_id(str(tmp_path / "none")).startswith("host-")


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_on_linux_the_start_time_is_a_number():
    assert start_time(os.getpid()).isdecimal()
