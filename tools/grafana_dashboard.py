"""Write the Grafana dashboard of the package."""

import json
from pathlib import Path
from typing import Any

import attrs

from groupstate.integrations.grafana import DASHBOARD

WIDTH, HEIGHT = 8, 8
"""Of a panel; a row of the page is 24 wide."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_RUN = 'run=~"$run"'
PICKED = f'{OF_RUN}, partition=~"$partition"'


@attrs.frozen
class Panel:
    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    """Expression and legend."""
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None


def rate(metric: str, labels: str = PICKED) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def a_minute(metric: str, by: str = "", labels: str = PICKED) -> str:
    return f"60 * sum{f' by ({by})' if by else ''} ({rate(metric, labels)})"


def quantiles(metric: str, labels: str, parts: tuple[float, ...]) -> tuple[tuple[str, str], ...]:
    by_bucket = f"sum by (le) ({rate(f'{metric}_bucket', labels)})"
    return tuple((f"histogram_quantile({part}, {by_bucket})", f"p{100 * part:g}") for part in parts)


def mean(metric: str) -> str:
    return f"sum ({rate(f'{metric}_sum')}) / sum ({rate(f'{metric}_count')})"


def share(metric: str, labels: str) -> str:
    """Of the counts with these labels in all counts of the metric."""
    return f"sum ({rate(metric, f'{PICKED}, {labels}')}) / sum ({rate(metric)})"


FINISHED = f'{PICKED}, outcome="finished"'

PANELS = (
    Panel(
        "Groups by phase",
        "Live groups. Many finished ones: the trainer is behind. Few, and a sampler waits: the rollout is.",
        ((f"sum by (phase) (groupstate_groups{{{PICKED}}})", "{{phase}}"),),
        stacked=True,
    ),
    Panel(
        "Ready, and who waits",
        "Groups that could be sampled now, and calls of sample() that wait.",
        (
            (f"sum (groupstate_groups_sampleable{{{PICKED}}})", "sampleable groups"),
            (f"sum (groupstate_samplers_waiting{{{PICKED}}})", "waiting samplers"),
        ),
    ),
    Panel(
        "In flight",
        "Groups that are pending or running, and attempts that have begun.",
        (
            (f"sum (groupstate_groups_in_flight{{{PICKED}}})", "groups"),
            (f"sum (groupstate_sessions_in_flight{{{PICKED}}})", "sessions"),
        ),
    ),
    Panel(
        "Groups a minute",
        "What goes in, and how it leaves.",
        (
            (a_minute("groupstate_groups_submitted_total"), "submitted"),
            (a_minute("groupstate_groups_committed_total"), "committed"),
            (a_minute("groupstate_groups_evicted_total"), "evicted"),
            (a_minute("groupstate_groups_requeued_total"), "started over"),
        ),
    ),
    Panel(
        "Evictions a minute by reason",
        "A group with two reasons counts under both.",
        ((a_minute("groupstate_evictions_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Refills",
        "Groups submitted in the place of evicted ones, refills given up, and those that are owed.",
        (
            (a_minute("groupstate_refills_total", labels=OF_RUN), "submitted a minute"),
            (a_minute("groupstate_refills_forfeited_total", labels=OF_RUN), "forfeited a minute"),
            (f"sum (groupstate_refills_owed{{{OF_RUN}}})", "owed"),
        ),
    ),
    Panel(
        "Tokens a second",
        "Response tokens: generated, and what became of them.",
        (
            (f"sum ({rate('groupstate_tokens_generated_total', OF_RUN)})", "generated"),
            (f"sum by (fate) ({rate('groupstate_tokens_total')})", "{{fate}}"),
        ),
    ),
    Panel(
        "Share of tokens thrown away",
        "Of the tokens whose group has left or started over, those that nobody trained on.",
        ((share("groupstate_tokens_total", 'fate!="committed"'), "thrown away"),),
        unit="percentunit",
        most=1.0,
    ),
    Panel(
        "Sessions a minute",
        "Attempts that gave a result, those that failed by kind, and late results that changed nothing.",
        (
            (a_minute("groupstate_sessions_finished_total", labels=OF_RUN), "finished"),
            (a_minute("groupstate_session_failures_total", "kind"), "{{kind}}"),
            (a_minute("groupstate_results_fenced_total", "reason", OF_RUN), "fenced: {{reason}}"),
        ),
    ),
    Panel(
        "How long sessions take",
        "Attempts that finished. A p99 far above the median: stragglers hold whole groups.",
        quantiles("groupstate_session_seconds", FINISHED, (0.5, 0.9, 0.99)),
        unit="s",
    ),
    Panel(
        "How long sample() waits",
        "Time that the trainer spends waiting for data.",
        (
            *quantiles("groupstate_sample_wait_seconds", PICKED, (0.5, 0.9)),
            (mean("groupstate_sample_wait_seconds"), "mean"),
        ),
        unit="s",
    ),
    Panel(
        "Lag of what is sampled",
        "Groups by their lag in weight versions when they were sampled.",
        ((f"sum by (le) (increase(groupstate_sampled_lag_versions_bucket{{{PICKED}}}[$__rate_interval]))", "{{le}}"),),
        kind="heatmap",
    ),
    Panel(
        "Oldest lag",
        "The highest lag of a group that is there, in weight versions.",
        ((f"max by (state) (groupstate_oldest_lag_versions{{{PICKED}}})", "{{state}}"),),
    ),
    Panel(
        "Weight version",
        "The current one, and whether nothing is drawn although there is room.",
        (
            (f"max by (run) (groupstate_weight_version{{{OF_RUN}}})", "{{run}}"),
            (f"max (groupstate_admission_held{{{OF_RUN}}})", "held"),
        ),
    ),
    Panel(
        "Events",
        "What the log takes, and what of it is not durable yet.",
        (
            (f"sum ({rate('groupstate_events_total', OF_RUN)})", "a second"),
            (f"sum (groupstate_events_unsynced{{{OF_RUN}}})", "not durable yet"),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "uid": "groupstate",
        "title": "groupstate",
        "description": "Prompt groups of an RL post-training run: where they are, how they leave, what it costs.",
        "tags": ["groupstate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timepicker": {},
        "graphTooltip": 1,
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _variables() -> list[dict[str, Any]]:
    every = {"selected": True, "text": ["All"], "value": ["$__all"]}
    query = "label_values(groupstate_weight_version, run)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "run"},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": every,
        },
        {
            "name": "partition",
            "label": "Partition",
            "type": "custom",
            "query": "train,val",
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["train"], "value": ["train"]},
        },
    ]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number % 3, number // 3
    heatmap = panel.kind == "heatmap"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if not heatmap:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"calculate": False} if heatmap else {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if heatmap else "time_series",
                "range": True,
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def generated() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def write(path: Path = DASHBOARD) -> None:
    path.write_text(generated(), encoding="utf-8")
    print(f"{path.name}: written")


if __name__ == "__main__":
    write()
