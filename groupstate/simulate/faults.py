"""A disk in memory that fails where it is told to, and forgets at a power loss what was never flushed.

Rule 1: what a crash keeps is what the operating system promises and no more: flushed bytes under flushed
names. Everything else may be there, be gone, or be there in part.
Rule 2: the same calls in the same order fail in the same place, so every failure can be repeated.

Directories are never lost: they are made when a run is created, and a run counts from its run.json on.
"""

import errno
import os
import random
import sys
import threading
from collections.abc import Iterable

import attrs

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""

Change = tuple[int, bytes] | int
"""Bytes written at an offset, or a length that the file was cut to."""


class _File:
    """The bytes of a file, as processes see them and as the disk has them."""

    def __init__(self, durable: bytes = b"", name: str = "") -> None:
        self.name = name
        """Of its names the one that it was given last, without its directory."""
        self.live = bytearray(durable)
        self.unflushed: list[Change] = []
        self._durable = bytearray(durable)
        self._flushed: list[Change] = []
        """What `_durable` is behind by: only a loss of power asks for it."""

    @property
    def durable(self) -> bytearray:
        for change in self._flushed:
            _apply(self._durable, change)
        self._flushed.clear()
        return self._durable

    def change(self, change: Change) -> None:
        _apply(self.live, change)
        self.unflushed.append(change)

    def flush(self) -> None:
        self._flushed += self.unflushed
        self.unflushed.clear()


def _apply(data: bytearray, change: Change) -> None:
    if isinstance(change, int):
        del data[change:]
        data.extend(bytes(change - len(data)))
        return
    offset, written = change
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


def _surviving_bytes(file: _File, torn_bytes: int, chance: random.Random | None) -> bytes:
    if chance is not None:
        return _mixed_bytes(file, chance)
    data = bytearray(file.durable)
    for change in file.unflushed:
        if torn_bytes <= 0:
            break
        if isinstance(change, int):
            _apply(data, change)
        else:
            _apply(data, (change[0], change[1][:torn_bytes]))
            torn_bytes -= len(change[1])
    return bytes(data)


def _mixed_bytes(file: _File, chance: random.Random) -> bytes:
    """Every sector as it was at a moment of its own, since a cache writes back in any order, sector by sector."""
    versions = [bytes(file.durable)]
    for change in file.unflushed:
        data = bytearray(versions[-1])
        _apply(data, change)
        versions.append(bytes(data))
    length = len(chance.choice(versions))
    sectors = []
    for start in range(0, length, SECTOR_BYTES):
        sector = chance.choice(versions)[start : start + SECTOR_BYTES]
        sectors.append(sector.ljust(SECTOR_BYTES, b"\0"))
    return b"".join(sectors)[:length]


def _beneath(directory: str) -> str:
    """How the paths of what is in a directory begin."""
    return directory.rstrip("/") + "/"


def _entries(paths: Iterable[str], directory: str) -> list[str]:
    """Those of the paths that lie in a directory, and not deeper."""
    beneath = _beneath(directory)
    cut = len(beneath)
    return [path for path in paths if path.startswith(beneath) and path.find("/", cut) < 0 and len(path) > cut]


@attrs.frozen
class Fault:
    """Which operation fails, and how."""

    at: int
    """Number of the operation, from 1. Operations are those that change something; reading isn't counted."""
    once: bool = True
    """False: every later operation fails as well, as on a disk that has died."""
    torn_bytes: int = 0
    """A write that fails puts this many of its bytes there first."""
    errno: int = errno.EIO


