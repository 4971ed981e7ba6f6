"""Every exception of groupstate.

Three kinds of wrong have three tools: our own reasoning an `assert`, the caller or a file one of these, a
session or an engine a recorded `SessionFailed`. Where a program may want to act on the facts they are attributes,
so that nobody has to parse a text.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class GroupstateError(Exception):
    """Root of all errors that groupstate raises."""


# The caller ------------------------------------------------------------------------------------------


class IllegalTransition(GroupstateError):
    """An event that the group's phase has no cell for."""

    def __init__(self, group_id: str, phase: str | None, event: str, legal: Sequence[str]) -> None:
        self.group_id = group_id
        self.phase = phase
        self.event = event
        self.legal = tuple(legal)
        state = "was never submitted" if phase is None else f"is {phase}"
        accepts = ", ".join(legal) if legal else "nothing: that is the end of it"
        super().__init__(f"group {group_id!r} {state}, so {event} cannot happen; it accepts {accepts}")


class UnknownGroup(GroupstateError):
    """A group that isn't in the book: never submitted, or it has left."""

    def __init__(self, group_id: str, tried: str, known: str = "") -> None:
        self.group_id = group_id
        self.tried = tried
        super().__init__(f"cannot {tried}: group {group_id!r} is not in the book" + (f"; {known}" if known else ""))


class DuplicateGroup(GroupstateError):
    """A group id that the run has used already."""

    def __init__(self, group_id: str, where: str) -> None:
        self.group_id = group_id
        super().__init__(
            f"group id {group_id!r} is taken: {where}; give every group of a run an id of its own, "
            "or leave it out and one is made"
        )


class SessionStateError(GroupstateError):
    """A session was driven in an order that can't be: started twice, finished twice, out of range."""


class UnusableResult(GroupstateError):
    """What a session returned can't be recorded: a metric that is not finite, a wrong type, misfit lengths."""


class UnknownBatch(GroupstateError):
    """A batch that isn't out: never sampled, committed already, or returned; or one of another run."""

    def __init__(self, batch: int, tried: str, state: str) -> None:
        self.batch = batch
        super().__init__(f"cannot {tried} batch {batch}: it {state}")


class UnusableBatch(GroupstateError):
    """A batch that can't be made into tensors as asked: a row lacks tokens, a reward or log-probabilities."""

    def __init__(self, group_id: str, session: int, index: int, what: str, advice: str) -> None:
        self.group_id = group_id
        self.session = session
        self.index = index
        super().__init__(f"trajectory {index} of session {session} of group {group_id!r} {what}; {advice}")


class BadSettings(GroupstateError):
    """Rules or settings that contradict themselves, a key that doesn't exist, or a value of another kind than it must
    be."""


class WrongEventLoop(GroupstateError):
    """A run was awaited in another event loop than the one that it was opened in. Nothing has changed."""


class WeightVersionError(GroupstateError):
    """A weight version that goes backwards."""


# Waiting ---------------------------------------------------------------------------------------------


class SampleError(GroupstateError):
    """A `sample()` that can't be answered. The groups that were ready stay ready."""


class NotEnoughGroups(SampleError):
    """The source is exhausted and what is left can't make up the batch."""

    def __init__(self, needed: int, counts: Mapping[str, int], text: str) -> None:
        self.needed = needed
        self.counts = dict(counts)
        super().__init__(text)


class MissingMetric(SampleError):
    """A finished group lacks the metric that the filter reads."""

    def __init__(self, group_id: str, session: int, metric: str, present: Sequence[str]) -> None:
        self.group_id = group_id
        self.session = session
        self.metric = metric
        self.present = tuple(present)
        there = ", ".join(map(repr, present)) if present else "none at all"
        super().__init__(
            f"session {session} of group {group_id!r} has no metric {metric!r}, which filter_metric reads; "
            f"it has {there}. Report {metric!r} from every session, name another filter_metric, or set "
            "on_missing to 'keep' or 'evict'"
        )


class EvictionStreak(SampleError):
    """Group after group was evicted and none became sampleable."""

    def __init__(self, streak: int, bound: int, reasons: Mapping[str, int], text: str) -> None:
        self.streak = streak
        self.bound = bound
        self.reasons = dict(reasons)
        super().__init__(text)


class RefillLimitExceeded(SampleError):
    """One batch took more groups than `generated_groups_max` allows."""

    def __init__(self, generated: int, bound: int, reasons: Mapping[str, int], text: str) -> None:
        self.generated = generated
        self.bound = bound
        self.reasons = dict(reasons)
        super().__init__(text)


class SampleTimeout(SampleError, TimeoutError):
    """A `sample()` ran out of time; the text says what it was waiting for."""

    def __init__(self, timeout_s: float, explanation: Any) -> None:
        self.timeout_s = timeout_s
        """As it was given."""
        self.explanation = explanation
        """A `groupstate.Explanation`: what it was waiting for."""
        super().__init__(f"no batch within {timeout_s} s\n{explanation}")


