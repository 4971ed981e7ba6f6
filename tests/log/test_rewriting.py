"""Payload files that are mostly freed are rewritten into the newest one, while everybody goes on reading."""

import asyncio
import errno
from itertools import pairwise

import pytest

from groupstate.errors import DamagedPayload, LogError, LogFailed
from groupstate.log import payloads as payloads_module
from groupstate.log.payload_files import FILE_HEADER_BYTES, RECORD_HEADER_BYTES, encode_file_header, scan_file
from groupstate.log.payloads import read_payload
from groupstate.log.rundir import RunDir
from groupstate.simulate.faults import Fault, FaultyDisk

from .churn import settle
from .scenes import LOG_ID, RUN, GatedDisk, close, make, reached, reopen, weights
from .test_payload_files import pay, pay_files, put_each

FILE_BYTES = 1000
BODY = 100 - RECORD_HEADER_BYTES


def nine(log):
    """A first file of nine records of 100 bytes, and a second with one."""
    return put_each(log, *(b"%d" % number * BODY for number in range(10)))


def from_disk(log, refs):
    """First bytes of payloads; `-` for what is damaged."""
    log.payloads._recent.clear()
    found = []
    for ref in refs:
        try:
            found.append(log.payloads.get(ref)[:1].decode())
        except DamagedPayload:
            found.append("-")
    return "".join(found)


def commit(log, count=1):
    for _ in range(count):
        log.post(weights(log.last_seq + 1))


async def half_freed(disk, freed=5, **options):
    log = make(disk, payload_file_bytes=FILE_BYTES, **options)
    refs = nine(log)
    await log.durable(log.last_seq)
    log.payloads.free(refs[:freed])
    return log, refs


async def test_a_file_of_which_less_than_half_is_needed_moves_to_the_newest():
    disk = FaultyDisk()
    log, refs = await half_freed(disk)
    settle(log)

    assert pay_files(disk) == [2]
    assert from_disk(log, refs) == "-----56789"
    await log.aclose()
    log = reopen(disk)
    assert from_disk(log, refs) == "-----56789"
    assert [ref.key for ref in refs] == list(range(1, 11))
    await log.aclose()


async def test_a_file_of_which_half_is_needed_stays():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_HEADER_BYTES + 800)
    refs = nine(log)
    log.payloads.free(refs[:4])
    commit(log, 9)

    assert pay_files(disk) == [1, 2]
    log.payloads.free(refs[4:5])
    settle(log)
    assert pay_files(disk) == [2]
    await log.aclose()


async def test_the_newest_file_is_not_rewritten():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    refs = nine(log)[:9]
    settle(log)
    log.payloads.free(refs[8:])
    await log.aclose()
    log = reopen(disk, payload_file_bytes=FILE_BYTES * 9)
    refs = put_each(log, *(b"x" * BODY for _ in range(9)))
    log.payloads.free(refs[:8])
    commit(log, 3)

    assert pay_files(disk) == [1, 2]
    await log.aclose()


async def test_a_commit_copies_no_more_than_a_slice():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=16 * 125)  # slices of 250 bytes: two records
    refs = put_each(log, *(b"%d" % (number % 10) * BODY for number in range(20)))
    lengths = [len(disk.read(pay(2)))]
    log.payloads.free(refs[:13])  # a commit of its own
    lengths.append(len(disk.read(pay(2))))
    while pay_files(disk) != [2]:
        commit(log)
        lengths.append(len(disk.read(pay(2))))

    assert [after - before for before, after in pairwise(lengths)] == [200, 200, 200]
    await log.aclose()


async def test_a_record_longer_than_a_slice_is_copied_by_itself():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    refs = put_each(log, b"a" * 400, b"b" * 50, b"c" * 350, b"d" * 100)
    assert pay_files(disk) == [1, 2]
    log.payloads.free([refs[0], refs[1]])
    settle(log)

    assert (pay_files(disk), from_disk(log, refs)) == ([2], "--cd")
    await log.aclose()


async def test_the_writer_goes_on_rewriting_while_nothing_is_posted():
    disk = FaultyDisk()
    log, refs = await half_freed(disk, inline=False)
    for _ in range(1000):
        if pay_files(disk) == [2]:
            break
        await asyncio.sleep(0.005)

    assert (pay_files(disk), from_disk(log, refs)) == ([2], "-----56789")
    await log.aclose()


class PayloadGatedDisk(GatedDisk):
    """A disk that stops only flushes of files whose names end so."""

    ending = ".seg"

    def fdatasync(self, fd):
        if self._name_of(fd).endswith(self.ending):
            super().fdatasync(fd)
        else:
            FaultyDisk.fdatasync(self, fd)


