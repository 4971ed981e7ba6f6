"""The presets do what the systems do that they are named after, cell by cell."""

import re
from typing import Any

import numpy as np
import pytest

from groupstate.core import presets
from groupstate.core.presets import preset
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots
from groupstate.errors import BadSettings, MissingMetric
from groupstate.testing.notation import Story, play

FLAT = ["finish g acc=0.7"]
MIXED = ["finish g.0 acc=0", "finish g.1 acc=1"]
FAILED_WITH_ROWS = ["finish g.0 acc=1", "fail g.1"]
FAILED_WITHOUT = ["fail g"]
FINISHED_WITHOUT = ["finish g nothing"]

PRESETS = [
    Rules.verl_sync(4),
    Rules.verl_async(4),
    Rules.windowed(4),
    Rules.in_order(4),
    Rules.capacity(4),
]


def told(rules: Rules, made_of: list[str], *, lag: int = 0) -> Story:
    """Group `g` of two sessions is made and aged while somebody waits for two groups."""
    return play("submit g/2", "start g", "sample 2", f"publish {lag}", *made_of, rules=rules, source=list("abcdefgh"))


@pytest.mark.parametrize("rules", PRESETS, ids=["verl sync", "verl async", "windowed", "in order", "capacity"])
def test_a_preset_is_rules_that_a_log_can_hold(rules: Rules) -> None:
    assert play(rules=rules).book.rules is not None
    assert rules.batch_size == 4


@pytest.mark.parametrize(
    "make",
    [Rules.verl_sync, Rules.verl_async, Rules.windowed, Rules.in_order, Rules.capacity],
    ids=lambda m: m.__name__,
)
def test_any_setting_can_be_changed_and_an_unknown_one_is_named(make: Any) -> None:
    assert make(4, stall_s=5.0).stall_s == 5.0
    assert make(4, failure="refill", admission=Slots(n=2)).admission == Slots(n=2)
    with pytest.raises(BadSettings, match=r"has no setting 'stall'; did you mean 'stall_s'"):
        make(4, stall=5.0)


def test_a_parameter_that_is_misspelt_is_told_by_its_name() -> None:
    with pytest.raises(
        BadSettings, match=r"Rules.verl_async has no setting 'filter_group_metric'; did you mean 'filter_groups"
    ):
        Rules.verl_async(train_batch_size=4, filter_group_metric="acc")


