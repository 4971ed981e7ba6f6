"""The dashboard asks for metrics that there are, by labels that they have, in queries that mean something."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupstate.integrations.figures import METRICS, Metric
from groupstate.integrations.grafana import DASHBOARD
from tools import grafana_dashboard

SELECTOR = re.compile(r"(groupstate_\w+)\{([^}]*)\}")
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {metric.name + suffix: (metric, suffix) for metric in METRICS for suffix in SUFFIXES[metric.kind]}

NOT_SHOWN = ["groupstate_groups_ended", "groupstate_groups_sampled", "groupstate_batches"]
"""What the page has in another form."""

PAGE: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PAGE["panels"]
    for target in panel["targets"]
]


def problems(query: str) -> list[str]:
    """What is wrong with a query."""
    found = [] if query.count("(") == query.count(")") else ["parentheses don't match"]
    names = re.findall(r"groupstate_\w+", query)
    selected = SELECTOR.findall(query)
    if len(names) != len(selected):
        found.append("a metric of all runs at once")
    for name, inside in selected:
        if name not in SERIES:
            found.append(f"there is no {name}")
            continue
        metric, suffix = SERIES[name]
        labels = {"run", *metric.labels, *(["le"] if suffix == "_bucket" else [])}
        used = set(re.findall(r"(\w+)(?:=~|!=|=)\"", inside))
        by = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        found += [f"{name} has no label {label}" for label in sorted(used - labels)]
        if len(selected) == 1:
            found += [f"{name} has no label {label} to group by" for label in sorted(by - labels)]
        found += _rate_problems(query, name, metric)
    if "histogram_quantile" in query and "by (le)" not in query:
        found.append("a quantile without its buckets")
    return found


def _rate_problems(query: str, name: str, metric: Metric) -> list[str]:
    """A counter says something only as a rate, and a gauge never does; the sum is over the rates."""
    is_rate = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", query) is not None
    if metric.kind == "gauge":
        return [f"a rate of the gauge {name}"] if is_rate else []
    return [] if is_rate else [f"{name} without a rate"]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_can_be_answered(query: str) -> None:
    assert problems(query) == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ('sum (groupstate_gropus{run=~"$run"})', "there is no groupstate_gropus"),
        ('sum (rate(groupstate_events{run="a"}[$__rate_interval]))', "there is no groupstate_events"),
        ('sum (groupstate_events_total{run=~"$run"})', "groupstate_events_total without a rate"),
        ('rate(groupstate_groups{run="a"}[$__rate_interval])', "a rate of the gauge groupstate_groups"),
        ('groupstate_groups{reason="stale"}', "groupstate_groups has no label reason"),
        ('sum by (reason) (groupstate_groups{run="a"})', "groupstate_groups has no label reason to group by"),
        ('sum (groupstate_groups{run="a"}', "parentheses don't match"),
        ("groupstate_groups", "a metric of all runs at once"),
    ],
)
def test_a_query_that_means_nothing_is_noticed(query: str, problem: str) -> None:
    assert problem in problems(query)


def test_the_page_shows_every_metric_that_it_means_to() -> None:
    queries = [target["expr"] for panel in PAGE["panels"] for target in panel["targets"]]
    asked = {SERIES[name][0].name for query in queries for name, _ in SELECTOR.findall(query)}

    assert [metric.name for metric in METRICS if metric.name not in asked] == NOT_SHOWN


def test_panels_have_places_and_numbers_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PAGE["panels"]]

    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in PAGE["panels"]}) == len(places)


def test_the_file_is_what_the_tool_writes(tmp_path: Path) -> None:
    grafana_dashboard.write(tmp_path / "made.json")

    made = (tmp_path / "made.json").read_text(encoding="utf-8")
    assert made == DASHBOARD.read_text(encoding="utf-8"), "run `make docs`"


def test_a_command_says_where_the_file_lies() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "groupstate.integrations.grafana"], capture_output=True, text=True, check=True
    )

    assert Path(done.stdout.strip()) == DASHBOARD
