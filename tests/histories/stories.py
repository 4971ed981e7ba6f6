"""Stories that golden logs are made of: together they have every kind of event, every field, and every transition.

Rule 1: a story is the same on every machine: virtual time, names of its own, no chance.
Rule 2: a story whose log is kept isn't edited; what is new gets a story of its own.
"""

import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from groupstate import Drop, GroupHandle, Prompt, RetryableError, Rules, Run, Select, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.rules import PerDataset, Slots
from groupstate.errors import SampleTimeout
from groupstate.log.file import FileLog
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed
from groupstate.simulate.loop import VirtualLoop


def log_at(loop: VirtualLoop, path: Path, **options: Any) -> FileLog:
    """The log of a story, new or opened again."""
    settings = {"inline": True, "now_ns": loop.clock_ns, "segment_bytes": 4_000, "payload_file_bytes": 2_000, **options}
    if (path / "run.json").exists():
        return FileLog.open(path, **settings)
    return FileLog.create(path, log_id=f"{zlib.crc32(path.name.encode()):032x}", **settings)


@asynccontextmanager
async def on(loop: VirtualLoop, path: Path, *, log: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Run]:
    event_log = log_at(loop, path, **(log or {}))
    settings = {"group_size": 2, "clock_ns": loop.clock_ns, "snapshot_events": 10**9, **options}
    async with open_run(log=event_log, **settings) as run:
        yield run


def row(reward: float, version: int = 0, *, text: str = "", **metrics: float) -> Trajectory:
    """A trajectory with everything that one can have."""
    return Trajectory(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5, 6, 7],
        log_probs=[-0.5, -0.25, 0.0, -1.5],
        reward=reward,
        metrics={"acc": reward, **metrics},
        spans=[ev.VersionSpan(0, 2, version), ev.VersionSpan(3, 4, version + 1)],
        environment=[(2, 3)],
        text=text,
        info={"why": "told so", "steps": [1, 2]},
    )


def finish(group: GroupHandle, *rewards: float, **metrics: float) -> None:
    for session, reward in enumerate(rewards):
        group.start(session, worker=f"worker-{session}").finish(row(reward, **metrics))


# With a rollout ---------------------------------------------------------------------------------------


def prompts(dataset: str) -> list[Prompt]:
    return [
        Prompt(f"{dataset} {number}?", n=2, group_id=f"{dataset}-{number}", extra={"answer": number})
        for number in range(60)
    ]


async def answer(ctx: Any) -> Any:
    """Fails, falls silent, is late or says something, as the number of the prompt wants it."""
    number, dataset = ctx.prompt.extra["answer"], ctx.prompt.dataset
    await anyio.sleep(1 + number % 3 + ctx.session / 10)
    if number % 7 == 2 and ctx.attempt == 1:
        raise RetryableError("the first time is hard")
    if number % 7 == 4 and ctx.session == 0:
        raise ValueError(f"{dataset} {number} is too hard")
    if number % 7 == 5:
        await anyio.sleep(100)
    if number % 11 == 6:
        return None
    if number % 11 == 7:
        return [row(0.0), row(1.0, text="the second turn")]
    return row(float(ctx.session % 2) if number % 5 else 1.0, text=f"{dataset} {number}!")


