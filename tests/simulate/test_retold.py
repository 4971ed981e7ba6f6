"""From the log of a run that went wrong to a scenario file in which the same goes wrong."""

import tomllib

import pytest

from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.retold import retold, steps_of
from groupstate.simulate.scenario import StepFailed, play
from groupstate.simulate.scenario_file import parse
from groupstate.simulate.simulator import simulate
from tests.planted import faults as planted


@pytest.mark.parametrize(("fault", "seed"), [("credited_twice", 1), ("terminal_published_early", 1)])
def test_the_scenario_of_a_fault_fails_with_it_and_passes_without(fault, seed, monkeypatch):
    with monkeypatch.context() as patch:
        getattr(planted, fault)(patch)
        found = simulate(drawn_plan(seed))
        scenario = retold(found.plan, found.records, found.breach.kind, "as found")

        assert scenario is not None
        with pytest.raises(StepFailed, match=found.breach.kind):
            play(parse(tomllib.loads(scenario)))
    play(parse(tomllib.loads(scenario)))
    assert len(tomllib.loads(scenario)["steps"]) < 16


def test_every_step_of_a_long_run_is_one_that_scenarios_know():
    for seed in (12, 13):
        steps = steps_of(simulate(drawn_plan(seed)).records)

        parse({"steps": steps})
        assert {"crash": True} in steps
        assert steps[-1] == {"check": True}


def test_a_run_in_which_nothing_went_wrong_makes_no_scenario():
    outcome = simulate(drawn_plan(2))

    assert retold(outcome.plan, outcome.records, "invariant 4", "none") is None
    assert retold(outcome.plan, outcome.records, "stuck", "none") is None
