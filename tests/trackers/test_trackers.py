"""The trackers that are here, on their real packages: what they kept is read back from their own files.

The processes are real ones too, and so are the signals.
"""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from groupstate.errors import BadSettings, MissingExtra
from groupstate.integrations import trackers
from groupstate.integrations.trackers import JsonLines, MLflow, TensorBoard, WandB, packages
from tests.trackers.conftest import Forks
from tests.trackers.jobs import STEPS

BACKENDS = ["wandb", "tensorboard", "mlflow", "json lines"]
TABLE = "training/filter_groups/filtered_values"


def status_of(code: int) -> str:
    return "FINISHED" if code == 0 else "KILLED" if code > 128 else "FAILED"


def assert_all_ended(found: dict[str, Any], code: int) -> None:
    """Every tracker was closed, once, with this code."""
    assert {name: kept["codes"] for name, kept in found.items()} == {
        "wandb": [code],
        "tensorboard": [code],
        "mlflow": [{"status": status_of(code), "code": str(code), "has_ended": True}],
        "json lines": [code],
    }


# How runs end ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def success(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("success")
    assert forks.done("async_run", folder, "success") == 0
    assert (folder / "artifacts").exists()
    assert not (folder / "mlruns").exists()
    found: dict[str, Any] = forks.read(folder)
    return found


def test_a_run_that_succeeds_closes_every_tracker(success: dict[str, Any]):
    assert_all_ended(success, 0)


def test_a_run_that_fails_closes_every_tracker(forks: Forks, tmp_path: Path):
    assert forks.done("async_run", tmp_path, "error") == 1

    assert_all_ended(forks.read(tmp_path), 1)


