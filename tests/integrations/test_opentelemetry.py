"""A run's spans and metrics as OpenTelemetry's own SDK exports them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from groupstate import RetryableError, Rules, Trajectory, open_run, sync
from groupstate.core import events as ev
from groupstate.errors import BadSettings
from groupstate.integrations.figures import METRICS
from groupstate.integrations.opentelemetry import OpenTelemetry
from groupstate.integrations.spans import Spans
from groupstate.testing.notation import START_NS, Story

SECRET = "what only the prompt knows"


class Exported:
    """A provider, and the spans that have ended under it."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def exported() -> Iterator[Exported]:
    found = Exported()
    yield found
    found.provider.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {name.removeprefix("groupstate."): value for name, value in span.attributes.items()}


def happened(span: Any) -> list[tuple[str, float]]:
    return [(event.name, (event.timestamp - START_NS) / 1e9) for event in span.events]


def lasted(span: Any) -> tuple[float, float]:
    return (span.start_time - START_NS) / 1e9, (span.end_time - START_NS) / 1e9


# Spans ----------------------------------------------------------------------------------------------------


def test_a_group_that_is_trained_on_has_a_span_with_its_sessions_below_it(exported: Exported) -> None:
    story = Story(rules=Rules())
    Spans(story, exported.provider, "r")

    story.tell("submit a/2", "wait 1", "start a.0", "wait 1", "start a.1", "wait 3", "finish a.0 reward=1")
    story.tell("wait 5", "finish a.1 reward=0", "wait 7", "sample 1", "wait 2")
    story.record(committed(story))

    (group,) = exported.named("group")
    first, second = exported.named("session")
    assert group.parent is None
    assert {span.parent.span_id for span in (first, second)} == {group.context.span_id}
    assert {span.context.trace_id for span in (first, second)} == {group.context.trace_id}
    assert (lasted(group), lasted(first), lasted(second)) == ((0, 19), (1, 5), (2, 10))
    assert happened(group) == [("finished", 10), ("sampled", 17)]
    assert attributes(group) | {"run": "r", "group": "a", "phase": "committed", "lag": 0, "size": 2} == attributes(
        group
    )
    told = {"group": "a", "session": 0, "attempt": 1, "phase": "finished", "trajectories": 1}
    assert attributes(first) | told == attributes(first)
    assert [span.status.status_code for span in (group, first, second)] == [StatusCode.OK] * 3


def committed(story: Story) -> ev.BatchCommitted:
    return ev.BatchCommitted(story.book.last_batch)


def test_an_eviction_has_its_reasons_and_a_failure_its_kind(exported: Exported) -> None:
    story = Story().tell()
    Spans(story, exported.provider, "r")

    story.tell("submit a/2", "start a", "wait 4", "finish a.0 reward=1", "fail a.1 timeout", "wait 1")
    story.tell("evict a failed,stale lag=3")

    (group,) = exported.named("group")
    finished, failed = exported.named("session")
    assert attributes(group) | {"phase": "evicted", "reason": "failed, stale", "lag": 3} == attributes(group)
    assert (group.status.status_code, group.status.description) == (StatusCode.ERROR, "failed, stale")
    assert attributes(failed) | {"phase": "failed", "reason": "timeout", "retried": False} == attributes(failed)
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "timeout")
    assert finished.status.status_code is StatusCode.OK


def test_an_eviction_of_a_group_that_finished_is_no_error(exported: Exported) -> None:
    story = Story()
    Spans(story, exported.provider, "r")

    story.tell("submit a/1", "start a", "finish a reward=1", "evict a zero_variance")

    (group,) = exported.named("group")
    assert group.status.status_code is StatusCode.UNSET


def test_a_session_that_was_not_needed_any_more_is_no_error(exported: Exported) -> None:
    story = Story()
    Spans(story, exported.provider, "r")

    story.tell("submit a/2", "start a", "finish a.0 reward=1", "fail a.1 spare")

    _, spare = exported.named("session")
    assert (attributes(spare)["reason"], spare.status.status_code) == ("spare", StatusCode.UNSET)


