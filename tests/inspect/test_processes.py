"""The commands as processes: pipes that close, signals, and a log that grows while it is read."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.log.file import FileLog

GROUPSTATE = [sys.executable, "-m", "groupstate"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS")}


@contextmanager
def started(*args: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*GROUPSTATE, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def new_log(path: Path, count: int) -> FileLog:
    log = FileLog.create(path, inline=True, durability="os")
    log.post([ev.Record(1, 1, ev.RunStarted("r", {}, RULES_VERSION, 0))])
    log.post([ev.Record(seq, seq, ev.WeightsPublished(seq)) for seq in range(2, count + 1)])
    return log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    made = new_log(tmp_path / "run", 3)
    yield made
    anyio.run(made.aclose)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_following_shows_what_is_written_and_ends_on_a_signal(log: FileLog, ending: signal.Signals) -> None:
    with started("log", log.path, "--follow") as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().split("\t")[0] for _ in range(3)]
        log.post([ev.Record(4, 4, ev.WeightsPublished(4))])
        seen.append(process.stdout.readline().split("\t")[0])
        process.send_signal(ending)
        _, errors = process.communicate(timeout=20)

    assert seen == ["1", "2", "3", "4"]
    assert (process.returncode, errors) == (0, "")


def test_following_ends_when_nobody_reads(log: FileLog) -> None:
    with started("log", log.path, "--follow") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()

        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    anyio.run(new_log(tmp_path / "run", 20_000).aclose)
    with started("log", tmp_path / "run") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("1\t")
        process.stdout.close()

        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


def test_a_command_that_writes_as_it_goes_ends_quietly_when_nobody_reads() -> None:
    with started("explore", "drop", "wait") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("drop: ")
        process.stdout.close()

        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


def test_looking_at_a_log_needs_no_torch(driven: Path) -> None:
    code = (
        "import sys; from groupstate.cli import main; main(['log', sys.argv[1]], standalone_mode=False); "
        "print(sorted({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, driven], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"
