"""`docs/presets.md` tells every parameter of every preset: its default, and what it becomes."""

import inspect
import re
from pathlib import Path

import pytest

from groupstate.core.presets import PRESETS
from groupstate.core.rules import Rules

PAGE = (Path(__file__).parents[2] / "docs" / "presets.md").read_text(encoding="utf-8")
HEADER = "| parameter | default | meaning | becomes |\n| --- | --- | --- | --- |\n"


def section(name: str) -> str:
    """From the preset's heading to the next."""
    (found,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if f"\n`Rules.{name}(" in part]
    return found


def rows(name: str) -> list[list[str]]:
    table = section(name).partition(HEADER)[2].partition("\n\n")[0]
    return [row.strip("| ").split(" | ") for row in table.splitlines()]


def as_told(parameter: inspect.Parameter) -> tuple[str, str]:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return f"`{parameter.name}`", "required"
    return f"`{parameter.name}`", f"`{default!r}`".replace("'", '"')


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_is_the_signature(name: str):
    parameters = [one for one in inspect.signature(getattr(Rules, name)).parameters.values() if one.name != "changes"]

    assert [(row[0], row[1]) for row in rows(name)] == [as_told(one) for one in parameters]


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_says_what_each_parameter_becomes(name: str):
    told = {row[0].strip("`"): row[3] for row in rows(name)}

    for parameter, becomes in PRESETS[name].becomes.items():
        setting, _, part = becomes.partition(".")
        assert re.search(rf"`{setting}\b", told[parameter]), f"{parameter} becomes {setting}"
        assert re.search(rf"\b{part}=", told[parameter]) or not part, f"{parameter} becomes {becomes}"
    assert told.keys() - PRESETS[name].becomes.keys() <= {"strict"}


@pytest.mark.parametrize("name", PRESETS)
def test_whatever_a_preset_sets_is_named_in_its_section(name: str):
    made, plain = getattr(Rules, name)(4), Rules()

    for setting in Rules.__struct_fields__:
        if getattr(made, setting) != getattr(plain, setting):
            assert re.search(rf"`{setting}\b", section(name)), setting


def test_what_can_not_be_changed_is_said():
    for name, preset in PRESETS.items():
        for setting in preset.fixed:
            said = r"mode is async|`mode=" if setting == "mode" else rf"`{setting}(=\d+)?`[^.]*(can't|belong together)"
            assert re.search(said, section(name)), (name, setting)


@pytest.mark.parametrize("name", PRESETS)
def test_a_parameter_becomes_a_setting_that_there_is(name: str):
    for becomes in PRESETS[name].becomes.values():
        assert becomes.partition(".")[0] in Rules.__struct_fields__


@pytest.mark.parametrize("name", PRESETS)
def test_no_parameter_is_left_out_of_the_bounds_and_translations(name: str):
    preset = PRESETS[name]
    numbers = {parameter for parameter, kind in preset.parameters.items() if kind in (int, int | None)}

    assert preset.parameters.keys() - {"strict"} == preset.becomes.keys()
    assert numbers == preset.least.keys()
