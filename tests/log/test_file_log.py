"""The log in files: what it writes, in which order, and how it is opened again."""

import asyncio
import json
import os

import pytest

from groupstate.errors import BadInput, LogError, LogFailed, NotARun, UnsupportedLog
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.reading import last_event, read_log
from groupstate.log.rundir import RunDir
from groupstate.log.segments import list_segments
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.loop import run_virtual

from .scenes import LOG_ID, RUN, close, make, reopen, seqs, submitted, weights

# Creating and opening -----------------------------------------------------------------------------------


async def test_an_opened_log_goes_on_where_it_ended(tmp_path):
    log = FileLog.create(tmp_path / "run", log_id=LOG_ID)
    log.post(weights(1, 3))
    await log.aclose()
    log = FileLog.open(tmp_path / "run")
    log.post(weights(4))
    await log.durable(4)

    assert (log.recovered_seq, log.torn_bytes, log.log_id, log.path) == (3, 0, LOG_ID, str(tmp_path / "run"))
    assert seqs(log.read()) == [1, 2, 3, 4]
    await log.aclose()


async def test_a_run_directory_has_the_files_that_the_format_names(tmp_path):
    log = FileLog.create(tmp_path / "run", log_id=LOG_ID)
    log.post([submitted(1, log.payloads.put(b"x"))])
    await log.durable(1)
    names = sorted(os.listdir(tmp_path / "run" / "log"))
    await log.aclose()

    assert names[:3] == ["00000000000000000001.seg", "head", "lock"]
    assert names[3].startswith("schema-")
    assert os.listdir(tmp_path / "run" / "payloads") == ["0000000001.pay"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["log_id"] == LOG_ID


async def test_a_log_made_without_an_id_gets_one(tmp_path):
    log = FileLog.create(tmp_path / "run")
    await log.aclose()

    assert len(log.log_id) == 32


def test_a_run_is_not_created_over_another():
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    before = disk.operation_count
    with pytest.raises(BadInput, match="/runs/one holds a run already; open it"):
        make(disk)

    assert disk.operation_count == before


def test_a_run_is_not_created_over_events_without_a_run():
    disk = FaultyDisk()
    log = make(disk)
    log.post(weights(1))
    asyncio.run(log.aclose())
    disk.remove(f"{RUN}/run.json")
    with pytest.raises(BadInput, match="holds events, though"):
        make(disk)


def test_two_creators_at_once_make_one_run(monkeypatch):
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    exists = disk.exists
    answers = iter([False])
    # The other creator is done between the first look and the lock.
    monkeypatch.setattr(disk, "exists", lambda path: next(answers, None) is None and exists(path))
    with pytest.raises(BadInput, match="holds a run already"):
        make(disk)


def test_a_creation_that_died_can_be_repeated():
    disk = FaultyDisk()
    asyncio.run(close(make(disk, log_id="f" * 32)))
    disk.remove(f"{RUN}/run.json")
    log = make(disk)
    log.post(weights(1))

    assert log.durable_seq == 1
    asyncio.run(log.aclose())
    assert seqs(read_log(RUN, disk=disk)) == [1]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"log_id": "seven"}, "32 hexadecimal digits"), ({"durability": "memory"}, "'fsync'")],
)
def test_options_that_make_no_sense_are_refused(options, text):
    disk = FaultyDisk()
    with pytest.raises(BadInput, match=text):
        make(disk, **options)

    assert disk.operation_count == 0


def test_a_directory_that_cannot_be_written_says_what_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="can't be made a run"):
        FileLog.create(tmp_path / "file" / "run")


# What isn't a run ---------------------------------------------------------------------------------------


def not_a_run(path):
    with pytest.raises(NotARun) as caught:
        FileLog.open(path)
    with pytest.raises(NotARun):
        read_log(path)
    return str(caught.value)


