"""The log of a run in files: appended by one process, read by any.

Rule 1: per commit first the payloads, then one frame with the events, then the watermark; each is on the disk
before the next begins.
Rule 2: `post` checks and encodes on the caller's thread, so what can't be kept is refused to whoever made it.
"""

import os
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, TypeAlias

import attrs

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.errors import BadInput, LogError
from groupstate.log.checks import check_numbers
from groupstate.log.codec import decode, encode_items, join_items, schema_json, schema_name
from groupstate.log.commit import Commit, GroupCommit, Later
from groupstate.log.disk import Disk, OsDisk, make_file
from groupstate.log.frames import FRAME_BYTES_MAX, checksum_seed
from groupstate.log.head import HeadWriter, Watermark
from groupstate.log.keeper import Job, Keeper
from groupstate.log.lock import Lock
from groupstate.log.payload_files import PAYLOAD_FILE_BYTES, PayloadWriter
from groupstate.log.payloads import FilePayloads
from groupstate.log.process import boot_id
from groupstate.log.reading import Cursor, beginning
from groupstate.log.recovery import Findings, carry_out, examine
from groupstate.log.retention import Keep, checked_keep, expect_readers, reading
from groupstate.log.rundir import RunDir, RunInfo, parse_log_id, read_run_info, write_run_info
from groupstate.log.segments import SEGMENT_BYTES, SegmentWriter, list_segments
from groupstate.log.snapshots import WAYPOINT, Parts, Snapshot, SnapshotInfo, newest_snapshot
from groupstate.log.space import Space, with_quota
from groupstate.log.upcasts import UPCASTS, Upcasts

FileDurability: TypeAlias = Literal["fsync", "os"]

_FRAME_ROOM = 64
"""Bytes of a frame beside its records, generously."""


@attrs.frozen
class _Options:
    disk: Disk
    durability: FileDurability
    inline: bool
    segment_bytes: int
    payload_file_bytes: int
    now_ns: Callable[[], int]
    keep: Keep = "all"
    upcasts: Upcasts = UPCASTS
    later: Later | None = None

    def __attrs_post_init__(self) -> None:
        if self.durability not in ("fsync", "os"):
            raise BadInput(
                f"durability {self.durability!r} isn't one of a file log: it is 'fsync' (survives the machine) or 'os' "
                "(survives the process)"
            )

        if self.inline and self.later is not None:
            raise BadInput("inline writes at once and later doesn't; give a log one of the two")

    @property
    def sync(self) -> bool:
        return self.durability == "fsync"

    @property
    def threadless(self) -> bool:
        """Everything happens on the caller's thread."""
        return self.inline or self.later is not None


