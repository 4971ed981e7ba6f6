"""Whole simulated runs: nothing goes wrong in them, all of them is repeatable, and much happens in them."""

from collections import Counter
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.folding import Working
from groupstate.core.standing import totals_of
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.lots import Law
from groupstate.simulate.plan import CrashPlan, Plan, SessionPlan, StoragePlan, TrainerPlan
from groupstate.simulate.simulator import simulate

SEEDS = (0, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 15, 10_139, 20_099)
"""The last two went on for ever: a disk that fails in what a run can do without; an engine that dies when nobody uses
it any more."""
MANY_SEEDS = range(1000, 1400)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_goes_wrong(seed):
    outcome = simulate(drawn_plan(seed))

    assert outcome.breach is None
    assert outcome.lifetimes > 10
    assert outcome.ends["done"] == 1


def test_an_engine_that_dies_in_a_turn_ends_its_process_and_not_the_run():
    """Nobody samples then: the trainer hears of it from the engine, and the run at its end."""
    outcome = simulate(drawn_plan(10_141).changed(lifetimes=150))

    assert outcome.breach is None
    assert outcome.ends["died"] == outcome.ends["done"] == 1


def test_the_same_plan_gives_the_same_bytes():
    plan = drawn_plan(5)

    first, second = simulate(plan), simulate(plan)

    assert first.digest == second.digest
    assert first.records == second.records


def test_another_seed_gives_another_run():
    assert simulate(drawn_plan(2)).digest != simulate(drawn_plan(5)).digest


def test_a_plan_in_which_nothing_goes_wrong_trains_on_every_group_whole():
    outcome = simulate(Plan(hours=0.1))

    kinds = Counter(type(record.event) for record in outcome.records)
    assert outcome.breach is None
    assert outcome.lives == 1
    assert kinds[ev.SessionFailed] == kinds[ev.GroupFailed] == 0
    assert kinds[ev.SessionFinished] == 4 * kinds[ev.GroupFinished] == 4 * outcome.lifetimes > 100


def test_what_was_told_outlives_losses_of_power():
    """Crashes every half a minute, with commits that take long: much is lost that nobody was told of."""
    plan = Plan(
        hours=0.2,
        sessions=SessionPlan(error=0.05, flat=0.2),
        trainer=TrainerPlan(checkpoint_every=2, rewind=0.5),
        crash=CrashPlan(every_s=60.0, power=0.7, in_recovery=0.2),
        storage=StoragePlan(commit=Law(law="exponential", mean_s=1.0)),
    )

    outcome = simulate(plan)

    kinds = Counter(type(record.event) for record in outcome.records)
    assert outcome.breach is None
    assert outcome.ends["power"] > 3
    assert kinds[ev.RunRewound] > 0
    assert kinds[ev.BatchReturned] > 0


def test_a_replay_that_stops_is_a_breach(monkeypatch):
    def refuse(working: Working, *event: Any) -> bool:
        raise RuntimeError("it can't be")

    monkeypatch.setattr(Working, "finish", refuse)

    breach = simulate(Plan(hours=0.01)).breach

    assert breach is not None
    assert breach.kind == "invariant 9"
    assert "RuntimeError: it can't be" in breach.text


def test_a_replay_that_counts_otherwise_is_a_breach(monkeypatch):
    monkeypatch.setattr("groupstate.core.followed.totals_of", lambda book: (*totals_of(book)[:-1], 99))

    breach = simulate(Plan(hours=0.01)).breach

    assert breach is not None
    assert breach.kind == "invariant 3"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", MANY_SEEDS[::50])
def test_nothing_goes_wrong_in_many_runs(first):
    for seed in range(first, first + 50):
        outcome = simulate(drawn_plan(seed))

        assert outcome.breach is None, f"seed {seed}: {outcome.breach}"
