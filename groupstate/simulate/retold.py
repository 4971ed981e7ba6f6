"""Tells what a log holds as a scenario file: what was done from outside as steps, what followed from it left to happen.

Rule: a scenario counts only if playing it ends in the same breach. Where time decides (deadlines, cancellations in the
middle of a wait) it may not, and then there is none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.simulate.kinds import MalformedScenario
from groupstate.simulate.plan import Plan
from groupstate.simulate.plan_file import toml_value
from groupstate.simulate.scenario import StepFailed, play
from groupstate.simulate.scenario_file import parse

PLAYS_MAX = 400
"""Plays that making a scenario smaller may take."""

LEFT_OUT = ("session_deadline_s", "group_deadline_s", "stall_s", "datasets", "generated_groups_max")
"""Rules that a scenario does without: its steps say what time did, and groups are submitted by hand."""

Step = dict[str, Any]


@attrs.frozen
class After:
    """What comes behind an event."""

    _all: Sequence[ev.AnyEvent]
    _number: int

    def events(self) -> Iterator[ev.AnyEvent]:
        return (self._all[number] for number in range(self._number + 1, len(self._all)))


@attrs.define
class Teller:
    """Makes steps of events, given in order."""

    steps: list[Step] = attrs.Factory(list)
    version: int = 0
    closed: bool = False
    recovering: bool = False
    waiters: dict[int, int] = attrs.Factory(dict)
    """Request -> its number among the sample steps, those that wait."""
    samples: int = 0
    cancelled: set[str] = attrs.Factory(set)

    def tell(self, event: ev.AnyEvent, after: "After") -> None:
        teller = _BY_KIND.get(type(event))
        if teller is None:
            return
        if self.recovering and isinstance(event, ev.GroupRequeued | ev.BatchReturned | ev.RunRewound):
            return  # recovery does this by itself
        self.recovering = False
        self.steps.extend(teller(self, event, after))

    def _submitted(self, event: ev.GroupSubmitted, after: "After") -> Iterator[Step]:
        step: Step = {"submit": event.group_id, "n": event.size - event.oversample}
        if event.weight_version != self.version:
            step["weight_version"] = event.weight_version
        if event.target_version is not None:
            step["target_version"] = event.target_version
        if event.partition != ev.TRAIN:
            step["partition"] = event.partition
        yield step

    def _started(self, event: ev.SessionStarted, after: "After") -> Iterator[Step]:
        yield {"start": f"{event.group_id}/{event.session}", "attempt": event.attempt}

    def _finished(self, event: ev.SessionFinished, after: "After") -> Iterator[Step]:
        rows = []
        for row in event.trajectories:
            versions = [span.weight_version for span in row.spans for _ in range(span.start, span.stop)]
            rows.append({"metrics": dict(row.metrics), **({"versions": versions} if versions else {})})
        yield {"finish": f"{event.group_id}/{event.session}", "attempt": event.attempt, "trajectories": rows}

    def _failed(self, event: ev.SessionFailed, after: "After") -> Iterator[Step]:
        if event.failure == "spare" or event.group_id in self.cancelled:
            return
        if event.failure == "cancelled" and _is_given_up(event.group_id, after):
            self.cancelled.add(event.group_id)
            yield {"cancel": event.group_id}
            return
        yield {
            "fail": f"{event.group_id}/{event.session}",
            "attempt": event.attempt,
            "kind": event.failure,
            "retryable": event.retry_in_s is not None,
        }

    def _fenced(self, event: ev.ResultFenced, after: "After") -> Iterator[Step]:
        verb = {"finished": "finish", "failed": "fail", "started": "start"}[event.result]
        if event.attempt >= 1:
            yield {verb: f"{event.group_id}/{event.session}", "attempt": event.attempt}

    def _requeued(self, event: ev.GroupRequeued, after: "After") -> Iterator[Step]:
        self.cancelled.discard(event.group_id)
        if not event.by_rule and not event.reason.startswith("the run closed"):
            stamp = {} if event.weight_version is None else {"weight_version": event.weight_version}
            yield {"requeue": event.group_id, **stamp}

    def _published(self, event: ev.WeightsPublished, after: "After") -> Iterator[Step]:
        self.version = event.weight_version
        yield {"publish": event.weight_version}

    def _requested(self, event: ev.BatchRequested, after: "After") -> Iterator[Step]:
        self.samples += 1
        self.waiters[event.request] = self.samples
        yield {"sample": event.size, **({} if event.partition == ev.TRAIN else {"partition": event.partition})}

    def _request_cancelled(self, event: ev.BatchRequestCancelled, after: "After") -> Iterator[Step]:
        if (waiter := self.waiters.pop(event.request, None)) is not None:
            yield {"cancel_sample": True, "waiter": waiter}

    def _committed(self, event: ev.BatchCommitted, after: "After") -> Iterator[Step]:
        yield {"commit": event.batch}

    def _returned(self, event: ev.BatchReturned, after: "After") -> Iterator[Step]:
        yield {"release": event.batch}

    def _marked(self, event: ev.CheckpointMarked, after: "After") -> Iterator[Step]:
        yield {"checkpoint": f"mark {event.mark}"}

    def _closed(self, event: ev.RunClosed, after: "After") -> Iterator[Step]:
        self.closed = True
        yield {"close": True}

    def _recovered(self, event: ev.RunRecovered, after: "After") -> Iterator[Step]:
        if not self.closed:
            yield {"crash": True}
        self.closed, self.recovering = False, True
        self.version = event.weight_version
        self.cancelled.clear()
        # Whichever comes next says whether this opening went back.
        decisive = next((other for other in after.events() if isinstance(other, ev.RunRewound | ev.RunRecovered)), None)
        back = {"at": f"mark {decisive.mark}"} if isinstance(decisive, ev.RunRewound) else {}
        yield {"recover": True, **back}


def _is_given_up(group_id: str, after: After) -> bool:
    for event in after.events():
        if isinstance(event, ev.GroupFailed) and event.group_id == group_id:
            return event.cancelled
    return False


_BY_KIND: dict[type[ev.Event], Callable[[Teller, Any, After], Iterator[Step]]] = {
    ev.GroupSubmitted: Teller._submitted,
    ev.SessionStarted: Teller._started,
    ev.SessionFinished: Teller._finished,
    ev.SessionFailed: Teller._failed,
    ev.ResultFenced: Teller._fenced,
    ev.GroupRequeued: Teller._requeued,
    ev.WeightsPublished: Teller._published,
    ev.BatchRequested: Teller._requested,
    ev.BatchRequestCancelled: Teller._request_cancelled,
    ev.BatchCommitted: Teller._committed,
    ev.BatchReturned: Teller._returned,
    ev.CheckpointMarked: Teller._marked,
    ev.RunClosed: Teller._closed,
    ev.RunRecovered: Teller._recovered,
}


def steps_of(records: Iterable[ev.Record]) -> list[Step]:
    """What was done from outside, in order; the last step checks all invariants."""
    events = [record.event for record in records]
    teller = Teller()
    for number, event in enumerate(events):
        teller.tell(event, After(events, number))
    return [*teller.steps, {"check": True}]


def scenario_text(rules: Mapping[str, Any], steps: Sequence[Step], title: str) -> str:
    """A scenario file."""
    lines = [f"  {toml_value(step)}," for step in steps]
    return "\n".join([f"title = {toml_value(title)}", f"rules = {toml_value(rules)}", "steps = [", *lines, "]", ""])


def retold(plan: Plan, records: Sequence[ev.Record], kind: str, title: str) -> str | None:
    """A scenario file in which the same goes wrong, as small as it is found; None if there is none.

    Args:
        kind: of the breach, such as "invariant 1": only those show in a scenario.
    """
    plays = _Plays(plan, kind)
    steps = steps_of(records)
    if not kind.startswith("invariant") or not plays.fails(steps):
        return None
    return scenario_text(plays.rules, _fewer(steps, plays), title)


class _Plays:
    def __init__(self, plan: Plan, kind: str) -> None:
        self.rules = {name: value for name, value in plan.rules.items() if name not in LEFT_OUT}
        self._sign = f": {kind}:"
        self.count = 0

    def fails(self, steps: Sequence[Step]) -> bool:
        """Whether playing these ends in the breach, and in nothing else before."""
        self.count += 1
        try:
            play(parse({"rules": self.rules, "steps": list(steps)}))
        except StepFailed as failed:
            return self._sign in str(failed)
        except MalformedScenario:
            return False
        return False


def _fewer(steps: list[Step], plays: _Plays) -> list[Step]:
    """Leave out runs of steps, long ones first, while it still fails. The last one, the check, stays."""
    length = len(steps) // 2
    while length >= 1 and plays.count < PLAYS_MAX:
        before = len(steps)
        start = 0
        while start < len(steps) - 1 and plays.count < PLAYS_MAX:
            fewer = [*steps[:start], *steps[min(start + length, len(steps) - 1) :]]
            if plays.fails(fewer):
                steps = fewer
            else:
                start += length
        if length > 1 or len(steps) == before:
            length //= 2
    return steps
