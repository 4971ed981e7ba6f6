"""Files that are not as they were written: a torn end is cut, and everything else is refused."""

import asyncio
import random
import struct
import zlib

import pytest

from groupstate.errors import CorruptLog, GroupstateError, LostEvents, UnsupportedLog
from groupstate.log import frames
from groupstate.log.frames import HEADER_BYTES, SegmentHeader, build_frame, checksum_seed
from groupstate.log.reading import read_log
from groupstate.simulate.faults import FaultyDisk

from .scenes import FIRST_SEGMENT, LOG_ID, RUN, check_recovery, close, make, reopen, seqs, story_on, submitted, weights

HEAD = f"{RUN}/log/head"
LOG_ID_BYTES = bytes.fromhex(LOG_ID)
SEED = checksum_seed(LOG_ID_BYTES)


def written(post_count=3, **options):
    """A closed log with `post_count` posts of two records each."""

    async def write():
        disk = FaultyDisk()
        log = make(disk, **options)
        for number in range(post_count):
            log.post(weights(1 + 2 * number, 2))
        await log.aclose()
        return disk

    return asyncio.run(write())


def files(disk):
    names = [f"{RUN}/log/{name}" for name in disk.listdir(f"{RUN}/log")]
    names += [f"{RUN}/payloads/{name}" for name in disk.listdir(f"{RUN}/payloads")]
    return {name: disk.read(name) for name in names if name.endswith((".seg", ".pay", "head", ".tmp"))}


def refused(disk, error):
    """Opening is refused, and leaves every file as it was."""
    before = files(disk)
    with pytest.raises(error) as caught:
        reopen(disk)
    assert files(disk) == before
    return caught.value


def opened(disk):
    log = reopen(disk)
    numbers = seqs(log.read())
    asyncio.run(log.aclose())
    return numbers, log.torn_bytes


def frame_stops(data):
    return [frame.stop for frame in frames.walk(memoryview(data), HEADER_BYTES, SEED, 1)]


# Cut ----------------------------------------------------------------------------------------------------


def test_a_log_cut_anywhere_keeps_whole_posts_only():
    intact = written()
    whole = intact.read(FIRST_SEGMENT)
    stops = frame_stops(whole)
    for length in range(len(whole)):
        disk = intact.copy()
        disk.remove(HEAD)
        disk.replace(FIRST_SEGMENT, whole[:length])
        numbers, torn_bytes = opened(disk)

        kept = sum(stop <= length for stop in stops)
        good_bytes = stops[kept - 1] if kept else HEADER_BYTES if length >= HEADER_BYTES else 0
        assert numbers == list(range(1, 2 * kept + 1))
        assert torn_bytes == length - good_bytes


def test_a_log_cut_below_its_watermark_has_lost_events():
    intact = written()
    whole = intact.read(FIRST_SEGMENT)
    stops = frame_stops(whole)
    for length in range(len(whole)):
        disk = intact.copy()
        disk.replace(FIRST_SEGMENT, whole[:length])
        error = refused(disk, LostEvents)

        kept = sum(stop <= length for stop in stops)
        assert (error.first, error.last) == (2 * kept + 1, 6)


def test_a_tail_of_zeros_is_torn():
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + bytes(5000))

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], 5000)


def test_junk_behind_the_end_is_torn():
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + random.Random(1).randbytes(5000))

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], 5000)


# Flipped bits --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_flipped_bit_loses_an_acknowledged_event_in_silence():
    disk = FaultyDisk()
    story = story_on(disk)
    for path, data in files(disk).items():
        for index in range(len(data)):
            flipped = bytearray(data)
            flipped[index] ^= 1 << (index % 8)
            damaged = disk.copy()
            damaged.replace(path, bytes(flipped))
            try:
                log = reopen(damaged)
                records = list(log.read())
            except GroupstateError:
                continue
            assert records == story.attempted, (path, index)
            asyncio.run(close(log))


