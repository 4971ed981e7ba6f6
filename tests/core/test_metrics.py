"""What comes with a batch: counts of the log since the batch before it, under names that other tools know."""

from collections import Counter
from typing import Any

import attrs
import pytest

from groupstate.core import events as ev
from groupstate.core.held import Window
from groupstate.core.metrics import EVICTION_METRICS, Spread, Tally, batch_tally, prefix
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.testing.notation import Story, play

ZEROS = {
    "off_policy/evicted_samples": 0.0,
    "filter_groups/evicted_samples": 0.0,
    "rollout_failure/evicted_samples": 0.0,
    "filter_groups/discarded_surplus_samples": 0.0,
    "cancelled/evicted_samples": 0.0,
    "custom/evicted_samples": 0.0,
    "groups/evicted": 0.0,
    "groups/submitted": 0.0,
    "refill/submitted": 0.0,
    "refill/forfeited": 0.0,
    "results/fenced": 0.0,
    "groups/requeued": 0.0,
    "off_policy/newer_than_trainer": 0.0,
}


def claimed(story: Story, number: int = 1) -> dict[str, float]:
    """Metrics of the `number`-th sample() that a story served."""
    claim = story.waiters[number - 1].claim
    assert claim is not None
    return claim.metrics


def of_window(window: Window) -> dict[str, float]:
    flat = batch_tally("train", window, [], [], 0).flat()
    return {name.removeprefix("training/"): value for name, value in flat.items()}


def test_nothing_happened_and_nothing_sampled_gives_zeros_and_no_means() -> None:
    assert of_window(Window()) == ZEROS


@pytest.mark.parametrize(("partition", "name"), [("train", "training/"), ("val", "validation/")])
def test_names_begin_with_the_partition(partition: str, name: str) -> None:
    assert prefix(partition) == name
    assert all(key.startswith(name) for key in batch_tally(partition, Window(), [], [], 0).flat())


@pytest.mark.parametrize(
    ("reason", "metric"),
    [
        ("stale", "off_policy/evicted_samples"),
        ("zero_variance", "filter_groups/evicted_samples"),
        ("failed", "rollout_failure/evicted_samples"),
        ("empty", "rollout_failure/evicted_samples"),
        ("too_few", "rollout_failure/evicted_samples"),
        ("damaged", "rollout_failure/evicted_samples"),
        ("surplus", "filter_groups/discarded_surplus_samples"),
        ("cancelled", "cancelled/evicted_samples"),
        ("custom", "custom/evicted_samples"),
    ],
)
def test_each_reason_is_counted_under_one_metric(reason: str, metric: str) -> None:
    window = Window()
    window.evicted[reason] = 3

    assert of_window(window) == ZEROS | {metric: 3.0}


def test_the_reasons_of_a_metric_are_added_up() -> None:
    window = Window()
    window.evicted.update({"failed": 1, "empty": 2, "too_few": 4, "damaged": 8, "stale": 16})
    metrics = of_window(window)

    assert metrics["rollout_failure/evicted_samples"] == 15.0
    assert metrics["off_policy/evicted_samples"] == 16.0


def test_no_reason_is_left_out_or_counted_twice() -> None:
    reasons = [reason for names in EVICTION_METRICS.values() for reason in names]

    assert sorted(reasons) == sorted(ev.EvictReason.__args__)


def test_the_counts_of_a_window_are_passed_on() -> None:
    window = Window(evicted_groups=1, submitted=2, refills=3, forfeited=4, fenced=5, requeued=8)
    window.starved["math"] = 9
    window.sessions_failed.update({"timeout": 6, "error": 7})
    counts = {
        "groups/evicted": 1.0,
        "groups/submitted": 2.0,
        "refill/submitted": 3.0,
        "refill/forfeited": 4.0,
        "results/fenced": 5.0,
        "groups/requeued": 8.0,
        "datasets/math/starved": 9.0,
        "sessions/failed/timeout": 6.0,
        "sessions/failed/error": 7.0,
    }

    assert of_window(window) == ZEROS | counts


