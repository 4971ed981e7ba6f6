"""The JSON schema of scenario files says what the loader says."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from groupstate.core.rules import Rules
from groupstate.simulate import schema
from groupstate.simulate.scenario_file import EXPECTATIONS, VERBS, MalformedScenario, parse

HERE = Path(__file__).parent
KEPT = HERE.parent.parent / "docs" / "scenario.schema.json"
SCENARIOS = sorted((HERE.parent / "scenarios").rglob("*.toml"))
VALIDATOR = Draft202012Validator(schema.schema())
START = {"start": "a"}


EXPECTS: list[dict[str, Any]] = [
    {"phase": {"a": "runing"}},
    {"counts": {"pendng": 1}},
    {"counts": {"pending": -1}},
    {"counts": {"pending": "1"}},
    {"evicted": {"a": "stale"}},
    {"evicted": {"a": ["stail"]}},
    {"submitted": [1]},
    {"forfeited": -1},
    {"fenced": "late"},
    {"error": "ValueError"},
    {"groups": "a"},
    {"batch": ["a/0"]},
    {"rows": {"a/0": {"reward": 1.0}}},
    {"rows": {"a/0/0": {"reward": "high"}}},
    {"rows": {"a/0/0": "gone"}},
    {"ended": {"a": "running 1/2"}},
    {"metrics": {"x": "none"}},
    {"histograms": {"x": {"1.0": "many"}}},
    {"histograms": {"x": 1}},
]


def problems(data: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_the_kept_schema_is_the_one_the_code_makes():
    assert KEPT.read_text() == schema.text(), "write it anew: groupstate scenario --schema > docs/scenario.schema.json"


def test_the_schema_is_one():
    Draft202012Validator.check_schema(json.loads(schema.text()))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_has_the_form(path: Path):
    assert problems(tomllib.loads(path.read_text())) == []


def test_no_verb_and_no_expectation_is_left_out():
    steps = VALIDATOR.schema["properties"]["steps"]["items"]["oneOf"]

    assert [step["required"] for step in steps] == [[verb] for verb in VERBS]
    assert list(VALIDATOR.schema["$defs"]["expect"]["properties"]) == list(EXPECTATIONS)
    assert list(VALIDATOR.schema["$defs"]["Rules"]["properties"]) == list(Rules.__struct_fields__)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"steps": []},
        {"steps": {}},
        {"steps": ["start"]},
        {"steps": [START], "title": 1},
        {"steps": [START], "ruls": {}},
        {"steps": [START], "rules": {"lagmax": 1}},
        {"steps": [START], "rules": {"lag_max": "1"}},
        {"steps": [START], "rules": {"mode": "both"}},
        {"steps": [START], "rules": {"admission": {"kind": "slots", "n": 1, "m": 1}}},
        {"steps": [START], "rules": {"admission": {"kind": "gate"}}},
        {"steps": [START], "source": {"groups": [1]}},
        {"steps": [START], "source": {"groups": "a"}},
        {"steps": [START], "source": {"admits": 1}},
        {"steps": [START], "source": {"datasets": ["a"]}},
        {"steps": [START], "source": {"datasets": {"math": "a"}}},
        {"steps": [START], "source": {"datasets": {"math": [1]}}},
        {"steps": [START], "source": {"groups": [], "datasets": {}}},
        {"steps": [START], "source": {"prompts": []}},
        {"steps": [{}]},
        {"steps": [{"sampel": 1}]},
        {"steps": [{"start": "a", "publish": 1}]},
        {"steps": [{"start": "a", "n": 1}]},
        {"steps": [{"start": "a", "expect": {"phases": {}}}]},
        {"steps": [{"start": "a", "expect": []}]},
        {"steps": [{"finish": "a"}]},
        {"steps": [{"finish": "/0"}]},
        {"steps": [{"fail": "a/0", "kind": "boom"}]},
        {"steps": [{"fail": "a/0", "retryable": 1}]},
        {"steps": [{"finish": "a/0", "metrics": []}]},
        {"steps": [{"finish": "a/0", "trajectories": [{"reward": 1}]}]},
        {"steps": [{"finish": "a/0", "trajectories": [{"versions": 1}]}]},
        {"steps": [{"finish": "a/0", "trajectories": [{"versions": ["1"]}]}]},
        {"steps": [{"finish": "a/0", "trajectories": [1]}]},
        {"steps": [{"advance_s": "1"}]},
        {"steps": [{"recover": True, "rules": {"lagmax": 1}}]},
        {"steps": [{"crash": True, "keep_bytes": "1"}]},
        {"steps": [{"waiting": False, "waiter": "1"}]},
        {"steps": [START], "rules": {"lag_max": -1}},
        {"steps": [START], "rules": {"admission": {"kind": "slots", "n": 0}}},
        {"steps": [START], "rules": {"datasets": {"math": {"share": 1.5}}}},
        {"steps": [{"submit": "a", "n": 0}]},
        {"steps": [{"submit": "a", "n": 4097}]},
        {"steps": [{"submit": "a", "weight_version": -1}]},
        {"steps": [{"submit": "a", "partition": "training"}]},
        {"steps": [{"start": "a", "attempt": 0}]},
        {"steps": [{"finish": "a/0", "metrics": {"reward": "high"}}]},
        {"steps": [{"finish": "a/0", "metrics": {"reward": True}}]},
        {"steps": [{"finish": "a/0", "trajectories": [{"metrics": {"reward": "high"}}]}]},
        {"steps": [{"finish": "a/0", "trajectories": [{"versions": [-1]}]}]},
        {"steps": [{"advance_s": -5}]},
        {"steps": [{"publish": -1}]},
        {"steps": [{"check": False}]},
        {"steps": [{"crash": True, "lose_bytes": -1}]},
        {"steps": [{"waiting": True, "waiter": 0}]},
        {"steps": [{"waiting": False, "error": "NotEnoughGroup"}]},
        {"steps": [{"waiting": False, "groups": "a"}]},
        *({"steps": [{"start": "a", "expect": expect}]} for expect in EXPECTS),
        *({"steps": [{verb: []}]} for verb in VERBS),
        *({"steps": [{"start": "a", "expect": {name: None}}]} for name in EXPECTATIONS),
    ],
    ids=str,
)
def test_what_the_loader_refuses_the_schema_refuses(data: dict):
    with pytest.raises(MalformedScenario):
        parse(data)

    assert problems(data)


TAKEN: list[dict[str, Any]] = [
    {"phase": {"a": "unknown", "b": "committed"}},
    {"counts": {"owed": 0, "submitted": 1, "evicted": 0, "pending": 1}},
    {"evicted": {"a": ["empty", "stale"]}},
    {"rows": {"a/b/0/0": {"reward": 1, "length": "missing"}, "c/0/0": "missing"}},
    {"ended": {"a": "partial 1/2", "b": "missing"}},
    {"metrics": {"x": 1, "y": 0.5, "z": "missing"}},
    {"histograms": {"x": {"1.0": 2}, "y": "missing"}},
    {"batch": ["a/b/0/0"], "groups": ["a/b"], "error": "NotEnoughGroups", "fenced": "gone", "blocked": False},
]


@pytest.mark.parametrize("expect", TAKEN, ids=str)
def test_what_the_loader_takes_the_schema_takes(expect: dict):
    data = {"steps": [{"start": "a", "expect": expect}]}

    parse(data)
    assert problems(data) == []


@pytest.mark.parametrize("seconds", [1, 0.5])
def test_seconds_may_be_whole(seconds: float):
    data = {"steps": [{"advance_s": seconds}]}

    parse(data)
    assert problems(data) == []
