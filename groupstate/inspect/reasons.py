"""Why a group was evicted, in words, with the numbers of the decision."""

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.rules import Rules
from groupstate.inspect.words import counted, one_line


def reasons_in_words(event: ev.GroupEvicted, before: Group, rules: Rules) -> str:
    """Every reason with its numbers, and the credit.

    Args:
        before: the group as it was when it was evicted.
        rules: those in force then.
    """
    why = "; ".join(f"{reason}: {_reason(reason, event, before, rules)}" for reason in event.reasons)
    earned = f"it earned {counted(event.credit, 'refill')}" if event.credit else "it earned no refill"
    return f"{why}; {earned}"


def spread_in_words(group: Group, rules: Rules) -> str:
    """The values that the filter for zero variance looks at; nothing without a filter."""
    metric = rules.filter_metric
    if metric is None:
        return ""
    ranges = group.trajectory_ranges if rules.per == "trajectory" else group.session_ranges
    if metric not in ranges:
        return f"no value of {metric}"
    low, high, count = ranges[metric]
    return (
        f"{metric} from {low:g} to {high:g} over {counted(count, 'value')} "
        f"(range {high - low:g}, tolerance {rules.tolerance_for(group.dataset):g})"
    )


def _reason(reason: ev.EvictReason, event: ev.GroupEvicted, before: Group, rules: Rules) -> str:
    if reason == "stale":
        if event.message and event.reasons == ("stale",):
            return one_line(event.message)
        return f"lag {event.lag} is above lag_max {rules.lag_bound(before.dataset)}"
    if reason == "zero_variance":
        return _zero_variance(event, before, rules)
    return {
        "cancelled": "it was given up",
        "custom": one_line(event.message) or f"selection {rules.selection} dropped it",
        "damaged": one_line(event.message) or "a payload can't be read",
        "empty": "it has no trajectory",
        "failed": f"{before.failed_count} of {before.size} sessions failed",
        "surplus": "the batch was full without it",
        "too_few": f"{before.finished_count} of {before.size} sessions finished, "
        f"survivors_min is {rules.survivors_min}",
    }[reason]


def _zero_variance(event: ev.GroupEvicted, before: Group, rules: Rules) -> str:
    metric = rules.filter_metric
    ranges = before.trajectory_ranges if rules.per == "trajectory" else before.session_ranges
    low, high, count = ranges.get(metric or "", (0.0, 0.0, 0))
    tolerance = rules.tolerance_for(before.dataset)
    if count > 1 and high - low <= tolerance:
        shared = "" if event.shared_value is None else f" is {event.shared_value:g}"
        return f"{metric}{shared} in all {count} values (max - min {high - low:g}, tolerance {tolerance:g})"
    if count > 1 and rules.spread == "std":
        return f"the deviation of {metric} over {count} values is within tolerance {tolerance:g}"
    if count == 1 and rules.on_singleton == "evict":
        return f"a single value of {metric}, and on_singleton is 'evict'"
    return f"{counted(count, 'value')} of {metric}, and on_missing is {rules.on_missing!r}"