def test_a_reader_without_the_lock_is_not_deceived_by_a_flipped_bit_either():
    disk = FaultyDisk()
    story = story_on(disk)
    for path, data in files(disk).items():
        for index in range(0, len(data), 3):
            damaged = disk.copy()
            flipped = bytearray(data)
            flipped[index] ^= 1 << (index % 8)
            damaged.replace(path, bytes(flipped))
            try:
                records = list(read_log(RUN, disk=damaged))
            except GroupstateError:
                continue
            # With the newest slot of the watermark spoiled, a reader is one commit behind, and no more.
            behind = len(story.posts[-1]) if path == HEAD else 0
            assert records == story.attempted[: len(records)], (path, index)
            assert len(records) >= story.acknowledged - behind, (path, index)


def test_a_flipped_bit_in_the_middle_is_named_by_file_byte_and_event():
    disk = written()
    data = bytearray(disk.read(FIRST_SEGMENT))
    first, second, _ = frame_stops(bytes(data))
    data[first + 30] ^= 1
    disk.replace(FIRST_SEGMENT, bytes(data))
    error = refused(disk, CorruptLog)

    assert (error.path, error.offset, error.seq) == (FIRST_SEGMENT, first, 2)
    assert f"a good one follows at byte {second} with event 5" in str(error)


def test_a_flipped_bit_in_the_last_frame_is_a_loss():
    disk = written()
    data = bytearray(disk.read(FIRST_SEGMENT))
    data[-1] ^= 1
    disk.replace(FIRST_SEGMENT, bytes(data))
    error = refused(disk, LostEvents)

    assert (error.first, error.last) == (5, 6)
    assert "lost events 5 to 6" in str(error)


def test_two_bad_frames_at_the_end_are_no_torn_commit():
    disk = written()
    data = bytearray(disk.read(FIRST_SEGMENT))
    first, second, _ = frame_stops(bytes(data))
    data[first + 30] ^= 1
    data[second + 30] ^= 1
    disk.replace(FIRST_SEGMENT, bytes(data))

    assert "bytes follow it, so it isn't the last" in str(refused(disk, CorruptLog))


def test_more_bytes_than_one_commit_can_have_are_no_torn_commit(monkeypatch):
    monkeypatch.setattr("groupstate.log.recovery.FRAME_BYTES_MAX", 100)
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + bytes(101))

    assert "more than one commit can leave" in str(refused(disk, CorruptLog))


def test_a_repeated_frame_is_damage():
    disk = written()
    data = disk.read(FIRST_SEGMENT)
    first, second, _ = frame_stops(data)
    disk.replace(FIRST_SEGMENT, data + data[first:second])

    assert "a good one follows" in str(refused(disk, CorruptLog))


def test_a_frame_of_another_log_is_torn_and_not_taken():
    disk = written()
    foreign = build_frame(b"\x90", 1, 7, checksum_seed(bytes(16)))
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + foreign)

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], len(foreign))


def test_a_frame_without_records_is_no_frame():
    checked = struct.pack("<IQ", 0, 7) + b"\x90"
    empty = frames.FRAME_MAGIC + struct.pack("<II", 1, zlib.crc32(checked, SEED)) + checked
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + empty)

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], len(empty))


def test_a_frame_that_holds_other_numbers_than_it_says_is_damage():
    disk = written()
    body = disk.read(FIRST_SEGMENT)[HEADER_BYTES + frames.FRAME_HEADER_BYTES : frame_stops(disk.read(FIRST_SEGMENT))[0]]
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT) + build_frame(body, 2, 7, SEED))
    log = reopen(disk)
    with pytest.raises(CorruptLog, match=r"says events 7 to 8 and holds \[1, 2\]"):
        list(log.read())
    asyncio.run(log.aclose())


# Segments --------------------------------------------------------------------------------------------------


def several_segments():
    disk = written(9, segment_bytes=150)
    segments = [f"{RUN}/log/{name}" for name in disk.listdir(f"{RUN}/log") if name.endswith(".seg")]
    assert len(segments) >= 3
    return disk, segments


def test_a_log_goes_on_over_segments():
    disk, _ = several_segments()

    assert opened(disk) == (list(range(1, 19)), 0)
    assert seqs(read_log(RUN, 5, 17, disk=disk)) == list(range(5, 17))


