"""What logs of other versions may look like, and what this version makes of each: golden logs, changed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from groupstate import Rules, open_run
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.snapshot import STATE_VERSION
from groupstate.errors import BadSettings, CorruptLog, GroupstateError, UnsupportedLog
from groupstate.log.file import FileLog
from groupstate.log.reading import beginning, read_log
from groupstate.log.repair import repair
from groupstate.simulate.loop import VirtualLoop, run_virtual
from tests.histories.make import HERE, facts, golden_logs
from tests.histories.rewriting import (
    change_events,
    change_marker,
    change_states,
    segments,
    set_format,
    set_snapshot_format,
)

V1 = HERE / "v1"
ROWS = 4
"""Where a finished session's trajectories stand in its array."""
COMMANDS = (["show"], ["log"], ["why", "math-0"], ["check"])


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(V1 / name, tmp_path / name))


def opened(path: Path, look: Callable[[Any], Any] = lambda run: run.book.last_seq, **options: Any) -> Any:
    """Open a run as its user would, and look at it."""

    async def story(loop: VirtualLoop) -> Any:
        log = FileLog.open(path, inline=True, now_ns=loop.clock_ns)
        async with open_run(log=log, clock_ns=loop.clock_ns, group_size=2, **options) as run:
            return look(run)

    return run_virtual(story)


def refused(path: Path, error: type[GroupstateError] = UnsupportedLog, **options: Any) -> str:
    with pytest.raises(error) as caught:
        opened(path, **options)
    return str(caught.value)


def read(path: Path) -> list[ev.Record]:
    return list(read_log(path, beginning(path)[1]))


def told(path: Path, *command: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, [command[0], str(path), *command[1:]])
    return done.exit_code, done.output


def refused_by_commands(path: Path, *texts: str) -> None:
    for command in COMMANDS:
        code, output = told(path, *command)
        assert code == 2
        for text in texts:
            assert text in output


# Formats ----------------------------------------------------------------------------------------------


def test_a_run_of_a_later_format_is_refused_whatever_else_it_is(tmp_path: Path) -> None:
    path = copied("rollout", tmp_path)
    change_marker(path, version=7, log_id={"a later": "kind of id"})
    text = "is a run of format 7; this version of groupstate reads format 1. Open it with the version that wrote it"

    assert text in refused(path)
    with pytest.raises(UnsupportedLog, match=r"of format 7; .* reads format 1"):
        read(path)
    refused_by_commands(path, text)


@pytest.mark.parametrize("which", [0, -1])
def test_a_segment_of_a_later_format_is_refused(which: int, tmp_path: Path) -> None:
    path = copied("sync_mode", tmp_path)
    file = segments(path)[which]
    file.write_bytes(set_format(file.read_bytes(), 2))
    texts = f"{file} is of format 2, ", "reads format 1, "

    assert all(text in refused(path) for text in texts)
    with pytest.raises(UnsupportedLog, match=r"of format 2, .* reads format 1, "):
        read(path)
    refused_by_commands(path, *texts)


def test_a_payload_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = copied("rollout", tmp_path)
    file = max((path / "payloads").glob("*.pay"))
    file.write_bytes(set_format(file.read_bytes(), 2))

    assert f"{file} is a payload file of format 2; this version of groupstate reads format 1" in refused(path)
    assert read(path)


# Events -----------------------------------------------------------------------------------------------


def test_a_kind_of_event_that_is_not_known_is_refused_by_its_number(tmp_path: Path) -> None:
    path = copied("sync_mode", tmp_path)
    change_events(path, lambda event: [199, "later"] if event[0] == 63 else event)
    text = "has event kind 199, which this version of groupstate doesn't know: a newer one wrote it"

    assert text in refused(path)
    with pytest.raises(UnsupportedLog, match="event kind 199"):
        read(path)
    for command in COMMANDS:
        code, output = told(path, *command)
        assert (code, text in output) == (2, True)


def appended(event: list[Any]) -> list[Any]:
    """With one more field than this version knows, in the event and in its parts."""
    kind = next(kind for kind in ev.EVENT_TYPES if kind.__struct_config__.tag == event[0])
    added_since = msgspec.structs.fields(kind)[len(event) - 1 :]
    longer = [*event, *(field.default for field in added_since), {"of": "the future"}]
    if event[0] == 41 and len(event) > ROWS:
        longer[ROWS] = [[*_whole_row(row), "later"] for row in event[ROWS]]
    return longer


