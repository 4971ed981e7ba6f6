"""A log that ends at whatever byte or event: what was acknowledged up to there is there."""

import itertools

import pytest

from groupstate import CheckpointMark, Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.log.file import FileLog
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import cut, events, half_right, killed, last_segment, opened, ready, virtual

pytestmark = pytest.mark.slow


def handle_phase(run, group_id: str) -> str:
    group = run.book.groups.get(group_id)
    return group.phase if group is not None else run.book.departed[group_id]


RUN = "/runs/one"
SEGMENT = f"{RUN}/log/{1:020d}.seg"


def test_cut_at_whatever_byte_what_was_acknowledged_is_there():
    disk = FaultyDisk()
    acknowledged: list[tuple[int, str]] = []
    """(Bytes of the segment when it was told, what was told)."""

    async def live(loop):
        def told(what: str) -> None:
            acknowledged.append((len(disk.read(SEGMENT)), what))

        async with opened(loop, log=FileLog.create(RUN, disk=disk, inline=True)) as run:
            groups = {name: run.submit(name, group_id=name) for name in "abc"}
            for name in "ab":
                groups[name].start(0).finish(Trajectory(reward=1.0, text=name))
            batch = await run.sample(1)
            told("sampled a")
            await run.commit(batch)
            told("committed a")
            await run.checkpoint()
            told("marked")
            await run.sample(1)
            told("sampled b")
            groups["c"].start(0)
            return disk.copy(), events(run)

    async def reopened(loop, size: int) -> str:
        """Cut the log after `size` bytes and go on with it."""
        torn = end.copy()
        torn.replace(SEGMENT, torn.read(SEGMENT)[:size])
        # The watermark isn't flushed, so after a kill it may be behind, never ahead.
        torn.remove(f"{RUN}/log/head")
        async with open_run(log=FileLog.open(RUN, disk=torn, inline=True), clock_ns=loop.clock_ns) as run:
            kept = list(itertools.takewhile(lambda event: not isinstance(event, ev.RunRecovered), events(run)))
            if any(isinstance(event, ev.RunRecovered) for event in events(run)):
                assert kept == whole[: len(kept)]
            promised = {what for at, what in acknowledged if at <= size}
            if "sampled a" in promised:
                assert handle_phase(run, "a") in {"finished", "committed"}
            if "committed a" in promised:
                assert handle_phase(run, "a") == "committed"
            if "marked" in promised:
                assert run.book.last_mark == 1
            if "sampled b" in promised:
                assert handle_phase(run, "b") == "finished"
            assert not run.book.batches
            assert not list(run.book.in_phase("running"))
            return run.book.digest()

    end, whole = run_virtual(live)

    digests = [run_virtual(lambda loop, size=size: reopened(loop, size)) for size in range(len(end.read(SEGMENT)) + 1)]
    assert len(set(digests)) > 10, "the cuts fall between different events"


def test_killed_at_whatever_byte_of_a_recovery_the_next_one_gets_as_far():
    disk = FaultyDisk()

    async def live(loop):
        async with open_run(log=FileLog.create(RUN, disk=disk, inline=True), clock_ns=loop.clock_ns) as run:
            ready(run, "a", "b")
            mark = await run.checkpoint()
            await run.commit(await run.sample(1))
            await run.sample(1)
            run.submit("c", group_id="c", n=1).start(0)
            return disk.copy(), mark

    async def recovered(loop, on: FaultyDisk, mark: CheckpointMark):
        async with opened(loop, log=FileLog.open(RUN, disk=on, inline=True), resume_at=mark) as run:
            assert {group_id: group.phase for group_id, group in run.book.groups.items()} == {
                "a": "finished",
                "b": "finished",
                "c": "pending",
            }
            assert run.book.groups["c"].sessions[0].attempt >= 2
            return on.copy()

    end, mark = run_virtual(live)
    before = len(end.read(SEGMENT))
    after = run_virtual(lambda loop: recovered(loop, end.copy(), mark)).read(SEGMENT)

    for size in range(before, len(after) + 1):
        torn = end.copy()
        torn.replace(SEGMENT, after[:size])
        torn.remove(f"{RUN}/log/head")
        run_virtual(lambda loop, torn=torn: recovered(loop, torn, mark))


@virtual
async def test_a_torn_tail_is_reported(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")
        path = killed(tmp_path / "run")
    torn = cut(path, last_segment(path).stat().st_size - 1)

    async with opened(loop, torn) as run:
        (event,) = events(run, ev.RunRecovered)
        assert event.torn_bytes > 0


@virtual
async def test_any_prefix_of_the_log_replays_to_the_book_the_run_had_there(loop, tmp_path):
    digests = {}
    rules = Rules(filter_metric="reward", lag_max=1)
    async with opened(loop, tmp_path / "run", source=range(20), session=half_right, group_size=2, rules=rules) as run:
        run.ledger.observers.append(lambda record: digests.setdefault(record.seq, run.book.digest()))
        for step in range(1, 5):
            await run.commit(await run.sample(2))
            await run.publish_weights(step)
            await run.checkpoint()
    records = list(run.ledger.log.read())

    for seq, digest in digests.items():
        if seq + 1 in digests:
            assert replayed(records[:seq]).digest() == digest
