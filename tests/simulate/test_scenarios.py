"""Scenario files run on the real ledger, rules and sampler."""

from pathlib import Path
from typing import Any

import pytest

from groupstate.errors import LogFailed
from groupstate.runtime.closing import Closing
from groupstate.runtime.run import Run
from groupstate.simulate.kinds import MalformedScenario
from groupstate.simulate.scenario import StepFailed, main_paths, play
from groupstate.simulate.scenario_file import load, parse

SCENARIOS = Path(__file__).parent.parent / "scenarios"
DONE = ({"submit": "a"}, {"start": "a"}, {"finish": "a/0"}, {"sample": 1})


@pytest.mark.parametrize("path", sorted(SCENARIOS.rglob("*.toml")), ids=lambda path: path.stem)
def test_scenario_holds(path: Path) -> None:
    play(load(path))


def scenario(*steps: dict, **settings: object):
    return parse({"steps": list(steps), **settings})


@pytest.mark.parametrize(
    ("expect", "shown"),
    [
        ({"phase": {"a": "finished"}}, "running"),
        ({"counts": {"pending": 1}}, "0"),
        ({"evicted": {"a": ["stale"]}}, "{}"),
        ({"submitted": ["r"]}, r"\[\]"),
        ({"forfeited": 1}, "0"),
        ({"fenced": "attempt"}, "None"),
        ({"error": "NotEnoughGroups"}, "None"),
    ],
)
def test_a_step_that_differs_shows_expected_and_actual(expect: dict, shown: str) -> None:
    differing = scenario({"submit": "a", "n": 1}, {"start": "a", "expect": expect})

    with pytest.raises(StepFailed, match=rf"(?s)step 2 .*expected.*actual.*{shown}"):
        play(differing)


@pytest.mark.parametrize(
    "expect",
    [
        {"groups": ["b"]},
        {"blocked": True},
        {"batch": ["b/0/0"]},
        {"metrics": {"x": 1}},
        {"metrics": {"training/groups/evicted": "missing"}},
        {"histograms": {"filter_groups/filtered_values": {"1.0": 1}}},
        {"rows": {"a/0/0": {"reward": 2.0}}},
        {"rows": {"a/0/0": "missing"}},
        {"rows": {"a/1/0": {"reward": 1.0}}},
        {"ended": {"a": "partial 1/1"}},
        {"ended": {"b": "finished 1/1"}},
    ],
)
def test_a_batch_that_differs_is_a_failed_step(expect: dict) -> None:
    done = {"finish": "a/0", "metrics": {"reward": 1.0}}
    differing = scenario({"submit": "a", "n": 1}, {"start": "a"}, done, {"sample": 1, "expect": expect})

    with pytest.raises(StepFailed, match="step 4"):
        play(differing)


def test_what_a_batch_has_not_is_missing() -> None:
    done = {"finish": "a/0", "metrics": {"reward": 1.0}}
    expect = {
        "metrics": {"no/such": "missing"},
        "rows": {"a/0/0": {"reward": 1.0, "length": "missing"}, "b/0/0": "missing"},
        "ended": {"a": "finished 1/1", "b": "missing"},
    }
    play(scenario({"submit": "a"}, {"start": "a"}, done, {"sample": 1, "expect": expect}))


def test_an_error_that_nobody_expected_fails_the_step() -> None:
    with pytest.raises(StepFailed, match="DuplicateGroup"):
        play(scenario({"submit": "a"}, {"submit": "a"}))


