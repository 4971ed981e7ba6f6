"""One writer per log, across processes that live, die and race."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from groupstate.errors import LogError, LogFailed, LogInUse
from groupstate.log import lock as lock_module
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.lock import Lock
from groupstate.log.reading import read_log
from groupstate.simulate.faults import Fault, FaultyDisk

from .scenes import RUN, close, make, reopen, seqs, weights

LOCK = f"{RUN}/log/lock"

WRITER = """
    import sys
    from groupstate.core.events import Record, WeightsPublished
    from groupstate.log.file import FileLog
    log = FileLog.open(sys.argv[1], inline=True)
    log.post([Record(log.last_seq + 1, 1, WeightsPublished(1))])
    print("posted", flush=True)
    sys.stdin.read()
"""


def start_writer(path):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "posted\n"
    return writer


def end(writer):
    writer.kill()
    writer.communicate()


@pytest.fixture
def run(tmp_path):
    asyncio.run(FileLog.create(tmp_path / "run").aclose())
    return tmp_path / "run"


# Real processes ------------------------------------------------------------------------------------------


def test_a_living_writer_keeps_others_out_and_readers_in(run):
    writer = start_writer(run)
    try:
        with pytest.raises(LogInUse, match=f"is being written by process {writer.pid} on host .*, which is running"):
            FileLog.open(run)
        with pytest.raises(LogInUse):
            FileLog.open(run, take_over=True)

        assert seqs(read_log(run)) == [1]
    finally:
        end(writer)


def test_a_killed_writer_is_replaced_and_its_events_are_there(run):
    end(start_writer(run))
    end(start_writer(run))
    log = FileLog.open(run)

    assert seqs(log.read()) == [1, 2]
    asyncio.run(log.aclose())


def test_a_killed_writer_that_nobody_collected_is_replaced_as_well(run):
    writer = start_writer(run)
    writer.kill()
    # Looks without collecting it, so that its number stays taken.
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    try:
        log = FileLog.open(run)
        assert log.last_seq == 1
        asyncio.run(log.aclose())
    finally:
        end(writer)


def test_of_many_processes_that_find_a_dead_writer_one_gets_the_log(run):
    end(start_writer(run))
    racer = """
        import sys
        from groupstate.errors import LogInUse
        from groupstate.log.file import FileLog
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            log = FileLog.open(sys.argv[1], inline=True)
            print("won", flush=True)
        except LogInUse:
            print("lost", flush=True)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(racer), str(run)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 4
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        assert sorted(racer.stdout.readline() for racer in racers) == ["lost\n"] * 3 + ["won\n"]
    finally:
        for racer in racers:
            end(racer)


# In one process ------------------------------------------------------------------------------------------


async def test_two_opens_in_one_process_are_refused(run):
    log = FileLog.open(run)
    with pytest.raises(LogInUse, match=f"process {os.getpid()} on host .*, which is this one: it has this log open al"):
        FileLog.open(run)
    await log.aclose()
    await FileLog.open(run).aclose()


async def test_an_opening_that_failed_leaves_no_lock(run):
    (run / "log" / "head").write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(LogError, match="watermark"):
            FileLog.open(run)

    assert not (run / "log" / "lock").exists()


async def test_the_lock_of_a_log_that_was_never_closed_is_replaced_after_a_crash():
    disk = FaultyDisk()
    make(disk)
    log = reopen(disk.crash())

    assert log.last_seq == 0
    await log.aclose()


def test_of_many_threads_that_find_a_dead_holder_one_gets_the_lock(tmp_path):
    for attempt in range(20):
        path = str(tmp_path / f"lock{attempt}")
        (tmp_path / f"lock{attempt}").write_text(holder(pid=2**22 + 1))
        start = threading.Barrier(6)
        locks = []

        def race(path=path, start=start, locks=locks):
            start.wait()
            try:
                locks.append(Lock.acquire(OsDisk(), path, now_ns=1))
            except LogInUse:
                pass

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(locks) == 1
        locks[0].release()
        assert [name for name in os.listdir(tmp_path) if not name.endswith(".next")] == []


# Holders -------------------------------------------------------------------------------------------------


def holder(token="other", **fields):
    own = json.loads(lock_module.Holder(token, lock_module.this_process(), 5_000_000_000).encode())
    return json.dumps({**own, **fields})


def locked_by(**fields):
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    disk.replace(LOCK, holder(**fields).encode())
    return disk


@pytest.mark.parametrize(
    "fields", [{"pid": 2**22 + 1}, {"started": "another time"}, {"boot": "another start"}, {"token": "forgotten"}]
)
def test_a_dead_holder_on_this_machine_is_replaced(fields):
    disk = locked_by(**fields)
    log = reopen(disk)

    assert json.loads(disk.read(LOCK))["token"] != "other"
    asyncio.run(log.aclose())
    assert not disk.exists(LOCK)


