"""Events of an older format, read by way of steps. Format 0 stands for one: no real log is of it."""

import asyncio

import msgspec
import pytest

from groupstate.core.events import BatchCommitted, Record, RunClosed, WeightsPublished
from groupstate.errors import UnsupportedLog
from groupstate.log import upcasts as module
from groupstate.log.codec import decode, encode_items, join_items
from groupstate.log.file import FileLog
from groupstate.log.frames import HEADER_BYTES, SegmentHeader, build_frame, checksum_seed, parse_header
from groupstate.log.reading import Cursor
from groupstate.log.rundir import RunDir
from groupstate.log.upcasts import FORMAT, UPCASTS, Upcasts
from groupstate.simulate.faults import FaultyDisk

from .scenes import FIRST_SEGMENT, LOG_ID, RUN, make, reopen, weights

LOG_ID_BYTES = bytes.fromhex(LOG_ID)
SEED = checksum_seed(LOG_ID_BYTES)


def from_text(event):
    """In format 0 a weight version was a text, with the lineage behind it."""
    version, _, lineage = event[1].partition("/")
    return [2, int(version), int(lineage)]


def from_end(event):
    """In format 0 the end of a run had a tag of its own, and its reason behind a number."""
    return [8, event[2]]


OLD = Upcasts(0, {0: {2: from_text, 77: from_end}})
OLD_EVENTS = [[1, 1001, [2, "4/2"]], [2, 1002, [77, 5, "told so"]], [3, 1003, [63, 9]]]
NEW_RECORDS = [
    Record(1, 1001, WeightsPublished(4, 2)),
    Record(2, 1002, RunClosed("told so")),
    Record(3, 1003, BatchCommitted(9)),
]
BODY = msgspec.msgpack.encode(OLD_EVENTS)


def old_segment(first_seq=1, body=BODY, count=3):
    header = SegmentHeader(LOG_ID_BYTES, first_seq, 0, 0, form=0).encode()
    return header + (build_frame(body, count, first_seq, SEED) if count else b"")


def old_disk(**segment):
    """A run whose log an older version wrote."""
    disk = FaultyDisk()
    asyncio.run(make(disk).aclose())
    disk.replace(FIRST_SEGMENT, old_segment(**segment))
    disk.unlink(f"{RUN}/log/head")
    return disk


# Steps ------------------------------------------------------------------------------------------------


def test_events_of_an_older_format_are_read_by_its_steps():
    assert decode(BODY, "here", 0, upcasts=OLD) == NEW_RECORDS


def test_steps_are_taken_one_after_the_other(monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 3)
    taken = Upcasts(
        0,
        {
            0: {50: lambda event: [51, *event[1:], "from 0"]},
            1: {50: lambda event: [99, "tag 50 is gone by now"]},
            2: {51: lambda event: [2, *event[1:2]]},
        },
    )

    raised = taken.raised(msgspec.msgpack.encode([[1, 0, [50, 7]]]), 0)
    assert msgspec.msgpack.decode(raised) == [[1, 0, [2, 7]]]
    raised = taken.raised(msgspec.msgpack.encode([[1, 0, [51, 7, "from 1"]]]), 1)
    assert msgspec.msgpack.decode(raised) == [[1, 0, [2, 7]]]


def test_a_format_without_steps_is_read_as_it_is():
    body = encode_items(weights(1, 3))
    whole = join_items([body], 3)

    assert Upcasts(0).raised(whole, 0) is whole
    assert decode(whole, "here", 0, upcasts=Upcasts(0)) == weights(1, 3)


class Untouchable(Upcasts):
    def raised(self, body, form):
        raise AssertionError("an event of the current format was looked at")


def test_the_current_format_takes_no_notice_of_steps():
    body = join_items([encode_items(weights(1, 3))], 3)

    assert decode(body, "here", upcasts=Untouchable(0, {0: {2: from_text}})) == weights(1, 3)
    assert decode(body, "here", FORMAT, upcasts=Untouchable()) == weights(1, 3)