class FaultyDisk:
    """A `Disk` with a plan. Threads may share it."""

    def __init__(
        self, fault: Fault | None = None, *, write_bytes_max: int | None = None, space_bytes: int | None = None
    ) -> None:
        self.fault = fault
        self.write_bytes_max = write_bytes_max
        """Bytes that one write takes at most; the rest of a longer one is left to the caller, without an error."""
        self.space_bytes = space_bytes
        """Bytes that all files may have together; a write beyond fails with ENOSPC after filling up."""
        self.locks_held: set[str] = set()
        self.operation_count = 0
        self.operations: list[str] = []
        """What was done, in words, for tests that check an order."""
        self._lock = threading.RLock()
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._directories: set[str] = {"/"}
        self._open: dict[int, _File] = {}
        self._next_fd = 1000

    # What happens to it -------------------------------------------------------------------------------

    def crash(self, *, torn_bytes: int = 0, chance: random.Random | None = None) -> "FaultyDisk":
        """The disk after a power loss, without faults.

        Args:
            torn_bytes: of each file's unflushed bytes, in the order of writing, this many survive.
            chance: instead, draws for every sector and every name what of the unflushed survives.
        """
        after = FaultyDisk()
        with self._lock:
            after._directories = set(self._directories)
            names = self._surviving_names(chance)
            after._names = {
                path: _File(_surviving_bytes(file, torn_bytes, chance), os.path.basename(path))
                for path, file in names.items()
            }
            after._durable_names = dict(after._names)
        return after

    def _surviving_names(self, chance: random.Random | None) -> dict[str, _File]:
        if chance is None:
            return self._durable_names
        names = {}
        for path in sorted(self._names.keys() | self._durable_names.keys()):
            newer, older = self._names.get(path), self._durable_names.get(path)
            survivor = newer if newer is older or chance.random() < 0.5 else older
            if survivor is not None:
                names[path] = survivor
        return names

    def copy(self) -> "FaultyDisk":
        """The disk as another process sees it now, without faults: what a killed process leaves."""
        after = FaultyDisk()
        with self._lock:
            after._directories = set(self._directories)
            after._names = {path: _File(bytes(file.live), os.path.basename(path)) for path, file in self._names.items()}
            after._durable_names = dict(after._names)
        return after

    def read(self, path: str) -> bytes:
        with self._lock:
            return bytes(self._file(path).live)

    def replace(self, path: str, data: bytes) -> None:
        """Put other bytes in a file's place, durably: damage, for a test."""
        with self._lock:
            self._names[path] = self._durable_names[path] = _File(data, os.path.basename(path))

    def remove(self, path: str) -> None:
        """Lose a file, durably: damage, for a test."""
        with self._lock:
            del self._names[path]
            self._durable_names.pop(path, None)

    def _due(self, words: str) -> Fault | None:
        """Count an operation; gives the fault that it meets, if it does."""
        self.operation_count += 1
        self.operations.append(words)
        fault = self.fault
        if fault is None or self.operation_count < fault.at or (fault.once and self.operation_count > fault.at):
            return None
        return fault

    @staticmethod
    def _error(fault: Fault, words: str) -> OSError:
        return OSError(fault.errno, f"{os.strerror(fault.errno)} (planned: {words})")

    # A Disk -------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        if not create:
            return self.open_to_read(path)
        with self._lock:
            words = f"create {os.path.basename(path)}"
            fault = self._due(words)
            self._check_directory(path)
            if fault is not None:
                raise self._error(fault, words)
            self._names.setdefault(path, _File()).change(0)
            self._names[path].name = os.path.basename(path)
        return self.open_to_read(path)

    def open_to_read(self, path: str) -> int:
        with self._lock:
            return self._descriptor(self._file(path))

    def close(self, fd: int) -> None:
        with self._lock:
            del self._open[fd]

    def size(self, fd: int) -> int:
        with self._lock:
            return len(self._open[fd].live)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        with self._lock:
            return bytes(self._open[fd].live[offset : offset + length])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        with self._lock:
            file = self._open[fd]
            words = f"write {file.name}"
            fault = self._due(words)
            wanted = bytes(data if fault is None else data[: fault.torn_bytes])
            if self.write_bytes_max is not None:
                wanted = wanted[: self.write_bytes_max]
            taken = wanted if self.space_bytes is None else wanted[: self._room(file, offset)]
            if taken:
                file.change((offset, taken))
            if len(taken) < len(wanted):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if fault is not None:
                raise self._error(fault, words)
        return len(taken)

    def truncate(self, fd: int, length: int) -> None:
        with self._lock:
            words = f"truncate {self._open[fd].name}"
            if (fault := self._due(words)) is not None:
                raise self._error(fault, words)
            self._open[fd].change(length)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            file = self._open[fd]
            words = f"flush {file.name}"
            if (fault := self._due(words)) is not None:
                # As on Linux: the pages count as clean, so that the next flush says yes and doesn't write them.
                file.unflushed.clear()
                raise self._error(fault, words)
            file.flush()

    def link(self, source: str, target: str) -> None:
        with self._lock:
            words = f"link {os.path.basename(target)}"
            fault = self._due(words)
            file = self._file(source)
            if target in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            if fault is not None:
                raise self._error(fault, words)
            self._names[target] = file

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            words = f"rename {os.path.basename(target)}"
            fault = self._due(words)
            file = self._file(source)
            if fault is not None:
                raise self._error(fault, words)
            del self._names[source]
            self._names[target] = file
            file.name = os.path.basename(target)

    def unlink(self, path: str) -> None:
        with self._lock:
            words = f"unlink {os.path.basename(path)}"
            fault = self._due(words)
            file = self._file(path)
            if fault is not None:
                raise self._error(fault, words)
            del self._names[path]
            left = (os.path.basename(name) for name, other in self._names.items() if other is file)
            file.name = next(left, "?")

    def makedirs(self, path: str) -> None:
        with self._lock:
            while path not in self._directories:
                self._directories.add(path)
                path = os.path.dirname(path)

    def fsync_dir(self, path: str) -> None:
        with self._lock:
            words = f"flush {os.path.basename(path)}/"
            if (fault := self._due(words)) is not None:
                raise self._error(fault, words)
            known = self._names.keys() | self._durable_names.keys()
            for name in _entries(known, path):
                self._durable_names.pop(name, None)
                if name in self._names:
                    self._durable_names[name] = self._names[name]

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            self._check_directory(os.path.join(path, "any"))
            cut = len(_beneath(path))
            return sorted(name[cut:] for name in _entries(self._names.keys() | self._directories, path))

    def exists(self, path: str) -> bool:
        with self._lock:
            return path in self._names or path in self._directories

    def sizes(self, path: str) -> dict[str, int]:
        with self._lock:
            beneath = _beneath(path)
            return {name: len(file.live) for name, file in self._names.items() if name.startswith(beneath)}

    def free_bytes(self, path: str) -> int:
        with self._lock:
            if self.space_bytes is None:
                return sys.maxsize
            return max(0, self.space_bytes - sum(len(file.live) for file in set(self._names.values())))

    # -----------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> _File:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._names[path]

    def _check_directory(self, path: str) -> None:
        if os.path.dirname(path) not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _descriptor(self, file: _File) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd

    def _name_of(self, fd: int) -> str:
        return self._open[fd].name

    def _room(self, file: _File, offset: int) -> int:
        """Bytes that may be written at `offset`, where there is a bound."""
        assert self.space_bytes is not None
        used = sum(len(other.live) for other in set(self._names.values()) if other is not file)
        return max(0, self.space_bytes - used - offset)