def _whole_row(row: list[Any]) -> list[Any]:
    """With the fields that came since, at their defaults, and one more in each span."""
    added_since = msgspec.structs.fields(ev.TrajectoryRecord)[len(row) :]
    return [*row[:4], [[*span, 7] for span in row[4]], *row[5:], *(field.default for field in added_since)]


def cut_to_required(event: list[Any]) -> list[Any]:
    """Without the fields at the end that are at their defaults."""
    kind = next(kind for kind in ev.EVENT_TYPES if kind.__struct_config__.tag == event[0])
    decoded = msgspec.convert(event, kind)
    plain = msgspec.to_builtins
    fields = msgspec.structs.fields(kind)
    while len(event) > 1 and not fields[len(event) - 2].required:
        field = fields[len(event) - 2]
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if plain(getattr(decoded, field.name)) != plain(default):
            break
        event = event[:-1]
    return event


@pytest.mark.parametrize("change", [appended, cut_to_required])
@pytest.mark.parametrize("name", [path.name for path in golden_logs()])
def test_fields_that_are_not_known_are_passed_over_and_those_that_lack_are_at_their_defaults(
    name: str, change: Callable[[list[Any]], list[Any]], tmp_path: Path
) -> None:
    path = copied(name, tmp_path)
    before = [file.stat().st_size for file in segments(path)]
    change_events(path, change)

    assert [file.stat().st_size for file in segments(path)] != before
    assert read(path) == read(V1 / name)
    assert facts(path) == facts(V1 / name)


def test_a_repaired_log_that_ends_within_a_commit_keeps_what_only_a_later_version_knows(tmp_path: Path) -> None:
    path = copied("lineages", tmp_path)
    change_events(path, appended)
    repair(path, tmp_path / "new", keep_until=2)

    assert read(tmp_path / "new") == read(V1 / "lineages")[:2]
    seen = []
    change_events(tmp_path / "new", lambda event: seen.append(event) or event)  # type: ignore[func-returns-value]
    assert [event[-1] for event in seen] == [{"of": "the future"}] * 2


# Rules ------------------------------------------------------------------------------------------------


def with_rules(path: Path, **more: Any) -> None:
    """The log's rules as a later version, 9.1.0, wrote them."""
    version = more.pop("rules_version", 1)
    at = {1: (2, 3, 6), 6: (1, 2, 6)}

    def change(event: list[Any]) -> list[Any]:
        if event[0] not in at:
            return event
        rules, number, library = at[event[0]]
        event = list(event)
        event[rules], event[number], event[library] = {**event[rules], **more}, version, "9.1.0"
        return event

    change_events(path, change)
    change_states(path, lambda state: {**state, "rules": {**state["rules"], **more}, "rules_version": version})


