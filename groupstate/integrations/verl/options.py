"""What verl's configuration says to its replay buffer, as rules and a few settings of the drop-in's own.

verl hands a custom sampler less than its own one gets. What is missing is read from the configuration that the given
nodes hang in, so that filter and batch sizes need not be written a second time.

Rule 1: of a setting, an argument comes before `sampler_kwargs`, and that before the rest of the configuration.
Rule 2: what can't work is refused before anything is written, under the names that verl has for it.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from groupstate.core.arguments import integer, integer_or_none, seconds, shown
from groupstate.core.near import meant
from groupstate.core.rules import Rules
from groupstate.core.typed_settings import unknown_key
from groupstate.errors import BadSettings
from groupstate.log.file import FileDurability
from groupstate.logs import Logger
from groupstate.runtime.reported import SIZE_MAX

log = Logger("groupstate.verl")

VALIDATION: Final = "val"
"""verl's partition of validation groups. Each other one holds training groups."""

POLL_INTERVAL_S: Final = 2.0
"""As in verl."""

STALL_S: Final = 60.0

ENDLESS: Final = 2**62
"""More evictions in a row than any run has."""

Ties = Literal["submission", "set"]
UidSplit = Literal["right", "left"]
EmptyGroups = Literal["evict", "keep"]
UnknownTags = Literal["skip", "raise"]
NotFinite = Literal["fail", "keep"]
RestartAge = Literal["recorded", "restart"]
Metrics = Literal["verl", "all"]


class BadVerlConfig(BadSettings, ValueError, AssertionError):
    """A configuration of verl that can't work. It is what verl raises too, which is not always the same class."""


@attrs.frozen(kw_only=True)
class Options:
    rules: Rules
    poll_interval: float = POLL_INTERVAL_S
    """Seconds between two looks at TransferQueue."""
    refills: bool = False
    """Evicted groups are replaced."""
    group_size: int | None = None
    """Sessions of a training group, where the configuration says so."""
    val_group_size: int | None = None
    log: str | None = None
    """The run directory; None keeps the log in memory."""
    checkpoints: str | None = None
    """Where verl puts its checkpoints."""
    durability: FileDurability = "fsync"
    take_over: bool = False
    """Take the log from a writer on another host, of whom nobody here can tell whether it lives."""
    ties: Ties = "submission"
    """Order of groups of the same age that are first seen at the same time: as listed, or that of a set, as in verl."""
    uid_split: UidSplit = "right"
    """Which underscore of a trajectory's key ends the uid: the last but one, or the first, as in verl."""
    unknown_tags: UnknownTags = "skip"
    """What a prompt's tag that can't be read does: it is passed over with one warning, or it raises, as in verl."""
    not_finite: NotFinite = "fail"
    """What a value of the filter's metric does that is no number: its session has failed, or the group is kept."""
    restart_age: RestartAge = "recorded"
    """How old a group in flight is that was dispatched anew: as the log has it, or as its tag says, as in verl."""
    metrics: Metrics = "verl"
    """What comes with a batch: verl's metrics, or those of groupstate besides."""
    stall_s: float = STALL_S
    """Seconds in which nothing happens until it is said what is waited for; 0 never says it."""
    timeout_s: float | None = None
    """Seconds after which waiting raises; None waits for ever."""


@attrs.frozen(kw_only=True)
class Given:
    """What the drop-in was constructed with, as far as options are concerned."""

    trainer_mode: str
    max_off_policy_threshold: Any
    max_off_policy_strategy: Any
    sampler_kwargs: Any
    trainer_config: Any = None
    has_refill_fn: bool = False
    direct: Mapping[str, Any] = attrs.field(factory=dict)
    """Verl's further keywords; None where one was left out."""


TRAINER_MODES: Final = ("sync", "colocate_async", "separate_async")
"""Modes of verl's own trainers."""

