"""Places in a long log are found without reading what lies before them, and they are the right ones."""

import asyncio
import struct
from itertools import accumulate

import pytest

from groupstate.core.book import Book
from groupstate.core.events import Record, WeightsPublished
from groupstate.core.snapshot import capture, capture_live, encoded
from groupstate.errors import CorruptLog
from groupstate.log import frames, seeking
from groupstate.log.archive import archive_path, pack_segment
from groupstate.log.file import FileLog
from groupstate.log.frames import build_frame, frame_at, last_frame, walk
from groupstate.log.head import read_head
from groupstate.log.reading import Cursor, read_log
from groupstate.log.seeking import end_of, event_at, first_base_seq, known_places, nearest_base
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import SnapshotInfo, snapshot_path
from groupstate.simulate.faults import FaultyDisk

from .keeping import ID, PLACE, SMALL, told
from .scenes import RUN, close, make, reopen, seqs, weights

SEED = frames.checksum_seed(ID)
TIMES = [10, 20, 20, 20, 30, 45, 45, 60, 61, 62, 70, 80, 90, 90, 100]
"""When the events of a log were recorded."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halve down to single frames, so that small files show what large ones do."""
    monkeypatch.setattr(frames, "WALKED_BYTES", 1)


def timed(**options: object) -> FaultyDisk:
    """A log of several segments with events of these times, in commits of one to three."""
    disk = FaultyDisk()
    log = make(disk, segment_bytes=SMALL, **options)
    for last, count in zip(accumulate((1, 2, 3) * 2 + (3,)), (1, 2, 3) * 2 + (3,), strict=True):
        numbers = range(last - count + 1, last + 1)
        log.post([Record(seq, TIMES[seq - 1], WeightsPublished(seq)) for seq in numbers])
    asyncio.run(close(log))
    return disk


def packed(disk: FaultyDisk) -> FaultyDisk:
    """The same with all segments but the last in archives."""
    for first in list_segments(disk, PLACE)[:-1]:
        pack_segment(disk, PLACE, first)
    return disk


# Frames ----------------------------------------------------------------------------------------------


def stretch(*counts: int) -> bytes:
    """Frames of so many records, whose bodies hold what looks like the beginning of a frame."""
    first, made = 1, []
    for count in counts:
        made.append(build_frame(frames.FRAME_MAGIC * count + struct.pack("<II", 1, 0) * count, count, first, SEED))
        first += count
    return b"".join(made)


@pytest.mark.parametrize("tail", [b"", frames.FRAME_MAGIC, b"\0" * 100])
@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (5, 1, 30, 2, 2, 2), (1,) * 40])
def test_the_last_early_frame_is_found_by_halving(counts: tuple[int, ...], tail: bytes) -> None:
    data = stretch(*counts) + tail
    every = list(walk(memoryview(data), 0, SEED, 1))
    for wanted in range(1, sum(counts) + 3):
        found = last_frame(data, 0, SEED, lambda frame, wanted=wanted: frame.first_seq <= wanted)

        assert found == max(frame.start for frame in every if frame.first_seq <= wanted)


def test_without_an_early_frame_the_beginning_is_found() -> None:
    assert last_frame(stretch(1, 1, 1), 0, SEED, lambda frame: False) == 0


def test_few_frames_are_looked_at() -> None:
    data, seen = stretch(*(1,) * 1_000), []
    last_frame(data, 0, SEED, lambda frame: seen.append(frame) or frame.first_seq <= 700)

    assert len(seen) <= 20


# Reading from the middle -----------------------------------------------------------------------------


@pytest.mark.parametrize("archives", [False, True])
def test_reading_from_any_event_gives_what_follows(archives: bool) -> None:
    disk = packed(timed()) if archives else timed()
    for start in range(1, len(TIMES) + 3):
        assert seqs(read_log(RUN, start, disk=disk)) == list(range(start, len(TIMES) + 1))


