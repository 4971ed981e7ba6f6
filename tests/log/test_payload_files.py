"""Payloads in files: found again, freed file by file, damaged one at a time."""

import asyncio

import pytest

from groupstate.core.events import PayloadRef
from groupstate.errors import DamagedPayload, LogError, NotARun, UnsupportedLog
from groupstate.log import payload_files
from groupstate.log.payload_files import FILE_HEADER_BYTES, RECORD_HEADER_BYTES
from groupstate.log.payloads import read_payload
from groupstate.simulate.faults import FaultyDisk

from .scenes import RUN, GatedDisk, close, make, reached, reopen, submitted, weights


def pay(number):
    return f"{RUN}/payloads/{number:010d}.pay"


def pay_files(disk):
    return [int(name.removesuffix(".pay")) for name in disk.listdir(f"{RUN}/payloads")]


def put_each(log, *bodies):
    """Each payload with an event, and so with a commit, of its own."""
    refs = []
    for body in bodies:
        refs.append(log.payloads.put(body))
        log.post([submitted(log.last_seq + 1, refs[-1])])
    return refs


async def test_payloads_are_found_again():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=150)
    refs = put_each(log, *(b"%d" % number * 20 for number in range(9)))
    await log.aclose()
    log = reopen(disk)

    assert len(pay_files(disk)) > 2
    assert [log.payloads.get(ref) for ref in refs] == [b"%d" % number * 20 for number in range(9)]
    assert log.payloads.put(b"next").key == 10
    await log.aclose()


async def test_a_file_goes_when_all_of_it_is_freed():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=180)
    refs = put_each(log, b"a" * 30, b"b" * 30, b"c" * 30)
    assert pay_files(disk) == [1, 2]
    log.payloads.free(refs[:1])
    assert pay_files(disk) == [1, 2]
    log.payloads.free(refs[1:2])

    assert pay_files(disk) == [2]
    assert log.payloads.get(refs[2]) == b"c" * 30
    await log.aclose()


async def test_the_newest_file_stays_until_there_is_a_newer_one():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=100)
    refs = put_each(log, b"a" * 30)
    log.payloads.free(refs)
    assert pay_files(disk) == [1]
    refs = put_each(log, b"b" * 30)
    log.payloads.free(refs)

    assert pay_files(disk) == [2]
    await log.aclose()


async def test_a_key_is_not_given_twice_though_its_file_is_gone():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=100)
    refs = put_each(log, b"a" * 30, b"b" * 30, b"c" * 30)
    log.payloads.free(refs)
    await log.aclose()
    # What is left of the newest file after a power loss may be its header.
    disk.replace(pay(3), disk.read(pay(3))[:FILE_HEADER_BYTES])
    log = reopen(disk)

    assert log.payloads.put(b"d").key == 3
    await log.aclose()


async def test_keys_go_on_above_those_that_events_name():
    disk = FaultyDisk()
    log = make(disk)
    log.payloads.keep_only({7})

    assert log.payloads.put(b"x").key == 8
    await log.aclose()


async def test_what_no_event_names_is_freed_when_a_run_is_opened():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=100)
    refs = put_each(log, b"a" * 30, b"b" * 30, b"c" * 30)
    await log.aclose()
    log = reopen(disk, payload_file_bytes=100)

    assert log.payloads.keep_only({refs[1].key}) == 2
    assert log.payloads.keep_only({refs[1].key}) == 0
    assert pay_files(disk) == [2, 3]
    assert log.payloads.get(refs[1]) == b"b" * 30
    await log.aclose()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_reopened_store_does_not_mind_what_was_freed_before(inline):
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=100, inline=inline)
    refs = put_each(log, b"a" * 30, b"b" * 30, b"c" * 30)
    await log.durable(3)
    log.payloads.free(refs[:2])
    await log.aclose()
    log = reopen(disk)
    log.payloads.free(refs[:2])

    assert log.payloads.get(refs[2]) == b"c" * 30
    await log.aclose()


async def test_a_payload_that_was_freed_before_it_was_written_is_written_all_the_same():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    await reached(disk.at_gate)
    ref = log.payloads.put(b"tokens")
    log.post([submitted(2, ref)])
    log.payloads.free([ref])
    with pytest.raises(DamagedPayload):
        log.payloads.get(ref)
    disk.gate.set()
    await log.aclose()
    # The event that freed it might have been lost, and this one not.
    log = reopen(disk)

    assert log.payloads.get(ref) == b"tokens"
    await log.aclose()


async def test_freeing_twice_before_the_writer_comes_to_it_is_freeing_once():
    disk = GatedDisk()
    log = make(disk, inline=False)
    refs = put_each(log, b"a", b"b")
    await log.durable(2)
    disk.stop_next_flush()
    log.post(weights(3))
    await reached(disk.at_gate)
    log.payloads.free(refs[:1])
    log.payloads.free(refs[:1])
    assert log.payloads.keep_only({refs[1].key}) == 0
    disk.gate.set()
    log.post(weights(4))
    await log.durable(4)

    assert log.payloads.get(refs[1]) == b"b"
    await log.aclose()