async def test_nobody_waits_for_the_copies_of_his_own_commit():
    disk = PayloadGatedDisk()
    log, refs = await half_freed(disk, freed=0, inline=False)
    disk.stop_next_flush()
    log.post(weights(11))
    await reached(disk.at_gate)
    log.post(weights(12))  # in one commit with the freeing
    log.payloads.free(refs[:5])
    disk.ending = ".pay"
    held = disk.gate
    disk.gate = type(held)()
    disk.at_gate.clear()
    held.set()
    await reached(disk.at_gate)  # where the copies are to be flushed

    await asyncio.wait_for(log.durable(12), 5)
    disk.gate.set()
    await log.aclose()


def without_power(disk):
    """What is left where the first file's removal has reached the disk, and of the rest only what was flushed."""
    left = disk.crash()
    left.remove(pay(1))
    return left


async def test_the_old_file_goes_after_the_copies_are_flushed():
    for durability in ("fsync", "os"):
        disk = FaultyDisk()
        log, refs = await half_freed(disk, durability=durability)
        settle(log)
        words = disk.operations
        gone = words.index("unlink 0000000001.pay")
        written = max(at for at in range(gone) if words[at] == "write 0000000002.pay")

        assert "flush 0000000002.pay" in words[written:gone]
        await log.aclose()
        log = reopen(without_power(disk), durability=durability)
        assert from_disk(log, refs[5:9]) == "5678"
        await log.aclose()


async def test_the_copies_are_flushed_also_where_the_rest_was_freed_meanwhile():
    disk = FaultyDisk()
    log, refs = await half_freed(disk, durability="os")
    assert len(disk.read(pay(2))) == FILE_HEADER_BYTES + 200
    log.payloads.free(refs[6:9])
    settle(log)

    assert pay_files(disk) == [2]
    log = reopen(without_power(disk), durability="os")
    assert from_disk(log, refs) == "-----5---9"
    await log.aclose()


async def test_a_file_that_begins_with_a_copy_names_a_key_above_all_others():
    disk = FaultyDisk()
    log, refs = await half_freed(disk, freed=0)
    refs += put_each(log, *(b"x" * BODY for _ in range(8)))
    assert pay_files(disk) == [1, 2]
    log.payloads.free(refs[1:9])
    settle(log)
    assert pay_files(disk) == [2, 3]
    log.payloads.free(refs)
    await log.aclose()
    # What is left after a power loss may be the header of the file that was begun for the copy of payload 1.
    assert pay_files(disk) == [3]
    disk.replace(pay(3), disk.read(pay(3))[:FILE_HEADER_BYTES])
    log = reopen(disk)

    assert log.payloads.put(b"new").key == len(refs) + 1
    await log.aclose()


async def test_what_a_commit_puts_is_spread_over_files():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    refs = [log.payloads.put(b"%d" % number * BODY) for number in range(10)]
    refs += [log.payloads.put(b"L" * 3000), log.payloads.put(b"s" * BODY)]
    commit(log)

    assert [len(disk.read(pay(number))) for number in pay_files(disk)] == [964, 164, 3088, 164]
    assert from_disk(log, refs) == "0123456789Ls"
    await log.aclose()


async def test_what_was_freed_by_an_event_that_is_not_durable_yet_is_copied():
    disk = FaultyDisk()
    log, refs = await half_freed(disk, freed=0)
    log.payloads.free(refs[:5])
    log.payloads._free_later = lambda keys: None  # it is in the writer's queue, behind the event because of which
    log.payloads.free(refs[8:9])
    settle(log)
    assert pay_files(disk) == [2]
    # The event is lost.
    log = reopen(disk.copy())

    assert from_disk(log, refs) == "-----56789"
    await log.aclose()


async def test_usage_tells_what_is_needed_and_what_is_freed():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    refs = nine(log)
    unwritten = log.payloads.put(b"not written yet")
    usage = log.payloads.usage()
    assert (usage.live_bytes, usage.freed_bytes, usage.files) == (1000, 2 * FILE_HEADER_BYTES, 2)
    log.payloads.free([*refs[:2], unwritten])

    usage = log.payloads.usage()
    assert (usage.live_bytes, usage.disk_bytes) == (800, 1128 + RECORD_HEADER_BYTES + 15)
    await log.aclose()


async def test_usage_counts_as_freed_what_is_not_let_go_yet():
    disk = GatedDisk()
    log, refs = await half_freed(disk, freed=0, inline=False)
    disk.stop_next_flush()
    log.post(weights(11))
    await reached(disk.at_gate)
    log.payloads.free(refs[:2])

    assert log.payloads.usage().live_bytes == 800
    disk.gate.set()
    await log.aclose()


async def test_an_empty_payload_can_be_read_before_it_is_written():
    log = make(FaultyDisk())
    assert log.payloads.get(log.payloads.put(b"")) == b""
    await log.aclose()