def test_a_missing_segment_is_damage_unless_it_was_the_last():
    for lost in range(len(several_segments()[1])):
        for with_head in (True, False):
            disk, segments = several_segments()
            disk.remove(segments[lost])
            if not with_head:
                disk.remove(HEAD)
            if lost < len(segments) - 1:
                assert "a segment before it is missing" in str(refused(disk, CorruptLog))
                with pytest.raises(CorruptLog, match="a segment before it is missing"):
                    list(read_log(RUN, disk=disk))
            elif with_head:
                refused(disk, LostEvents)
                with pytest.raises(LostEvents):
                    list(read_log(RUN, disk=disk))


def test_all_segments_gone_is_a_loss_of_all_events():
    disk = written()
    disk.remove(FIRST_SEGMENT)
    error = refused(disk, LostEvents)
    with pytest.raises(LostEvents):
        list(read_log(RUN, disk=disk))

    assert (error.first, error.last) == (1, 6)


def test_a_torn_frame_in_an_earlier_segment_is_damage():
    disk, segments = several_segments()
    disk.replace(segments[0], disk.read(segments[0])[:-3])

    assert "more segments follow" in str(refused(disk, CorruptLog))
    disk.remove(HEAD)
    with pytest.raises(CorruptLog, match="more segments follow"):
        list(read_log(RUN, disk=disk))


@pytest.mark.parametrize("left", [b"", b"GSLOG1", bytes(HEADER_BYTES)])
def test_a_last_segment_with_a_torn_header_is_removed(left):
    disk, _ = several_segments()
    path = f"{RUN}/log/{19:020d}.seg"
    disk.replace(path, left)

    assert opened(disk) == (list(range(1, 19)), len(left))
    assert not disk.exists(path)


def test_a_damaged_header_with_frames_behind_it_is_damage():
    disk = written()
    disk.replace(FIRST_SEGMENT, b"x" + disk.read(FIRST_SEGMENT)[1:])

    assert "the segment's header is damaged" in str(refused(disk, CorruptLog))


def test_a_segment_without_frames_is_gone_on_with():
    disk = written(0)
    disk.replace(FIRST_SEGMENT, SegmentHeader(LOG_ID_BYTES, 1, 0, 0).encode())

    assert opened(disk) == ([], 0)
    assert asyncio.run(check_recovery(disk, story_on(FaultyDisk(), 0))) == 0


def test_a_segment_of_another_log_is_refused():
    disk = written(0)
    disk.replace(FIRST_SEGMENT, SegmentHeader(bytes(16), 1, 0, 0).encode() + b"more")

    assert "belongs to another log" in str(refused(disk, CorruptLog))


def test_a_segment_under_a_wrong_name_is_refused():
    disk = written(0)
    disk.replace(FIRST_SEGMENT, SegmentHeader(LOG_ID_BYTES, 7, 0, 0).encode() + b"more")

    assert "name says 1 and its header 7" in str(refused(disk, CorruptLog))


def test_a_segment_of_a_later_format_is_refused():
    disk = written(0)
    disk.replace(FIRST_SEGMENT, SegmentHeader(LOG_ID_BYTES, 1, 0, 0, form=2).encode())

    assert "is of format 2" in str(refused(disk, UnsupportedLog))


def test_segments_that_were_never_finished_are_removed():
    disk = written()
    left = f"{RUN}/log/{7:020d}.seg.tmp"
    disk.replace(left, b"half")

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], 0)
    assert not disk.exists(left)


def test_files_with_other_names_are_left_alone():
    disk = written()
    disk.replace(f"{RUN}/log/notes.seg", b"mine")

    assert opened(disk) == ([1, 2, 3, 4, 5, 6], 0)
    assert disk.read(f"{RUN}/log/notes.seg") == b"mine"


# The watermark ----------------------------------------------------------------------------------------------


def test_a_torn_watermark_leaves_the_one_before():
    intact = written()
    for cut in range(64):
        disk = intact.copy()
        damaged = bytearray(disk.read(HEAD))
        damaged[cut] ^= 0x55
        disk.replace(HEAD, bytes(damaged))

        assert opened(disk) == ([1, 2, 3, 4, 5, 6], 0)


@pytest.mark.parametrize("left", [b"", b"x" * 64, b"x" * 20])
def test_a_watermark_without_a_whole_slot_is_damage_and_says_what_to_do(left):
    disk = written()
    disk.replace(HEAD, left)
    error = refused(disk, CorruptLog)

    assert error.path == HEAD
    assert "move it away" in str(error)