async def test_a_file_goes_only_after_what_was_posted_before_is_durable():
    disk = GatedDisk()
    log = make(disk, inline=False, payload_file_bytes=100)
    refs = put_each(log, b"a" * 30)
    await log.durable(1)
    refs += put_each(log, b"b" * 30)
    await log.durable(2)
    disk.stop_next_flush()
    log.post(weights(3))
    await reached(disk.at_gate)
    log.post(weights(4))
    log.payloads.free(refs[:1])

    assert pay_files(disk) == [1, 2]
    disk.gate.set()
    await log.aclose()
    words = disk.operations
    assert words.index(f"unlink {1:010d}.pay") > len(words) - 1 - words[::-1].index("write head")


async def test_dropping_what_is_not_there_drops_nothing_else():
    disk = FaultyDisk()
    log = make(disk)
    [ref] = put_each(log, b"kept")
    await log.durable(log.last_seq)

    log.payloads.drop([ref.key + 7])

    assert log.payloads.get(ref) == b"kept"
    await log.aclose()
    assert pay_files(disk) == [1]


async def test_a_payload_without_an_event_is_written_with_the_next_freeing_at_the_latest():
    disk = FaultyDisk()
    log = make(disk)
    refs = [log.payloads.put(b"a"), log.payloads.put(b"b")]
    log.payloads.free(refs[:1])

    assert log.payloads.get(refs[1]) == b"b"
    assert log.durable_seq == 0
    await log.aclose()
    log = reopen(disk)
    assert log.payloads.get(refs[1]) == b"b"
    await log.aclose()


async def test_a_payload_may_have_a_bound(monkeypatch):
    monkeypatch.setattr("groupstate.log.payloads.PAYLOAD_BYTES_MAX", 10)
    log = make(FaultyDisk())
    with pytest.raises(LogError, match="a payload of 11 bytes is too large"):
        log.payloads.put(b"x" * 11)
    await log.aclose()


# Damage -----------------------------------------------------------------------------------------------------


def three_payloads():
    async def write():
        disk = FaultyDisk()
        log = make(disk)
        refs = put_each(log, b"a" * 30, b"b" * 30, b"c" * 30)
        await log.aclose()
        return disk, refs

    return asyncio.run(write())


def readable(disk, refs):
    log = reopen(disk)
    found = []
    for ref in refs:
        try:
            found.append(log.payloads.get(ref)[:1].decode())
        except DamagedPayload:
            found.append("-")
    asyncio.run(close(log))
    return "".join(found)


def test_a_file_cut_anywhere_keeps_the_payloads_before_the_cut():
    disk, refs = three_payloads()
    whole = disk.read(pay(1))
    step = RECORD_HEADER_BYTES + 30
    for length in range(len(whole)):
        damaged = disk.copy()
        damaged.replace(pay(1), whole[:length])
        kept = max(0, length - FILE_HEADER_BYTES) // step

        assert readable(damaged, refs) == "abc"[:kept] + "-" * (3 - kept)
        if length >= FILE_HEADER_BYTES:
            assert len(damaged.read(pay(1))) == FILE_HEADER_BYTES + kept * step


def test_a_flipped_bit_costs_one_payload_and_never_changes_one():
    disk, refs = three_payloads()
    whole = disk.read(pay(1))
    step = RECORD_HEADER_BYTES + 30
    for index in range(len(whole)):
        damaged = disk.copy()
        flipped = bytearray(whole)
        flipped[index] ^= 1 << (index % 8)
        damaged.replace(pay(1), bytes(flipped))
        hit = (index - FILE_HEADER_BYTES) // step

        assert readable(damaged, refs) == "".join("-" if i == hit else "abc"[i] for i in range(3))


def test_the_search_behind_damage_goes_over_its_own_steps(monkeypatch):
    disk, refs = three_payloads()
    for step in range(RECORD_HEADER_BYTES, 80, 7):
        monkeypatch.setattr(payload_files, "_SEARCH_BYTES", step)
        damaged = disk.copy()
        whole = bytearray(disk.read(pay(1)))
        whole[FILE_HEADER_BYTES + 5] ^= 1
        damaged.replace(pay(1), bytes(whole))

        assert readable(damaged, refs) == "-bc"


def test_a_payload_that_looks_like_a_header_is_not_mistaken_for_one():
    async def write():
        disk = FaultyDisk()
        log = make(disk)
        refs = put_each(log, b"a" + payload_files.RECORD_MAGIC * 9, b"b" * 30)
        await log.aclose()
        return disk, refs

    disk, refs = asyncio.run(write())
    whole = bytearray(disk.read(pay(1)))
    whole[FILE_HEADER_BYTES + 5] ^= 1
    disk.replace(pay(1), bytes(whole))

    assert readable(disk, refs) == "-b"


