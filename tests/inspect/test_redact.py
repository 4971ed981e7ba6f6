"""A copy for a bug report: nothing of the user's is in its bytes, and it decides what the run decided."""

import json
import platform
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core import prompt, trajectory
from groupstate.core.group import Group, Session
from groupstate.core.phases import Phase
from groupstate.core.snapshot import BookState
from groupstate.errors import LogError
from groupstate.inspect.checking import checked
from groupstate.inspect.redact import MARKER, Redacted, phases_digest, redact
from groupstate.inspect.redaction import DECISIONS, Redactor, redacted_payload, undecided
from groupstate.inspect.replay import books
from groupstate.log.file import FileLog
from groupstate.log.payloads import read_payload
from groupstate.log.reading import beginning, read_log
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.testing import strategies
from tests.inspect import marked
from tests.inspect.marked import marked_run, markers_in

HISTORIES = Path(__file__).parents[1] / "histories" / "v1"
STORIES = sorted(path.name for path in HISTORIES.iterdir() if path.is_dir())
START = ev.RunStarted("0" * 32, {}, 1, 0)

Keep = Callable[..., Path]


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    marked_run(tmp_path / "secret")
    return tmp_path / "secret"


# Nothing is left -------------------------------------------------------------------------------------


def test_no_marker_is_left_in_a_directory(secret: Path, tmp_path: Path) -> None:
    done = redact(secret, tmp_path / "copy")

    assert markers_in(tmp_path / "copy") == set()
    assert done.left_out == (
        "2 payloads that can't be read", "1 snapshot that can't be read", "1 other file in its directory",
    )  # fmt: skip
    assert (done.payloads, done.snapshots) == (2, 1)


def test_no_marker_is_left_in_an_archive(secret: Path, tmp_path: Path) -> None:
    redact(secret, tmp_path / "copy.tar.gz")

    assert markers_in(tmp_path / "copy.tar.gz") == set()


def test_the_look_for_markers_finds_those_of_every_kind(secret: Path) -> None:
    found = "\n".join(markers_in(secret))
    texts = {
        f"{kind.__name__}.{field}"
        for kind, fields in DECISIONS.items()
        if issubclass(kind, ev.Event | Group | Session | BookState)
        for field, action in fields.items()
        if action is not None and field not in ("prompt", "payload", "totals", "windows", "windows_out", "kept")
    }
    parts = ["SECRET prompt", "SECRET of extra", "SECRET text", "SECRET of info", "SECRET torn", "in lock",
             "in run.json", "in readers/1.json", "that is no snapshot", "that is no payload", "packed Session.message",
             "SECRET departed", "SECRET starved", "aside Group.group_id"]  # fmt: skip

    assert {text for text in texts if text not in found} == set()
    assert [part for part in parts if part not in found] == []


def test_neither_the_host_nor_a_path_is_in_a_copy_of_a_run_that_is_open(driven: Path, tmp_path: Path) -> None:
    (driven / "log" / "lock").write_text(json.dumps({"host": platform.node()}))
    redact(driven, tmp_path / "copy")
    copied = b"".join(data for _, data in marked.bytes_of(tmp_path / "copy"))

    assert str(tmp_path).encode() not in copied
    assert json.dumps(platform.node()).encode() not in copied
    assert not (tmp_path / "copy" / "log" / "lock").exists()


def test_every_field_has_a_decision() -> None:
    assert undecided() == {}


def test_a_new_field_or_kind_is_never_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class PromptShown(ev.Event, tag=99, frozen=True):
        prompt_text: str

    monkeypatch.delitem(DECISIONS[ev.RunClosed], "reason")
    monkeypatch.setitem(DECISIONS[ev.BatchCommitted], "later", None)

    assert undecided() == {"RunClosed": {"reason"}, "BatchCommitted": {"later"}}
    with pytest.raises(KeyError):
        Redactor({}).event(PromptShown("the prompt"))


def test_payloads_have_the_fields_that_the_replacement_knows() -> None:
    assert trajectory._Wire.__struct_fields__ == ("prompt_ids", "response_ids", "log_probs", "text", "info")
    assert prompt._Stored.__struct_fields__ == ("content", "extra")