async def test_a_failure_while_rewriting_ends_the_log_and_takes_nothing_back():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    refs = nine(log)
    disk.fault = Fault(disk.operation_count + 1, once=False)
    log.payloads.free(refs[:5])

    await log.durable(10)
    with pytest.raises(LogFailed, match=r"planned: write 0000000002\.pay"):
        log.post(weights(11))
    assert from_disk(log, refs[5:]) == "56789"
    await log.aclose()


# Reading meanwhile ----------------------------------------------------------------------------------------


class EventfulDisk(FaultyDisk):
    """Does something once, just before a file is opened to be read."""

    before_reading: tuple[str, object] | None = None

    def open_to_read(self, path):
        if self.before_reading and self.before_reading[0] == path:
            _, act = self.before_reading
            self.before_reading = None
            act()
        return super().open_to_read(path)


async def test_a_payload_that_moves_while_it_is_read_is_read_where_it_is():
    disk = EventfulDisk()
    log, refs = await half_freed(disk, freed=4)
    log.payloads._recent.clear()

    def move():
        log.payloads.free(refs[4:5])
        settle(log)

    disk.before_reading = pay(1), move
    assert log.payloads.get(refs[8]) == b"8" * BODY
    assert pay_files(disk) == [2]
    await log.aclose()


async def test_a_payload_that_is_freed_while_it_is_read_is_damaged():
    disk = EventfulDisk()
    log, refs = await half_freed(disk, freed=8)
    settle(log)
    log.payloads._recent.clear()

    def free():
        put_each(log, b"x" * FILE_BYTES)
        log.payloads.free(refs[8:])
        settle(log)

    disk.before_reading = pay(2), free
    with pytest.raises(DamagedPayload, match="it was freed or lost"):
        log.payloads.get(refs[8])
    await log.aclose()


async def test_another_process_finds_a_payload_that_moves_while_it_searches():
    disk = EventfulDisk()
    log, refs = await half_freed(disk, freed=4)

    def move():
        log.payloads.free(refs[4:5])
        settle(log)

    disk.before_reading = pay(1), move
    assert read_payload(RUN, refs[8], disk=disk) == b"8" * BODY
    assert pay_files(disk) == [2]
    with pytest.raises(DamagedPayload, match="it was freed or lost"):
        read_payload(RUN, refs[0], disk=disk)
    await log.aclose()


async def test_another_process_finds_a_payload_that_moves_between_search_and_reading(monkeypatch):
    disk = FaultyDisk()
    log, refs = await half_freed(disk, freed=4)
    read_place = payloads_module.read_place

    def move_first(*arguments):
        monkeypatch.setattr(payloads_module, "read_place", read_place)
        log.payloads.free(refs[4:5])
        settle(log)
        return read_place(*arguments)

    monkeypatch.setattr(payloads_module, "read_place", move_first)
    assert read_payload(RUN, refs[8], disk=disk) == b"8" * BODY
    await log.aclose()


async def test_another_process_passes_over_a_copy_that_is_not_whole():
    disk = FaultyDisk()
    log, refs = await half_freed(disk)
    await log.aclose()
    damage(disk, pay(2), FILE_HEADER_BYTES + 100 + 50)

    assert read_payload(RUN, refs[5], disk=disk) == b"5" * BODY


# Damage ---------------------------------------------------------------------------------------------------


def damage(disk, path, at):
    data = bytearray(disk.read(path))
    data[at] ^= 1
    disk.replace(path, bytes(data))


def warnings_of(log):
    found = []
    log.payloads.warn = lambda event, **values: found.append((event, values))
    return found


async def test_a_damaged_record_is_not_copied_and_costs_itself_alone():
    disk = FaultyDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    warnings = warnings_of(log)
    refs = nine(log)
    log.payloads._recent.clear()
    damage(disk, pay(1), FILE_HEADER_BYTES + 600 + 50)  # the bytes of the seventh
    damage(disk, pay(1), FILE_HEADER_BYTES + 700 + 5)  # the header of the eighth
    log.payloads.free(refs[:5])
    settle(log)

    assert (pay_files(disk), from_disk(log, refs)) == ([2], "-----5--89")
    ((event, values),) = warnings
    assert event == "payloads are damaged, so they were not kept"
    assert (values["path"], values["count"], values["keys"]) == (pay(1), 2, [7, 8])
    log.payloads.free(refs)
    commit(log)
    assert log.payloads.usage().live_bytes == 0
    await log.aclose()


async def test_nobody_needs_to_listen_to_warnings():
    disk = FaultyDisk()
    log, refs = await half_freed(disk, freed=0)
    log.payloads._recent.clear()
    damage(disk, pay(1), FILE_HEADER_BYTES + 600 + 50)
    log.payloads.free(refs[:5])
    settle(log)

    assert from_disk(log, refs) == "-----5-789"
    await log.aclose()