def test_a_holder_on_another_machine_is_replaced_only_on_demand():
    disk = locked_by(host="elsewhere")
    with pytest.raises(LogInUse, match=r"on host elsewhere; its lock was last renewed \d+ s ago.*take_over=True"):
        reopen(disk)
    log = reopen(disk, take_over=True)

    assert log.last_seq == 0
    asyncio.run(log.aclose())


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff"])
def test_an_unreadable_lock_is_replaced_only_on_demand(text):
    disk = locked_by()
    disk.replace(LOCK, text)
    with pytest.raises(LogInUse, match="its lock file is unreadable"):
        reopen(disk)
    asyncio.run(close(reopen(disk, take_over=True)))

    assert not disk.exists(LOCK)


def test_a_successor_that_died_before_it_took_the_lock_is_succeeded_too():
    disk = locked_by(pid=2**22 + 1)
    disk.replace(f"{LOCK}.other.next", holder("second", pid=2**22 + 2).encode())
    disk.replace(f"{LOCK}.second.next", holder("third", pid=2**22 + 3).encode())
    log = reopen(disk)

    assert not [name for name in disk.listdir(f"{RUN}/log") if name.endswith((".next", ".tmp"))]
    asyncio.run(log.aclose())


def test_a_living_successor_keeps_others_out():
    disk = locked_by(pid=2**22 + 1)
    disk.replace(f"{LOCK}.other.next", holder("second", host="elsewhere").encode())
    with pytest.raises(LogInUse, match="on host elsewhere"):
        reopen(disk)


class InterruptedDisk(FaultyDisk):
    """A disk on which something else happens just before one `link`."""

    interruption = None

    def link(self, source, target):
        if self.interruption is not None and target.endswith(".next"):
            happens, self.interruption = self.interruption, None
            happens()
        super().link(source, target)


def interrupted(happens, text):
    disk = InterruptedDisk()
    asyncio.run(close(make(disk)))
    disk.replace(LOCK, text)
    disk.interruption = lambda: happens(disk)
    return disk


def test_one_who_comes_late_to_a_dead_holder_does_not_push_out_its_successor():
    disk = interrupted(
        lambda disk: disk.replace(LOCK, holder("new", host="elsewhere").encode()), holder(pid=2**22).encode()
    )
    with pytest.raises(LogInUse, match="on host elsewhere"):
        reopen(disk)

    assert json.loads(disk.read(LOCK))["token"] == "new"
    assert not disk.exists(f"{LOCK}.other.next")


def test_one_who_comes_late_to_a_lock_that_was_let_go_of_takes_it_as_free():
    disk = interrupted(lambda disk: disk.remove(LOCK), holder(pid=2**22).encode())
    log = reopen(disk)

    assert disk.exists(LOCK)
    asyncio.run(log.aclose())


def test_one_who_finds_the_claim_taken_looks_again():
    def other_claims(disk):
        disk.replace(f"{LOCK}.other.next", holder("second", host="elsewhere").encode())

    disk = interrupted(other_claims, holder(pid=2**22).encode())
    with pytest.raises(LogInUse, match="on host elsewhere"):
        reopen(disk)


def test_a_lock_released_in_the_moment_of_looking_is_taken(monkeypatch):
    disk = locked_by(host="elsewhere")
    link = disk.link

    def released_after(source, target):
        try:
            link(source, target)
        except FileExistsError:
            disk.remove(LOCK)
            raise

    monkeypatch.setattr(disk, "link", released_after)
    asyncio.run(close(reopen(disk)))


def test_a_lock_that_never_settles_is_given_up(monkeypatch):
    disk = locked_by(pid=2**22)
    monkeypatch.setattr(lock_module, "_succeed", lambda *arguments: False)
    with pytest.raises(LogInUse, match="changed hands 100 times"):
        reopen(disk)


def test_a_directory_that_cannot_be_locked_says_what_is_needed():
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    for step in range(1, 5):
        failing = disk.copy()
        failing.fault = Fault(step)
        with pytest.raises(LogError, match=r"can't be locked for writing: .* with hard links"):
            reopen(failing)
        assert not failing.exists(LOCK)
        asyncio.run(close(reopen(failing)))


# The lease -----------------------------------------------------------------------------------------------


class Clock:
    now_s = 1000

    def __call__(self):
        return self.now_s * 1_000_000_000


def test_a_lock_is_renewed_with_a_commit_now_and_then():
    disk, clock = FaultyDisk(), Clock()
    log = make(disk, now_ns=clock)
    clock.now_s += 9
    log.post(weights(1))
    assert int(json.loads(disk.read(LOCK))["renewed_ns"]) == 1000 * 10**9
    clock.now_s += 1
    log.post(weights(2))

    assert int(json.loads(disk.read(LOCK))["renewed_ns"]) == 1010 * 10**9
    asyncio.run(log.aclose())


@pytest.mark.parametrize("left", [None, "other"])
def test_a_writer_whose_lock_was_taken_stops_and_leaves_the_lock_alone(left):
    disk, clock = FaultyDisk(), Clock()
    log = make(disk, now_ns=clock)
    log.post(weights(1))
    disk.remove(LOCK)
    if left is not None:
        disk.replace(LOCK, holder(left).encode())
    clock.now_s += 10
    with pytest.raises(LogFailed, match="was taken over by another process"):
        log.post(weights(2))
    asyncio.run(log.aclose())

    assert disk.exists(LOCK) == (left is not None)
    assert seqs(read_log(RUN, disk=disk)) == [1]