async def rollout(loop: VirtualLoop, path: Path) -> None:
    """An async run with a rollout: retries, requeues by the rules, deadlines, sessions to spare, datasets, a filter,
    snapshots, segments that are packed, two openings and a torn commit between them, and a way back to a mark."""
    rules = Rules(
        lag_max=2,
        filter_metric="acc",
        attempts_max=2,
        retry_delay_s=0.5,
        requeues_max=1,
        oversample=1,
        session_deadline_s=20,
        datasets={"math": PerDataset(share=0.75, tolerance=0.1), "code": PerDataset(lag_max=3)},
        starvation_versions=2,
        admission=Slots(n=3, ready_max=2),
    )
    common: dict[str, Any] = {
        "session": answer,
        "source": {"math": prompts("math"), "code": prompts("code")},
        "snapshot_events": 100,
    }
    kept = {"keep": "archive"}
    async with on(loop, path, rules=rules, weight_version=3, seed=42, log=kept, **common) as run:
        for version in range(4, 7):
            await run.commit(await run.sample(2))
            await run.publish_weights(version)
        mark = await run.checkpoint("step 6")
        await run.release(await run.sample(1))
        await run.commit(await run.sample(2))
        await run.validate([Prompt(f"val {i}", "held out", 1, extra={"answer": i}) for i in range(2)])
        await run.publish_weights(9)
        await run.commit(await run.sample(2))
    _tear(path)
    async with on(loop, path, resume_at=mark, on_rewind="evict", log=kept, **common) as run:
        await run.commit(await run.sample(2))
        await run.checkpoint()
        await run.sample(1)
        # The sampled batch comes back when the run is closed.
    other = [Prompt("another?", n=2, group_id="another", extra={"answer": 1})]
    async with on(
        loop, path, log=kept, **{**common, "source": other}, source_changed=True, rules=Rules(lag_max=9)
    ) as run:
        await run.commit(await run.sample(run.sampleable_count()))


def _tear(path: Path) -> None:
    """What an interrupted commit leaves."""
    last = max((path / "log").glob("*.seg"))
    with last.open("ab") as file:
        file.write(b"\xf1GSL\x00torn")


async def compacted(loop: VirtualLoop, path: Path) -> None:
    """A run that keeps the events since its last checkpoint alone."""
    async with on(loop, path, snapshot_events=40, log={"keep": 1, "segment_bytes": 1_500}) as run:
        for number in range(8):
            finish(run.submit(f"prompt {number}", group_id=f"g{number}"), 0.0, 1.0)
            finish(run.submit(f"spare {number}", group_id=f"s{number}"), 1.0, 1.0)
            await run.commit(await run.sample(1))
            await run.publish_weights(number + 1)
            await run.checkpoint(f"step {number}")
    os.rmdir(path / "log" / "readers")  # empty, and git keeps no empty folders


# By hand ----------------------------------------------------------------------------------------------


async def transitions(loop: VirtualLoop, path: Path) -> None:
    """Every cell of the table of transitions, and every value that a reason or a failure can have."""
    async with on(loop, path) as run:
        record = run.ledger.record
        for kind in ("error", "timeout", "cancelled", "lost", "empty", "refused", "spare"):
            # Fails while it is pending, and is fenced there and behind that.
            record(ev.GroupSubmitted(f"f {kind}", 1, "train", 0, 1, "submit", "failing"))
            record(ev.ResultFenced(f"f {kind}", 0, 9, "finished", "attempt"))
            record(ev.SessionFailed(f"f {kind}", 0, 1, kind, f"it was {kind}"))
            record(ev.ResultFenced(f"f {kind}", 0, 1, "failed", "duplicate"))
        record(ev.GroupRequeued("f error", "told so"))
        record(ev.GroupRequeued("f error", "while it is pending"))
        group = run.submit(Prompt("what?", "hard", extra={"answer": 4}), n=3, group_id="g")
        first = group.start(0, worker="worker-0")
        record(ev.ResultFenced("g", 1, 1, "started", "settled"))
        record(ev.SessionStarted("g", 1, 1, "worker-1", 2, True))
        first.fail("once more", retryable=True)
        record(ev.GroupRequeued("g", "while it is running", True))
        await run.publish_weights(2)
        for number in range(3):
            record(ev.SessionStarted("g", number, run.book.group("g").sessions[number].attempt, "w", 2))
            run.ledger.finish("g", number, None, [row(number / 3, 2), row(1.0, 3, length=17.0)])
        record(ev.ResultFenced("g", 0, 1, "finished", "terminal"))
        for name in ("h", "i"):
            finish(run.submit("p", group_id=name), 0.25, 0.75)
        mark = await run.checkpoint("before")
        batch = await run.sample(2)
        record(ev.ResultFenced("g", 0, 1, "finished", "terminal"))
        await run.release(batch)
        await run.commit(await run.sample(2))
        record(ev.ResultFenced("g", 0, 1, "failed", "gone"))
        for number, reason in enumerate(
            ("custom", "damaged", "empty", "failed", "surplus", "too_few", "zero_variance")
        ):
            run.ledger.record(ev.GroupSubmitted(f"e{number}", 1, "train", 1, 1, "submit", "evicted", 100 + number))
            record(ev.SessionStarted(f"e{number}", 0, 1))
            record(ev.SessionFinished(f"e{number}", 0, 1, (ev.TrajectoryRecord(0, {"acc": 0.5}, 3, 4),)))
            both = (reason, "stale")
            record(ev.GroupEvicted(f"e{number}", both, 5, 1, 0.5, "acc", "told so"))
            record(ev.ResultFenced(f"e{number}", 0, 1, "finished", "gone"))
        record(ev.RefillForfeited(2, "told so"))
        await _waits(run)
    async with on(loop, path, resume_at=mark) as run:
        record = run.ledger.record
        # A failed group that rules of sync mode would keep is sampled, and comes back as one.
        partly = run.submit("p", group_id="partly")
        partly.start(0).finish(row(1.0))
        record(ev.SessionFailed("partly", 1, 1, "error", "told so"))
        record(ev.BatchRequested(run.book.last_request + 1, "train", 1, 2))
        record(ev.BatchSampled(run.book.last_batch + 1, run.book.last_request, "train", ("partly",), 2, (0,)))
        await run.ledger.log.durable(record(ev.BatchReturned(run.book.last_batch, "told so")))
        record(ev.GroupRequeued("partly", "it had failed"))
        record(ev.SourceExhausted("told", 17))
        record(ev.AdmissionHeld("told so"))


