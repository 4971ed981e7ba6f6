"""A run that closes on a signal: in a real process, and what the closing itself does."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from groupstate import Trajectory, open_run
from groupstate import sync as blocking
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.core.phases import Phase
from groupstate.errors import BadSettings, LogFailed, RunIsClosed
from groupstate.log.file import FileLog
from groupstate.log.reading import read_log
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import endless, events, half_right, opened, quiet, ready, started, virtual

# A real process --------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from groupstate import Trajectory, open_run
from groupstate.errors import RunIsClosed

async def session(ctx):
    if ctx.prompt.content % 5 == 4:
        await asyncio.sleep(600)
    return Trajectory(reward=float(ctx.session))

async def main():
    signals = sys.argv[2].split(",") if sys.argv[2] else ()
    try:
        async with open_run(
            sys.argv[1], source=range(200), session=session, group_size=2, grace_s=0.2, close_on=signals
        ) as run:
            while True:
                batch = await run.sample(1)
                print(*batch.group_ids, flush=True)
                await asyncio.sleep(0.05)
                await run.commit(batch)
    except RunIsClosed:
        print("closed", run.final_mark.name, flush=True)

asyncio.run(main())
"""


def running(path: Path, signals: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), signals],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def signalled(path: Path, signals: str, *numbers: signal.Signals) -> tuple[int, list[str]]:
    """Let it train on two batches, then send signals; its exit code, and what it said."""
    process = running(path, signals)
    assert process.stdout is not None
    try:
        said = [process.stdout.readline().strip() for _ in range(2)]
        for number in numbers:
            process.send_signal(number)
        said += process.stdout.read().split("\n")
        return process.wait(60), [line for line in said if line]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def trained_on(path: Path) -> list[str]:
    """Groups committed, in order; the log must be sound."""
    records = list(read_log(path))
    assert violations(records) == []
    sampled = {r.event.batch: r.event.group_ids for r in records if isinstance(r.event, ev.BatchSampled)}
    return [name for r in records if isinstance(r.event, ev.BatchCommitted) for name in sampled[r.event.batch]]


def test_sigterm_ends_the_program_well_and_the_same_command_goes_on(tmp_path: Path):
    path = tmp_path / "run"
    counts = []
    for _ in range(3):
        code, said = signalled(path, "SIGTERM", signal.SIGTERM)
        *groups, last = said
        assert (code, last) == (0, "closed SIGTERM")
        mark, closed = [record.event for record in read_log(path)][-2:]
        assert (mark.name, closed) == ("SIGTERM", ev.RunClosed("SIGTERM"))
        # What was with the trainer was committed within the grace, so the mark is behind it.
        assert trained_on(path)[-len(groups) :] == groups
        counts.append(len(trained_on(path)))

    assert counts[0] < counts[1] < counts[2]
    assert len(set(trained_on(path))) == counts[2]


def test_one_interrupt_loses_nothing(tmp_path: Path):
    code, said = signalled(tmp_path / "run", "SIGTERM", signal.SIGINT)
    assert code not in (0, None)
    assert trained_on(tmp_path / "run")[: len(said) - 1] == said[:-1]

    code, again = signalled(tmp_path / "run", "SIGTERM", signal.SIGTERM)
    assert code == 0
    assert len(set(trained_on(tmp_path / "run"))) == len(trained_on(tmp_path / "run"))
    assert again[0] == said[-1] or again[0] not in said


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGKILL])
def test_a_second_interrupt_is_no_worse_than_a_kill(tmp_path: Path, second: signal.Signals):
    signalled(tmp_path / "run", "", signal.SIGINT, second)

    code, _ = signalled(tmp_path / "run", "SIGTERM", signal.SIGTERM)
    assert code == 0
    assert len(set(trained_on(tmp_path / "run"))) == len(trained_on(tmp_path / "run"))


async def test_a_signal_in_this_process_closes_the_run_and_the_handler_goes_with_it(tmp_path: Path):
    async with open_run(tmp_path / "run", close_on=["SIGUSR1"]) as run:
        waiting = asyncio.ensure_future(run.sample(1))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(RunIsClosed):
            await waiting
    assert run.final_mark is not None
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["SIGNONE"], "'SIGNONE'; it names signals"),
        ([12345], "12345; it names signals"),
        ("SIGKILL", "SIGKILL, which no process can catch"),
    ],
)
async def test_what_is_no_signal_to_close_on_is_refused(tmp_path: Path, names, text: str):
    with pytest.raises(BadSettings, match=text):
        async with open_run(tmp_path / "run", close_on=names):
            pass
    assert not (tmp_path / "run").exists()


