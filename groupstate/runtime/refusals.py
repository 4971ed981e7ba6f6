"""Why a waiting `sample()` can't ever be answered, as the error that it raises.

Rule: an error only where it is certain; whatever might still come is waited for, and `explain()` says what it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from groupstate.core import events as ev
from groupstate.core.held import OpenRequest
from groupstate.core.rules import Slots
from groupstate.core.select import in_flight_for, ready_for, unservable
from groupstate.core.supply import generation_left, unjudged_count
from groupstate.errors import (
    EvictionStreak,
    LogFailed,
    MissingMetric,
    NotEnoughGroups,
    RefillLimitExceeded,
    RolloutDied,
    RunIsClosed,
    SampleError,
    SourceFailed,
)
from groupstate.runtime.session import describe

if TYPE_CHECKING:
    from groupstate.runtime.controller import Controller


def refusal(controller: "Controller", request: OpenRequest) -> Exception | None:
    """What a waiting `sample()` raises; None if its batch may come."""
    if controller.closing:
        return RunIsClosed("the run is closing, so no more batches are given out; what is sampleable stays so")
    if controller.dead is not None:
        return death(controller)
    if request.partition != ev.TRAIN:
        return None
    return _training_refusal(controller, request)


def death(controller: "Controller") -> Exception:
    """The rollout's or the log's end, as what a sampler raises."""
    assert controller.dead is not None
    controller.death_told = True
    if isinstance(controller.dead, LogFailed):
        return controller.dead
    error = RolloutDied(f"the rollout died, so what is waited for will not come: {describe(controller.dead)}")
    error.__cause__ = controller.dead
    return error


def why_never(controller: "Controller", count: int, partition: ev.Partition) -> Exception | None:
    """Why `count` groups will not be sampleable together, as far as that is certain; None if they may be."""
    if controller.closing:
        return RunIsClosed("the run is closing: no more groups become sampleable")
    if controller.dead is not None:
        return death(controller)
    if partition != ev.TRAIN:
        return None
    book, rules = controller.book, controller.rules
    if (stuck := _stuck(controller, count)) is not None:
        return stuck
    if unjudged_streak(controller):
        heap = unjudged_count(book)
        text = f"{heap} groups ended without a trajectory and none became sampleable; every session fails"
        return EvictionStreak(heap, rules.streak_bound(count), {"empty": heap}, text)
    rule = rules.admission_rule
    if controller.admits and isinstance(rule, Slots) and count > rule.n + rule.ready_max:
        counts = {"needed": count, "admitted": rule.n + rule.ready_max}
        text = f"admission 'slots' lets {rule.n} + {rule.ready_max} groups be ready or in flight, {count} are wanted"
        return NotEnoughGroups(count, counts, f"{text}; raise ready_max, or sample instead of waiting")
    held = ready_for(book, rules) + in_flight_for(book, rules)
    most = held + generation_left(book, rules)
    if most < count:
        window = book.window(ev.TRAIN)
        text = (
            f"{count} groups can't be sampleable together: {window.submitted} were submitted for this batch and "
            f"generated_groups_max is {rules.generated_groups_max}, so there can be {most} at most"
        )
        return RefillLimitExceeded(window.submitted, rules.generated_groups_max or 0, window.evicted, text)
    left = held + len(book.credits)
    drawing = controller.drawing
    if drawing.source is None or drawing.possible or count <= left:
        return None
    counts = {"needed": count, "sampleable": controller.sampleable_count(partition), "left": left}
    end = "is exhausted" if drawing.error is None else f"failed: {describe(drawing.error)}"
    return NotEnoughGroups(count, counts, f"the source {end}, and no more than {left} groups are left; {count} wanted")


def unjudged_streak(controller: "Controller") -> bool:
    """Sync mode evicts nothing while no `sample()` waits, so the streak shows in what has heaped up."""
    bound = controller.rules.streak_bound(max(controller.watched, default=1))
    return unjudged_count(controller.book) >= bound


def _stuck(controller: "Controller", size: int) -> SampleError | None:
    """Why training groups don't become sampleable; None if they do."""
    if controller.missing:
        first = next(iter(controller.missing.values()))
        return MissingMetric(first.group_id, first.session, first.metric, first.present)
    bound = controller.rules.streak_bound(size)
    if controller.streak >= bound:
        text = (
            f"{controller.streak} groups in a row were evicted and none became sampleable (bound {bound}): "
            f"{_listed(controller.streak_reasons)}{_without_trajectory(controller)}. {_why_streak(controller)}; "
            "raise eviction_streak_max to go on longer"
        )
        return EvictionStreak(controller.streak, bound, controller.streak_reasons, text)
    return None