async def lineages(loop: VirtualLoop, path: Path) -> None:
    """A log that begins with another line of weights than the first."""
    log = log_at(loop, path)
    told = [
        ev.RunStarted(log.log_id, Rules(lag_max=1).to_dict(), 1, 7, 2, "0.1.0", 17),
        ev.WeightsPublished(8, 2),
        ev.RunClosed("told so"),
    ]
    log.post([ev.Record(seq, loop.clock_ns(), event) for seq, event in enumerate(told, 1)])
    await log.aclose()


async def _waits(run: Run) -> None:
    """A sample() that comes to nothing, and a group that is cancelled."""
    try:
        await run.sample(50, timeout_s=5)
    except SampleTimeout:
        pass
    run.submit("p", group_id="unwanted").start(0)
    run.cancel("unwanted")


def picky(book: Any, rules: Rules, request: Any) -> list[Any]:
    """The youngest groups; what is long is dropped."""
    ids = [group.group_id for group in book.ready()][::-1]
    long = [Drop(name, "too long") for name in ids if name.startswith("long")]
    rest = [name for name in ids if not name.startswith("long")]
    return [*long, Select(rest[: request.size])] if len(rest) >= request.size else long


async def own_rule(loop: VirtualLoop, path: Path) -> None:
    """A selection of the user's own, and lag that is counted from the oldest token."""
    async with on(loop, path, selection=picky, rules=Rules(basis="oldest_token", lag_max=3), weight_version=5) as run:
        for name in ("a", "long 1", "b", "long 2", "c"):
            finish(run.submit(name, group_id=name, weight_version=4), 0.0, 1.0)
        await run.publish_weights(6)
        for name in ("d", "e"):
            group = run.submit(name, group_id=name)
            for session in range(2):
                group.start(session).finish(row(session, 4))
        await run.commit(await run.sample(2))


# Sync mode --------------------------------------------------------------------------------------------


