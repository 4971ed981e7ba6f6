"""groupstate itself, in every history of its small worlds: how many there are, and which cells each goes through."""

import json
import subprocess
import sys
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.testing.exhaustive import explore
from groupstate.testing.exhaustive.cells import CELLS, told, why_missed
from groupstate.testing.exhaustive.worlds import LARGER, WORLDS

pytestmark = pytest.mark.slow

SIZES = {
    "drop": (1176, 6099),
    "cancel": (254, 1289),
    "three_groups": (550, 2333),
    "three_sessions": (639, 3286),
    "wait": (469, 2315),
    "refill": (625, 2565),
    "zero_variance": (544, 2255),
    "slots": (284, 1578),
    "capacity": (530, 2270),
    "in_order": (139, 715),
    "sync": (453, 2348),
    "sync_refill": (301, 1380),
    "sync_keep_empty": (213, 984),
    "sync_filter": (475, 1206),
    "retries": (508, 2452),
    "cancelling": (168, 820),
    "doomed": (205, 978),
    "crash": (883, 3289),
    "crash_twice": (447, 2027),
    "rewind": (542, 2635),
    "validation": (388, 1887),
    "samplers": (148, 898),
}
"""States and transitions. They change with what can happen; look at what is new before changing a number."""


@pytest.fixture(scope="module")
def explored() -> dict[str, Any]:
    """All small worlds, gone through once, in a process of their own: where coverage is measured it would take three
    times as long."""
    command = [sys.executable, "-m", "groupstate", "explore", "--json"]
    out = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170)
    assert out.stderr == ""
    found = [json.loads(line) for line in out.stdout.splitlines()]
    return {one["world"]: one for one in found}


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_wrong_in_any_history_of_a_small_world(explored, name):
    assert explored[name]["complete"]
    assert explored[name]["breaches"] == []


@pytest.mark.parametrize("name", WORLDS)
def test_a_small_world_has_as_many_states_and_transitions_as_before(explored, name):
    assert (explored[name]["states"], explored[name]["transitions"]) == SIZES[name]


@pytest.mark.parametrize("name", WORLDS)
def test_each_cell_that_a_world_misses_has_a_reason(explored, name):
    assert [cell for cell, reason in explored[name]["missed"].items() if not reason] == []


@pytest.mark.parametrize("name", WORLDS)
def test_no_cell_that_a_world_goes_through_has_a_reason_to_be_missed(explored, name):
    missable = {told(cell): why for cell in CELLS if (why := why_missed(WORLDS[name], cell))}

    assert missable.keys() & explored[name]["reached"].keys() == set()


def test_every_cell_of_the_table_is_gone_through_by_some_world(explored):
    reached = {cell for found in explored.values() for cell in found["reached"]}

    assert [told(cell) for cell in CELLS if told(cell) not in reached] == []


@pytest.mark.parametrize("name", WORLDS)
def test_the_story_of_each_cell_can_be_told_again_in_the_notation(explored, name):
    for cell, lines in explored[name]["reached"].items():
        kind = cell.partition(": ")[2]

        assert WORLDS[name].told(*lines).events(getattr(ev, kind)), (cell, lines)


LARGER_SIZES = {
    "drop": (24030, 198468),
    "three_groups": (1043, 5520),
    "zero_variance": (4232, 26695),
    "sync": (5635, 38980),
    "sync_filter": (2000, 11675),
    "retries": (1238, 7694),
    "cancelling": (4595, 36618),
    "crash": (2290, 8360),
    "rewind": (10181, 65735),
    "validation": (1014, 5919),
}
"""The same of the larger worlds."""


@pytest.mark.long
@pytest.mark.parametrize("name", LARGER)
def test_nothing_is_wrong_in_any_history_of_a_larger_world(name):
    found = explore(LARGER[name])

    assert [str(breach) for breach in found.breaches] == []
    assert (found.states, found.transitions, found.complete) == (*LARGER_SIZES[name], True)


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_runs_that_are_taken_for_the_same_go_on_in_the_same_way(name):
    assert explore(WORLDS[name], check_keys=True).breaches == ()
