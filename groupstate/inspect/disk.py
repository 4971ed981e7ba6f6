"""What a run takes on the disk, and what of it may go."""

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import PurePath

import attrs

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.group import Group
from groupstate.inspect.replay import applied
from groupstate.log.archive import archive_path
from groupstate.log.disk import Disk, OsDisk
from groupstate.log.frames import checksum_seed
from groupstate.log.payload_files import PAYLOAD_SUFFIX, RECORD_HEADER_BYTES, payload_path, scan_file
from groupstate.log.retention import READERS, SNAPSHOTS_MIN
from groupstate.log.rundir import SEGMENT_SUFFIX, RunDir, read_run_info
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import SNAPSHOT_SUFFIX, WAYPOINT_SUFFIX, list_snapshots

HEADINGS = {
    SEGMENT_SUFFIX: "log segments",
    ".gz": "archived segments",
    SNAPSHOT_SUFFIX: "snapshots",
    WAYPOINT_SUFFIX: "waypoints",
    PAYLOAD_SUFFIX: "payload files",
    ".tmp": "left over",
}
"""By suffix, for files that a run makes; another suffix among them is a heading of its own."""

UNITS = ("KiB", "MiB", "GiB", "TiB")

SMALL = "head, lock, names"
OTHERS = "other files"


@attrs.frozen
class Kind:
    """Files of one kind."""

    heading: str
    files: int
    size_bytes: int


@attrs.frozen
class PayloadFile:
    """One payload file, by what the log still needs of it."""

    name: str
    size_bytes: int
    live_bytes: int
    """Of groups that are in flight, sampleable or with the trainer."""
    marked_bytes: int
    """Of committed groups that a mark could still bring back."""

    @property
    def freed_bytes(self) -> int:
        return self.size_bytes - self.live_bytes - self.marked_bytes


@attrs.frozen
class Sealed:
    """Segments that a `keep_log` of the run would let go of, or pack, once the next snapshot is taken."""

    keep: str
    size_bytes: int


@attrs.frozen
class Usage:
    path: str
    size_bytes: int
    free_bytes: int
    """Of the file system, for this user."""
    kinds: tuple[Kind, ...]
    payload_files: tuple[PayloadFile, ...]
    seq: int
    """The event up to which the log says what is live."""
    advice: tuple[str, ...]
    """What may go, and how."""
    sealed: tuple[Sealed, ...] = ()
    """What `keep_log` could let go of, with the snapshots and marks that there are."""


def usage(
    run: str | os.PathLike[str], records: Iterable[Record], base: Book | None = None, *, disk: Disk | None = None
) -> Usage:
    """What a run directory takes, by kind of file, and how much of its payloads the log still needs.

    Args:
        records: the run's log, from its first event on.
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        NotARun: `run` is not a run directory.
        LogError: the log isn't one that a run wrote.
    """
    disk = OsDisk() if disk is None else disk
    place = RunDir.at(run)
    seed = checksum_seed(read_run_info(disk, place).log_id)
    book = Book() if base is None else base
    for record in records:
        applied(book, record)
    sizes = disk.sizes(place.path)
    live, marked = _keys(book.groups.values()), _keys(book.aside.values())
    files = [
        _payload_file(disk, place, path, size, seed, live, marked)
        for path, size in sorted(sizes.items())
        if _heading(place, path) == HEADINGS[PAYLOAD_SUFFIX]
    ]
    whole = Usage(
        place.path,
        sum(sizes.values()),
        disk.free_bytes(place.path),
        tuple(_kinds(place, sizes)),
        tuple(file for file in files if file is not None),
        book.last_seq,
        (),
        tuple(_sealed(disk, place, sizes, book)),
    )
    return attrs.evolve(whole, advice=tuple(_advice(whole)))


def _keys(groups: Iterable[Group]) -> set[int]:
    return {ref.key for group in groups for ref in group.payloads()}


