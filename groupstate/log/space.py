"""A bound on what a run takes on the disk, told before the disk is full.

Rule 1: what is taken is counted along with each write; the tree is walked when the log is opened, and again only
while there is no room, since others may have made some.
Rule 2: the writer looks at most once a second, or per 64 MiB, not with each commit.
Rule 3: a hold keeps the text that it began with, so that it is written down once.
"""

import threading

from groupstate.core.arguments import integer_or_none
from groupstate.core.held import DISK_HOLD
from groupstate.errors import BadSettings
from groupstate.log.disk import Disk

LOOK_EVERY_NS = 1_000_000_000
LOOK_EVERY_BYTES = 64 << 20


class MeteredDisk:
    """A disk that counts the bytes of all files beneath a directory."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        """Of the descriptors that may be written to."""
        self.used_bytes = 0
        self.written_bytes = 0
        """In all, whether it made a file longer or not."""
        self.locks_held = disk.locks_held
        self.open_to_read = disk.open_to_read
        self.size = disk.size
        self.pread = disk.pread
        self.fdatasync = disk.fdatasync
        self.makedirs = disk.makedirs
        self.fsync_dir = disk.fsync_dir
        self.listdir = disk.listdir
        self.exists = disk.exists
        self.sizes = disk.sizes
        self.free_bytes = disk.free_bytes

    def count(self) -> None:
        """Walk the tree."""
        with self._lock:
            self._sizes = self._disk.sizes(self._path)
            self.used_bytes = sum(self._sizes.values())

    def _set(self, path: str, size: int | None) -> None:
        with self._lock:
            self.used_bytes += (size or 0) - self._sizes.pop(path, 0)
            if size is not None:
                self._sizes[path] = size

    def open(self, path: str, *, create: bool = False) -> int:
        fd = self._disk.open(path, create=create)
        self._paths[fd] = path
        if create:
            self._set(path, 0)
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        self._disk.close(fd)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        taken = self._disk.pwrite(fd, data, offset)
        self.written_bytes += taken
        path = self._paths[fd]
        # A name that is gone already, as that of a lock's first file, isn't counted again.
        if path in self._sizes:
            self._set(path, max(self._sizes[path], offset + taken))
        return taken

    def truncate(self, fd: int, length: int) -> None:
        self._disk.truncate(fd, length)
        self._set(self._paths[fd], length)

    def link(self, source: str, target: str) -> None:
        self._disk.link(source, target)
        self._set(target, self._sizes.get(source, 0))

    def rename(self, source: str, target: str) -> None:
        self._disk.rename(source, target)
        size = self._sizes.get(source, 0)
        self._set(source, None)
        self._set(target, size)

    def unlink(self, path: str) -> None:
        self._disk.unlink(path)
        self._set(path, None)


class Space:
    """Whether there is room for more. Asked by the run, answered by the log's writer."""

    def __init__(self, disk: MeteredDisk, path: str, bytes_max: int | None, free_min_bytes: int | None) -> None:
        self._disk = disk
        self._path = path
        self._bytes_max = bytes_max
        self._free_min_bytes = free_min_bytes
        self._looked_ns = 0
        self._looked_bytes = 0
        self._kind = ""
        self.problem = ""
        """Why nothing more should be started; empty while there is room."""

    @property
    def used_bytes(self) -> int:
        return self._disk.used_bytes

    def check(self, now_ns: int) -> None:
        """Look, if it is time."""
        waited = abs(now_ns - self._looked_ns) >= LOOK_EVERY_NS
        if waited or self._disk.written_bytes - self._looked_bytes >= LOOK_EVERY_BYTES:
            self._looked_ns, self._looked_bytes = now_ns, self._disk.written_bytes
            self.look()

    def look(self) -> None:
        if self.problem:
            self._disk.count()
        kind, text = self._what_is_wrong()
        if kind != self._kind:
            self._kind, self.problem = kind, text

    def _what_is_wrong(self) -> tuple[str, str]:
        used, most = self._disk.used_bytes, self._bytes_max
        if most is not None and used > most:
            return "quota", f"{DISK_HOLD}the run takes {used} bytes, above disk_bytes_max {most}"
        least = self._free_min_bytes
        if least is None:
            return "", ""
        try:
            free = self._disk.free_bytes(self._path)
        except OSError:
            return "", ""  # a file system that doesn't say; the writes themselves will
        if free < least:
            return "free", f"{DISK_HOLD}{free} bytes are free beside the run, below disk_free_min_bytes {least}"
        return "", ""


def with_quota(
    disk: Disk, path: str, disk_bytes_max: int | None, disk_free_min_bytes: int | None
) -> tuple[Disk, Space | None]:
    """The disk to use for a run, and what watches over its room; the disk itself and None without a bound.

    Raises:
        BadSettings: a bound that can't be one.
    """
    bytes_max = _bound("disk_bytes_max", disk_bytes_max)
    free_min_bytes = _bound("disk_free_min_bytes", disk_free_min_bytes)
    if bytes_max is None and free_min_bytes is None:
        return disk, None
    metered = MeteredDisk(disk, path)
    metered.count()
    return metered, Space(metered, path, bytes_max, free_min_bytes)


def _bound(name: str, value: int | None) -> int | None:
    return integer_or_none(name, value, least=1, wanted="a number of bytes, an integer", error=BadSettings)
