"""From a path to the records of a run."""

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.near import nearest
from groupstate.errors import BadInput, NotARun
from groupstate.log.reading import beginning, first_event, read_book, read_log
from groupstate.log.rundir import MARKER

DEPTH_MAX = 3
FOLDERS_SEEN_MAX = 2_000
"""Folders looked into for runs; a path may be a home directory."""
RUNS_NAMED_MAX = 8
NEAR_NAMES_MAX = 3


def records_of(run: Path, first: int = 1, stop: int | None = None) -> Iterator[Record]:
    """Records `first` up to (not including) `stop` of a run directory, which may be written meanwhile.

    Raises:
        NotARun: it is none; the text names runs that lie beneath, or beside it under nearly its name.
        CorruptLog, LostEvents, UnsupportedLog: where it can't be read, on the way.
    """
    with other_runs_told(run):
        return read_log(run, first, stop)


@contextlib.contextmanager
def other_runs_told(run: Path) -> Iterator[None]:
    """Where a path is no run, say in the block's error which run may have been meant."""
    try:
        yield
    except NotARun as error:
        if "holds runs" in str(error):
            raise
        if found := runs_beneath(run):
            raise NotARun(f"{error}. Runs beneath it: {', '.join(map(str, found))}") from error
        if found := runs_of_nearly_that_name(run):
            raise NotARun(f"{error}; did you mean {' or '.join(repr(str(path)) for path in found)}?") from error
        raise


def check_range(first: int | None, last: int | None) -> None:
    """
    Raises:
        BadInput: `--to` lies before `--from`.
    """
    if first is not None and last is not None and last < first:
        raise BadInput(f"event {last} (--to) comes before event {first} (--from); give the earlier one as --from")


def beginning_of(run: Path) -> tuple[Book | None, int]:
    """The book before the first event that a run still has, and that event's number; None and 1 where all are there.

    Raises:
        NotARun, CorruptLog: see `records_of`.
    """
    records_of(run)  # for its error, where this is no run
    return beginning(run)


def first_of(run: Path) -> int:
    """The first event that a run still has.

    Raises:
        NotARun, CorruptLog: see `records_of`.
    """
    records_of(run)
    return first_event(run)


def nearest_book(run: Path, seq: int | None) -> tuple[Book | None, int]:
    """A book to go on from to event `seq`, and the number of the event behind it: of the nearest snapshot, so that no
    more than what follows it is replayed."""
    records_of(run)
    book = read_book(run, seq)
    return (None, 1) if book is None else (book, book.last_seq + 1)


def runs_of_nearly_that_name(path: Path) -> list[Path]:
    """Run directories beside a path that isn't there, whose names are nearest to its own, best first."""
    if os.path.lexists(path):
        return []
    try:
        with os.scandir(path.parent) as entries:
            seen = [entry.name for entry in islice(entries, FOLDERS_SEEN_MAX)]
    except OSError:
        return []
    names = [name for name in seen if os.path.isfile(path.parent / name / MARKER)]
    return [path.with_name(name) for name in nearest(path.name, names, NEAR_NAMES_MAX)]


def runs_beneath(path: Path) -> list[Path]:
    """Run directories under a path, the first few, by name."""
    found: list[Path] = []
    for seen, (folder, names, files) in enumerate(os.walk(path)):
        if MARKER in files and Path(folder) != path:
            found.append(Path(folder))
        if seen >= FOLDERS_SEEN_MAX or len(found) == RUNS_NAMED_MAX:
            break
        deep = len(Path(folder).relative_to(path).parts) >= DEPTH_MAX
        # Changed in place, so that os.walk goes no further than these.
        names[:] = [] if deep or MARKER in files else sorted(name for name in names if not name.startswith("."))
    return found