@pytest.mark.parametrize("old", [[[1, 0, [2, 4]]], [[1, 0, [2]]], [[1, 0, [2, "x/y"]]], [[1, 0, []]], [7]])
def test_what_a_step_can_not_read_is_refused(old):
    with pytest.raises(UnsupportedLog, match=r"x\.seg has an event .* isn't one of format 0, which its segment says"):
        decode(msgspec.msgpack.encode(old), "x.seg", 0, upcasts=OLD)


def test_a_step_to_nowhere_is_no_step():
    with pytest.raises(AssertionError, match="a step from format 1 is none of 1 to 0"):
        Upcasts(steps={FORMAT: {2: from_text}})


def test_this_version_reads_its_own_format():
    assert UPCASTS.readable == f"format {FORMAT}"
    assert OLD.readable == f"formats 0 to {FORMAT}"
    assert [form for form in range(-1, 4) if OLD.reads(form)] == [0, 1]
    assert [form for form in range(-1, 4) if UPCASTS.reads(form)] == [1]


# Segments ---------------------------------------------------------------------------------------------


def test_a_segment_of_an_older_format_than_can_be_read_is_refused():
    with pytest.raises(UnsupportedLog, match=r"x is of format 0, .* reads format 1, "):
        parse_header(old_segment(), "x")
    with pytest.raises(UnsupportedLog, match=r"x is of format 2, .* reads formats 0 to 1, "):
        parse_header(SegmentHeader(LOG_ID_BYTES, 1, 0, 0, form=2).encode(), "x", OLD)


def test_a_log_of_an_older_format_is_read_and_gone_on_with_in_a_segment_of_this_one():
    disk = old_disk()

    async def story():
        log = reopen(disk, upcasts=OLD)
        assert list(log.read()) == NEW_RECORDS
        log.post(weights(4))
        await log.durable(4)
        assert list(log.read()) == NEW_RECORDS + weights(4)
        log.post(weights(5))
        await log.aclose()
        assert disk.read(FIRST_SEGMENT) == old_segment()
        second = disk.read(f"{RUN}/log/{4:020d}.seg")
        assert parse_header(second, "second").form == FORMAT
        again = reopen(disk, upcasts=OLD)
        assert list(again.read()) == NEW_RECORDS + weights(4, 2)
        again.post(weights(6))
        await again.aclose()
        assert [name for name in disk.listdir(f"{RUN}/log") if name.endswith(".seg")] == [
            f"{1:020d}.seg",
            f"{4:020d}.seg",
        ]

    asyncio.run(story())


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_an_older_segment_without_an_event_makes_room_for_one_of_this_format(durability):
    disk = old_disk(count=0)

    async def story():
        log = reopen(disk, upcasts=OLD, durability=durability)
        log.post(weights(1))
        await log.aclose()
        assert parse_header(disk.read(FIRST_SEGMENT)[:HEADER_BYTES], "it").form == FORMAT
        assert list(reopen(disk).read()) == weights(1)

    asyncio.run(story())


def test_a_reader_that_comes_back_within_an_older_segment_knows_its_format():
    disk = old_disk(count=0)
    frames = [build_frame(msgspec.msgpack.encode([old]), 1, old[0], SEED) for old in OLD_EVENTS]
    cursor = Cursor(disk, RunDir.at(RUN), LOG_ID_BYTES, 1, upcasts=OLD)
    seen = []
    for count in (1, 2, 3):
        disk.replace(FIRST_SEGMENT, old_segment(count=0) + b"".join(frames[:count]))
        seen += [record for records in cursor.read(count) for record in records]
        assert seen == NEW_RECORDS[:count]


def test_without_the_steps_the_log_is_refused():
    with pytest.raises(UnsupportedLog, match=r"is of format 0, .* reads format 1"):
        FileLog.open(RUN, disk=old_disk(), inline=True)
