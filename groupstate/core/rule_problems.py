"""What is wrong with a set of rules, before anything runs under them.

Rule: a setting that could never take effect, or that would leave a sampler waiting for ever, is a problem too.
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
