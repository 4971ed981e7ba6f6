"""`groupstate simulate`, as a user meets it."""

import re
import tomllib

import pytest
from click.testing import CliRunner

from groupstate.cli import main
from groupstate.simulate.plan import Plan
from groupstate.simulate.plan_file import plan_text, read_plan
from groupstate.simulate.simulator import simulate
from tests.planted import faults as planted


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_seeds_one_after_the_other_each_with_a_line_and_all_in_one():
    done = run("--seed", "13", "--runs", "2")

    assert done.exit_code == 0
    assert re.search(r"^commit \S+ .*options: --seed 13 --runs 2$", done.output, re.MULTILINE)
    assert re.search(r"^seed 13: ok, \d+ lifetimes, .*killed \d.*; log [0-9a-f]{16}$", done.output, re.MULTILINE)
    assert "seed 14: ok" in done.output
    assert re.search(r"^2 runs, [\d,]+ group lifetimes .* lifetimes/s$", done.output, re.MULTILINE)


def test_the_hours_are_those_that_are_asked_for():
    shown = run("--seed", "13", "--hours", "0.5", "--show")

    assert shown.exit_code == 0
    assert tomllib.loads(shown.output)["hours"] == 0.5


def test_a_failure_leaves_a_smaller_plan_a_scenario_and_the_commands_that_repeat_it(tmp_path, monkeypatch):
    planted.credited_twice(monkeypatch)

    done = run("--seed", "1", "--out", str(tmp_path))

    assert done.exit_code == 1
    assert "FAILED seed 1, commit" in done.output
    assert "invariant 5" in done.output
    assert "again: groupstate simulate --seed 1\n" in done.output
    plan, scenario = tmp_path / "seed-1.plan.toml", tmp_path / "seed-1.scenario.toml"
    assert f"again, smaller: groupstate simulate --plan {plan}" in done.output
    assert f"as a scenario: groupstate scenario {scenario}" in done.output
    assert simulate(read_plan(plan)).breach.kind == "invariant 5"
    assert run("--plan", str(plan), "--out", str(tmp_path)).exit_code == 1
    assert CliRunner().invoke(main, ["scenario", str(scenario)]).exit_code == 1


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("[rules]\nselection = 'no_module:rule'", "there is no module 'no_module'"),
        (
            "group_size = 1\n[rules]\nfilter_metric = 'acc'\non_singleton = 'evict'",
            "no run can be opened so: group_size is 1, and on_singleton",
        ),
    ],
    ids=["selection", "size"],
)
def test_settings_that_no_run_can_be_opened_with_are_no_failure_of_the_run(tmp_path, plan, words):
    (tmp_path / "plan.toml").write_text(plan)

    done = run("--plan", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"))

    assert done.exit_code == 2
    assert done.stderr.startswith("groupstate: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "FAILED" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_failure_is_told_although_its_files_can_not_be_written(tmp_path, monkeypatch):
    planted.credited_twice(monkeypatch)
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"

    done = run("--seed", "1", "--out", str(out))

    assert done.exit_code == 1
    assert f"{out / 'seed-1.plan.toml'} can't be written: Not a directory; it would be:\nseed = 1\n" in done.output


def test_hours_that_were_asked_for_are_in_the_command_that_repeats(tmp_path, monkeypatch):
    planted.credited_twice(monkeypatch)

    done = run("--seed", "1", "--hours", "0.0512345678", "--out", str(tmp_path))

    assert "again: groupstate simulate --seed 1 --hours 0.0512345678\n" in done.output


def test_a_plan_is_run_from_its_file(tmp_path):
    (tmp_path / "mine.toml").write_text(plan_text(Plan(hours=0.02)))

    done = run("--plan", str(tmp_path / "mine.toml"))

    assert done.exit_code == 0
    assert "seed 0: ok" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "x.toml", "--seed", "1"), "leave the others out"),
        (("--plan", "nowhere.toml"), "nowhere.toml"),
        (("--runs", "0"), "0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    done = run(*arguments)

    assert done.exit_code == 2
    assert words in done.output