def test_each_attempt_has_a_span_and_one_that_never_began_has_none(exported: Exported) -> None:
    story = Story(rules=Rules(attempts_max=3), controlled=False)
    Spans(story, exported.provider, "r")

    story.tell("submit a/2", "start a.0", "wait 1", "fail a.0 error retryable", "wait 1", "start a.0")
    story.tell("wait 1", "finish a.0 reward=1", "fail a.1 cancelled")

    found = [
        (attributes(span)["attempt"], attributes(span)["phase"], lasted(span)) for span in exported.named("session")
    ]
    assert found == [(1, "failed", (0, 1)), (2, "finished", (2, 3))]
    assert attributes(exported.named("session")[0])["retried"] is True


def test_a_group_that_starts_over_ends_its_open_attempts_and_goes_on(exported: Exported) -> None:
    story = Story()
    Spans(story, exported.provider, "r")

    story.tell("submit a/2", "start a", "wait 2", "finish a.0 reward=1", "wait 1", "requeue a", "start a.0 attempt=2")

    _, broken = exported.named("session")
    assert (attributes(broken)["phase"], attributes(broken)["reason"]) == ("broken off", "requeued")
    assert broken.status.status_code is StatusCode.ERROR
    assert exported.named("group") == []


def test_a_batch_that_comes_back_is_told_and_can_be_sampled_again(exported: Exported) -> None:
    story = Story(rules=Rules())
    Spans(story, exported.provider, "r")

    story.tell("submit a/1", "start a", "finish a reward=1", "sample 1")
    story.record(ev.BatchReturned(1, "released"))
    story.tell("sample 1")
    story.record(committed(story))

    (group,) = exported.named("group")
    assert [name for name, _ in happened(group)] == ["finished", "sampled", "returned", "sampled"]


def test_what_was_there_before_is_picked_up_with_its_own_times(exported: Exported) -> None:
    story = Story().tell("submit a/2", "wait 3", "start a.0", "submit b/1", "start b", "fail b")
    story.tell("wait 1")
    spans = Spans(story, exported.provider, "r")

    story.tell("wait 1", "finish a.0 reward=1", "evict b failed")
    spans.detach()
    spans.detach()

    (session,) = exported.named("session")
    evicted, group = exported.named("group")
    assert (lasted(session), lasted(evicted), lasted(group)) == ((3, 5), (3, 5), (0, 5))
    assert evicted.status.status_code is StatusCode.ERROR
    assert attributes(group)["reason"] == "no longer watched"
    assert spans.observe not in story.ledger.observers


def test_what_is_in_flight_when_the_run_closes_is_ended_with_a_status(exported: Exported) -> None:
    story = Story()
    Spans(story, exported.provider, "r")

    story.tell("submit a/1", "start a", "wait 2", "close")

    (session,), (group,) = exported.named("session"), exported.named("group")
    assert (session.status.status_code, session.status.description) == (StatusCode.ERROR, "the run closed")
    assert (attributes(group)["phase"], attributes(group)["reason"]) == ("running", "the run closed")
    assert (lasted(session), lasted(group)) == ((0, 2), (0, 2))


async def failing(ctx: Any) -> Trajectory:
    if ctx.attempt == 1:
        raise RetryableError(SECRET)
    return Trajectory(prompt_ids=[1], response_ids=[2], log_probs=[0.0], reward=1.0, text=SECRET)


async def test_spans_hold_no_text_of_prompts_answers_or_errors(exported: Exported) -> None:
    rules = Rules(attempts_max=2)
    async with open_run(rules=rules, source=[SECRET], session=failing, group_size=2) as run:
        with OpenTelemetry(run, metrics=False, spans=True, tracer_provider=exported.provider):
            await run.commit(await run.sample(1, timeout_s=60))

    assert len(exported.named("session")) == 4
    assert not any(SECRET in span.to_json() for span in exported.exporter.get_finished_spans())


async def test_a_span_of_the_users_own_goes_below_that_of_its_session(exported: Exported) -> None:
    tracer = exported.provider.get_tracer("mine")
    telemetry: list[OpenTelemetry] = []

    async def session(ctx: Any) -> Trajectory:
        with tracer.start_as_current_span("call", context=telemetry[0].context(ctx.group_id, ctx.session)):
            return Trajectory(reward=1.0)

    async with open_run(session=session, group_size=1) as run:
        telemetry.append(OpenTelemetry(run, metrics=False, spans=True, tracer_provider=exported.provider))
        run.submit("a")
        await run.sample(1, timeout_s=60)
        assert not get_current_span(telemetry[0].context("nobody")).get_span_context().is_valid
        assert get_current_span(telemetry[0].context("g1")).get_span_context().is_valid

    (call,), (own,) = exported.named("call"), exported.named("session")
    assert call.parent.span_id == own.context.span_id
    assert len(exported.named("group")) == 1