def test_a_payloads_checksum_is_that_of_what_stands_in_its_place(secret: Path, tmp_path: Path) -> None:
    redact(secret, tmp_path / "copy")
    events = [record.event for record in read_log(tmp_path / "copy")]
    before = [record.event for record in read_log(secret)]
    prompts = [event.prompt for event in events if isinstance(event, ev.GroupSubmitted) and event.prompt]
    freed = Redactor({}).ref(ev.PayloadRef(9, 400, 12345))

    assert {read_payload(tmp_path / "copy", ref) for ref in prompts} == {msgspec.msgpack.encode(["prompt-1", {}])}
    crcs = {event.prompt.crc for event in before if isinstance(event, ev.GroupSubmitted) and event.prompt}
    assert crcs.isdisjoint({ref.crc for ref in prompts})
    assert freed == ev.PayloadRef(9, 400, 0)


# The same is decided ---------------------------------------------------------------------------------


def phases(run: Path) -> list[list[Phase]]:
    """Of the groups in the order of their submission, after each event."""
    base, start = beginning(run)
    seen: list[list[Phase]] = []
    for _, book in books(read_log(run, start), base):
        groups = sorted(book.groups.values(), key=lambda group: group.submitted_seq)
        seen.append([*(group.phase for group in groups), *book.departed.values()])
    return seen


@pytest.mark.parametrize("name", STORIES)
def test_every_group_is_in_the_same_phase_after_every_event(name: str, tmp_path: Path) -> None:
    done = redact(HISTORIES / name, tmp_path / "copy")

    assert phases(tmp_path / "copy") == phases(HISTORIES / name)
    assert done.phases == phases_digest(HISTORIES / name) == phases_digest(tmp_path / "copy")


@pytest.mark.parametrize("name", STORIES)
def test_check_has_the_same_verdict(name: str, tmp_path: Path) -> None:
    redact(HISTORIES / name, tmp_path / "copy")
    before, after = checked(HISTORIES / name), checked(tmp_path / "copy")

    assert [(v.invariant, v.seq) for v in after.violations] == [(v.invariant, v.seq) for v in before.violations]
    assert [(one.seq, one.kind) for one in after.cited] == [(one.seq, one.kind) for one in before.cited]
    assert attrs.evolve(after, violations=(), cited=()) == attrs.evolve(before, violations=(), cited=())


@pytest.mark.parametrize("name", STORIES)
def test_times_commits_and_files_of_the_log_stay(name: str, tmp_path: Path) -> None:
    redact(HISTORIES / name, tmp_path / "copy")
    _, start = beginning(HISTORIES / name)

    def told(run: Path) -> list[Any]:
        return [(record.seq, record.at_ns, type(record.event)) for record in read_log(run, start)]

    def files(run: Path) -> list[str]:
        names = (path.name for path in (run / "log").iterdir())
        return sorted(name for name in names if name.endswith((".seg", ".seg.gz", ".snap")))

    assert told(tmp_path / "copy") == told(HISTORIES / name)
    assert files(tmp_path / "copy") == files(HISTORIES / name)


@settings(max_examples=20)
@given(strategies.logs(rules=gs.Rules(filter_metric="acc", lag_max=1)))
def test_any_history_keeps_its_numbers(records: list[ev.Record]) -> None:
    redactor = Redactor({})
    for record in records:
        before, after = record.event, redactor.event(record.event)
        for name, action in DECISIONS[type(before)].items():
            if action is None:
                assert getattr(after, name) == getattr(before, name)


def test_a_snapshot_that_is_wrong_stays_wrong(driven: Path, tmp_path: Path) -> None:
    from groupstate.core.book import Book
    from groupstate.core.snapshot import capture, encoded
    from groupstate.log.disk import OsDisk
    from groupstate.log.rundir import RunDir, read_run_info
    from groupstate.log.snapshots import SnapshotInfo, write_snapshot

    book = Book()
    for record in read_log(driven, 1, 21):
        book.apply(record)
    book.totals["submitted"] += 1
    place = RunDir.at(driven)
    log_id = read_run_info(OsDisk(), place).log_id
    write_snapshot(OsDisk(), place, log_id, SnapshotInfo(20, book.last_at_ns, 0, 1), encoded(capture(book)))
    redact(driven, tmp_path / "copy")

    assert [v.seq for v in checked(driven).violations] == [v.seq for v in checked(tmp_path / "copy").violations] == [20]