def _kinds(place: RunDir, sizes: dict[str, int]) -> list[Kind]:
    by_heading: dict[str, list[int]] = {}
    for path, size in sizes.items():
        by_heading.setdefault(_heading(place, path), []).append(size)
    kinds = [Kind(heading, len(found), sum(found)) for heading, found in by_heading.items()]
    return sorted(kinds, key=lambda kind: (-kind.size_bytes, kind.heading))


def _heading(place: RunDir, path: str) -> str:
    if os.path.dirname(path) == os.path.join(place.log, READERS):
        return SMALL
    if os.path.dirname(path) not in (place.log, place.payloads):
        return SMALL if path == place.marker else OTHERS
    suffix = PurePath(path).suffix
    if suffix in HEADINGS:
        return HEADINGS[suffix]
    small = suffix in ("", ".json", ".next")
    return SMALL if small else f"{suffix.removeprefix('.')} files"


def _sealed(disk: Disk, place: RunDir, sizes: dict[str, int], book: Book) -> Iterator[Sealed]:
    snapshots = list_snapshots(disk, place)[-SNAPSHOTS_MIN:]
    if len(snapshots) < SNAPSHOTS_MIN:
        return
    limits = {"archive": snapshots[0]}
    limits |= {str(keep): min(snapshots[0], mark) for keep, mark in enumerate(reversed(book.mark_seqs), 1) if keep <= 2}
    for keep, limit in limits.items():
        full = [first for first, following in pairwise(list_segments(disk, place)) if following <= limit + 1]
        plain = sum(sizes.get(place.segment(first), 0) for first in full)
        packed = 0 if keep == "archive" else sum(sizes.get(archive_path(place, first), 0) for first in full)
        if plain + packed:
            yield Sealed(keep, plain + packed)


def _payload_file(
    disk: Disk, place: RunDir, path: str, size: int, seed: int, live: set[int], marked: set[int]
) -> PayloadFile | None:
    stem = os.path.basename(path).removesuffix(PAYLOAD_SUFFIX)
    if not stem.isdecimal() or payload_path(place, int(stem)) != path:
        return None
    try:
        places = scan_file(disk, place, int(stem), seed).places
    except FileNotFoundError:
        return None  # removed by its writer in this moment

    def total(keys: set[int]) -> int:
        return sum(RECORD_HEADER_BYTES + found.length for found in places if found.key in keys)

    return PayloadFile(os.path.basename(path), size, total(live), total(marked))


def _advice(whole: Usage) -> list[str]:
    ways = []
    *older, newest = whole.payload_files or (None,)
    empty = [file.size_bytes for file in older if file is not None and not file.live_bytes + file.marked_bytes]
    if empty:
        ways.append(f"{size_of(sum(empty))} in payload files that nothing needs go when the run is opened or goes on")
    mixed = [file for file in (*older, newest) if file is not None and file.live_bytes + file.marked_bytes]
    if freed := sum(file.freed_bytes for file in mixed):
        ways.append(f"{size_of(freed)} are freed in payload files that hold others too, and go with the last of these")
    if marked := sum(file.marked_bytes for file in whole.payload_files):
        ways.append(f"{size_of(marked)} are of committed groups that a mark could bring back; two new marks free them")
    if live := sum(file.live_bytes for file in whole.payload_files):
        ways.append(f"{size_of(live)} are of live groups; commit, release or cancel them")
    for found in whole.sealed:
        if found.keep == "archive":
            ways.append(f"{size_of(found.size_bytes)} of the log are full segments; keep_log='archive' packs them")
        else:
            ways.append(f"{size_of(found.size_bytes)} of the log go with keep_log={found.keep}")
    by_heading = {kind.heading: kind for kind in whole.kinds}
    if left_over := by_heading.get(HEADINGS[".tmp"]):
        ways.append(
            f"{size_of(left_over.size_bytes)} are left over from interrupted writes; opening the run removes them"
        )
    if other := by_heading.get(OTHERS):
        ways.append(f"{size_of(other.size_bytes)} in other files aren't groupstate's")
    return ways


def size_of(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    return f"{count / 1024**power:.1f} {UNITS[power - 1]}"
