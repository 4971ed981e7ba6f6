"""The commands on a run with snapshots: one that has everything, one with archives, one whose beginning is gone."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from click.testing import CliRunner, Result

import groupstate as gs
from groupstate.cli import main
from groupstate.core.events import BatchRequested
from groupstate.core.folding import replayed
from groupstate.core.snapshot import capture, encoded
from groupstate.errors import BadInput, SampleTimeout
from groupstate.inspect.batch_story import batch_story, batch_story_of
from groupstate.inspect.checking import checked
from groupstate.inspect.overview import overview
from groupstate.inspect.wait_story import wait_story, wait_story_of
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.reading import Cursor, first_event, last_event, read_book, read_log
from groupstate.log.retention import READERS
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import WAYPOINT, SnapshotInfo, list_snapshots, write_snapshot
from groupstate.simulate.loop import EPOCH_NS, VirtualLoop, run_virtual

BATCHES = 20


def lived(path: Path, keep: Any) -> Path:
    """So many batches of one group, a checkpoint after each."""

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        return gs.Trajectory(text="yes", reward=float(ctx.session))

    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(path, inline=True, durability="os", segment_bytes=1_500, keep=keep)
        async with gs.open_run(
            log=log, source=range(60), session=session, group_size=2, snapshot_events=15, clock_ns=loop.clock_ns
        ) as run:
            for number in range(BATCHES):
                await run.commit(await run.sample(1))
                await run.checkpoint(f"step {number}")

    run_virtual(main)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {keep: lived(folder / str(keep), keep) for keep in ("all", "archive", 1)}


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def out(*args: Any) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def snapshots(run: Path) -> list[int]:
    return list_snapshots(OsDisk(), RunDir.at(run))


def places(run: Path) -> list[int]:
    """Events after which there is a snapshot or a waypoint."""
    return sorted({*snapshots(run), *list_snapshots(OsDisk(), RunDir.at(run), WAYPOINT)})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that were decoded."""
    seqs: list[int] = []
    whole = Cursor._decode

    def counted(self: Cursor, *args: Any) -> Any:
        records = whole(self, *args)
        seqs.extend(record.seq for record in records)
        return records

    monkeypatch.setattr(Cursor, "_decode", counted)
    return seqs


# show ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "archive", 1])
def test_show_in_the_middle_replays_from_the_nearest_snapshot_or_waypoint(
    runs: dict[Any, Path], read: list[int], keep: Any
) -> None:
    there = places(runs[keep])
    nearest, following = max(pairwise(there), key=lambda two: two[1] - two[0])
    at = following - 1
    read.clear()
    seen = json.loads(out("show", runs[keep], "--at", at, "--json"))

    # A commit is decoded as a whole, so the one that the snapshot ends in the middle of may be among them.
    assert nearest <= at < following
    assert set(range(nearest + 1, at + 1)) <= set(read)
    assert len(read) <= at - nearest + 4
    assert seen["header"]["seq"] == at


def test_show_tells_the_same_at_every_event(runs: dict[Any, Path]) -> None:
    records = list(read_log(runs["all"]))
    for seq in range(1, len(records) + 1, 7):
        base = read_book(runs["all"], seq)
        start = 1 if base is None else base.last_seq + 1
        assert overview(read_log(runs["all"], start, seq + 1), seq, base) == overview(records, seq)


def test_show_at_the_end_of_a_shortened_run(runs: dict[Any, Path]) -> None:
    whole, short = (json.loads(out("show", runs[keep], "--json")) for keep in ("all", 1))

    assert first_event(runs[1]) > 1
    for seen in (whole, short):
        for name in ("run_id", "started_at_ns"):
            del seen["header"][name]
    assert short == whole


def test_show_before_the_oldest_place_names_the_first_that_can_be_told(runs: dict[Any, Path]) -> None:
    least = first_event(runs[1]) - 1
    for option, there in (([], places(runs[1])), (["--frontier"], snapshots(runs[1]))):
        result = call("show", runs[1], "--at", 3, *option)

        assert result.exit_code == 2
        assert f"the first that can is event {min(seq for seq in there if seq >= least)}\n" in result.stderr


def test_show_frontier_of_a_shortened_run(runs: dict[Any, Path]) -> None:
    text = out("show", runs[1], "--frontier")
    (whole,), (short,) = (json.loads(out("show", runs[keep], "--frontier", "--json")) for keep in ("all", 1))

    assert f"either, before event {snapshots(runs[1])[0] + 1}" in text
    assert "either" not in out("show", runs["all"], "--frontier")
    assert (short["open"], short["next"], short["lowest_open"]) == (whole["open"], whole["next"], whole["lowest_open"])
    assert short["unknown"][0][0] == whole["committed"][0][0] == 0
    assert short["committed"][-1][1] == whole["committed"][-1][1]