async def validation_rounds(loop: VirtualLoop, path: Path) -> None:
    """Rounds of validation: one that is undone by a way back, one that counts, and groups that were submitted alone."""
    common: dict[str, Any] = {"session": answer, "weight_version": 1, "seed": 7}
    held_out = [Prompt(f"val {i}", "held out", 2, extra={"answer": i}) for i in range(2)]
    async with on(loop, path, **common) as run:
        mark = await run.checkpoint()
        await run.validate(held_out)
        run.submit(held_out[1], partition="val")
    async with on(loop, path, resume_at=mark, session=answer) as run:
        await run.validate(held_out[:1], greedy=True)
        await run.commit(await run.sample(1, partition="val"))


async def sync_mode(loop: VirtualLoop, path: Path) -> None:
    """A sync run with a filter: refills, a surplus, groups with too few values, failed groups that are kept."""
    rules = Rules(
        mode="sync",
        batch_size=2,
        filter_metric="acc",
        failure="keep",
        empty="keep",
        empty_session="allow",
        on_missing="evict",
        survivors_min=3,
        in_flight_batches_max=2,
    )
    source = [Prompt(f"p{i}", n=2, group_id=f"p{i}", extra={"answer": i}) for i in range(30)]
    async with on(loop, path, rules=rules, source=source, session=_sync_answer) as run:
        for version in range(1, 6):
            await run.commit(await run.sample(2, weight_version=version))
    async with on(loop, path, source=source, session=_sync_answer) as run:
        await run.commit(await run.sample(2))


async def _sync_answer(ctx: Any) -> Any:
    number = ctx.prompt.extra["answer"]
    await anyio.sleep(1 + number % 2)
    if number % 4 == 1:
        return Trajectory(reward=1.0, metrics={} if number % 8 == 1 else {"acc": 1.0})
    if number % 4 == 3 and ctx.session == 0:
        raise ValueError("too hard")
    if number % 9 == 4:
        raise ValueError("much too hard")
    return None if number % 6 == 4 else row(float(ctx.session))


async def targets(loop: VirtualLoop, path: Path) -> None:
    """Groups that are made for one weight version each, and what becomes of those that miss it."""

    async def session(ctx: Any) -> Any:
        await anyio.sleep(1 if ctx.prompt.extra["answer"] % 5 else 30)
        return row(float(ctx.session))

    rules = Rules.in_order(2, max_lookahead_versions=1, cancel_doomed=True)
    source = [Prompt(f"t{i}", n=2, group_id=f"t{i}", extra={"answer": i}) for i in range(60)]
    async with on(loop, path, rules=rules, source=source, session=session, weight_version=7) as run:
        mark = None
        for version in range(8, 13):
            await run.commit(await run.sample(2))
            mark = mark or await run.checkpoint()
            await run.publish_weights(version)
    async with on(loop, path, source=source, session=session, rules=rules) as run:
        await run.commit(await run.sample(2))
        await run.publish_weights(14)


async def waits_for_stale(loop: VirtualLoop, path: Path) -> None:
    """Sampling that holds for a group in flight at the lag bound, and admission that holds with it."""
    rules = Rules(lag_max=1, on_stale="wait", admission=Slots(n=2, ready_max=2), batch_size=2, survivors_min=1)
    source = [Prompt(f"w{i}", n=2, group_id=f"w{i}", extra={"answer": 1 + 5 * (i == 2) * 20}) for i in range(40)]

    async def session(ctx: Any) -> Any:
        await anyio.sleep(ctx.prompt.extra["answer"])
        if ctx.prompt.content in ("w1", "w5") and ctx.session == 0:
            raise ValueError("too hard")
        return row(float(ctx.session))

    async with on(loop, path, rules=rules, source=source, session=session) as run:
        for version in range(1, 5):
            await run.commit(await run.sample(2))
            await run.publish_weights(version)


# What goes wrong --------------------------------------------------------------------------------------