def test_ids_that_a_snapshot_has_packed_are_replaced(
    driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupstate.core import departed
    from groupstate.core.folding import replayed
    from groupstate.core.phases import Phase
    from groupstate.core.snapshot import capture, encoded
    from groupstate.log.disk import OsDisk
    from groupstate.log.reading import read_book
    from groupstate.log.rundir import RunDir, read_run_info
    from groupstate.log.snapshots import SnapshotInfo, write_snapshot

    monkeypatch.setattr(departed, "NEWEST_IDS", 1)
    monkeypatch.setattr(departed, "BLOCK_IDS", 2)
    place, book = RunDir.at(driven), replayed(read_log(driven))
    book.departed.update([(f"SECRET{number}", Phase.EVICTED) for number in range(4)])
    info = SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)
    write_snapshot(OsDisk(), place, read_run_info(OsDisk(), place).log_id, info, encoded(capture(book)))
    redact(driven, tmp_path / "copy")
    kept = read_book(tmp_path / "copy")

    assert kept is not None
    assert len(kept.departed._blocks) == len(book.departed._blocks) > 2
    assert list(kept.departed.items())[:-4] == list(replayed(read_log(tmp_path / "copy")).departed.items())
    assert not any("SECRET" in group_id for group_id in kept.departed)


def test_the_copy_has_waypoints_that_are_those_of_its_own_log(driven: Path, tmp_path: Path) -> None:
    from groupstate.core.folding import replayed
    from groupstate.core.snapshot import capture_live, encoded
    from groupstate.log.disk import OsDisk
    from groupstate.log.rundir import RunDir, read_run_info
    from groupstate.log.snapshots import WAYPOINT, SnapshotInfo, snapshot_path, write_snapshot

    place = RunDir.at(driven)
    log_id = read_run_info(OsDisk(), place).log_id
    for seq in (20, 30):
        book = replayed(read_log(driven, 1, seq + 1))
        info = SnapshotInfo(seq, book.last_at_ns, book.weight_version, book.lineage)
        write_snapshot(OsDisk(), place, log_id, info, encoded(capture_live(book)), WAYPOINT)
    Path(snapshot_path(place, 30, WAYPOINT)).write_bytes(b"damaged")
    done = redact(driven, tmp_path / "copy")
    seen = checked(tmp_path / "copy")

    assert (seen.waypoints, seen.violations) == (1, ())
    assert "1 waypoint that can't be read" in done.left_out


def test_show_and_why_tell_of_the_copy(driven: Path, tmp_path: Path) -> None:
    redact(driven, tmp_path / "copy")
    told = call("why", tmp_path / "copy", "g5")

    assert told.exit_code == 0
    assert "zero_variance" in told.stdout
    assert told.stdout == call("why", driven, "g5").stdout
    assert (
        json.loads(call("show", tmp_path / "copy", "--json").stdout)["totals"]
        == json.loads(call("show", driven, "--json").stdout)["totals"]
    )
    assert "boom" in call("log", driven).stdout
    assert "boom" not in call("log", tmp_path / "copy").stdout
    assert "ValueError: error-1" in call("log", tmp_path / "copy").stdout


def test_the_copy_can_be_opened_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rows: list[gs.Trajectory] = []

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        return gs.Trajectory(prompt_ids=[5, 6], response_ids=[7, 8, 9], log_probs=[-1.0] * 3, text="the answer",
                             reward=float(ctx.session))  # fmt: skip

    async def first(loop: VirtualLoop) -> None:
        log = FileLog.create(path, inline=True, durability="os", now_ns=loop.clock_ns)
        prompts = ["the prompt"] * 6
        async with gs.open_run(log=log, source=prompts, session=session, group_size=2, clock_ns=loop.clock_ns) as run:
            await run.commit(await run.sample(2))
            await run.wait_sampleable(2)

    async def second(loop: VirtualLoop) -> None:
        log = FileLog.open(tmp_path / "copy", inline=True, now_ns=loop.clock_ns)
        async with gs.open_run(log=log, clock_ns=loop.clock_ns) as run:
            batch = await run.sample(2)
            assert [group.prompt.content for group in batch.groups if group.prompt] == ["prompt-1", "prompt-1"]
            rows.extend(row.trajectory for group in batch.groups for row in group.rows())
            await run.commit(batch)

    run_virtual(first)
    redact(path, tmp_path / "copy")
    run_virtual(second)

    assert {(row.prompt_ids, row.response_ids, row.log_probs, row.text) for row in rows} == {
        ((0, 0), (0, 0, 0), (0.0, 0.0, 0.0), "answer-1")
    }
    assert checked(tmp_path / "copy").violations == ()


