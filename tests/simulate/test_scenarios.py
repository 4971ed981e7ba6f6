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


@pytest.mark.parametrize("expect", [{"groups": ["b"]}, {"blocked": True}, {"batch": ["b/0/0"]}, {"metrics": {"x": 1}}])
def test_a_batch_that_differs_is_a_failed_step(expect: dict) -> None:
    differing = scenario({"submit": "a", "n": 1}, {"start": "a"}, {"finish": "a/0"}, {"sample": 1, "expect": expect})

    with pytest.raises(StepFailed, match="step 4"):
        play(differing)


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
        ({"steps": [{"sample": "1"}]}, "of type int"),
        ({"steps": [{"sample": True}]}, "of type int"),
        ({"steps": [{"start": "a", "publish": 1}]}, "exactly one verb"),
        ({"steps": [{"finish": "a"}]}, "id/session"),
        ({"steps": [{"fail": "a/0", "kind": "boom"}]}, "error, timeout"),
        ({"steps": [{"start": "a", "expect": {"phases": {}}}]}, "did you mean 'phase'"),
        ({"steps": [{"start": "a"}], "ruls": {}}, "did you mean 'rules'"),
        ({"steps": [{"start": "a"}], "rules": {"lagmax": 1}}, "did you mean 'lag_max'"),
        ({"steps": [{"start": "a"}], "source": {"groups": [1]}}, "of type str"),
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