def test_what_lies_before_in_the_segment_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, walked = FaultyDisk(), []
    log = make(disk)
    for seq in range(1, 201):
        log.post(weights(seq))
    asyncio.run(close(log))
    plain = frames.walk
    monkeypatch.setattr(
        "groupstate.log.reading.walk",
        lambda *args: (walked.append(frame) or frame for frame in plain(*args)),
    )

    assert seqs(read_log(RUN, 150, 160, disk=disk)) == list(range(150, 160))
    assert len(walked) <= 12


def test_a_cursor_that_starts_in_a_segment_goes_on_as_it_grows() -> None:
    disk = FaultyDisk()
    log = make(disk)
    for seq in range(1, 31):
        log.post(weights(seq))
    cursor = Cursor(disk, PLACE, ID, 25)
    assert [seqs(found) for found in cursor.read(30)] == [[seq] for seq in range(25, 31)]
    log.post(weights(31))

    assert [seqs(found) for found in cursor.read(31)] == [[31]]


# Times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archives", [False, True])
@pytest.mark.parametrize("ahead", [frames.HEADER_BYTES + 30, 64 << 10], ids=["long frames", "short frames"])
def test_the_last_event_up_to_a_time(archives: bool, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeking, "READ_AHEAD_BYTES", ahead)
    disk = packed(timed()) if archives else timed()
    for at_ns in range(5, 110):
        assert event_at(RUN, at_ns, disk=disk) == sum(time <= at_ns for time in TIMES)


def test_no_event_behind_the_watermark_is_found() -> None:
    disk = FaultyDisk()
    log = make(disk)
    log.post([Record(1, 10, WeightsPublished(1))])
    before = disk.read(PLACE.head)
    log.post([Record(2, 20, WeightsPublished(2))])
    log.post([Record(3, 30, WeightsPublished(3))])
    asyncio.run(close(log))
    assert event_at(RUN, 30, disk=disk) == 3
    disk.replace(PLACE.head, before)

    assert read_head(disk, PLACE.head, SEED).durable_seq == 1
    assert event_at(RUN, 30, disk=disk) == 1
    assert end_of(RUN, disk=disk) == 1


def test_without_a_watermark_all_that_is_there_counts() -> None:
    disk = timed()
    disk.unlink(PLACE.head)

    assert event_at(RUN, 90, disk=disk) == 14
    assert end_of(RUN, disk=disk) == 15


def test_a_run_without_events_has_none_at_any_time() -> None:
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    assert (event_at(RUN, 10, disk=disk), end_of(RUN, disk=disk)) == (0, 0)

    log = reopen(disk)
    log.post(weights(1))
    asyncio.run(close(log))
    path = PLACE.segment(1)
    disk.replace(path, disk.read(path)[: frames.HEADER_BYTES])
    assert event_at(RUN, 10**30, disk=disk) == 0


def test_where_the_clock_was_set_back_one_of_the_places_is_found() -> None:
    disk = FaultyDisk()
    log = make(disk, segment_bytes=SMALL)
    times = [10, 20, 30, 40, 50, 15, 25, 35, 45, 55, 65, 75]
    for seq, at_ns in enumerate(times, 1):
        log.post([Record(seq, at_ns, WeightsPublished(seq))])
    asyncio.run(close(log))
    for at_ns in range(10, 80):
        seq = event_at(RUN, at_ns, disk=disk)

        assert times[seq - 1] <= at_ns
        assert seq == len(times) or times[seq] > at_ns


def test_a_damaged_beginning_of_a_segment_is_named() -> None:
    disk = timed()
    data = bytearray(disk.read(PLACE.segment(1)))
    data[frames.HEADER_BYTES + 30] ^= 1
    segment = seeking._Segment(disk, PLACE, ID, 1)
    disk.replace(PLACE.segment(1), bytes(data[: frames.HEADER_BYTES + 40]))

    with pytest.raises(CorruptLog, match="its first frame can't be read"):
        segment.last_before(50)


def test_a_damaged_archive_is_named() -> None:
    disk = packed(timed())
    disk.replace(archive_path(PLACE, 1), b"no gzip at all")

    with pytest.raises(CorruptLog, match="the archived segment can't be unpacked"):
        event_at(RUN, 11, disk=disk)