def test_an_expected_error_passes() -> None:
    play(scenario({"submit": "a"}, {"submit": "a", "expect": {"error": "DuplicateGroup"}}))


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({}, "steps"),
        ({"steps": []}, "steps"),
        ({"steps": [{"sampel": 1}]}, "did you mean 'sample'"),
        ({"steps": "start"}, "at least one step"),
        ({"steps": ["start"]}, "step 1 is 'start'; it must be a table"),
        ({"steps": [{"sample": "1"}]}, "step 1: sample is '1'; it must be an integer"),
        ({"steps": [{"sample": True}]}, "it must be an integer"),
        ({"steps": [{"start": "a", "publish": 1}]}, "exactly one verb"),
        ({"steps": [{"finish": "a"}]}, "id/session"),
        ({"steps": [{"finish": "a/²"}]}, "id/session"),
        (
            {"steps": [{"finish": "a/0", "trajectories": [{"versions": 1}]}]},
            "trajectories.versions is 1; it must be a list",
        ),
        ({"steps": [{"finish": "a/0", "trajectories": [{"versions": ["1"]}]}]}, "it must be an integer of at least 0"),
        (
            {"steps": [{"finish": "a/0", "metrics": {"reward": "high"}}]},
            "metrics.reward is 'high'; it must be a number",
        ),
        ({"steps": [{"start": "a"}, {"submit": "b", "n": 0}]}, "step 2: n is 0; it must be an integer from 1 to 4096"),
        ({"steps": [{"advance_s": -5}]}, "step 1: advance_s is -5; it must be a finite number of at least 0"),
        ({"steps": [{"advance_s": float("inf")}]}, "advance_s is inf; it must be a finite number"),
        ({"steps": [{"sample": 1, "partition": "training"}]}, "partition is 'training'; did you mean 'train'?"),
        ({"steps": [{"sample": 1, "partition": 1}]}, "partition is 1; it must be one of train, val"),
        ({"steps": [{"check": False}]}, "check is False; it must be true"),
        ({"steps": [{"recover": True, "rules": {"lagmax": 1}}]}, "did you mean 'lag_max'"),
        ({"steps": [{"start": "a"}], "source": {"admits": "yes"}}, "source.admits is 'yes'; it must be true or false"),
        ({"steps": [{"start": "a"}], "source": {"groups": [], "datasets": {}}}, "one or the other"),
        ({"steps": [{"fail": "a/0", "kind": "boom"}]}, "kind is 'boom'; known are error, timeout"),
        ({"steps": [{"start": "a", "expect": {"phases": {}}}]}, "did you mean 'phase'"),
        (
            {"steps": [{"start": "a", "expect": {"phase": {"a": "runing"}}}]},
            "step 1: expect.phase.a is 'runing'; did you mean 'running'?",
        ),
        (
            {"steps": [{"start": "a", "expect": {"counts": {"pendng": 1}}}]},
            "step 1: expect.counts: the key is 'pendng'; did you mean 'pending'?",
        ),
        (
            {"steps": [{"start": "a", "expect": {"evicted": {"a": ["stail"]}}}]},
            "expect.evicted.a is 'stail'; did you mean 'stale'?",
        ),
        ({"steps": [{"start": "a", "expect": {"fenced": "atempt"}}]}, "did you mean 'attempt'?"),
        (
            {"steps": [{"sample": 1, "expect": {"error": "NotEnoughGroup"}}]},
            "expect.error is 'NotEnoughGroup'; did you mean 'NotEnoughGroups'?",
        ),
        ({"steps": [{"waiting": False, "error": "Nothing"}]}, "error is 'Nothing'; known are BadInput,"),
        ({"steps": [{"sample": 1, "expect": {"batch": ["a/0"]}}]}, "it must be 'id/session/index', such as 'a/0/0'"),
        (
            {"steps": [{"sample": 1, "expect": {"ended": {"a": "3/4"}}}]},
            "it must be how a group ended, such as 'partial 3/4'",
        ),
        (
            {"steps": [{"sample": 1, "expect": {"metrics": {"x": "none"}}}]},
            "expect.metrics.x is 'none'; it must be a number",
        ),
        ({"steps": [{"start": "a"}], "ruls": {}}, "did you mean 'rules'"),
        ({"steps": [{"start": "a"}], "rules": {"lagmax": 1}}, "did you mean 'lag_max'"),
        ({"steps": [{"start": "a"}], "source": {"groups": [1]}}, "source.groups is 1; it must be a string"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(data: dict, shown: str) -> None:
    with pytest.raises(MalformedScenario, match=shown):
        parse(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules = { selection = 'foo:bar' }", "rules: selection: there is no module 'foo'"),
        ("rules = { lag_maxx = 1 }", "rules has no setting 'lag_maxx'; did you mean 'lag_max'?"),
        ("rules = { mode = 'sync', lag_max = 1 }", "rules: lag_max bounds nothing in sync mode"),
        ("steps =", "Invalid value"),
    ],
)
def test_a_malformed_file_is_named_and_the_others_are_run(tmp_path: Path, text: str, said: str) -> None:
    for name, content in {"a": text, "b": "", "c": ""}.items():
        (tmp_path / f"{name}.toml").write_text(
            f'{content}\nsteps = [{{ submit = "a" }}]' if "steps" not in content else content
        )
    lines: list[str] = []

    assert main_paths([tmp_path, tmp_path / "none"], say=lines.append) == 2
    assert lines[0] == f"MALFORMED {tmp_path / 'none'}: there is no such file or directory"
    assert lines[1].startswith(f"MALFORMED {tmp_path / 'a.toml'}: {said}")
    assert lines[2:] == [
        f"ok     {tmp_path / 'b.toml'}",
        f"ok     {tmp_path / 'c.toml'}",
        "2 passed, 0 failed, 2 malformed",
    ]


