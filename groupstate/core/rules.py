"""The rules of a run: settings that say what is evicted, refilled, admitted and selected.

Rule 1: rules are data; they are written into the log, so that a replay never needs the file they came from.
Rule 2: what contradicts itself is refused (`rule_problems`) once, before a run begins. What a log holds was taken then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from groupstate.core.phases import Phase, kept_empty
from groupstate.core.presets import preset
from groupstate.core.rule_problems import contradictions, problems
from groupstate.core.typed_settings import Settings, unknown_key
from groupstate.errors import BadSettings

RULES_VERSION = 1
"""Raised when the meaning of a setting changes; old logs say which meaning was in force."""

Basis: TypeAlias = Literal["dispatch", "first_token", "oldest_token", "newest_token", "target_version"]
SELECTIONS = ("oldest_first", "freshest_first", "exact_version")
"""Selections that come with the library; any other is the import path of a function."""


class PerBatch(Settings, frozen=True, tag="per_batch", tag_field="kind"):
    """Keep `warmup` batches of groups ahead of what samplers are waiting for."""

    WHERE = "PerBatch: "
    LEAST: ClassVar[Mapping[str, float]] = {"warmup": 0}

    warmup: int = 1


class Slots(Settings, frozen=True, tag="slots", tag_field="kind"):
    """At most `n` groups in flight, at most `n + ready_max` in flight and sampleable together."""

    WHERE = "Slots: "
    LEAST: ClassVar[Mapping[str, float]] = {"n": 1, "ready_max": 0}

    n: int
    ready_max: int = 0


class Capacity(Settings, frozen=True, tag="capacity", tag_field="kind"):
    """Never more groups than can still be sampled with a lag of at most `lag_max`."""

    WHERE = "Capacity: "
    LEAST: ClassVar[Mapping[str, float]] = {"lag_max": 0, "in_flight_max": 1}

    lag_max: int
    in_flight_max: int | None = None
    """Most groups in flight at any time; None: as many as the formula allows."""


Admission: TypeAlias = PerBatch | Slots | Capacity

_ADMISSION = {"async": PerBatch(warmup=1), "sync": PerBatch(warmup=0)}
"""Where the rules don't say. Made once: each decision asks."""


class PerDataset(Settings, frozen=True):
    """What holds for the groups of one dataset in place of the run's own setting; None: the run's."""

    WHERE = "PerDataset: "
    LEAST: ClassVar[Mapping[str, float]] = {"share": 0, "lag_max": 0, "tolerance": 0}
    MOST: ClassVar[Mapping[str, float]] = {"share": 1}

    share: float | None = None
    """Part of the kept groups (submitted and not evicted) that should be of this dataset, 0 to 1."""
    lag_max: int | None = None
    tolerance: float | None = None