# log, why --------------------------------------------------------------------------------------------


def test_log_of_a_shortened_run_begins_where_it_begins(runs: dict[Any, Path]) -> None:
    first = first_event(runs[1])
    result = call("log", runs[1])

    assert result.exit_code == 0
    assert result.stdout.startswith(f"{first}\t")
    assert f"events before {first} are gone" in result.stderr


def test_log_from_an_event_that_is_gone_is_refused_with_the_first(runs: dict[Any, Path]) -> None:
    result = call("log", runs[1], "--from", 1)

    assert result.exit_code == 2
    assert f"Start at event {first_event(runs[1])}" in result.stderr


def test_log_of_a_group_of_a_shortened_run(runs: dict[Any, Path]) -> None:
    group = f"g{BATCHES}"
    whole, short = (call("log", runs[keep], "--group", group) for keep in ("all", 1))

    assert short.exit_code == 0
    assert whole.stdout.splitlines()[-1].split("\t")[2] == short.stdout.splitlines()[-1].split("\t")[2]
    first = first_event(runs[1])
    assert len(short.stdout.splitlines()) == len(
        [line for line in whole.stdout.splitlines() if int(line.split("\t")[0]) >= first]
    )


def test_log_of_a_group_of_which_everything_is_gone_is_refused_with_how_it_left(runs: dict[Any, Path]) -> None:
    result = call("log", runs[1], "--group", "g1")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "group 'g1' is not in the book; it was committed before event " in result.stderr


def test_log_of_a_group_that_never_was_names_those_that_a_snapshot_knows(runs: dict[Any, Path]) -> None:
    result = call("log", runs[1], "--group", "g1x")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "this log never submitted it; did you mean 'g1" in result.stderr


def test_the_last_event_is_that_of_the_last_segment(runs: dict[Any, Path]) -> None:
    for run in runs.values():
        assert last_event(run) == int(out("log", run).splitlines()[-1].split("\t")[0])


def test_log_of_archives_is_whole(runs: dict[Any, Path]) -> None:
    assert list((runs["archive"] / "log").glob("*.gz"))
    assert len(out("log", runs["archive"]).splitlines()) == len(out("log", runs["all"]).splitlines())


def test_why_of_batches_and_waits_on_a_shortened_run(runs: dict[Any, Path]) -> None:
    first = first_event(runs[1])
    early, last = call("why", runs[1], "--batch", 1), call("why", runs[1], "--batch", BATCHES)
    asked = json.loads(call("why", runs[1], "--batch", BATCHES, "--json").stdout)["request_seq"]
    gone, waited = call("why", runs[1], "--wait", 3), call("why", runs[1], "--wait", asked)

    assert (early.exit_code, gone.exit_code) == (2, 2)
    assert "batch 1: it was sampled, and what there was to choose from then is gone: events are" in early.stderr
    assert "what was at event 3 can't be told any more: the first is event" in gone.stderr
    assert f"events before {first} are gone" not in out("why", runs["all"], "--batch", 1)
    for told in (last, waited):
        assert told.exit_code == 0
        assert "are gone: what happened up to then isn't told" in told.stderr
    assert "since\tevents are told from" in last.stdout


def test_why_begins_at_the_nearest_snapshot_and_tells_the_same(runs: dict[Any, Path], read: list[int]) -> None:
    path, records = runs["all"], list(read_log(runs["all"]))
    requests = [r.seq for r in records if isinstance(r.event, BatchRequested)]
    for batch in (2, 7, BATCHES - 1):
        read.clear()
        found = batch_story_of(path, batch)
        assert found.told_from > 1 or batch == 2
        assert attrs.evolve(found, told_from=1) == batch_story(records, batch)
        assert min(read) >= found.told_from - 2
    for seq in (requests[5], requests[5] + 2, requests[-1] + 1, records[-1].seq - 3):
        read.clear()
        assert _but_where_told_from(wait_story_of, path, seq) == _but_where_told_from(wait_story, records, seq)
        assert min(read) > 1
    assert snapshots(path)[0] < requests[5]


def _but_where_told_from(tell: Any, *args: Any) -> Any:
    """A wait, or why there is none."""
    try:
        return attrs.evolve(tell(*args), told_from=1)
    except BadInput as error:
        return str(error)


