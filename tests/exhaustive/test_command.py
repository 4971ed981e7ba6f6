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


# A selection of one's own ----------------------------------------------------------------------------

RULES = """
from groupstate import Drop, Select

def oldest(book, rules, request):
    ready = [group.group_id for group in book.ready()]
    return [Select(ready[: request.size])] if len(ready) >= request.size else []

def never(book, rules, request):
    return []

def boom(book, rules, request):
    raise RuntimeError("boom")

def clears(book, rules, request):
    book.groups.clear()
    return []

async def awaits(book, rules, request):
    return []
"""


@pytest.fixture
def my_rules(tmp_path: Path) -> str:
    (tmp_path / "my_rules.py").write_text(RULES, encoding="utf-8")
    return str(tmp_path / "my_rules.py")


BY_SETTING = ["--set", "selection={}:{}"]
BY_OPTION = ["--selection", "{}:{}"]


@pytest.fixture(params=[BY_SETTING, BY_OPTION], ids=["set", "option"])
def named(request, my_rules: str):
    """The arguments that name a rule, either way."""
    return lambda rule: [word.format(my_rules, rule) for word in request.param]


def test_a_rule_that_is_named_is_asked(named, caplog: pytest.LogCaptureFixture):
    result = run("samplers", *named("boom"))

    assert result.exit_code == 1
    assert "boom' raised RuntimeError: boom" in result.stdout
    assert not caplog.records, "what the rule did wrong is in the result"


def test_a_rule_that_serves_whoever_waits_passes(named):
    result = run("samplers", "refill", *named("oldest"))

    assert result.exit_code == 0
    assert "finished: BatchSampled" not in result.output.split("\n2 worlds")[0]


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("neverr", "my_rules.py has no 'neverr'; did you mean 'never'?"),
        ("awaits", "it must be a plain function rule(book, rules, request)"),
    ],
)
def test_a_rule_that_can_t_be_asked_is_refused(named, rule, what):
    result = run("samplers", *named(rule))

    assert result.exit_code == 2
    assert what in result.stderr
    assert result.stdout == ""


def test_two_rules_at_once_are_refused(my_rules: str):
    result = run("samplers", "--set", f"selection={my_rules}:oldest", "--selection", f"{my_rules}:never")

    assert result.exit_code == 2
    assert "--selection and --set selection=... both say which groups a batch gets" in result.stderr


@pytest.mark.parametrize(
    ("world", "no_more"),
    [("refill", "no prompt is drawn while there are so many"), ("samplers", "no more are submitted")],
)
def test_a_rule_that_lets_a_sampler_wait_for_ever_is_found(named, world, no_more):
    result = run(world, *named("never"))

    assert result.exit_code == 1
    assert "WRONG, for ever: the rule " in result.stdout
    assert f"lets a sample of 1 wait for ever: sampleable are g1, nothing is in flight, and {no_more}" in result.stdout
    assert run(world, *named("never"), "--patient").exit_code == 0


def test_a_rule_that_changes_the_book_is_told_of_as_such(named):
    result = run("samplers", *named("clears"))

    assert result.exit_code == 1
    assert "changed the book; a rule only looks at it" in result.stdout
    assert "KeyError" not in result.stdout


def test_a_world_that_can_t_have_the_rules_is_left_out_unless_it_is_asked_for(monkeypatch, named):
    monkeypatch.setattr("groupstate.testing.exhaustive.worlds.WORLDS", {n: WORLDS[n] for n in ("in_order", "samplers")})

    every, one = run(*named("oldest")), run("in_order", *named("oldest"))

    assert every.exit_code == 0
    assert "in_order is left out: rules: selection 'exact_version' and basis" in every.stderr
    assert "1 worlds: " in every.stdout
    assert one.exit_code == 2
    assert "world 'in_order' can't be gone through so: rules: selection" in one.stderr


def test_settings_that_no_world_can_have_are_refused_by_the_first():
    result = run("--set", "lag_maxx=1")

    assert result.exit_code == 2
    assert result.stderr.count("lag_maxx") == 1
