"""The payload store of a run: tokens and log-probabilities by key, in files beside the log.

Rule 1: `put` and `get` never wait for the writer: what isn't written yet, or lately was, is served from memory.
Rule 2: a payload is written even where it was freed meanwhile: an event that names it may become durable
without the one that freed it.
Rule 3: a file goes only when all its payloads are freed, it isn't the newest, and the events that were posted
before the freeing are durable. Otherwise a crash could bring back a group without its payloads.
"""

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

from groupstate.core.events import PayloadRef
from groupstate.errors import DamagedPayload, LogError
from groupstate.log.checks import check_payload
from groupstate.log.disk import Disk, OsDisk, read_all
from groupstate.log.payload_files import (
    RECORD_HEADER_BYTES,
    PayloadWriter,
    Place,
    list_payload_files,
    parse_record_header,
    payload_path,
    scan_file,
)
from groupstate.log.rundir import RunDir, read_run_info

PAYLOAD_BYTES_MAX = 1 << 30
"""Largest payload. The format holds 4 GiB; one that large in memory twice is not what a session returns."""


RECENT_BYTES_MAX = 64 << 20
"""Payloads that are written and kept in memory all the same, newest first: most groups are sampled soon after
their last session ended. A batch of 64 groups of 8 answers of 1,000 tokens has 6 MB."""


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
        self._seed = zlib.crc32(log_id)
        self._writer = writer
        self._lock = threading.Lock()
        self._next_key = 1
        self._new: dict[int, bytes] = {}
        """Taken, not handed to the writer yet."""
        self._unwritten: dict[int, bytes] = {}
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._places: dict[int, Place] = {}
        self._freed: set[int] = set()
        """Freed, and still counted in their files."""
        self._kept_per_file: dict[int, int] = {}

    def load(self) -> None:
        """Find what earlier processes left. Changes nothing before it has looked at all of it."""
        self._disk.makedirs(self._run.payloads)
        files = list_payload_files(self._disk, self._run)
        scans = {file: scan_file(self._disk, self._run, file, self._seed) for file in files}
        for file, scan in scans.items():
            self._kept_per_file[file] = 0
            for place in scan.places:
                self._add(place)
            largest = max((place.key for place in scan.places), default=0)
            self._next_key = max(self._next_key, scan.first_key, largest + 1)
        for name in self._disk.listdir(self._run.payloads):
            if name.endswith(".tmp"):
                self._disk.unlink(os.path.join(self._run.payloads, name))
        if scans:
            self._writer.go_on_behind(max(scans), scans[max(scans)])

    def _add(self, place: Place) -> None:
        self._places[place.key] = place
        self._kept_per_file[place.file] = self._kept_per_file.get(place.file, 0) + 1

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
        with self._lock:
            data = self._unwritten.get(ref.key) or self._recent.get(ref.key)
            place = self._places.get(ref.key)
            gone = ref.key in self._freed or (data is None and place is None)
        if gone:
            raise DamagedPayload(
                f"payload {ref.key} is not in {self._run.payloads}: it was freed, or belongs to another run"
            )
        if data is not None:
            return check_payload(ref, data, "memory")
        assert place is not None
        return read_place(self._disk, self._run, place, ref, self._seed)

    def in_memory(self, ref: PayloadRef) -> bool:
        with self._lock:
            return ref.key in self._unwritten or ref.key in self._recent

    def free(self, refs: Iterable[PayloadRef]) -> None:
        self._free({ref.key for ref in refs})

    def keep_only(self, keys: set[int]) -> int:
        """Free all payloads but these, and say how many that were. For an opened run, whose log says what it needs."""
        with self._lock:
            orphans = (self._places.keys() | self._unwritten.keys()) - keys - self._freed
            self._next_key = max(self._next_key, max(keys, default=0) + 1)
        self._free(orphans)
        return len(orphans)

    def _free(self, keys: set[int]) -> None:
        with self._lock:
            known = [key for key in sorted(keys) if key in self._places or key in self._unwritten]
            known = [key for key in known if key not in self._freed]
            self._freed.update(known)
        if known:
            self._free_later(known)

    # For the log ------------------------------------------------------------------------------------

    def take_new(self) -> list[tuple[int, bytes]]:
        """What was put since the last call, for the commit of the next events."""
        if not self._new:
            return []
        with self._lock:
            taken, self._new = self._new, {}
        return list(taken.items())

    def write(self, puts: list[tuple[int, bytes]], now_ns: int) -> None:
        """Put payloads on the disk. Called by the writer, before the events that name them."""
        places = self._writer.append(puts, now_ns)
        with self._lock:
            for place in places:
                self._add(place)
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
                place = self._places.pop(key)
                self._forget(key)
                self._freed.discard(key)
                self._kept_per_file[place.file] -= 1
            # Not only the files of these keys: one that was the newest when it ran empty is due by now.
            due = [file for file, kept in self._kept_per_file.items() if kept == 0 and file != self._writer.file]
            for file in due:
                del self._kept_per_file[file]
        for file in due:
            try:
                self._disk.unlink(payload_path(self._run, file))
            except OSError:
                pass  # the space comes back after the next opening, which frees what no event needs


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
    for file in reversed(list_payload_files(disk, run)):
        try:
            scan = scan_file(disk, run, file, seed)
        except FileNotFoundError:
            continue  # freed by its writer in this moment
        for place in scan.places:
            if place.key == ref.key:
                return read_place(disk, run, place, ref, seed)
    raise DamagedPayload(f"payload {ref.key} is not in {run.payloads}: it was freed, or belongs to another run")
