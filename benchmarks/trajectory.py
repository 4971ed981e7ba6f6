"""What a trajectory costs that is kept, and how long a run takes to open again.

A trajectory is an answer of 1,000 tokens with log-probabilities to a prompt of 100. Its cost is all that happens from
the start of its session until its end and its payload are durable, while 64 sessions come and go side by side; beside
it the same with nothing on a disk. The run that is opened again holds 50,000 in groups that nobody has sampled.
"""

import asyncio
import itertools
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks import stream
from benchmarks.measure import Measurement, Result, Spread, interleaved
from groupstate import Run, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.log.file import FileLog

ADDED_MAX_S = 0.3e-3
OPENING_MAX_S = 3.0
SESSIONS = 8
AT_ONCE = 64
TOKENS = 1_000
PAYLOAD_BYTES = 9_000
"""About what the tokens and log-probabilities of one answer take."""


async def measure(folder: Path, *, count: int = 1_024, repetitions: int = 15) -> Result:
    """
    Args:
        count: trajectories of a repetition.
    """
    with TemporaryDirectory(dir=folder) as place:
        async with open_run(Path(place) / "run") as kept, open_run() as bare:
            variants = {"log in files": _trajectories(kept, count), "log in memory": _trajectories(bare, count)}
            for warm_up in variants.values():
                await warm_up()
            spreads = await interleaved(variants, repetitions)
    added = Spread(
        tuple(a - b for a, b in zip(spreads["log in files"].values, spreads["log in memory"].values, strict=True))
    )
    title = "a trajectory from start to durable end, per trajectory"
    return Result(title, {**spreads, "the difference": added}, added.median, ADDED_MAX_S, "seconds")


def _trajectories(run: Run, count: int) -> Measurement:
    row = Trajectory(
        prompt_ids=range(100),
        response_ids=range(TOKENS),
        log_probs=[-0.5] * TOKENS,
        reward=1.0,
        metrics={"overlong": 0.5},
    )
    log = run.ledger.log

    async def measured() -> float:
        groups = [run.submit("a prompt of some forty characters or so", n=SESSIONS) for _ in range(count // SESSIONS)]
        left = iter([(group, session) for group in groups for session in range(SESSIONS)])

        async def producer() -> None:
            for group, session in left:
                group.start(session).finish(row)
                await log.durable(log.last_seq)

        begin = time.perf_counter()
        await asyncio.gather(*(producer() for _ in range(AT_ONCE)))
        spent = time.perf_counter() - begin
        await run.commit(await run.sample(len(groups)))
        return spent / count

    return measured


async def measure_opening(folder: Path, *, groups: int = 6_250, repetitions: int = 5) -> Result:
    """
    Args:
        groups: of eight trajectories each, that the run holds.
    """
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "run"
        await asyncio.to_thread(_fill, path, groups)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

        async def opened() -> float:
            begin = time.perf_counter()
            async with open_run(path) as run:
                spent = time.perf_counter() - begin
                assert run.sampleable_count() == groups
            return spent

        spreads = await interleaved({"open_run": opened}, repetitions)
    title = f"opening a run again with {groups:,} groups, {groups * SESSIONS:,} trajectories"
    return Result(title, spreads, spreads["open_run"].median, OPENING_MAX_S, "seconds", [f"{size / 1e6:,.0f} MB"])


def _fill(path: Path, groups: int) -> None:
    log = FileLog.create(path, inline=True, durability="os")
    payload = bytes(PAYLOAD_BYTES)
    events = itertools.chain(
        [ev.RunStarted("benchmark", {}, 1, 0)],
        *(
            stream.ended(range(begin, min(begin + AT_ONCE, groups)), 0, random.Random(begin))
            for begin in range(0, groups, AT_ONCE)
        ),
    )
    for record in stream.records(events):
        log.post([_with_payload(log, payload, record)])
    asyncio.run(log.aclose())


def _with_payload(log: FileLog, payload: bytes, record: ev.Record) -> ev.Record:
    event = record.event
    if isinstance(event, ev.SessionFinished):
        event = ev.SessionFinished(event.group_id, event.session, 1, event.trajectories, log.payloads.put(payload))
    elif isinstance(event, ev.GroupSubmitted):
        event = replace(event, prompt=log.payloads.put(payload[:400]))
    return ev.Record(record.seq, record.at_ns, event)