class Rules(Settings, frozen=True, repr_omit_defaults=True):
    LEAST: ClassVar[Mapping[str, float]] = {
        "batch_size": 1,
        "lag_max": 0,
        "tolerance": 0,
        "survivors_min": 1,
        "attempts_max": 1,
        "retry_delay_s": 0,
        "requeues_max": 0,
        "oversample": 0,
        "in_flight_batches_max": 1,
        "generated_groups_max": 1,
        "eviction_streak_max": 1,
        "refill_multiple": 1,
        "share_tolerance": 0,
        "starvation_versions": 1,
        "stall_s": 0,
    }

    mode: Literal["async", "sync"] = "async"
    batch_size: int | None = None
    """Groups per batch, where it is the same for every `sample()`; bounds that count batches need it."""

    lag_max: int | None = None
    """Bound on the lag, in weight versions, that `on_stale` sees to in async mode; None: no bound."""
    on_stale: Literal["drop", "wait"] = "drop"
    """What the bound does: `drop` evicts a group above it, so that none is trained on; `wait` holds sampling while
    one in flight could go above. What has ended has no bound with `wait`."""
    basis: Basis = "dispatch"
    """What lag is counted from."""
    wait_gates: Literal["training", "each"] = "training"
    """What `wait` holds: sampling of the training partition, or of each partition by its own groups in flight."""
    cancel_doomed: bool = False
    """Cancel a group in flight at once when it can't be sampled any more, instead of letting it end."""

    filter_metric: str | None = None
    """Metric whose zero variance evicts a group (DAPO's dynamic sampling); None: no filter."""
    per: Literal["session", "trajectory"] = "session"
    """One value per session (its last trajectory's) or one per trajectory."""
    spread: Literal["range", "std"] = "range"
    """What is held against `tolerance`: max - min, or numpy's `std`, rounding and all."""
    tolerance: float = 0.0
    """Zero variance iff the spread <= tolerance."""
    on_singleton: Literal["keep", "evict"] = "keep"
    """A group with a single value."""
    on_missing: Literal["error", "keep", "evict"] = "error"
    """A finished session without the metric."""

    failure: Literal["keep", "refill"] = "keep"
    """Sync mode only: keep a failed group that has trajectories, or evict it for one refill. Async evicts."""
    empty: Literal["refill", "drop", "keep", "keep_finished", "keep_all"] = "refill"
    """A group without any trajectory is evicted for one refill, or (sync mode) for none; or it stays sampleable, with
    no row to train on: a failed one (`keep`, sync mode), a finished one, or each (`keep_all`, sync mode)."""
    empty_session: Literal["fail", "allow"] = "fail"
    """A session that returns no trajectory has failed, or has finished with none."""
    survivors_min: int | None = None
    """A failed group with at least so many finished sessions counts as finished (partial)."""
    attempts_max: int = 1
    """Attempts per session, for failures that are retryable."""
    retry_delay_s: float = 1.0
    """Seconds before the second attempt; doubled for each further one."""
    requeues_max: int = 0
    """Times that a failed group starts over with the same prompt before it counts as failed."""
    session_deadline_s: float | None = None
    """Seconds that an attempt may take; then it has failed as `timeout`, and is tried again as attempts allow."""
    group_deadline_s: float | None = None
    """Seconds from submission (or requeue) in which a group must end; then its open sessions fail as `timeout`."""
    oversample: int = 0
    """Sessions started beyond those that a training group needs; the last to finish are cancelled."""

    in_flight_batches_max: int = 1
    """Sync mode with a filter: refills never take in flight past so many batches."""
    generated_groups_max: int | None = None
    """Most groups submitted for one batch; past it the waiting `sample()` raises."""
    eviction_streak_max: int | None = None
    """Evictions in a row, none sampleable between, that stop the run; None: 8 batches."""
    refill_multiple: int = 1
    """Refills are submitted in multiples of this; what is left of the credit waits for more."""

    selection: str = "oldest_first"
    """Which sampleable groups a `sample()` gets: `oldest_first`, `freshest_first`, `exact_version`, or the import
    path `module:function` of a rule of your own."""
    datasets: dict[str, PerDataset] = msgspec.field(default_factory=dict)
    """Shares of datasets, and settings that differ for one."""
    share_tolerance: float = 0.1
    """How far above its share of the submitted groups a dataset may go to make up for its evicted ones."""
    starvation_versions: int | None = None
    """Weight versions without a sampled group after which a dataset that was submitted counts as starved."""

    admission: Admission | None = None
    """When the rollout may start new prompts; None: `per_batch`, one batch ahead (sync: none)."""
    stall_s: float = 60.0
    """Seconds without progress after which a waiting `sample()` says what it waits for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in problems(self):
            raise BadSettings(problem)

    def contradictions(self) -> Sequence[str]:
        return contradictions(self)

    @property
    def admission_rule(self) -> Admission:
        if self.admission is not None:
            return self.admission
        return _ADMISSION[self.mode]

    @property
    def bounds_lag(self) -> bool:
        return self.mode == "async" and (self.lag_max is not None or bool(self.lag_classes))

    @property
    def drops_stale(self) -> bool:
        return self.bounds_lag and self.on_stale == "drop"

    @property
    def waits_for_stale(self) -> bool:
        return self.bounds_lag and self.on_stale == "wait"

    @property
    def lag_classes(self) -> frozenset[str]:
        """Datasets with a lag bound of their own."""
        return frozenset(name for name, own in self.datasets.items() if own.lag_max is not None)

    def lag_bound(self, dataset: str) -> int | None:
        """The bound on the lag of this dataset's groups; None: no bound."""
        own = self.datasets.get(dataset)
        return self.lag_max if own is None or own.lag_max is None else own.lag_max

    def tolerance_for(self, dataset: str) -> float:
        own = self.datasets.get(dataset)
        return self.tolerance if own is None or own.tolerance is None else own.tolerance

    @property
    def targets_versions(self) -> bool:
        """Each training group is made for one weight version and sampled at no other."""
        return self.selection == "exact_version"

    @property
    def has_own_selection(self) -> bool:
        return self.selection not in SELECTIONS

    @property
    def drains(self) -> bool:
        """Sync mode with a filter: dispatch stops at the demand and what is in flight is awaited."""
        return self.mode == "sync" and self.filter_metric is not None

    @property
    def kept_empty(self) -> frozenset[Phase]:
        """The terminal phases in which a training group without a trajectory is sampleable."""
        return kept_empty({"mode": self.mode, "empty": self.empty})

    def evicts_failed(self) -> bool:
        return self.mode == "async" or self.failure == "refill"

    def streak_bound(self, demand: int) -> int:
        return self.eviction_streak_max or 8 * (self.batch_size or demand)

    def changed(self, **changes: Any) -> "Rules":
        """The same rules but for these settings. What a log held is no contradiction here either."""
        return recorded_rules({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """As the log keeps it."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    # Presets -----------------------------------------------------------------------------------------

    @classmethod
    @preset(
        becomes={
            "train_batch_size": "batch_size",
            "filter_groups_metric": "filter_metric",
            "max_inflight_gen_batches": "in_flight_batches_max",
            "gen_batch_size": "refill_multiple",
            "sync_refill_failed_groups": "empty",
        },
        least={"train_batch_size": 1, "max_inflight_gen_batches": 1, "gen_batch_size": 1},
        fixed={
            "mode": ("sync", "for async mode there is Rules.verl_async"),
            "lag_max": (None, "sync mode evicts and awaits no group for its age; Rules.verl_async does"),
        },
    )
    def verl_sync(
        cls,
        /,
        train_batch_size: int,
        *,
        filter_groups_metric: str | None = None,
        max_inflight_gen_batches: int = 1,
        gen_batch_size: int = 1,
        sync_refill_failed_groups: bool = False,
        strict: bool = False,
        **changes: Any,
    ) -> "Rules":
        """What verl's V1 replay buffer does in sync mode. Parameters are named and counted as there.

        Args:
            train_batch_size: groups per batch.
            filter_groups_metric: metric of DAPO's filter; None for no filter.
            max_inflight_gen_batches: batches of groups that refills may bring in flight.
            gen_batch_size: refills are submitted in multiples of it.
            sync_refill_failed_groups: evict failed groups without a trajectory for a refill. Without `strict` that
                is done in any case.
            strict: undo what groupstate does otherwise on purpose: numpy's standard deviation for the range,
                and groups without a trajectory stay sampleable, failed ones unless `sync_refill_failed_groups`.
                With a filter a finished one lacks its metric.
            changes: further settings of `Rules`; one that a parameter becomes, in its place and not beside it.

        Raises:
            BadSettings: a parameter or setting that can't be, or settings that contradict each other.

        Source: verl 0.9.1, trainer/ppo/v1/replay_buffer.py, class ReplayBuffer.
        """
        most = max_inflight_gen_batches * train_batch_size
        if filter_groups_metric is not None and gen_batch_size > most:
            raise BadSettings(
                f"gen_batch_size {gen_batch_size} is above max_inflight_gen_batches * train_batch_size = {most}, so no "
                "refill would ever find its places"
            )
        return cls._preset(
            changes,
            mode="sync",
            batch_size=train_batch_size,
            filter_metric=filter_groups_metric,
            per="trajectory",
            spread="std" if strict else "range",
            failure="keep",
            empty=("keep_finished" if sync_refill_failed_groups else "keep_all") if strict else "refill",
            in_flight_batches_max=max_inflight_gen_batches,
            refill_multiple=gen_batch_size,
        )

    @classmethod
    @preset(
        becomes={
            "train_batch_size": "batch_size",
            "max_off_policy_threshold": "lag_max",
            "max_off_policy_strategy": "on_stale",
            "filter_groups_metric": "filter_metric",
            "num_warmup_batches": "admission.warmup",
        },
        least={"train_batch_size": 1, "max_off_policy_threshold": 1, "num_warmup_batches": 0},
        fixed={"mode": ("async", "for sync mode there is Rules.verl_sync")},
    )
    def verl_async(
        cls,
        /,
        train_batch_size: int,
        *,
        max_off_policy_threshold: int | None = 8,
        max_off_policy_strategy: Literal["drop", "wait"] = "drop",
        filter_groups_metric: str | None = None,
        num_warmup_batches: int = 1,
        strict: bool = False,
        **changes: Any,
    ) -> "Rules":
        """What verl's V1 replay buffer does in its async modes. Parameters are named and counted as there.

        Args:
            train_batch_size: groups per batch.
            max_off_policy_threshold: bound on span = lag + 1, at least 1; None for no bound.
            max_off_policy_strategy: `drop` evicts what is above it, so that nothing above it is trained on; `wait`
                holds sampling while a group in flight has a span of at least the threshold, and what has ended has no
                bound.
            filter_groups_metric: metric of DAPO's filter; None for no filter.
            num_warmup_batches: batches that generation keeps ahead.
            strict: undo what groupstate does otherwise on purpose: numpy's standard deviation for the range,
                `wait` holds each partition by its own groups, and a finished group without a trajectory stays
                sampleable. With a filter it lacks its metric.
            changes: further settings of `Rules`; one that a parameter becomes, in its place and not beside it.

        Raises:
            BadSettings: a parameter or setting that can't be, or settings that contradict each other.

        Source: verl 0.9.1, trainer/ppo/v1/replay_buffer.py, class ReplayBufferAsync.
        """
        return cls._preset(
            changes,
            mode="async",
            batch_size=train_batch_size,
            lag_max=None if max_off_policy_threshold is None else max_off_policy_threshold - 1,
            on_stale=max_off_policy_strategy,
            wait_gates="each" if strict else "training",
            filter_metric=filter_groups_metric,
            per="trajectory",
            spread="std" if strict else "range",
            empty="keep_finished" if strict else "refill",
            admission=PerBatch(warmup=num_warmup_batches),
        )

    @classmethod
    @preset(
        becomes={
            "batch_size": "batch_size",
            "max_staleness_versions": "lag_max",
            "sample_freshest_first": "selection",
            "max_inflight_prompts": "admission.n",
            "max_buffered_rollouts": "admission.ready_max",
        },
        least={
            "batch_size": 1,
            "max_staleness_versions": 0,
            "max_inflight_prompts": 1,
            "max_buffered_rollouts": 1,
        },
        fixed={"mode": ("async", "its sampler is NeMo-RL's for asynchronous training")},
    )
    def windowed(
        cls,
        /,
        batch_size: int,
        *,
        max_staleness_versions: int = 1,
        sample_freshest_first: bool = False,
        max_inflight_prompts: int = 32,
        max_buffered_rollouts: int = 64,
        **changes: Any,
    ) -> "Rules":
        """NeMo-RL's `windowed` sampler: train on any group of the last versions, throw older ones away.

        Args:
            batch_size: groups per batch.
            max_staleness_versions: highest lag that is trained on.
            sample_freshest_first: newest version first instead of oldest.
            max_inflight_prompts: most groups in flight.
            max_buffered_rollouts: most groups in flight and sampleable together.
            changes: further settings of `Rules`; one that a parameter becomes, in its place and not beside it.

        Raises:
            BadSettings: a parameter or setting that can't be, or settings that contradict each other.

        Source: NVIDIA-NeMo/RL, nemo_rl/algorithms/async_utils/staleness_sampler.py, class WindowedSampler.
        """
        if max_buffered_rollouts < max_inflight_prompts:
            raise BadSettings(
                f"max_buffered_rollouts is {max_buffered_rollouts}; it must be at least max_inflight_prompts, which is "
                f"{max_inflight_prompts}: it counts groups in flight too"
            )
        return cls._preset(
            changes,
            mode="async",
            batch_size=batch_size,
            lag_max=max_staleness_versions,
            cancel_doomed=True,
            selection="freshest_first" if sample_freshest_first else "oldest_first",
            admission=Slots(n=max_inflight_prompts, ready_max=max_buffered_rollouts - max_inflight_prompts),
        )

    @classmethod
    @preset(
        becomes={"batch_size": "batch_size", "max_lookahead_versions": "admission.warmup"},
        least={"batch_size": 1, "max_lookahead_versions": 0},
        fixed={
            "mode": ("async", "its sampler is NeMo-RL's for asynchronous training"),
            "lag_max": (0, "a group is sampled at the version that it is made for, or never"),
        },
    )
    def in_order(cls, /, batch_size: int, *, max_lookahead_versions: int = 1, **changes: Any) -> "Rules":
        """NeMo-RL's `in_order` sampler: each group is made for one weight version, and sampled at that or never.

        Args:
            batch_size: groups per batch, and per weight version.
            max_lookahead_versions: versions beyond the current one for which groups are started.
            changes: further settings of `Rules`; one that a parameter becomes, in its place and not beside it.

        Raises:
            BadSettings: a parameter or setting that can't be, or settings that contradict each other.

        Source: NVIDIA-NeMo/RL, nemo_rl/algorithms/async_utils/staleness_sampler.py, class InOrderSampler.
        """
        return cls._preset(
            changes,
            mode="async",
            batch_size=batch_size,
            lag_max=0,
            basis="target_version",
            selection="exact_version",
            admission=PerBatch(warmup=max_lookahead_versions),
        )

    @classmethod
    @preset(
        becomes={
            "batch_size": "batch_size",
            "max_head_offpolicyness": "admission.lag_max",
            "max_concurrent_rollouts": "admission.in_flight_max",
        },
        least={"batch_size": 1, "max_head_offpolicyness": 0, "max_concurrent_rollouts": 1},
        fixed={
            "mode": ("async", "it bounds how far generation runs ahead of an asynchronous trainer"),
            "lag_max": (None, "it drops nothing for its age; max_head_offpolicyness bounds how old a group gets"),
        },
    )
    def capacity(
        cls,
        /,
        batch_size: int,
        *,
        max_head_offpolicyness: int = 0,
        max_concurrent_rollouts: int | None = None,
        **changes: Any,
    ) -> "Rules":
        """AReaL's staleness control: nothing is dropped for its age, because nothing is started that would get old.

        Args:
            batch_size: groups per batch (AReaL's consumer_batch_size).
            max_head_offpolicyness: highest lag of a group when it is sampled.
            max_concurrent_rollouts: most groups in flight; None for no bound.
            changes: further settings of `Rules`; one that a parameter becomes, in its place and not beside it.

        Raises:
            BadSettings: a parameter or setting that can't be, or settings that contradict each other.

        Source: AReaL, areal/infra/staleness_manager.py, StalenessManager.get_capacity.
        """
        return cls._preset(
            changes,
            mode="async",
            batch_size=batch_size,
            admission=Capacity(lag_max=max_head_offpolicyness, in_flight_max=max_concurrent_rollouts),
        )

    @classmethod
    def _preset(cls, changes: dict[str, Any], **made: Any) -> "Rules":
        """What a preset made, with the user's changes, which go before."""
        return cls(**{**made, **changes})


def known_rules(data: Mapping[str, Any]) -> Rules:
    """What this version knows of a log's rules, for looking at a run; the defaults where that makes no sense by itself.

    What runs under them needs all of them: `rules_from_dict`.
    """
    known = {name: value for name, value in data.items() if name in Rules.__struct_fields__}
    for left_out in (None, *known):
        try:
            return recorded_rules({name: value for name, value in known.items() if name != left_out})
        except BadSettings:
            pass  # a value of a later version, perhaps: without that one setting, then
    return Rules()


def rules_from_dict(data: Mapping[str, Any], where: str = "rules") -> Rules:
    """Rules from a settings file.

    Raises:
        BadSettings: an unknown key (named, with the nearest right one), a wrong type, a contradiction.
    """
    return _from_table(Rules, data, where)


def recorded_rules(data: Mapping[str, Any], where: str = "rules") -> Rules:
    """Rules from a log. Contradictions that were taken when it was written are taken, and mean what they meant.

    Raises:
        BadSettings: an unknown key, a wrong type, rules that nothing could run under.
    """
    return _from_table(Rules.as_recorded, data, where)


def _from_table(make: Callable[..., Rules], data: Mapping[str, Any], where: str) -> Rules:
    known = Rules.__struct_fields__
    for key in data:
        if key not in known:
            raise BadSettings(unknown_key(key, known, where))
    try:
        return make(**data)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from error
