"""A run's metrics as Prometheus scrapes them."""

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from groupstate import Rules, Trajectory, open_run, sync
from groupstate.core import events as ev
from groupstate.errors import BadSettings, CannotServe
from groupstate.integrations import prometheus
from groupstate.integrations.figures import METRICS
from groupstate.integrations.prometheus import PrometheusMetrics
from groupstate.log.memory import MemoryLog
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed


@pytest.fixture
def registry() -> Any:
    return CollectorRegistry()


async def session(ctx: Any) -> Trajectory:
    return Trajectory(prompt_ids=[1], response_ids=[2, 3, 4], log_probs=[0.0] * 3, reward=float(ctx.session))


async def trained(run: Any, batches: int) -> None:
    for version in range(run.weight_version, run.weight_version + batches):
        batch = await run.sample(2, weight_version=version, timeout_s=60)
        await run.commit(batch)


def scraped(registry: Any) -> Iterator[Any]:
    """What a scrape gives, read as OpenMetrics, whose parser is the strictest."""
    return text_string_to_metric_families(generate_latest(registry).decode())  # type: ignore[no-any-return]


def heard(run: Any) -> int:
    """How many hear of a group's end."""
    return len(run.ledger.listeners.get(ev.GroupFinished, ()))


def value(registry: Any, name: str, **labels: str) -> Any:
    return registry.get_sample_value(name, labels)


async def test_a_run_is_counted_and_its_gauges_are_of_now(registry: Any) -> None:
    prompts = [f"p{number}" for number in range(6)]
    async with open_run(rules=Rules(batch_size=2), source=prompts, session=session, group_size=4) as run:
        with PrometheusMetrics(run, registry=registry, label="r") as metrics:
            await trained(run, 2)
            assert metrics.label == "r"

            assert value(registry, "groupstate_groups_committed_total", run="r", partition="train") == 4
            assert value(registry, "groupstate_tokens_total", run="r", partition="train", fate="committed") == 4 * 4 * 3
            assert value(registry, "groupstate_sampled_lag_versions_count", run="r", partition="train") == 4
            assert value(registry, "groupstate_sample_wait_seconds_count", run="r", partition="train") == 2
            assert value(registry, "groupstate_weight_version", run="r") == 1
            assert value(registry, "groupstate_groups", run="r", partition="train", phase="sampled") == 0
            sampleable = run.sampleable_count()
            assert value(registry, "groupstate_groups_sampleable", run="r", partition="train") == sampleable


async def test_a_validation_round_is_counted_apart(registry: Any) -> None:
    async with open_run(session=session, group_size=2) as run:
        with PrometheusMetrics(run, registry=registry, label="r"):
            await run.validate(["a", "b", "c"], timeout_s=60)

            assert value(registry, "groupstate_groups_committed_total", run="r", partition="val") == 3
            assert value(registry, "groupstate_groups_committed_total", run="r", partition="train") == 0


async def test_what_is_exposed_is_well_formed_and_named_as_the_table_says(registry: Any) -> None:
    async with open_run(session=session, source=["a", "b"], group_size=2) as run:
        with PrometheusMetrics(run, registry=registry):
            await trained(run, 1)
            families = {family.name: family for family in scraped(registry)}

    assert list(families) == [metric.name for metric in METRICS]
    for metric in METRICS:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        assert family.samples
        for sample in family.samples:
            assert {"run", *metric.labels} == sample.labels.keys() - {"le"}


async def test_counters_begin_anew_when_a_run_is_opened_again_and_gauges_go_on(registry: Any, tmp_path: Path) -> None:
    async with open_run(tmp_path / "run", group_size=1, weight_version=3) as run:
        with PrometheusMetrics(run, registry=registry):
            for text in ("a", "b"):
                run.submit(text)
            assert value(registry, "groupstate_groups_submitted_total", run=run.id, partition="train") == 2
    async with open_run(tmp_path / "run", group_size=1) as run:
        with PrometheusMetrics(run, registry=registry):
            assert value(registry, "groupstate_groups_submitted_total", run=run.id, partition="train") == 0
            assert value(registry, "groupstate_groups", run=run.id, partition="train", phase="pending") == 2
            assert value(registry, "groupstate_weight_version", run=run.id) == 3


async def test_runs_of_one_process_do_not_collide(registry: Any) -> None:
    async with open_run() as first, open_run() as second:
        with PrometheusMetrics(first, registry=registry, label="first") as metrics:
            with PrometheusMetrics(second, registry=registry, label="second"):
                first.submit("a")
                assert value(registry, "groupstate_groups_in_flight", run="first", partition="train") == 1
                assert value(registry, "groupstate_groups_in_flight", run="second", partition="train") == 0
            with pytest.raises(BadSettings, match="run 'first' already: give this one another label"):
                PrometheusMetrics(second, registry=registry, label="first")
            assert heard(second) == heard(first) - 1
            assert value(registry, "groupstate_groups_in_flight", run="second", partition="train") is None
        assert value(registry, "groupstate_groups_in_flight", run="first", partition="train") is None
        metrics.close()


async def test_a_registry_in_which_another_has_the_names_can_be_used_once_they_are_free(registry: Any) -> None:
    other = Gauge("groupstate_groups", "somebody else's", registry=registry)
    async with open_run() as run:
        with pytest.raises(BadSettings, match=r"of another collector: Duplicated timeseries.* a registry of its own"):
            PrometheusMetrics(run, registry=registry, label="r")
        assert heard(run) == 0
        registry.unregister(other)
        with PrometheusMetrics(run, registry=registry, label="r"):
            assert value(registry, "groupstate_events_total", run="r") == 0