def test_a_wait_that_began_before_a_snapshot_is_told_from_before(tmp_path: Path) -> None:
    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(tmp_path / "run", inline=True, durability="os")
        async with gs.open_run(log=log, group_size=1, snapshot_events=10, clock_ns=loop.clock_ns) as run:
            for number in range(30):
                run.submit("question", group_id=f"g{number}").start(0).finish(gs.Trajectory(reward=1.0))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_submit_more, run)
                with pytest.raises(SampleTimeout):
                    await run.sample(100, timeout_s=50)

    run_virtual(main)
    (asked,) = [r.seq for r in read_log(tmp_path / "run") if isinstance(r.event, BatchRequested)]
    inside = [seq for seq in snapshots(tmp_path / "run") if seq > asked]
    told = wait_story_of(tmp_path / "run", inside[-2] + 1)

    assert 1 < told.told_from <= told.request_seq == asked
    assert told.steps == wait_story(read_log(tmp_path / "run"), inside[-2] + 1).steps


async def _submit_more(run: gs.Run) -> None:
    for number in range(30):
        await anyio.sleep(1)
        run.submit("question", group_id=f"h{number}").start(0).finish(gs.Trajectory(reward=1.0))


def test_why_on_a_shortened_run_says_what_is_not_told(runs: dict[Any, Path]) -> None:
    result = call("why", runs[1], f"g{BATCHES}")
    early = call("why", runs[1], "g1")

    assert result.exit_code == 0
    assert "are gone: what happened up to then isn't told" in result.stderr
    assert "committed" in result.stdout
    assert early.exit_code == 2
    assert f"it was committed before event {snapshots(runs[1])[0] + 1}" in early.stderr


# check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "archive"])
def test_check_compares_the_snapshots_with_the_replay(runs: dict[Any, Path], keep: str) -> None:
    seen = checked(runs[keep])

    assert seen.violations == ()
    assert seen.snapshots == len(snapshots(runs[keep])) > 3
    assert f"{seen.snapshots} snapshots" in out("check", runs[keep])


def test_check_of_a_shortened_run_says_what_it_could_not_count(runs: dict[Any, Path]) -> None:
    seen = checked(runs[1])

    assert seen.violations == ()
    assert (seen.first_seq, seen.snapshots) == (snapshots(runs[1])[0] + 1, len(snapshots(runs[1])) - 1)
    assert "The events before them are gone" in out("check", runs[1])


@pytest.mark.parametrize("keep", ["all", 1])
def test_a_snapshot_that_is_another_book_is_found(tmp_path: Path, keep: Any) -> None:
    run = lived(tmp_path / "run", keep)
    seq = snapshots(run)[-1]
    book = read_book(run, seq)
    assert book is not None
    book.totals["committed"] += 1
    place = RunDir.at(run)
    log_id = read_run_info(OsDisk(), place).log_id
    write_snapshot(OsDisk(), place, log_id, SnapshotInfo(seq, 0, 0, 1), encoded(capture(book)))
    result = call("check", run)

    assert result.exit_code == 1
    assert f"the snapshot after event {seq} is another book" in result.stdout


def test_a_shortened_log_that_cannot_follow_its_snapshot_is_found(tmp_path: Path) -> None:
    run = lived(tmp_path / "run", 1)
    seq = snapshots(run)[0]
    place = RunDir.at(run)
    empty = replayed([])
    empty.last_seq = seq
    log_id = read_run_info(OsDisk(), place).log_id
    write_snapshot(OsDisk(), place, log_id, SnapshotInfo(seq, 0, 0, 1), encoded(capture(empty)))
    result = call("check", run)

    assert result.exit_code == 1
    assert [line.startswith("\t") for line in result.stdout.splitlines()] == [False, True]


# disk ------------------------------------------------------------------------------------------------


def test_disk_has_snapshots_and_archives_under_headings_of_their_own(runs: dict[Any, Path]) -> None:
    found = json.loads(out("disk", runs["archive"], "--json"))
    kinds = {kind["heading"]: kind for kind in found["kinds"]}
    files = list((runs["archive"] / "log").iterdir())

    for heading, suffix in (("snapshots", ".snap"), ("archived segments", ".gz"), ("log segments", ".seg")):
        lying = [file for file in files if file.suffix == suffix]
        assert (kinds[heading]["files"], kinds[heading]["size_bytes"]) == (
            len(lying),
            sum(file.stat().st_size for file in lying),
        )
    assert "archived segments" in out("disk", runs["archive"])


