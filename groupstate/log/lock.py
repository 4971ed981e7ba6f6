"""One writer per log: a small JSON file beside the segments that names its holder.

Rule 1: the lock appears whole, by giving a finished file a second name (`link`), which succeeds for one only.
Rule 2: of all that find a holder dead, one becomes its successor: whoever makes `lock.{token}.next`, named
after that holder. It looks once more whether the holder still has the lock before it takes its place.
Rule 3: no flock: on network file systems it says yes to everybody, or forgets.

A holder dead on this machine is replaced without asking. Whether one on another machine is dead can't be
known from here, so that takes `take_over=True`.
"""

import json
import os
import platform
import uuid
import zlib
from collections.abc import Iterator

import attrs

from groupstate.errors import LogError, LogFailed, LogInUse
from groupstate.log.disk import Disk, read_file, write_all
from groupstate.log.process import ProcessId, is_alive, this_process

LEASE_RENEWAL_S = 10
"""Seconds between renewals, which happen with commits. For people who must decide whether a holder is dead."""

ATTEMPTS_MAX = 100
"""Tries to become a successor; each lost one means that somebody else got further."""


@attrs.frozen
class Holder:
    token: str
    process: ProcessId
    renewed_ns: int

    def encode(self) -> bytes:
        # Always the same length, so that a renewal overwrites all of it.
        fields = {"token": self.token, **attrs.asdict(self.process), "renewed_ns": f"{self.renewed_ns:020d}"}
        return json.dumps(fields, indent=2).encode() + b"\n"

    @property
    def is_here(self) -> bool:
        return self.process.host == platform.node()

    def is_dead(self, held_here: set[str]) -> bool:
        """Known to be dead; False on another machine, where it can't be known."""
        if not self.is_here:
            return False
        if self.process == this_process():
            # This process's own number proves nothing: a log that lost its disk in a simulated crash leaves it too.
            return self.token not in held_here
        return not is_alive(self.process)


def _parse(data: bytes) -> Holder:
    try:
        fields = json.loads(data)
        process = ProcessId(fields["pid"], fields["started"], fields["host"], fields["boot"])
        return Holder(fields["token"], process, int(fields["renewed_ns"]))
    except (ValueError, TypeError, KeyError):
        unreadable = ProcessId(0, "", "unknown, since its lock file is unreadable", "")
        return Holder(f"unreadable-{zlib.crc32(data):08x}", unreadable, 0)


class Lock:
    """A held lock. Made by `acquire`."""

    def __init__(self, disk: Disk, path: str, fd: int, holder: Holder) -> None:
        self._disk = disk
        self._path = path
        self._fd = fd
        self._holder = holder

    @classmethod
    def acquire(cls, disk: Disk, path: str, *, now_ns: int, take_over: bool = False) -> "Lock":
        """Become the one writer.

        Raises:
            LogInUse: another process holds the lock and lives, or is on another machine; or this one has it already.
            LogError: the directory can't be written to.
        """
        holder = Holder(uuid.uuid4().hex, this_process(), now_ns)
        own_name = f"{path}.{holder.token}.tmp"
        fd = -1
        # Before the lock can be seen: another thread of this process must not take its holder for dead.
        disk.locks_held.add(holder.token)
        try:
            fd = disk.open(own_name, create=True)
            write_all(disk, fd, holder.encode(), 0)
            disk.fdatasync(fd)
            _become_holder(disk, path, own_name, holder, now_ns=now_ns, take_over=take_over)
        except BaseException as error:
            disk.locks_held.discard(holder.token)
            if fd >= 0:
                disk.close(fd)
            _unlink_quietly(disk, own_name)
            if isinstance(error, OSError):
                raise LogError(
                    f"{os.path.dirname(path)} can't be locked for writing: {error}. Writing a run needs a directory "
                    "that this user can write to, on a file system with hard links; reading one needs neither"
                ) from error
            raise
        _unlink_quietly(disk, own_name)
        return cls(disk, path, fd, holder)

    def renew(self, now_ns: int) -> None:
        """Say that the holder lives, where it is time, and make sure that it still is the holder.

        Raises:
            LogFailed: somebody took the lock over.
        """
        if now_ns - self._holder.renewed_ns < LEASE_RENEWAL_S * 1_000_000_000:
            return
        if not self._is_ours():
            raise LogFailed(f"the lock {self._path} was taken over by another process, which writes this log now")
        self._holder = attrs.evolve(self._holder, renewed_ns=now_ns)
        write_all(self._disk, self._fd, self._holder.encode(), 0)

    def release(self) -> None:
        """Let go. What fails here leaves a lock of a dead holder, which the next one replaces."""
        self._disk.locks_held.discard(self._holder.token)
        try:
            self._disk.close(self._fd)
            if self._is_ours():
                self._disk.unlink(self._path)
        except OSError:
            pass

    def _is_ours(self) -> bool:
        current = _read(self._disk, self._path)
        return current is not None and current.token == self._holder.token


def _read(disk: Disk, path: str) -> Holder | None:
    try:
        return _parse(read_file(disk, path))
    except FileNotFoundError:
        return None


def _become_holder(disk: Disk, path: str, own_name: str, holder: Holder, *, now_ns: int, take_over: bool) -> None:
    for _ in range(ATTEMPTS_MAX):
        try:
            disk.link(own_name, path)
            return
        except FileExistsError:
            pass
        chain = list(_succession(disk, path))
        if not chain:
            continue  # released in this moment
        last = chain[-1]
        if not last.is_dead(disk.locks_held) and (last.is_here or not take_over):
            raise LogInUse(_in_use_text(path, last, now_ns))
        if _succeed(disk, path, own_name, chain):
            return
    raise LogInUse(f"{path} changed hands {ATTEMPTS_MAX} times while this process tried to take it")


def _succession(disk: Disk, path: str) -> Iterator[Holder]:
    """The holder, then whoever was taking over from it and died over that, and so on."""
    holder = _read(disk, path)
    while holder is not None:
        yield holder
        holder = _read(disk, _claim_name(path, holder))


def _claim_name(path: str, holder: Holder) -> str:
    return f"{path}.{holder.token}.next"


def _succeed(disk: Disk, path: str, own_name: str, chain: list[Holder]) -> bool:
    """Take the place of the last in `chain`, unless somebody else does."""
    claim = _claim_name(path, chain[-1])
    try:
        disk.link(own_name, claim)
    except FileExistsError:
        return False
    # A successor takes the lock before it removes its claim. So if the claim was free because that has
    # happened already, this look at the lock shows somebody else there.
    holder = _read(disk, path)
    if holder is None or holder.token != chain[0].token:
        _unlink_quietly(disk, claim)
        return False
    disk.rename(own_name, path)
    for dead in chain:
        _unlink_quietly(disk, _claim_name(path, dead))
    return True


def _unlink_quietly(disk: Disk, path: str) -> None:
    try:
        disk.unlink(path)
    except OSError:
        pass  # gone already, or left as a small file that nobody reads


def _in_use_text(path: str, holder: Holder, now_ns: int) -> str:
    process = holder.process
    age_s = max(0, now_ns - holder.renewed_ns) // 1_000_000_000
    where = f"{os.path.dirname(path)} is being written by process {process.pid} on host {process.host}"
    if process == this_process():
        return f"{where}, which is this one: it has this log open already. Use that, or close it before opening another"
    if holder.is_here:
        return f"{where}, which is running. End it first, or read the log without opening it for writing"
    return (
        f"{where}; its lock was last renewed {age_s} s ago. Whether it runs can't be seen from host "
        f"{platform.node()}: make sure that it has ended, then open the run with take_over=True"
    )
