"""Runs that take snapshots: when, what a run opened from one is, and what is found after the log was shortened."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import groupstate as gs
from groupstate import CheckpointMark, Rules, open_run
from groupstate.core.departed import Departed
from groupstate.core.folding import replayed
from groupstate.core.frontier import frontier
from groupstate.core.snapshot import STATE_VERSION, BookState, Capture, capture_live, encoded, restore
from groupstate.errors import BadMark, BadSettings, UnsupportedLog
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.reading import Cursor, first_event, read_book, read_log, snapshot_digests
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.seeking import nearest_base
from groupstate.log.snapshots import WAYPOINT, SnapshotInfo, list_snapshots, snapshot_path, write_snapshot
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.loop import EPOCH_NS

from .scenes import finish, killed, ready

SMALL = 1_500
"""Bytes of a segment: a few steps of training."""
CLOCK = {"clock_ns": lambda: EPOCH_NS}


def log_at(path: Path, keep: Any = "all", **options: Any) -> FileLog:
    made = {"inline": True, "durability": "os", "segment_bytes": SMALL, "keep": keep, **options}
    return (FileLog.open if (path / "run.json").exists() else FileLog.create)(path, **made)


def snapshots(path: Path) -> list[int]:
    return list_snapshots(OsDisk(), RunDir.at(path))


async def step(run: gs.Run, number: int) -> CheckpointMark:
    """Submit, finish, sample, commit and mark."""
    ready(run, f"a{number}", f"b{number}", n=2)
    batch = await run.sample(1)
    await run.publish_weights(run.weight_version + 1)
    await run.commit(batch)
    return await run.checkpoint(f"step {number}")


async def lived(path: Path, steps: int, keep: Any = "all", *, every: int = 10, first: int = 1) -> list[CheckpointMark]:
    async with open_run(log=log_at(path, keep), group_size=2, snapshot_events=every, **CLOCK) as run:
        return [await step(run, number) for number in range(first, first + steps)]


# When ------------------------------------------------------------------------------------------------


async def test_one_is_taken_every_so_many_events_at_a_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    async with open_run(log=log_at(tmp_path), snapshot_events=20) as run:
        for name in "abcdefghij":
            run.submit(name)
        assert snapshots(tmp_path) == []
        for name in "klmnopqrst":
            run.submit(name)
        assert snapshots(tmp_path) == [20]
        await run.checkpoint()
        assert snapshots(tmp_path) == [20, 22]
        await run.checkpoint()
        assert snapshots(tmp_path) == [20, 22]
        await run.checkpoint()
        assert snapshots(tmp_path) == [20, 22, 24]
        run.submit("u")
    assert snapshots(tmp_path) == [20, 24, 26]  # the one after 22 saves nothing that counts any more


async def test_none_is_taken_of_a_log_in_memory_and_a_short_run_has_none(tmp_path: Path) -> None:
    async with open_run(log=MemoryLog(), snapshot_events=1) as run:
        run.submit("a")
    async with open_run(log=log_at(tmp_path)) as run:
        run.submit("a")
        await run.checkpoint()
    assert snapshots(tmp_path) == []


async def test_those_before_the_opening_count(tmp_path: Path) -> None:
    await lived(tmp_path, 2)
    before = snapshots(tmp_path)
    async with open_run(log=log_at(tmp_path), snapshot_events=100):
        pass

    assert snapshots(tmp_path) == before


@pytest.mark.parametrize("events", [0, -1, True, 2.5, "many"])
async def test_a_number_of_events_that_cannot_be_is_refused(tmp_path: Path, events: Any) -> None:
    with pytest.raises(BadSettings, match="snapshot_events"):
        async with open_run(tmp_path / "run", snapshot_events=events):
            pass
    with pytest.raises(BadSettings, match="snapshot_events"):
        StatusFeed.begin(MemoryLog(), Rules(), group_size=1, snapshot_events=events)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", [None, "run"])
async def test_a_keep_log_that_cannot_be_is_refused(tmp_path: Path, path: str | None) -> None:
    with pytest.raises(BadSettings, match="keep_log is 0"):
        async with open_run(path and tmp_path / path, keep_log=0):
            pass
    assert not (tmp_path / "run").exists()


async def test_what_is_kept_is_the_logs_own_where_one_is_given(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    with pytest.raises(BadSettings, match="keep_log are the log's"):
        async with open_run(log=log, keep_log=1):
            pass

    await lived(tmp_path, 20, keep=1)
    assert first_event(tmp_path) > 1


async def test_keep_log_of_open_run_reaches_the_log(tmp_path: Path) -> None:
    async with open_run(tmp_path / "run", keep_log=3, durability="os") as run:
        assert run.ledger.log.keep == 3


async def test_a_full_disk_is_told_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True, durability="os")
    async with open_run(log=log, snapshot_events=10) as run:
        for name in "abcdefgh":
            run.submit(name)
        whole = disk.open

        def full(path: str, **options: Any) -> int:
            if path.endswith(".snap.tmp"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(path, **options)

        disk.open = full  # type: ignore[method-assign]
        run.submit("i")
        assert "no snapshot could be taken" in caplog.text
        disk.open = whole  # type: ignore[method-assign]
        for name in "klmnopqrst":
            run.submit(name)
        assert "snapshot taken" in caplog.text
        assert len(run.pending()) == 19


# A run from a snapshot -------------------------------------------------------------------------------


async def test_a_run_opened_from_a_snapshot_is_the_replayed_one_and_goes_on_alike(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with open_run(log=log_at(path), group_size=2, snapshot_events=7, **CLOCK) as run:
        for number in range(1, 6):
            await step(run, number)
            run.submit("later", group_id=f"w{number}").start(0)
            with_it, without = killed(path), killed(path)
            for file in (without / "log").glob("*.snap"):
                file.unlink()
            tails = []
            for copy in (with_it, without):
                log = log_at(copy)
                assert (log.snapshot is not None) == (copy is with_it)
                async with open_run(log=log, group_size=2, snapshot_events=10**6, **CLOCK) as again:
                    assert log.snapshot is None
                    digest = again.book.digest()
                    finish(again.pending()[0], 0.0, 1.0)
                    await step(again, 100)
                tails.append((digest, again.book.digest(), list(read_log(copy, run.book.last_seq))))
            assert tails[0] == tails[1]


async def test_opening_reads_events_from_the_snapshot_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await lived(tmp_path, 20)
    read = []
    whole = Cursor._decode

    def counted(self: Cursor, *args: Any) -> Any:
        records = whole(self, *args)
        read.extend(record.seq for record in records)
        return records

    monkeypatch.setattr(Cursor, "_decode", counted)
    newest = snapshots(tmp_path)[-1]
    async with open_run(log=log_at(tmp_path)):
        pass

    assert all(seq > newest for seq in read)


async def test_snapshots_agree_with_the_replay(tmp_path: Path) -> None:
    await lived(tmp_path, 8)
    records = list(read_log(tmp_path))

    found = snapshot_digests(tmp_path)
    assert len(found) > 4
    assert found == {seq: replayed(records[:seq]).digest() for seq in found}


def write_later(path: Path, seq: int) -> None:
    """A snapshot of a later version of the library, whole and unreadable."""
    place = RunDir.at(path)
    parts = encoded(Capture(BookState(version=STATE_VERSION + 1), [], [], Departed()))
    write_snapshot(OsDisk(), place, read_run_info(OsDisk(), place).log_id, SnapshotInfo(seq, 0, 0, 1), parts)


async def test_one_of_a_later_version_is_passed_over_for_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await lived(tmp_path, 20, keep=2)
    assert first_event(tmp_path) > 1
    newest = snapshots(tmp_path)[-1]
    write_later(tmp_path, newest)
    async with open_run(log=log_at(tmp_path), **CLOCK) as run:
        assert run.book.totals["committed"] == 20

    assert "more events are replayed" in caplog.text


async def test_where_none_can_be_read_all_is_replayed_or_the_version_is_named(tmp_path: Path) -> None:
    for keep, name in (("all", "whole"), (1, "short")):
        path = tmp_path / name
        await lived(path, 20, keep=keep)
        for seq in snapshots(path):
            write_later(path, seq)
    async with open_run(log=log_at(tmp_path / "whole"), **CLOCK) as run:
        assert run.book.totals["committed"] == 20
    with pytest.raises(UnsupportedLog, match="Open the run with the version that wrote it"):
        async with open_run(log=log_at(tmp_path / "short")):
            pass


# Retention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 5])
async def test_events_since_the_last_checkpoints_stay(tmp_path: Path, keep: int) -> None:
    marks = await lived(tmp_path, 30, keep=keep)
    first = first_event(tmp_path)

    assert 1 < first <= marks[-keep].seq + 1
    assert next(read_log(tmp_path, first)).seq == first


async def test_nothing_goes_before_so_many_checkpoints(tmp_path: Path) -> None:
    await lived(tmp_path, 20, keep=21)

    assert first_event(tmp_path) == 1


async def test_archives_hold_everything(tmp_path: Path) -> None:
    marks = await lived(tmp_path, 20, keep="archive")

    assert list((tmp_path / "log").glob("*.seg.gz"))
    records = list(read_log(tmp_path))
    assert [record.seq for record in records] == list(range(1, marks[-1].seq + 2))


@pytest.mark.parametrize("which", [-1, -2])
async def test_a_kept_mark_can_be_gone_back_to_after_retention(tmp_path: Path, which: int) -> None:
    marks = await lived(tmp_path, 20, keep=1)
    assert first_event(tmp_path) > 1
    async with open_run(log=log_at(tmp_path, 1), resume_at=marks[which], snapshot_events=10, **CLOCK) as run:
        undone = -1 - which
        assert run.book.totals["committed"] == 20 - undone
        assert run.weight_version == marks[which].weight_version
        assert run.sampleable_count() == 20 + undone
        await step(run, 99)


async def test_a_mark_that_is_gone_is_refused_after_retention(tmp_path: Path) -> None:
    marks = await lived(tmp_path, 20, keep=1)
    with pytest.raises(BadMark, match="marks that are kept: 19, 20"):
        async with open_run(log=log_at(tmp_path, 1), resume_at=marks[0]):
            pass


async def test_a_shortened_run_lives_on_over_many_openings(tmp_path: Path) -> None:
    firsts = []
    for opening in range(6):
        await lived(tmp_path, 10, keep=1, first=1 + 10 * opening)
        firsts.append(first_event(tmp_path))

    assert firsts == sorted(set(firsts))
    async with open_run(log=log_at(tmp_path, 1)) as run:
        assert run.book.totals["committed"] == 60
        assert run.book.openings == 7


# The frontier ----------------------------------------------------------------------------------------


async def drawn(path: Path, keep: Any, source: Any, batches: int = 20) -> tuple[Any, Any]:
    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        return gs.Trajectory(reward=float(ctx.session % 2))

    options: dict[str, Any] = {"source": source, "session": session, "group_size": 2, "snapshot_events": 10}
    async with open_run(log=log_at(path, keep), rules=Rules(batch_size=1), **options, **CLOCK) as run:
        for _ in range(batches):
            await run.commit(await run.sample(1))
            await run.checkpoint()
        return run.frontier(), run.frontier()


@pytest.mark.parametrize("source", [range(60), {"x": range(60), "y": range(70)}])
async def test_the_frontier_of_a_shortened_run_says_what_it_cannot_tell(tmp_path: Path, source: Any) -> None:
    (whole, _), (short, twice) = [await drawn(tmp_path / str(keep), keep, source) for keep in ("all", 1)]

    assert short == twice
    assert len(whole) == len(short)
    for one, other in zip(whole, short, strict=True):
        assert (one.open, one.next, one.lowest_open, one.left) == (
            other.open,
            other.next,
            other.lowest_open,
            other.left,
        )
        assert (one.unknown, one.since) == ((), 1)
        assert other.since > 1
        told = set(numbers(other.committed))
        assert told < set(numbers(one.committed))
        assert set(numbers(other.unknown)) == set(numbers(one.committed)) - told


def numbers(ranges: Any) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


async def test_the_frontier_from_any_snapshot_is_the_frontier(tmp_path: Path) -> None:
    await drawn(tmp_path, "all", range(60))
    records = list(read_log(tmp_path))
    (whole,) = frontier(records)
    for seq in range(1, len(records)):
        base = replayed(records[:seq])
        (other,) = frontier(records[seq:], base=base) or (None,)
        if other is None:
            continue
        # What a mark could bring back is known to be committed.
        assert {group.source_position for group in base.aside.values()} <= set(numbers(other.committed))
        assert (other.open, other.next, other.lowest_open) == (whole.open, whole.next, whole.lowest_open)
        assert sorted(numbers(other.committed) + numbers(other.unknown)) == numbers(whole.committed)


async def test_a_commit_before_the_beginning_that_is_undone_is_open_again(tmp_path: Path) -> None:
    await drawn(tmp_path, 1, range(60))
    (mark, _) = _marks(tmp_path)
    async with open_run(log=log_at(tmp_path, 1), source=range(60), resume_at=mark, **CLOCK) as run:
        (told,) = run.frontier()
        assert told.lowest_open == 19
        assert 19 in numbers(told.open)


def _marks(path: Path) -> list[CheckpointMark]:
    book = read_book(path)
    assert book is not None
    fields = [(mark.mark, mark.seq, mark.weight_version, mark.lineage) for mark in book.marks]
    return [CheckpointMark(run_id=book.run_id, mark=m, seq=s, weight_version=v, lineage=g) for m, s, v, g in fields]


# A status feed ---------------------------------------------------------------------------------------


def fed(path: Path, groups: range, keep: Any = 1) -> StatusFeed:
    clock = lambda: EPOCH_NS  # noqa: E731
    feed = StatusFeed.begin(log_at(path, keep), Rules(), group_size=1, snapshot_events=10, clock_ns=clock)
    for number in groups:
        row = ReportedRow(metrics={"reward": 1.0})
        feed.observe({f"g{number}": Reported(status="finished", stamp=0, rows={(0, 0): row})})
        batch = feed.sample_now(1)
        assert batch is not None
        feed.commit(batch)
    return feed


def test_a_status_feed_takes_snapshots_and_begins_from_one(tmp_path: Path) -> None:
    fed(tmp_path, range(20)).close()
    assert len(snapshots(tmp_path)) >= 2
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    for seq in snapshots(copy):
        Path(snapshot_path(RunDir.at(copy), seq)).unlink()
    with_it, without = (fed(path, range(20, 22)) for path in (tmp_path, copy))

    assert with_it.book.totals["committed"] == 22
    assert with_it.book.digest() == without.book.digest()
    with_it.close()
    without.close()


async def test_a_commit_that_only_the_base_knows_is_undone_by_a_rewind(tmp_path: Path) -> None:
    await drawn(tmp_path, "all", range(60))
    (mark, _) = _marks(tmp_path)
    before = list(read_log(tmp_path))[-1].seq
    async with open_run(log=log_at(tmp_path), source=range(60), resume_at=mark, **CLOCK):
        pass
    records = list(read_log(tmp_path))
    (whole,), (short,) = frontier(records), frontier(records[before:], base=replayed(records[:before]))

    assert 19 in numbers(short.open)
    assert (short.open, short.lowest_open) == (whole.open, whole.lowest_open)


# Waypoints -------------------------------------------------------------------------------------------


def waypoints(path: Path) -> list[int]:
    return list_snapshots(OsDisk(), RunDir.at(path), WAYPOINT)


async def test_a_waypoint_is_taken_five_times_as_often_as_a_snapshot(tmp_path: Path) -> None:
    async with open_run(log=log_at(tmp_path), snapshot_events=50) as run:
        for version in range(1, 31):
            await run.publish_weights(version)

    assert waypoints(tmp_path) == [10, 20, 30]


async def test_the_more_groups_are_live_the_fewer_waypoints_are_taken(tmp_path: Path) -> None:
    async with open_run(log=log_at(tmp_path), snapshot_events=50) as run:
        run.submit("a")
        run.submit("b")
        for version in range(1, 60):
            await run.publish_weights(version)

    assert waypoints(tmp_path) == [20, 40, 60]


async def test_waypoints_before_the_opening_count(tmp_path: Path) -> None:
    for opening in range(7):
        async with open_run(log=log_at(tmp_path), snapshot_events=100) as run:
            for version in range(5):
                await run.publish_weights(opening * 5 + version + 1)

    first, second = waypoints(tmp_path)
    assert second - first == first == 20


async def test_what_is_live_is_the_same_from_a_waypoint(tmp_path: Path) -> None:
    async with open_run(log=log_at(tmp_path), group_size=2, snapshot_events=50, **CLOCK) as run:
        for number in range(3):
            await step(run, number)
            for _ in range(50):
                await run.publish_weights(run.weight_version + 1)
    records = list(read_log(tmp_path))
    for seq in waypoints(tmp_path):
        base = nearest_base(tmp_path, seq)
        live = replayed(records[:seq])

        assert not base.whole
        assert base.book.state() == restore(capture_live(live)).state()
        assert base.book.groups.keys() == live.groups.keys()
        assert live.groups
    assert len(waypoints(tmp_path)) > 1