def test_a_copy_that_decides_otherwise_is_not_handed_out(
    driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(redactor: Redactor, event: Any) -> Any:
        lost = isinstance(event, ev.GroupEvicted)
        return ev.AdmissionHeld("") if lost else real(redactor, event)

    real = Redactor.event
    monkeypatch.setattr(Redactor, "event", forgetful)

    with pytest.raises(LogError, match="other phases than in the run"):
        redact(driven, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_digest_of_phases_tells_runs_apart(kept: Keep) -> None:
    group = ev.GroupSubmitted("a", 1, "train", 0, 1, "submit")
    failed = [ev.SessionFailed("a", 0, 1, "error"), ev.GroupFailed("a")]
    ended = [ev.SessionStarted("a", 0, 1), ev.SessionFailed("a", 0, 1, "error"), ev.GroupFailed("a")]
    runs = [kept(START, group, *events, name=f"run {at}") for at, events in enumerate(([], failed[:1], failed, ended))]
    digests = [phases_digest(run) for run in runs]

    assert digests[0] == digests[1]
    assert len({*digests}) == 3


# Tokens ----------------------------------------------------------------------------------------------


def test_the_same_text_gets_the_same_token() -> None:
    redactor = Redactor({})
    failed = [
        ev.SessionFailed("a", 0, 1, "error", text) for text in ("boom", "crash", "boom", "x" * 1_000, "x" * 1_000)
    ]

    assert [redactor.event(event).message for event in failed] == [
        "error-1",
        "error-2",
        "error-1",
        "error-3",
        "error-3",
    ]
    assert redactor.replaced() == {"error": 3, "group": 1}


def test_ids_that_a_run_makes_stay_and_others_are_counted() -> None:
    redactor = Redactor({})
    ids = ["g17", "what is 2 + 2?", "g0x", "group-1", "what is 2 + 2?"]

    assert redactor.groups(ids) == ("g17", "group-1", "group-2", "group-3", "group-1")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("ValueError: my secret", "ValueError: error-1"),
        ("AcmeError: my secret", "error-1"),
        ("EngineDied: http://host:8000 is gone", "EngineDied: error-1"),
        ("no result within session_deadline_s 20", "no result within session_deadline_s 20"),
        ("no result within session_deadline_s 20, says my secret", "error-1"),
        ("", ""),
    ],
)
def test_the_text_of_a_failure_keeps_what_the_library_knows(text: str, after: str) -> None:
    assert Redactor({}).failure(text) == after


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("cancelled", "cancelled"),
        ("SampleTimeout", "SampleTimeout"),
        ("the run closed: SIGTERM", "the run closed: SIGTERM"),
        ("the run closed: my secret", "the run closed: reason-1"),
        ("disk: /home/me/runs is full", "disk: reason-1"),
        ("my secret", "reason-1"),
    ],
)
def test_a_reason_keeps_what_the_library_knows(text: str, after: str) -> None:
    assert Redactor({}).reason(text) == after


def test_rules_keep_their_numbers_and_words() -> None:
    rules = gs.Rules(filter_metric="acc", lag_max=3, selection="my.module:choose",
                     datasets={"mine": gs.PerDataset(lag_max=2)}, admission=gs.Slots(n=4)).to_dict()  # fmt: skip
    told = Redactor({}).rules(rules)

    assert told == {
        **rules,
        "filter_metric": "metric-1",
        "selection": "redacted:selection-1",
        "datasets": {"dataset-1": rules["datasets"]["mine"]},
    }
    assert gs.Rules(**told).lag_max == 3


