"""Scenario files run on the real ledger, rules and sampler."""

from pathlib import Path

import pytest

from groupstate.simulate.scenario import StepFailed, main_paths, play
from groupstate.simulate.scenario_file import MalformedScenario, load, parse

SCENARIOS = Path(__file__).parent.parent / "scenarios"


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
        ([{"submit": "a"}, {"crash": True}, {"start": "a"}], "a recover step must come first"),
        ([{"close": True}, {"close": True}], "a recover step must come first"),
        ([{"recover": True}], "a close or crash step must come first"),
        ([{"crash": True}, {"recover": True, "at": "best"}], "no checkpoint named 'best'"),
        ([{"cancel_sample": True}], "no waiter 0; 0 sample steps"),
        ([{"sample": 1}, {"waiting": True, "waiter": 2}], "no waiter 2; 1 sample steps"),
        ([{"sample": 1, "expect": {"groups": ["a"]}}], "no batch: still waiting"),
        ([{"sample": 0, "expect": {"groups": [], "error": "SampleError"}}], "no batch: SampleError"),
    ],
)
def test_steps_that_do_not_follow_from_each_other_fail(steps: list[dict], shown: str) -> None:
    with pytest.raises(StepFailed, match=shown):
        play(scenario(*steps))


def test_a_result_that_is_refused_can_be_looked_at_as_the_sessions_failure_or_as_the_error() -> None:
    nan = {"finish": "a/0", "metrics": {"reward": float("nan")}}
    play(scenario({"submit": "a"}, {"start": "a"}, {**nan, "expect": {"phase": {"a": "evicted"}}}))
    play(scenario({"submit": "a"}, {"start": "a"}, {**nan, "expect": {"error": "UnusableResult"}}))


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