def test_staleness_is_lag_plus_one_and_a_mean_over_groups_not_over_events() -> None:
    metrics = of_window(Window(stale_lags=[10, 2, 2, 2]))

    assert metrics["off_policy/evicted_samples_staleness/mean"] == 5.0
    assert metrics["off_policy/evicted_samples_staleness/max"] == 11.0
    assert metrics["off_policy/evicted_samples_staleness/min"] == 3.0


def test_a_batch_reports_its_own_groups() -> None:
    story = play(
        "submit a/2", "submit b/1 stamp=1", "start a", "start b", "publish 3", "finish a.0 reward=0 versions=1,1,3",
        "finish a.1 reward=1 versions=2", "finish b reward=4 acc=1", "sample 2", rules=Rules(),
    )  # fmt: skip
    metrics = {name.removeprefix("training/"): value for name, value in claimed(story).items()}

    assert metrics == ZEROS | {
        "groups/submitted": 2.0,
        "off_policy/group_staleness/mean": 3.5,
        "off_policy/group_staleness/max": 4.0,
        "off_policy/group_staleness/min": 3.0,
        "off_policy/lag_in_flight/mean": 2.5,
        "off_policy/lag_in_flight/max": 3.0,
        "off_policy/lag_in_flight/min": 2.0,
        "off_policy/lag_in_queue/mean": 0.0,
        "off_policy/lag_in_queue/max": 0.0,
        "off_policy/lag_in_queue/min": 0.0,
        "off_policy/trajectory_staleness/mean": 0.5,
        "off_policy/trajectory_staleness/max": 1.0,
        "off_policy/trajectory_staleness/min": 0.0,
        "off_policy/trajectory_staleness_worst/mean": 1.5,
        "off_policy/trajectory_staleness_worst/max": 2.0,
        "off_policy/trajectory_staleness_worst/min": 1.0,
        "off_policy/trajectory_spans/mean": 2.0,
        "off_policy/trajectory_spans/max": 3.0,
        "off_policy/trajectory_spans/min": 1.0,
        "response/tokens/mean": 4 / 3,
        "response/tokens/max": 3.0,
        "response/tokens/min": 0.0,
        "reward/mean": 5 / 3,
        "reward/max": 4.0,
        "reward/min": 0.0,
    }


def test_without_rewards_or_spans_there_are_no_such_numbers() -> None:
    story = play("submit a/1", "start a", "finish a acc=1", "sample 1", rules=Rules())
    names = {name.split("/", 1)[1] for name in claimed(story)}

    assert not any(name.startswith(("reward/", "off_policy/trajectory_spans")) for name in names)


def test_groups_newer_than_the_trainer_are_counted() -> None:
    story = play(
        "submit a/1 stamp=3", "submit b/1", "start a", "start b", "finish a acc=1", "finish b acc=1", "sample 2",
        rules=Rules(),
    )  # fmt: skip

    assert claimed(story)["training/off_policy/newer_than_trainer"] == 1.0
    assert claimed(story)["training/off_policy/group_staleness/max"] == 1.0


def test_a_group_that_came_back_is_not_newer_than_the_trainer() -> None:
    story = play("submit a/1 stamp=3", "start a", "finish a acc=1", "sample 1", "release 1", "sample 1", rules=Rules())

    assert claimed(story, 2)["training/off_policy/newer_than_trainer"] == 0.0


def test_each_group_is_counted_in_one_batch() -> None:
    rules = Rules(filter_metric="acc")
    story = play(rules=rules)
    for number in range(10):
        story.tell(f"submit g{number}/2", f"start g{number}")
        if number < 2:
            story.tell(f"finish g{number} acc=1")
        elif number == 2:
            story.tell(f"fail g{number}")
        else:
            story.tell(f"finish g{number}.0 acc=0", f"finish g{number}.1 acc=1")
    story.tell("sample 4", "sample 3")
    first, second = claimed(story, 1), claimed(story, 2)

    assert (first["training/groups/submitted"], second["training/groups/submitted"]) == (10.0, 0.0)
    assert (first["training/groups/evicted"], second["training/groups/evicted"]) == (3.0, 0.0)
    assert story.batches() == [("g3", "g4", "g5", "g6"), ("g7", "g8", "g9")]


