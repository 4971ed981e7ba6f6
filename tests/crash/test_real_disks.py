"""A real file system that is full, or may only be read: a small tmpfs, where this user may mount one."""

import asyncio
import os
import random
import subprocess
import sys

import pytest

from groupstate import Rules, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import LogError, LogFailed
from groupstate.inspect.checking import checked
from groupstate.log.file import FileLog
from groupstate.log.reading import read_book, read_log

SMALL = {"segment_bytes": 20_000, "payload_file_bytes": 60_000}


def mounted(*arguments):
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path):
    """600 KB, and a function that mounts it anew with other options."""
    folder = tmp_path / "small"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs Linux and root")
    done = mounted("-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder))
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")

    def again(options):
        done = mounted("-o", f"remount,{options}", str(folder))
        assert done.returncode == 0, done.stderr

    try:
        yield folder, again
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def session(ctx: SessionContext) -> Trajectory:
    return Trajectory(text=f"{ctx.prompt.content} " * 200, reward=float(ctx.session))


def opened(path, keep="all"):
    make = FileLog.open if (path / "run.json").exists() else FileLog.create
    options = {"snapshot_events": 50, "source": range(1_000_000), "session": session}
    return open_run(log=make(path, keep=keep, **SMALL), group_size=2, grace_s=0, rules=Rules(), **options)


async def train(path, batches, keep="all"):
    """What was acknowledged until the disk was full: (batch, its groups), and whether it was."""
    told = []
    try:
        async with opened(path, keep) as run:
            for _ in range(batches):
                batch = await run.sample(2)
                await run.commit(batch)
                told.append((batch.number, tuple(batch.group_ids)))
                # Payloads that a mark needs stay, so the disk fills up.
                if batch.number == 1:
                    await run.checkpoint()
    except LogFailed:
        return told, True
    return told, False


def committed(path):
    sampled, found = {}, []
    for record in read_log(path):
        match record.event:
            case ev.BatchSampled(batch=batch, group_ids=groups):
                sampled[batch] = groups
            case ev.BatchCommitted(batch=batch):
                found.append((batch, sampled[batch]))
    return found


@pytest.mark.parametrize("keep", ["all", "archive"])
def test_a_full_disk_ends_the_log_and_loses_nothing_that_was_acknowledged(small_disk, keep):
    folder, again = small_disk
    run = folder / "run"
    told, full = asyncio.run(train(run, 100_000, keep))
    assert full
    assert len(told) > 10
    assert committed(run)[: len(told)] == told
    assert checked(run).violations == ()

    again("size=4m")
    more, full = asyncio.run(train(run, 20, keep))
    assert not full
    found = committed(run)
    assert found[: len(told)] == told
    assert found[-20:] == more
    groups = [group for _, names in found for group in names]
    assert len(set(groups)) == len(groups)
    assert checked(run).violations == ()


# A snapshot alone -----------------------------------------------------------------------------------------

NO_SNAPSHOT = "no snapshot could be taken"


def with_long_names(path):
    make = FileLog.open if (path / "run.json").exists() else FileLog.create
    return open_run(log=make(path), snapshot_events=2_000, group_size=1, rules=Rules(), grace_s=0)


def submit(run, count, chance):
    """Groups whose names can't be packed: most of what a snapshot holds."""
    for _ in range(count):
        run.submit("2 + 2 =", group_id=chance.randbytes(100).hex())


async def trained(run):
    group = next(iter(run.pending()))
    group.start(0).finish(Trajectory(reward=1.0))
    batch = await run.sample(1)
    await run.commit(batch)
    return batch.group_ids[0]


def taken(path):
    return sorted(int(name.stem) for name in (path / "log").glob("*.snap"))


def test_a_snapshot_that_alone_finds_the_disk_full_is_told_and_the_run_goes_on(small_disk, caplog):
    folder, _ = small_disk
    path, ballast, chance = folder / "run", folder / "ballast", random.Random(0)

    def warnings():
        return [text for record in caplog.records if NO_SNAPSHOT in (text := record.getMessage())]

    async def until(happened):
        while not happened():  # noqa: ASYNC110 - another thread takes snapshots
            await asyncio.sleep(0.01)

    async def until_full():
        async with with_long_names(path) as run:
            submit(run, 300, chance)
            await run.checkpoint()
            await until(lambda: taken(path))
            submit(run, 250, chance)
            told = [await trained(run)]
            room = os.statvfs(folder)
            ballast.write_bytes(b"x" * (room.f_bavail * room.f_frsize - 24_000))
            await run.checkpoint()
            await until(warnings)
            for _ in range(5):
                told.append(await trained(run))
            return told

    async def go_on(count):
        async with with_long_names(path) as run:
            told = [await trained(run) for _ in range(count)]
            await run.checkpoint()
            return told

    told = asyncio.run(asyncio.wait_for(until_full(), 60))
    (warning,) = warnings()
    assert "No space left on device" in warning
    (first,) = taken(path)
    assert [name.name for name in path.rglob("*.tmp")] == []

    # As before, from the older snapshot: on the full disk, and once there is room.
    told += asyncio.run(go_on(3))
    ballast.unlink()
    told += asyncio.run(go_on(3))
    assert [group for _, groups in committed(path) for group in groups] == told
    assert len(set(told)) == 12
    assert first in taken(path)
    assert read_book(path).last_seq == taken(path)[-1] > first
    assert checked(path).violations == ()


# Only to be read ------------------------------------------------------------------------------------------


def test_a_disk_that_may_only_be_read_is_refused_to_writers_and_not_to_readers(small_disk):
    folder, again = small_disk
    run = folder / "run"
    told, _ = asyncio.run(train(run, 10, keep=1))
    again("ro")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(LogError, match=r"can't be locked for writing: .*Read-only file system"):
        asyncio.run(train(run, 1))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert committed(run) == told
    assert checked(run).violations == ()

    again("rw")
    more, _ = asyncio.run(train(run, 3))
    assert committed(run) == told + more


def test_a_run_cannot_be_made_on_a_disk_that_may_only_be_read(small_disk):
    folder, again = small_disk
    again("ro")
    with pytest.raises(LogError, match=r"can't be made a run: .*Read-only file system"):
        FileLog.create(folder / "run")
