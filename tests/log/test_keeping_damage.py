"""A run with snapshots and archived or removed segments, of which any byte is not as it was written."""

import asyncio

import pytest

from groupstate.core.folding import replayed
from groupstate.core.rules import Rules
from groupstate.errors import CorruptLog, GroupstateError
from groupstate.log.reading import beginning, first_event, read_book, read_log, snapshot_digests
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import load
from groupstate.simulate.faults import FaultyDisk

from .retiring import OPTIONS, told
from .scenes import RUN, close, reopen

pytestmark = pytest.mark.slow

KEEPS = ["archive", 1]


def whole(keep):
    disk = FaultyDisk()
    kept = asyncio.run(told(disk, keep, count=7))
    assert kept.finished
    return disk, kept


WHOLE = {keep: whole(keep) for keep in KEEPS}
DIGESTS = {
    keep: {seq: replayed(kept.attempted[:seq]).digest() for seq in range(kept.acknowledged + 1)}
    for keep, (_, kept) in WHOLE.items()
}


def named(disk, suffix):
    return [path for path in disk.sizes(RUN) if path.endswith(suffix)]


def opened(disk, keep):
    """What opening leads to: the book, or an error that says so."""
    try:
        log = reopen(disk, keep=keep, **OPTIONS)
    except GroupstateError as error:
        return error
    ledger = Ledger(log, Rules())
    try:
        load(ledger)
    except GroupstateError as error:
        return error
    finally:
        asyncio.run(close(log))
    return ledger.book


def check(disk, keep, where):
    """Nothing wrong is taken for right, by whoever opens the run and whoever reads it."""
    known, digests = WHOLE[keep][1].attempted, DIGESTS[keep]
    reader = disk.copy()
    found = opened(disk, keep)
    if not isinstance(found, GroupstateError):
        assert (found.last_seq, found.digest()) == (len(known), digests[len(known)]), where
    for look in (_reads, _reads_the_book, _reads_the_beginning, _reads_digests):
        try:
            look(reader, known, digests)
        except GroupstateError:
            pass
    return found


def _reads(disk, known, digests):
    first = first_event(RUN, disk=disk)
    events = list(read_log(RUN, first, disk=disk))
    # With the newest slot of the watermark spoiled, a reader is one commit behind.
    assert events == known[first - 1 : first - 1 + len(events)]


def _reads_the_book(disk, known, digests):
    book = read_book(RUN, disk=disk)
    assert book is None or book.digest() == digests[book.last_seq]


def _reads_the_beginning(disk, known, digests):
    book, start = beginning(RUN, disk=disk)
    assert (book is None and start == 1) or book.digest() == digests[start - 1]


def _reads_digests(disk, known, digests):
    assert all(digests[seq] == digest for seq, digest in snapshot_digests(RUN, disk=disk).items())


def places(disk, stride):
    """Each file, and of each every so manieth byte, another one in every file."""
    for number, path in enumerate(sorted(disk.sizes(RUN))):
        data = disk.read(path)
        # The names of the fields are for people and other programs: the library never reads them.
        step = 50 * stride if "schema-" in path else stride
        for index in range(number % step, len(data), step):
            yield path, data, index


def strides(ordinary):
    return pytest.mark.parametrize("stride", [ordinary, pytest.param(1, marks=pytest.mark.crash)])


@strides(29)
@pytest.mark.parametrize("keep", KEEPS)
def test_no_flipped_bit_is_taken_for_an_event_or_a_book(keep, stride):
    intact = WHOLE[keep][0]
    for path, data, index in places(intact, stride):
        flipped = bytearray(data)
        flipped[index] ^= 1 << (index % 8)
        damaged = intact.copy()
        damaged.replace(path, bytes(flipped))
        found = check(damaged, keep, (path, index))
        if path.endswith((".snap", ".pay")):
            assert not isinstance(found, GroupstateError), (path, index, found)


@strides(29)
@pytest.mark.parametrize("keep", KEEPS)
def test_no_file_cut_anywhere_is_taken_for_events_or_a_book(keep, stride):
    intact = WHOLE[keep][0]
    for path, data, index in places(intact, stride):
        damaged = intact.copy()
        damaged.replace(path, data[:index])
        found = check(damaged, keep, (path, index))
        if path.endswith((".snap", ".pay")):
            assert not isinstance(found, GroupstateError), (path, index, found)


@pytest.mark.parametrize("keep", KEEPS)
def test_every_snapshot_is_damaged(keep):
    damaged = WHOLE[keep][0].copy()
    snapshots = named(damaged, ".snap")
    for path in snapshots:
        damaged.replace(path, damaged.read(path)[:-1])
    found = check(damaged, keep, "all snapshots")

    assert len(snapshots) >= 2
    if keep == "archive":
        assert not isinstance(found, GroupstateError)
    else:
        first = first_event(RUN, disk=damaged)
        assert isinstance(found, CorruptLog)
        assert (found.seq, f"starts with event {first}" in str(found)) == (1, True)


def test_a_damaged_archive_costs_the_history_and_not_the_run():
    damaged = WHOLE["archive"][0].copy()
    path = named(damaged, ".seg.gz")[0]
    damaged.replace(path, damaged.read(path)[:-9])
    found = check(damaged, "archive", path)

    assert not isinstance(found, GroupstateError)
    with pytest.raises(CorruptLog, match="the archived segment can't be unpacked") as caught:
        list(read_log(RUN, disk=damaged))
    assert (caught.value.path, caught.value.seq) == (path, 1)
