"""A file system that becomes read-only while a run is written to it: what ext4 does by itself when it meets an error.

By hand that can't be had: `mount -o remount,ro` is refused while a file is open for writing.
"""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from json import dumps, loads
from pathlib import Path

import pytest

from groupstate.errors import LogError

from .player import endless
from .witness import PLAYER, Witness

SAMPLERS = 6


def called(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Ext4:
    """16 MB in a file, on a loop device."""

    def __init__(self, folder):
        self.image = folder / "image"
        self.place = folder / "mounted"
        self.place.mkdir()
        with self.image.open("wb") as image:
            image.truncate(16 << 20)
        self.mounted = False

    def mount(self):
        """What is wrong, as text, or nothing."""
        done = called("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.place))
        self.mounted = done.returncode == 0
        return done.stderr.strip()

    def unmount(self):
        assert called("umount", str(self.place)).returncode == 0
        self.mounted = False

    @property
    def trigger(self):
        """The file by which the kernel is told to act as if this file system were damaged."""
        devices = [
            words[0]
            for words in map(str.split, Path("/proc/mounts").read_text().splitlines())
            if words[1] == str(self.place)
        ]
        assert len(devices) == 1
        return Path("/sys/fs/ext4", Path(devices[0]).name, "trigger_fs_error")

    def mend(self):
        """As an administrator does: unmount, look through it, mount it again."""
        self.unmount()
        assert called("e2fsck", "-fy", str(self.image)).returncode in (0, 1)
        assert self.mount() == ""


@pytest.fixture
def ext4(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting an image needs Linux and root")
    if not all(map(shutil.which, ("mkfs.ext4", "e2fsck", "mount"))):
        pytest.skip("needs mkfs.ext4 and e2fsck")
    disk = Ext4(tmp_path)
    made = called("mkfs.ext4", "-q", "-F", str(disk.image))
    problem = made.stderr if made.returncode else disk.mount()
    if problem:
        pytest.skip(f"no image can be mounted here: {problem}")
    try:
        if not disk.trigger.exists():
            pytest.skip("this kernel can't be told that ext4 met an error")
        yield disk
    finally:
        if disk.mounted:
            disk.unmount()


def played(path, batches, said_to, then=None, commits=0):
    """Run the player with several samplers; after so many commits do something. What it said."""
    plan = {"keep": "all", "samplers": SAMPLERS, "batches": batches}
    with said_to.open("wb") as out, (said_to.with_suffix(".err")).open("wb") as errors:
        player = subprocess.Popen([sys.executable, PLAYER, str(path), dumps(plan)], stdout=out, stderr=errors)
        try:
            give_up = time.monotonic() + 60
            while then is not None and said_to.read_bytes().count(b"committed") < commits:
                assert player.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.005)
            if then is not None:
                then()
            assert player.wait(60) == 0, said_to.with_suffix(".err").read_text()
        finally:
            player.kill()
            player.wait()
    return [loads(line) for line in said_to.read_bytes().splitlines()]


@pytest.mark.crash
@pytest.mark.parametrize("commits", [1, 20, 61])
def test_a_disk_that_becomes_read_only_under_a_run_ends_it_and_loses_nothing_that_was_acknowledged(
    ext4, tmp_path, commits
):
    path = ext4.place / "run"
    witness = Witness(path, "all", random.Random(0))
    said = played(path, 100_000, tmp_path / "first", lambda: ext4.trigger.write_text("by a test"), commits)

    assert said[-1] == {"ended": True}
    failed = {line["sampler"]: line["failed"] for line in said if "sampler" in line}
    assert sorted(failed) == list(range(SAMPLERS))
    for text in failed.values():
        assert "could not keep the events behind" in text
        # A flush that is under way in that moment fails with the one, everything behind it with the other.
        assert "Input/output error" in text or "Read-only file system" in text
        assert "open the run again" in text
    assert sum("committed" in line for line in said) < 100_000
    with pytest.raises(LogError, match="Read-only file system"):
        asyncio.run(endless(str(path), {"seed": 0, "keep": "all"}))

    # What was in memory alone is gone then, the watermark among it: the run is opened before it is looked at.
    ext4.mend()
    more = played(path, 20, tmp_path / "second")
    assert {line["sampler"]: line["failed"] for line in more if "sampler" in line} == dict.fromkeys(range(SAMPLERS))
    assert sum("committed" in line for line in more) == 20
    witness.hear(said + more)
    witness.look()
    assert len(witness.committed) >= commits + 20