def test_the_watermark_of_another_log_is_refused():
    disk, other = written(), FaultyDisk()
    asyncio.run(close(make(other, log_id="f" * 32)))
    disk.replace(HEAD, other.read(HEAD))

    assert refused(disk, CorruptLog).path == HEAD


def test_a_log_without_a_watermark_opens_and_gets_a_new_one():
    disk = written()
    disk.remove(HEAD)

    assert seqs(read_log(RUN, disk=disk)) == [1, 2, 3, 4, 5, 6]
    assert opened(disk)[0] == [1, 2, 3, 4, 5, 6]
    assert disk.exists(HEAD)


def test_a_reader_without_a_watermark_stops_at_a_torn_tail():
    disk = written()
    disk.remove(HEAD)
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT)[:-1])

    assert seqs(read_log(RUN, disk=disk)) == [1, 2, 3, 4]


def test_a_reader_names_the_bad_frame_that_the_watermark_covers():
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT)[:-1])
    with pytest.raises(CorruptLog, match="event 5 is bad, though it was acknowledged"):
        list(read_log(RUN, disk=disk))


def test_a_reader_notices_that_the_end_is_gone():
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT)[: frame_stops(disk.read(FIRST_SEGMENT))[1]])
    with pytest.raises(LostEvents, match="lost events 5 to 6"):
        list(read_log(RUN, disk=disk))


def test_an_empty_log_without_a_watermark_is_empty():
    disk = written(0)
    disk.remove(HEAD)

    assert seqs(read_log(RUN, disk=disk)) == []


def test_a_log_without_its_directory_is_damage():
    disk = FaultyDisk()
    story_on(disk, 0)
    disk._directories.discard(f"{RUN}/log")
    disk.remove(HEAD)
    with pytest.raises(CorruptLog, match="the directory with the events is missing"):
        list(read_log(RUN, disk=disk))


def test_what_was_only_handed_to_the_system_may_be_gone_with_the_machine(monkeypatch):
    disk = written(durability="os")
    left = disk.crash()
    # Names and watermark reached the disk on their own, the frames didn't.
    for path, data in files(disk).items():
        left.replace(path, data[:HEADER_BYTES] if path == FIRST_SEGMENT else data)
    left.replace(f"{RUN}/run.json", disk.read(f"{RUN}/run.json"))
    refused(left, LostEvents)  # the machine is still the same, so the process can't have lost them
    monkeypatch.setattr("groupstate.log.file.boot_id", lambda: "after the restart")

    assert opened(left) == ([], 0)
    assert seqs(read_log(RUN, disk=left)) == []
    assert opened(left) == ([], 0)


def test_what_was_flushed_is_lost_also_when_the_machine_has_started_again(monkeypatch):
    disk = written()
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT)[:-1])
    monkeypatch.setattr("groupstate.log.file.boot_id", lambda: "after the restart")

    refused(disk, LostEvents)


def test_a_log_that_was_only_handed_over_is_flushed_when_it_is_opened_for_the_machine():
    async def scenario():
        disk = FaultyDisk()
        log = make(disk, durability="os", segment_bytes=150, payload_file_bytes=100)
        for seq in range(1, 10):
            log.post([submitted(seq, log.payloads.put(b"payload %d" % seq))])
        refs = [record.event.prompt for record in log.read()]
        await log.aclose()
        await reopen(disk, durability="fsync").aclose()
        log = reopen(disk.crash())
        assert seqs(log.read()) == list(range(1, 10))
        assert [log.payloads.get(ref) for ref in refs] == [b"payload %d" % seq for seq in range(1, 10)]
        await log.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_torn_tail_is_cut_whatever_the_durability(durability):
    disk = written()
    disk.remove(HEAD)
    disk.replace(FIRST_SEGMENT, disk.read(FIRST_SEGMENT)[:-1])
    log = reopen(disk, durability=durability)
    asyncio.run(log.aclose())

    assert log.recovered_seq == 4
    assert frame_stops(disk.read(FIRST_SEGMENT))[-1] == len(disk.read(FIRST_SEGMENT))
