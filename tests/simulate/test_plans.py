"""Plans: drawn from seeds, kept in files, made smaller."""

import pytest

from groupstate.errors import BadInput, BadSettings
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.lots import Law, Lots
from groupstate.simulate.plan import CrashPlan, EnginePlan, Plan, SessionPlan
from groupstate.simulate.plan_file import plan_text, read_plan
from groupstate.simulate.shrink import shrunk, smaller
from groupstate.simulate.simulator import Outcome
from groupstate.simulate.witness import Breach


def outcome_of(plan, breach=None, virtual_s=1e9):
    return Outcome(plan, 0, 0, 0, 1, virtual_s, {}, {}, "", breach, ())


def test_every_seed_has_a_plan_that_can_be_run():
    for seed in range(300):
        drawn_plan(seed).made_rules()


def test_seeds_differ_in_every_part():
    plans = [drawn_plan(seed) for seed in range(60)]

    for name in set(Plan.__struct_fields__) - {"group_size", "lifetimes"}:
        assert len({str(getattr(plan, name)) for plan in plans}) > 5, name
    assert {plan.rules.get("mode", "async") for plan in plans} == {"sync", "async"}
    kinds = {plan.rules["admission"]["kind"] for plan in plans if "admission" in plan.rules}
    assert kinds == {"per_batch", "slots", "capacity"}
    assert {plan.engine.in_flight for plan in plans if plan.engine} == {"keep", "continue", "restart"}


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_comes_back_from_its_file(seed, tmp_path):
    plan = drawn_plan(seed)
    (tmp_path / "plan.toml").write_text(plan_text(plan))

    assert read_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = 'one'", "no plan of a simulation"),
        ("hour = 1.0", "did you mean 'hours'"),
        ("seed = ", "plan.toml"),
    ],
)
def test_what_is_no_plan_is_refused(text, words, tmp_path):
    (tmp_path / "plan.toml").write_text(text)

    with pytest.raises(BadInput, match=words):
        read_plan(tmp_path / "plan.toml")


def test_rules_that_contradict_each_other_are_refused(tmp_path):
    (tmp_path / "plan.toml").write_text("[rules]\non_stale = 'wait'")

    with pytest.raises(BadSettings, match="lag_max is not set"):
        read_plan(tmp_path / "plan.toml")


def test_a_selection_function_that_is_not_found_is_refused(tmp_path):
    (tmp_path / "plan.toml").write_text("[rules]\nselection = 'tests.simulate.test_plans:misspelt'")

    with pytest.raises(BadSettings, match=r"selection: .* has no 'misspelt'; .*; or name it as selection = 'module:"):
        read_plan(tmp_path / "plan.toml")


def test_draws_are_the_same_for_ever():
    """Or seeds in bug reports would mean something else."""
    lots = Lots(7, 1, 2)

    assert [lots.below(1000) for _ in range(5)] == DRAWN
    assert Lots(7, 1, 3).below(1000) != DRAWN[0]


DRAWN = [558, 645, 240, 556, 863]


@pytest.mark.parametrize("law", ["constant", "exponential", "lognormal", "pareto"])
def test_laws_keep_their_mean_and_their_bound(law):
    lots, drawn = Lots(1), Law(law=law, mean_s=10.0, most_s=50_000.0)

    times = [drawn.draw(lots) for _ in range(20_000)]

    assert 6.0 < sum(times) / len(times) < 14.0
    assert min(times) > 0.0
    assert max(times) <= 50_000.0


def test_heavy_tails_are_heavy():
    lots = Lots(2)

    times = sorted(Law(law="pareto", mean_s=10.0).draw(lots) for _ in range(10_000))

    assert times[-1] > 100 * times[5_000]


def test_only_what_the_breach_needs_is_left_of_a_plan():
    """A run is in breach as long as sessions hang and power is lost."""
    plan = drawn_plan(11).changed(
        sessions=SessionPlan(hangs=0.01, error=0.1), crash=CrashPlan(every_s=9.0, power=1.0, closes=0.3), hours=8.0
    )

    def run(plan):
        wrong = plan.sessions.hangs > 0 and plan.crash.power > 0
        return outcome_of(plan, Breach("stuck", "so it is") if wrong else None)

    found = shrunk(run(plan), run=run).outcome.plan

    assert found.sessions == SessionPlan(hangs=0.01)
    assert found.crash == CrashPlan(power=1.0)
    assert found.engine is found.validation is None
    assert found.rules.keys() <= {"batch_size"}
    assert found.hours < 0.1


def test_a_breach_of_another_kind_is_no_smaller_form():
    plan = Plan(engine=EnginePlan(), hours=8.0)

    def run(plan):
        return outcome_of(plan, Breach("stuck" if plan.engine else "lost", "..."))

    assert shrunk(run(plan), run=run).outcome.plan.engine is not None


def test_shrinking_takes_no_more_runs_than_it_may():
    runs = []

    def run(plan):
        runs.append(plan)
        return outcome_of(plan)

    found = shrunk(outcome_of(drawn_plan(3), Breach("stuck", "...")), runs_max=7, run=run)

    assert len(runs) == 7 == found.runs
    assert found.outcome.plan == drawn_plan(3)


def test_what_came_behind_the_breach_is_cut_off_first():
    plan = Plan(hours=8.0)

    assert next(smaller(outcome_of(plan, virtual_s=3600.0)))[1].hours == pytest.approx(1.02)