def test_disk_says_what_keep_log_would_free(runs: dict[Any, Path]) -> None:
    place = RunDir.at(runs["all"])
    found = json.loads(out("disk", runs["all"], "--json"))
    sealed = {one["keep"]: one["size_bytes"] for one in found["sealed"]}
    mark = read_book(runs["all"]).mark_seqs[-1]
    segments = list_segments(OsDisk(), place)

    def lying_below(limit: int) -> int:
        full = [first for first, following in pairwise(segments) if following <= limit + 1]
        return sum(Path(place.segment(first)).stat().st_size for first in full)

    limit = snapshots(runs["all"])[-2]
    assert sealed["archive"] == lying_below(limit) > 0
    assert sealed["1"] == lying_below(min(limit, mark)) > 0
    text = out("disk", runs["all"])
    assert "keep_log='archive' packs them" in text
    assert "of the log go with keep_log=1" in text


def test_disk_knows_what_is_gone_or_packed_already(runs: dict[Any, Path]) -> None:
    assert json.loads(out("disk", runs[1], "--json"))["sealed"] == []
    (one, *_) = json.loads(out("disk", runs["archive"], "--json"))["sealed"]
    packed = [file.stat().st_size for file in (runs["archive"] / "log").glob("*.gz")]
    assert one["keep"] == "1"
    assert 0 < one["size_bytes"] <= sum(packed)


def test_disk_counts_live_payloads_of_a_shortened_run(runs: dict[Any, Path]) -> None:
    whole, short = (json.loads(out("disk", runs[keep], "--json")) for keep in ("all", 1))

    assert [file["live_bytes"] for file in short["payload_files"]] == [
        file["live_bytes"] for file in whole["payload_files"]
    ]
    assert short["seq"] == whole["seq"]


def test_claims_are_the_runs_own_files(runs: dict[Any, Path]) -> None:
    folder = runs[1] / "log" / READERS
    (folder / "x.json").write_text("{}")
    kinds = {kind["heading"] for kind in json.loads(out("disk", runs[1], "--json"))["kinds"]}
    (folder / "x.json").unlink()

    assert "other files" not in kinds


# repair ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "archive", 1])
def test_repair_finds_nothing_wrong_and_can_write_up_to_an_event(
    runs: dict[Any, Path], tmp_path: Path, keep: Any
) -> None:
    run, new = runs[keep], tmp_path / "new"
    first = first_event(run)
    last = list(read_log(run, first))[-1].seq
    assert f"events {first} to {last}" in out("repair", run)
    assert "nothing: the run can be opened" in out("repair", run)
    upto = snapshots(run)[-2] + 1
    assert f"events {first} to {upto}" in out("repair", run, "--keep-until", upto, "-o", new)

    assert snapshots(new) == [seq for seq in snapshots(run) if seq <= upto]
    assert list(read_log(new, first)) == list(read_log(run, first, upto + 1))
    assert checked(new).violations == ()

    async def again(loop: VirtualLoop) -> None:
        async with gs.open_run(log=FileLog.open(new, inline=True), source=range(60), clock_ns=lambda: EPOCH_NS) as run:
            assert run.book.last_seq > upto

    run_virtual(again)


def test_repair_of_a_shortened_run_needs_a_snapshot_to_begin_with(runs: dict[Any, Path], tmp_path: Path) -> None:
    oldest = snapshots(runs[1])[0]
    result = call("repair", runs[1], "--keep-until", oldest - 1, "-o", tmp_path / "new")

    assert result.exit_code == 2
    assert f"keep until an event from {oldest} to" in result.stderr
    assert "the events before the oldest snapshot are gone" in result.stderr
    assert not (tmp_path / "new").exists()


def test_repair_of_a_shortened_run_without_any_snapshot_keeps_nothing(tmp_path: Path) -> None:
    run = lived(tmp_path / "run", 1)
    for file in (run / "log").glob("*.snap"):
        file.unlink()
    text = out("repair", run)

    assert "a segment before it is missing" in text
    assert "nothing can be kept" in text


def test_repair_of_a_shortened_run_that_is_damaged(tmp_path: Path) -> None:
    run = lived(tmp_path / "run", 1)
    oldest = snapshots(run)[0]
    segment = max((run / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[-5] ^= 1
    segment.write_bytes(data)
    text = out("repair", run)
    keep = int(text.split("--keep-until ")[1].split()[0])
    assert keep >= oldest
    out("repair", run, "--keep-until", keep, "-o", tmp_path / "new")

    assert checked(tmp_path / "new").violations == ()
