"""Runs to look at: one that was really driven, and ones made of hand-written events."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.log.file import FileLog
from groupstate.simulate.loop import EPOCH_NS, VirtualLoop, run_virtual

LOG_ID = "0123456789abcdef" * 2


@pytest.fixture
def driven(tmp_path: Path) -> Path:
    """Two trainer steps in virtual time: group g3 loses a session, g5 has no variance, a batch comes back."""
    path = tmp_path / "driven"

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        await anyio.sleep(0.25 * (ctx.session + 1))
        if ctx.prompt.content == 2 and ctx.session == 1:
            raise ValueError("boom\n\x1b[31mred")
        return gs.Trajectory(reward=0.7 if ctx.prompt.content == 4 else float(ctx.session))

    async def main(loop: VirtualLoop) -> None:
        async with gs.open_run(
            rules=gs.Rules(filter_metric="reward", lag_max=1, batch_size=3),
            source=range(12),
            session=session,
            group_size=2,
            clock_ns=loop.clock_ns,
            log=FileLog.create(path, inline=True, log_id=LOG_ID, durability="os", now_ns=loop.clock_ns),
        ) as run:
            await run.commit(await run.sample(3))
            await run.checkpoint("first")
            await run.release(await run.sample(3, weight_version=1))

    run_virtual(main)
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., Path]:
    """Keeps events as a run directory; one second lies between two events."""

    def keep(*events: ev.AnyEvent, name: str = "kept") -> Path:
        records = [ev.Record(seq, EPOCH_NS + seq * 1_000_000_000, event) for seq, event in enumerate(events, 1)]

        async def write() -> None:
            log = FileLog.create(tmp_path / name, inline=True, log_id=LOG_ID, durability="os")
            for record in records:
                log.post([record])
            await log.aclose()

        anyio.run(write)
        return tmp_path / name

    return keep