@pytest.mark.parametrize("label", [5, b"run", "\ud800"])
async def test_a_label_that_no_scrape_could_show_is_refused(registry: Any, label: Any) -> None:
    async with open_run() as run:
        with pytest.raises(BadSettings, match=r"label is .* must be a string"):
            PrometheusMetrics(run, registry=registry, label=label)
        assert heard(run) == 0


async def test_the_last_numbers_stay_until_the_metrics_are_closed(registry: Any) -> None:
    async with open_run() as run:
        metrics = PrometheusMetrics(run, registry=registry, label="r")
        run.submit("a")
    assert value(registry, "groupstate_groups_submitted_total", run="r", partition="train") == 1

    metrics.close()

    assert list(scraped(registry)) == []
    assert heard(run) == 0


def test_a_blocking_run_is_scraped_over_http(registry: Any) -> None:
    with sync.open_run(session=session, source=["a", "b"], group_size=2) as run:
        with PrometheusMetrics(run, registry=registry, label="r") as metrics:
            port = metrics.serve(port=0)
            with pytest.raises(BadSettings, match="served already"):
                metrics.serve(port=0)
            run.commit(run.sample(2, timeout_s=60))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        with pytest.raises(BadSettings, match="closed"):
            metrics.serve(port=0)

    assert 'groupstate_batches_total{outcome="committed",partition="train",run="r"} 1.0' in text


@pytest.mark.parametrize("port", [80_000, -1, "9464", 1.5, True])
def test_a_port_that_there_is_none_of_is_refused(registry: Any, port: Any) -> None:
    feed = StatusFeed.begin(MemoryLog(), Rules(), group_size=1)
    with PrometheusMetrics(feed, registry=registry, label="r") as metrics:
        with pytest.raises(BadSettings, match=r"port is .*; it must be an integer from 0 to 65535"):
            metrics.serve(port=port)
        with pytest.raises(BadSettings, match="host is None; it must be a string"):
            metrics.serve(port=0, host=None)  # type: ignore[arg-type]
        assert metrics.serve(port=0) > 0


def test_a_port_that_is_taken_is_named_with_what_to_do(registry: Any) -> None:
    feed = StatusFeed.begin(MemoryLog(), Rules(), group_size=1)
    with socket.create_server(("127.0.0.1", 0)) as other, PrometheusMetrics(feed, registry=registry) as metrics:
        port = other.getsockname()[1]
        with pytest.raises(
            CannotServe, match=rf"at 127.0.0.1:{port}: .* in use; .* port=0 for one that is free"
        ) as taken:
            metrics.serve(port=port)
        assert (taken.value.host, taken.value.port) == ("127.0.0.1", port)
        assert metrics.serve(port=0) > 0


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError(13, "Permission denied"), "ports below 1024"),
        (OSError(99, "no such"), "address of this machine"),
    ],
)
def test_what_the_system_refuses_is_told_with_what_to_do(
    registry: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, advice: str
) -> None:
    def refused(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(prometheus, "start_http_server", refused)
    feed = StatusFeed.begin(MemoryLog(), Rules(), group_size=1)
    with PrometheusMetrics(feed, registry=registry) as metrics, pytest.raises(CannotServe, match=advice):
        metrics.serve(port=80)


def test_a_host_that_cannot_be_one_is_refused(registry: Any) -> None:
    with PrometheusMetrics(StatusFeed.begin(MemoryLog(), Rules(), group_size=1), registry=registry) as metrics:
        with pytest.raises(BadSettings, match="it must be the name or the address of this machine"):
            metrics.serve(port=0, host="a" * 64)
        with pytest.raises(CannotServe, match=r"at 192\.0\.2\.1:0: .* address of this machine"):
            metrics.serve(port=0, host="192.0.2.1")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("x", "run is 'x'; it must be a run that is open, blocking or not, or a StatusFeed$"),
        (None, "run is None; it must be a run"),
        (sync.open_run(), r"opened by a block: `with open_run\(...\) as run:`"),
        (open_run(), r"opened by a block"),
    ],
    ids=["text", "none", "unopened", "unopened async"],
)
def test_what_is_no_run_is_refused(registry: Any, run: Any, text: str) -> None:
    with pytest.raises(BadSettings, match=text):
        PrometheusMetrics(run, registry=registry)
    with pytest.raises(BadSettings, match=text):
        PrometheusMetrics(run, registry=registry, label="r")


def test_what_is_no_registry_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"registry is 'main'; it must be a prometheus_client.CollectorRegistry"):
        PrometheusMetrics(StatusFeed.begin(MemoryLog(), Rules(), group_size=1), registry="main")  # type: ignore[arg-type]


def test_a_status_feed_is_watched_too(registry: Any) -> None:
    feed = StatusFeed.begin(MemoryLog(), Rules(), group_size=1)
    with PrometheusMetrics(feed, registry=registry, label="r"):
        row = ReportedRow(metrics={"reward": 1.0}, response_tokens=7)
        feed.observe({"a": Reported(status="finished", stamp=0, rows={(0, 0): row})})

        assert value(registry, "groupstate_groups_sampleable", run="r", partition="train") == 1
        assert value(registry, "groupstate_tokens_generated_total", run="r") == 7
    feed.close()
