"""Any place of a run is found by its number, by a time or by a weight version, and is told as a replay tells it."""

import datetime
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.rules import RULES_VERSION
from groupstate.core.snapshot import capture_live, encoded
from groupstate.errors import BadInput, LogError
from groupstate.inspect.checking import checked
from groupstate.inspect.overview import overview, overview_of
from groupstate.inspect.places import book_after, published, seq_of
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.reading import Cursor, first_event, read_log
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.snapshots import WAYPOINT, SnapshotInfo, list_snapshots, write_snapshot
from groupstate.simulate.loop import EPOCH_NS, VirtualLoop, run_virtual

Kept = Callable[..., Path]
STARTED = ev.RunStarted("r", {}, RULES_VERSION, 0, library="0.1")
START = "2023-11-14T22:13:20"
"""Of virtual time."""


def lived(path: Path, keep: Any = "all") -> Path:
    """Two openings with a late result, a mark that is gone back to, and a version every other step."""

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        return gs.Trajectory(text="yes", reward=float(ctx.session))

    async def part(loop: VirtualLoop, steps: int, resume_at: gs.CheckpointMark | None = None) -> Any:
        made = {"inline": True, "durability": "os", "segment_bytes": 2_000, "keep": keep}
        log = (FileLog.open if (path / "run.json").exists() else FileLog.create)(path, **made)
        given = {"source": range(90), "session": session, "group_size": 2, "snapshot_events": 100}
        mark = None
        async with gs.open_run(log=log, clock_ns=loop.clock_ns, resume_at=resume_at, **given) as run:
            for number in range(steps):
                await run.commit(await run.sample(1))
                if number % 2:
                    await run.publish_weights(run.weight_version + 1)
                if number == steps - 6:
                    mark = await run.checkpoint()
        return mark

    async def first(loop: VirtualLoop) -> None:
        marks.append(await part(loop, 20))

    async def second(loop: VirtualLoop) -> None:
        await part(loop, 12, marks[0])

    marks: list[gs.CheckpointMark] = []
    run_virtual(first)
    run_virtual(second)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lived(tmp_path_factory.mktemp("places") / "run")


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lived(tmp_path_factory.mktemp("places") / "run", keep=1)


def waypoints(run: Path) -> list[int]:
    return list_snapshots(OsDisk(), RunDir.at(run), WAYPOINT)