WRONG = [
    # each is told by the names that were written
    (
        Rules.verl_async,
        {"max_off_policy_threshold": "2"},
        "max_off_policy_threshold is '2'; it must be an integer or None",
    ),
    (
        Rules.verl_async,
        {"max_off_policy_threshold": 1.5},
        "max_off_policy_threshold is 1.5; it must be an integer or None",
    ),
    (Rules.verl_async, {"max_off_policy_threshold": 0}, "max_off_policy_threshold is 0; it must be at least 1"),
    (Rules.verl_async, {"num_warmup_batches": -1}, "num_warmup_batches is -1; it must be at least 0"),
    (
        Rules.verl_async,
        {"max_off_policy_strategy": "wiat"},
        "max_off_policy_strategy is 'wiat'; it must be 'drop' or 'wait' (did you mean 'wait'?)",
    ),
    (Rules.verl_async, {"strict": "yes"}, "strict is 'yes'; it must be true or false"),
    (Rules.verl_sync, {"sync_refill_failed_groups": 1}, "sync_refill_failed_groups is 1; it must be true or false"),
    (Rules.verl_sync, {"filter_groups_metric": 1}, "filter_groups_metric is 1; it must be a string or None"),
    (Rules.verl_sync, {"max_inflight_gen_batches": 0}, "max_inflight_gen_batches is 0; it must be at least 1"),
    (
        Rules.verl_sync,
        {"filter_groups_metric": "acc", "gen_batch_size": 9, "max_inflight_gen_batches": 2},
        "gen_batch_size 9 is above max_inflight_gen_batches * train_batch_size = 8, so no refill would ever find its "
        "places",
    ),
    (Rules.windowed, {"sample_freshest_first": "yes"}, "sample_freshest_first is 'yes'; it must be true or false"),
    (Rules.windowed, {"max_staleness_versions": -1}, "max_staleness_versions is -1; it must be at least 0"),
    (Rules.windowed, {"max_inflight_prompts": 0}, "max_inflight_prompts is 0; it must be at least 1"),
    (
        Rules.windowed,
        {"max_inflight_prompts": 64, "max_buffered_rollouts": 32},
        "max_buffered_rollouts is 32; it must be at least max_inflight_prompts, which is 64: it counts groups in "
        "flight too",
    ),
    (
        Rules.windowed,
        {"max_inflight_prompts": 100},
        "max_buffered_rollouts is 64; it must be at least max_inflight_prompts, which is 100: it counts groups in "
        "flight too",
    ),
    (Rules.in_order, {"max_lookahead_versions": -1}, "max_lookahead_versions is -1; it must be at least 0"),
    (Rules.capacity, {"max_head_offpolicyness": -1}, "max_head_offpolicyness is -1; it must be at least 0"),
    (Rules.capacity, {"max_concurrent_rollouts": 0}, "max_concurrent_rollouts is 0; it must be at least 1"),
    # what a parameter becomes is told with the parameter
    (
        Rules.verl_async,
        {"generated_groups_max": 3},
        "generated_groups_max 3 is below batch_size 4, so no batch could ever be filled (train_batch_size becomes "
        "batch_size)",
    ),
    (
        Rules.verl_async,
        {"max_off_policy_threshold": None, "max_off_policy_strategy": "wait"},
        "on_stale 'wait' waits for groups at the lag bound, and lag_max is not set (max_off_policy_threshold becomes "
        "lag_max, max_off_policy_strategy becomes on_stale)",
    ),
    (
        Rules.windowed,
        {"max_staleness_versions": 0, "on_stale": "wait", "max_buffered_rollouts": 64},
        "on_stale 'wait' with lag_max 0 needs admission 'per_batch': anything else deadlocks (max_staleness_versions "
        "becomes lag_max, max_buffered_rollouts becomes admission.ready_max)",
    ),
    (Rules.windowed, {"stall_s": "x"}, "stall_s is 'x'; it must be a number"),
]


@pytest.mark.parametrize(("make", "settings", "text"), WRONG, ids=str)
def test_what_is_wrong_is_told_by_the_names_that_were_written(make: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSettings) as refused:
        make(4, **settings)

    assert str(refused.value) == f"Rules.{make.__name__}: {text}"