async def no_room(loop: VirtualLoop, path: Path) -> None:
    """A run that finds no room, goes on once there is some, and has a damaged payload."""

    async def session(ctx: Any) -> Any:
        await anyio.sleep(0.5)
        return row(float(ctx.session), text="long " * 60)

    source = [Prompt(f"r{i}", n=2, group_id=f"r{i}", extra={"answer": i}) for i in range(100)]
    options: dict[str, Any] = {"source": source, "session": session, "rules": Rules(admission=Slots(n=2, ready_max=30))}
    async with on(loop, path, log={"disk_bytes_max": 12_000}, **options) as run:
        await anyio.sleep(60)
    await anyio.sleep(60)
    _damage(path)
    async with on(loop, path, **{**options, "session": None}) as run:
        for _ in range(3):
            await run.commit(await run.sample(2))
        for group in run.pending():
            finish(group, 0.0, 1.0)


def _damage(path: Path) -> None:
    """A flipped bit in the middle of the first payload file."""
    first = min((path / "payloads").glob("*.pay"))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)


async def observed(loop: VirtualLoop, path: Path) -> None:
    """Groups of which only a status is known."""
    feed = StatusFeed.begin(
        log_at(loop, path),
        Rules(filter_metric="acc", lag_max=1),
        group_size=2,
        clock_ns=loop.clock_ns,
        weight_version=1,
    )
    rows = {
        (session, 0): ReportedRow(
            metrics={"acc": float(session)}, prompt_tokens=3, response_tokens=5, spans=(ev.VersionSpan(0, 5, 1),)
        )
        for session in range(2)
    }
    same = {key: ReportedRow(metrics={"acc": 1.0}, response_tokens=2) for key in rows}
    listing = {name: Reported(status="pending", stamp=1) for name in ("a", "b", "c", "d")}
    feed.observe(listing)
    listing = {**listing, "a": Reported(status="running", stamp=1), "e": Reported(status="running", stamp=1, size=1)}
    feed.observe(listing)
    ended = {
        "a": Reported(status="finished", stamp=1, rows=rows),
        "b": Reported(status="finished", stamp=1, rows=same),
        "c": Reported(status="failure", stamp=1, rows={(0, 0): rows[0, 0]}),
        "d": Reported(status="finished", stamp=1, rows=rows),
    }
    feed.observe({**listing, **ended})
    batch = feed.sample_now(1)
    assert batch is not None
    feed.commit(batch)
    assert feed.sample_now(3) is None
    assert feed.take_refills() > 0
    feed.observe({**ended, "e": Reported(status="running", stamp=1, size=1), "f": Reported(status="pending", stamp=1)})
    feed.observe({"f": Reported(status="pending", stamp=1)})  # the others were removed outside
    feed.give_up_refills("no more prompts")
    feed.close("told so")


async def observed_anew(loop: VirtualLoop, path: Path) -> None:
    """Another one, in whose groups a prompt was dispatched anew, a value is no number, and one has no trajectory."""
    rules = Rules(filter_metric="acc", lag_max=1, empty="keep_finished", empty_session="allow", on_missing="keep")
    feed = StatusFeed.begin(
        log_at(loop, path), rules, group_size=1, clock_ns=loop.clock_ns, weight_version=1, restamps=True
    )
    listing = {name: Reported(status="running", stamp=1) for name in ("a", "b", "c")}
    feed.observe(listing)
    feed.publish(3)
    feed.observe({**listing, "a": Reported(status="pending", stamp=3)})
    rows = {(0, 0): ReportedRow(metrics={"other": 1.0}, not_finite=("acc",), response_tokens=5)}
    ended = {"a": Reported(status="finished", stamp=3, rows=rows), "b": Reported(status="finished", stamp=3)}
    feed.observe({**listing, **ended})
    batch = feed.sample_now(2)
    assert batch is not None
    feed.commit(batch)
    feed.close("told so")


BY_HAND = frozenset({"transitions"})
"""Stories that no rules lead to: their events can follow each other, and break the invariants."""

STORIES = {
    story.__name__: story
    for story in (
        transitions,
        lineages,
        rollout,
        validation_rounds,
        sync_mode,
        targets,
        waits_for_stale,
        own_rule,
        no_room,
        observed,
        observed_anew,
        compacted,
    )
}