ADVICE = "Groupstate 9.1.0 wrote them, and this is "


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"patience": {"days": 3}}, "the rules in the log has no setting 'patience'"),
        ({"on_stale": "age"}, "the rules in the log: on_stale is 'age'"),
        ({"admission": {"kind": "tidal"}}, "the rules in the log: admission"),
        ({"rules_version": 2}, "of version 2, and this version of groupstate knows rules up to version 1"),
    ],
)
@pytest.mark.parametrize("name", ["sync_mode", "rollout"])
def test_rules_of_a_later_version_are_refused_until_others_are_given(
    name: str, more: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = copied(name, tmp_path)
    with_rules(path, **more)
    said = refused(path, BadSettings)

    assert text in said
    assert ADVICE.lower() in said.lower()
    assert "or give it rules: open_run(rules=...)" in said
    for command in (
        ["show"],
        ["show", "--json"],
        ["log"],
        ["log", "--json"],
        ["why", "math-0" if name == "rollout" else "p0"],
    ):
        code, output = told(path, *command)
        assert code == 0, output
    assert opened(path, rules=Rules(lag_max=3)) > 0
    assert opened(path) > 0


def test_show_names_the_settings_that_only_a_later_version_knows(tmp_path: Path) -> None:
    path = copied("sync_mode", tmp_path)
    with_rules(path, patience=3)

    assert "patience 3" in told(path, "show")[1].replace("\n", " ")


def test_rules_that_say_how_groups_are_kept_must_be_known(tmp_path: Path) -> None:
    path = copied("sync_mode", tmp_path)
    with_rules(path, basis="median_token")
    text = "the log's rules count lag from 'median_token' (basis), which this version of groupstate doesn't know"

    assert text in refused(path)
    assert text in refused(path, rules=Rules())
    assert told(path, "show")[0] == 2
    assert text in told(path, "show")[1]
    assert told(path, "log")[0] == 0


# Snapshots --------------------------------------------------------------------------------------------


def later_states(path: Path) -> None:
    change_states(path, lambda state: {**state, "version": STATE_VERSION + 1, "totals": "of another type"})


def later_snapshots(path: Path) -> None:
    for file in (path / "log").glob("*.snap"):
        file.write_bytes(set_snapshot_format(file.read_bytes(), 2))


LATER = {
    later_states: (
        f"its state is of version {STATE_VERSION + 1}; this version of groupstate reads up to version {STATE_VERSION}",
    ),
    later_snapshots: ("is a snapshot of format 2; this version of groupstate reads format 1",),
}
later = pytest.mark.parametrize("make_later", LATER, ids=lambda change: change.__name__)


@later
def test_snapshots_of_a_later_version_are_passed_over_where_the_events_are_there(
    make_later: Callable[[Path], None], tmp_path: Path
) -> None:
    path = copied("rollout", tmp_path)
    make_later(path)

    assert facts(path) == facts(V1 / "rollout")
    for command in COMMANDS:
        code, output = told(path, *command)
        assert code == 0, output
    assert opened(path, lambda run: run.book.openings) == 4


@later
def test_where_the_events_are_gone_a_snapshot_of_a_later_version_is_refused(
    make_later: Callable[[Path], None], tmp_path: Path
) -> None:
    path = copied("compacted", tmp_path)
    make_later(path)

    for text in (*LATER[make_later], "Open the run with the version that wrote it, or a later one"):
        assert text in refused(path)
    with pytest.raises(UnsupportedLog, match="and the events before event 102 are gone"):
        read(path)
    for command in (["why", "g7"], ["check"]):
        code, output = told(path, *command)
        assert code == 2
        assert LATER[make_later][0] in output


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a body that was cut": lambda data: data[:90],
    "a header that was cut": lambda data: data[:40],
    "a flipped bit in the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "another packing": lambda data: set_snapshot_format(data, 1, packing=9),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_snapshot_that_is_only_damaged_is_damage(damage: str, tmp_path: Path) -> None:
    path, whole = copied("compacted", tmp_path), copied("rollout", tmp_path)
    for file in [*(path / "log").glob("*.snap"), *(whole / "log").glob("*.snap")]:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))

    assert opened(whole, lambda run: run.book.openings) == 4
    with pytest.raises(CorruptLog, match="no snapshot of them can be read"):
        read(path)
    assert "a segment before it is missing" in refused(path, CorruptLog)


def test_a_snapshot_whose_parts_make_no_sense_is_damage(tmp_path: Path) -> None:
    path = copied("compacted", tmp_path)
    change_states(path, lambda state: {**state, "marks": 7})

    with pytest.raises(CorruptLog, match="no snapshot of them can be read"):
        read(path)


def test_the_snapshot_before_the_one_that_a_later_version_wrote_is_taken(tmp_path: Path) -> None:
    path = copied("compacted", tmp_path)
    newest = max((path / "log").glob("*.snap"))
    kept = {file: file.read_bytes() for file in (path / "log").glob("*.snap") if file != newest}
    later_states(path)
    for file, data in kept.items():
        file.write_bytes(data)

    assert opened(path, lambda run: run.book.totals["committed"]) == 8
    assert told(path, "show")[0] == 0


@pytest.mark.parametrize("lacking", ["rules_version", "uses", "mark_seqs", "targets"])
def test_a_snapshot_of_an_older_version_lacks_fields_and_is_read(lacking: str, tmp_path: Path) -> None:
    path = copied("compacted", tmp_path)
    change_states(path, lambda state: {name: value for name, value in state.items() if name != lacking})
    base, start = beginning(path)

    assert isinstance(base, Book)
    assert start == base.last_seq + 1