@pytest.mark.parametrize(
    ("make", "name", "hint"),
    [
        (Rules.capacity, "in_flight_max", "did you mean 'max_concurrent_rollouts'?"),
        (Rules.capacity, "consumer_batch_size", "did you mean 'batch_size'?"),
        (Rules.windowed, "n", "did you mean 'max_inflight_prompts'?"),
        (Rules.windowed, "ready_max", "did you mean 'max_buffered_rollouts'?"),
        (Rules.in_order, "warmup", "did you mean 'max_lookahead_versions'?"),
        (
            Rules.in_order,
            "max_staleness_versions",
            "which is for Rules.windowed; its parameters are batch_size, max_lookahead_versions",
        ),
        (
            Rules.capacity,
            "filter_groups_metric",
            "which is for Rules.verl_sync and Rules.verl_async; its parameters are batch_size, max_head_offpolicyness, "
            "max_concurrent_rollouts",
        ),
        (
            Rules.verl_async,
            "gen_batch_size",
            "which is for Rules.verl_sync; its parameters are train_batch_size, max_off_policy_threshold, "
            "max_off_policy_strategy, filter_groups_metric, num_warmup_batches, strict",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_what_it_may_mean_here(make: Any, name: str, hint: str) -> None:
    with pytest.raises(BadSettings) as refused:
        make(4, **{name: 2})

    assert re.fullmatch(rf"Rules.{make.__name__} has no setting '{name}'[,;] {re.escape(hint)}", str(refused.value))


def test_each_name_that_is_known_is_told_once() -> None:
    with pytest.raises(BadSettings, match="known are") as refused:
        Rules.windowed(4, qqqq=1)

    known = str(refused.value).partition("known are ")[2].split(", ")
    assert len(known) == len(set(known))


def test_without_its_first_parameter_a_preset_says_which_that_is() -> None:
    with pytest.raises(BadSettings, match=r"Rules\.verl_async: missing a required argument: 'train_batch_size'"):
        Rules.verl_async()  # type: ignore[call-arg]
    with pytest.raises(BadSettings, match=r"Rules\.verl_async: too many positional arguments"):
        Rules.verl_async(4, 2)  # type: ignore[misc]


def both(preset: str, parameter: str, setting: str, becomes: str) -> str:
    return f"Rules.{preset} has {parameter} and {setting}, and {parameter} becomes {becomes}: give one of the two"


TWICE = [
    (
        Rules.verl_async,
        {"max_off_policy_threshold": 4, "lag_max": 7},
        both("verl_async", "max_off_policy_threshold", "lag_max", "lag_max"),
    ),
    (
        Rules.verl_async,
        {"max_off_policy_threshold": 8, "lag_max": 7},  # the default, but somebody wrote it
        both("verl_async", "max_off_policy_threshold", "lag_max", "lag_max"),
    ),
    (
        Rules.verl_async,
        {"num_warmup_batches": 2, "admission": Slots(n=4)},
        both("verl_async", "num_warmup_batches", "admission", "admission.warmup"),
    ),
    (
        Rules.verl_sync,
        {"sync_refill_failed_groups": True, "empty": "drop"},
        both("verl_sync", "sync_refill_failed_groups", "empty", "empty"),
    ),
    (Rules.verl_sync, {"batch_size": 32}, both("verl_sync", "train_batch_size", "batch_size", "batch_size")),
    (
        Rules.windowed,
        {"max_buffered_rollouts": 99, "admission": Slots(n=4)},
        both("windowed", "max_buffered_rollouts", "admission", "admission.ready_max"),
    ),
    (Rules.verl_async, {"mode": "sync"}, "can't have mode 'sync': for sync mode there is Rules.verl_sync"),
    (Rules.verl_sync, {"mode": "async"}, "can't have mode 'async': for async mode there is Rules.verl_async"),
    (
        Rules.verl_sync,
        {"lag_max": 2},
        "can't have lag_max 2: sync mode evicts and awaits no group for its age; Rules.verl_async does",
    ),
    (
        Rules.in_order,
        {"lag_max": 2},
        "can't have lag_max 2: a group is sampled at the version that it is made for, or never",
    ),
    (
        Rules.capacity,
        {"lag_max": 4},
        "can't have lag_max 4: it drops nothing for its age; max_head_offpolicyness bounds how old a group gets",
    ),
]


@pytest.mark.parametrize(("make", "settings", "text"), TWICE, ids=str)
def test_what_a_preset_is_made_of_is_not_contradicted(make: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSettings) as refused:
        make(4, **settings)

    assert str(refused.value) == (text if text.startswith("Rules") else f"Rules.{make.__name__} {text}")


def test_what_a_parameter_becomes_may_be_given_in_its_place() -> None:
    assert Rules.verl_async(4, lag_max=2) == Rules.verl_async(4, max_off_policy_threshold=3)
    assert Rules.verl_async(4, admission=Slots(n=4), mode="async").admission == Slots(n=4)


def test_numbers_of_numpy_are_numbers() -> None:
    assert Rules.verl_async(np.int64(4), max_off_policy_threshold=np.int64(3)) == Rules.verl_async(  # type: ignore[arg-type]
        4, max_off_policy_threshold=3
    )


# verl, sync ------------------------------------------------------------------------------------------

VERL_SYNC = {"filter_groups_metric": "acc", "max_inflight_gen_batches": 2}


@pytest.mark.parametrize(
    ("made_of", "lag", "options", "reasons", "credit"),
    [
        (MIXED, 9, {}, None, 0),
        (FLAT, 0, {}, ("zero_variance",), 2),
        (FLAT, 9, {}, ("zero_variance",), 2),
        (FLAT, 0, {"filter_groups_metric": None}, None, 0),
        (FAILED_WITH_ROWS, 0, {}, None, 0),
        (FAILED_WITH_ROWS, 0, {"sync_refill_failed_groups": True}, None, 0),
        (FAILED_WITHOUT, 0, {}, ("empty",), 1),
        (FAILED_WITHOUT, 0, {"strict": True}, None, 0),
        (FAILED_WITHOUT, 0, {"strict": True, "sync_refill_failed_groups": True}, ("empty",), 1),
        (FINISHED_WITHOUT, 0, {"empty_session": "allow"}, ("empty",), 1),
        (FINISHED_WITHOUT, 0, {"empty_session": "allow", "strict": True, "filter_groups_metric": None}, None, 0),
    ],
)
def test_verl_sync(made_of: list[str], lag: int, options: dict[str, Any], reasons: Any, credit: int) -> None:
    story = told(Rules.verl_sync(2, **(VERL_SYNC | options)), made_of, lag=lag)

    assert story.evicted().get("g") == reasons
    assert len(story.refills()) == credit


def test_verl_sync_bounds_in_flight_in_batches_and_drains() -> None:
    rules = Rules.verl_sync(2, filter_groups_metric="acc")

    assert (rules.in_flight_batches_max, rules.drains, rules.admission_rule) == (1, True, PerBatch(warmup=0))


def test_strict_verl_sync_samples_a_failed_group_that_has_no_row() -> None:
    story = play("submit g/2", "start g", "fail g", "sample 1", rules=Rules.verl_sync(1, strict=True))

    assert story.batches() == [("g",)]


@pytest.mark.parametrize(
    ("refilled", "evicted"), [(False, {}), (True, {"failed": ("empty",)})], ids=["padded", "refilled"]
)
def test_strict_verl_sync_keeps_groups_without_a_row_but_failed_ones_that_are_refilled(
    refilled: bool, evicted: dict[str, Any]
) -> None:
    rules = Rules.verl_sync(3, strict=True, sync_refill_failed_groups=refilled, empty_session="allow")
    story = play(
        "submit failed/2", "submit empty/2", "submit good/2", "start failed", "start empty", "start good",
        "fail failed", "finish empty nothing", "sample 3", "finish good acc=1", rules=rules,
    )  # fmt: skip

    assert story.evicted() == evicted
    assert story.batches() == ([] if refilled else [("failed", "empty", "good")])


@pytest.mark.parametrize("rules", [Rules.verl_sync(1, filter_groups_metric="acc", strict=True, empty_session="allow"),
                                   Rules.verl_async(1, filter_groups_metric="acc", strict=True, empty_session="allow")],
                         ids=["sync", "async"])  # fmt: skip
def test_under_a_filter_a_finished_group_without_a_row_stops_a_strict_run(rules: Rules) -> None:
    story = play("submit g/2", "start g", "finish g nothing", "sample 1", rules=rules)

    assert isinstance(story.waiters[0].error, MissingMetric)


def test_verl_refills_in_multiples_of_the_generation_batch() -> None:
    rules = Rules.verl_sync(4, filter_groups_metric="acc", gen_batch_size=3)
    story = play(
        "submit g/2", "submit h/2", "submit i/2", "submit j/2", "start g", "start h", "sample 4",
        "finish g acc=1", "finish h acc=1", rules=rules, source=list("abcdefgh"),
    )  # fmt: skip

    assert story.refills() == []  # 4 owed, 2 places
    story.tell("start i", "finish i acc=1")
    assert story.refills() == ["a", "b", "c"]  # 6 owed, 3 places
    assert len(story.book.credits) == 3


# verl, async -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_of", "lag", "options", "reasons"),
    [
        (MIXED, 3, {"max_off_policy_threshold": 4}, None),
        (MIXED, 4, {"max_off_policy_threshold": 4}, ("stale",)),
        (MIXED, 0, {"max_off_policy_threshold": 1}, None),
        (MIXED, 1, {"max_off_policy_threshold": 1}, ("stale",)),
        (MIXED, 99, {"max_off_policy_threshold": None}, None),
        (MIXED, 99, {"max_off_policy_strategy": "wait"}, None),
        (MIXED, 7, {}, None),
        (MIXED, 8, {}, ("stale",)),
        (FLAT, 0, {}, ("zero_variance",)),
        (FLAT, 8, {}, ("stale", "zero_variance")),
        (FLAT, 0, {"filter_groups_metric": None}, None),
        (FAILED_WITH_ROWS, 0, {}, ("failed",)),
        (FAILED_WITHOUT, 0, {}, ("empty",)),
        (FAILED_WITHOUT, 0, {"strict": True}, ("empty",)),
        (FINISHED_WITHOUT, 0, {"empty_session": "allow"}, ("empty",)),
        (FINISHED_WITHOUT, 0, {"empty_session": "allow", "strict": True, "filter_groups_metric": None}, None),
    ],
)
def test_verl_async(made_of: list[str], lag: int, options: dict[str, Any], reasons: Any) -> None:
    story = told(Rules.verl_async(2, **({"filter_groups_metric": "acc"} | options)), made_of, lag=lag)

    assert story.evicted().get("g") == reasons
    assert len(story.refills()) == (reasons is not None)


@pytest.mark.parametrize(("lag", "held"), [(2, False), (3, True), (4, True)])
def test_verl_waits_from_a_span_of_the_threshold_on(lag: int, held: bool) -> None:
    rules = Rules.verl_async(1, max_off_policy_threshold=4, max_off_policy_strategy="wait")
    story = play("submit slow/1", "start slow", "submit g/1", "start g", "finish g", f"publish {lag}", "sample 1",
                 rules=rules)  # fmt: skip

    assert (story.batches() == []) is held


@pytest.mark.parametrize(("strict", "batches"), [(False, [("v",)]), (True, [])])
def test_strictly_verl_holds_validation_by_its_own_groups_too(strict: bool, batches: Any) -> None:
    rules = Rules.verl_async(1, max_off_policy_threshold=1, max_off_policy_strategy="wait", strict=strict)
    story = play(
        "submit slow/1 partition=val", "submit v/1 partition=val", "start v", "finish v reward=1",
        "sample 1 partition=val",
        rules=rules,
    )  # fmt: skip

    assert story.batches() == batches


def test_verl_keeps_so_many_batches_ahead() -> None:
    assert Rules.verl_async(4, num_warmup_batches=3).admission == PerBatch(warmup=3)


def test_a_threshold_below_one_trains_on_nothing_and_is_refused() -> None:
    with pytest.raises(BadSettings, match="max_off_policy_threshold is 0; it must be at least 1"):
        Rules.verl_async(4, max_off_policy_threshold=0)


@pytest.mark.parametrize("make", [Rules.verl_sync, Rules.verl_async], ids=["sync", "async"])
@pytest.mark.parametrize("strict", [False, True])
def test_strictly_verl_keeps_equal_rewards_whose_deviation_is_not_zero_in_binary(make: Any, strict: bool) -> None:
    values = [0.7] * 6
    assert np.std(values) > 0

    rules = make(1, filter_groups_metric="acc", strict=strict)
    story = play("submit g/6", "start g", "sample 1", *(f"finish g.{i} acc=0.7" for i in range(6)), rules=rules,
                 source=["r1"])  # fmt: skip

    assert story.evicted() == ({} if strict else {"g": ("zero_variance",)})


@pytest.mark.parametrize("make", [Rules.verl_sync, Rules.verl_async], ids=["sync", "async"])
def test_verl_takes_one_value_per_trajectory(make: Any) -> None:
    rules = make(1, filter_groups_metric="acc")
    story = play("submit g/2", "start g", "sample 1", "finish g.0 acc=0 | acc=1", "finish g.1 acc=1", rules=rules)

    assert story.batches() == [("g",)]


# NeMo-RL, windowed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "lag", "evicted"), [(0, 0, False), (0, 1, True), (2, 2, False), (2, 3, True)])
def test_windowed_keeps_the_last_versions(window: int, lag: int, evicted: bool) -> None:
    story = play("submit g/1", "start g", "finish g reward=1", f"publish {lag}",
                 rules=Rules.windowed(1, max_staleness_versions=window))  # fmt: skip

    assert (story.evicted() == {"g": ("stale",)}) is evicted


@pytest.mark.parametrize(("lag", "aborted"), [(1, False), (2, True)])
def test_windowed_aborts_what_is_below_the_window_in_flight(lag: int, aborted: bool) -> None:
    story = play("submit g/1", "start g", f"publish {lag}", rules=Rules.windowed(1))

    assert (story.evicted() == {"g": ("cancelled", "stale")}) is aborted


@pytest.mark.parametrize(("freshest", "first"), [(False, "old"), (True, "new")])
def test_windowed_may_take_the_freshest_first(freshest: bool, first: str) -> None:
    story = play(
        "submit old/1", "start old", "finish old reward=1", "publish 1", "submit new/1", "start new",
        "finish new reward=1", "sample 1", rules=Rules.windowed(1, sample_freshest_first=freshest),
    )  # fmt: skip

    assert story.batches() == [(first,)]


def test_windowed_is_bounded_by_its_buffer() -> None:
    rules = Rules.windowed(1, max_inflight_prompts=2, max_buffered_rollouts=5)

    assert rules.admission == Slots(n=2, ready_max=3)


# NeMo-RL, in order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_in_order_makes_a_batch_for_each_version_of_the_window(lookahead: int) -> None:
    story = play(rules=Rules.in_order(2, max_lookahead_versions=lookahead), source=map(str, range(20)), admits=True)
    assert story.controller is not None
    story.controller.settle()

    targets = [group.target_version for group in story.book.groups.values()]
    assert targets == [version for version in range(lookahead + 1) for _ in range(2)]


def test_in_order_samples_a_group_at_its_version_or_never() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "finish a reward=1", "finish b reward=1", "publish 1",
        "sample 1", rules=Rules.in_order(1), source=["r1", "r2"],
    )  # fmt: skip

    assert story.evicted() == {"a": ("stale",)}
    assert story.batches() == [("b",)]


# AReaL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offpolicyness", "version", "concurrent", "admitted"),
    [(0, 0, None, 4), (2, 0, None, 12), (0, 3, None, 16), (2, 3, None, 24), (2, 3, 5, 5), (0, 0, 5, 4)],
)
def test_capacity_admits_by_the_formula(
    offpolicyness: int, version: int, concurrent: int | None, admitted: int
) -> None:
    rules = Rules.capacity(4, max_head_offpolicyness=offpolicyness, max_concurrent_rollouts=concurrent)
    story = play(f"publish {version}", rules=rules, source=map(str, range(50)), admits=True)
    assert story.controller is not None
    story.controller.settle()

    assert rules.admission == Capacity(lag_max=offpolicyness, in_flight_max=concurrent)
    assert story.book.in_flight_count() == admitted


