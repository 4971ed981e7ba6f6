"""Interrupts that a real process gets while it settles."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from groupstate import open_run
from groupstate.core.invariants import violations
from groupstate.core.phases import Phase

PROGRAM = """
import asyncio, sys
from groupstate import Trajectory, open_run

async def session(ctx):
    if ctx.group_id == "quick":
        return Trajectory(reward=1.0)
    print("runs", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("settles", flush=True)
        await asyncio.sleep(600)

async def main():
    async with open_run(sys.argv[1], session=session, group_size=1) as run:
        for name in ("quick", "a", "b", "c"):
            run.submit("prompt", group_id=name)
        await run.sample(4)

asyncio.run(main())
"""


def test_a_second_interrupt_leaves_a_log_to_go_on_from(tmp_path: Path):
    path = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    try:
        for said in ("runs", "settles"):
            assert [running.stdout.readline().strip() for _ in range(3)] == [said] * 3
            running.send_signal(signal.SIGINT)
        running.wait(60)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()

    async def again() -> None:
        async with open_run(path) as run:
            assert violations(run.ledger.log.read()) == []
            # What had no end when the process went is there once, to be run again; what had ended is ready.
            assert [group.group_id for group in run.book.in_phase(Phase.PENDING)] == ["a", "b", "c"]
            assert (await run.sample(1)).group_ids == ["quick"]
            assert run.book.totals["submitted"] == 4

    asyncio.run(again())
