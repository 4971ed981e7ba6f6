"""A run as Parquet tables: every row what the log says, whole or not at all."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.errors import BadInput, MissingExtra
from groupstate.inspect import tables
from groupstate.inspect.columns import TABLES
from groupstate.inspect.tables import MARKER, write_tables
from groupstate.inspect.words import kind_of
from groupstate.log.reading import beginning, read_log
from groupstate.simulate.loop import EPOCH_NS

pq = pytest.importorskip("pyarrow.parquet")

HISTORIES = Path(__file__).parents[1] / "histories" / "v1"
STORIES = sorted(path.name for path in HISTORIES.iterdir() if path.is_dir())
START = ev.RunStarted("run", {}, 1, 0)

Rows = list[dict[str, Any]]
Keep = Callable[..., Path]


def records_of(*events: ev.AnyEvent) -> list[ev.Record]:
    return [ev.Record(seq, EPOCH_NS + seq * 1_000_000_000, event) for seq, event in enumerate(events, 1)]


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., dict[str, Rows]]:
    """The tables of some records, as rows."""

    def tell(records: list[ev.Record], base: Book | None = None) -> dict[str, Rows]:
        folder = tmp_path / "told"
        write_tables(records, folder, base, overwrite=True)
        return read(folder)

    return tell


Tell = Callable[..., dict[str, Rows]]


def read(folder: Path) -> dict[str, Rows]:
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in TABLES}


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def life(group_id: str, *rewards: float, partition: str = "train") -> list[ev.AnyEvent]:
    events: list[ev.AnyEvent] = [ev.GroupSubmitted(group_id, len(rewards), partition, 0, 1, "submit", "math", 7)]
    for session, reward in enumerate(rewards):
        row = ev.TrajectoryRecord(0, {"reward": reward}, 3, 40, (ev.VersionSpan(0, 9, 2), ev.VersionSpan(9, 40, 4)))
        events += [ev.SessionStarted(group_id, session, 1, "w", 2), ev.SessionFinished(group_id, session, 1, (row,))]
    return [*events, ev.GroupFinished(group_id)]


# Whole runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_the_tables_of_any_run_agree_with_its_book(name: str, told: Tell) -> None:
    base, start = beginning(HISTORIES / name)
    records = list(read_log(HISTORIES / name, start))
    book = beginning(HISTORIES / name)[0] or Book()
    for record in records:
        book.apply(record)
    found = told(records, base)
    groups = {row["group_id"]: row["phase"] for row in found["groups"]}

    assert len(groups) == len(found["groups"])
    assert {name: phase for name, phase in groups.items() if phase not in ("evicted", "committed")} == {
        group.group_id: str(group.phase) for group in book.groups.values()
    }
    assert [row["seq"] for row in found["events"]] == [record.seq for record in records]
    assert [row["kind"] for row in found["events"]] == [kind_of(record.event) for record in records]
    assert found["versions"][-1]["weight_version"] == book.weight_version
    assert {row["batch"] for row in found["batches"] if row["batch"] and not row["outcome"]} == set(book.batches)


def test_totals_can_be_counted_from_the_tables(told: Tell) -> None:
    records = list(read_log(HISTORIES / "rollout"))
    totals = replayed(records).totals
    found = told(records)
    outcomes = Counter(row["outcome"] for row in found["sessions"])

    assert len(found["groups"]) == totals["submitted"]
    assert sum(row["phase"] == "evicted" for row in found["groups"]) == totals["evicted"]
    assert sum(row["phase"] == "committed" for row in found["groups"]) == totals["committed"]
    assert outcomes["finished"] == totals["sessions_finished"]
    assert outcomes["error"] == totals["session_failed/error"]
    assert sum(row["response_tokens"] for row in found["sessions"]) == totals["response_tokens"]
    assert sum(row["response_tokens"] for row in found["trajectories"]) == totals["response_tokens"]
    assert sum(row["response_tokens"] + row["dropped_tokens"] for row in found["groups"]) == totals["response_tokens"]
    assert sum(row["batch"] is not None for row in found["batches"]) == totals["batches"]


def test_each_event_has_all_its_fields(told: Tell) -> None:
    records = list(read_log(HISTORIES / "transitions"))
    for row, record in zip(told(records)["events"], records, strict=True):
        for name in record.event.__struct_fields__:
            if name != "trajectories":
                assert name in json.loads(row["fields"]) or row[name] == getattr(record.event, name)


# Rows ------------------------------------------------------------------------------------------------


def test_a_session_is_a_row_for_each_attempt(told: Tell) -> None:
    failed = ev.SessionFailed("a", 0, 1, "error", "boom", 1.5)
    spans = (ev.VersionSpan(0, 9, 2), ev.VersionSpan(9, 40, 4))
    row = ev.TrajectoryRecord(0, {"reward": 1.0, "acc": 0.5}, 3, 40, spans, ((9, 12),))
    found = told(
        records_of(
            START, ev.GroupSubmitted("a", 1, "train", 0, 1, "submit", "math"), ev.SessionStarted("a", 0, 1, "w", 2),
            failed, ev.SessionStarted("a", 0, 2), ev.SessionFinished("a", 0, 2, (row,), ev.PayloadRef(1, 99, 5)),
        )
    )  # fmt: skip
    first, second = found["sessions"]

    assert (first["outcome"], first["message"], first["retry_in_s"], first["worker"]) == ("error", "boom", 1.5, "w")
    assert (first["started_seq"], first["ended_seq"], first["started_s"], first["duration_s"]) == (3, 4, 2.0, 1.0)
    assert (second["attempt"], second["outcome"], second["response_tokens"], second["payload_bytes"]) == (
        2, "finished", 40, 99,
    )  # fmt: skip
    assert (second["environment_tokens"], second["oldest_version"], second["newest_version"]) == (3, 2, 4)
    assert (second["reward"], second["metrics"]) == (1.0, [("reward", 1.0), ("acc", 0.5)])
    assert [(row["attempt"], row["index"], row["environment_tokens"]) for row in found["trajectories"]] == [(2, 0, 3)]


def test_an_attempt_that_never_began_and_one_that_is_open(told: Tell) -> None:
    events = [ev.GroupSubmitted("a", 2, "train", 0, 1, "submit"), ev.SessionFailed("a", 0, 1, "cancelled", "no")]
    refused, begun = told(records_of(START, *events, ev.SessionStarted("a", 1, 1)))["sessions"]

    assert (refused["started_seq"], refused["duration_s"], refused["outcome"]) == (None, None, "cancelled")
    assert (begun["ended_seq"], begun["duration_s"], begun["outcome"], begun["metrics"]) == (None, None, None, None)


def test_a_group_started_over_counts_what_it_dropped(told: Tell) -> None:
    again = [ev.GroupRequeued("a", "told so"), ev.SessionStarted("a", 0, 2)]
    (group,) = told(records_of(START, *life("a", 1.0)[:-1], *again))["groups"]

    assert (group["response_tokens"], group["dropped_tokens"], group["requeues"]) == (0, 40, 1)
    assert (group["attempts"], group["finished_sessions"], group["phase"], group["result"]) == (2, 0, "running", None)


@pytest.mark.parametrize(("version", "stamp"), [(None, 0), (4, 4)])
def test_a_group_whose_prompt_was_dispatched_anew_has_that_stamp(told: Tell, version: int | None, stamp: int) -> None:
    again = ev.GroupRequeued("a", "told so", weight_version=version)
    (group,) = told(records_of(START, *life("a", 1.0)[:-1], again))["groups"]

    assert group["stamp"] == stamp


def test_a_group_has_its_times_rewards_and_end(told: Tell) -> None:
    evicted = ev.GroupEvicted("a", ("stale", "zero_variance"), 4, 2, 0.5, "reward", "told so")
    (group,) = told(records_of(START, *life("a", 0.25, 0.75), evicted))["groups"]

    assert (group["submitted_s"], group["begun_s"], group["ended_s"], group["left_s"]) == (1.0, 2.0, 6.0, 7.0)
    assert (group["queued_s"], group["generated_s"]) == (1.0, 4.0)
    assert (group["reward_mean"], group["reward_min"], group["reward_max"]) == (0.5, 0.25, 0.75)
    assert (group["reasons"], group["lag"], group["credit"]) == (["stale", "zero_variance"], 4, 2)
    assert (group["metric"], group["shared_value"], group["message"]) == ("reward", 0.5, "told so")
    assert (group["phase"], group["result"], group["source_position"]) == ("evicted", "finished", 7)


def test_a_batch_has_its_wait_its_lags_and_its_groups(told: Tell) -> None:
    sampled = ev.BatchSampled(7, 1, "train", ("b", "a"), 3, (1, 4))
    found = told(
        records_of(
            START, *life("a", 1.0), *life("b", 0.0), ev.BatchRequested(1, "train", 2, 3), sampled, ev.BatchCommitted(7)
        )
    )
    (batch,) = found["batches"]

    assert (batch["request"], batch["batch"], batch["outcome"], batch["groups"]) == (1, 7, "committed", 2)
    assert (batch["waited_s"], batch["held_s"], batch["lag_mean"], batch["lag_max"]) == (1.0, 1.0, 2.5, 4)
    assert batch["response_tokens"] == 80
    assert [tuple(row.values()) for row in found["batch_groups"]] == [(7, 0, "b", 1), (7, 1, "a", 4)]


def test_a_wait_that_came_to_nothing_has_no_batch(told: Tell) -> None:
    waits = [ev.BatchRequested(1, "train", 2, 0), ev.BatchRequestCancelled(1, "SampleTimeout")]
    lost = [ev.BatchRequested(2, "train", 2, 0), ev.RunRecovered({}, 1, 0, 2)]
    rows = told(records_of(START, *waits, *lost, ev.BatchRequested(3, "train", 1, 0)))["batches"]

    assert [(row["request"], row["batch"], row["outcome"]) for row in rows] == [
        (1, None, "cancelled"), (2, None, "lost"), (3, None, None),
    ]  # fmt: skip
    assert [row["waited_s"] for row in rows] == [1.0, 0.0, None]


def test_a_commit_that_was_undone_says_so_and_its_groups_go_on(told: Tell) -> None:
    sampled = ev.BatchSampled(1, 1, "train", ("a",), 0, (0,))
    found = told(
        records_of(
            START, *life("a", 1.0), ev.CheckpointMarked(1, 0, 1), ev.BatchRequested(1, "train", 1, 0), sampled,
            ev.BatchCommitted(1), ev.RunRecovered({}, 1, 0, 2), ev.RunRewound(1, 6, 0, 2),
        )
    )  # fmt: skip

    assert [row["outcome"] for row in found["batches"]] == ["undone"]
    assert [(row["phase"], row["left_seq"], row["batch"]) for row in found["groups"]] == [("finished", None, 1)]


def test_versions_have_their_time(told: Tell) -> None:
    rows = told(records_of(START, ev.WeightsPublished(3), ev.RunRecovered({}, 1, 2, 2)))["versions"]

    assert [(row["weight_version"], row["cause"], row["duration_s"]) for row in rows] == [
        (0, "started", 1.0), (3, "published", 1.0), (2, "recovered", None),
    ]  # fmt: skip


def test_many_rows_come_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = list(read_log(HISTORIES / "rollout"))
    write_tables(records, tmp_path / "at once")
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 50)
    monkeypatch.setattr(tables, "LOOKED_AT", 10)
    write_tables(records, tmp_path / "in parts")

    assert pq.ParquetFile(tmp_path / "in parts" / "events.parquet").num_row_groups == -(-len(records) // 50)
    assert read(tmp_path / "in parts") == read(tmp_path / "at once")


def test_columns_have_their_types_and_what_they_mean(tmp_path: Path) -> None:
    write_tables(records_of(START), tmp_path / "tables")
    marker = json.loads((tmp_path / "tables" / MARKER).read_bytes())
    for name, columns in TABLES.items():
        schema = pq.read_schema(tmp_path / "tables" / f"{name}.parquet")

        assert schema.names == [column.name for column in columns]
        assert [field.metadata[b"about"].decode() for field in schema] == [column.about for column in columns]
        assert list(marker["tables"][name]["columns"]) == schema.names
    assert (marker["run_id"], marker["last_seq"]) == ("run", 1)
    assert str(schema.field("began_at").type) == "timestamp[us, tz=UTC]"


# Whole or not at all ---------------------------------------------------------------------------------


def test_the_command_writes_all_tables(driven: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("export", driven, "--parquet", out, "--json")

    assert result.exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([MARKER, *(f"{name}.parquet" for name in TABLES)])
    assert json.loads(result.stdout)["rows"] == {name: len(rows) for name, rows in read(out).items()}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_whose_beginning_is_gone(tmp_path: Path) -> None:
    result = call("export", HISTORIES / "compacted", "--parquet", tmp_path / "out")

    assert result.exit_code == 0
    assert "events before 104 are gone" in result.stderr
    assert read(tmp_path / "out")["events"][0]["seq"] == 104


def test_tables_that_are_there_are_replaced_only_if_asked(driven: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("export", driven, "--parquet", out)
    (out / "more").write_text("more")
    refused = call("export", driven, "--parquet", out)

    assert refused.exit_code == 2
    assert "out is there already" in refused.stderr
    assert call("export", driven, "--parquet", out, "--force").exit_code == 0
    assert not (out / "more").exists()


def test_what_no_export_made_is_never_replaced(driven: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(out)
    for name, text in (("out", "holds something else"), ("file", "is no directory"), ("link", "is no directory")):
        refused = call("export", driven, "--parquet", tmp_path / name, "--force")

        assert refused.exit_code == 2
        assert text in refused.stderr
    assert (out / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"


def test_an_empty_directory_is_filled(driven: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    assert call("export", driven, "--parquet", tmp_path / "out").exit_code == 0


def test_a_damaged_run_leaves_nothing(driven: Path, tmp_path: Path) -> None:
    segment = min((driven / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    (tmp_path / "there").mkdir()
    result = call("export", driven, "--parquet", tmp_path / "there" / "out")

    assert result.exit_code == 2
    assert "is damaged at byte" in result.stderr
    assert list((tmp_path / "there").iterdir()) == []


def test_a_directory_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def records() -> Any:
        yield from records_of(START)
        out.mkdir()
        (out / "thesis.tex").write_text("mine")

    with pytest.raises(BadInput, match="holds something else"):
        write_tables(records(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_run_and_a_folder_that_cant_be_written_to(kept: Keep, tmp_path: Path) -> None:
    empty = call("export", kept(), "--parquet", tmp_path / "out")
    nowhere = call("export", kept(START, name="some"), "--parquet", tmp_path / "nowhere" / "out")
    nothing = call("export", tmp_path / "some")

    assert (empty.exit_code, nowhere.exit_code, nothing.exit_code) == (2, 2, 2)
    assert "has no event yet: nothing to write" in empty.stderr
    assert "can't be written: No such file or directory" in nowhere.stderr
    assert "--parquet" in nothing.stderr
    with pytest.raises(BadInput, match="no events to make tables of"):
        write_tables([], tmp_path / "out")


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    with pytest.raises(MissingExtra, match="install the extra 'parquet'"):
        write_tables(records_of(START), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_what_was_written_is_a_value(tmp_path: Path) -> None:
    written = write_tables(records_of(START, ev.WeightsPublished(1)), tmp_path / "out")

    assert attrs.asdict(written)["rows"]["versions"] == 2


@pytest.mark.parametrize(("folder", "why"), [("none", "No such file or directory"), ("file", "Not a directory")])
def test_a_place_that_can_not_be_written_is_told_by_its_name(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / folder / "tables"

    result = call("export", HISTORIES / "compacted", "--parquet", out)

    assert (result.exit_code, result.stderr) == (2, f"groupstate: {out} can't be written: {why}\n")
