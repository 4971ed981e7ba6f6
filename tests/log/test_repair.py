"""A damaged log: what is said of it, and the new run that is written from its good part."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.invariants import violations
from groupstate.core.snapshot import capture, encoded
from groupstate.errors import BadInput, CorruptLog, LogError, NotARun
from groupstate.log.file import FileLog
from groupstate.log.frames import HEADER_BYTES, checksum_seed, walk
from groupstate.log.reading import read_book, read_log
from groupstate.log.repair import diagnose, repair
from groupstate.log.rundir import RunDir
from groupstate.log.snapshots import SnapshotInfo, list_snapshots
from groupstate.simulate.faults import Fault, FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.log.scenes import weights
from tests.runtime.scenes import half_right, opened

RUN, NEW = "/runs/one", "/runs/two"
HEAD = f"{RUN}/log/head"
SEGMENT_BYTES = 1_000


def settings(disk):
    return {"disk": disk, "inline": True, "segment_bytes": SEGMENT_BYTES, "payload_file_bytes": 400}


def driven():
    """A run of several segments and payload files, with a mark, evictions and a batch that is out."""
    disk = FaultyDisk()

    async def session(ctx):
        return gs.Trajectory(text="answer " * 9, reward=0.5 if ctx.prompt.content % 4 == 3 else float(ctx.session))

    async def live(loop):
        log = FileLog.create(RUN, **settings(disk))
        rules = gs.Rules(filter_metric="reward")
        async with opened(loop, log=log, source=range(40), session=session, group_size=2, rules=rules) as run:
            for step in range(5):
                await run.commit(await run.sample(1, weight_version=step))
                await run.checkpoint()
            await run.sample(1)
            return disk.copy()

    return run_virtual(live)


DRIVEN = driven()
WHOLE = list(read_log(RUN, disk=DRIVEN))
SEGMENTS = [name for name in DRIVEN.listdir(f"{RUN}/log") if name.endswith(".seg")]


def frames_of(name):
    data, seed = DRIVEN.read(f"{RUN}/log/{name}"), checksum_seed(bytes.fromhex(WHOLE[0].event.run_id))
    return list(walk(memoryview(data), HEADER_BYTES, seed, int(name[:20])))


def damaged(segment=1, frame=1):
    """A bit of one frame is flipped; gives the disk and the last event in front."""
    disk, path = DRIVEN.copy(), f"{RUN}/log/{SEGMENTS[segment]}"
    data, place = bytearray(disk.read(path)), frames_of(SEGMENTS[segment])[frame]
    data[place.body_start] ^= 1
    disk.replace(path, bytes(data))
    return disk, place.first_seq - 1


def everything(disk, under=RUN):
    return {path: disk.read(path) for path in disk.sizes(under)}


def goes_on(disk, path, until):
    """The new run holds the events, opens, is sound and goes on to a batch."""
    assert list(read_log(path, disk=disk)) == WHOLE[:until]

    async def again(loop):
        log = FileLog.open(path, **settings(disk))
        async with opened(loop, log=log, source=range(40), session=half_right, group_size=2) as run:
            await run.commit(await run.sample(2))
            return violations(run.ledger.log.read())

    assert run_virtual(again) == []


# Looking ---------------------------------------------------------------------------------------------


def test_a_good_log_has_no_damage_and_a_torn_end_is_none():
    found = diagnose(RUN, disk=DRIVEN)
    assert (found.damage, found.last_seq, found.behind, found.torn_bytes) == ("", len(WHOLE), 0, 0)

    disk = DRIVEN.copy()
    disk.remove(HEAD)
    last = f"{RUN}/log/{SEGMENTS[-1]}"
    disk.replace(last, disk.read(last)[:-3])
    found = diagnose(RUN, disk=disk)
    assert not found.damage
    assert found.torn_bytes > 0
    disk.replace(last, b"")
    found = diagnose(RUN, disk=disk)
    assert (found.damage, found.last_seq) == ("", int(SEGMENTS[-1][:20]) - 1)


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_damage_in_the_middle_is_found_with_what_is_good_on_both_sides(segment):
    disk, last_good = damaged(segment)
    found = diagnose(RUN, disk=disk)

    assert found.last_seq == found.keep_until == last_good
    assert "is damaged at byte" in found.damage
    (lost,) = [frame for frame in frames_of(SEGMENTS[segment]) if frame.first_seq == last_good + 1]
    assert found.behind == len(WHOLE) - last_good - lost.count
    assert (found.first_behind, found.last_behind) == (lost.last_seq + 1, len(WHOLE))


def test_other_damage_is_named_and_what_is_in_front_counts():
    cases = {}
    for name in ("missing segment", "header", "head", "lost"):
        cases[name] = DRIVEN.copy()
    second, last = f"{RUN}/log/{SEGMENTS[1]}", f"{RUN}/log/{SEGMENTS[-1]}"
    cases["missing segment"].remove(second)
    cases["header"].replace(second, b"?" + DRIVEN.read(second)[1:])
    cases["head"].replace(HEAD, b"?" * 64)
    cases["lost"].replace(last, DRIVEN.read(last)[:HEADER_BYTES])
    found = {name: diagnose(RUN, disk=disk) for name, disk in cases.items()}

    first_of_second, first_of_last = int(SEGMENTS[1][:20]), int(SEGMENTS[-1][:20])
    assert "a segment before it is missing" in found["missing segment"].damage
    assert "header is damaged" in found["header"].damage
    assert "watermark has no whole slot" in found["head"].damage
    assert "acknowledged as durable and are not there" in found["lost"].damage
    assert found["missing segment"].last_seq == found["header"].last_seq == first_of_second - 1
    assert found["header"].behind == len(WHOLE) - first_of_second + 1
    assert (found["head"].last_seq, found["head"].behind) == (len(WHOLE), 0)
    assert found["lost"].last_seq == first_of_last - 1


def test_a_log_that_is_damaged_from_the_start_has_nothing_to_keep():
    disk, _ = damaged(0, 0)
    found = diagnose(RUN, disk=disk)

    assert (found.last_seq, found.keep_until) == (0, None)
    with pytest.raises(BadInput, match="no event is left to keep"):
        repair(RUN, NEW, 1, disk=disk)


def test_no_segments_at_all_is_damage():
    disk = FaultyDisk()
    asyncio.run(FileLog.create(RUN, disk=disk, inline=True).aclose())
    disk._directories.discard(f"{RUN}/log")

    assert "the directory with the events is missing" in diagnose(RUN, disk=disk).damage


# Writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_the_new_run_opens_and_goes_on_and_the_old_one_is_as_it_was(segment):
    disk, last_good = damaged(segment)
    before = everything(disk)
    written = repair(RUN, NEW, last_good, disk=disk)

    assert everything(disk) == before
    goes_on(disk, NEW, last_good)
    # The new run went on to write, in no file that the old one has too.
    assert everything(disk) == before
    assert written.linked < written.payload_files == len(disk.listdir(f"{RUN}/payloads"))
    with pytest.raises(CorruptLog, match="groupstate repair RUN"):
        FileLog.open(RUN, **settings(disk))


@pytest.mark.slow
def test_every_event_of_a_good_log_can_be_the_last_but_where_an_end_would_be_torn_apart():
    for seq in range(1, len(WHOLE) + 1):
        disk = DRIVEN.copy()
        following = WHOLE[seq].event if seq < len(WHOLE) else None
        if isinstance(following, ev.GroupFinished | ev.GroupFailed):
            with pytest.raises(BadInput, match=f"keep until {seq - 1} or until {seq + 1}"):
                repair(RUN, NEW, seq, disk=disk)
            assert not disk.exists(NEW)
        else:
            repair(RUN, NEW, seq, disk=disk)
            goes_on(disk, NEW, seq)


def test_the_end_of_a_group_stays_with_the_end_of_its_last_session():
    disk = DRIVEN.copy()
    seq = next(record.seq for record in WHOLE if isinstance(record.event, ev.GroupFinished | ev.GroupFailed)) - 1

    with pytest.raises(BadInput, match=f"keep until {seq - 1} or until {seq + 1}"):
        repair(RUN, NEW, seq, disk=disk)
    assert not disk.exists(NEW)


def test_an_event_in_the_middle_of_a_commit_can_be_the_last():
    disk = FaultyDisk()
    log = FileLog.create(RUN, **settings(disk))
    log.post(weights(1, 3))
    log.post(weights(4, 4))
    asyncio.run(log.aclose())

    for seq in range(1, 8):
        target = f"/runs/until {seq}"
        repair(RUN, target, seq, disk=disk)
        assert list(read_log(target, disk=disk)) == weights(1, seq)
        again = FileLog.open(target, **settings(disk))
        again.post(weights(seq + 1))
        asyncio.run(again.aclose())


def test_what_lies_behind_the_damage_a_second_time_is_not_lost():
    disk, _ = damaged()
    path = f"{RUN}/log/{SEGMENTS[1]}"
    first = frames_of(SEGMENTS[1])[0]
    found = diagnose(RUN, disk=disk)
    disk.replace(path, disk.read(path) + disk.read(path)[first.start : first.stop])

    assert diagnose(RUN, disk=disk) == found


def test_an_event_behind_the_damage_or_the_end_is_refused():
    disk, last_good = damaged()

    with pytest.raises(BadInput, match=rf"the damage is behind event {last_good}; keep until an event from 1 to"):
        repair(RUN, NEW, last_good + 1, disk=disk)
    with pytest.raises(BadInput, match=f"the log ends at {len(WHOLE)}"):
        repair(RUN, NEW, len(WHOLE) + 1, disk=DRIVEN.copy())
    assert not disk.exists(NEW)


def test_a_target_that_exists_or_lies_inside_is_refused():
    disk, last_good = damaged()

    for target, text in ((f"{RUN}/new", "lies inside of the run"), (RUN, "exists"), ("/runs", "exists")):
        with pytest.raises(BadInput, match=text):
            repair(RUN, target, last_good, disk=disk)
    with pytest.raises(NotARun):
        repair("/nowhere", NEW, 1, disk=disk)


def test_a_target_that_cannot_be_written_is_an_error_and_no_run():
    disk, last_good = damaged()
    disk.fault = Fault(disk.operation_count + 3, once=False)

    with pytest.raises(LogError, match="can't be written"):
        repair(RUN, NEW, last_good, disk=disk)
    with pytest.raises(NotARun):
        diagnose(NEW, disk=disk)


class NoLinks(FaultyDisk):
    """A file system without hard links; a payload file is removed while the copying is at it."""

    gone = ""

    def link(self, source, target):
        if source.endswith(".pay"):
            raise OSError(1, "Operation not permitted")
        super().link(source, target)

    def open_to_read(self, path):
        if path == self.gone:
            raise FileNotFoundError(2, "No such file", path)
        return super().open_to_read(path)


def test_payloads_are_copied_where_they_cannot_be_linked_and_may_go_meanwhile():
    disk = NoLinks()
    disk._names, disk._directories = dict(DRIVEN._names), set(DRIVEN._directories)
    first = disk.listdir(f"{RUN}/payloads")[0]
    written = repair(RUN, NEW, len(WHOLE), disk=disk)
    assert (written.linked, written.payload_files) == (0, len(disk.listdir(f"{RUN}/payloads")))

    disk.gone = f"{RUN}/payloads/{first}"
    fewer = repair(RUN, "/runs/three", len(WHOLE), disk=disk)
    assert fewer.payload_files == written.payload_files - 1


def test_groups_whose_payloads_are_gone_are_evicted_as_damaged():
    disk = DRIVEN.copy()
    seq = next(r.seq for r in WHOLE if isinstance(r.event, ev.GroupFinished))
    for name in disk.listdir(f"{RUN}/payloads"):
        disk.remove(f"{RUN}/payloads/{name}")
    repair(RUN, NEW, seq, disk=disk)

    async def again(loop):
        log = FileLog.open(NEW, **settings(disk))
        async with opened(loop, log=log, source=range(40), session=half_right, group_size=2) as run:
            await run.commit(await run.sample(2))
            return [r.event.reasons for r in run.ledger.log.read() if isinstance(r.event, ev.GroupEvicted)]

    assert ("damaged",) in run_virtual(again)


# The command -----------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Path, int]:
    disk, last_good = damaged()
    for path, data in everything(disk).items():
        whole = tmp_path / path.removeprefix("/runs/")
        whole.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(data)
    (tmp_path / "one" / "log" / "lock").unlink(missing_ok=True)
    return tmp_path / "one", last_good


def call(*args):
    return CliRunner().invoke(main, ["repair", *map(str, args)])


def test_the_command_reports_and_proposes_and_then_repairs(on_disk):
    run, last_good = on_disk
    new = run.with_name("new")

    told = call(run).output
    assert f"repair\tgood\tevents 1 to {last_good}" in told
    assert f"good events between {last_good + 2}" in told or "are lost" in told
    assert f"groupstate repair {run} --keep-until {last_good} -o NEWRUN" in told
    assert not new.exists()
    done = call(run, "--keep-until", last_good, "-o", new)
    assert f"{new}: events 1 to {last_good}" in done.output
    assert CliRunner().invoke(main, ["check", str(new)]).exit_code == 0
    assert "nothing: the run can be opened" in call(new).output
    assert json.loads(call(new, "--json").output)["written"] is None
    again = json.loads(call(run, "--keep-until", 1, "-o", run.with_name("short"), "--json").output)
    assert (again["keep_until"], again["written"]["last_seq"]) == (last_good, 1)


def test_the_command_refuses_what_cannot_be(on_disk, tmp_path):
    run, last_good = on_disk
    for args, text in (
        ((run, "--keep-until", 1), "belong together"),
        ((run, "--keep-until", last_good + 1, "-o", tmp_path / "x"), "can't be kept"),
        ((tmp_path / "none",), "doesn't exist"),
    ):
        result = call(*args)
        assert result.exit_code == 2
        assert text in result.output


def test_the_command_says_what_is_torn_and_where_nothing_is_left(on_disk):
    run, _ = on_disk
    (run / "log" / "head").unlink()
    for name in SEGMENTS[1:]:
        (run / "log" / name).unlink()
    first = run / "log" / SEGMENTS[0]
    first.write_bytes(first.read_bytes()[:-2])
    assert "repair\ttorn\t" in call(run).output
    data = bytearray(first.read_bytes())
    data[HEADER_BYTES + 5] ^= 1
    first.write_bytes(data)
    assert "repair\tto do\tnothing can be kept" in call(run).output


def test_the_command_does_not_call_an_acknowledged_end_that_is_cut_an_interrupted_commit(on_disk):
    run, _ = on_disk
    for name in SEGMENTS[1:]:
        (run / "log" / name).unlink()
    first = run / "log" / SEGMENTS[0]
    first.write_bytes(first.read_bytes()[:-2])

    told = call(run).output

    assert "repair\tdamage\t" in told
    assert "bytes at the end are no whole commit\n" in told
    assert "opening the run" not in told


def test_a_snapshot_of_what_is_kept_goes_along():
    disk, book = FaultyDisk(), Book()
    log = FileLog.create(RUN, **settings(disk))
    for seq in range(1, 31):
        (record,) = weights(seq)
        log.post([record])
        book.apply(record)
        if seq in (10, 20):
            info = SnapshotInfo(seq, 0, book.weight_version, book.lineage)
            log.keep_snapshot(info, list(encoded(capture(book))), limit=0)

    repair(RUN, NEW, keep_until=15, disk=disk)

    assert list_snapshots(disk, RunDir.at(NEW)) == [10]
    assert read_book(NEW, disk=disk).weight_version == 10
