"""The form of scenario files as JSON schema, made from what reads them, for editors and for who generates scenarios.

It refuses unknown words and wrong types, and numbers that can't be. What takes more than a look at one value, such as
rules that contradict each other or a step that can't follow another, it can't say.
"""

import json
from typing import Any

import msgspec

from groupstate.core.rules import Capacity, PerBatch, PerDataset, Rules, Slots
from groupstate.simulate.kinds import Form, ListOf
from groupstate.simulate.scenario_file import EXPECTATIONS, SOURCE, TRAJECTORY, VERBS


def schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "groupstate scenario",
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "rules": {"$ref": "#/$defs/Rules"},
            "source": SOURCE.schema,
            "steps": {"type": "array", "minItems": 1, "items": {"oneOf": [_step(verb) for verb in VERBS]}},
        },
        "required": ["steps"],
        "additionalProperties": False,
        "$defs": {**_rules(), "expect": Form(EXPECTATIONS).schema, "trajectory": TRAJECTORY.schema},
    }


def text() -> str:
    """As it is kept in docs/scenario.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


def _rules() -> dict[str, Any]:
    _, forms = msgspec.json.schema_components([Rules], ref_template="#/$defs/{name}")
    for kind in (Rules, PerBatch, Slots, Capacity, PerDataset):
        for bound, numbers in (("minimum", kind.LEAST), ("maximum", kind.MOST)):
            for name, number in numbers.items():
                forms[kind.__name__]["properties"][name][bound] = number
    return forms


def _step(verb: str) -> dict[str, Any]:
    kind, options = VERBS[verb]
    properties = {verb: kind.schema, **{name: option.schema for name, option in options.items()}}
    for name, option in options.items():
        if option == ListOf(TRAJECTORY):
            properties[name] = {"type": "array", "items": {"$ref": "#/$defs/trajectory"}}
    properties["expect"] = {"$ref": "#/$defs/expect"}
    return {"type": "object", "properties": properties, "required": [verb], "additionalProperties": False}
