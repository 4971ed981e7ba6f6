"""The rules of a run: settings that say what is evicted, refilled, admitted and selected.

Rule 1: rules are data; they are written into the log, so that a replay never needs the file they came from.
Rule 2: what contradicts itself is refused here, once, before a run begins.
"""

import difflib
from typing import Any, Literal, TypeAlias

import msgspec

from groupstate.errors import BadSettings

RULES_VERSION = 1
"""Raised when the meaning of a setting changes; old logs say which meaning was in force."""

Basis: TypeAlias = Literal["dispatch", "first_token", "oldest_token", "newest_token"]


class PerBatch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="per_batch", tag_field="kind"
):
    """Keep `warmup` batches of groups ahead of what samplers are waiting for."""

    warmup: int = 1


class Slots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="slots", tag_field="kind"):
    """At most `n` groups in flight, at most `n + ready_max` in flight and sampleable together."""

    n: int
    ready_max: int = 0


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="capacity", tag_field="kind"):
    """Never more groups than can still be sampled with a lag of at most `lag_max`."""

    lag_max: int


Admission: TypeAlias = PerBatch | Slots | Capacity


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["async", "sync"] = "async"
    batch_size: int | None = None
    """Groups per batch, where it is the same for every `sample()`; bounds that count batches need it."""

    lag_max: int | None = None
    """Highest lag, in weight versions, that may be trained on; None: no bound."""
    on_stale: Literal["drop", "wait"] = "drop"
    """What the bound does: `drop` evicts a group above it, `wait` holds sampling while one could go above."""
    basis: Basis = "dispatch"
    """What lag is counted from."""

    filter_metric: str | None = None
    """Metric whose zero variance evicts a group (DAPO's dynamic sampling); None: no filter."""
    per: Literal["session", "trajectory"] = "session"
    """One value per session (its last trajectory's) or one per trajectory."""
    tolerance: float = 0.0
    """Zero variance iff max - min <= tolerance."""
    on_singleton: Literal["keep", "evict"] = "keep"
    """A group with a single value."""
    on_missing: Literal["error", "keep", "evict"] = "error"
    """A finished session without the metric."""

    failure: Literal["keep", "refill"] = "keep"
    """Sync mode only: keep a failed group that has trajectories, or evict it for one refill. Async evicts."""
    empty: Literal["refill", "drop"] = "refill"
    """Sync mode only: what evicting a group without any trajectory earns, one refill or none."""
    empty_session: Literal["fail", "allow"] = "fail"
    """A session that returns no trajectory has failed, or has finished with none."""
    survivors_min: int | None = None
    """A failed group with at least so many finished sessions counts as finished (partial)."""
    attempts_max: int = 1
    """Attempts per session, for failures that are retryable."""
    retry_delay_s: float = 1.0
    """Seconds before the second attempt; doubled for each further one."""

    in_flight_batches_max: int = 1
    """Sync mode with a filter: refills never take in flight past so many batches."""
    generated_groups_max: int | None = None
    """Most groups submitted for one batch; past it the waiting `sample()` raises."""
    eviction_streak_max: int | None = None
    """Evictions in a row, none sampleable between, that stop the run; None: 8 batches."""

    admission: Admission | None = None
    """When the rollout may start new prompts; None: `per_batch`, one batch ahead (sync: none)."""
    stall_s: float = 60.0
    """Seconds without progress after which a waiting `sample()` says what it waits for."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise BadSettings(problem)

    @property
    def admission_rule(self) -> Admission:
        if self.admission is not None:
            return self.admission
        return PerBatch(warmup=1 if self.mode == "async" else 0)

    @property
    def drops_stale(self) -> bool:
        return self.mode == "async" and self.lag_max is not None and self.on_stale == "drop"

    @property
    def waits_for_stale(self) -> bool:
        return self.mode == "async" and self.lag_max is not None and self.on_stale == "wait"

    @property
    def drains(self) -> bool:
        """Sync mode with a filter: dispatch stops at the demand and what is in flight is awaited."""
        return self.mode == "sync" and self.filter_metric is not None

    def evicts_failed(self) -> bool:
        return self.mode == "async" or self.failure == "refill"

    def streak_bound(self, demand: int) -> int:
        return self.eviction_streak_max or 8 * (self.batch_size or demand)

    def to_dict(self) -> dict[str, Any]:
        """As the log keeps it."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


def _problems(rules: Rules) -> list[str]:
    found = []
    for name, least in (
        ("batch_size", 1),
        ("lag_max", 0),
        ("tolerance", 0),
        ("survivors_min", 1),
        ("attempts_max", 1),
        ("retry_delay_s", 0),
        ("in_flight_batches_max", 1),
        ("generated_groups_max", 1),
        ("eviction_streak_max", 1),
        ("stall_s", 0),
    ):
        value = getattr(rules, name)
        if value is not None and not least <= value < float("inf"):
            found.append(f"{name} is {value!r}; it must be at least {least}")
    found += _admission_problems(rules)
    if rules.mode == "sync" and rules.filter_metric is not None and rules.batch_size is None:
        found.append("sync mode with a filter_metric needs batch_size: its refills are bounded in batches")
    if rules.waits_for_stale and rules.lag_max == 0 and not isinstance(rules.admission_rule, PerBatch):
        found.append("on_stale 'wait' with lag_max 0 needs admission 'per_batch': anything else deadlocks")
    return found


def _admission_problems(rules: Rules) -> list[str]:
    rule = rules.admission
    if rule is None:
        return []
    found = [
        f"admission's {name} is {getattr(rule, name)!r}; it must be at least {least}"
        for name, least in (("warmup", 0), ("n", 1), ("ready_max", 0), ("lag_max", 0))
        if hasattr(rule, name) and getattr(rule, name) < least
    ]
    if isinstance(rule, Capacity) and rules.batch_size is None:
        found.append("admission 'capacity' needs batch_size: it counts in batches")
    return found


def rules_from_dict(data: dict[str, Any], where: str = "rules") -> Rules:
    """Rules from a settings file or a log.

    Raises:
        BadSettings: an unknown key (named, with the nearest right one), a wrong type, a contradiction.
    """
    known = Rules.__struct_fields__
    for key in data:
        if key not in known:
            raise BadSettings(unknown_key(key, known, where))
    try:
        return msgspec.convert(data, Rules)
    except msgspec.ValidationError as error:
        raise BadSettings(f"{where}: {error}") from error


def unknown_key(key: str, known: tuple[str, ...], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"{where} has no setting {key!r}; {hint}"