def test_a_path_that_is_not_a_run_says_what_would_be_right(tmp_path):
    asyncio.run(close(FileLog.create(tmp_path / "runs" / "one")))
    asyncio.run(close(FileLog.create(tmp_path / "runs" / "two")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")

    assert "doesn't exist; name a run directory" in not_a_run(tmp_path / "none")
    assert "holds runs and is none itself; name one of them: one, two" in not_a_run(tmp_path / "runs")
    assert f"name the run directory itself: {tmp_path}/runs/one" in not_a_run(tmp_path / "runs" / "one" / "log")
    for part in ("payloads", "run.json"):
        assert "is a part of a run; name the run directory itself" in not_a_run(tmp_path / "runs" / "one" / part)
    assert "is not a run directory: it has no run.json. A run dir" in not_a_run(tmp_path / "empty")
    assert "is not a run directory" in not_a_run(tmp_path / "file")


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints", "log.txt"])
def test_what_lies_beside_the_files_of_a_run_is_no_part_of_it(tmp_path, name):
    asyncio.run(close(FileLog.create(tmp_path / "one")))
    if "." in name:
        (tmp_path / "one" / name).write_text("")
    else:
        (tmp_path / "one" / name).mkdir()

    told = not_a_run(tmp_path / "one" / name)
    assert told.endswith(
        f"{name} is not a run directory: it has no run.json. The one that it lies in has: {tmp_path}/one"
    )


def test_a_run_that_lies_in_a_folder_of_another_is_named(tmp_path):
    asyncio.run(close(FileLog.create(tmp_path / "one")))
    asyncio.run(close(FileLog.create(tmp_path / "one" / "more" / "two")))

    assert "holds runs and is none itself; name one of them: two" in not_a_run(tmp_path / "one" / "more")


def test_a_run_json_of_somebody_else_is_no_run(tmp_path):
    for text in ("", "[]", '{"format": "jogging"}', '{"format": "groupstate-run", "version": 1}', "\xff"):
        (tmp_path / "run.json").write_text(text)
        assert "isn't what groupstate writes" in not_a_run(tmp_path)


def test_a_run_json_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "run.json").mkdir()

    assert "can't be read" in not_a_run(tmp_path)


def test_a_run_of_a_later_format_is_refused():
    disk = FaultyDisk()
    asyncio.run(close(make(disk)))
    fields = json.loads(disk.read(f"{RUN}/run.json"))
    disk.replace(f"{RUN}/run.json", json.dumps({**fields, "version": 2}).encode())
    with pytest.raises(UnsupportedLog, match="is a run of format 2"):
        reopen(disk)


# What it writes ----------------------------------------------------------------------------------------


async def test_the_same_story_makes_the_same_bytes():
    disks = [FaultyDisk(), FaultyDisk()]
    for disk in disks:
        log = make(disk)
        log.post([submitted(1, log.payloads.put(b"x"))])
        await log.aclose()
    first, second = ({name: disk.read(name) for name in disk._names} for disk in disks)

    assert first == second


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_log_without_a_thread_works_under_a_virtual_clock(kind):
    async def scenario(loop):
        log = MemoryLog() if kind == "memory" else make(FaultyDisk(), now_ns=loop.clock_ns)
        for seq in range(1, 4):
            log.post(weights(seq))
            await log.durable(seq)
        waiter = asyncio.ensure_future(log.durable(4))
        await asyncio.sleep(3600)
        log.post(weights(4))
        await waiter
        await log.aclose()
        return log.durable_seq, log.payloads.blocks

    assert run_virtual(scenario) == (4, False)


async def test_what_was_looked_at_as_open_and_closed_meanwhile_takes_no_post(tmp_path):
    log = FileLog.create(tmp_path / "run")
    log.post(weights(1))
    await log.aclose()

    with pytest.raises(LogFailed, match="is closed"):
        log._commit.submit(b"\x93", 1)
    assert seqs(read_log(tmp_path / "run")) == [1]


def test_the_last_event_of_a_log_is_the_last_one_of_its_last_segment():
    disk = FaultyDisk()
    log = make(disk, segment_bytes=300)
    assert last_event(RUN, disk=disk) == 0

    for seq in range(1, 41):
        log.post(weights(seq))

    assert len(list_segments(disk, RunDir.at(RUN))) > 1
    assert last_event(RUN, disk=disk) == 40