def test_exit_codes_tell_passed_failed_and_malformed(tmp_path: Path) -> None:
    said: list[str] = []
    good, bad, malformed = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "malformed.toml"
    good.write_text('steps = [ { submit = "a" } ]')
    bad.write_text('steps = [ { submit = "a", expect = { phase = { a = "running" } } } ]')
    malformed.write_text("steps = ")

    codes = [main_paths([path], say=said.append) for path in (good, bad, malformed, tmp_path / "none.toml")]

    assert codes == [0, 1, 2, 2]


def test_a_directory_runs_every_file_beneath_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.toml").write_text('steps = [ { submit = "a" } ]')
    said: list[str] = []

    code = main_paths([tmp_path], say=said.append)

    assert (code, said[-1]) == (0, "1 passed, 0 failed")


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (
            [{"submit": "a"}, {"crash": True}, {"start": "a"}],
            r"step 3 \{ start = 'a' \}: the run has crashed or is closed; a recover step must come first",
        ),
        ([{"close": True}, {"close": True}], "step 2 .* a recover step must come first"),
        ([{"recover": True}], "step 1 .* a close or crash step must come first"),
        (
            [{"crash": True}, {"recover": True, "at": "best"}],
            "step 2 .*: there is no checkpoint named 'best'; there is none",
        ),
        (
            [{"checkpoint": "b"}, {"crash": True}, {"recover": True, "at": "best"}],
            "step 3 .*: there is no checkpoint named 'best'; there are 'b'",
        ),
        ([{"cancel_sample": True}], "step 1 .*: there is no waiter 0; 0 sample steps"),
        ([{"sample": 1}, {"waiting": True, "waiter": 2}], "step 2 .*: there is no waiter 2; 1 sample steps"),
        ([*DONE, {"cancel_sample": True}], "step 5 .* the sample.. of step 4 doesn't wait any more: it got .'a'.$"),
        (
            [{"sample": 0}, {"waiting": False, "error": "SampleError"}, {"cancel_sample": True}],
            "step 3 .* the sample.. of step 1 doesn't wait any more: it raised SampleError: ",
        ),
        (
            [{"submit": "a"}, {"start": "a"}, {"start": "a"}],
            "step 3 .* no session of 'a' is to be started; it is running",
        ),
        ([{"sample": 1, "expect": {"groups": ["a"]}}], "no batch: still waiting"),
        ([{"sample": 0, "expect": {"groups": [], "error": "SampleError"}}], "no batch: SampleError"),
    ],
)
def test_steps_that_do_not_follow_from_each_other_fail(steps: list[dict], shown: str) -> None:
    with pytest.raises(StepFailed, match=shown):
        play(scenario(*steps))