# Metrics --------------------------------------------------------------------------------------------------


@pytest.fixture
def meters() -> Iterator[tuple[MeterProvider, InMemoryMetricReader]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    yield provider, reader
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, dict[tuple[str, ...], float]]:
    """By metric and the values of its attributes."""
    data = reader.get_metrics_data()
    return {
        metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}  # type: ignore[union-attr, misc]
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_metrics_are_the_same_numbers_under_their_names(meters: Any) -> None:
    provider, reader = meters

    async def session(ctx: Any) -> Trajectory:
        return Trajectory(prompt_ids=[1], response_ids=[2, 3], log_probs=[0.0, 0.0], reward=float(ctx.session))

    with (
        sync.open_run(session=session, group_size=2) as run,
        OpenTelemetry(run, meter_provider=provider, label="r") as telemetry,
    ):
        for text in ("a", "b"):
            run.submit(text)
        run.commit(run.sample(2, timeout_s=60))
        assert telemetry.context("g1") == {}
        found = points(reader)

    names = {metric.name.replace("_", ".", 1) for metric in METRICS}
    histograms = {metric.name.replace("_", ".", 1) for metric in METRICS if metric.kind == "histogram"}
    assert found.keys() == names - histograms | {f"{name}.{part}" for name in histograms for part in ("count", "sum")}
    assert found["groupstate.tokens"]["r", "train", "committed"] == 8
    assert found["groupstate.session_seconds.count"]["r", "train", "finished"] == 4
    assert found["groupstate.weight_version"]["r",] == 0


async def test_runs_of_one_provider_do_not_collide(meters: Any, tmp_path: Path) -> None:
    provider, reader = meters
    async with open_run() as first, open_run() as second:
        telemetry = OpenTelemetry(first, meter_provider=provider, label="first")
        with OpenTelemetry(second, meter_provider=provider, label="second"):
            first.submit("a")
            found = points(reader)["groupstate.groups_in_flight"]
            assert (found["first", "train"], found["second", "train"]) == (1, 0)
            with pytest.raises(BadSettings, match="run 'first' already"):
                OpenTelemetry(second, meter_provider=provider, label="first")
        assert set(points(reader)["groupstate.events"]) == {("first",)}
        with OpenTelemetry(second, meter_provider=provider, label="second"):
            second.submit("b")
            assert points(reader)["groupstate.groups_in_flight"]["second", "train"] == 1
        with OpenTelemetry(first, meter_provider=provider, label="second"):
            assert points(reader)["groupstate.events"]["second",] == 0
        telemetry.close()
        telemetry.close()
    assert points(reader) == {}


class Breaking(TracerProvider):
    def get_tracer(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no tracer")


async def test_what_cannot_be_attached_leaves_nothing_behind() -> None:
    provider = MeterProvider(shutdown_on_exit=False)
    async with open_run() as run:
        with pytest.raises(BadSettings, match="label is 5; it must be a string"):
            OpenTelemetry(run, meter_provider=provider, label=5)  # type: ignore[arg-type]
        for wrong, text in (
            ({"tracer_provider": object()}, "tracer_provider is <object .*; it must be a TracerProvider"),
            ({"meter_provider": "here"}, "meter_provider is 'here'; it must be a MeterProvider of OpenTelemetry"),
            ({"spans": "yes"}, "spans is 'yes'; it must be True or False"),
            ({"metrics": 1}, "metrics is 1; it must be True or False"),
            ({"tracer_provider": Breaking()}, "RuntimeError: no tracer"),
        ):
            given: dict[str, Any] = {"meter_provider": provider, "spans": True, **wrong}
            with pytest.raises((BadSettings, RuntimeError), match=text.removeprefix("RuntimeError: ")):
                OpenTelemetry(run, **given)
        with pytest.raises(BadSettings, match="run is 'x'; it must be a run that is open"):
            OpenTelemetry("x", meter_provider=provider)
        assert not run.ledger.listeners.get(ev.GroupFinished)
        with OpenTelemetry(run, meter_provider=provider):
            assert run.ledger.listeners[ev.GroupFinished]
