"""What trackers are sent of a run: batches, tables, numbers of the caller, at which step and from which thread."""

import math
from typing import Any

import pytest

from groupstate import open_run
from groupstate import sync as blocking
from groupstate.errors import BadInput
from tests.runtime.trackers import Kept, alternating, filtering


async def test_a_batch_is_sent_with_its_metrics_and_how_the_run_stands():
    kept = Kept()
    async with filtering(kept) as run:
        batch = await run.sample(2, weight_version=3)

    (logged, step), *_ = kept.logged
    assert step == 3
    assert batch.metrics.items() <= logged.items()
    assert logged["training/batch"] == batch.number
    assert logged["status/sampled"] == 2
    assert logged["status/weight_version"] == 3
    assert {type(value) for value in logged.values()} == {float}


async def test_the_values_of_filtered_groups_are_rows_of_a_table_of_each_step():
    kept = Kept()
    async with filtering(kept) as run:
        for version in range(6):
            await run.commit(await run.sample(2, weight_version=version))
        total = run.book.totals["evicted/zero_variance"]

    tables = kept.of("table")
    assert {(name, columns) for name, columns, _, _ in tables} == {
        ("training/filter_groups/filtered_values", ("step", "value", "groups"))
    }
    assert all(row[0] == step for _, _, rows, step in tables for row in rows)
    assert {row[1] for _, _, rows, _ in tables for row in rows} == {0.0, 1.0}
    assert sum(row[2] for _, _, rows, _ in tables for row in rows) <= total
    # No row is sent twice: what a step sends doesn't grow with the steps before it.
    assert max(len(rows) for _, _, rows, _ in tables) <= 2


async def test_a_step_without_filtered_groups_sends_no_table():
    kept = Kept()
    async with open_run(source=range(4), session=alternating, group_size=2, trackers=[kept]) as run:
        await run.sample(2)

    assert kept.of("table") == []


async def test_a_validation_round_is_sent_without_the_gauges_of_training():
    kept = Kept()
    async with filtering(kept) as run:
        await run.validate([1, 2])

    ((logged, _),) = kept.logged
    assert logged["validation/reward/mean"] == 0.5
    assert not [name for name in logged if name.startswith("status/")]


async def test_steps_can_be_the_numbers_of_batches():
    kept = Kept()
    async with filtering(kept, track_by="batch") as run:
        for _ in range(3):
            await run.commit(await run.sample(2))

    assert [step for _, step in kept.logged] == [1, 2, 3]


async def test_numbers_of_the_caller_are_sent_at_the_current_version_or_the_step_given():
    kept = Kept()
    async with open_run(trackers=[kept], weight_version=5) as run:
        run.track({"loss": 1, "is_best": True})
        run.track({"loss": math.nan}, step=9)

    (first, fifth), (second, ninth) = kept.logged
    assert (first, fifth) == ({"loss": 1.0, "is_best": 1.0}, 5)
    assert math.isnan(second["loss"])
    assert ninth == 9


@pytest.mark.parametrize(
    ("metrics", "step", "text"),
    [
        ([1], None, "metrics is [1]; it must be a dict of names and numbers"),
        ({3: 1.0}, None, "the name of a metric is 3; it must be a string"),
        ({"": 1.0}, None, "the name of a metric is ''; it must not be empty"),
        ({"loss": "1.0"}, None, "metric 'loss' is '1.0'; it must be one number"),
        ({"loss": bytearray(b"1")}, None, "metric 'loss' is bytearray(b'1'); it must be one number"),
        ({"loss": [1.0, 2.0]}, None, "metric 'loss' is [1.0, 2.0]; it must be one number"),
        ({"loss": 1.0}, 1.5, "step is 1.5; it must be an integer"),
    ],
)
async def test_what_is_no_number_is_refused_and_nothing_is_sent(metrics: Any, step: Any, text: str):
    kept = Kept()
    async with open_run(trackers=[kept]) as run:
        with pytest.raises(BadInput, match="must") as caught:
            run.track({**metrics, "other": 1.0} if isinstance(metrics, dict) else metrics, step=step)

    assert str(caught.value) == text
    assert kept.logged == []


async def test_a_run_without_trackers_takes_numbers_and_sends_nothing():
    async with filtering() as run:
        run.track({"loss": 1.0})
        await run.sample(2)

        assert run.trackers == ()


async def test_calls_to_a_tracker_come_in_order_from_one_thread_that_is_not_the_loops():
    kept = Kept()
    async with open_run(trackers=[kept]) as run:
        for step in range(50):
            run.track({"step": step}, step=step)

    assert [step for _, step in kept.logged] == list(range(50))
    assert kept.threads == {"tracker kept"}
    assert (kept.calls[0], kept.calls[-1]) == (("start",), ("finish", 0))


def test_a_blocking_run_sends_the_same():
    kept = Kept()
    with blocking.open_run(source=range(4), session=alternating, group_size=2, trackers=[kept]) as run:
        batch = run.sample(2)
        run.track({"loss": 0.5})
        assert run.trackers[0].name == "kept"

    assert kept.logged[0][0]["training/batch"] == batch.number
    assert kept.logged[1] == ({"loss": 0.5}, 0)
    assert kept.codes == [0]