# Errors that nobody asked for --------------------------------------------------------------------------

BEGUN = ({"submit": "a", "n": 2}, {"start": "a"})
TWICE = {"groups": ["r", "r"]}
LACKS: dict[str, Any] = {"rules": {"filter_metric": "acc"}}


@pytest.mark.parametrize(
    ("steps", "settings", "text"),
    [
        (
            [{"sample": 0}],
            {},
            "step 1 { sample = 0 }: raised SampleError: batch_size is 0; it must be an integer of at least 1",
        ),
        (
            [{"check": True}, {"sample": 50}],
            {"source": {"groups": ["a"]}},
            "step 2 { sample = 50 }: raised NotEnoughGroups: sample(50) can't be met: the source is exhausted",
        ),
        (
            [{"publish": 2}, {"sample": 1, "weight_version": 1}],
            {},
            "step 2 { sample = 1 }: raised WeightVersionError: weight version 1 is below the current version 2",
        ),
        (
            [*BEGUN, {"finish": "a/0", "metrics": {"reward": float("nan")}}],
            {},
            "step 3 { finish = 'a/0' }: raised UnusableResult: trajectory 0 of session 0 of group 'a' has reward = nan",
        ),
        (
            [*BEGUN, {"sample": 1}, {"finish": "a/0", "metrics": {"reward": 1}}, {"finish": "a/1"}, {"check": True}],
            LACKS,
            "step 5 { finish = 'a/1' }: the sample() of step 3 raised MissingMetric: session 0 of group 'a' has no ",
        ),
        (
            [{"sample": 1}, {"close": True}],
            {},
            "step 2 { close = true }: the sample() of step 1 raised RunIsClosed: the run is closing",
        ),
        (
            [{"submit": "r"}, {"start": "r"}, {"sample": 2}],
            {"source": TWICE},
            "step 3 { sample = 2 }: raised SourceFailed: source 'source' failed at prompt 0: DuplicateGroup: ",
        ),
        (
            [{"submit": "a"}, {"cancel": "a"}, {"start": "r"}, {"cancel": "r"}],
            {"source": TWICE},
            "step 4 { cancel = 'r' }: the source failed: DuplicateGroup: group id 'r' is taken",
        ),
        (
            [{"advance_s": 1}],
            {"source": {**TWICE, "admits": True}, "rules": {"admission": {"kind": "slots", "n": 2}}},
            "step 1 { advance_s = 1 }: the source failed: DuplicateGroup: group id 'r' is taken",
        ),
        ([{"start": "nope"}], {}, "step 1 { start = 'nope' }: raised UnknownGroup: cannot start it: group 'nope'"),
        ([{"start": "a/x"}], {}, "step 1 { start = 'a/x' }: raised UnknownGroup: cannot start it: group 'a/x'"),
        ([{"start": "a/0"}], {}, "step 1 { start = 'a/0' }: raised UnknownGroup: cannot record that session 0 started"),
        (
            [{"submit": "a"}, {"cancel": "a"}, {"start": "a"}],
            {},
            "step 3 { start = 'a' }: raised UnknownGroup: cannot start it: group 'a' is not in the book; it was ",
        ),
        (
            [*BEGUN, {"start": "a/2"}],
            {},
            "step 3 { start = 'a/2' }: raised SessionStateError: group 'a' has sessions 0 to 1",
        ),
    ],
)
def test_an_error_that_no_step_asks_for_fails_the_step_in_which_it_comes_up(
    steps: list[dict], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(StepFailed) as failed:
        play(scenario(*steps, **settings))

    assert str(failed.value).startswith(text)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ([{"sample": 0, "expect": {"error": "SampleError"}}], {}),
        ([{"sample": 0}, {"waiting": False, "error": "SampleError"}], {}),
        ([{"sample": 0}, {"sample": 1}, {"waiting": False, "waiter": 1, "error": "SampleError"}], {}),
        ([{"sample": 0}, {"waiting": False, "expect": {"error": "SampleError"}}], {}),
        (
            [
                *BEGUN,
                {"sample": 1},
                {"finish": "a/0"},
                {"finish": "a/1", "expect": {"error": "MissingMetric"}},
                {"check": True},
            ],
            LACKS,
        ),
        ([*BEGUN, {"finish": "a/0", "metrics": {"x": float("inf")}, "expect": {"error": "UnusableResult"}}], {}),
        ([{"sample": 1}, {"close": True, "expect": {"error": "RunIsClosed"}}], {}),
        ([{"submit": "r"}, {"sample": 2, "expect": {"error": "SourceFailed"}}], {"source": TWICE}),
        ([{"submit": "r"}, {"sample": 2}, {"waiting": False, "error": "SourceFailed"}], {"source": TWICE}),
        (
            [
                {"submit": "a"},
                {"cancel": "a"},
                {"start": "r"},
                {"cancel": "r", "expect": {"error": "DuplicateGroup"}},
                {"check": True},
            ],
            {"source": TWICE},
        ),
        (
            [
                {"submit": "a"},
                {"cancel": "a"},
                {"start": "r"},
                {"cancel": "r"},
                {"sample": 1, "expect": {"error": "SourceFailed"}},
            ],
            {"source": TWICE},
        ),
    ],
)
def test_an_error_that_a_step_asks_for_passes_there_or_later(steps: list[dict], settings: dict[str, Any]) -> None:
    play(scenario(*steps, **settings))


