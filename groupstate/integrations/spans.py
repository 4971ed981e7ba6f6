"""A span for each group and one below it for each attempt, from the events of a run. Needs the extra `opentelemetry`.

Rule 1: times are the events' own, not of when somebody got to hear of them.
Rule 2: a span has ids, counts and reasons, and never a text that a session or a prompt brought along.
Rule 3: whatever was begun is ended: at the latest when the run closes.
"""

from collections.abc import Callable
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import Phase
from groupstate.errors import MissingExtra
from groupstate.integrations.counting import Watchable
from groupstate.version import VERSION

try:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Status, StatusCode, TracerProvider, set_span_in_context
except ModuleNotFoundError as error:
    raise MissingExtra("groupstate.integrations.spans", "opentelemetry-api", "opentelemetry") from error

SCOPE: Final = "groupstate"
"""The instrumentation scope of spans and metrics."""


@attrs.define
class _Open:
    """A group whose span has not ended."""

    span: Span
    sessions: dict[int, Span] = attrs.field(factory=dict)
    """Of the attempts that are open."""
    failed: bool = False


class Spans:
    """Spans of what happens in a run from here on; groups that are there already have one from their submission on."""

    def __init__(self, watched: Watchable, provider: TracerProvider, label: str) -> None:
        """Attach. Call it in the thread that records.

        Args:
            label: the attribute `groupstate.run`.
        """
        self.ledger = watched.ledger
        self._tracer = provider.get_tracer(SCOPE, VERSION)
        self._label = label
        self._open: dict[str, _Open] = {}
        book = self.ledger.book
        self._batches = {number: batch.group_ids for number, batch in book.batches.items()}
        for group in book.groups.values():
            self._pick_up(group)
        self.ledger.observers.append(self.observe)

    def context(self, group_id: str, session: int | None = None) -> Context:
        """The context of a span that is open, for spans of your own below it; an empty one where none is."""
        found = self._open.get(group_id)
        span = None if found is None else found.span if session is None else found.sessions.get(session)
        return Context() if span is None else set_span_in_context(span, Context())

    def detach(self) -> None:
        """End all spans, and begin no more. Call it in the thread that records; a second time does nothing."""
        if self.observe in self.ledger.observers:
            self.ledger.observers.remove(self.observe)
            self._end_all(self.ledger.clock_ns(), "no longer watched")

    def observe(self, record: ev.Record) -> None:
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record.event, record.at_ns)

    # Groups --------------------------------------------------------------------------------------------

    def _begin(self, group_id: str, at_ns: int, **attributes: Any) -> _Open:
        span = self._tracer.start_span(
            "group",
            context=Context(),
            attributes=_named(run=self._label, group=group_id, **attributes),
            start_time=at_ns,
        )
        found = self._open[group_id] = _Open(span)
        return found

    def _pick_up(self, group: Group) -> None:
        """Begin the spans of what was there before."""
        found = self._begin(
            group.group_id,
            group.submitted_at_ns,
            partition=group.partition,
            dataset=group.dataset,
            size=group.size,
            weight_version=group.stamp,
            cause=group.cause,
            phase=group.phase.value,
        )
        found.failed = group.terminal is Phase.FAILURE
        for number, session in enumerate(group.sessions):
            if session.state == "open":
                self._begin_session(found, group.group_id, number, session.attempt, session.started_at_ns)

    def _submitted(self, event: ev.GroupSubmitted, at_ns: int) -> None:
        self._begin(
            event.group_id,
            at_ns,
            partition=event.partition,
            dataset=event.dataset,
            size=event.size,
            weight_version=event.weight_version,
            cause=event.cause,
            phase="pending",
        )

    def _ended(self, event: ev.GroupFinished | ev.GroupFailed, at_ns: int) -> None:
        found = self._open[event.group_id]
        found.failed = isinstance(event, ev.GroupFailed)
        phase = "failure" if found.failed else "finished"
        found.span.set_attributes(_named(phase=phase))
        found.span.add_event(phase, timestamp=at_ns)

    def _requeued(self, event: ev.GroupRequeued, at_ns: int) -> None:
        found = self._open[event.group_id]
        found.failed = False
        self._break_off(found, at_ns, "requeued")
        found.span.set_attributes(_named(phase="pending"))
        found.span.add_event("requeued", timestamp=at_ns)

    def _evicted(self, event: ev.GroupEvicted, at_ns: int) -> None:
        found = self._open.pop(event.group_id)
        reason = ", ".join(event.reasons)
        found.span.set_attributes(_named(phase="evicted", reason=reason, lag=event.lag))
        if found.failed:
            found.span.set_status(Status(StatusCode.ERROR, reason))
        found.span.end(at_ns)

    def _sampled(self, event: ev.BatchSampled, at_ns: int) -> None:
        self._batches[event.batch] = event.group_ids
        for group_id, lag in zip(event.group_ids, event.lags, strict=True):
            span = self._open[group_id].span
            span.set_attributes(_named(phase="sampled", lag=lag))
            attributes = _named(batch=event.batch, lag=lag, weight_version=event.weight_version)
            span.add_event("sampled", attributes, timestamp=at_ns)

    def _returned(self, event: ev.BatchReturned, at_ns: int) -> None:
        for group_id in self._batches.pop(event.batch):
            found = self._open[group_id]
            found.span.set_attributes(_named(phase="failure" if found.failed else "finished"))
            found.span.add_event("returned", _named(batch=event.batch), timestamp=at_ns)

    def _committed(self, event: ev.BatchCommitted, at_ns: int) -> None:
        for group_id in self._batches.pop(event.batch):
            span = self._open.pop(group_id).span
            span.set_attributes(_named(phase="committed"))
            span.set_status(Status(StatusCode.OK))
            span.end(at_ns)

    # Sessions ------------------------------------------------------------------------------------------

    def _begin_session(
        self, found: _Open, group_id: str, session: int, attempt: int, at_ns: int, **attributes: Any
    ) -> None:
        found.sessions[session] = self._tracer.start_span(
            "session",
            context=set_span_in_context(found.span, Context()),
            attributes=_named(
                run=self._label, group=group_id, session=session, attempt=attempt, phase="open", **attributes
            ),
            start_time=at_ns,
        )

    def _started(self, event: ev.SessionStarted, at_ns: int) -> None:
        found = self._open[event.group_id]
        found.span.set_attributes(_named(phase="running"))
        version = {} if event.weight_version is None else {"weight_version": event.weight_version}
        worker = {"worker": event.worker} if event.worker else {}
        self._begin_session(found, event.group_id, event.session, event.attempt, at_ns, **version, **worker)

    def _finished(self, event: ev.SessionFinished, at_ns: int) -> None:
        span = self._open[event.group_id].sessions.pop(event.session)
        rows = event.trajectories
        tokens = sum(row.response_tokens for row in rows)
        span.set_attributes(_named(phase="finished", trajectories=len(rows), response_tokens=tokens))
        span.set_status(Status(StatusCode.OK))
        span.end(at_ns)

    def _failed(self, event: ev.SessionFailed, at_ns: int) -> None:
        span = self._open[event.group_id].sessions.pop(event.session, None)
        if span is None:
            return  # It never began.
        span.set_attributes(_named(phase="failed", reason=event.failure, retried=event.retry_in_s is not None))
        if event.failure != "spare":
            span.set_status(Status(StatusCode.ERROR, event.failure))
        span.end(at_ns)

    def _break_off(self, found: _Open, at_ns: int, reason: str) -> None:
        for span in found.sessions.values():
            span.set_attributes(_named(phase="broken off", reason=reason))
            span.set_status(Status(StatusCode.ERROR, reason))
            span.end(at_ns)
        found.sessions.clear()

    # The run -------------------------------------------------------------------------------------------

    def _closed(self, event: ev.RunClosed, at_ns: int) -> None:
        self._end_all(at_ns, "the run closed")

    def _end_all(self, at_ns: int, reason: str) -> None:
        for found in self._open.values():
            self._break_off(found, at_ns, reason)
            found.span.set_attributes(_named(reason=reason))
            found.span.end(at_ns)
        self._open.clear()
        self._batches.clear()


def _named(**attributes: Any) -> dict[str, Any]:
    return {f"groupstate.{name}": value for name, value in attributes.items()}


_HANDLERS: Final[dict[type[ev.Event], Callable[[Spans, Any, int], None]]] = {
    ev.RunClosed: Spans._closed,
    ev.GroupSubmitted: Spans._submitted,
    ev.GroupFinished: Spans._ended,
    ev.GroupFailed: Spans._ended,
    ev.GroupRequeued: Spans._requeued,
    ev.GroupEvicted: Spans._evicted,
    ev.SessionStarted: Spans._started,
    ev.SessionFinished: Spans._finished,
    ev.SessionFailed: Spans._failed,
    ev.BatchSampled: Spans._sampled,
    ev.BatchReturned: Spans._returned,
    ev.BatchCommitted: Spans._committed,
}
