"""`groupstate explore`, as somebody calls it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from groupstate.cli import main
from groupstate.core.evict import credit_of
from groupstate.testing.exhaustive.worlds import LARGER, WORLDS


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["explore", *args])


def test_it_tells_how_many_states_and_transitions_there_are_and_which_cells_are_missed():
    result = run("in_order")

    assert result.exit_code == 0
    assert "in_order: 139 states, 715 transitions" in result.output
    assert (
        "    not pending: GroupRequeued: only the user starts a pending group over (at_most: requeue)" in result.output
    )
    assert "  every invariant holds in every state" in result.output


def test_what_is_wrong_is_told_by_its_shortest_story_and_exits_with_1(monkeypatch):
    monkeypatch.setattr("groupstate.core.evict.credit_of", lambda *args, **options: 2 * credit_of(*args, **options))

    result = run("samplers")

    assert result.exit_code == 1
    assert "  WRONG, invariant 5: " in result.output
    assert "    after 2 steps: submit g1/1, fail g1.0 error" in result.output


def test_rules_can_be_changed():
    result = run("samplers", "--json", "--set", "requeues_max=1")

    assert "requeued by the rules" in json.loads(result.output)["outcomes"]


def test_a_selection_of_ones_own_is_loaded(tmp_path: Path):
    rule = tmp_path / "mine.py"
    rule.write_text("def nothing(book, rules, request):\n    return []\n", encoding="utf-8")

    result = run("samplers", "--json", "--selection", f"{rule}:nothing")

    assert "sampled: BatchCommitted" not in json.loads(result.output)["reached"]


def test_a_search_that_gives_up_exits_with_1():
    result = run("drop", "--states-max", "5")

    assert result.exit_code == 1
    assert "NOT COMPLETE" in result.output


@pytest.mark.parametrize(("flags", "worlds"), [([], WORLDS), (["--larger"], LARGER)])
def test_the_worlds_are_listed(flags, worlds):
    assert run("--list", *flags).output.split() == list(worlds)


def test_an_unknown_world_is_refused_with_those_that_there_are():
    result = run("dorp")

    assert result.exit_code == 2
    assert "there is no world 'dorp'; worlds are drop, cancel, " in result.output