@pytest.mark.parametrize(
    "later",
    [
        {"waiting": False},
        {"waiting": False, "waiter": 2, "error": "SampleError"},
        {"submit": "a", "expect": {"error": "DuplicateGroup"}},
    ],
)
def test_a_later_step_that_asks_for_something_else_leaves_the_error_unasked(later: dict) -> None:
    with pytest.raises(StepFailed, match=r"step 2 \{ sample = 0 \}: raised SampleError"):
        play(scenario({"submit": "a"}, {"sample": 0}, {"sample": 1}, later))


def test_another_error_than_the_one_that_is_asked_for_later_fails_there() -> None:
    steps = [{"sample": 0}, {"waiting": False, "error": "MissingMetric"}]

    with pytest.raises(StepFailed, match=r"(?s)step 2 .*error.*expected 'MissingMetric'.*actual   'SampleError'"):
        play(scenario(*steps))


def test_of_two_samplers_that_are_told_an_error_each_is_asked_for() -> None:
    told = {"close": True, "expect": {"error": "RunIsClosed"}}

    with pytest.raises(StepFailed, match=r"step 3 .*the sample\(\) of step 1 raised RunIsClosed"):
        play(scenario({"sample": 1}, {"sample": 2}, told))
    play(scenario({"sample": 1}, {"sample": 2}, told, {"waiting": False, "waiter": 1, "error": "RunIsClosed"}))


def test_who_is_killed_with_the_run_is_told_nothing() -> None:
    play(scenario({"sample": 1}, {"crash": True}, {"recover": True}, {"sample": 1}, {"crash": True}, {"recover": True}))


def test_an_error_of_the_librarys_own_is_shown_with_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Run, group_id: str) -> None:
        raise ZeroDivisionError(group_id)

    monkeypatch.setattr(Run, "cancel", broken)
    file = tmp_path / "broken.toml"
    file.write_text('steps = [{ submit = "a" }, { cancel = "a", expect = { error = "UnknownGroup" } }]')
    said: list[str] = []

    assert main_paths([file], say=said.append) == 1
    assert said[0] == f"FAILED {file}\nstep 2 {{ cancel = 'a' }}: raised ZeroDivisionError: a"
    assert said[1].endswith("raise ZeroDivisionError(group_id)\nZeroDivisionError: a")


def test_what_goes_wrong_when_the_run_ends_is_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(closing: Closing, reason: str, *, mark: bool) -> None:
        raise LogFailed("no room")

    monkeypatch.setattr(Closing, "_put_back", broken)

    with pytest.raises(StepFailed, match=r"step 1 \{ submit = 'a' \}: raised LogFailed: no room"):
        play(scenario({"submit": "a"}))


