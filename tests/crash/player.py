"""A process that runs a run with real files until it is killed, and says over its standard output what it was told.

`python player.py RUN PLAN`, where PLAN is JSON: seed, keep, and for an endless run how it goes on. Each line that it
writes is JSON and was true before it was written.
"""

import asyncio
import json
import os
import random
import sys
import zlib
from typing import Any

from groupstate import CheckpointMark, RetryableError, Rules, SessionContext, Trajectory, open_run
from groupstate.errors import LogFailed, NotEnoughGroups
from groupstate.log.file import FileLog
from groupstate.runtime.sources import ListSource

ENDLESS = Rules(filter_metric="reward", lag_max=3, attempts_max=2, retry_delay_s=0.002, eviction_streak_max=10_000)
FINITE = Rules(filter_metric="reward", attempts_max=2, retry_delay_s=0.002, eviction_streak_max=10_000)
"""Without a bound on lag: what is trained on depends on the prompts alone."""
SEGMENT_BYTES = 6_000
PAYLOAD_FILE_BYTES = 4_000
SNAPSHOT_EVENTS = 40


def tell(**what: Any) -> None:
    """One line, in one write."""
    os.write(1, json.dumps(what).encode() + b"\n")


def drawn(*words: object) -> int:
    """The same number for the same words, in every process."""
    return zlib.crc32(repr(words).encode())


async def session(ctx: SessionContext) -> Trajectory:
    """Every seventh session fails at first; every fifth prompt has no variance."""
    number = drawn(ctx.prompt.content, ctx.session)
    await asyncio.sleep(number % 5 / 1000)
    if number % 7 == 0 and ctx.attempt == 1:
        raise RetryableError("at first")
    flat = drawn("flat", ctx.prompt.content) % 5 == 0
    return Trajectory(text=f"{ctx.prompt.content} " * 9, reward=0.0 if flat else float(ctx.session))


def log_at(path: str, keep: Any) -> FileLog:
    make = FileLog.open if os.path.lexists(os.path.join(path, "run.json")) else FileLog.create
    return make(path, keep=keep, segment_bytes=SEGMENT_BYTES, payload_file_bytes=PAYLOAD_FILE_BYTES)


def opened(path: str, plan: dict[str, Any], source: ListSource, rules: Rules, mark: str | None = None) -> Any:
    return open_run(
        log=log_at(path, plan["keep"]),
        snapshot_events=SNAPSHOT_EVENTS,
        rules=rules,
        source=source,
        session=session,
        group_size=2,
        grace_s=0,
        resume_at=CheckpointMark.from_json(mark) if mark else None,
    )


async def endless(path: str, plan: dict[str, Any]) -> None:
    """Sample, publish, commit, release and make checkpoints for ever."""
    chance = random.Random(plan["seed"])
    tell(opening=True)
    async with opened(path, plan, ListSource(range(1_000_000)), ENDLESS, plan.get("mark")) as run:
        tell(opened=run.book.last_seq, batches=sorted(run.book.batches))
        out = []
        while True:
            batch = await run.sample(2)
            tell(sampled=batch.number, groups=batch.group_ids)
            out.append(batch.number)
            if len(out) > chance.choice([0, 0, 2]):
                number = out.pop(0)
                if chance.random() < 0.1:
                    await run.release(number)
                    tell(released=number)
                    continue
                await run.publish_weights(run.weight_version + 1)
                await run.commit(number)
                tell(committed=number)
            if chance.random() < 0.3:
                mark = await run.checkpoint()
                tell(mark=mark.to_json(), seq=mark.seq)


async def finite(path: str, plan: dict[str, Any]) -> None:
    """Train on every prompt of two epochs, and end."""
    tell(opening=True)
    source = ListSource(range(plan["prompts"]), epochs=2, shuffle_seed=5)
    async with opened(path, plan, source, FINITE) as run:
        size = 2
        while size:
            try:
                batch = await run.sample(size)
            except NotEnoughGroups:
                size -= 1  # an odd one at the end
                continue
            await run.publish_weights(run.weight_version + 1)
            await run.commit(batch)
            if run.weight_version % 5 == 0:
                await run.checkpoint()
            await asyncio.sleep(plan.get("step_s", 0))
    tell(ended=True)


async def together(path: str, plan: dict[str, Any]) -> None:
    """Several samplers at once, of which most wait: so many batches, or until the log fails. Each says how it ended."""
    tell(opening=True)
    left = iter(range(plan["batches"]))

    async def sampler(run: Any, name: int) -> None:
        try:
            for _ in left:
                batch = await run.sample(2)
                tell(sampled=batch.number, groups=batch.group_ids)
                await run.commit(batch)
                tell(committed=batch.number)
        except LogFailed as error:
            tell(sampler=name, failed=str(error))
        else:
            tell(sampler=name, failed=None)

    try:
        async with opened(path, plan, ListSource(range(1_000_000)), ENDLESS) as run:
            await asyncio.gather(*(sampler(run, name) for name in range(plan["samplers"])))
    except LogFailed:
        pass  # as the samplers were told
    tell(ended=True)


if __name__ == "__main__":
    told_plan = json.loads(sys.argv[2])
    way = finite if "prompts" in told_plan else together if "samplers" in told_plan else endless
    asyncio.run(way(sys.argv[1], told_plan))