def test_new_payloads_do_not_join_a_file_whose_header_is_damaged():
    disk, refs = three_payloads()
    disk.replace(pay(1), b"x" + disk.read(pay(1))[1:])

    async def go_on():
        log = reopen(disk)
        refs.extend(put_each(log, b"d" * 30))
        await log.aclose()

    asyncio.run(go_on())
    assert pay_files(disk) == [1, 2]
    assert refs[-1].key == 4
    assert readable(disk, refs) == "abcd"


def test_a_payload_that_vanished_under_the_store_is_damaged():
    disk, refs = three_payloads()
    log = reopen(disk)
    whole = disk.read(pay(1))
    disk.replace(pay(1), whole[:FILE_HEADER_BYTES] + b"z" * 200)
    with pytest.raises(DamagedPayload, match="is not at byte 64 of"):
        log.payloads.get(refs[0])
    disk.remove(pay(1))
    with pytest.raises(DamagedPayload, match="can't be read"):
        log.payloads.get(refs[0])
    asyncio.run(close(log))


def test_a_payload_file_of_a_later_format_is_refused(monkeypatch):
    disk, _ = three_payloads()
    with monkeypatch.context() as later:
        later.setattr(payload_files, "FORMAT", 2)
        header = payload_files.encode_file_header(bytes(16), 1, 1, 0)
    disk.replace(pay(1), header + disk.read(pay(1))[FILE_HEADER_BYTES:])
    with pytest.raises(UnsupportedLog, match="is a payload file of format 2"):
        reopen(disk)


def test_files_that_were_never_finished_and_files_of_others():
    disk, refs = three_payloads()
    disk.replace(f"{pay(2)}.tmp", b"half")
    disk.replace(f"{RUN}/payloads/notes.pay", b"mine")

    assert readable(disk, refs) == "abc"
    assert not disk.exists(f"{pay(2)}.tmp")


# Reading without the lock ---------------------------------------------------------------------------------


async def test_a_payload_can_be_read_while_the_run_is_written():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=100)
    refs = put_each(log, b"a" * 30, b"b" * 30)

    assert [read_payload(RUN, ref, disk=disk) for ref in refs] == [b"a" * 30, b"b" * 30]
    unwritten = log.payloads.put(b"c")
    with pytest.raises(DamagedPayload, match="is not in"):
        read_payload(RUN, unwritten, disk=disk)
    await log.aclose()


def test_reading_payloads_of_a_run_without_any(tmp_path):
    with pytest.raises(NotARun):
        read_payload(tmp_path, PayloadRef(1, 1, 1))
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    disk._directories.discard(f"{RUN}/payloads")
    with pytest.raises(DamagedPayload):
        read_payload(RUN, PayloadRef(1, 1, 1), disk=disk)


def test_a_file_freed_while_somebody_looks_for_a_payload_is_passed_over(monkeypatch):
    disk, refs = three_payloads()
    monkeypatch.setattr("groupstate.log.payloads.list_payload_files", lambda disk, run: [1, 2])

    assert read_payload(RUN, refs[0], disk=disk) == b"a" * 30


async def test_what_was_lately_written_is_read_from_memory():
    log = make(FaultyDisk())
    (ref,) = put_each(log, b"tokens")
    operations = log.payloads._disk.operation_count

    assert log.payloads.in_memory(ref)
    assert log.payloads.get(ref) == b"tokens"
    assert log.payloads._disk.operation_count == operations
    await log.aclose()


async def test_the_oldest_of_what_was_lately_written_makes_room(monkeypatch):
    monkeypatch.setattr("groupstate.log.payloads.RECENT_BYTES_MAX", 10)
    log = make(FaultyDisk())
    refs = put_each(log, b"a" * 6, b"b" * 4, b"c" * 5)

    assert [log.payloads.in_memory(ref) for ref in refs] == [False, True, True]
    assert [log.payloads.get(ref) for ref in refs] == [b"a" * 6, b"b" * 4, b"c" * 5]
    await log.aclose()


async def test_what_is_freed_is_not_kept_in_memory():
    log = make(FaultyDisk())
    first, second = put_each(log, b"a" * 6, b"b" * 4)
    log.payloads.free([first])

    assert [log.payloads.in_memory(ref) for ref in (first, second)] == [False, True]
    assert log.payloads._recent_bytes == 4
    await log.aclose()


async def test_an_opened_store_has_nothing_in_memory():
    disk = FaultyDisk()
    log = make(disk)
    (ref,) = put_each(log, b"tokens")
    await log.aclose()
    log = reopen(disk)

    assert not log.payloads.in_memory(ref)
    assert log.payloads.get(ref) == b"tokens"
    await log.aclose()
