"""`docs/rules.md` tells every setting of `Rules` with its default, and every metric of a batch."""

import json
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from groupstate.core.held import Window
from groupstate.core.metrics import EVICTION_METRICS, Tally, batch_tally
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots
from groupstate.testing.notation import play

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
    field = FIELDS[name]
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()

    assert rows_of_settings()[name] == ("None" if default is None else json.dumps(default))


@pytest.mark.parametrize("kind", [PerBatch, Slots, Capacity])
def test_each_admission_rule_has_its_row_with_its_settings(kind):
    row = re.search(rf"^\| `{kind.__name__}\((.*?)\)` \|", page(), re.MULTILINE)

    assert row is not None, f"no row for {kind.__name__}"
    assert re.findall(r"(\w+)=", row[1]) == [field.name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("metric", EVICTION_METRICS)
def test_each_eviction_metric_is_in_the_table(metric):
    assert f"| `{metric}` |" in page()


def test_each_number_of_a_batch_is_in_the_table():
    story = play(
        "submit a/1 dataset=math", "submit f/2", "start f", "finish f reward=1", "submit e/1", "start e",
        "fail e error", "start a", "finish a reward=1 versions=0", "publish 1", "submit s/1", "start s",
        "finish s reward=1", "publish 2", "sample 1",
        rules=Rules(filter_metric="reward", lag_max=1, starvation_versions=4),
    )  # fmt: skip
    story.tell("submit b/1 dataset=math", "start b", "finish b reward=1 versions=0", "sample 1")
    story.tell("submit c/1 dataset=math", "publish 6", "submit d/1", "start d", "finish d reward=1", "sample 1")
    tally = Tally.merged(waiter.claim.tally for waiter in story.waiters if waiter.claim)
    named = {re.sub("math|error", lambda found: {"math": "{name}", "error": "{kind}"}[found[0]], n) for n in tally.sums}
    named |= {f"{name}/{{mean,max,min}}" for name in tally.spreads} | {"sessions/spare"}
    table = page().partition("## Metrics of a batch")[2].partition("### ")[0]

    assert named == set(re.findall(r"`([\w/{},]+)`", "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))


def test_each_histogram_is_in_its_table():
    tally = batch_tally("train", Window(filtered_values=Counter([1.0])), [], [], 0)
    table = page().partition("### Metrics of several batches")[2].partition("## ")[0]

    assert sorted(tally.histograms) == re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)
