"""The few file operations that the log needs, behind one small protocol.

Rule 1: everything under groupstate/log that touches a file goes through a `Disk`, so that a test can make
any single operation fail.
Rule 2: no mmap and no flock: run directories lie on network file systems, where both mislead.
"""

import os
import sys
from collections.abc import Callable
from typing import Protocol


class Disk(Protocol):
    """Files by path and by descriptor. Errors are `OSError`."""

    locks_held: set[str]
    """Tokens of the locks that this process holds on the disk, so that it can tell them from forgotten ones."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; with `create` make it, or empty it where it exists."""
        ...

    def open_to_read(self, path: str) -> int: ...

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer at the end of the file."""
        ...

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at `offset` and say how many bytes were taken, which may be fewer than given."""
        ...

    def truncate(self, fd: int, length: int) -> None: ...

    def fdatasync(self, fd: int) -> None: ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; `FileExistsError` where that name is taken."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def makedirs(self, path: str) -> None: ...

    def fsync_dir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every file beneath a directory, by path, as far as they can be seen. Links aren't followed."""
        ...

    def free_bytes(self, path: str) -> int:
        """What this user may yet write on the file system that `path` is on."""
        ...


def _full_sync(fd: int) -> None:
    """macOS: only this command makes the drive itself write."""
    import fcntl

    fcntl.fcntl(fd, getattr(fcntl, "F_FULLFSYNC", 51))


def flush_for(platform: str) -> Callable[[int], None]:
    """The call that puts a file's bytes on the disk."""
    return _full_sync if platform == "darwin" else os.fdatasync


class OsDisk:
    """The real one."""

    locks_held: set[str] = set()  # noqa: RUF012  # there is one real disk, however many objects stand for it

    def __init__(self) -> None:
        self._flush = flush_for(sys.platform)

    def open(self, path: str, *, create: bool = False) -> int:
        made = os.O_CREAT | os.O_TRUNC if create else 0
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | made, 0o666)

    def open_to_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        self._flush(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def sizes(self, path: str) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(path):
            for name in names:
                whole = os.path.join(folder, name)
                try:
                    found[whole] = os.lstat(whole).st_size
                except FileNotFoundError:
                    pass  # removed in this moment
        return found

    def free_bytes(self, path: str) -> int:
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize


def write_all(disk: Disk, fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`: a disk may take less than it is given, and say so only by the count."""
    written = 0
    while written < len(data):
        rest = memoryview(data)[written:] if written else data
        taken = disk.pwrite(fd, rest, offset + written)
        if taken <= 0:
            raise OSError(f"the disk took {taken} of {len(rest)} bytes at offset {offset + written}")
        written += taken


def read_all(disk: Disk, fd: int, length: int, offset: int = 0) -> bytes:
    """`length` bytes from `offset`, fewer only where the file ends; one read may return less than it was asked."""
    parts: list[bytes] = []
    while length > 0 and (part := disk.pread(fd, length, offset)):
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_file(disk: Disk, path: str) -> bytes:
    fd = disk.open_to_read(path)
    try:
        return read_all(disk, fd, disk.size(fd))
    finally:
        disk.close(fd)


def make_file(disk: Disk, path: str, data: bytes) -> None:
    """A new file that is there whole or not at all, whenever the machine stops.

    Flushed whatever the durability of the log: it is rare, and a run with an empty head can't be opened.
    """
    temporary = path + ".tmp"
    fd = disk.open(temporary, create=True)
    try:
        write_all(disk, fd, data, 0)
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, path)
    # Without this the file's name, and so all of it, may be gone after a power loss.
    disk.fsync_dir(os.path.dirname(path))
