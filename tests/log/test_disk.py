"""The real disk, and the one that fails on purpose."""

import errno
import fcntl
import os
import random

import pytest

from groupstate.log.disk import OsDisk, flush_for, make_file, read_all, read_file, write_all
from groupstate.simulate.faults import Fault, FaultyDisk


@pytest.fixture(params=["real", "faulty"])
def place(request, tmp_path):
    """A disk and a directory on it."""
    disk = OsDisk() if request.param == "real" else FaultyDisk()
    disk.makedirs(str(tmp_path / "d"))
    return disk, str(tmp_path / "d")


def test_a_disk_keeps_files(place):
    disk, directory = place
    disk.makedirs(directory)
    path = f"{directory}/a"
    fd = disk.open(path, create=True)
    write_all(disk, fd, b"0123456789", 0)
    write_all(disk, fd, b"ab", 12)
    disk.fdatasync(fd)

    assert disk.size(fd) == 14
    assert disk.pread(fd, 100, 8) == b"89\0\0ab"
    disk.truncate(fd, 3)
    disk.truncate(fd, 5)
    disk.close(fd)
    fd = disk.open(path)
    assert read_all(disk, fd, 100) == b"012\0\0"
    disk.close(fd)
    disk.link(path, f"{directory}/b")
    with pytest.raises(FileExistsError):
        disk.link(path, f"{directory}/b")
    disk.rename(path, f"{directory}/c")
    disk.fsync_dir(directory)
    assert disk.listdir(directory) == ["b", "c"]
    disk.unlink(f"{directory}/b")
    assert (disk.exists(path), disk.exists(f"{directory}/c"), disk.exists(directory)) == (False, True, True)


def test_creating_a_file_empties_it(place):
    disk, directory = place
    make_file(disk, f"{directory}/a", b"long")
    disk.close(disk.open(f"{directory}/a", create=True))

    assert read_file(disk, f"{directory}/a") == b""


@pytest.mark.parametrize("call", ["open", "open_to_read", "unlink", "listdir"])
def test_what_is_missing_is_missing(place, call):
    disk, directory = place
    with pytest.raises(FileNotFoundError):
        getattr(disk, call)(f"{directory}/none")
    with pytest.raises(FileNotFoundError):
        disk.open(f"{directory}/none/a", create=True)


def test_macos_needs_a_call_of_its_own(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: calls.append(arguments))
    flush_for("darwin")(7)

    assert calls == [(7, getattr(fcntl, "F_FULLFSYNC", 51))]
    assert flush_for("linux") is os.fdatasync


class StutteringDisk(FaultyDisk):
    def pread(self, fd, length, offset):
        return super().pread(fd, min(length, 3), offset)


def test_short_reads_are_gone_on_with():
    disk = StutteringDisk()
    make_file(disk, "/a", b"0123456789")

    assert read_file(disk, "/a") == b"0123456789"


# The faulty one ----------------------------------------------------------------------------------------


def unflushed():
    """A file of which four bytes are flushed, and three writes are not."""
    disk = FaultyDisk()
    make_file(disk, "/a", b"base")
    fd = disk.open("/a")
    for offset in (4, 8, 12):
        write_all(disk, fd, b"more", offset)
    return disk, fd


def test_a_power_loss_takes_what_was_not_flushed():
    disk, fd = unflushed()
    assert disk.crash().read("/a") == b"base"
    assert disk.crash(torn_bytes=6).read("/a") == b"basemoremo"
    assert disk.copy().read("/a") == b"basemoremoremore"
    disk.fdatasync(fd)

    assert disk.crash().read("/a") == b"basemoremoremore"


def test_a_power_loss_may_or_may_not_take_a_cut():
    disk = FaultyDisk()
    make_file(disk, "/a", b"base")
    disk.truncate(disk.open("/a"), 2)

    assert disk.crash().read("/a") == b"base"
    assert disk.crash(torn_bytes=1).read("/a") == b"ba"


def test_a_power_loss_takes_names_that_were_not_flushed():
    disk = FaultyDisk()
    disk.makedirs("/d")
    make_file(disk, "/d/a", b"x")
    fd = disk.open("/d/b", create=True)
    disk.fdatasync(fd)
    disk.unlink("/d/a")

    assert disk.crash().listdir("/d") == ["a"]
    drawn = {tuple(disk.crash(chance=random.Random(seed)).listdir("/d")) for seed in range(40)}
    assert drawn == {(), ("a",), ("b",), ("a", "b")}
    disk.fsync_dir("/d")
    assert disk.crash().listdir("/d") == ["b"]


def test_sectors_survive_in_any_order():
    disk = FaultyDisk()
    make_file(disk, "/a", b"")
    fd = disk.open("/a")
    for sector in range(2):
        write_all(disk, fd, bytes([65 + sector]) * 512, 512 * sector)
    drawn = {disk.crash(chance=random.Random(seed)).read("/a") for seed in range(60)}

    assert {(data[:1], data[512:513]) for data in drawn} >= {(b"\0", b"B"), (b"A", b"B"), (b"A", b""), (b"", b"")}


def test_a_failed_flush_is_forgotten_by_the_next_one():
    disk, fd = unflushed()
    disk.fault = Fault(disk.operation_count + 1)
    with pytest.raises(OSError, match="planned: flush a"):
        disk.fdatasync(fd)
    disk.fdatasync(fd)

    assert disk.crash().read("/a") == b"base"
    assert disk.read("/a") == b"basemoremoremore"


def test_a_fault_happens_once_or_from_then_on():
    for once, failures in ((True, 1), (False, 4)):
        disk = FaultyDisk(Fault(2, once=once, torn_bytes=2, errno=errno.ENOSPC))
        fd = disk.open("/a", create=True)
        failed = 0
        for offset in range(0, 16, 4):
            try:
                disk.pwrite(fd, b"abcd", offset)
            except OSError as error:
                failed += error.errno == errno.ENOSPC
        assert failed == failures
        assert disk.read("/a")[:4].rstrip(b"\0") == b"ab"


def test_a_failed_operation_changes_nothing_else():
    disk = FaultyDisk()
    disk.makedirs("/d")
    make_file(disk, "/d/a", b"x")
    fd = disk.open("/d/a")
    attempts = [
        lambda: disk.truncate(fd, 0),
        lambda: disk.link("/d/a", "/d/b"),
        lambda: disk.rename("/d/a", "/d/b"),
        lambda: disk.unlink("/d/a"),
        lambda: disk.fsync_dir("/d"),
        lambda: disk.open("/d/b", create=True),
    ]
    for attempt in attempts:
        disk.fault = Fault(disk.operation_count + 1)
        with pytest.raises(OSError, match="planned"):
            attempt()

    assert disk.listdir("/d") == ["a"]
    assert disk.read("/d/a") == b"x"


def test_a_full_disk_takes_what_fits():
    disk = FaultyDisk(space_bytes=6)
    fd = disk.open("/a", create=True)
    disk.pwrite(fd, b"abcd", 0)
    with pytest.raises(OSError, match="No space left"):
        disk.pwrite(fd, b"efgh", 4)

    assert disk.read("/a") == b"abcdef"
