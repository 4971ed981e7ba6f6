"""Runs in which something went wrong, each in one way that users meet.

Rule: a story is the same on every machine: virtual time, names of its own, no chance.
"""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from groupstate import Prompt, Rules, Trajectory
from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.errors import NotEnoughGroups
from groupstate.simulate.loop import EPOCH_NS, VirtualLoop
from tests.histories.stories import log_at, on

FILTER = Rules(filter_metric="reward", lag_max=2, batch_size=3, stall_s=0)


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [Prompt(f"question {number}", n=2, group_id=f"{name}{number}") for number in range(1, count + 1)]


def killed(path: Path, at: Path) -> None:
    """What lies on the disk when the process is killed now."""
    shutil.copytree(path, at, ignore=shutil.ignore_patterns("lock", "readers"))


async def hang(loop: VirtualLoop, path: Path) -> None:
    """A session that never ends, and no deadline: its trainer waits for half an hour, and is killed."""

    async def session(ctx: Any) -> Trajectory:
        await anyio.sleep(4 + ctx.session)
        if ctx.group_id == "p6" and ctx.session == 1:
            await anyio.sleep_forever()
        return Trajectory(reward=float(ctx.session))

    live = path.with_name(f"{path.name}-live")
    rules = FILTER.changed(admission={"kind": "per_batch", "warmup": 0})
    async with on(loop, live, rules=rules, source=prompts(6), session=session) as run:
        await run.commit(await run.sample(3))
        await run.publish_weights(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.sample, 3)
            await anyio.sleep(1800)
            killed(live, path)
            tasks.cancel_scope.cancel()


async def straggler(loop: VirtualLoop, path: Path) -> None:
    """One session that takes five minutes where the others take seconds: each batch waits for its slowest."""

    async def session(ctx: Any) -> Trajectory:
        slow = ctx.group_id == "p5" and ctx.session == 0
        await anyio.sleep(300 if slow else 2 + ctx.session)
        return Trajectory(reward=float(ctx.session))

    rules = FILTER.changed(admission={"kind": "per_batch", "warmup": 0})
    async with on(loop, path, rules=rules, source=prompts(9), session=session) as run:
        for version in range(1, 4):
            await run.commit(await run.sample(3))
            await run.publish_weights(version)


async def dry_source(loop: VirtualLoop, path: Path) -> None:
    """A file of eight prompts of which three have the same reward throughout: the third batch can't be had."""

    async def session(ctx: Any) -> Trajectory:
        await anyio.sleep(1 + ctx.session)
        return Trajectory(reward=1.0 if ctx.group_id in ("p3", "p4", "p7") else float(ctx.session))

    async with on(loop, path, rules=FILTER.changed(batch_size=2), source=prompts(8), session=session) as run:
        try:
            for version in range(1, 4):
                await run.commit(await run.sample(2))
                await run.publish_weights(version)
        except NotEnoughGroups:
            pass  # the log has it


async def starved_dataset(loop: VirtualLoop, path: Path) -> None:
    """Two data sets, and every answer to one of them gets the same reward: nothing of it is ever trained on."""

    async def session(ctx: Any) -> Trajectory:
        await anyio.sleep(1 + ctx.session)
        return Trajectory(reward=0.0 if ctx.prompt.dataset == "proofs" else float(ctx.session))

    rules = FILTER.changed(starvation_versions=2, batch_size=2)
    source = {"sums": prompts(40, "sum"), "proofs": prompts(40, "proof")}
    async with on(loop, path, rules=rules, source=source, session=session) as run:
        for version in range(1, 5):
            await run.commit(await run.sample(2))
            await run.publish_weights(version)


async def late_write(loop: VirtualLoop, path: Path) -> None:
    """A worker that outlives the process that gave it its work, and reports to the next one."""
    live = path.with_name(f"{path.name}-live")
    async with on(loop, live, rules=Rules(lag_max=2)) as run:
        for name in ("g1", "g2"):
            group = run.submit(f"question of {name}", group_id=name)
            group.start(0, worker="worker-a")
            group.start(1, worker="worker-b")
        await anyio.sleep(20)
        await run.ledger.log.durable(run.book.last_seq)
        killed(live, path)
    async with on(loop, path, rules=Rules(lag_max=2)) as run:
        for session in range(2):
            run.ledger.start("g1", session, worker="worker-c")
        await anyio.sleep(3)
        # worker-a still works on the first attempt, and knows of no other.
        run.ledger.finish("g1", 0, 1, [Trajectory(reward=0.25)])
        for session in range(2):
            run.ledger.finish("g1", session, 2, [Trajectory(reward=float(session))])
        await run.commit(await run.sample(1))
        run.ledger.finish("g1", 1, 1, [Trajectory(reward=0.75)])


async def double_sample(loop: VirtualLoop, path: Path) -> None:
    """What no run of this library writes: a group that two batches hold. Written by hand, as a fault would."""
    log = log_at(loop, path)
    row = (ev.TrajectoryRecord(0, {"reward": 1.0}, 3, 4),)
    events: list[ev.AnyEvent] = [ev.RunStarted(log.log_id, Rules().to_dict(), RULES_VERSION, 0)]
    for name in ("g1", "g2", "g3"):
        events += [
            ev.GroupSubmitted(name, 1, ev.TRAIN, 0, 1, "submit"),
            ev.SessionStarted(name, 0, 1),
            ev.SessionFinished(name, 0, 1, row),
            ev.GroupFinished(name),
        ]
    for batch, names in ((1, ("g1", "g2")), (2, ("g2", "g3"))):
        events.append(ev.BatchRequested(batch, ev.TRAIN, 2, 0))
        events.append(ev.BatchSampled(batch, batch, ev.TRAIN, names, 0, (0, 0)))
    for seq, event in enumerate(events, 1):
        log.post([ev.Record(seq, EPOCH_NS + seq * 1_000_000_000, event)])
    await log.aclose()


STORIES: dict[str, Callable[[VirtualLoop, Path], Awaitable[None]]] = {
    story.__name__: story for story in (hang, straggler, dry_source, starved_dataset, late_write, double_sample)
}