# Steps that can't be done ------------------------------------------------------------------------------


def test_requeueing_and_waiting_are_steps_too() -> None:
    play(
        scenario(
            {"submit": "a", "n": 2},
            {"start": "a/0"},
            {"requeue": "a", "expect": {"phase": {"a": "pending"}}},
            {"start": "a/1"},
            {"start": "a"},
            {"advance_s": 3600},
            {"finish": "a/0", "attempt": 1, "expect": {"fenced": "attempt"}},
            {"finish": "a/0"},
            {"finish": "a/1"},
            {"sample": 1, "expect": {"groups": ["a"]}},
            {"check": True},
        )
    )


@pytest.mark.parametrize(("again", "evicted"), [({}, {"a": ["stale"]}), ({"weight_version": 2}, {})])
def test_a_group_that_is_dispatched_anew_counts_from_its_new_stamp(again: dict, evicted: dict) -> None:
    play(
        scenario(
            {"submit": "a"},
            {"start": "a"},
            {"publish": 2},
            {"requeue": "a", **again, "expect": {"phase": {"a": "pending"}}},
            {"start": "a"},
            {"finish": "a/0", "expect": {"evicted": evicted}},
            {"check": True},
            rules={"lag_max": 1},
        )
    )


def test_the_retry_of_a_failed_session_can_be_started() -> None:
    play(
        scenario(
            {"submit": "a"},
            {"start": "a"},
            {"fail": "a/0", "retryable": True, "expect": {"phase": {"a": "running"}}},
            {"start": "a/0", "attempt": 2},
            {"finish": "a/0"},
            {"sample": 1, "expect": {"groups": ["a"]}},
            rules={"attempts_max": 2},
        )
    )


def test_a_directory_without_scenarios_is_malformed(tmp_path: Path) -> None:
    said: list[str] = []

    assert main_paths([tmp_path], say=said.append) == 2
    assert "holds no .toml files" in said[0]


def test_a_recovery_step_sees_what_recovery_did_and_no_more() -> None:
    play(
        scenario(
            {"submit": "a"},
            {"start": "a"},
            {"fail": "a/0", "expect": {"evicted": {"a": ["empty"]}}},
            {"crash": True},
            {"recover": True, "expect": {"evicted": {}}},
        )
    )


def test_a_closed_run_is_opened_again_with_what_it_held() -> None:
    play(
        scenario(
            {"submit": "a"},
            {"sample": 1},
            {"close": True},
            {"advance_s": 3600},
            {"waiting": False, "error": "RunIsClosed"},
            {"recover": True, "n": 3, "rules": {"mode": "async"}, "expect": {"phase": {"a": "pending"}}},
            {"sample": 2, "expect": {"submitted": ["r"]}},
            {"start": "r"},
            {"finish": "r/0"},
            {"finish": "r/1"},
            {"finish": "r/2", "expect": {"phase": {"r": "finished"}}},
            {"check": True},
            source={"groups": ["r"]},
        )
    )


@pytest.mark.parametrize(
    ("cut", "phase"), [({}, "running"), ({"lose_bytes": 1}, "pending"), ({"keep_bytes": 0}, "unknown")]
)
def test_a_crash_may_take_the_end_of_the_log(cut: dict, phase: str) -> None:
    before = [{"submit": "a", "n": 2}, {"start": "a/0"}]
    after = "pending" if phase == "running" else phase

    play(scenario(*before, {"crash": True, **cut}, {"recover": True, "expect": {"phase": {"a": after}}}))


def test_a_source_that_admits_is_drawn_from_ahead_of_the_samplers() -> None:
    start = {"start": "a", "expect": {"counts": {"running": 1, "pending": 1, "owed": 0}}}
    rules = {"admission": {"kind": "slots", "n": 2}}
    source = {"groups": ["a", "b", "c"], "admits": True}

    play(scenario(start, {"crash": True}, {"recover": True, "expect": {"submitted": []}}, source=source, rules=rules))
