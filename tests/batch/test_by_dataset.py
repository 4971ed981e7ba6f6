"""Results of a validation round by dataset, against the formulas."""

import math
from typing import Any

import attrs
import pytest
from hypothesis import given

from groupstate import Batch, BatchGroup, Prompt, SessionContext, Trajectory, open_run
from groupstate.batch import MetricResult

from .builders import batch, batches, group, row, small


def of(name: str, *sessions: Any, size: int | None = None) -> BatchGroup:
    return attrs.evolve(group(*sessions, size=size), dataset=name)


def rewarded(*rewards: float, name: str = "d", size: int | None = None) -> BatchGroup:
    return of(name, *([row(reward=reward)] for reward in rewards), size=size)


def test_the_mean_is_over_sessions_and_the_best_over_groups() -> None:
    (result,) = batch(rewarded(0.0, 1.0), rewarded(0.0, 0.5, 0.0, 0.0)).by_dataset().values()

    assert result.metrics["reward"] == MetricResult(mean=1.5 / 6, session_count=6, best=0.75, group_count=2)
    assert (result.group_count, result.session_count, result.failed_session_count) == (2, 6, 0)


def test_datasets_stand_by_their_names() -> None:
    results = batch(rewarded(1.0, name="sums"), rewarded(0.5, name=""), rewarded(0.0, name="sums")).by_dataset()

    assert list(results) == ["", "sums"]
    assert results["sums"].metrics["reward"].mean == 0.5
    assert results[""].metrics["reward"].mean == 0.5


def test_a_sessions_value_is_that_of_its_last_trajectory() -> None:
    last = Trajectory(reward=1.0, metrics={"turns": 3.0})
    (result,) = batch(of("d", [row(reward=0.25), last], [row(reward=0.0), last])).by_dataset().values()

    assert result.metrics["reward"] == MetricResult(1.0, 2, 1.0, 1)
    assert result.metrics["turns"] == MetricResult(3.0, 2, 3.0, 1)


def test_failed_sessions_are_counted_and_in_no_mean() -> None:
    (result,) = batch(rewarded(1.0, 0.0, size=4), of("d", size=2)).by_dataset().values()

    assert (result.group_count, result.empty_group_count) == (2, 1)
    assert (result.session_count, result.failed_session_count) == (6, 4)
    assert result.metrics["reward"] == MetricResult(mean=0.5, session_count=2, best=1.0, group_count=1)


def test_failed_sessions_are_worth_what_the_caller_says() -> None:
    (result,) = batch(rewarded(1.0, 0.5, size=4), of("d", size=2)).by_dataset(missing={"reward": 0.0}).values()

    assert result.metrics["reward"] == MetricResult(mean=0.25, session_count=6, best=0.5, group_count=2)


def test_a_dataset_of_which_all_fails_has_no_metric_unless_the_caller_says_one() -> None:
    failed = batch(of("d", size=3))

    assert failed.by_dataset()["d"].metrics == {}
    assert failed.by_dataset()["d"].failed_session_count == 3
    assert failed.by_dataset(missing={"reward": -1.0})["d"].metrics["reward"] == MetricResult(-1.0, 3, -1.0, 1)


def test_a_session_without_a_trajectory_has_not_failed_and_has_no_value() -> None:
    (result,) = batch(of("d", [row(reward=1.0)], [])).by_dataset().values()

    assert (result.session_count, result.failed_session_count, result.empty_group_count) == (2, 0, 0)
    assert result.metrics["reward"].session_count == 1


def test_a_metric_that_some_report_is_over_those_that_do() -> None:
    some = Trajectory(metrics={"length": 4.0})
    (result,) = batch(of("d", [some], [row(reward=1.0)]), rewarded(0.0)).by_dataset().values()

    assert result.metrics["length"] == MetricResult(4.0, 1, 4.0, 1)
    assert result.metrics["reward"] == MetricResult(0.5, 2, 0.5, 2)


def test_an_empty_batch_has_no_results() -> None:
    assert batch().by_dataset() == {}


@given(made=batches(), value=small)
def test_counts_add_up_and_means_are_those_of_the_formulas(made: Batch, value: float) -> None:
    results = made.by_dataset(missing={"reward": value})

    assert sum(result.group_count for result in results.values()) == len(made)
    for name, result in results.items():
        groups = [g for g in made.groups if g.dataset == name]
        found = {g.group_id: [value] * g.size for g in groups}
        for g in groups:
            for number, rows in g.sessions:
                if rows:
                    last = rows[-1]
                    found[g.group_id][number] = last.metrics["reward"] if last.reward is None else last.reward
        numbers = [number for group in found.values() for number in group]
        reward = result.metrics["reward"]
        assert reward.session_count == result.session_count == len(numbers)
        assert reward.group_count == result.group_count
        assert math.isclose(reward.mean, sum(numbers) / len(numbers), rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(reward.best, sum(map(max, found.values())) / len(found), rel_tol=1e-9, abs_tol=1e-9)


async def test_results_of_a_round_with_failures() -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        if ctx.prompt.content == "hard" or ctx.session == 3:
            raise ValueError("no")
        return Trajectory(reward=float(ctx.session == 1))

    async with open_run(session=session, group_size=4) as run:
        prompts = [Prompt(text, dataset) for text, dataset in (("easy", "a"), ("hard", "a"), ("easy", "b"))]
        results = (await run.validate(prompts)).by_dataset()

    assert (results["a"].session_count, results["a"].failed_session_count, results["a"].empty_group_count) == (8, 5, 1)
    assert results["a"].metrics["reward"] == MetricResult(pytest.approx(1 / 3), 3, 1.0, 1)
    assert results["b"].failed_session_count == 1