@pytest.mark.parametrize("job", ["async_run", "blocking_run"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_that_nobody_handles_kills_and_closes_every_tracker(
    forks: Forks, tmp_path: Path, job: str, number: signal.Signals
):
    assert forks.signalled(job, tmp_path, "signal", number) == -number

    assert_all_ended(forks.read(tmp_path), 128 + number)


def test_a_run_that_closes_on_a_signal_ends_well_for_every_tracker(forks: Forks, tmp_path: Path):
    assert forks.signalled("async_run", tmp_path, "close_on", signal.SIGTERM) == 0

    assert_all_ended(forks.read(tmp_path), 0)


# What they keep --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_gauges_and_own_numbers_are_there_at_their_steps(success: dict[str, Any], backend: str):
    by_name: dict[str, list[Any]] = {}
    for name, value, step in success[backend]["logged"]:
        by_name.setdefault(name, []).append([step, value])

    assert by_name["training/batch"] == [[0, 1], [1, 2], [2, 3]]
    assert by_name["status/weight_version"] == [[0, 0], [1, 1], [2, 2]]
    assert by_name["loss"] == [[0, 1], [1, 0.5], [2, pytest.approx(1 / 3)]]
    assert len(by_name["training/reward/mean"]) == STEPS


@pytest.mark.parametrize("backend", ["wandb", "mlflow"])
def test_all_keep_the_same_rows_of_filtered_values(success: dict[str, Any], backend: str):
    expected = [row for table in success["json lines"]["tables"] for row in table["rows"]]
    kept = success[backend]["tables"]

    assert len(expected) >= STEPS
    assert {table["name"] for table in kept} == {TABLE}
    assert [row for table in kept for row in table["rows"]] == expected


def test_tensorboard_shows_the_rows_of_each_step_as_a_text(success: dict[str, Any]):
    first = success["json lines"]["tables"][0]
    (kept,) = [table for table in success["tensorboard"]["tables"] if table["step"] == first["step"]]

    rows = [f"| {' | '.join(map(str, row))} |" for row in first["rows"]]
    assert kept["name"] == TABLE
    assert kept["text"].splitlines() == ["| step | value | groups |", "| --- | --- | --- |", *rows]


def test_wandb_draws_everything_over_the_step_and_keeps_increments(success: dict[str, Any]):
    names = {name for name, _, _ in success["wandb"]["logged"]}

    assert {success["wandb"]["over"][name] for name in names} == {"groupstate/step"}
    assert {table["kind"] for table in success["wandb"]["tables"]} == {"incremental-table-file"}


# Used without a run ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def by_hand(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("by_hand")
    assert forks.done("used_by_hand", folder) == 0, (folder / "stderr.txt").read_text()
    found: dict[str, Any] = forks.read(folder)
    return found


def test_a_table_of_many_steps_is_sent_in_pieces_that_stay_small(by_hand: dict[str, Any]):
    steps = [*range(104), 3]
    expected = [[step, value, count] for step in steps for value, count in ((0.5, 1), (1.0, 2))]
    for backend in ("wandb", "mlflow", "json lines"):
        assert [row for table in by_hand[backend]["tables"] for row in table["rows"]] == expected
    sent = by_hand["wandb"]["tables"]
    assert {len(table["rows"]) for table in sent} == {2}
    # A table of W&B costs more with each increment, so a new one is begun.
    assert [table["name"] for table in sent] == ["values"] * 100 + ["values/part-2"] * 5
    assert by_hand["wandb"]["record_bytes_max"] < 20_000
    assert [(table["part"], len(table["rows"])) for table in by_hand["mlflow"]["tables"]] == [
        ("part-1.json", 200),
        ("part-2.json", 10),
    ]


def test_a_step_that_goes_back_is_kept(by_hand: dict[str, Any]):
    for backend in BACKENDS:
        steps = [step for name, _, step in by_hand[backend]["logged"] if name == "odd"]
        assert sorted(steps) == sorted([*range(104), 3])


def test_numbers_that_are_not_finite_reach_every_tracker(by_hand: dict[str, Any]):
    for backend in BACKENDS:
        first, second = (
            next(value for name, value, at in by_hand[backend]["logged"] if (name, at) == ("odd", step))
            for step in (1, 2)
        )
        # MLflow's databases hold the largest number there is in place of infinity.
        assert str(first) in ("nan", "NaN"), backend
        assert str(second) in ("inf", "Infinity", "1.7976931348623157e+308"), backend


def test_a_name_that_mlflow_refuses_is_changed(by_hand: dict[str, Any]):
    names = {name for name, _, _ in by_hand["mlflow"]["logged"]}

    assert "datasets/a_b _c_/sampled" in names
    assert {"_/a/_/b/_/_", "__c", "d/_", "x" * 249} <= names
    assert ["datasets/a+b (c)/sampled", 1.0, 105] in by_hand["json lines"]["logged"]


def test_a_run_of_mlflow_is_gone_on_with_and_anothers_run_of_wandb_is_left_open(forks: Forks, tmp_path: Path):
    assert forks.done("gone_on_with", tmp_path) == 0, (tmp_path / "stderr.txt").read_text()

    kept = forks.read(tmp_path, "read_mlflow")
    assert sorted(kept["logged"]) == [["loss", 1.0, 1], ["loss", 2.0, 0]]
    assert kept["codes"] == [{"status": "FINISHED", "code": "0", "has_ended": True}]
    assert kept["tags"]["who"] == "me"
    others = forks.read(tmp_path, "read_wandb")
    assert others["logged"] == [["loss", 1.0, 1], ["after", 1.0, None]]
    assert others["codes"] == [0]
    # Given to a second run, a tracker of W&B makes a second run there.
    assert len(list((tmp_path / "again" / "wandb").glob("offline-run-*/*.wandb"))) == 2


def test_a_wandb_without_incremental_tables_says_so_once_and_sends_one_a_step(forks: Forks, tmp_path: Path):
    assert forks.done("old_wandb", tmp_path) == 0, (tmp_path / "stderr.txt").read_text()

    tables = forks.read(tmp_path, "read_wandb")["tables"]
    assert [(table["name"], table["kind"], table["rows"]) for table in tables] == [
        ("values", "table-file", [[step, 0.5]]) for step in range(3)
    ]
    assert (tmp_path / "warnings.log").read_text().count("this wandb has no incremental tables") == 1


def test_the_examples_of_the_page_run_with_every_tracker(forks: Forks, tmp_path: Path):
    assert forks.done("examples_of_the_page", tmp_path) == 0, (tmp_path / "stderr.txt").read_text()

    assert (tmp_path / "runs" / "two.jsonl").exists()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


# Without their packages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "module", "text"),
    [
        (lambda: WandB(project="p"), "wandb", r"the tracker WandB needs wandb; .* pip install '.\[wandb\]'"),
        (lambda: TensorBoard("logs"), "tensorboardX", r"TensorBoard needs tensorboardX; .* '.\[tensorboard\]'"),
        (lambda: MLflow("tests"), "mlflow", r"the tracker MLflow needs mlflow-skinny; .* '.\[mlflow\]'"),
    ],
    ids=["wandb", "tensorboard", "mlflow"],
)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, make: Any, module: str, text: str
):
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(packages.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=text):
        make()


class FakeMlflow:
    """As far as an MLflow goes that isn't started."""

    def __init__(self, uri: str) -> None:
        self.get_tracking_uri = lambda: uri


