"""Payloads of mixed lifetimes, so that files are rewritten; and what must be there after whatever happened."""

import random

import attrs

from groupstate.core.events import PayloadRef
from groupstate.errors import LogError, LogFailed, NotARun
from groupstate.log.disk import Disk
from groupstate.log.file import FileLog
from groupstate.log.payload_files import FILE_HEADER_BYTES
from groupstate.simulate.faults import FaultyDisk

from .scenes import close, make, reopen, submitted, weights

FILE_BYTES = 260
"""Small enough that a few payloads fill a file. A slice is one record then."""


@attrs.define
class Kept:
    """A payload, the event that names it, and the one with which it was freed."""

    ref: PayloadRef
    body: bytes
    named_at: int
    freed_at: int | None = None


@attrs.define
class Churn:
    payloads: list[Kept] = attrs.Factory(list)
    acknowledged: int = 0
    finished: bool = False

    def needed(self, last_seq: int) -> list[Kept]:
        """What a log that ends with this event needs."""
        return [
            kept
            for kept in self.payloads
            if kept.named_at <= last_seq and (kept.freed_at is None or kept.freed_at > last_seq)
        ]


def put(log: FileLog, churn: Churn, body: bytes) -> None:
    ref = log.payloads.put(body)
    churn.payloads.append(Kept(ref, body, log.last_seq + 1))
    log.post([submitted(log.last_seq + 1, ref)])


def free(log: FileLog, kept: Kept) -> None:
    """With an event because of which it goes."""
    kept.freed_at = log.last_seq + 1
    log.post(weights(kept.freed_at))
    log.payloads.free([kept.ref])


async def churned(disk: Disk, count: int = 18, **options: object) -> Churn:
    """Every fourth payload stays, the others are freed after a while, until the disk fails."""
    churn = Churn()
    try:
        log = make(disk, payload_file_bytes=FILE_BYTES, **options)
    except LogError:
        return churn
    try:
        for number in range(1, count + 1):
            put(log, churn, b"%d of %d " % (number, count) * (2 + number % 3))
            if number > 3 and number % 4:
                free(log, churn.payloads[number - 4])
            await log.durable(log.last_seq)
            churn.acknowledged = log.last_seq
        churn.finished = True
    except LogFailed:
        pass
    await close(log)
    return churn


async def check_payloads(
    disk: FaultyDisk, churn: Churn, *, chance: random.Random | None = None, **options: object
) -> None:
    """Open what is left: what is needed is there, now, while files are rewritten, and after a loss of power."""
    try:
        log = reopen(disk, payload_file_bytes=FILE_BYTES, **options)
    except NotARun:
        assert churn.acknowledged == 0
        return
    assert log.last_seq >= churn.acknowledged
    needed = churn.needed(log.last_seq)
    check_bytes(log, needed)
    log.payloads.keep_only({kept.ref.key for kept in needed})
    check_bytes(log, needed)
    more = Churn()
    for number in range(5):
        put(log, more, b"more %d" % number * 9)
        if number:
            free(log, more.payloads[-2])
        check_bytes(log, needed)
    needed += more.needed(log.last_seq)
    settle(log)
    check_bytes(log, needed)
    keys = [kept.ref.key for kept in needed]
    assert len(set(keys)) == len(keys)
    check_bound(log, disk)
    await log.aclose()
    # With `os` nothing is said of a loss of power.
    for left in (disk, disk.copy() if options.get("durability") == "os" else disk.crash(chance=chance)):
        log = reopen(left, payload_file_bytes=FILE_BYTES, **options)
        check_bytes(log, needed)
        await log.aclose()


def settle(log: FileLog, commits: int = 200) -> None:
    """Post until nothing is left to be rewritten."""
    for _ in range(commits):
        if log.payloads._rewriting is None and log.payloads._space.to_rewrite(log._payload_writer.file) is None:
            return
        log.post(weights(log.last_seq + 1))
    raise AssertionError("there is no end to the rewriting")


def check_bytes(log: FileLog, needed: list[Kept]) -> None:
    for kept in needed:
        # From the files; those lately written would come from memory.
        log.payloads._recent.pop(kept.ref.key, None)
        assert log.payloads.get(kept.ref) == kept.body


def check_bound(log: FileLog, disk: FaultyDisk) -> None:
    """Where nothing is left to be rewritten: twice what is needed, and the newest file."""
    usage = log.payloads.usage()
    sizes = [len(disk.read(f"{log.path}/payloads/{name}")) for name in disk.listdir(f"{log.path}/payloads")]
    headers = FILE_HEADER_BYTES * len(sizes)
    file_bytes = max([log._payload_writer.file_bytes, *sizes])
    assert sum(sizes) <= 2 * usage.live_bytes + headers + file_bytes
    assert (usage.disk_bytes, usage.files) == (sum(sizes), len(sizes))
