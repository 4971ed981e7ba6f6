"""Group commit: in which order a commit reaches the disk, what becomes one commit, and who is told of it."""

import asyncio
import threading

import pytest

from groupstate.errors import LogError, LogFailed
from groupstate.log.commit import GroupCommit
from groupstate.log.file import FileLog
from groupstate.log.frames import HEADER_BYTES, checksum_seed, walk
from groupstate.log.reading import read_log
from groupstate.simulate.faults import Fault, FaultyDisk

from .scenes import FIRST_SEGMENT, LOG_ID, RUN, GatedDisk, make, reached, seqs, submitted, weights


def posts_per_frame(disk):
    data = disk.read(FIRST_SEGMENT)
    return [frame.count for frame in walk(memoryview(data), HEADER_BYTES, checksum_seed(bytes.fromhex(LOG_ID)), 1)]


async def test_payloads_reach_the_disk_before_the_events_that_name_them_and_the_watermark_comes_last():
    disk = FaultyDisk()
    log = make(disk)
    log.post([submitted(1, log.payloads.put(b"first"))])
    del disk.operations[:]
    log.post([submitted(2, log.payloads.put(b"second"))])

    segment, payloads = f"{1:020d}.seg", f"{1:010d}.pay"
    assert disk.operations == [
        f"write {payloads}",
        f"flush {payloads}",
        f"write {segment}",
        f"flush {segment}",
        "write head",
    ]
    await log.aclose()


async def test_a_new_segment_is_whole_before_it_has_its_name():
    disk = FaultyDisk()
    log = make(disk)
    del disk.operations[:]
    log.post(weights(1))

    segment = f"{1:020d}.seg"
    assert disk.operations[:5] == [
        f"create {segment}.tmp",
        f"write {segment}.tmp",
        f"flush {segment}.tmp",
        f"rename {segment}",
        "flush log/",
    ]
    await log.aclose()


async def test_a_log_for_the_process_only_flushes_no_commit():
    disk = FaultyDisk()
    log = make(disk, durability="os")
    log.post([submitted(1, log.payloads.put(b"x"))])
    del disk.operations[:]
    for seq in range(2, 10):
        log.post([submitted(seq, log.payloads.put(b"x"))])
    await log.aclose()

    assert not [words for words in disk.operations if "flush" in words]
    assert seqs(read_log(RUN, disk=disk.copy())) == list(range(1, 10))


async def test_what_is_posted_while_a_commit_runs_becomes_one_commit():
    disk = GatedDisk()
    log = make(disk, inline=False)
    log.post(weights(1))
    await log.durable(1)
    disk.stop_next_flush()
    log.post(weights(2))
    await reached(disk.at_gate)
    for seq in range(3, 8):
        log.post(weights(seq))
    assert (log.last_seq, log.durable_seq) == (7, 1)
    assert seqs(log.read()) == [1, 2, 3, 4, 5, 6, 7]
    assert seqs(log.read(3, 5)) == [3, 4]
    disk.gate.set()
    await log.durable(7)

    assert posts_per_frame(disk) == [1, 1, 5]
    await log.aclose()


async def test_what_is_posted_in_one_turn_of_the_loop_becomes_one_commit(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()

    async def hand_in(seq):
        assert not disk.at_gate.wait(0.05), "the first was taken alone"
        log.post(weights(seq))
        await log.durable(seq)

    await asyncio.gather(hand_in(1), hand_in(2), hand_in(3))

    assert posts_per_frame(disk) == [3]
    await log.aclose()


async def test_what_follows_in_the_next_turn_is_gathered_too(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1))
    log.post(weights(2))
    await asyncio.sleep(0)
    assert not disk.at_gate.wait(0.05), "the first two were taken alone"
    log.post(weights(3))
    await asyncio.wait_for(waiter, 30)

    assert posts_per_frame(disk) == [3]
    await log.aclose()


async def test_a_turn_without_an_end_keeps_nothing_from_the_disk():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))

    assert disk.at_gate.wait(30), "nothing is written as long as the loop stands still"
    await log.aclose()


async def test_turn_after_turn_with_posts_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1))
    for seq in range(2, 10):
        await asyncio.sleep(0)
        log.post(weights(seq))

    assert disk.at_gate.wait(30), "nothing is written as long as there are posts"
    await waiter
    await log.aclose()


async def test_what_nobody_waits_for_is_gathered(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    for seq in (1, 2, 3):
        log.post(weights(seq))
        for _ in range(10):
            await asyncio.sleep(0)
    assert not disk.at_gate.wait(0.05), "the first was kept alone, and nobody waits for it"
    await asyncio.wait_for(log.durable(1), 30)

    assert posts_per_frame(disk) == [3]
    await log.aclose()


async def test_who_waits_for_the_end_of_the_log_hurries_no_commit(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1 << 62))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not disk.at_gate.wait(0.05), "the first was kept alone, and nobody waits for it"
    await log.aclose()

    with pytest.raises(LogFailed, match="is closed"):
        await waiter


