"""The commands, called in this process; what they say in a pipe, in a terminal, and when it can't be done."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from groupstate.cli import main
from groupstate.cli.runs import records_of
from groupstate.cli.sections import overview_sections
from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.inspect.checking import Checked
from groupstate.inspect.overview import overview

Kept = Callable[..., Path]
STARTED = ev.RunStarted("r", {}, RULES_VERSION, 0, library="0.1")
TERMINAL = {"FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm-256color"}


def call(*args: Any, **env: str) -> Result:
    result = CliRunner(env=env).invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines(*args: Any) -> list[str]:
    result = call(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def submit(name: str, n: int = 1) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, n, ev.TRAIN, 0, 1, "submit")


# log -----------------------------------------------------------------------------------------------------


def test_events_are_printed_one_per_line_with_tabs(kept: Kept) -> None:
    run = kept(STARTED, submit("a"), ev.SessionFailed("a", 0, 1, "error", "boom\n\x1b[31mred\tend"))

    assert lines("log", run) == [
        "1\t2023-11-14T22:13:21.000Z\trun_started\trun r, version 0, seed 0, groupstate 0.1",
        "2\t2023-11-14T22:13:22.000Z\tgroup_submitted\ta: 1 session, train, version 0, by submit",
        "3\t2023-11-14T22:13:23.000Z\tsession_failed\ta/0: attempt 1, error: boom [31mred end",
    ]


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (["--from", 3, "--to", 4], [3, 4]),
        (["--limit", 2], [1, 2]),
        (["--kind", "group_submitted", "--kind", "RunStarted"], [1, 2, 3]),
        (["--group", "b"], [3, 6, 8, 9]),
        (["--group", "b", "--from", 8], [8, 9]),
        (["--group", "b", "--kind", "batch_committed", "--limit", 1], [9]),
        (["--from", 12], []),
        (["--group", "a", "--from", 12], []),
        (["--group", "a", "--kind", "batch_sampled"], []),
        (["--follow", "--limit", 3], [1, 2, 3]),
        (["--follow", "--to", 2], [1, 2]),
        (["--follow", "--from", 8, "--to", 9], [8, 9]),
    ],
)
def test_what_is_wanted_of_a_log(kept: Kept, options: list[Any], seqs: list[int]) -> None:
    run = kept(
        STARTED, submit("a"), submit("b"), ev.SessionFailed("a", 0, 1, "error"), ev.GroupFailed("a"),
        ev.SessionStarted("b", 0, 1), ev.WeightsPublished(1),
        ev.BatchSampled(1, 1, ev.TRAIN, ("b",), 1, (1,)), ev.BatchCommitted(1), ev.BatchCommitted(2), ev.RunClosed(),
    )  # fmt: skip

    assert [int(line.split("\t")[0]) for line in lines("log", run, *options)] == seqs


@pytest.mark.parametrize("options", [[], ["--json"], ["--kind", "group_evicted"], ["--to", 3], ["--from", 2]])
def test_the_log_of_a_group_that_there_is_not_is_refused_with_ids_that_are_near(kept: Kept, options: list[Any]) -> None:
    run = kept(STARTED, submit("g1"), submit("g10"))
    result = call("log", run, "--group", "g11", *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "groupstate: cannot print its events: group 'g11' is not in the book; this log never submitted it; "
        "did you mean 'g1' or 'g10'?\n"
    )


@pytest.mark.parametrize("options", [[], ["--group", "a"], ["--json", "--to", 60]])
def test_an_event_that_the_log_does_not_reach_is_refused_with_the_last_one(kept: Kept, options: list[Any]) -> None:
    run = kept(STARTED, submit("a"))
    result = call("log", run, "--from", 50, *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"groupstate: {run} has no event 50 yet: its last one is event 2\n"


def test_the_log_of_a_run_without_events_is_empty_and_reaches_nothing(kept: Kept) -> None:
    run = kept()

    assert lines("log", run) == []
    assert call("log", run, "--from", 5).stderr == f"groupstate: {run} has no event 5 yet: it has none\n"


def test_json_lines_have_every_field(kept: Kept) -> None:
    run = kept(STARTED, ev.BatchRequested(1, ev.TRAIN, 4, 0))

    assert json.loads(lines("log", run, "--json")[1]) == {
        "seq": 2,
        "at_ns": 1_700_000_002_000_000_000,
        "kind": "batch_requested",
        "request": 1,
        "partition": "train",
        "size": 4,
        "weight_version": 0,
    }


def test_a_terminal_gets_colours(kept: Kept) -> None:
    run = kept(STARTED, submit("[bold]a"))
    out = call("log", run, **TERMINAL).stdout

    assert "\x1b[32mgroup_submitted" in out
    assert "[bold]a: 1 session" in out, "an id isn't markup"
    assert "\t" not in out


def test_an_unknown_kind_is_refused(driven: Path) -> None:
    result = call("log", driven, "--kind", "group_evictd")

    assert result.exit_code == 2
    assert result.stderr.startswith("groupstate: there is no event kind 'group_evictd'; did you mean 'group_evicted'")


# show ----------------------------------------------------------------------------------------------------


def test_show_in_a_pipe_begins_each_line_with_its_section(driven: Path) -> None:
    out = lines("show", driven)

    assert "run\tstate\tclosed" in out
    assert "run\trules\tbatch_size 3, lag_max 1, filter_metric reward" in out
    assert "# groups\tpartition\tpending\trunning\tfinished\tfailure\tsampled\tsampleable" in out
    assert "totals\tevicted/zero_variance\t1" in out
    assert [line.split("\t")[1:4:2] for line in out if line.startswith("marks")] == [["1", "0"]]


def test_show_of_an_open_run_says_what_is_waited_for(kept: Kept) -> None:
    row = (ev.TrajectoryRecord(0, {}),)
    several = [submit(f"g{number}", 2) for number in range(10)]
    run = kept(
        STARTED, submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, row), ev.GroupFinished("a"),
        ev.BatchRequested(1, ev.TRAIN, 1, 0), ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)),
        ev.GroupSubmitted("d", 2, ev.TRAIN, 0, 1, "submit", "math"), ev.SessionFailed("d", 0, 1, "error"),
        ev.SessionFailed("d", 1, 1, "error"), ev.GroupFailed("d"), ev.GroupEvicted("d", ("empty",), 0, 1),
        *several, ev.SessionStarted("g0", 1, 1), ev.BatchRequested(2, ev.TRAIN, 4, 0), ev.SourceExhausted("s", 0),
        ev.WeightsPublished(1),
    )  # fmt: skip
    out = lines("show", run)

    assert "run\tstate\topen, or its process is gone" in out
    assert "run\tsource\t0 prompts drawn, exhausted" in out
    assert "waiting\t2\ttrain\t4\t2.000 s" in out
    assert "why it waits\ttrain\t0 of 4 groups are sampleable" in out
    assert "with the trainer\t1\ttrain\t0\ta\t0" in out
    assert "in flight\tg0\trunning\t1\t13.000 s\t3.000 s\t1\t0" in out
    assert "in flight\tand 2 more\t\t\t\t\t\t" in out
    assert "refills owed\td\t2" in out
    assert "datasets\tmath\t1 evicted and 1 submitted" in out


def test_show_says_how_long_an_open_run_has_written_nothing(kept: Kept) -> None:
    run = kept(STARTED, submit("a"))
    seen = overview(records_of(run))
    now_ns = seen.header.at_ns + 90 * 1_000_000_000

    assert ("last event", "1 min 30 s ago") in overview_sections(seen, now_ns)[0].rows
    assert "last event" not in dict(overview_sections(seen, seen.header.at_ns - 1)[0].rows)  # a clock that went back
    assert any(line.startswith("run\tlast event\t") and line.endswith(" ago") for line in lines("show", run))
    assert not any("last event" in line for line in lines("show", run, "--at", "1"))


def test_a_closed_run_is_not_waited_for(kept: Kept) -> None:
    assert not any("last event" in line for line in lines("show", kept(STARTED, submit("a"), ev.RunClosed())))


def test_show_as_a_table_and_as_json(driven: Path) -> None:
    assert "│ evicted/zero_variance │ 1" in call("show", driven, **TERMINAL).stdout
    seen = json.loads(call("show", driven, "--json").stdout)

    assert seen["header"]["run_id"] == "0123456789abcdef" * 2
    assert seen["partitions"][0]["phases"]["finished"] == 6


def test_show_says_which_commits_the_batches_are_counted_by(kept: Kept) -> None:
    events = [
        submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0),)),
        ev.GroupFinished("a"), ev.BatchRequested(1, ev.TRAIN, 1, 0),
        ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)), ev.BatchCommitted(1),
    ]  # fmt: skip
    back = [ev.RunRecovered({}, RULES_VERSION, 0, 1), ev.RunRewound(1, 2, 0, 2)]
    out = lines("show", kept(STARTED, ev.CheckpointMarked(1, 0, 1), *events, *back))

    assert "totals\tbatches_committed\t1\tcommits of all partitions, those that were undone among them" in out
    assert [line for line in out if line.startswith("totals\tcommitted")] == []


def test_show_at_an_event(driven: Path) -> None:
    assert json.loads(call("show", driven, "--at", 3, "--json").stdout)["header"]["seq"] == 3
    result = call("show", driven, "--at", 9999)

    assert result.exit_code == 2
    assert "there is no event 9999: the log has events 1 to" in result.stderr


# why -----------------------------------------------------------------------------------------------------


def test_why_tells_what_happened_to_a_group(driven: Path) -> None:
    out = lines("why", driven, "g3")

    assert out[0] == "# g3\tevent\ttime\tkind\twhat happened"
    assert any("session 1 failed (error) after 0.500 s: ValueError: boom [31mred" in line for line in out)
    assert any("evicted, failed: 1 of 2 sessions failed; it earned 1 refill" in line for line in out)
    assert out[-2:] == [
        "g3\tnow\tevicted: it has left the book",
        "g3\theld up by\tsession 1 ended last, 0.250 s after the one before it",
    ]


def test_why_as_json_and_as_a_table(driven: Path) -> None:
    told = json.loads(call("why", driven, "g5", "--json").stdout)

    assert told["phase"] == "evicted"
    assert told["steps"][-2]["kind"] == "group_evicted"
    assert "│ held up by │ session 1 ended last" in call("why", driven, "g5", **TERMINAL).stdout


def test_why_of_an_unknown_group_names_near_ones(driven: Path) -> None:
    result = call("why", driven, "gg5")

    assert result.exit_code == 2
    assert "group 'gg5' is not in the book; this log never submitted it; did you mean 'g5'" in result.stderr


def test_why_tells_of_a_batch(driven: Path) -> None:
    out = lines("why", driven, "--batch", 2)

    assert out[0].startswith("batch 2\tsampled\tat event ")
    assert "# taken\tplace\tgroup\tversion\tsubmitted\tended\tlag\tlag_max\twith" in out
    assert [line.split("\t")[2] for line in out if line.startswith("taken")] == ["g6", "g7", "g8"]
    assert any(line.startswith("evicted since the last batch\t") and "\tg5\tbefore\tzero_var" in line for line in out)
    told = json.loads(call("why", driven, "--batch", 2, "--json").stdout)
    assert [group["group_id"] for group in told["taken"]] == ["g6", "g7", "g8"]


def test_why_tells_of_a_wait(driven: Path) -> None:
    (asked, *_) = [line.split("\t")[0] for line in lines("log", driven, "--kind", "batch_requested")]
    out = lines("why", driven, "--wait", asked)

    assert out[0] == f"wait\trequest\t1: 3 groups of train, since event {asked}"
    assert "wait\twaits for\t0 of 3 groups are sampleable" in out
    assert out[-1].endswith("it got batch 1 of 3 groups: g1, g2 and g4")
    assert json.loads(call("why", driven, "--wait", asked, "--json").stdout)["then"]["needed"] == 3


def test_why_of_a_wait_that_never_ended_says_what_would_end_it(kept: Kept) -> None:
    several = [submit(f"g{number}", 2) for number in range(30)]
    run = kept(STARTED, ev.BatchRequested(1, ev.TRAIN, 40, 0), *several, ev.BatchRequested(2, ev.TRAIN, 1, 0))
    out = lines("why", run, "--wait", 33)

    assert "wait\tbehind\trequest 1, which came before" in out
    assert "meanwhile\tand 11 before\t\t\t\t\t" in lines("why", run, "--wait", 3)
    assert "in flight then\tg0\tpending\t0\t30.000 s\tsession 0 and 1 to begin" in out
    assert "in flight then\tand 22 more\t\t\t\t" in out
    assert "end\twaits for\t0 of 40 groups are sampleable" in out
    assert "end\tended\tafter 0.000 s: it waits still, at the end of the log" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "Give one of GROUP, --batch and --wait."),
        (["g1", "--batch", 1], "Give one of GROUP, --batch and --wait."),
        (["--batch", 9], "cannot tell of batch 9: it was never sampled; the log's last one is batch 2"),
        (["--wait", 1], "no sample() waited at event 1; one waits from event "),
        (["--wait", 9999], "there is no event 9999"),
    ],
)
def test_why_of_what_there_is_not_is_refused(driven: Path, options: list[Any], text: str) -> None:
    result = call("why", driven, *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


# check ---------------------------------------------------------------------------------------------------


def test_check_of_a_good_log(driven: Path) -> None:
    (line,) = lines("check", driven)

    assert line.endswith("events, 10 invariants: nothing is wrong")
    assert json.loads(call("check", driven, "--json").stdout)["violations"] == []


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((1, 0, 0), "1 event, 10 invariants: nothing is wrong"),
        ((9, 1, 1), "9 events, 1 snapshot, 1 waypoint, 10 invariants: nothing is wrong"),
        ((9, 2, 3), "9 events, 2 snapshots, 3 waypoints, 10 invariants: nothing is wrong"),
    ],
)
def test_a_verdict_counts_one_as_one(counts: tuple[int, int, int], text: str) -> None:
    events, snapshots, waypoints = counts

    assert Checked(events, 1, snapshots, 10, (), waypoints=waypoints).verdict == text


def test_check_prints_what_is_wrong_one_per_line(kept: Kept) -> None:
    run = kept(STARTED, submit("a", 2), ev.SessionStarted("a", 0, 1), ev.GroupFinished("a"))
    result = call("check", run)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == (
        "event 4: invariant 1: group 'a' becomes finished although session 0 has not ended: attempt 1 is its latest"
    )
    as_json = call("check", run, "--json")
    assert as_json.exit_code == 1
    assert [place["invariant"] for place in json.loads(as_json.stdout)["violations"]] == [1, 9]
    assert [place["witness"] for place in json.loads(as_json.stdout)["violations"]] == [[3, 4], [3, 4]]
    assert [event["kind"] for event in json.loads(as_json.stdout)["cited"]] == ["session_started", "group_finished"]


def test_check_tells_the_events_that_cannot_all_be_true(kept: Kept) -> None:
    row = (ev.TrajectoryRecord(0, {}),)
    run = kept(
        STARTED, submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, row), ev.GroupFinished("a"),
        ev.BatchRequested(1, ev.TRAIN, 1, 0), ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)),
        ev.BatchRequested(2, ev.TRAIN, 1, 0), ev.BatchSampled(2, 2, ev.TRAIN, ("a",), 0, (0,)),
    )  # fmt: skip

    assert call("check", run).stdout.splitlines()[:3] == [
        "event 9: invariant 4: batch 2 takes group 'a', which batch 1 holds since event 7",
        "\tevent 7\tbatch_sampled\tbatch 1 for request 1, train, version 0: a (lag 0)",
        "\tevent 9\tbatch_sampled\tbatch 2 for request 2, train, version 0: a (lag 0)",
    ]


def test_each_thing_that_is_wrong_has_its_own_events_below_it(kept: Kept) -> None:
    twice = [submit("a"), submit("a")]
    out = call("check", kept(STARTED, *twice, ev.GroupEvicted("x", ("failed",), 0, 0))).stdout.splitlines()

    assert [line.split("\t")[1] if line.startswith("\t") else line.split(":")[0] for line in out] == [
        "event 3", "event 2", "event 3",
        "event 3", "event 2", "event 3",
        "event 4", "event 4",
    ]  # fmt: skip


def test_check_of_a_damaged_log_names_the_place(driven: Path) -> None:
    (segment,) = (driven / "log").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    result = call("check", driven)

    assert result.exit_code == 2
    assert f"{segment} is damaged at byte" in result.stderr
    assert "Traceback" not in result.output


def test_a_run_without_events_has_nothing_to_check(kept: Kept) -> None:
    result = call("check", kept())

    assert (result.exit_code, "has no event yet" in result.stderr) == (2, True)


def test_show_of_a_log_that_cannot_be_true_points_to_check(kept: Kept) -> None:
    result = call("show", kept(STARTED, ev.GroupFinished("a")))

    assert result.exit_code == 2
    assert "`groupstate check` lists everything" in result.stderr


# Paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["log"], ["log", "--follow"], ["show"], ["check"]])
def test_a_path_that_is_no_run_names_the_runs_beneath(driven: Path, command: list[str]) -> None:
    (driven.parent / "x" / "y").mkdir(parents=True)
    driven.rename(driven.parent / "x" / "y" / "z")
    result = call(*command, driven.parent)

    assert result.exit_code == 2
    assert result.stderr.endswith(f"Runs beneath it: {driven.parent / 'x' / 'y' / 'z'}\n")


def test_a_path_with_no_run_anywhere_near(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"d{number}").mkdir()

    assert call("show", tmp_path).stderr.endswith("A run directory is made when a run is created\n")
    assert "doesn't exist" in call("show", tmp_path / "nowhere").stderr


@pytest.mark.parametrize("command", ["log", "show", "check", "report", "trace", "repair", "disk", "stats", "whatif"])
def test_a_misspelt_path_names_the_run_beside_it(driven: Path, command: str) -> None:
    meant = driven.rename(driven.with_name("async"))
    (driven.parent / "asynk").mkdir()
    options = {"trace": ["-o", "x.json"], "whatif": ["--set", "lag_max=1"]}.get(command, [])
    result = call(command, driven.with_name("asyn"), *options)

    assert result.exit_code == 2
    assert result.stderr.endswith(f"the one that holds run.json; did you mean {str(meant)!r}?\n")


def test_a_run_whose_marker_is_spoilt_is_not_taken_for_a_misspelt_one(driven: Path) -> None:
    spoilt = driven.with_name("drive")
    spoilt.mkdir()
    (spoilt / "run.json").write_text("{")

    assert "did you mean" not in call("show", spoilt).stderr


def test_a_folder_of_runs_names_them_once(driven: Path) -> None:
    assert call("show", driven.parent).stderr.count("driven") == 1


# scenario, demo ------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Puts a module with one function in place; returns the list of what it is called with."""

    def put(module: str, function: str, result: Any) -> list[Any]:
        calls: list[Any] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return result

        stand_in = types.ModuleType(module)
        setattr(stand_in, function, called)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return put