class SamplerBusy(SampleError):
    """A second sampler in a partition that serves one at a time."""


class CustomRuleError(SampleError):
    """A selection rule of the user's own raised, or said what can't be done. Nothing of its answer was taken."""


class RolloutDied(SampleError):
    """The rollout ended with an error, so what a sampler waits for will not come."""


class SourceFailed(SampleError):
    """The prompt source raised, or gave what can't be submitted, and what is left can't make up the batch."""


class RunIsClosed(GroupstateError):
    """The run is closed or closing."""


# The log ---------------------------------------------------------------------------------------------


class LogError(GroupstateError):
    """Root of what can be wrong with a log."""


class CorruptLog(LogError):
    """Damage that is not a torn tail. Nothing was changed."""

    def __init__(self, path: str, offset: int, seq: int, what: str, advice: str = "") -> None:
        self.path = path
        self.offset = offset
        self.seq = seq
        self.what = what
        super().__init__(
            f"{path} is damaged at byte {offset}, in or after event {seq}: {what}." + (f" {advice}" if advice else "")
        )


class LostEvents(LogError):
    """Events that were acknowledged as durable are not there."""

    def __init__(self, path: str, first: int, last: int) -> None:
        self.path = path
        self.first = first
        self.last = last
        super().__init__(
            f"{path} lost events {first} to {last}: they were acknowledged as durable and are not there. "
            "The disk or the file system dropped them, or the files are an older copy."
        )


class CompactedLog(LogError):
    """Events that were asked for are gone: the run keeps only what came since its last checkpoints."""

    def __init__(self, path: str, asked: int, first_seq: int) -> None:
        self.path = path
        self.asked = asked
        self.first_seq = first_seq
        super().__init__(
            f"{path} has no event {asked} any more: it keeps events from {first_seq} on, and a snapshot of what was "
            f"before. Start at event {first_seq}"
        )


class LogFailed(LogError):
    """A write or a flush failed. The log refuses everything from then on; open the run again."""


class LogInUse(LogError):
    """Another process writes this log."""


class NotARun(LogError):
    """A path that is not a run directory."""


class UnsupportedLog(LogError):
    """A log of a format or with an event kind that this version of groupstate doesn't know."""


class DamagedPayload(LogError):
    """A payload that is missing or isn't what its event says."""


class BadMark(LogError):
    """A checkpoint mark of another run, of a later log, or too old to go back to."""


# Engines and input -----------------------------------------------------------------------------------


class EngineError(GroupstateError):
    """An engine refused a request or died."""


class RequestRefused(EngineError):
    """A request that the engine can't serve, now or later: too long, not its tokens, a parameter that it doesn't have.
    Nothing was sent."""


class EngineUnavailable(EngineError):
    """A request that failed by the way to the engine or by a fault of its server; the same again may succeed."""


class EngineDied(EngineError):
    """The engine is gone: it crashed or was closed. No request will be served any more."""


class BadInput(GroupstateError):
    """A file, a prompt or an argument that can't be used; the text says which, for a file which line, and what would be
    right."""


class NotReproduced(GroupstateError):
    """No scenario was found in which the same is decided as in a log."""

    def __init__(self, group_id: str, decision: str, seq: int, found: str) -> None:
        self.group_id = group_id
        self.seq = seq
        super().__init__(
            f"no scenario was found in which group {group_id!r} is {decision}, as it is at event {seq}; the steps of "
            f"the whole log lead elsewhere: {found}. What can't be said as steps: a rule of the run's own that isn't "
            "at hand, a source that ran dry, damaged payloads, what happened in the middle of an opening"
        )


class MissingExtra(GroupstateError):
    """A feature needs a package that isn't installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.feature = feature
        self.package = package
        self.extra = extra
        super().__init__(
            f"{feature} needs {package}; install the extra {extra!r} of groupstate, for instance from a clone: "
            f"pip install '.[{extra}]'"
        )


class TrackerFailed(GroupstateError):
    """A tracker that could not be opened, so that its run wasn't either; `__cause__` is what it raised."""

    def __init__(self, tracker: str, what: str) -> None:
        self.tracker = tracker
        super().__init__(
            f"the tracker {tracker!r} could not be opened: {what}. The run was not opened either; put right what it "
            "says, or leave this tracker out of trackers="
        )


class CannotServe(GroupstateError):
    """A port at which nothing can be served: taken, not allowed, or of no such host. `__cause__` is the system's."""

    def __init__(self, what: str, host: str, port: int, error: OSError, advice: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"cannot serve {what} at {host}:{port}: {error.strerror or error}; {advice}")


class Unsupported(GroupstateError):
    """The platform or the event loop lacks something that groupstate needs."""
