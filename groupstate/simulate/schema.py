"""The form of scenario files as JSON schema, made from what reads them, for editors and for who generates scenarios.

It refuses unknown words and wrong types. What the loader knows beyond that, such as rules that contradict each other,
it can't say.
"""

import json
from typing import Any

import msgspec

from groupstate.core.rules import Rules
from groupstate.simulate.scenario_file import EXPECTATIONS, FAILURE_KINDS, SOURCE, TRAJECTORY, VERBS

NAMES: dict[type, str] = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
}
SESSION = {"type": "string", "pattern": r"^[\s\S]+/[0-9]+$"}
"""`id/session`, with an id of any letters."""


def schema() -> dict[str, Any]:
    _, rules = msgspec.json.schema_components([Rules], ref_template="#/$defs/{name}")
    source = _typed(SOURCE)
    source["groups"]["items"] = {"type": "string"}
    source["datasets"]["additionalProperties"] = source["groups"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "groupstate scenario",
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "rules": {"$ref": "#/$defs/Rules"},
            "source": {
                "type": "object",
                "properties": source,
                "additionalProperties": False,
                "not": {"required": ["groups", "datasets"]},
            },
            "steps": {"type": "array", "minItems": 1, "items": {"oneOf": [_step(verb) for verb in VERBS]}},
        },
        "required": ["steps"],
        "additionalProperties": False,
        "$defs": {
            **rules,
            "expect": {"type": "object", "properties": _typed(EXPECTATIONS), "additionalProperties": False},
            "trajectory": _trajectory(),
        },
    }


def text() -> str:
    """As it is kept in docs/scenario.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


def _step(verb: str) -> dict[str, Any]:
    kind, options = VERBS[verb]
    properties = {verb: _type(kind), **_typed(options), "expect": {"$ref": "#/$defs/expect"}}
    if verb in {"finish", "fail"}:
        properties[verb] = SESSION
    if "kind" in options:
        properties["kind"] = {"enum": list(FAILURE_KINDS)}
    if "trajectories" in options:
        properties["trajectories"]["items"] = {"$ref": "#/$defs/trajectory"}
    if "rules" in options:
        properties["rules"] = {"$ref": "#/$defs/Rules"}
    return {"type": "object", "properties": properties, "required": [verb], "additionalProperties": False}


def _trajectory() -> dict[str, Any]:
    properties = _typed(TRAJECTORY)
    properties["versions"]["items"] = {"type": "integer"}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _typed(table: dict[str, tuple[type, ...]]) -> dict[str, dict[str, Any]]:
    return {name: _type(kinds) for name, kinds in table.items()}


def _type(kinds: tuple[type, ...]) -> dict[str, Any]:
    names = [NAMES[kind] for kind in kinds if not (kind is int and float in kinds)]
    return {"type": names[0] if len(names) == 1 else names}