class FileLog:
    """An `EventLog` in a run directory. `create` makes one, `open` recovers one."""

    def __init__(self, run: RunDir, info: RunInfo, lock: Lock, options: _Options, undo: ExitStack) -> None:
        """Recover what is there and make it ready for appending. Only `create` and `open` call this."""
        disk, sync = options.disk, options.sync
        self._disk = disk
        self._run = run
        self._info = info
        self._lock = lock
        self._now_ns = options.now_ns
        self._upcasts = options.upcasts
        boot_crc = zlib.crc32(boot_id().encode())
        seed = checksum_seed(info.log_id)
        self._payload_writer = PayloadWriter(disk, run, info.log_id, file_bytes=options.payload_file_bytes, sync=sync)
        undo.callback(self._payload_writer.close)
        self.payloads = FilePayloads(
            disk,
            run,
            info.log_id,
            self._payload_writer,
            before_put=self._check_open,
            free_later=self._free_later,
            blocks=not options.threadless,
        )
        findings = self._recover(boot_crc, sync=sync)
        self._known = findings.known
        self.torn_bytes = findings.torn_bytes
        """Bytes of an interrupted commit that were cut when the log was opened."""
        self.recovered_seq = findings.last_seq
        """The last event that was there when the log was opened."""
        self.snapshot = findings.snapshot
        """The newest snapshot that was there when the log was opened, until whoever folds the log into a book sets it
        to None, having used it."""
        self.snapshot_seq = 0 if findings.snapshot is None else findings.snapshot.info.seq
        """The last event that it holds; 0 without one."""
        self.waypoint_seq = findings.waypoint_seq
        """The last event of the newest waypoint that was there when the log was opened; 0 without one."""
        self.keep = options.keep
        self._keeper = Keeper(disk, run, info.log_id, options.keep, inline=options.threadless, sync=sync)
        self._keeper.advance(findings.last_seq)
        if isinstance(options.keep, int):
            expect_readers(disk, run)
        self._segments = SegmentWriter(
            disk, run, info.log_id, findings.last, segment_bytes=options.segment_bytes, sync=sync
        )
        undo.callback(self._segments.close)
        self._head = HeadWriter(disk, run.head, Watermark(findings.last_seq, sync, boot_crc), seed)
        undo.callback(self._head.close)
        self.space: Space | None = None
        """Whether there is room for more, where a bound was given."""
        self._commit = GroupCommit(
            run.log,
            findings.last_seq,
            self._keep,
            self._tidy,
            self._release,
            inline=options.inline,
            later=options.later,
        )

    def _recover(self, boot_crc: int, *, sync: bool) -> Findings:
        findings = examine(self._disk, self._run, self._info.log_id, boot_crc, upcasts=self._upcasts)
        self.payloads.load()
        carry_out(self._disk, self._run, findings, sync=sync)
        schema = os.path.join(self._run.log, schema_name())
        if not self._disk.exists(schema):
            make_file(self._disk, schema, schema_json())
        return findings

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        log_id: str | None = None,
        durability: FileDurability = "fsync",
        inline: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        payload_file_bytes: int = PAYLOAD_FILE_BYTES,
        disk_bytes_max: int | None = None,
        disk_free_min_bytes: int | None = None,
        keep: Keep = "all",
        disk: Disk | None = None,
        later: Later | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> "FileLog":
        """Make a run directory, with an empty log.

        Args:
            path: the run directory; it may exist, without a run in it.
            log_id: 32 hexadecimal digits; random ones by default.
            durability: `fsync` survives the machine, `os` the process.
            inline: write on the calling thread, inside `post`, which raises if it fails, instead of in a thread of its
                own.
            segment_bytes: about where a segment ends and the next one begins.
            payload_file_bytes: the same for payload files.
            disk_bytes_max: what the run directory should take at most; `space` says when it takes more.
            disk_free_min_bytes: what the file system should have left at least.
            keep: what stays of the log: `all` of it, all of it with old segments packed (`archive`), or what came since
                so many checkpoints.
            disk: where the files are; the real disk by default.
            later: in place of the thread, calls a function later on the event loop's thread: then what was posted
                until now is written at once. With it virtual time passes between a post and its flush.
            now_ns: the wall clock.

        Raises:
            BadInput: there is a run already, or the arguments don't fit.
            LogError: the directory can't be written to.
        """
        run = RunDir.at(path)
        disk, space = with_quota(OsDisk() if disk is None else disk, run.path, disk_bytes_max, disk_free_min_bytes)
        options = _Options(
            disk, durability, inline, segment_bytes, payload_file_bytes, now_ns, checked_keep(keep), later=later
        )
        info = RunInfo(parse_log_id(log_id), now_ns())
        _refuse_existing(disk, run)
        with ExitStack() as undo, _log_errors(f"{run.path} can't be made a run"):
            disk.makedirs(run.log)
            lock = Lock.acquire(disk, run.lock, now_ns=info.created_ns)
            undo.callback(lock.release)
            # Once more, since another process may have been at it until it let go of the lock.
            _refuse_existing(disk, run)
            if disk.exists(run.head):
                # Of an attempt that died before it wrote run.json. It names another log.
                disk.unlink(run.head)
            log = cls(run, info, lock, options, undo)
            write_run_info(disk, run, info)
            undo.pop_all()
        log._watch(space)
        return log

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        durability: FileDurability = "fsync",
        inline: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        payload_file_bytes: int = PAYLOAD_FILE_BYTES,
        keep: Keep = "all",
        take_over: bool = False,
        disk_bytes_max: int | None = None,
        disk_free_min_bytes: int | None = None,
        disk: Disk | None = None,
        later: Later | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        upcasts: Upcasts = UPCASTS,
    ) -> "FileLog":
        """Open a run to go on writing, and recover its log: see `torn_bytes` and `recovered_seq`.

        Args:
            take_over: replace a writer on another machine, whose death can't be seen from here.
            upcasts: how events of older formats are read.

        The other arguments are those of `create`. An error leaves every file as it was.

        Raises:
            NotARun: `path` is not a run directory.
            LogInUse: another process writes this log.
            CorruptLog: damage that isn't a torn tail.
            LostEvents: acknowledged events are missing.
            UnsupportedLog: a format that this version doesn't know.
            LogError: the directory can't be written to.
        """
        run = RunDir.at(path)
        disk, space = with_quota(OsDisk() if disk is None else disk, run.path, disk_bytes_max, disk_free_min_bytes)
        options = _Options(
            disk, durability, inline, segment_bytes, payload_file_bytes, now_ns, checked_keep(keep), upcasts, later
        )
        info = read_run_info(disk, run)
        with ExitStack() as undo, _log_errors(f"{run.path} can't be opened"):
            lock = Lock.acquire(disk, run.lock, now_ns=now_ns(), take_over=take_over)
            undo.callback(lock.release)
            log = cls(run, info, lock, options, undo)
            undo.pop_all()
        log._watch(space)
        return log

    def __repr__(self) -> str:
        return f"<FileLog {self._run.path} events={self.last_seq} durable={self.durable_seq} {self._commit.state}>"

    @property
    def path(self) -> str:
        return self._run.path

    @property
    def log_id(self) -> str:
        return self._info.log_id.hex()

    @property
    def last_seq(self) -> int:
        return self._commit.last_seq

    @property
    def durable_seq(self) -> int:
        return self._commit.durable_seq

    def post(self, records: Sequence[Record]) -> None:
        commit = self._commit
        commit.check_open()
        check_numbers(records, commit.last_seq)
        items = encode_items(records)
        if len(items) > FRAME_BYTES_MAX - _FRAME_ROOM:
            raise LogError(f"{len(items)} bytes in one post are too many; up to {FRAME_BYTES_MAX} can be kept as one")
        if items:
            commit.submit(items, len(records), self.payloads.take_new())

    def durable(self, seq: int) -> Coroutine[Any, Any, None]:
        return self._commit.wait(seq)

    def keep_snapshot(self, info: SnapshotInfo, parts: Parts, *, limit: int, spacing: int = 0) -> None:
        """Write a snapshot once its events are durable, and then retire what `keep` lets go of.

        Args:
            parts: taken one by one in a thread of the log's own.
            limit: the last event that isn't needed for going back to a checkpoint.
            spacing: events between two snapshots, of which older ones that lie nearer are let go of; 0 for none.
        """
        self._keeper.take(Job(info, parts, limit, spacing))

    def keep_waypoint(self, info: SnapshotInfo, parts: Parts) -> None:
        """Write a waypoint once its events are durable; nothing is let go of behind it.

        Args:
            parts: taken one by one in a thread of the log's own.
        """
        self._keeper.take(Job(info, parts, 0, shape=WAYPOINT))

    @property
    def on_snapshot(self) -> Callable[[int, Exception | None], None] | None:
        """Called in a thread of the log's after each snapshot: (its seq, what went wrong with it or the retiring)."""
        return self._keeper.on_done

    @on_snapshot.setter
    def on_snapshot(self, tell: Callable[[int, Exception | None], None] | None) -> None:
        self._keeper.on_done = tell

    def snapshot_before(self, seq: int) -> Snapshot | None:
        """The newest good snapshot that holds no event from `seq` on, where a later one was of no use."""
        return newest_snapshot(self._disk, self._run, self._info.log_id, upto=seq - 1)

    def beginning(self) -> tuple[Book | None, int]:
        """The book before the first event that is still there, and that event's number; None and 1 if all are.

        Raises:
            CorruptLog: no snapshot that can be read says what the events that are gone led to.
        """
        return beginning(self._run.path, disk=self._disk)

    def read(self, start: int = 1, stop: int | None = None) -> Iterator[Record]:
        kept_seq, items, count = self._commit.unkept()
        unkept = decode(join_items(items, count), "what isn't written yet")
        cursor = Cursor(self._disk, self._run, self._info.log_id, start, self._known, upcasts=self._upcasts)
        kept = cursor.read(kept_seq if stop is None else min(kept_seq, stop - 1))
        wanted = (record for record in unkept if record.seq >= start and (stop is None or record.seq < stop))
        records = chain(chain.from_iterable(kept), wanted)
        return self._claimed(start, records) if isinstance(self.keep, int) else records

    def _claimed(self, start: int, records: Iterator[Record]) -> Iterator[Record]:
        """The same, with nothing of it removed meanwhile."""
        with reading(self._disk, self._run, start):
            yield from records

    async def aclose(self) -> None:
        await self._commit.aclose()

    def _watch(self, space: Space | None) -> None:
        self.space = space
        if space is not None:
            space.look()

    def _check_open(self) -> None:
        self._commit.check_open()

    def _free_later(self, keys: list[int]) -> None:
        # In line with the posts: a file may go when what was posted before is durable.
        if self._commit.state == "open":
            self._commit.submit(puts=self.payloads.take_new(), freed=keys)

    # In the writer's thread -------------------------------------------------------------------------

    def _keep(self, commit: Commit) -> None:
        now_ns = self._now_ns()
        self._lock.renew(now_ns)
        if commit.puts:
            self.payloads.write(commit.puts, now_ns)
        if commit.count:
            first_seq = self.durable_seq + 1
            last_seq = self.durable_seq + commit.count
            self._segments.append(commit.items, commit.count, first_seq, now_ns)
            self._head.write(last_seq)
            self._keeper.advance(last_seq)
        if commit.freed or commit.puts:
            self.payloads.drop(commit.freed)
        if self.space is not None:
            self.space.check(now_ns)

    def _tidy(self) -> bool:
        now_ns = self._now_ns()
        self._lock.renew(now_ns)
        return self.payloads.rewrite(now_ns)

    def _release(self) -> None:
        self._keeper.close()
        for part in (self._segments, self._payload_writer, self._head):
            try:
                part.close()
            except OSError:
                pass  # what was promised is flushed already
        self._lock.release()


def _refuse_existing(disk: Disk, run: RunDir) -> None:
    if disk.exists(run.marker):
        raise BadInput(f"{run.path} holds a run already; open it, or name another directory")
    if disk.exists(run.log) and list_segments(disk, run):
        raise BadInput(f"{run.log} holds events, though {run.marker} is missing; name another directory")


@contextmanager
def _log_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LogError(f"{what}: {error}") from error
