"""What verl's replay buffer is constructed with, as rules; none of it needs verl."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from groupstate.errors import BadSettings
from groupstate.integrations.verl.buffer import ReplayBuffer
from groupstate.integrations.verl.options import BadVerlConfig, Given, Options, read


def options(**settings: Any) -> Options:
    own = {"trainer_mode", "max_off_policy_threshold", "max_off_policy_strategy", "sampler_kwargs", "has_refill_fn"}
    direct = {name: value for name, value in settings.items() if name not in own}
    defaults = {
        "trainer_mode": "sync",
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "has_refill_fn": True,
    }
    return read(Given(**{**defaults, **{k: v for k, v in settings.items() if k in own}, "direct": direct}))


def test_sync_mode_without_further_settings_evicts_nothing() -> None:
    found = options()

    assert (found.rules.mode, found.rules.filter_metric, found.rules.empty) == ("sync", None, "keep_all")
    assert (found.rules.batch_size, found.refills, found.log) == (None, False, None)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async", "one of your own"])
def test_every_mode_but_sync_is_async(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = ModuleType("trainer_base")
    trainers.__dict__["TRAINER_REGISTRY"] = {"one of your own": object}
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1.trainer_base", trainers)
    found = options(trainer_mode=mode, max_off_policy_threshold=3)

    assert (found.rules.mode, found.rules.lag_max, found.refills) == ("async", 2, True)


def test_an_argument_comes_before_sampler_kwargs() -> None:
    kwargs = {"filter_groups_metric": "acc", "train_batch_size": 4, "poll_interval": 1}

    assert options(sampler_kwargs=kwargs).rules.filter_metric == "acc"
    assert options(sampler_kwargs=kwargs, filter_groups_metric="reward").rules.filter_metric == "reward"
    assert options(sampler_kwargs=kwargs, poll_interval=0.5).poll_interval == 0.5


WHOLE = {
    "data": {"train_batch_size": 16},
    "algorithm": {"filter_groups": {"enable": True, "metric": "acc", "max_inflight_gen_batches": 3}},
    "actor_rollout_ref": {"rollout": {"n": 8, "val_kwargs": {"n": 2}}},
    "trainer": {"default_local_dir": "there"},
}


def whole(trainer_config: Any, **settings: Any) -> Options:
    return read(Given(trainer_mode="sync", max_off_policy_threshold=8, max_off_policy_strategy="drop",
                      sampler_kwargs={}, trainer_config=trainer_config, has_refill_fn=True, **settings))  # fmt: skip


def test_a_whole_configuration_of_plain_mappings_is_read_and_checked_as_verls_own() -> None:
    found = whole(WHOLE)

    assert (found.rules.filter_metric, found.rules.batch_size, found.rules.in_flight_batches_max) == ("acc", 16, 3)
    assert (found.group_size, found.val_group_size, found.log) == (8, 2, os.path.join("there", "groupstate"))
    reward = {"reward": {"reward_model": {"enable": True}}}
    with pytest.raises(BadVerlConfig, match=r"reward\.reward_model\.enable_resource_pool=True"):
        whole({**WHOLE, **reward})
    with pytest.raises(BadVerlConfig, match=r"algorithm\.filter_groups\.metric must be"):
        whole({**WHOLE, "algorithm": {"filter_groups": {"enable": True}}})
    with pytest.raises(BadVerlConfig, match=r"actor_rollout_ref\.rollout\.n is 0"):
        whole({**WHOLE, "actor_rollout_ref": {"rollout": {"n": 0}}})
    assert whole({"data": 5}).rules.batch_size is None
    assert whole({"some": "setting"}).log is None


def test_an_argument_that_was_left_out_leaves_what_sampler_kwargs_say() -> None:
    kwargs = {"filter_groups_metric": "acc", "train_batch_size": 4, "gen_batch_size": 2, "poll_interval": 1}
    buffer = ReplayBuffer("sync", {}, 8, "drop", kwargs, refill_fn=lambda count: count)
    rules = buffer.options.rules

    assert (buffer.poll_interval, rules.filter_metric, rules.batch_size, rules.refill_multiple) == (1, "acc", 4, 2)


def test_one_switch_undoes_what_is_different() -> None:
    found = options(trainer_mode="separate_async", sampler_kwargs={"strict": True, "filter_groups_metric": "acc"})

    assert (found.rules.spread, found.rules.wait_gates, found.rules.empty) == ("std", "each", "keep_finished")
    assert (found.ties, found.uid_split, found.stall_s) == ("set", "left", 0)
    assert (found.unknown_tags, found.not_finite, found.restart_age) == ("raise", "keep", "restart")
    assert found.rules.streak_bound(1) > 10**15


def test_a_switch_of_its_own_comes_before_strict() -> None:
    kwargs = {"strict": True, "ties": "submission", "stall_s": 5, "rules": {"spread": "range"}, "empty_groups": "evict"}
    found = options(trainer_mode="separate_async", sampler_kwargs=kwargs)

    assert (found.ties, found.stall_s, found.rules.spread, found.rules.empty) == ("submission", 5, "range", "refill")


ASYNC = {"trainer_mode": "separate_async"}
FILTER = {"filter_groups_metric": "acc", "train_batch_size": 2}
REFILLS = {"sync_refill_failed_groups": True}


@pytest.mark.parametrize(
    ("settings", "evict", "keep"),
    [
        ({"trainer_mode": "separate_async"}, "refill", "keep_finished"),
        ({"trainer_mode": "separate_async", **FILTER}, "refill", "keep_finished"),
        ({}, "keep_all", "keep_all"),
        (FILTER, "keep", "keep_all"),
        (REFILLS, "refill", "keep_finished"),
        ({**FILTER, **REFILLS}, "refill", "keep_finished"),
    ],
)
def test_groups_without_a_trajectory_are_evicted_or_kept(settings: dict[str, Any], evict: str, keep: str) -> None:
    def empty(**kwargs: Any) -> str:
        return options(**settings, sampler_kwargs=kwargs).rules.empty

    assert (empty(), empty(empty_groups="evict"), empty(empty_groups="keep")) == (evict, evict, keep)
    assert (empty(strict=True), empty(strict=True, empty_groups="evict")) == (keep, evict)


def test_a_rule_of_one_s_own_comes_before_both() -> None:
    kwargs = {"strict": True, "rules": {"empty": "drop"}}

    assert options(sampler_kwargs=kwargs).rules.empty == "drop"
    with pytest.raises(BadVerlConfig, match="sync_refill_failed_groups and empty"):
        options(sync_refill_failed_groups=True, sampler_kwargs=kwargs)


def test_failed_groups_are_replaced_one_by_one() -> None:
    assert options(sync_refill_failed_groups=True).rules.empty == "refill"
    with pytest.raises(BadVerlConfig, match="sync_refill_failed_groups requires gen_batch_size=1, and it is 2"):
        options(sync_refill_failed_groups=True, gen_batch_size=2)
    assert options(trainer_mode="separate_async", sync_refill_failed_groups=True).rules.empty == "refill"
    assert not options(sync_refill_failed_groups=False).refills


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"trainer_mode": "asink"},
            r"trainer_mode is 'asink'; it must be one of sync, colocate_async, separate_async$",
        ),
        ({"trainer_mode": "seperate_async"}, r"\(did you mean 'separate_async'\?\)$"),
        ({"trainer_mode": None}, "trainer_mode is None"),
        ({"max_off_policy_threshold": 0}, "max_off_policy_threshold is 0"),
        ({"max_off_policy_threshold": True}, "max off policy threshold"),
        ({"max_off_policy_strategy": "bogus"}, "must be 'drop' or 'wait'"),
        ({"filter_groups_metric": "acc", "has_refill_fn": False}, "filter_groups_metric 'acc' requires refill_fn"),
        ({"sync_refill_failed_groups": True, "has_refill_fn": False}, "requires refill_fn"),
        ({**ASYNC, "sync_refill_failed_groups": True, "has_refill_fn": False}, "requires refill_fn"),
        ({**ASYNC, "filter_groups_metric": "acc", "max_inflight_gen_batches": 0}, "max_inflight_gen_batches is 0"),
        ({"sync_refill_failed_groups": "yes"}, "must be true or false"),
        ({"filter_groups_metric": "acc"}, "needs train_batch_size"),
        ({"filter_groups_metric": "", "train_batch_size": 2}, "must be the name of a metric"),
        (
            {"filter_groups_metric": "acc", "train_batch_size": 2, "max_inflight_gen_batches": 0},
            "max_inflight_gen_batches is 0",
        ),
        (
            {"filter_groups_metric": "acc", "train_batch_size": 2, "gen_batch_size": 3},
            r"gen_batch_size 3 is above max_inflight_gen_batches \* train_batch_size = 2",
        ),
        ({"filter_groups_metric": "acc", "train_batch_size": 2, "gen_batch_size": 0}, "gen_batch_size is 0"),
        ({"poll_interval": -1}, "poll_interval is -1"),
        ({"sampler_kwargs": {"pol_interval": 1}}, "sampler_kwargs has no setting 'pol_interval'; did you mean 'poll_"),
        ({"sampler_kwargs": ["log"]}, "sampler_kwargs is"),
        ({"sampler_kwargs": {"log": 3}}, "it must be a directory"),
        ({"sampler_kwargs": {"ties": "random"}}, "must be one of submission, set"),
        (
            {"sampler_kwargs": {"empty_groups": "kept"}},
            r"sampler_kwargs.empty_groups is 'kept'; it must be one of evict, keep \(did you mean 'keep'\?\)",
        ),
        ({"sampler_kwargs": {"empty_groups": True}}, "it must be one of evict, keep$"),
        ({"sampler_kwargs": {"unknown_tags": "rise"}}, "did you mean 'raise'"),
        ({"sampler_kwargs": {"not_finite": "fails"}}, "did you mean 'fail'"),
        ({"sampler_kwargs": {"restart_age": "record"}}, "did you mean 'recorded'"),
        ({"sampler_kwargs": {"restart_ages": "restart"}}, "did you mean 'restart_age'"),
        ({"sampler_kwargs": {"group_size": 0}}, "group_size is 0"),
        ({"sampler_kwargs": {"rules": {"tolerence": 1}}}, "^sampler_kwargs.rules: .* did you mean 'tolerance'"),
        ({"sampler_kwargs": {"rules": {"spread": "stdd"}}}, "^sampler_kwargs.rules: Rules.verl_sync: spread is 'stdd'"),
        ({"sampler_kwargs": {"rules": 1}}, "sampler_kwargs.rules is 1; it must be a mapping"),
        ({"sampler_kwargs": {"rules": {"filter_metric": "acc"}}}, "'filter_metric': it is set by algorithm.filter_gro"),
        ({**FILTER, "sampler_kwargs": {"rules": {"batch_size": 3}}}, "'batch_size': it is set by data.train_batch_si"),
        ({**ASYNC, "sampler_kwargs": {"rules": {"lag_max": 3}}}, "'lag_max': it is set by trainer.v1.sampler.max_off"),
        ({**ASYNC, "sampler_kwargs": {"rules": {"max_off_policy_threshold": 3}}}, "it is set by trainer.v1.sampler.m"),
        ({"sampler_kwargs": {"rules": {"strict": True}}}, "it stands beside them, sampler_kwargs.strict$"),
        ({"sampler_kwargs": {"rules": {"gen_batch_size": 2}}}, "it stands beside them, sampler_kwargs.gen_batch_size$"),
        (
            {"sampler_kwargs": {"tolerance": 0.1}},
            "'tolerance'; it is one of the rules: sampler_kwargs.rules.tolerance$",
        ),
        ({"sampler_kwargs": {"lag_max": 1}}, "'lag_max': it is set by trainer.v1.sampler.max_off_policy_threshold$"),
        ({"sampler_kwargs": {"strict": "yes"}}, "sampler_kwargs.strict is 'yes'"),
        ({"sampler_kwargs": {"stall_s": "x"}}, "sampler_kwargs.stall_s is 'x'"),
        ({"sampler_kwargs": {"timeout_s": -1}}, "sampler_kwargs.timeout_s is -1"),
        ({"sampler_kwargs": {"val_group_size": 0}}, "sampler_kwargs.val_group_size is 0"),
        ({"sampler_kwargs": {"poll_interval": "x"}}, "sampler_kwargs.poll_interval is 'x'"),
        ({"poll_interval": "x"}, "^poll_interval is 'x'"),
        ({**FILTER, "sampler_kwargs": {"gen_batch_size": 0}}, "sampler_kwargs.gen_batch_size is 0"),
    ],
)
def test_what_can_t_work_is_refused_in_verl_s_names(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(BadVerlConfig, match=text) as caught:
        options(**settings)

    # verl raises one or the other, and groupstate its own.
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, BadSettings)
