"""Small helpers of the log's tests: records, runs on a faulty disk, and what came of them."""

import asyncio
import threading
from pathlib import Path

import attrs

from groupstate.core.events import GroupSubmitted, Record
from groupstate.errors import LogError, LogFailed, NotARun
from groupstate.log.disk import Disk
from groupstate.log.file import FileLog
from groupstate.simulate.faults import FaultyDisk
from groupstate.testing.contracts.log import seqs as seqs
from groupstate.testing.contracts.log import submitted as submitted
from groupstate.testing.contracts.log import weights as weights

RUN = "/runs/one"
LOG_ID = "0123456789abcdef0123456789abcdef"
FIRST_SEGMENT = f"{RUN}/log/{1:020d}.seg"


class GatedDisk(FaultyDisk):
    """A disk whose next flush waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()

    def fdatasync(self, fd: int) -> None:
        self.at_gate.set()
        assert self.gate.wait(30)
        super().fdatasync(fd)

    def stop_next_flush(self) -> None:
        self.gate.clear()
        self.at_gate.clear()


async def reached(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30), "it didn't come to that"


def make(disk: Disk, **options: object) -> FileLog:
    settings = {"log_id": LOG_ID, "inline": True, "now_ns": lambda: 1_700_000_000_000_000_000, **options}
    return FileLog.create(RUN, disk=disk, **settings)


def reopen(disk: Disk, **options: object) -> FileLog:
    settings = {"inline": True, "now_ns": lambda: 1_700_000_000_000_000_000, **options}
    return FileLog.open(RUN, disk=disk, **settings)


async def close(log: FileLog) -> None:
    """Close a log that may have failed."""
    try:
        await log.aclose()
    except LogFailed:
        pass


@attrs.define
class Story:
    """What was tried on a disk, and what was acknowledged before it failed."""

    posts: list[list[Record]] = attrs.Factory(list)
    acknowledged: int = 0
    finished: bool = False

    @property
    def attempted(self) -> list[Record]:
        return [record for post in self.posts for record in post]

    @property
    def ends_of_posts(self) -> set[int]:
        return {0} | {post[-1].seq for post in self.posts}


SEGMENT_BYTES = 300
"""Small enough that a story has several segments."""


async def tell(disk: Disk, post_count: int = 7) -> Story:
    """Post one to three records at a time, every second post with a payload, until the disk fails."""
    story = Story()
    try:
        log = make(disk, segment_bytes=SEGMENT_BYTES, payload_file_bytes=150)
    except LogError:
        return story
    try:
        for number in range(1, post_count + 1):
            records = weights(log.last_seq + 1, 1 + number % 3)
            if number % 2:
                ref = log.payloads.put(b"payload " * number)
                records.append(submitted(records[-1].seq + 1, ref))
            story.posts.append(records)
            log.post(records)
            await log.durable(records[-1].seq)
            story.acknowledged = records[-1].seq
        story.finished = True
    except LogFailed:
        pass
    await close(log)
    return story


async def check_recovery(disk: FaultyDisk, story: Story) -> int:
    """Open what is left, hold it against the story, and go on. Returns the last event recovered."""
    try:
        log = reopen(disk)
    except NotARun:
        assert story.acknowledged == 0
        return 0
    recovered = list(log.read())
    assert recovered == story.attempted[: len(recovered)]
    assert len(recovered) >= story.acknowledged
    assert log.last_seq in story.ends_of_posts
    named = [record.event.prompt for record in recovered if isinstance(record.event, GroupSubmitted)]
    assert all(b"payload" in log.payloads.get(ref) for ref in named)
    ref = log.payloads.put(b"after the fault")
    assert ref.key > max((other.key for other in named), default=0)
    log.post([submitted(log.last_seq + 1, ref)])
    await log.durable(log.last_seq)
    await log.aclose()

    again = reopen(disk)
    assert seqs(list(again.read())) == list(range(1, len(recovered) + 2))
    assert again.payloads.get(ref) == b"after the fault"
    await again.aclose()
    return len(recovered)


def story_on(disk: Disk, post_count: int = 7) -> Story:
    return asyncio.run(tell(disk, post_count))


def bytes_of(path: str | Path) -> bytes:
    return Path(path).read_bytes()