@pytest.mark.parametrize("code", [0, 1, 2])
def test_scenarios_give_their_exit_code(fake: Callable[..., list[Any]], code: int) -> None:
    calls = fake("groupstate.simulate.scenario", "main_paths", code)

    assert call("scenario", "a.toml", "b").exit_code == code
    assert calls == [(((Path("a.toml"), Path("b")),), {})]


def test_the_form_of_scenarios_is_printed() -> None:
    result = call("scenario", "--schema")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "groupstate scenario"


def test_scenarios_are_named() -> None:
    result = call("scenario")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing argument 'PATH...'" in result.stderr


def test_the_demo_gets_its_options(fake: Callable[..., list[Any]]) -> None:
    calls = fake("groupstate.demo.main", "demo", None)

    assert call("demo", "--mode", "sync", "--steps", 3, "--seed", 7, "--out", "d", "--resume").exit_code == 0
    assert calls == [((), {"mode": "sync", "steps": 3, "seed": 7, "engine": None, "out": Path("d"), "resume": True})]


def test_the_demo_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "groupstate.demo.main", None)
    result = call("demo")

    assert result.exit_code == 2
    assert "pip install '.[demo]'" in result.stderr


# Around them ---------------------------------------------------------------------------------------------


def test_help_has_examples_and_exit_codes() -> None:
    text = call("--help").stdout

    assert "Exit codes:" in text
    assert "groupstate why runs/demo g17" in text
    for command in ("log", "show", "why", "check", "scenario", "demo"):
        assert "Examples:\n    groupstate" in call(command, "--help").stdout


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(PermissionError(13, "no", "f"), 2, "groupstate: [Errno 13] no: 'f'\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_goes_wrong_outside_is_no_traceback(
    driven: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def refuse(*args: object) -> object:
        raise error

    monkeypatch.setattr("groupstate.cli.looking.records_of", refuse)
    result = call("check", driven)

    assert (result.exit_code, result.stderr) == (code, text)


@pytest.mark.parametrize(("reason", "state"), [("NotEnoughGroups", "closed: NotEnoughGroups"), ("closed", "closed")])
def test_show_says_what_a_run_was_closed_with(kept: Kept, reason: str, state: str) -> None:
    run = kept(STARTED, ev.RunClosed(reason))

    assert f"run\tstate\t{state}" in lines("show", run)
    assert json.loads(call("show", run, "--json").stdout)["header"]["closed_for"] == reason


@pytest.mark.parametrize(
    ("word", "told"),
    [("shwo", "No such command 'shwo' (did you mean 'show'?)."), ("qqq", "No such command 'qqq'.")],
)
def test_a_misspelt_command_is_told_with_what_was_meant(word: str, told: str) -> None:
    result = call(word, "runs/x")

    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {told}")


@pytest.mark.parametrize(
    "command", [("log",), ("log", "--follow"), ("trace", "-o", "x.json")], ids=["log", "follow", "trace"]
)
def test_a_range_that_ends_before_it_begins_is_refused(driven: Path, command: tuple[str, ...]) -> None:
    result = call(command[0], driven, *command[1:], "--from", 10, "--to", 5)

    assert result.exit_code == 2
    assert result.stderr == (
        "groupstate: event 5 (--to) comes before event 10 (--from); give the earlier one as --from\n"
    )