def test_what_a_source_says_keeps_its_numbers() -> None:
    redactor = Redactor({})
    plain = {"size": 10, "epochs": 2, "shuffle_seed": None, "path": "/home/me/prompts.jsonl"}
    mixed = {"mine": {"name": "mine.jsonl", "kind": "ListSource", "size": 3}}

    assert redactor.details(plain) == {"size": 10, "epochs": 2, "shuffle_seed": None, "key-1": "value-1"}
    assert redactor.details(mixed) == {"dataset-1": {"name": "source-1", "kind": "ListSource", "size": 3}}


def test_a_payload_that_is_neither_is_left_out() -> None:
    for data in (b"\xc1", b"\x01", b"\x91\x01", b"\x81\xa1a\x01"):
        assert redacted_payload(Redactor({}), data) is None


# Whole or not at all ---------------------------------------------------------------------------------


def test_the_command_writes_a_run(driven: Path, tmp_path: Path) -> None:
    result = call("export", driven, "--redact", tmp_path / "copy")

    assert result.exit_code == 0
    assert "phases\tthe same after every event" in result.stdout
    assert "replaced\terror\t1" in result.stdout
    assert call("check", tmp_path / "copy").exit_code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_archive_unpacks_to_the_run(driven: Path, tmp_path: Path) -> None:
    assert call("export", driven, "--redact", tmp_path / "report.tar.gz").exit_code == 0
    assert call("export", driven, "--redact", tmp_path / "again.tgz").exit_code == 0
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        who = {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in archive}
        assert who == {(0, 0, "", "", 0)}
        archive.extractall(tmp_path / "out", filter="data")

    assert call("check", tmp_path / "out" / "report").exit_code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_is_never_replaced_and_a_copy_only_if_asked(driven: Path, tmp_path: Path) -> None:
    copy, mine = tmp_path / "copy", tmp_path / "mine"
    shutil.copytree(driven, mine)
    call("export", driven, "--redact", copy)

    assert call("export", driven, "--redact", copy).exit_code == 2
    assert call("export", driven, "--redact", copy, "--force").exit_code == 0
    refused = call("export", driven, "--redact", mine, "--force")
    assert refused.exit_code == 2
    assert f"it has no {MARKER}" in refused.stderr
    assert (mine / "run.json").exists()


def test_a_copy_inside_of_the_run_is_refused(driven: Path) -> None:
    result = call("export", driven, "--redact", driven / "copy")

    assert result.exit_code == 2
    assert "lies inside of the run" in result.stderr


def test_an_empty_run_and_a_damaged_one_leave_nothing(kept: Keep, driven: Path, tmp_path: Path) -> None:
    segment = min((driven / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    (tmp_path / "there").mkdir()
    for name in ("copy", "copy.tar.gz"):
        damaged = call("export", driven, "--redact", tmp_path / "there" / name)
        empty = call("export", kept(name=f"empty {name}"), "--redact", tmp_path / "there" / name)

        assert (damaged.exit_code, empty.exit_code) == (2, 2)
        assert "is damaged at byte" in damaged.stderr
        assert "has no event yet: nothing to write" in empty.stderr
    assert list((tmp_path / "there").iterdir()) == []


def test_one_of_the_two_forms_must_be_asked_for(driven: Path, tmp_path: Path) -> None:
    for options in ([], ["--parquet", tmp_path / "a", "--redact", tmp_path / "b"]):
        result = call("export", driven, *options)

        assert result.exit_code == 2
        assert "Give one of --parquet DIR and --redact" in result.stderr


def test_a_run_that_is_being_written_can_be_copied(tmp_path: Path) -> None:
    path, done = tmp_path / "run", list[Redacted]()

    async def main() -> None:
        async with gs.open_run(path, group_size=1) as run:
            group = run.submit("the prompt")
            group.start(0).finish(gs.Trajectory(text="the answer", reward=1.0))
            await run.checkpoint()
            run.submit("the second prompt").start(0)
            await run.ledger.log.durable(run.book.last_seq)
            done.append(await anyio.to_thread.run_sync(redact, path, tmp_path / "copy"))

    anyio.run(main)
    assert done[0].payloads == 3
    assert not any(b"the " in data for _, data in marked.bytes_of(tmp_path / "copy" / "payloads"))
    assert checked(tmp_path / "copy").violations == ()
