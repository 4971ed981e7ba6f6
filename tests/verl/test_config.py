"""The two lines in verl's own configuration, and what is read from the rest of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupstate.integrations.verl import BadVerlConfig, ReplayBuffer
from groupstate.integrations.verl.options import Given, Options, read

LINES = (
    "trainer.v1.sampler.custom_sampler.path=pkg://groupstate.integrations.verl",
    "trainer.v1.sampler.custom_sampler.name=ReplayBuffer",
)

Compose = Callable[..., Any]


@pytest.fixture
def compose() -> Iterator[Compose]:
    """verl's own configuration with these lines."""
    import hydra
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
        yield lambda *lines: hydra.compose("ppo_trainer", overrides=[*LINES, *lines])


def given(config: Any, *, refill_fn: bool = True, mode: str = "sync") -> Given:
    """What verl's trainer hands to a custom sampler."""
    sampler = config.trainer.v1.sampler
    return Given(
        trainer_mode=mode,
        trainer_config=config.trainer.v1.get(mode, {}),
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=sampler.sampler_kwargs,
        has_refill_fn=refill_fn,
    )


def options(config: Any, **settings: Any) -> Options:
    return read(given(config, **settings))


def test_verl_finds_the_class_by_the_two_lines(compose: Compose, tmp_path: Path) -> None:
    from verl.utils.import_utils import load_extern_type

    config = compose(f"trainer.default_local_dir={tmp_path}")
    sampler = config.trainer.v1.sampler
    kind = load_extern_type(sampler.custom_sampler.path, sampler.custom_sampler.name)
    buffer = kind(
        trainer_mode="sync",
        trainer_config=config.trainer.v1.get("sync", {}),
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=sampler.sampler_kwargs,
        refill_fn=lambda count: count,
    )

    assert kind is ReplayBuffer
    assert buffer.log_path == str(tmp_path / "groupstate")
    assert (tmp_path / "groupstate" / "run.json").exists()
    buffer.close()


def test_what_verl_does_not_hand_over_is_read_from_the_configuration(compose: Compose) -> None:
    config = compose(
        "data.train_batch_size=16",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_inflight_gen_batches=3",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
    )
    found = options(config)

    rules = found.rules
    assert (rules.mode, rules.batch_size, rules.filter_metric) == ("sync", 16, "acc")
    assert (rules.in_flight_batches_max, rules.refill_multiple, rules.empty) == (3, 1, "keep")
    assert (found.group_size, found.val_group_size, found.refills) == (8, 2, True)


def test_an_async_mode_takes_its_bound_from_the_configuration(compose: Compose) -> None:
    lines = ("trainer.v1.sampler.max_off_policy_threshold=4", "trainer.v1.sampler.max_off_policy_strategy=wait")
    rules = options(compose(*lines), mode="separate_async").rules

    assert (rules.mode, rules.lag_max, rules.on_stale) == ("async", 3, "wait")
    assert (
        options(compose("trainer.v1.sampler.max_off_policy_threshold=null"), mode="separate_async").rules.lag_max
        is None
    )


def test_settings_of_its_own_stand_in_sampler_kwargs(compose: Compose, tmp_path: Path) -> None:
    settings = (f"log={tmp_path}/run", "poll_interval=0.5", "rules={tolerance: 0.01}", "filter_groups_metric=acc")
    config = compose(*(f"+trainer.v1.sampler.sampler_kwargs.{setting}" for setting in settings))
    found = options(config, mode="colocate_async")

    assert (found.log, found.poll_interval, found.rules.tolerance) == (f"{tmp_path}/run", 0.5, 0.01)
    assert found.rules.filter_metric == "acc"


def test_a_colocated_reward_model_is_refused_with_a_filter(compose: Compose) -> None:
    config = compose("algorithm.filter_groups.enable=True", "reward.reward_model.enable=True")

    with pytest.raises(BadVerlConfig, match=r"reward\.reward_model\.enable_resource_pool=True"):
        options(config)
    pool = compose(
        "algorithm.filter_groups.enable=True",
        "reward.reward_model.enable=True",
        "reward.reward_model.enable_resource_pool=True",
    )
    assert options(pool).rules.filter_metric == "reward"


def test_refills_that_the_trainer_would_refuse_are_refused_at_construction(compose: Compose) -> None:
    """Without algorithm.filter_groups the trainer fetches whole batches, and refill_fn takes no other count."""
    kwargs = "+trainer.v1.sampler.sampler_kwargs"
    config = compose("data.train_batch_size=16", f"{kwargs}.filter_groups_metric=acc", f"{kwargs}.gen_batch_size=1")

    with pytest.raises(BadVerlConfig, match=r"gen_batch_size is 1, and the trainer fetches 16 prompts at a time"):
        options(config)


def test_a_filter_without_a_metric_or_without_refills_is_refused(compose: Compose) -> None:
    with pytest.raises(BadVerlConfig, match=r"algorithm\.filter_groups\.metric must be"):
        options(compose("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=null"))
    with pytest.raises(BadVerlConfig, match="requires refill_fn"):
        options(compose("algorithm.filter_groups.enable=True"), refill_fn=False)
