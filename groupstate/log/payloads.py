"""The payload store of a run: tokens and log-probabilities by key, in files beside the log.

Rule 1: `put` and `get` never wait for the writer: what isn't written yet, or lately was, is served from memory.
Rule 2: a payload is written even where it was freed meanwhile: an event that names it may become durable
without the one that freed it.
Rule 3: a file goes only when all its payloads are freed or copied to a newer file, it isn't the newest, the copies
are on the disk, and the events that were posted before the freeing are durable. Otherwise a crash could bring back a
group without its payloads.
Rule 4: of two copies the later counts, where it is whole; the earlier one is there until the later is on the disk.
"""

import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from groupstate.core.events import PayloadRef
from groupstate.errors import DamagedPayload, LogError
from groupstate.log.checks import check_payload
from groupstate.log.disk import Disk, OsDisk, read_all, write_all
from groupstate.log.payload_files import (
    RECORD_HEADER_BYTES,
    PayloadWriter,
    Place,
    Scan,
    list_payload_files,
    parse_record_header,
    payload_path,
    read_record,
    scan_file,
)
from groupstate.log.payload_space import PayloadUsage, Space
from groupstate.log.rundir import RunDir, read_run_info

GONE = "it was freed or lost, or belongs to another run"

PAYLOAD_BYTES_MAX = 1 << 30
"""Largest payload. The format holds 4 GiB; one that large in memory twice is not what a session returns."""


RECENT_BYTES_MAX = 64 << 20
"""Payloads that are written and kept in memory all the same, newest first: most groups are sampled soon after
their last session ended. A batch of 64 groups of 8 answers of 1,000 tokens has 6 MB."""

SLICES_PER_FILE = 8
"""What is copied at a time is this part of a file, 8 MiB, so that the next commit hasn't long to wait."""


KEYS_TOLD = 10
"""A warning names no more payloads than that."""


def _say_nothing(event: str, **values: object) -> None:
    pass


@attrs.define
class _Rewriting:
    """A file whose payloads are on their way to newer files."""

    file: int
    places: deque[Place]
    """Not looked at yet."""
    damaged: list[int] = attrs.field(factory=list)
    """Keys of records that are not what was written."""