def test_validation_has_a_window_of_its_own() -> None:
    story = play(
        "submit v/1 partition=val", "submit a/1", "start v", "start a", "fail v timeout", "fail a error",
        "sample 1 partition=val", rules=Rules(),
    )  # fmt: skip
    metrics = claimed(story)

    assert metrics["validation/groups/submitted"] == 1.0
    assert metrics["validation/sessions/failed/timeout"] == 1.0
    assert metrics["validation/groups/evicted"] == 0.0
    assert "validation/sessions/failed/error" not in metrics
    assert story.book.window("train").evicted_groups == 1


def test_what_a_cancelled_sampler_would_have_reported_is_reported_by_the_next() -> None:
    story = play(
        "submit f/1", "start f", "fail f", "submit a/1", "start a", "finish a acc=1", "sample 1", "withdraw",
        "sample 1", rules=Rules(),
    )  # fmt: skip

    assert claimed(story, 2)["training/groups/evicted"] == 1.0


# The parts of a lag, and the versions of trajectories --------------------------------------------------------


def spread(story: Story, name: str, number: int = 1) -> Spread | None:
    claim = story.waiters[number - 1].claim
    assert claim is not None
    return claim.tally.spreads.get(name)


def test_lag_is_split_where_the_group_ended() -> None:
    story = play(
        "submit a/2", "start a", "publish 1", "finish a.0 acc=1", "publish 3", "finish a.1 acc=1", "publish 7",
        "sample 1", rules=Rules(),
    )  # fmt: skip

    assert story.group("a").ended_version == 3
    assert spread(story, "off_policy/lag_in_flight") == Spread(1, 3.0, 3.0, 3.0)
    assert spread(story, "off_policy/lag_in_queue") == Spread(1, 4.0, 4.0, 4.0)
    assert spread(story, "off_policy/group_staleness") == Spread(1, 8.0, 8.0, 8.0)


def test_lag_is_counted_from_what_the_basis_says() -> None:
    story = play(
        "submit a/1", "start a", "publish 4", "finish a versions=1,2", "publish 5", "sample 1",
        rules=Rules(basis="newest_token"),
    )  # fmt: skip

    assert spread(story, "off_policy/lag_in_flight") == Spread(1, 2.0, 2.0, 2.0)
    assert spread(story, "off_policy/lag_in_queue") == Spread(1, 1.0, 1.0, 1.0)


def test_a_group_newer_than_the_trainer_has_waited_nowhere() -> None:
    story = play("submit a/1 stamp=5", "start a", "finish a acc=1", "publish 2", "sample 1", rules=Rules())

    assert spread(story, "off_policy/lag_in_flight") == Spread(1, 0.0, 0.0, 0.0)
    assert spread(story, "off_policy/lag_in_queue") == Spread(1, 0.0, 0.0, 0.0)


def test_a_group_that_came_back_keeps_both_parts_of_its_lag() -> None:
    story = play(
        "submit a/1", "start a", "publish 2", "finish a acc=1", "publish 3", "sample 1", "release 1", "publish 9",
        "sample 1", rules=Rules(),
    )  # fmt: skip

    for number in (1, 2):
        assert spread(story, "off_policy/lag_in_flight", number) == Spread(1, 2.0, 2.0, 2.0)
        assert spread(story, "off_policy/lag_in_queue", number) == Spread(1, 1.0, 1.0, 1.0)


def test_a_requeued_group_is_in_flight_again() -> None:
    story = play(
        "submit a/1", "start a", "publish 1", "fail a", "requeue a", rules=Rules(mode="sync"), weight_version=0
    )
    assert story.group("a").ended_version == 0

    story.tell("publish 4", "start a", "finish a acc=1", "publish 5", "sample 1")
    assert spread(story, "off_policy/lag_in_flight") == Spread(1, 4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("then", "parts"), [((), (0.0, 0.0)), (("publish 4",), (0.0, 2.0))], ids=["at the mark", "later"]
)
def test_no_part_is_negative_or_more_than_the_lag_after_going_back(then: tuple[str, ...], parts: Any) -> None:
    story = play(
        "publish 2", "mark", "publish 5", "submit a/1", "start a", "publish 7", "finish a acc=1",
        "recover at=1", *then, "sample 1", rules=Rules(),
    )  # fmt: skip
    flown, queued = spread(story, "off_policy/lag_in_flight"), spread(story, "off_policy/lag_in_queue")
    assert flown is not None
    assert queued is not None

    assert story.group("a").ended_version == 2
    assert (flown.total, queued.total) == parts