async def test_a_damaged_payload_may_be_freed_while_its_file_is_rewritten():
    disk = GatedDisk()
    log, refs = await half_freed(disk, freed=0, inline=False)
    log.payloads._recent.clear()
    damage(disk, pay(1), FILE_HEADER_BYTES + 600 + 50)
    log.payloads.free(refs[:5])
    log.payloads.free(refs[6:7])
    log.post(weights(11))
    await log.durable(11)
    await log.aclose()

    assert log.payloads._freed == set()


class UnreadableDisk(FaultyDisk):
    unreadable = ""

    def pread(self, fd, length, offset):
        if self._name_of(fd) == self.unreadable:
            raise OSError(errno.EIO, "planned: reading")
        return super().pread(fd, length, offset)


async def test_a_file_that_cannot_be_read_stays_and_is_told_of_once():
    disk = UnreadableDisk()
    log = make(disk, payload_file_bytes=FILE_BYTES)
    warnings = warnings_of(log)
    refs = nine(log)
    disk.unreadable = "0000000001.pay"
    log.payloads.free(refs[:5])
    commit(log, 5)

    assert pay_files(disk) == [1, 2]
    ((event, values),) = warnings
    assert event == "a payload file can't be read, so its space is not reclaimed"
    assert (values["path"], values["error"]) == (pay(1), "[Errno 5] planned: reading")
    disk.unreadable = ""
    assert from_disk(log, refs) == "-----56789"
    log.payloads.free(refs[5:9])
    assert pay_files(disk) == [2]
    await log.aclose()


async def test_a_file_that_cannot_be_read_at_the_opening_refuses_it_and_nothing_is_lost():
    disk = UnreadableDisk()
    log, refs = await half_freed(disk)
    await log.aclose()
    disk.unreadable = "0000000002.pay"
    with pytest.raises(LogError, match="planned: reading"):
        reopen(disk)
    disk.unreadable = ""
    log = reopen(disk)

    assert from_disk(log, refs[5:]) == "56789"
    await log.aclose()


# Opening a run whose rewriting was interrupted --------------------------------------------------------


async def interrupted():
    """Two of four payloads are copied to the second file, and the first one is still there."""
    disk = FaultyDisk()
    log, refs = await half_freed(disk)
    commit(log)
    await log.aclose()
    places = scan_file(disk, RunDir.at(RUN), 2, log.payloads._seed).places
    assert [place.key for place in places] == [10, 6, 7]
    return disk.copy(), refs


async def test_the_later_copy_counts_and_is_not_made_again():
    disk, refs = await interrupted()
    length = len(disk.read(pay(2)))
    log = reopen(disk, payload_file_bytes=FILE_BYTES)
    log.payloads.keep_only({ref.key for ref in refs[5:]})
    assert log.payloads.usage().live_bytes == 500
    settle(log)

    assert (pay_files(disk), from_disk(log, refs[5:])) == ([2], "56789")
    assert len(disk.read(pay(2))) == length + 200
    await log.aclose()


async def test_a_file_of_which_everything_was_copied_goes_after_the_opening():
    disk, refs = await interrupted()
    log = reopen(disk, payload_file_bytes=FILE_BYTES)
    log.payloads.keep_only({refs[5].key, refs[6].key})

    assert (pay_files(disk), from_disk(log, refs[5:])) == ([2], "56---")
    await log.aclose()


async def test_an_earlier_copy_counts_where_the_later_is_not_whole():
    disk, refs = await interrupted()
    damage(disk, pay(2), FILE_HEADER_BYTES + 100 + 50)
    log = reopen(disk, payload_file_bytes=FILE_BYTES)

    assert from_disk(log, refs[5:]) == "56789"
    log.payloads.keep_only({ref.key for ref in refs[5:]})
    settle(log)
    assert (pay_files(disk), from_disk(log, refs[5:])) == ([2], "56789")
    await log.aclose()
    log = reopen(disk)
    assert from_disk(log, refs[5:]) == "56789"
    await log.aclose()


async def test_a_payload_file_of_another_log_is_left_alone():
    disk, refs = await interrupted()
    header = encode_file_header(bytes(16), 7, 100, 0)
    theirs = header + disk.read(pay(1))[FILE_HEADER_BYTES:]
    disk.replace(pay(7), theirs)
    log = reopen(disk, payload_file_bytes=FILE_BYTES)
    log.payloads.keep_only({ref.key for ref in refs[5:]})
    refs += put_each(log, b"n" * BODY)
    settle(log)

    assert disk.read(pay(7)) == theirs
    assert pay_files(disk) == [2, 7, 8]
    assert from_disk(log, refs[5:]) == "56789n"
    assert bytes.fromhex(LOG_ID) != bytes(16)
    await close(log)
