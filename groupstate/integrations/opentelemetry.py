"""A run's numbers as OpenTelemetry metrics, and spans of its groups and sessions. Needs the extra `opentelemetry`.

Rule: the numbers are those of `groupstate.integrations.prometheus`, from the same reading. Spans are off unless asked
for, since they cost more than recording does.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final

from groupstate.core.arguments import boolean, shown, string
from groupstate.errors import BadSettings, MissingExtra
from groupstate.integrations.counting import Figures, behind, in_recording_thread
from groupstate.integrations.figures import METRICS, Distribution, Metric, Reading
from groupstate.version import VERSION

try:
    from opentelemetry import metrics as otel_metrics
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider
except ModuleNotFoundError as error:
    raise MissingExtra("groupstate.integrations.opentelemetry", "opentelemetry-api", "opentelemetry") from error

from groupstate.integrations.spans import SCOPE, Spans

READING_KEPT_S: Final = 0.05
"""Instruments are asked one after the other; what they say within this time is of one reading."""


class OpenTelemetry:
    """A run in OpenTelemetry, from here on."""

    def __init__(
        self,
        run: Any,
        *,
        metrics: bool = True,
        spans: bool = False,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        label: str | None = None,
    ) -> None:
        """
        Args:
            run: a `Run`, blocking or not, or a `StatusFeed`. To be called where its other calls are.
            metrics: the numbers, as observable instruments; a histogram is two of them, its count and its sum.
            spans: one for each group, from its submission until it leaves, and below it one for each attempt.
            meter_provider, tracer_provider: None takes the global ones.
            label: the attribute `run` of metrics, `groupstate.run` of spans; None takes the run's id.

        Raises:
            BadSettings: no such run or provider; another run has metrics with this label there, or it is no text.
        """
        self._in_thread = in_recording_thread(run)
        self.label = run.book.run_id if label is None else string("label", label, error=BadSettings)
        boolean("metrics", metrics, error=BadSettings)
        boolean("spans", spans, error=BadSettings)
        _check_provider("meter_provider", meter_provider, MeterProvider)
        _check_provider("tracer_provider", tracer_provider, TracerProvider)
        self._instruments: _Instruments | None = None
        self._figures: Figures | None = None
        self._spans: Spans | None = None
        if metrics:
            self._instruments = _Instruments.of(meter_provider or otel_metrics.get_meter_provider())
            self._figures = self._in_thread(lambda: Figures(behind(run)))
            try:
                self._instruments.add(self.label, self._figures)
            except BaseException:
                self._in_thread(self._figures.detach)
                raise
        if spans:
            provider = tracer_provider or trace.get_tracer_provider()
            try:
                self._spans = self._in_thread(lambda: Spans(behind(run), provider, self.label))
            except BaseException:
                self.close()
                raise

    def context(self, group_id: str, session: int | None = None) -> Context:
        """The context of a group's or a session's span, for spans of your own below it; an empty one without spans."""
        return Context() if self._spans is None else self._spans.context(group_id, session)

    def close(self) -> None:
        """End all spans and count no more. Idempotent; also once the run is closed."""
        if self._instruments is not None and self._figures is not None:
            self._instruments.remove(self.label)
            self._in_thread(self._figures.detach)
        if self._spans is not None:
            self._in_thread(self._spans.detach)
        self._instruments = self._figures = None

    def __enter__(self) -> "OpenTelemetry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_provider(name: str, provider: Any, kind: type) -> None:
    if provider is not None and not isinstance(provider, kind):
        raise BadSettings(
            f"{name} is {shown(provider)}; it must be a {kind.__name__} of OpenTelemetry, or None for the global one"
        )


_of_provider: "weakref.WeakKeyDictionary[MeterProvider, _Instruments]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Instruments:
    """The instruments of one provider, which can't be taken back: they tell of all runs that are watched there."""

    def __init__(self, provider: MeterProvider) -> None:
        self._figures: dict[str, Figures] = {}
        self._read: dict[str, tuple[float, Reading]] = {}
        meter = provider.get_meter(SCOPE, VERSION)
        for metric in METRICS:
            name = metric.name.replace("_", ".", 1)
            if metric.kind == "gauge":
                meter.create_observable_gauge(name, [self._told(metric)], _unit(metric), metric.meaning)
            elif metric.kind == "counter":
                meter.create_observable_counter(name, [self._told(metric)], _unit(metric), metric.meaning)
            else:
                counted = self._told(metric, lambda value: value.count)
                meter.create_observable_counter(f"{name}.count", [counted], "1", f"How many: {metric.meaning}")
                summed = self._told(metric, lambda value: value.total)
                meter.create_observable_counter(f"{name}.sum", [summed], _unit(metric), f"Their sum: {metric.meaning}")

    @classmethod
    def of(cls, provider: MeterProvider) -> "_Instruments":
        with _lock:
            if provider not in _of_provider:
                _of_provider[provider] = cls(provider)
            return _of_provider[provider]

    def add(self, label: str, figures: Figures) -> None:
        with _lock:
            if label in self._figures:
                raise BadSettings(
                    f"this meter provider has metrics of a run {label!r} already: give this one another label, or a "
                    "provider of its own, or close the other one first"
                )
            self._figures = {**self._figures, label: figures}

    def remove(self, label: str) -> None:
        with _lock:
            self._figures = {name: figures for name, figures in self._figures.items() if name != label}
            self._read.pop(label, None)

    def _reading(self, label: str, figures: Figures) -> Reading:
        now = time.monotonic()
        at, reading = self._read.get(label, (0.0, None))
        if reading is None or not 0 <= now - at < READING_KEPT_S:
            reading = figures.read()
            self._read[label] = now, reading
        return reading

    def _told(
        self, metric: Metric, part: Callable[[Distribution], float] | None = None
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """What an instrument calls: the values of a metric, or one part of each of its distributions."""

        def tell(options: CallbackOptions) -> Iterable[Observation]:
            for label, figures in self._figures.items():
                for labels, value in self._reading(label, figures).values[metric.name].items():
                    number = value if part is None else part(value)  # type: ignore[arg-type]
                    attributes = dict(zip(("run", *metric.labels), (label, *labels), strict=True))
                    yield Observation(number, attributes)  # type: ignore[arg-type]

        return tell


def _unit(metric: Metric) -> str:
    """As OpenTelemetry writes it: seconds are `s`, and what is counted stands in braces."""
    return "s" if metric.unit == "seconds" else f"{{{metric.unit.replace(' ', '_')}}}" if metric.unit else "1"