VERL_OPTIONS: Final = (
    "poll_interval",
    "filter_groups_metric",
    "train_batch_size",
    "gen_batch_size",
    "max_inflight_gen_batches",
    "sync_refill_failed_groups",
)
"""Keywords of verl's own buffer, which may also stand in `sampler_kwargs`."""

SET_BY_VERL: Final = {
    "mode": "trainer.v1.trainer_mode",
    "batch_size": "data.train_batch_size and what the trainer asks for",
    "filter_metric": "algorithm.filter_groups.metric (or sampler_kwargs.filter_groups_metric)",
    "lag_max": "trainer.v1.sampler.max_off_policy_threshold",
    "on_stale": "trainer.v1.sampler.max_off_policy_strategy",
    "in_flight_batches_max": "algorithm.filter_groups.max_inflight_gen_batches",
    "refill_multiple": "data.gen_batch_size",
    "max_off_policy_threshold": "trainer.v1.sampler.max_off_policy_threshold",
    "max_off_policy_strategy": "trainer.v1.sampler.max_off_policy_strategy",
}
"""Rules, and parameters of the presets, that follow from verl's configuration, and where they are set there."""

OWN_OPTIONS: Final = (
    "log",
    "durability",
    "take_over",
    "group_size",
    "val_group_size",
    "strict",
    "ties",
    "uid_split",
    "empty_groups",
    "unknown_tags",
    "not_finite",
    "restart_age",
    "metrics",
    "stall_s",
    "timeout_s",
    "rules",
)
"""Further ones in `sampler_kwargs`."""


def read(given: Given) -> Options:
    """
    Raises:
        BadVerlConfig: a setting that can't be, or settings that can't work together.
    """
    try:
        return _Reader(given).options()
    except BadVerlConfig:
        raise
    except BadSettings as error:
        raise BadVerlConfig(str(error)) from error


