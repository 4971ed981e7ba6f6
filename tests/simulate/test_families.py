"""Every known kind of fault is held by a scenario or a test that exists, and every scenario holds one."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCENARIOS = HERE.parent / "scenarios"
FAMILIES = tomllib.loads((HERE / "families.toml").read_text())
KINDS = [(family, kind, held) for family, kinds in FAMILIES.items() for kind, held in kinds.items()]


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text())) if path.exists() else ()
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


COUNTS = {
    "settling and late writes": 10,
    "cancellation": 11,
    "waits that never end": 9,
    "dataset exhaustion and shutdown": 4,
    "zero-variance filter": 9,
    "eviction, refill and capacity": 8,
    "staleness": 8,
    "identity and grouping": 3,
    "partial and empty groups": 5,
    "resume": 7,
    "log and replay": 11,
    "metrics": 2,
    "backpressure and admission": 4,
}
"""Kinds of each family. Raise a number with each kind that is found; one that falls has lost a kind."""


def test_no_kind_is_dropped():
    assert {family: len(kinds) for family, kinds in FAMILIES.items()} == COUNTS


@pytest.mark.parametrize(("family", "kind", "held"), KINDS, ids=[f"{family}: {kind}" for family, kind, _ in KINDS])
def test_each_kind_is_held_by_what_exists(family: str, kind: str, held: dict[str, list[str]]):
    assert held.keys() <= {"scenarios", "tests"}
    assert any(held.values()), "nothing holds it"
    assert [name for name in held.get("scenarios", []) if not (SCENARIOS / f"{name}.toml").exists()] == []
    nodes = [node.split("::") for node in held.get("tests", [])]
    assert [node for node in nodes if len(node) != 2 or node[1] not in defined_in(ROOT / node[0])] == []


def test_each_scenario_holds_a_kind():
    listed = {name for _, _, held in KINDS for name in held.get("scenarios", [])}

    assert sorted({path.stem for path in SCENARIOS.rglob("*.toml")} - listed) == []


def test_each_scenario_says_what_is_right_and_ends_with_the_invariants():
    for path in SCENARIOS.rglob("*.toml"):
        data = tomllib.loads(path.read_text())
        assert data["title"], path.name
        assert data["steps"][-1] == {"check": True}, path.name


def test_the_index_is_no_scenario():
    assert SCENARIOS not in (HERE / "families.toml").parents
