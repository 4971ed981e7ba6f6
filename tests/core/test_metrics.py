"""What comes with a batch: counts of the log since the batch before it, under names that other tools know."""

import pytest

from groupstate.core import events as ev
from groupstate.core.held import Window
from groupstate.core.metrics import EVICTION_METRICS, batch_metrics, prefix
from groupstate.core.rules import Rules
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
    "off_policy/newer_than_trainer": 0.0,
}


def claimed(story: Story, number: int = 1) -> dict[str, float]:
    """Metrics of the `number`-th sample() that a story served."""
    claim = story.waiters[number - 1].claim
    assert claim is not None
    return claim.metrics


def of_window(window: Window) -> dict[str, float]:
    return {name.removeprefix("training/"): value for name, value in batch_metrics("train", window, [], [], 0).items()}


def test_nothing_happened_and_nothing_sampled_gives_zeros_and_no_means() -> None:
    assert of_window(Window()) == ZEROS


@pytest.mark.parametrize(("partition", "name"), [("train", "training/"), ("val", "validation/")])
def test_names_begin_with_the_partition(partition: str, name: str) -> None:
    assert prefix(partition) == name
    assert all(key.startswith(name) for key in batch_metrics(partition, Window(), [], [], 0))


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
    window = Window(evicted_groups=1, submitted=2, refills=3, forfeited=4, fenced=5)
    window.sessions_failed.update({"timeout": 6, "error": 7})
    counts = {
        "groups/evicted": 1.0,
        "groups/submitted": 2.0,
        "refill/submitted": 3.0,
        "refill/forfeited": 4.0,
        "results/fenced": 5.0,
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
