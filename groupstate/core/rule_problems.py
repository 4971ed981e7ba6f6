"""What is wrong with a set of rules, before anything runs under them.

Rule 1: what nothing could run under, or what would leave a sampler waiting for ever, is a problem wherever it stands.
Rule 2: what asks for something that the other settings rule out is a contradiction, told to whoever writes it. It
is read from logs: rules that were taken once are taken for ever, and new contradictions are added here alone.
Rule 3: a setting that only says how something is done which is off is neither; docs/rules.md lists them.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupstate.core.rules import Rules


def problems(rules: "Rules") -> list[str]:
    """One sentence for each thing that is wrong."""
    found = []
    for name in ("session_deadline_s", "group_deadline_s"):
        value = getattr(rules, name)
        if value is not None and not 0 < value < math.inf:
            found.append(f"{name} is {value!r}; it must be above 0 and finite")
    found += _admission_problems(rules)
    found += _batch_problems(rules)
    found += _stale_problems(rules)
    found += _selection_problems(rules)
    found += _dataset_problems(rules)
    return found


def contradictions(rules: "Rules") -> list[str]:
    """One sentence for each setting that asks for what the others rule out."""
    return [*(_sync_contradictions(rules) if rules.mode == "sync" else _async_contradictions(rules)), *_void(rules)]


def _sync_contradictions(rules: "Rules") -> list[str]:
    found = []
    bounds = {"lag_max": rules.lag_max}
    bounds |= {f"datasets[{name!r}] has lag_max, which": rules.datasets[name].lag_max for name in rules.lag_classes}
    for name, bound in bounds.items():
        if bound is not None:
            found.append(
                f"{name} bounds nothing in sync mode, where no group is evicted or awaited for its age: leave it out, "
                "or set mode 'async'"
            )
    return found


def _async_contradictions(rules: "Rules") -> list[str]:
    found = []
    if rules.empty not in {"refill", "keep_finished"}:
        found.append(
            f"empty {rules.empty!r} is for sync mode: async mode evicts every failed group, and one without a "
            "trajectory for one refill; leave it out, or take 'keep_finished'"
        )
    if rules.in_flight_batches_max != 1:
        found.append(
            "in_flight_batches_max bounds the refills of sync mode; in async mode admission bounds what is in flight, "
            "such as Slots(n=...)"
        )
    return found


def _void(rules: "Rules") -> list[str]:
    attempt_s, group_s = rules.session_deadline_s, rules.group_deadline_s
    if attempt_s is None or group_s is None or attempt_s <= group_s:
        return []
    return [
        f"session_deadline_s {attempt_s:g} is above group_deadline_s {group_s:g}, and a group's time begins first, so "
        "no session could ever come to its own deadline"
    ]


def _admission_problems(rules: "Rules") -> list[str]:
    if hasattr(rules.admission, "lag_max") and rules.batch_size is None:
        return ["admission 'capacity' needs batch_size: it counts in batches"]
    return []


def _batch_problems(rules: "Rules") -> list[str]:
    found = []
    size, limit = rules.batch_size, rules.generated_groups_max
    if rules.drains and size is None:
        found.append("sync mode with a filter_metric needs batch_size: its refills are bounded in batches")
    if size is not None and limit is not None and limit < size:
        found.append(f"generated_groups_max {limit} is below batch_size {size}, so no batch could ever be filled")
    most = _in_flight_max(rules)
    if rules.refill_multiple > most:
        found.append(f"refill_multiple {rules.refill_multiple} is above the {most} groups that may be in flight")
    return found


def _in_flight_max(rules: "Rules") -> float:
    """Most groups that refills may bring in flight."""
    bounds = [getattr(rules.admission, "n", None), getattr(rules.admission, "in_flight_max", None)]
    if rules.drains and rules.batch_size is not None:
        bounds.append(rules.in_flight_batches_max * rules.batch_size)
    return min((bound for bound in bounds if bound is not None), default=math.inf)


def _stale_problems(rules: "Rules") -> list[str]:
    found = []
    bounded = rules.lag_max is not None or bool(rules.lag_classes)
    if rules.on_stale == "wait" and not bounded:
        found.append("on_stale 'wait' waits for groups at the lag bound, and lag_max is not set")
    if rules.waits_for_stale and rules.admission is not None and not hasattr(rules.admission, "warmup"):
        for name in ("", *sorted(rules.lag_classes)):
            if rules.lag_bound(name) == 0:
                found.append("on_stale 'wait' with lag_max 0 needs admission 'per_batch': anything else deadlocks")
                break
    if rules.cancel_doomed and rules.mode == "sync" and rules.failure == "keep":
        found.append(
            "cancel_doomed needs failure 'refill' in sync mode: with 'keep' a group in flight may be sampled whatever "
            "becomes of it"
        )
    return found


def _selection_problems(rules: "Rules") -> list[str]:
    found = []
    if rules.has_own_selection and not all(rules.selection.rpartition(":")[::2]):
        found.append(
            f"selection is {rules.selection!r}; it must be 'oldest_first', 'freshest_first', 'exact_version' or "
            "the import path of a function, 'module:function'"
        )
    if rules.targets_versions != (rules.basis == "target_version"):
        found.append("selection 'exact_version' and basis 'target_version' go together: set both or neither")
    if not rules.targets_versions:
        return found
    if rules.mode != "async" or rules.on_stale != "drop" or rules.lag_max != 0 or rules.lag_classes:
        found.append(
            "selection 'exact_version' needs mode 'async', on_stale 'drop' and lag_max 0: a group whose version has "
            "passed can never be sampled"
        )
    if rules.batch_size is None:
        found.append("selection 'exact_version' needs batch_size: so many groups are made for each weight version")
    return found


def _dataset_problems(rules: "Rules") -> list[str]:
    found = []
    shares = [own.share for own in rules.datasets.values() if own.share is not None]
    if shares and sum(shares) > 1 + 1e-9:
        found.append(f"the shares of the datasets add up to {sum(shares):g}; it must be at most 1")
    return found