def test_the_length_of_a_body_is_read_only_from_a_frame() -> None:
    data = stretch(3)

    assert frames.body_length(data, 0) == frame_at(memoryview(data), 0, SEED).stop - frames.FRAME_HEADER_BYTES
    assert frames.body_length(data[:10], 0) == 0
    assert frames.body_length(b"\0" * 40, 0) == 0


# Books to go on from ---------------------------------------------------------------------------------


def info(book: Book) -> SnapshotInfo:
    return SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)


def kept(
    disk: FaultyDisk, waypoints: tuple[int, ...] = (5, 10, 15, 25), snapshots: tuple[int, ...] = (10, 20)
) -> FileLog:
    """30 events, with waypoints and snapshots after some of them."""
    log, book = make(disk, segment_bytes=SMALL), Book()
    for seq in range(1, 31):
        (record,) = weights(seq)
        log.post([record])
        book.apply(record)
        if seq in snapshots:
            log.keep_snapshot(info(book), list(encoded(capture(book))), limit=0)
        if seq in waypoints:
            log.keep_waypoint(info(book), list(encoded(capture_live(book))))
    return log


@pytest.mark.parametrize(
    ("upto", "found"),
    [
        (4, None),
        (5, (5, False)),
        (9, (5, False)),
        (10, (10, False)),
        (19, (15, False)),
        (21, (20, True)),
        (None, (25, False)),
    ],
)
def test_the_nearest_of_both_kinds_counts_and_of_two_the_smaller(
    upto: int | None, found: tuple[int, bool] | None
) -> None:
    disk = FaultyDisk()
    kept(disk)
    base = nearest_base(RUN, upto, disk=disk)

    assert (base and (base.book.last_seq, base.whole)) == found


def test_snapshots_alone_where_a_whole_book_is_asked_for() -> None:
    disk = FaultyDisk()
    kept(disk)

    assert nearest_base(RUN, 19, whole=True, disk=disk).book.last_seq == 10
    assert nearest_base(RUN, 9, whole=True, disk=disk) is None


def test_one_that_cannot_be_read_is_passed_over() -> None:
    disk = FaultyDisk()
    kept(disk)
    disk.replace(snapshot_path(PLACE, 25, seeking.WAYPOINT), b"nothing")
    disk.replace(snapshot_path(PLACE, 20), disk.read(snapshot_path(PLACE, 10)))

    assert nearest_base(RUN, disk=disk).book.last_seq == 15
    assert [place.seq for place in known_places(RUN, disk=disk)] == [5, 10, 10, 15]


def test_one_without_a_state_is_passed_over() -> None:
    disk = FaultyDisk()
    log = kept(disk)
    log.keep_waypoint(SnapshotInfo(30, 0, 0, 1), [(1, b"no state")])

    assert nearest_base(RUN, disk=disk).book.last_seq == 25


def test_a_waypoint_is_not_taken_for_a_snapshot() -> None:
    disk = FaultyDisk()
    kept(disk, snapshots=())
    disk.replace(snapshot_path(PLACE, 25), disk.read(snapshot_path(PLACE, 25, seeking.WAYPOINT)))

    assert reopen_crashed(disk).snapshot is None


def reopen_crashed(disk: FaultyDisk) -> FileLog:
    return reopen(disk.copy())


def test_the_first_place_that_holds_an_event() -> None:
    disk = FaultyDisk()
    kept(disk)

    assert [first_base_seq(RUN, seq, disk=disk) for seq in (1, 5, 6, 16, 24, 26)] == [5, 5, 10, 20, 25, None]
    assert [place.weight_version for place in known_places(RUN, disk=disk)] == [5, 10, 10, 15, 20, 25]


def test_none_is_ahead_of_the_watermark() -> None:
    disk = FaultyDisk()
    log = kept(disk, waypoints=(5,), snapshots=())
    head = disk.read(PLACE.head)
    log.post(weights(31))
    log.keep_waypoint(SnapshotInfo(31, 0, 0, 1), [])
    disk.replace(PLACE.head, head)

    assert [place.seq for place in known_places(RUN, disk=disk)] == [5]


def test_a_log_without_any_has_none() -> None:
    disk = FaultyDisk()
    asyncio.run(close(told(disk, at=())))

    assert nearest_base(RUN, disk=disk) is None