def show(*args: Any) -> Result:
    result = CliRunner().invoke(main, ["show", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# The book ------------------------------------------------------------------------------------------------


def test_every_event_is_told_as_a_replay_tells_it(run: Path) -> None:
    records = list(read_log(run))
    assert any(isinstance(record.event, ev.RunRewound) for record in records)
    assert len(waypoints(run)) > 5
    for seq in range(1, len(records) + 1, 3):
        assert overview_of(book_after(run, seq)) == overview(records, seq)
    # The reason of the last event isn't in the book.
    assert overview_of(book_after(run), records[-1].event) == overview(records)


def test_no_more_is_replayed_than_lies_behind_the_nearest_place(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seqs: list[int] = []
    whole = Cursor._decode

    def counted(self: Cursor, *args: Any) -> Any:
        records = whole(self, *args)
        seqs.extend(record.seq for record in records)
        return records

    monkeypatch.setattr(Cursor, "_decode", counted)
    nearest, following = waypoints(run)[1:3]
    book_after(run, following - 1)

    # A commit is decoded as a whole, and the one that the waypoint ends in the middle of may be among them.
    assert len(seqs) <= following - nearest + 5


def test_going_back_behind_the_nearest_waypoint_starts_from_a_whole_book(run: Path) -> None:
    records = list(read_log(run))
    (rewound,) = [record for record in records if isinstance(record.event, ev.RunRewound)]
    nearest = max(seq for seq in waypoints(run) if seq < rewound.seq)

    assert rewound.event.mark_seq < nearest, "the scene"
    assert book_after(run, rewound.seq).totals == replayed(records[: rewound.seq]).totals


def test_a_late_result_of_a_group_that_left_before_the_waypoint_is_taken(kept: Kept) -> None:
    path = kept(STARTED, *(ev.WeightsPublished(version) for version in range(1, 9)))
    log = FileLog.open(path, inline=True, durability="os")
    events = [
        ev.GroupSubmitted("a", 1, ev.TRAIN, 8, 1, "submit"),
        ev.SessionStarted("a", 0, 1),
        ev.SessionFailed("a", 0, 1, "error"),
        ev.GroupFailed("a"),
        ev.GroupEvicted("a", ("empty",), 0, 0),
    ]
    for event in events:
        log.post([ev.Record(log.last_seq + 1, EPOCH_NS, event)])
    book = replayed(log.read())
    log.keep_waypoint(SnapshotInfo(book.last_seq, EPOCH_NS, 8, 1), list(encoded(capture_live(book))))
    log.post([ev.Record(15, EPOCH_NS, ev.ResultFenced("a", 0, 1, "finished", "gone"))])

    assert book_after(path, 15).totals["fenced"] == 1


def test_an_event_that_is_not_there_yet_is_refused(run: Path) -> None:
    last = sum(1 for _ in read_log(run))
    with pytest.raises(BadInput, match=f"there is no event {last + 1}: the log has events 1 to {last}"):
        book_after(run, last + 1)


def test_a_log_that_no_run_wrote_is_refused(kept: Kept) -> None:
    with pytest.raises(LogError, match="can't follow what the log says before it"):
        book_after(kept(STARTED, ev.BatchCommitted(1)))


def test_a_place_that_is_gone_is_refused_with_the_first_that_is_there(shortened: Path) -> None:
    first = first_event(shortened)
    snapshots = list_snapshots(OsDisk(), RunDir.at(shortened))
    told = min(seq for seq in (*snapshots, *waypoints(shortened)) if seq >= first - 1)
    assert first > 50
    with pytest.raises(BadInput, match=rf"event 7 can't be told any more: the first that can is event {told}$"):
        book_after(shortened, 7)
    with pytest.raises(BadInput, match=f"the first that can is event {told}$"):
        book_after(shortened, told - 1)

    assert book_after(shortened, told).last_seq == told
    assert book_after(shortened).last_seq == seq_of(shortened, "end")


# What a text names ---------------------------------------------------------------------------------------


@pytest.fixture
def clocked(kept: Kept) -> Path:
    """Event N is of N seconds after the start: 22:13:20 and so on."""
    return kept(
        STARTED,
        ev.WeightsPublished(2),
        ev.WeightsPublished(5),
        ev.RunRecovered({}, RULES_VERSION, 5, 2),
        ev.WeightsPublished(6, 2),
        ev.RunRecovered({}, RULES_VERSION, 3, 3),
        ev.WeightsPublished(4, 3),
    )


@pytest.mark.parametrize(
    ("text", "seq"),
    [
        ("3", 3),
        (" 3 ", 3),
        ("start", 1),
        ("end", 7),
        ("2023-11-14T22:13:23.000Z", 3),
        ("2023-11-14T22:13:23.999Z", 3),
        ("2023-11-14T22:13:23", 3),
        ("2023-11-14 22:13:23+00:00", 3),
        ("2023-11-14T23:13:23+01:00", 3),
        ("2024-01-01", 7),
        ("22:13:23", 3),
        ("22:13:23.5Z", 3),
        ("22:13:22.999", 2),
        ("+0s", 1),
        ("+2s", 3),
        ("+2", 3),
        ("+1.999s", 2),
        ("+0.05m", 4),
        ("+1h", 7),
        ("+1d", 7),
        ("version:2", 2),
        ("version:5", 4),
        ("version:5/1", 3),
        ("version:3", 6),
        ("version:0", 1),
        ("version:6", 5),
    ],
)
def test_a_text_names_an_event(clocked: Path, text: str, seq: int) -> None:
    assert seq_of(clocked, text) == seq


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "there is no event 0: they are numbered from 1"),
        ("soon", "'soon' names no place in a log; what does: an event's number, a time in UTC"),
        ("version:x", "names no place"),
        ("-3", "names no place"),
        ("24:00", "'24:00' is no time of a day"),
        ("22:60:00", "is no time of a day"),
        (
            "21:00",
            "the run was never at 21:00 .UTC.: its events go from 2023-11-14T22:13:21.000Z to 2023-11-14T22:13:27",
        ),
        ("2023-11-14T22:13:20Z", "nothing was recorded at .* yet: event 1 is of 2023-11-14T22:13:21.000Z"),
        (
            "version:4/1",
            "version 4 was never the current one in lineage 1; what was: version 2 at event 2 and version 5 at",
        ),
        ("version:9", "version 9 was never the current one; what was: version 6 at event 5$"),
        ("version:9/7", "version 9 was never the current one in lineage 7$"),
    ],
)
def test_a_text_that_names_none_is_refused(clocked: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        seq_of(clocked, text)


def test_a_time_of_a_day_that_the_run_saw_twice_is_refused_with_the_day_to_name(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True, durability="os")
    for seq, hours in enumerate((0, 20, 30), 1):
        event = STARTED if seq == 1 else ev.WeightsPublished(seq)
        log.post([ev.Record(seq, EPOCH_NS + hours * 3_600_000_000_000, event)])

    with pytest.raises(BadInput, match=r"was at 23:00 2 times.*Name the day, as in 2023-11-15T23:00:00.000Z"):
        seq_of(tmp_path / "run", "23:00")
    assert seq_of(tmp_path / "run", "12:00") == 1


def test_a_time_as_it_is_printed_means_the_events_that_are_printed_with_it(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True, durability="os")
    for seq, at_ns in enumerate((0, 400_000, 999_999, 1_000_000), 1):
        event = STARTED if seq == 1 else ev.WeightsPublished(seq)
        log.post([ev.Record(seq, EPOCH_NS + at_ns, event)])

    assert seq_of(tmp_path / "run", f"{START}.000Z") == 3
    assert seq_of(tmp_path / "run", f"{START}.001Z") == 4


def test_a_run_without_events_has_no_end(kept: Kept) -> None:
    run = kept()
    for text in ("end", "12:00", "+3s", "2024-01-01"):
        with pytest.raises(BadInput, match="has no event"):
            seq_of(run, text)


def test_every_version_of_a_run_is_found_as_a_whole_reading_finds_it(run: Path) -> None:
    found: dict[tuple[int, int], int] = {}
    for record in read_log(run):
        event = record.event
        if isinstance(event, ev.RunStarted | ev.WeightsPublished | ev.RunRecovered | ev.RunRewound):
            found.setdefault((event.weight_version, event.lineage), record.seq)
    last = {version: max(lineage for other, lineage in found if other == version) for version, _ in found}

    assert len({lineage for _, lineage in found}) > 1
    assert {key: published(run, *key) for key in found} == found
    assert {version: published(run, version) for version in last} == {v: found[v, last[v]] for v in last}


def test_a_version_is_looked_for_where_it_can_be_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(*args: Any) -> Any:
        for record in read_log(*args):
            read.append(record.seq)
            yield record

    monkeypatch.setattr("groupstate.inspect.places.read_log", counted)
    published(run, 3, 1)

    assert len(read) < sum(1 for _ in read_log(run)) / 2


def test_what_a_shortened_run_published_before_its_beginning_is_said_to_be_gone(shortened: Path) -> None:
    with pytest.raises(BadInput, match=f"Events before {first_event(shortened)} are gone$"):
        published(shortened, 0, 1)
    assert seq_of(shortened, "start") == first_event(shortened)
    begun = datetime.datetime.fromtimestamp(EPOCH_NS / 1e9, datetime.UTC)
    assert begun.isoformat().startswith(START)
    assert seq_of(shortened, "+1d") == seq_of(shortened, "end")


# The command ---------------------------------------------------------------------------------------------


def test_show_at_a_place(clocked: Path) -> None:
    for text, seq in (("3", 3), ("version:6", 5), ("22:13:22", 2), ("+1s", 2)):
        assert json.loads(show(clocked, "--at", text, "--json").stdout)["header"]["seq"] == seq
    assert "run\tevent\t4" in show(clocked, "--at", "+3s").stdout
    frontier = show(clocked, "--frontier", "--at", "version:2", "--json")
    assert (frontier.exit_code, frontier.stderr) == (0, "")


def test_show_at_no_place_says_what_would_be_one(clocked: Path) -> None:
    result = show(clocked, "--at", "yesterday")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("groupstate: 'yesterday' names no place in a log; what does: an event's number")


def test_times_drawn_at_random_are_found_as_a_whole_reading_finds_them(run: Path) -> None:
    records, rng = list(read_log(run)), random.Random(1)
    first, last = records[0].at_ns, records[-1].at_ns
    for _ in range(50):
        at_ms = rng.randint(first // 1_000_000, last // 1_000_000 + 1)
        moment = datetime.datetime.fromtimestamp(at_ms / 1e3, datetime.UTC).isoformat(timespec="milliseconds")
        later = [record.seq for record in records if record.at_ns // 1_000_000 > at_ms]

        assert seq_of(run, moment) == (min(later) - 1 if later else records[-1].seq)


def test_check_compares_waypoints_with_the_replay(run: Path, tmp_path: Path) -> None:
    seen = checked(run)
    assert (seen.violations, seen.waypoints) == ((), len(waypoints(run)))
    assert f", {seen.waypoints} waypoints, " in seen.verdict

    copy = Path(shutil.copytree(run, tmp_path / "run"))
    first, second, third = waypoints(copy)[:3]
    path = copy / "log"
    book = replayed(read_log(copy, 1, second + 1))
    book.totals["submitted"] += 1
    disk, place = OsDisk(), RunDir.at(copy)
    log_id = read_run_info(disk, place).log_id
    info = SnapshotInfo(second, book.last_at_ns, book.weight_version, book.lineage)
    write_snapshot(disk, place, log_id, info, encoded(capture_live(book)), WAYPOINT)
    write_snapshot(disk, place, log_id, attrs.evolve(info, seq=third), [(1, b"no state")], WAYPOINT)
    (path / f"{first:020d}.way").write_bytes(b"damaged")
    seen = checked(copy)

    assert [(wrong.invariant, wrong.seq) for wrong in seen.violations] == [(9, second)]
    assert f"the waypoint after event {second} is another book" in str(seen.violations[0])
    assert seen.waypoints == len(waypoints(run)) - 2