class FilePayloads:
    """A `PayloadStore` in files. Made by `FileLog`."""

    def __init__(
        self,
        disk: Disk,
        run: RunDir,
        log_id: bytes,
        writer: PayloadWriter,
        *,
        before_put: Callable[[], None],
        free_later: Callable[[list[int]], None],
        blocks: bool,
    ) -> None:
        """`before_put` refuses where the log does; `free_later` calls `drop` when what was posted is durable."""
        self.blocks = blocks
        """False where the log works without threads, as under a virtual clock: then a read is done on the spot."""
        self._before_put = before_put
        self._free_later = free_later
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._seed = zlib.crc32(log_id)
        self._writer = writer
        self.warn: Callable[..., None] = _say_nothing
        """Takes what happened and its values, as a logger does; called by the writer."""
        self._lock = threading.Lock()
        self._next_key = 1
        self._new: dict[int, bytes] = {}
        """Taken, not handed to the writer yet."""
        self._unwritten: dict[int, bytes] = {}
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._space = Space()
        self._rewriting: _Rewriting | None = None
        self._freed: set[int] = set()
        """Freed, and still counted in their files."""

    def load(self) -> None:
        """Find what earlier processes left. Changes nothing before it has looked at all of it."""
        self._disk.makedirs(self._run.payloads)
        files = list_payload_files(self._disk, self._run)
        scans = {file: scan_file(self._disk, self._run, file, self._seed) for file in files}
        self._next_key = max((scan.next_key for scan in scans.values()), default=1)
        self._take_in(scans)
        for name in self._disk.listdir(self._run.payloads):
            if name.endswith(".tmp"):
                self._disk.unlink(os.path.join(self._run.payloads, name))
        if scans:
            self._writer.go_on_behind(max(scans), scans[max(scans)], self._next_key)

    def _take_in(self, scans: dict[int, Scan]) -> None:
        copies: dict[int, list[Place]] = {}
        for file, scan in scans.items():
            if scan.header is not None and scan.header.log_id != self._log_id:
                continue  # somebody else's: not ours to remove
            will_be_cut = scan.header is not None and file == max(scans)
            self._space.add_file(file, scan.stop if will_be_cut else scan.size)
            for place in scan.places:
                if self._space.place(place.key) is None:
                    self._space.add(place)
                else:
                    copies.setdefault(file, []).append(place)
        for file, places in copies.items():
            for place in self._written_again(file, places):
                self._space.add(place)

    def _written_again(self, file: int, copies: list[Place]) -> list[Place]:
        """Those of the copies in a file that are whole, on the disk for certain, so that earlier ones may go.

        Whoever copied them may have died before he flushed them, or have failed to. After a failed flush only bytes
        that are written once more come to the disk.
        """
        whole = []
        fd = self._disk.open(payload_path(self._run, file))
        try:
            for place in copies:
                record = read_record(self._disk, fd, place, self._seed)
                if record is not None:
                    write_all(self._disk, fd, record, place.offset)
                    whole.append(place)
            self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        return whole

    # For the run ------------------------------------------------------------------------------------

    def put(self, data: bytes) -> PayloadRef:
        data = bytes(data)
        if len(data) > PAYLOAD_BYTES_MAX:
            raise LogError(f"a payload of {len(data)} bytes is too large; up to {PAYLOAD_BYTES_MAX} can be kept")
        self._before_put()
        with self._lock:
            key = self._next_key
            self._next_key += 1
            self._new[key] = self._unwritten[key] = data
        return PayloadRef(key, len(data), zlib.crc32(data))

    def get(self, ref: PayloadRef) -> bytes:
        while True:
            with self._lock:
                data = self._unwritten.get(ref.key, self._recent.get(ref.key))
                place = self._space.place(ref.key)
                gone = ref.key in self._freed or (data is None and place is None)
            if gone:
                raise DamagedPayload(f"payload {ref.key} is not in {self._run.payloads}: {GONE}")
            if data is not None:
                return check_payload(ref, data, "memory")
            assert place is not None
            try:
                return read_place(self._disk, self._run, place, ref, self._seed)
            except DamagedPayload:
                with self._lock:
                    moved = self._space.place(ref.key) != place
                if not moved:
                    raise

    def in_memory(self, ref: PayloadRef) -> bool:
        with self._lock:
            return ref.key in self._unwritten or ref.key in self._recent

    def free(self, refs: Iterable[PayloadRef]) -> None:
        self._free({ref.key for ref in refs})

    def keep_only(self, keys: set[int]) -> int:
        """Free all payloads but these, and say how many that were. For an opened run, whose log says what it needs."""
        with self._lock:
            orphans = {*self._space.keys, *self._unwritten} - keys - self._freed
            self._next_key = max(self._next_key, max(keys, default=0) + 1)
        self._free(orphans)
        return len(orphans)

    def _free(self, keys: set[int]) -> None:
        with self._lock:
            known = [key for key in sorted(keys - self._freed) if self._space.place(key) or key in self._unwritten]
            self._freed.update(known)
        if known:
            self._free_later(known)

    def usage(self) -> PayloadUsage:
        """What the files take up. What isn't written yet isn't counted."""
        with self._lock:
            return self._space.usage(self._freed)

    # For the log ------------------------------------------------------------------------------------

    def take_new(self) -> Sequence[tuple[int, bytes]]:
        """What was put since the last call, for the commit of the next events."""
        if not self._new:
            return ()
        with self._lock:
            taken, self._new = self._new, {}
        return list(taken.items())

    def write(self, puts: list[tuple[int, bytes]], now_ns: int) -> None:
        """Put payloads on the disk. Called by the writer, before the events that name them."""
        places = self._writer.append(puts, now_ns)
        with self._lock:
            for place in places:
                self._space.add(place)
                self._remember(place.key, self._unwritten.pop(place.key))

    def _remember(self, key: int, data: bytes) -> None:
        self._recent[key] = data
        self._recent_bytes += len(data)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    def _forget(self, key: int) -> None:
        self._recent_bytes -= len(self._recent.pop(key, b""))

    def drop(self, keys: list[int]) -> None:
        """Remove the files that are not needed any more. Called by the writer."""
        with self._lock:
            for key in keys:
                self._space.remove(key)
                self._forget(key)
                self._freed.discard(key)
            # Not only the files of these keys: one that was the newest when it ran empty is due by now. One that is
            # being rewritten is not: what was copied may have to be flushed first.
            due = self._space.empty(self._writer.file, self._rewriting.file if self._rewriting else 0)
            for file in due:
                self._space.remove_file(file)
        for file in due:
            self._unlink(file)

    def _unlink(self, file: int) -> None:
        try:
            self._disk.unlink(payload_path(self._run, file))
        except OSError:
            pass  # the space comes back after the next opening, which frees what no event needs

    # Rewriting --------------------------------------------------------------------------------------

    def rewrite(self, now_ns: int) -> bool:
        """Copy some of what is needed of a file that is mostly freed, and remove the file behind the last of it.

        Called by the writer between two commits.

        Returns:
            Whether there is more to do.
        """
        if self._rewriting is None:
            file = self._space.to_rewrite(self._writer.file)
            if file is None:
                return False
            self._rewriting = _Rewriting(file, deque(self._space.places_in(file)))
        try:
            records = self._next_records(self._rewriting)
        except OSError as error:
            # It may be readable another time, so it stays as it is.
            path = payload_path(self._run, self._rewriting.file)
            self.warn("a payload file can't be read, so its space is not reclaimed", path=path, error=str(error))
            self._space.fix(self._rewriting.file)
            self._rewriting = None
            return True
        places = self._writer.append_records(records, now_ns)
        with self._lock:
            for place in places:
                self._space.add(place)
        if not self._rewriting.places:
            self._finish(self._rewriting)
        return True

    def _next_records(self, rewriting: _Rewriting) -> list[bytes]:
        """What is copied at a time: a part of a file, or one record that is larger."""
        path = payload_path(self._run, rewriting.file)
        room = size_max = self._writer.file_bytes // SLICES_PER_FILE
        records = []
        fd = self._disk.open_to_read(path)
        try:
            while rewriting.places and (room == size_max or rewriting.places[0].size <= room):
                place = rewriting.places.popleft()
                if self._space.place(place.key) != place:
                    continue  # freed since
                room -= place.size
                record = read_record(self._disk, fd, place, self._seed)
                if record is None:
                    rewriting.damaged.append(place.key)
                else:
                    records.append(record)
        finally:
            self._disk.close(fd)
        return records

    def _finish(self, rewriting: _Rewriting) -> None:
        self._writer.flush()
        with self._lock:
            self._space.remove_file(rewriting.file)
        self._rewriting = None
        if rewriting.damaged:
            path, keys = payload_path(self._run, rewriting.file), rewriting.damaged
            self.warn("payloads are damaged, so they were not kept", path=path, count=len(keys), keys=keys[:KEYS_TOLD])
        self._unlink(rewriting.file)


