"""The demo from end to end at a tiny size: trained through the log, stopped, killed, resumed."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.demo.main import demo
from groupstate.demo.settings import Settings
from groupstate.errors import BadInput
from groupstate.log.reading import read_log

TINY = Settings(
    steps=4, batch_size=4, held_out_count=10, warmup_accuracy=0.25, warmup_steps_max=600, checkpoint_every=2, lag_max=4
)
"""Warmed up only so far that some groups have a signal, and trained for a few steps."""

PROGRAM = f"""
import pathlib, sys
from groupstate.demo.main import demo
from groupstate.demo.settings import Settings
demo(out=pathlib.Path(sys.argv[1]), resume="resume" in sys.argv, recipe={TINY!r}, steps=400)
"""


def quiet():
    return Console(file=io.StringIO())


@pytest.fixture(scope="module", params=["async", "sync"])
def finished(request, tmp_path_factory):
    """A run that has trained to its end: its folder, its mode, what it returned and what it said."""
    folder, console = tmp_path_factory.mktemp("demo") / "run", quiet()
    summary = demo(mode=request.param, out=folder, recipe=TINY, console=console)
    return folder, request.param, summary, console.file.getvalue().replace("\n", "")


def test_it_trains_through_the_log_and_leaves_what_it_says(finished):
    folder, mode, summary, said = finished
    records = list(read_log(folder))
    book = replayed(records)

    assert (summary.steps, summary.mode, summary.held_out_tasks) == (4, mode, 10)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert book.totals["batches_committed"] == 4
    assert book.weight_version == 4
    assert violations(records) == []
    assert f"check {folder}" in said


def test_settings_that_do_not_go_with_a_run_are_refused(finished):
    folder, mode, *_ = finished
    other = "sync" if mode == "async" else "async"

    with pytest.raises(BadInput, match="is not empty"):
        demo(out=folder, console=quiet())
    with pytest.raises(BadInput, match="was begun with seed 0"):
        demo(out=folder, resume=True, seed=3, console=quiet())
    with pytest.raises(BadInput, match=f"was begun with mode {mode}"):
        demo(out=folder, resume=True, mode=other, console=quiet())
    with pytest.raises(BadInput, match="is at step 4 already"):
        demo(out=folder, resume=True, steps=1, console=quiet())


def test_a_run_that_isnt_there_is_not_resumed_and_none_is_begun(tmp_path):
    with pytest.raises(BadInput, match=r"there is no run in .*nosuch to resume; start one there with: "):
        demo(out=tmp_path / "nosuch", resume=True, recipe=TINY, console=quiet())

    assert not (tmp_path / "nosuch").exists()


def test_a_place_that_cannot_be_written_to_is_refused_before_the_warm_up(tmp_path, monkeypatch):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(BadInput, match="is a file"):
        demo(out=file / "run")
    assert file.read_text() == "mine"

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadInput, match="takes no files"):
        demo(out=tmp_path / "runs" / "one")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_has_ended_can_be_trained_further(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    summary = demo(out=folder, resume=True, steps=6, console=quiet())

    assert summary is not None
    assert summary.steps == 6
    assert violations(read_log(folder)) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_stopped_by_a_signal_it_goes_on_from_its_last_checkpoint(tmp_path, number):
    run = tmp_path / "run"
    running = subprocess.Popen([sys.executable, "-c", PROGRAM, str(run)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 400
        while not (run / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        running.send_signal(number)
        code = running.wait(timeout=60)
    finally:
        running.kill()
        running.wait()
    before = replayed(read_log(run))

    summary = demo(out=run, resume=True, steps=before.weight_version + 2, console=quiet())
    records = list(read_log(run))
    after = replayed(records)

    assert code == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    assert summary is not None
    assert after.totals["committed"] == 4 * (before.weight_version + 2)
    assert violations(records) == []
