"""A run's numbers for Prometheus. Needs the extra `prometheus`.

Rule: nothing is kept here. A scrape takes one reading of each run, so its numbers belong together.
"""

import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Final

from groupstate.core.arguments import integer, shown, string
from groupstate.errors import BadSettings, CannotServe, MissingExtra
from groupstate.integrations.counting import Figures, behind, in_recording_thread
from groupstate.integrations.figures import METRICS, Distribution, Labels, Metric, Value

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra("groupstate.integrations.prometheus", "prometheus_client", "prometheus") from error

PORT_MAX: Final = 65_535

PORT: Final = 9_464
"""Where metrics are served without another word; the port that OpenTelemetry's exporter for Prometheus has too."""


class PrometheusMetrics:
    """The metrics of a run in a registry, from here on.

    Counters begin at 0 when a run is opened again, as Prometheus expects of a process that was started again.
    """

    def __init__(self, run: Any, *, registry: CollectorRegistry = REGISTRY, label: str | None = None) -> None:
        """
        Args:
            run: a `Run`, blocking or not, or a `StatusFeed`. To be called where its other calls are.
            registry: where the metrics are collected; several runs may be in one.
            label: what the label `run` of each metric says; None takes the run's id.

        Raises:
            BadSettings: no such run or registry; another run in this registry has that label, or it is no text; or
                another collector there has metrics of these names.
        """
        self._in_thread = in_recording_thread(run)
        self.label = run.book.run_id if label is None else string("label", label, error=BadSettings)
        if not isinstance(registry, CollectorRegistry):
            raise BadSettings(
                f"registry is {shown(registry)}; it must be a prometheus_client.CollectorRegistry, or be left out"
            )
        self._runs = _Runs.of(registry)
        self._server: tuple[Any, threading.Thread] | None = None
        self._closed = False
        self._figures: Figures = self._in_thread(lambda: Figures(behind(run)))
        try:
            self._runs.add(self.label, self._figures)
        except BaseException:
            self._in_thread(self._figures.detach)
            raise
        self._registry = registry

    def serve(self, port: int = PORT, host: str = "127.0.0.1") -> int:
        """Serve the registry at http://host:port/metrics, from a thread of its own, until this is closed.

        Args:
            port: 0 takes a free one.
            host: "0.0.0.0" lets other machines ask; anybody who reaches the port may then read the numbers.

        Returns:
            The port.

        Raises:
            BadSettings: it is served already, or closed; or there is no such port.
            CannotServe: the port is taken, or not allowed, or there is no such host.
        """
        if self._closed or self._server is not None:
            raise BadSettings(f"the metrics are {'closed' if self._closed else 'served already'}")
        number = integer("port", port, least=0, most=PORT_MAX, error=BadSettings)
        string("host", host, error=BadSettings)
        try:
            self._server = start_http_server(number, host, self._registry)
        except OSError as error:
            raise CannotServe("the metrics", host, number, error, _advice(error)) from error
        except UnicodeError as error:
            raise BadSettings(f"host is {shown(host)}; it must be the name or the address of this machine") from error
        return int(self._server[0].server_port)

    def close(self) -> None:
        """Count no more, and take the run's metrics out of the registry. Idempotent; also once the run is closed."""
        if self._closed:
            return
        self._closed = True
        self._runs.remove(self.label)
        self._in_thread(self._figures.detach)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> "PrometheusMetrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Runs(Collector):
    """All runs of one registry, since a registry has each metric once."""

    _of: ClassVar["weakref.WeakKeyDictionary[CollectorRegistry, _Runs]"] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = weakref.ref(registry)
        self._figures: dict[str, Figures] = {}

    @classmethod
    def of(cls, registry: CollectorRegistry) -> "_Runs":
        with cls._lock:
            if registry not in cls._of:
                cls._of[registry] = cls(registry)
            return cls._of[registry]

    def add(self, label: str, figures: Figures) -> None:
        with self._lock:
            if label in self._figures:
                raise BadSettings(
                    f"this registry has metrics of a run {label!r} already: give this one another label, or a "
                    "registry of its own, or close the other metrics first"
                )
            if not self._figures and (registry := self._registry()) is not None:
                try:
                    registry.register(self)
                except ValueError as error:
                    raise BadSettings(
                        f"this registry has metrics with names of groupstate's already, of another collector: {error}. "
                        "Give a registry of its own, or take the other collector out of this one"
                    ) from error
            self._figures = {**self._figures, label: figures}

    def remove(self, label: str) -> None:
        with self._lock:
            self._figures = {name: figures for name, figures in self._figures.items() if name != label}
            if not self._figures and (registry := self._registry()) is not None:
                registry.unregister(self)

    def describe(self) -> Iterator[Any]:
        """The names, so that nobody else takes them."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Any]:
        readings = {label: figures.read() for label, figures in self._figures.items()}
        for metric in METRICS:
            family = _family(metric)
            for label, reading in readings.items():
                for labels, value in reading.values[metric.name].items():
                    _add(family, metric, (label, *labels), value)
            yield family


def _advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "ports below 1024 are the system's; take a higher one, or port=0 for one that is free"
    if error.errno == errno.EADDRINUSE:
        return "take another port, or port=0 for one that is free, which serve() returns; or close what has it"
    return "host must be a name or an address of this machine, such as '127.0.0.1', or '0.0.0.0' for all of them"


_FAMILIES: Final[dict[str, Callable[..., Any]]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(metric: Metric) -> Any:
    return _FAMILIES[metric.kind](metric.name, metric.meaning, labels=("run", *metric.labels))


def _add(family: Any, metric: Metric, labels: Labels, value: Value) -> None:
    if not isinstance(value, Distribution):
        family.add_metric(labels, value)
        return
    below, buckets = 0, []
    for bound, count in zip((*map(repr, map(float, metric.bounds)), "+Inf"), value.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric(labels, buckets, sum_value=value.total)