class _Reader:
    def __init__(self, given: Given) -> None:
        self.given = given
        _check_mode(given.trainer_mode)
        self.sync = given.trainer_mode == "sync"
        self.tree = Tree(given.sampler_kwargs, given.trainer_config)
        kwargs = _plain(given.sampler_kwargs)
        for name in kwargs:
            if name not in (*VERL_OPTIONS, *OWN_OPTIONS):
                raise BadVerlConfig(_unknown(str(name)))
        direct = {name: value for name, value in given.direct.items() if value is not None}
        self._direct = frozenset(direct)
        self.values = {name: value for name, value in {**kwargs, **direct}.items() if value is not None}
        self.strict = self._truth("strict")
        self.metric = self._metric()
        self.refills_failed = self._refills_failed()
        self.train_batch_size = self.values.get("train_batch_size", self.tree.get("data.train_batch_size"))

    def options(self) -> Options:
        self._check_staleness()
        self._check_refills()
        return Options(
            rules=self._rules(),
            poll_interval=seconds(
                self._named("poll_interval"),
                self.values.get("poll_interval", POLL_INTERVAL_S),
                error=BadVerlConfig,
            ),
            refills=self.given.has_refill_fn and (not self.sync or self.metric is not None or self.refills_failed),
            group_size=self._size("group_size", "actor_rollout_ref.rollout.n"),
            val_group_size=self._size("val_group_size", "actor_rollout_ref.rollout.val_kwargs.n"),
            log=self._log(),
            checkpoints=self.tree.get("trainer.default_local_dir"),
            durability=self._one_of("durability", FileDurability, "fsync"),
            take_over=self._truth("take_over"),
            ties=self._one_of("ties", Ties, "set" if self.strict else "submission"),
            uid_split=self._one_of("uid_split", UidSplit, "left" if self.strict else "right"),
            unknown_tags=self._one_of("unknown_tags", UnknownTags, "raise" if self.strict else "skip"),
            not_finite=self._one_of("not_finite", NotFinite, "keep" if self.strict else "fail"),
            restart_age=self._one_of("restart_age", RestartAge, "restart" if self.strict else "recorded"),
            metrics=self._one_of("metrics", Metrics, "verl"),
            stall_s=self._stall_s(),
            timeout_s=self._timeout_s(),
        )

    # One by one --------------------------------------------------------------------------------------

    def _named(self, name: str, elsewhere: str | None = None) -> str:
        """A setting as it was written.

        Args:
            elsewhere: where it stands in verl's configuration, if it is neither an argument nor in `sampler_kwargs`.
        """
        if name in self.values:
            return name if name in self._direct else f"sampler_kwargs.{name}"
        return elsewhere or name

    def _metric(self) -> str | None:
        metric = self.values.get("filter_groups_metric")
        if metric is None and self.tree.get("algorithm.filter_groups.enable"):
            metric = self.tree.get("algorithm.filter_groups.metric")
            if not metric:
                raise BadVerlConfig("algorithm.filter_groups.enable is set, so algorithm.filter_groups.metric must be")
            if (self.tree.get("algorithm.filter_groups.max_num_gen_batches") or 0) > 0:
                log.warning(
                    "algorithm.filter_groups.max_num_gen_batches bounds nothing, as in verl's own buffer",
                    instead="sampler_kwargs.rules.generated_groups_max bounds the groups of one batch",
                )
        if metric is None:
            return None
        if not isinstance(metric, str) or not metric:
            name = self._named("filter_groups_metric", "algorithm.filter_groups.metric")
            raise BadVerlConfig(f"{name} is {shown(metric)}; it must be the name of a metric")
        if not self.given.has_refill_fn:
            raise BadVerlConfig(f"filter_groups_metric {metric!r} requires refill_fn, which replaces what is filtered")
        reward_model = "reward.reward_model"
        if self.tree.get(f"{reward_model}.enable") and not self.tree.get(f"{reward_model}.enable_resource_pool"):
            raise BadVerlConfig(
                f"algorithm.filter_groups reads {metric!r} before a group is sampled, and a colocated reward model "
                f"gives rewards after that: set {reward_model}.enable_resource_pool=True, or use a rule-based reward"
            )
        return metric

    def _refills_failed(self) -> bool:
        name = "sync_refill_failed_groups"
        if name not in self.values and not self.tree.get(f"trainer.v1.sampler.{name}"):
            return False
        if name in self.values and not self._truth(name):
            return False
        if not self.given.has_refill_fn:
            raise BadVerlConfig(f"{name} requires refill_fn, which replaces the failed groups")
        return self.sync

    def _check_staleness(self) -> None:
        threshold, strategy = self.given.max_off_policy_threshold, self.given.max_off_policy_strategy
        if threshold is not None:
            integer(
                "max_off_policy_threshold",
                threshold,
                least=1,
                wanted="the max off policy threshold, an integer or null for no bound,",
                error=BadVerlConfig,
            )
        if strategy not in ("drop", "wait"):
            raise BadVerlConfig(
                f"max_off_policy_strategy is {shown(strategy)}; the max off policy strategy must be 'drop' or 'wait'"
            )

    @property
    def gen_batch_size(self) -> int:
        """Prompts come in multiples of it."""
        dispatched = self._dispatched_in()
        size = integer(
            self._named("gen_batch_size"),
            self.values.get("gen_batch_size", dispatched or 1),
            least=1,
            error=BadVerlConfig,
        )
        if dispatched is not None and size % dispatched:
            raise BadVerlConfig(
                f"gen_batch_size is {size}, and the trainer fetches {dispatched} prompts at a time, so that refill_fn "
                f"refuses any count that isn't a multiple of {dispatched}: set algorithm.filter_groups.enable or "
                f"trainer.v1.sampler.sync_refill_failed_groups, with which it fetches single ones, or a gen_batch_size "
                f"that is such a multiple"
            )
        return size

    def _dispatched_in(self) -> int | None:
        """How many prompts the trainer fetches at a time; None if the configuration isn't known."""
        train = self.tree.get("data.train_batch_size")
        if train is None:
            return None
        exact = ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups")
        if not self.sync or any(self.tree.get(name) for name in exact):
            return 1
        return int(self.tree.get("data.gen_batch_size") or train)

    def _check_refills(self) -> None:
        if self.metric is not None and "max_inflight_gen_batches" in self.values:
            self._in_flight()
        if not self.sync or (self.metric is None and not self.refills_failed):
            return
        size = self.gen_batch_size
        if self.refills_failed and size != 1:
            raise BadVerlConfig(
                f"sync_refill_failed_groups requires gen_batch_size=1, and it is {size}: failed groups are replaced "
                "one by one"
            )
        if self.metric is not None and self.train_batch_size is None:
            raise BadVerlConfig("filter_groups_metric needs train_batch_size in sync mode: refills are bounded by it")

    def _rules(self) -> Rules:
        own = _mapping("sampler_kwargs.rules", self.values.get("rules", {}))
        for name in own:
            _check_rule(str(name))
        try:
            return self._rules_with(dict(own))
        except BadVerlConfig:
            raise
        except BadSettings as error:
            if any(re.search(rf"\b{re.escape(str(name))}\b", str(error)) for name in own):
                raise BadVerlConfig(f"sampler_kwargs.rules: {error}") from error
            raise

    def _rules_with(self, changes: dict[str, Any]) -> Rules:
        changes.setdefault("empty_session", "allow")
        changes.setdefault("stall_s", self._stall_s())
        if self.strict:
            changes.setdefault("eviction_streak_max", ENDLESS)
        empty = changes.get("empty", self._empty())
        named = self._named("train_batch_size", "data.train_batch_size")
        size = integer(named, self.train_batch_size or 1, least=1, error=BadVerlConfig)
        if not self.sync:
            return Rules.verl_async(
                size,
                max_off_policy_threshold=self.given.max_off_policy_threshold,
                max_off_policy_strategy=self._strategy(),
                filter_groups_metric=self.metric,
                strict=self.strict,
                **changes,
            ).changed(batch_size=None, empty=empty)
        if self.refills_failed:
            changes["sync_refill_failed_groups"] = True
        if self.metric is not None:
            changes["max_inflight_gen_batches"] = self._in_flight()
            changes["gen_batch_size"] = self.gen_batch_size
        rules = Rules.verl_sync(size, filter_groups_metric=self.metric, strict=self.strict, **changes)
        return rules.changed(empty=empty) if self.metric is not None else rules.changed(batch_size=None, empty=empty)

    def _empty(self) -> str:
        """What becomes of a group without any trajectory. verl replaces failed ones in async mode and where it is told
        to, and keeps all others; with a filter a finished one stops it."""
        evicts = self._one_of("empty_groups", EmptyGroups, "keep" if self.strict else "evict") == "evict"
        if not self.sync or self.refills_failed:
            return "refill" if evicts else "keep_finished"
        return "keep" if evicts and self.metric is not None else "keep_all"

    def _strategy(self) -> Literal["drop", "wait"]:
        # Without a bound there is nothing to wait for.
        waits = self.given.max_off_policy_strategy == "wait" and self.given.max_off_policy_threshold is not None
        return "wait" if waits else "drop"

    def _in_flight(self) -> int:
        name = "max_inflight_gen_batches"
        place = f"algorithm.filter_groups.{name}"
        value = self.values.get(name, self.tree.get(place))
        return integer(self._named(name, place), 1 if value is None else value, least=1, error=BadVerlConfig)

    def _size(self, name: str, place: str) -> int | None:
        found = self.values.get(name, self.tree.get(place))
        return integer_or_none(self._named(name, place), found, least=1, most=SIZE_MAX, error=BadVerlConfig)

    def _log(self) -> str | None:
        given = self.values.get("log")
        if given is not None:
            if not isinstance(given, str) or not given:
                raise BadVerlConfig(f"sampler_kwargs.log is {shown(given)}; it must be a directory")
            return given
        beside = self.tree.get("trainer.default_local_dir")
        return None if beside is None else os.path.join(str(beside), "groupstate")

    def _stall_s(self) -> float:
        value = self.values.get("stall_s", 0.0 if self.strict else STALL_S)
        return seconds("sampler_kwargs.stall_s", value, error=BadVerlConfig)

    def _timeout_s(self) -> float | None:
        value = self.values.get("timeout_s")
        return None if value is None else seconds("sampler_kwargs.timeout_s", value, error=BadVerlConfig)

    def _truth(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise BadVerlConfig(f"{self._named(name)} is {shown(value)}; it must be true or false")
        return value

    def _one_of(self, name: str, kind: Any, default: Any) -> Any:
        value, known = self.values.get(name, default), get_args(kind)
        if value not in known:
            words = f"{', '.join(known)}{meant(value, known)}"
            raise BadVerlConfig(f"sampler_kwargs.{name} is {shown(value)}; it must be one of {words}")
        return value


def _unknown(name: str) -> str:
    """The text for what is no setting of `sampler_kwargs`."""
    if name in SET_BY_VERL:
        return f"sampler_kwargs has no setting {name!r}: it is set by {SET_BY_VERL[name]}"
    if name in Rules.__struct_fields__:
        return f"sampler_kwargs has no setting {name!r}; it is one of the rules: sampler_kwargs.rules.{name}"
    return unknown_key(name, (*VERL_OPTIONS, *OWN_OPTIONS), "sampler_kwargs")


def _check_rule(name: str) -> None:
    """Refuse among the rules what has its place elsewhere."""
    if name in SET_BY_VERL:
        raise BadVerlConfig(f"sampler_kwargs.rules can't have {name!r}: it is set by {SET_BY_VERL[name]}")
    if name in (*VERL_OPTIONS, *OWN_OPTIONS) and name not in Rules.__struct_fields__:
        raise BadVerlConfig(f"sampler_kwargs.rules can't have {name!r}: it stands beside them, sampler_kwargs.{name}")


def _check_mode(mode: Any) -> None:
    """Refuse what is no mode of verl's trainers. One that somebody has registered there is one of them."""
    registered = getattr(sys.modules.get("verl.trainer.ppo.v1.trainer_base"), "TRAINER_REGISTRY", {})
    known = list(dict.fromkeys([*TRAINER_MODES, *registered]))
    if mode not in known:
        words = f"{', '.join(known)}{meant(mode, known)}"
        raise BadVerlConfig(f"trainer_mode is {shown(mode)}; it must be one of {words}")


PARTS: Final = ("actor_rollout_ref", "algorithm", "data", "reward", "trainer")
"""What stands in a whole configuration of verl, and in none of the nodes that the drop-in is given."""


class Tree:
    """The whole configuration that one of these nodes hangs in, if one does, or that one of them is: a plain mapping
    knows nothing of what is around it."""

    def __init__(self, *nodes: Any) -> None:
        # A node can only be one of OmegaConf's where that has been imported.
        self._conf: Any = getattr(sys.modules.get("omegaconf"), "OmegaConf", None)
        self._root = next((root for node in nodes if (root := self._root_of(node)) is not None), None)

    def _root_of(self, node: Any) -> Any:
        if self._conf is not None and self._conf.is_config(node):
            root = node._get_root()
            return root if root is not node or _is_whole(node) else None
        return node if isinstance(node, Mapping) and _is_whole(node) else None

    def get(self, place: str) -> Any:
        """What stands there; None if nothing does."""
        if self._conf is not None and self._conf.is_config(self._root):
            return self._conf.select(self._root, place, default=None)
        found = self._root
        for name in place.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _is_whole(node: Mapping[Any, Any]) -> bool:
    return any(part in node for part in PARTS)


def _plain(node: Any) -> dict[Any, Any]:
    conf: Any = getattr(sys.modules.get("omegaconf"), "OmegaConf", None)
    if conf is not None and conf.is_config(node):
        node = conf.to_container(node, resolve=True)
    return dict(_mapping("sampler_kwargs", {} if node is None else node))


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise BadVerlConfig(f"{name} is {shown(value)}; it must be a mapping of settings")
    return value