def test_only_the_main_thread_gets_signals(tmp_path: Path):
    with (
        pytest.raises(BadSettings, match="close_on needs the main thread"),
        blocking.open_run(tmp_path / "run", close_on=["SIGTERM"]),
    ):
        pass
    with blocking.open_run(tmp_path / "run") as run:
        assert run.frontier() == ()
        run.close("SIGTERM", mark=True)
        run.close()
        assert run.final_mark.name == "SIGTERM"
    assert threading.active_count() < 20


# The closing -----------------------------------------------------------------------------------------


@virtual
async def test_a_closing_with_a_mark_waits_for_the_trainers_batch_within_the_grace(loop, tmp_path):
    async with opened(loop, tmp_path / "run", grace_s=10.0) as run:
        ready(run, "a", "b")
        batch = await run.sample(1)
        closing = started(run.close("SIGTERM", mark=True))
        await anyio.sleep(5)
        assert not closing.done()
        await run.commit(batch)
        await closing

    names = [type(event).__name__ for event in events(run)]
    assert names[-3:] == ["BatchCommitted", "CheckpointMarked", "RunClosed"]
    assert run.final_mark.seq == run.book.last_seq - 1


@virtual
async def test_once_the_block_is_left_nobody_commits_any_more(loop, tmp_path):
    began = loop.time()
    async with opened(loop, tmp_path / "run", grace_s=10.0) as run:
        ready(run, "a")
        await run.sample(1)
        closing = started(run.close("SIGTERM", mark=True))
        await anyio.sleep(1)
    await closing

    assert loop.time() - began < 2
    async with opened(loop, tmp_path / "run", resume_at=run.final_mark) as run:
        assert (await run.sample(1)).group_ids == ["a"]


@virtual
async def test_without_a_mark_it_waits_for_no_batch_and_past_the_grace_for_nothing(loop, tmp_path):
    for mark, seconds in ((False, 0), (True, 3)):
        async with opened(loop, tmp_path / f"run {mark}", grace_s=3.0) as run:
            ready(run, "a")
            await run.sample(1)
            began = loop.time()
            await run.close(mark=mark)
            assert round(loop.time() - began) == seconds
            assert (run.final_mark is not None) == mark


@virtual
async def test_sessions_that_do_not_end_start_over_before_the_mark(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=endless, grace_s=1.0) as run:
        run.submit("p", group_id="g")
        await quiet()
        await run.close("SIGTERM", mark=True)

    assert [type(event).__name__ for event in events(run)][-3:] == ["GroupRequeued", "CheckpointMarked", "RunClosed"]
    async with opened(loop, tmp_path / "run", session=half_right, resume_at=run.final_mark) as run:
        assert (await run.sample(1)).group_ids == ["g"]


@virtual
async def test_a_log_that_failed_has_no_mark_and_is_not_waited_for(loop):
    disk = FaultyDisk()
    with pytest.raises(LogFailed):
        async with open_run(log=FileLog.create("/run", disk=disk, inline=True), clock_ns=loop.clock_ns) as run:
            ready(run, "a")
            await run.sample(1)
            disk.fault = Fault(disk.operation_count + 1, once=False)
            began = loop.time()
            with pytest.raises(LogFailed):
                run.submit("b")
                await run.wait_changed()
            await quiet()
            await run.close("SIGTERM", mark=True)
            assert loop.time() - began < 1
    assert run.final_mark is None


# Another event loop ----------------------------------------------------------------------------------


def test_a_notebook_opens_a_run_again_on_another_event_loop(tmp_path: Path):
    """As cells do it: each runs an event loop of its own, in one process that stays."""

    async def session(ctx):
        return Trajectory(reward=float(ctx.session))

    async def cell():
        async with open_run(tmp_path / "run", source=range(9), session=session, group_size=2) as run:
            batch = await run.sample(2)
            await run.commit(batch)
            return batch.group_ids

    async def interrupted():
        async with open_run(tmp_path / "run", source=range(9), session=session, group_size=2) as run:
            await run.sample(1)
            raise KeyError("in the cell")

    first = asyncio.run(cell())
    with pytest.raises(KeyError):
        asyncio.run(interrupted())
    second = anyio.run(cell)

    assert (first, second) == (["g1", "g2"], ["g3", "g4"])
    assert violations(read_log(tmp_path / "run")) == []

    async def left():
        async with open_run(tmp_path / "run") as run:
            return list(run.book.in_phase(Phase.RUNNING))

    assert asyncio.run(left()) == []
