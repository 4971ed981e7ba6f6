"""A bound on what a run takes: counted along, looked at now and then, and never in the way of a commit."""

import asyncio
import errno

import pytest

from groupstate.errors import BadSettings
from groupstate.log.disk import OsDisk
from groupstate.log.space import LOOK_EVERY_BYTES, LOOK_EVERY_NS, MeteredDisk, with_quota
from groupstate.simulate.faults import FaultyDisk

from .scenes import RUN, make, reopen, submitted, weights


class CountingDisk(FaultyDisk):
    """Counts how often the tree is walked and the file system asked."""

    walks = 0
    asked = 0
    silent = False

    def sizes(self, path):
        self.walks += 1
        return super().sizes(path)

    def free_bytes(self, path):
        self.asked += 1
        if self.silent:
            raise OSError(errno.ENOSYS, "not implemented")
        return super().free_bytes(path)


def put(log, size=100):
    ref = log.payloads.put(b"x" * size)
    log.post([submitted(log.last_seq + 1, ref)])
    return ref


def test_what_is_counted_along_is_what_a_walk_finds():
    disk = FaultyDisk()
    log = make(disk, segment_bytes=300, payload_file_bytes=300, disk_bytes_max=1 << 30)
    refs = [put(log) for _ in range(12)]
    log.payloads.free(refs[:9])
    log.post(weights(log.last_seq + 1, 3))
    # The bytes of a lock are counted by the name that it was made under, which is gone.
    assert abs(log.space.used_bytes - sum(disk.sizes(RUN).values())) <= len(disk.read(f"{RUN}/log/lock"))
    assert len(disk.listdir(f"{RUN}/payloads")) < 6
    asyncio.run(log.aclose())

    again = reopen(disk, disk_bytes_max=1 << 30)
    put(again)
    assert abs(again.space.used_bytes - sum(disk.sizes(RUN).values())) <= len(disk.read(f"{RUN}/log/lock"))
    asyncio.run(again.aclose())


def test_a_metered_disk_counts_every_change():
    disk = FaultyDisk()
    disk.makedirs("/d")
    metered = MeteredDisk(disk, "/d")
    fd = metered.open("/d/a", create=True)
    metered.pwrite(fd, b"12345", 0)
    metered.pwrite(fd, b"12", 1)
    assert (metered.used_bytes, metered.written_bytes) == (5, 7)
    metered.link("/d/a", "/d/b")
    assert metered.used_bytes == 10
    metered.truncate(fd, 2)
    metered.rename("/d/a", "/d/c")
    metered.pwrite(fd, b"123456789", 0)
    assert metered.used_bytes == 7
    metered.close(fd)
    metered.unlink("/d/c")
    assert metered.used_bytes == 5
    metered.count()
    assert metered.used_bytes == sum(disk.sizes("/d").values())


def test_the_writer_looks_once_a_second_or_per_64_mib_and_walks_only_while_there_is_no_room():
    disk, now = CountingDisk(), [10 * LOOK_EVERY_NS]
    log = make(disk, disk_free_min_bytes=1, disk_bytes_max=1 << 40, now_ns=lambda: now[0])
    put(log)
    asked, walks = disk.asked, disk.walks
    for _ in range(20):
        put(log)
    assert (disk.asked, disk.walks) == (asked, walks)
    now[0] += LOOK_EVERY_NS
    put(log)
    put(log)
    assert disk.asked == asked + 1
    put(log, LOOK_EVERY_BYTES)
    put(log)
    assert disk.asked == asked + 2
    assert disk.walks == walks
    disk.space_bytes = sum(disk.sizes(RUN).values()) + 500
    walks = disk.walks
    log.space._free_min_bytes = 1_000
    log.space.look()
    text = log.space.problem
    assert text.startswith("disk: ")
    assert text.endswith("bytes are free beside the run, below disk_free_min_bytes 1000")
    assert disk.walks == walks
    disk.space_bytes -= 1
    log.space.look()
    assert (log.space.problem, disk.walks) == (text, walks + 1)
    log.space._bytes_max = 10
    log.space.look()
    assert log.space.problem.endswith("above disk_bytes_max 10")
    log.space._bytes_max, disk.space_bytes = None, None
    log.space.look()
    assert log.space.problem == ""
    asyncio.run(log.aclose())


def test_a_file_system_that_does_not_say_how_much_is_left_is_let_be():
    disk = CountingDisk()
    disk.silent = True
    log = make(disk, disk_free_min_bytes=1 << 60)
    put(log)

    assert log.space.problem == ""
    asyncio.run(log.aclose())


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1 GB"])
def test_a_bound_that_cannot_be_one_is_refused(value):
    with pytest.raises(BadSettings, match="must be a number of bytes, an integer of at least 1"):
        make(FaultyDisk(), disk_bytes_max=value)
    with pytest.raises(BadSettings, match="disk_free_min_bytes"):
        make(FaultyDisk(), disk_free_min_bytes=value)


def test_without_a_bound_nothing_is_counted():
    disk = FaultyDisk()

    assert with_quota(disk, RUN, None, None) == (disk, None)


def test_the_real_disk_says_what_files_take_and_what_is_free(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "sub" / "b").write_bytes(b"1")
    (tmp_path / "loop").symlink_to(tmp_path)
    disk = OsDisk()
    sizes = disk.sizes(str(tmp_path))

    assert (sizes[f"{tmp_path}/a"], sizes[f"{tmp_path}/sub/b"]) == (3, 1)
    assert not [name for name in sizes if "loop/" in name]
    assert disk.free_bytes(str(tmp_path)) > 0

    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.lstat", gone)
    assert disk.sizes(str(tmp_path)) == {}


def test_the_virtual_disk_says_so_too():
    disk = FaultyDisk(space_bytes=10)
    disk.makedirs("/d")
    disk.replace("/d/a", b"1234")

    assert (disk.sizes("/d"), disk.sizes("/"), disk.free_bytes("/d")) == ({"/d/a": 4}, {"/d/a": 4}, 6)
    assert FaultyDisk().free_bytes("/") > 1 << 50
