"""A real file system that is full, or may only be read: a small tmpfs, where this user may mount one."""

import asyncio
import os
import subprocess
import sys

import pytest

from groupstate import Rules, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import LogError, LogFailed
from groupstate.inspect.checking import checked
from groupstate.log.file import FileLog
from groupstate.log.reading import read_log

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