@pytest.mark.parametrize("lacking", ["sqlalchemy", "alembic"])
@pytest.mark.parametrize("uri", ["sqlite:///m.db", "postgresql+psycopg2://host/db", None])
def test_mlflow_with_a_database_names_the_extra_that_has_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, lacking: str, uri: str | None
):
    def some(name: str) -> Any:
        if name == lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return FakeMlflow("sqlite:////somewhere/mlflow.db")

    monkeypatch.setattr(packages.importlib, "import_module", some)
    with pytest.raises(MissingExtra, match=rf"MLflow with a database needs {lacking}; .* '.\[mlflow\]'"):
        MLflow("tests", tracking_uri=uri)
    MLflow("tests", tracking_uri="http://127.0.0.1:5000")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: JsonLines(5), "path is 5; it must be a path"),
        (lambda: JsonLines(""), "path is ''; it must be a path"),
        (lambda: TensorBoard(None), "log_dir is None; it must be a path"),
        (lambda: TensorBoard("logs", flush_s="soon"), "flush_s is 'soon'; it must be a number of seconds"),
        (lambda: MLflow(5), "experiment is 5; it must be a string"),
        (lambda: MLflow("e", run_name=5), "run_name is 5; it must be a string"),
        (lambda: MLflow("e", tracking_uri=5), "tracking_uri is 5; it must be a string"),
        (lambda: MLflow("e", artifact_location=5), "artifact_location is 5; it must be a string"),
        (lambda: MLflow("e", run_id=5), "run_id is 5; it must be a string"),
        (lambda: MLflow("e", tags="a"), "tags is 'a'; it must be a dict of names and texts"),
        (lambda: MLflow("e", tags={"a": 1}), "tag 'a' is 1; it must be a string"),
        (lambda: WandB(run="mine"), "run is 'mine'; it must be what wandb.init gave"),
    ],
)
def test_a_setting_of_a_tracker_that_cannot_be_is_refused_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch, make: Any, text: str
):
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: FakeMlflow("http://127.0.0.1:5000"))
    with pytest.raises(BadSettings, match=text):
        make()


def test_a_package_that_lacks_something_itself_is_not_called_missing(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'protobuf'", name="protobuf")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="protobuf"):
        WandB()


# JSON lines ------------------------------------------------------------------------------------------


def test_json_lines_are_appended_and_can_be_followed(tmp_path: Path):
    path = tmp_path / "inner" / "metrics.jsonl"
    for code in (143, 0):
        lines = JsonLines(path)
        lines.log({"loss": float("-inf")}, 3)
        # Whole lines are in the file at once, not only when it is closed.
        assert json.loads(path.read_text().splitlines()[-1])["metrics"] == {"loss": "-Infinity"}
        lines.log_table("t", ("a", "b"), [(1, "x")], 3)
        lines.finish(code)

    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("at_s") > 1e9 for line in told] == [True] * 6
    assert told[1] == {"step": 3, "table": "t", "columns": ["a", "b"], "rows": [[1, "x"]]}
    assert [line["exit_code"] for line in told if "exit_code" in line] == [143, 0]


def test_a_line_left_in_pieces_stays_one_of_its_own(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"at_s": 1.0, "exit_code": 1}\n{"at_s": 2.0, "met')
    lines = JsonLines(path)
    lines.log({"loss": 1.0}, 3)
    lines.finish(0)

    _, pieces, logged, ended = path.read_text().splitlines()
    assert pieces == '{"at_s": 2.0, "met'
    assert (json.loads(logged)["metrics"], json.loads(ended)["exit_code"]) == ({"loss": 1.0}, 0)


def test_a_line_that_does_not_fit_is_not_there_in_part_and_the_next_ones_are(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.log({"loss": 1.0}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As of a full disk, part of the line is written, and the rest is an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lines.log({f"metric/{number}": 1.0 for number in range(1_000)}, 2)
        assert len(path.read_text().splitlines()) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.log({"loss": 3.0}, 3)
    lines.finish(0)

    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [1, 3, None]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is full")
def test_a_file_whose_end_cannot_be_written_is_closed():
    lines = JsonLines("/dev/full")
    lines.start()
    with pytest.raises(OSError, match="No space left"):
        lines.finish(0)

    assert lines._file is not None
    assert lines._file.closed


def test_json_lines_may_go_into_a_pipe(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines = JsonLines(path)
    lines.log({"loss": 1.0}, 1)
    lines.finish(0)
    told = [json.loads(line) for line in os.read(reader, 65_536).splitlines()]
    os.close(reader)

    assert [line.get("step") for line in told] == [1, None]


def test_every_tracker_is_in_the_public_names():
    assert sorted(trackers.__all__) == ["JsonLines", "MLflow", "TensorBoard", "Tracker", "TrackerState", "WandB"]
