"""`docs/rules.md` tells every setting of `Rules` with its default, and every metric of a batch."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from groupstate.core.metrics import EVICTION_METRICS
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
FIELDS = {field.name: field for field in msgspec.structs.fields(Rules)}


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def rows_of_settings() -> dict[str, str]:
    """Name -> default, as the table of settings has them."""
    table = page().partition("## All settings")[2]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE))


def test_the_table_names_the_settings_that_there_are():
    assert sorted(rows_of_settings()) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_table_has_the_default(name):
    default = FIELDS[name].default

    assert rows_of_settings()[name] == ("None" if default is None else json.dumps(default))


@pytest.mark.parametrize("kind", [PerBatch, Slots, Capacity])
def test_each_admission_rule_has_its_row_with_its_settings(kind):
    row = re.search(rf"^\| `{kind.__name__}\((.*?)\)` \|", page(), re.MULTILINE)

    assert row is not None, f"no row for {kind.__name__}"
    assert re.findall(r"(\w+)=", row[1]) == [field.name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("metric", EVICTION_METRICS)
def test_each_eviction_metric_is_in_the_table(metric):
    assert f"| `{metric}` |" in page()