def test_capacity_drops_nothing_for_its_age() -> None:
    story = play("submit g/1", "start g", "finish g reward=1", "publish 99", rules=Rules.capacity(1))

    assert story.ready() == ["g"]


# A preset of one's own -------------------------------------------------------------------------------


def test_a_function_that_is_made_a_preset_is_checked_by_what_was_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", {})

    @preset(
        becomes={"groups": "batch_size"},
        least={"groups": 3},
        fixed={"mode": ("sync", "it is about sync runs")},
    )
    def small(cls: type[Rules], groups: int, **changes: Any) -> Rules:
        """Few groups at a time."""
        return cls(**{"mode": "sync", "batch_size": groups, **changes})

    assert small(Rules, 3, stall_s=1.0) == Rules(mode="sync", batch_size=3, stall_s=1.0)
    assert (small.__name__, small.__doc__) == ("small", "Few groups at a time.")
    assert list(presets.PRESETS) == ["small"]
    for settings, text in (
        ({"groups": 2}, "groups is 2; it must be at least 3"),
        ({"groups": 3, "mode": "async"}, "can't have mode 'async': it is about sync runs"),
        (
            {"groups": 3, "batch_size": 4},
            "has groups and batch_size, and groups becomes batch_size: give one of the two",
        ),
    ):
        with pytest.raises(BadSettings, match=text):
            small(Rules, **settings)