async def test_what_nobody_waits_for_is_kept_all_the_same():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))

    await reached(disk.at_gate)
    await log.aclose()


async def test_who_waited_for_an_earlier_commit_does_not_hurry_the_next(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1))
    await reached(disk.at_gate)
    log.post(weights(2))
    disk.gate.set()
    await asyncio.wait_for(waiter, 30)
    disk.at_gate.clear()
    assert not disk.at_gate.wait(0.05), "the second was kept alone, and nobody waits for it"
    log.post(weights(3))
    await asyncio.wait_for(log.durable(3), 30)

    assert posts_per_frame(disk) == [1, 2]
    await log.aclose()


class Tidied:
    """A commit queue on no disk, with more to tidy up than it ever will."""

    def __init__(self):
        self.kept, self.times_left = [], 0
        self.tidied, self.second = threading.Event(), threading.Event()
        self.queue = GroupCommit("it", 0, self.write, self.tidy, lambda: None, inline=False)

    def write(self, commit):
        self.kept.append(commit)
        if len(self.kept) == 2:
            self.second.set()

    def tidy(self):
        self.times_left -= 1
        if self.times_left == 0:
            self.tidied.set()
        return not self.queue._closing


async def test_tidying_goes_on_while_posts_are_gathered(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    it = Tidied()
    it.queue.submit(b"a", 1)
    await it.queue.wait(1)
    it.queue.submit(b"b", 1)
    it.times_left = 10

    await reached(it.tidied)
    assert len(it.kept) == 1
    await it.queue.aclose()


async def test_a_log_that_is_closed_while_it_tidies_up_keeps_what_it_gathered(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    it = Tidied()
    it.queue.submit(b"a", 1)
    await it.queue.wait(1)
    it.queue.submit(b"b", 1)
    look = it.queue._next

    def closed_right_after(*, wait):
        commit = look(wait=wait)
        if commit is None:
            it.queue._closing = True
        return commit

    it.queue._next = closed_right_after
    await reached(it.second)
    await it.queue.aclose()


async def test_tidying_keeps_nothing_from_the_disk():
    it = Tidied()
    it.queue.submit(b"a", 1)
    await it.queue.wait(1)
    it.queue.submit(b"b", 1)
    await reached(it.second)
    await it.queue.aclose()


def post_in_a_turn_that_never_ends(log):
    async def begin():
        log.post(weights(1))
        asyncio.get_running_loop().stop()

    loop = asyncio.new_event_loop()
    begun = loop.create_task(begin())
    loop.run_forever()
    loop.close()
    assert begun.done()


def test_a_loop_that_ended_in_its_turn_does_not_slow_the_log_down(monkeypatch):
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    post_in_a_turn_that_never_ends(log)
    assert disk.at_gate.wait(30)
    asyncio.run(asyncio.wait_for(log.durable(1), 30))
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    log.post(weights(2))

    asyncio.run(asyncio.wait_for(log.durable(2), 30))
    asyncio.run(log.aclose())
    assert log.durable_seq == 2


def test_closing_waits_for_no_turn(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    log = make(GatedDisk(), inline=False)
    post_in_a_turn_that_never_ends(log)

    asyncio.run(asyncio.wait_for(log.aclose(), 30))
    assert log.durable_seq == 1


async def test_a_full_commit_does_not_wait_for_the_turn(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.GATHER_S_MAX", 600)
    monkeypatch.setattr("groupstate.log.commit.COMMIT_BYTES_MAX", 1)
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.at_gate.clear()
    log.post(weights(1))
    log.post(weights(2))

    assert disk.at_gate.wait(30), "the first commit takes no more, and isn't written"
    await log.aclose()


async def test_a_commit_has_a_bound_but_never_splits_a_post(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.COMMIT_BYTES_MAX", 100)
    disk = GatedDisk()
    log = make(disk, inline=False)
    log.post(weights(1))
    await log.durable(1)
    disk.stop_next_flush()
    log.post(weights(2))
    await reached(disk.at_gate)
    log.post(weights(3, 3))
    log.post(weights(6, 3))
    log.post(weights(9, 30))
    log.post(weights(39))
    disk.gate.set()
    await log.durable(39)

    assert posts_per_frame(disk) == [1, 1, 6, 30, 1]
    await log.aclose()


async def test_payloads_count_towards_the_bound_of_a_commit(monkeypatch):
    monkeypatch.setattr("groupstate.log.commit.COMMIT_BYTES_MAX", 4_000)
    disk = GatedDisk()
    log = make(disk, inline=False)
    log.post(weights(1))
    await log.durable(1)
    disk.stop_next_flush()
    log.post(weights(2))
    await reached(disk.at_gate)
    for seq in range(3, 7):
        log.post([submitted(seq, log.payloads.put(bytes(1_500)))])
    disk.gate.set()
    await log.durable(6)

    assert posts_per_frame(disk) == [1, 1, 2, 2]
    await log.aclose()


async def test_a_post_larger_than_a_frame_may_be_is_refused(monkeypatch):
    monkeypatch.setattr("groupstate.log.file.FRAME_BYTES_MAX", 200)
    log = make(FaultyDisk())
    with pytest.raises(LogError, match="bytes in one post are too many"):
        log.post(weights(1, 50))
    log.post(weights(1))

    assert log.durable_seq == 1
    await log.aclose()


async def test_a_slow_flush_does_not_stop_the_loop():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiter.done()
    disk.gate.set()
    await waiter
    await log.aclose()


async def test_closing_waits_for_the_commit_that_runs_and_keeps_the_rest():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    await reached(disk.at_gate)
    log.post(weights(2))
    closing = [asyncio.ensure_future(log.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    waiter = asyncio.ensure_future(log.durable(2))
    with pytest.raises(LogFailed, match="is closed"):
        log.post(weights(3))
    log.payloads.free([])
    disk.gate.set()
    await asyncio.gather(*closing, waiter)

    assert log.durable_seq == 2
    assert not disk.exists(f"{RUN}/log/lock")


async def test_cancelling_the_close_does_not_stop_it():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    await reached(disk.at_gate)
    closing = asyncio.ensure_future(log.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    disk.gate.set()
    await log.aclose()

    assert log.durable_seq == 1
    assert not disk.exists(f"{RUN}/log/lock")


async def test_what_was_queued_behind_a_failed_commit_is_not_written():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    await reached(disk.at_gate)
    log.post(weights(2))
    disk.fault = Fault(disk.operation_count + 1)
    waiters = [asyncio.ensure_future(log.durable(seq)) for seq in (1, 2, 3)]
    await asyncio.sleep(0)
    disk.gate.set()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert seqs(log.read()) == [1, 2]
    failed_at = disk.operation_count
    await log.aclose()

    assert [type(result) for result in results] == [LogFailed] * 3
    assert not [words for words in disk.operations[failed_at:] if words.startswith(("write", "flush", "rename"))]
    assert list(read_log(RUN, disk=disk)) == []


def test_a_loop_that_closed_while_its_task_waited_does_not_hurt_the_writer():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))

    async def give_up():
        waiter = asyncio.ensure_future(log.durable(1))
        await asyncio.sleep(0)
        return waiter

    loop = asyncio.new_event_loop()
    waiter = loop.run_until_complete(give_up())
    waiter.cancel()
    loop.run_until_complete(asyncio.wait([waiter]))
    loop.close()
    disk.gate.set()

    async def go_on():
        log.post(weights(2))
        await log.durable(2)
        await log.aclose()

    asyncio.run(go_on())
    assert log.durable_seq == 2


async def test_a_log_in_two_loops_wakes_both():
    disk = GatedDisk()
    log = make(disk, inline=False)
    disk.stop_next_flush()
    log.post(weights(1))
    elsewhere = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(log.durable(1)))
    here = asyncio.ensure_future(log.durable(1))
    await asyncio.sleep(0)
    disk.gate.set()
    await asyncio.gather(elsewhere, here)
    await log.aclose()


async def test_a_log_without_a_thread_starts_none():
    before = threading.active_count()
    log = make(FaultyDisk())
    log.post(weights(1))
    await log.durable(1)

    assert threading.active_count() == before
    await log.aclose()


async def test_an_unused_log_starts_no_thread_either(tmp_path):
    before = threading.active_count()
    log = FileLog.create(tmp_path / "run")

    assert threading.active_count() == before
    await log.aclose()


async def test_a_file_that_cannot_be_closed_does_not_keep_the_log_open():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    disk.close(log._segments._fd)
    disk.close = lambda fd: (_ for _ in ()).throw(OSError("not open"))
    await log.aclose()

    assert log.durable_seq == 1


async def test_reading_without_a_lock_shows_what_is_durable_only():
    disk = GatedDisk()
    log = make(disk, inline=False)
    log.post(weights(1, 2))
    await log.durable(2)
    disk.stop_next_flush()
    log.post(weights(3, 2))
    await reached(disk.at_gate)

    assert seqs(read_log(RUN, disk=disk)) == [1, 2]
    assert seqs(read_log(RUN, 2, 9, disk=disk)) == [2]
    disk.gate.set()
    await log.aclose()
    assert seqs(read_log(RUN, disk=disk)) == [1, 2, 3, 4]