def read_place(disk: Disk, run: RunDir, place: Place, ref: PayloadRef, seed: int) -> bytes:
    """The bytes of `ref`, from the file. Opened for each read: a kept descriptor could outlive its file."""
    path = payload_path(run, place.file)
    try:
        fd = disk.open_to_read(path)
        try:
            data = read_all(disk, fd, RECORD_HEADER_BYTES + place.length, place.offset)
        finally:
            disk.close(fd)
    except OSError as error:
        raise DamagedPayload(f"payload {ref.key} can't be read from {path}: {error}") from error
    if parse_record_header(data, place.file, place.offset, seed) != place:
        raise DamagedPayload(f"payload {ref.key} is not at byte {place.offset} of {path}, where it was written")
    return check_payload(ref, data[RECORD_HEADER_BYTES:], path)


def read_payload(path: str | os.PathLike[str], ref: PayloadRef, *, disk: Disk | None = None) -> bytes:
    """The bytes of `ref` from a run directory, without opening it for writing.

    Searches the headers of the payload files, so it is meant for looking at a few.

    Raises:
        NotARun: `path` is not a run directory.
        DamagedPayload: missing, freed, not written yet, or not the bytes that were put.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    seed = zlib.crc32(read_run_info(disk, run).log_id)
    damage = DamagedPayload(f"payload {ref.key} is not in {run.payloads}: {GONE}")
    searched = 0
    while True:
        files = list_payload_files(disk, run)
        # What a first search passed over can only have been moved to the file that was the newest, or to a later one.
        for file in [file for file in reversed(files) if file >= searched]:
            for place in _places_of(disk, run, file, ref.key, seed):
                try:
                    return read_place(disk, run, place, ref, seed)
                except DamagedPayload as error:
                    damage = error  # an older file may have it whole
        if files == list_payload_files(disk, run):
            raise damage
        searched = max(files, default=0)


def _places_of(disk: Disk, run: RunDir, file: int, key: int, seed: int) -> list[Place]:
    try:
        scan = scan_file(disk, run, file, seed)
    except FileNotFoundError:
        return []  # removed by its writer in this moment
    return [place for place in reversed(scan.places) if place.key == key]
