"""Faults that are planted are found, each by the seed that is named here: the first from 0 on that does."""

import pytest

from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.simulator import simulate
from tests.planted import faults as planted

pytestmark = pytest.mark.slow

FOUND = [
    (planted.cancelled_sampler_keeps_its_groups, 1, "account", "batches .* out, the trainer has"),
    (planted.lost_wake_up, 1, "stuck", "every task is blocked"),
    (planted.waiter_on_a_dead_rollout, 6, "stuck", "waiting .*sample"),
    (planted.fence_ignored, 19, "rows", "of attempt 1, and attempt 2 has begun since"),
    (planted.requeue_keeps_old_trajectories, 0, "lost", "payload"),
    (planted.fsync_skipped, 0, "lost", "can't be opened"),
    (planted.acknowledged_before_it_is_written, 1, "twice", "trained on in batch"),
    (planted.commit_not_awaited, 7, "lost", "commits .* were told and are not in the log"),
    (planted.credited_twice, 0, "invariant 5", "earns 3 refills"),
    (planted.terminal_published_early, 0, "invariant 1", "has not ended"),
    (planted.boundary_off_by_one, 1, "invariant 6", "lag_max .* is kept"),
    (planted.snapshot_off_by_one, 0, "error SessionStateError", "attempt"),
    (planted.stale_groups_stay, 8, "invariant 6", "past lag_max"),
]


@pytest.mark.parametrize(("plant", "seed", "kind", "words"), FOUND, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_found(plant, seed, kind, words, monkeypatch):
    plant(monkeypatch)

    breach = simulate(drawn_plan(seed)).breach

    assert breach is not None
    assert breach.kind == kind
    with pytest.raises(type(breach), match=words):
        raise breach


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plant", "seed"), [(plant, seed) for plant, seed, _, _ in FOUND])
def test_no_earlier_seed_finds_it(plant, seed, monkeypatch):
    """Or the page on testing says more than is true."""
    plant(monkeypatch)

    assert [earlier for earlier in range(seed) if simulate(drawn_plan(earlier)).breach is not None] == []
