"""Several batches' metrics as one, as a trainer logs them once per weight sync."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupstate import Batch, Rules, Tally, Trajectory, merged_metrics, open_run
from groupstate.core.metrics import Spread
from groupstate.errors import BadSettings

from .builders import batch, group, row, tallies

whole_numbers = st.integers(-1000, 1000).map(float)
"""Sums of these are exact, so that what is merged can be compared with `==`."""


def of(*made: Tally) -> list[Batch]:
    return [attrs.evolve(batch(group([row()])), partition=tally.partition, tally=tally) for tally in made]


def test_the_metrics_of_a_batch_are_its_tally_flattened():
    made = batch(group([row()]))

    assert made.metrics == {"training/x": 1.0} == made.tally.flat() == merged_metrics([made])


def test_a_batch_made_by_hand_needs_no_tally():
    made = Batch(number=1, partition="val", groups=(), weight_version=0)

    assert (made.tally, made.metrics) == (Tally("val"), {})
    assert Batch.from_bytes(made.to_bytes()) == made


def test_bytes_keep_the_tally():
    tally = Tally("val", {"n": 2.0}, {"x": Spread(2, 3.0, 1.0, 2.0)}, {"h": {0.0: 1, 1.0: 3}})
    (made,) = of(tally)
    back = Batch.from_bytes(made.to_bytes())

    assert back.tally == tally
    assert back.metrics == made.metrics == {"validation/n": 2.0, "validation/x/mean": 1.5, "validation/x/max": 2.0,
                                            "validation/x/min": 1.0}  # fmt: skip


def test_each_partition_is_merged_for_itself():
    train, more = Tally("train", {"n": 1.0}), Tally("train", {"n": 2.0})

    assert merged_metrics(of(train, Tally("val", {"n": 8.0}), more)) == {"training/n": 3.0, "validation/n": 8.0}


def test_merging_no_batch_is_an_error():
    with pytest.raises(BadSettings, match="nothing to merge: give at least one batch"):
        merged_metrics([])


@given(made=st.lists(tallies("train", whole_numbers), min_size=1, max_size=5), data=st.data())
def test_order_and_grouping_change_nothing(made, data):
    whole = Tally.merged(made)
    at = data.draw(st.integers(1, len(made)))
    mixed = data.draw(st.permutations(made))

    assert Tally.merged(mixed) == whole
    assert Tally.merged([Tally.merged(made[:at]), *made[at:]]) == whole
    assert merged_metrics(iter(of(*made))) == whole.flat()


async def test_batches_of_a_run_merge_to_what_happened():
    async def session(ctx):
        index = int(ctx.prompt.content)
        return Trajectory(reward=float(ctx.session) if index % 3 else 1.0)

    rules = Rules(filter_metric="reward")
    async with open_run(rules=rules, source=map(str, range(9)), session=session, group_size=2) as run:
        batches = [await run.sample(size) for size in (1, 3, 2)]
    merged = merged_metrics(batches)

    assert [len(each) for each in batches] == [1, 3, 2]
    assert merged["training/groups/submitted"] == 9.0
    assert merged["training/filter_groups/evicted_samples"] == 3.0
    assert merged["training/reward/mean"] == 0.5
    assert Tally.merged(each.tally for each in batches).spreads["reward"].count == 12