def test_lag_of_another_lineage_is_not_taken_for_time_in_flight() -> None:
    """It flew over five versions of a line that a trainer at version 1 hasn't seen."""
    story = play("submit a/1", "start a", "publish 5", "finish a acc=1", "recover version=1", "sample 1", rules=Rules())
    flown, queued = spread(story, "off_policy/lag_in_flight"), spread(story, "off_policy/lag_in_queue")
    assert flown is not None
    assert queued is not None

    assert (flown.total, queued.total) == (1.0, 0.0)


def test_spare_sessions_are_counted_apart_from_failures() -> None:
    story = play("submit a/2", "start a", "finish a.0 acc=1", "finish a.1 acc=0", "sample 1",
                 rules=Rules(oversample=2))  # fmt: skip
    sums = story.waiters[0].claim.tally.sums

    assert sums["sessions/spare"] == 2.0
    assert [name for name in sums if name.startswith("sessions/failed/")] == []


def test_staleness_of_a_trajectory_is_that_of_its_tokens() -> None:
    story = play(
        "submit a/1", "start a", "publish 5", "finish a versions=1,2,4 | versions=5 | acc=1", "publish 6", "sample 1",
        rules=Rules(),
    )  # fmt: skip

    assert spread(story, "off_policy/trajectory_spans") == Spread(2, 5.0, 1.0, 4.0)
    assert spread(story, "off_policy/trajectory_staleness") == Spread(2, 3.0, 1.0, 2.0)
    assert spread(story, "off_policy/trajectory_staleness_worst") == Spread(2, 6.0, 1.0, 5.0)


def test_a_trajectory_of_the_current_version_alone_is_not_stale_at_its_worst() -> None:
    story = play("submit a/1", "start a", "finish a versions=3,4", "publish 3", "sample 1", rules=Rules())

    assert spread(story, "off_policy/trajectory_staleness_worst") == Spread(1, 0.0, 0.0, 0.0)


def test_a_trajectory_newer_than_the_trainer_is_not_stale() -> None:
    story = play("submit a/1", "start a", "finish a versions=1,9", "publish 3", "sample 1", rules=Rules())

    assert spread(story, "off_policy/trajectory_staleness") == Spread(1, 0.0, 0.0, 0.0)
    assert spread(story, "off_policy/trajectory_staleness_worst") == Spread(1, 2.0, 2.0, 2.0)


# Filtered values and datasets --------------------------------------------------------------------------------


def test_filtered_values_say_which_value_all_sessions_shared() -> None:
    story = play(
        "submit a/2", "start a", "finish a acc=0", "submit b/2", "start b", "finish b acc=1", "submit c/2", "start c",
        "finish c acc=0", "submit d/2", "start d", "finish d other=1", "submit e/1", "start e", "finish e acc=1",
        "sample 1", rules=Rules(filter_metric="acc", on_missing="evict"),
    )  # fmt: skip
    claim = story.waiters[0].claim
    assert claim is not None

    assert claim.metrics["training/filter_groups/evicted_samples"] == 4.0
    assert claim.tally.histograms == {"filter_groups/filtered_values": {0.0: 2, 1.0: 1}}
    assert not any("filtered_values" in name for name in claim.metrics)


def test_minus_zero_is_no_value_of_its_own() -> None:
    tally = batch_tally("train", Window(filtered_values=Counter([-0.0, 0.0])), [], [], 0)

    assert repr(tally.histograms) == "{'filter_groups/filtered_values': {0.0: 2}}"


def test_nothing_filtered_gives_no_histogram() -> None:
    assert batch_tally("train", Window(), [], [], 0).histograms == {}