def _without_trajectory(controller: "Controller") -> str:
    """What `empty` means, where it might be taken for groups that ended well alone."""
    if not controller.streak_reasons.get("empty"):
        return ""
    return " (empty: it ended without any trajectory, finished or failed)"


def _why_streak(controller: "Controller") -> str:
    """What is most likely behind a streak of evictions."""
    reasons = controller.streak_reasons
    if told := last_failure(controller, reasons):
        return f"The {told}"
    if reasons["custom"]:
        return f"Selection {controller.rules.selection!r} drops whatever it is shown"
    single = ""
    if reasons["zero_variance"] and controller.rules.on_singleton == "evict":
        single = ", groups have one session each, which on_singleton 'evict' throws away"
    return (
        f"The tasks are all too easy or too hard, the reward is constant{single}, or the weights move faster than "
        "sessions end"
    )


def last_failure(controller: "Controller", reasons: Mapping[str, int]) -> str:
    """The session that failed last, where groups were evicted for such a reason; else nothing."""
    failed = controller.last_failure
    if failed is None or not any(reasons.get(reason) for reason in ("empty", "failed", "too_few")):
        return ""
    who = f"session {failed.session} of group {failed.group_id!r}"
    return f"last session to fail was {who} ({failed.failure}): {failed.message}"


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()) if count) or "none evicted"


def _training_refusal(controller: "Controller", request: OpenRequest) -> SampleError | None:
    if (wrong := controller.wrong_answers.pop(request.request, None)) is not None:
        return wrong
    if (stuck := _stuck(controller, request.size)) is not None:
        return stuck
    if (limited := _limited(controller, request)) is not None:
        return limited
    book, rules, drawing = controller.book, controller.rules, controller.drawing
    if drawing.source is None:
        return None
    if drawing.error is not None and unservable(book, rules, no_more=True) == request:
        name = getattr(drawing.source, "name", type(drawing.source).__name__)
        failed = SourceFailed(f"source {name!r} failed at prompt {drawing.failed_at}: {describe(drawing.error)}")
        failed.__cause__ = drawing.error
        return failed
    return _not_enough(controller, request) if unservable(book, rules) == request else None


def _limited(controller: "Controller", request: OpenRequest) -> RefillLimitExceeded | None:
    """More groups were submitted for one batch than may be, or more would have to be."""
    limit = controller.rules.generated_groups_max
    if limit is None:
        return None
    book, rules = controller.book, controller.rules
    window = book.window(ev.TRAIN)
    if window.submitted > limit:
        text = f"this batch took {window.submitted} groups, generated_groups_max is {limit}"
        return RefillLimitExceeded(
            window.submitted, limit, window.evicted, f"{text}; evicted: {_listed(window.evicted)}"
        )
    most = ready_for(book, rules) + in_flight_for(book, rules) + limit - window.submitted
    if book.waiting()[0] != request or most >= request.size:
        return None
    text = (
        f"sample({request.size}) can't be met: {window.submitted} groups were submitted for this batch and "
        f"generated_groups_max is {limit}, so there can be {most} at most; evicted: {_listed(window.evicted)}"
    )
    return RefillLimitExceeded(window.submitted, limit, window.evicted, text)


def _not_enough(controller: "Controller", request: OpenRequest) -> NotEnoughGroups:
    book, rules = controller.book, controller.rules
    ready, flying = ready_for(book, rules), in_flight_for(book, rules)
    ahead = sum(r.size for r in book.waiting() if r.request < request.request)
    counts = {"needed": request.size, "sampleable": ready, "in_flight": flying, "older_waiters": ahead}
    older = f", of which older samplers wait for {ahead}" if ahead else ""
    left = ready + flying - ahead
    evicted = book.window(ev.TRAIN).evicted
    told = last_failure(controller, evicted)
    gone = f"; evicted since the last batch: {_listed(evicted)}" if evicted else ""
    advice = f"sample a batch of at most {left}" if left > 0 else "nothing is left: give more prompts, or end the loop"
    return NotEnoughGroups(
        request.size,
        counts,
        f"sample({request.size}) can't be met: the source is exhausted, {ready} groups are sampleable and "
        f"{flying} in flight{older}; they stay so: {advice}{gone}" + (f". The {told}" if told else ""),
    )