def test_a_batch_says_how_many_groups_of_each_dataset_it_has() -> None:
    story = play(
        "submit a/1 dataset=math", "submit b/1 dataset=code", "submit c/1 dataset=math", "submit d/1", "start a",
        "start b", "start c", "start d", "finish a acc=1", "finish b acc=1", "finish c acc=1", "finish d acc=1",
        "sample 4", rules=Rules(),
    )  # fmt: skip
    metrics = claimed(story)

    assert {name: value for name, value in metrics.items() if "datasets" in name} == {
        "training/datasets/math/sampled": 2.0,
        "training/datasets/code/sampled": 1.0,
    }


def test_every_field_of_a_window_is_taken_in() -> None:
    """A field that is added later too: each is filled by its kind."""
    full = Window()
    for field in attrs.fields(Window):
        empty = getattr(full, field.name)
        setattr(full, field.name, type(empty)([7]) if not isinstance(empty, int) else 3)
    into = Window(stale_lags=[1])
    into.add(full)
    into.add(Window())

    assert into == attrs.evolve(full, stale_lags=[7, 1])


# Merging -----------------------------------------------------------------------------------------------------


def of_windows(*windows: Window) -> list[Tally]:
    return [batch_tally("train", window, [], [], 0) for window in windows]


@pytest.mark.parametrize("step", [1, -1], ids=["in order", "backwards"])
def test_merging_weighs_a_mean_by_what_it_is_a_mean_of(step: int) -> None:
    one = Window(evicted=Counter(stale=1), stale_lags=[9], filtered_values=Counter({0.0: 1, 1.0: 1}))
    three = Window(evicted=Counter(stale=3), stale_lags=[1, 1, 1], filtered_values=Counter({1.0: 2}))
    merged = Tally.merged(of_windows(one, three)[::step])

    assert merged.flat()["training/off_policy/evicted_samples"] == 4.0
    assert merged.flat()["training/off_policy/evicted_samples_staleness/mean"] == 4.0
    assert merged.flat()["training/off_policy/evicted_samples_staleness/min"] == 2.0
    assert merged.flat()["training/off_policy/evicted_samples_staleness/max"] == 10.0
    assert merged.histograms == {"filter_groups/filtered_values": {0.0: 1, 1.0: 3}}


def test_merging_one_tally_changes_nothing_and_shares_nothing() -> None:
    (tally,) = of_windows(Window(submitted=2, stale_lags=[3], filtered_values=Counter([1.0])))
    merged = Tally.merged([tally])
    assert merged == tally

    merged.sums["groups/submitted"] += 1
    merged.histograms["filter_groups/filtered_values"][1.0] += 1
    assert tally.sums["groups/submitted"] == 2.0
    assert tally.histograms == {"filter_groups/filtered_values": {1.0: 1}}


def test_an_empty_window_changes_nothing() -> None:
    window = Window(submitted=2, stale_lags=[3], filtered_values=Counter([1.0]), sessions_failed=Counter(error=1))
    tally, empty = of_windows(window, Window())

    assert Tally.merged([empty, tally, empty]) == tally
    assert Tally.merged([empty, empty]) == empty
    assert empty.flat() == {f"training/{name}": value for name, value in ZEROS.items()}


def test_what_only_some_have_is_kept() -> None:
    first = Tally("val", {"a": 1.0}, {"x": Spread(1, 2.0, 2.0, 2.0)}, {"h": {1.0: 1}})
    second = Tally("val", {"b": 2.0}, {"y": Spread(2, 2.0, 0.0, 2.0)}, {"i": {0.5: 2}})
    merged = Tally.merged([first, second])

    assert merged == Tally("val", first.sums | second.sums, first.spreads | second.spreads,
                           first.histograms | second.histograms)  # fmt: skip
    assert merged.flat()["validation/y/mean"] == 1.0


def test_merging_nothing_is_an_error() -> None:
    with pytest.raises(BadSettings, match="nothing to merge: give at least one tally"):
        Tally.merged([])


def test_merging_partitions_is_an_error() -> None:
    with pytest.raises(BadSettings, match="tallies of 'train' and 'val' can't be one"):
        Tally.merged([Tally("val"), Tally("train"), Tally("val")])
