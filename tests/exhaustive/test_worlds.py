"""groupstate itself, in every history of its small worlds: how many there are, and which cells each goes through."""

import pytest

from groupstate.testing.exhaustive import Exploration, explore
from groupstate.testing.exhaustive.cells import CELLS, told, why_missed
from groupstate.testing.exhaustive.worlds import LARGER, WORLDS

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
def explored() -> dict[str, Exploration]:
    """All small worlds, gone through once."""
    return {name: explore(world) for name, world in WORLDS.items()}


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_wrong_in_any_history_of_a_small_world(explored, name):
    assert [str(breach) for breach in explored[name].breaches] == []


@pytest.mark.parametrize("name", WORLDS)
def test_a_small_world_has_as_many_states_and_transitions_as_before(explored, name):
    found = explored[name]

    assert (found.states, found.transitions) == SIZES[name]


@pytest.mark.parametrize("name", WORLDS)
def test_each_cell_that_a_world_misses_has_a_reason(explored, name):
    assert [told(cell) for cell, reason in explored[name].missed.items() if not reason] == []


@pytest.mark.parametrize("name", WORLDS)
def test_no_cell_that_a_world_goes_through_has_a_reason_to_be_missed(explored, name):
    found = explored[name]

    assert {told(cell): why for cell in found.cells if (why := why_missed(found.world, cell))} == {}


def test_every_cell_of_the_table_is_gone_through_by_some_world(explored):
    reached = {cell for found in explored.values() for cell in found.cells}

    assert [told(cell) for cell in CELLS if cell not in reached] == []


@pytest.mark.parametrize("name", WORLDS)
def test_the_story_of_each_cell_can_be_told_again_in_the_notation(explored, name):
    found = explored[name]
    for (phase, kind), lines in found.cells.items():
        story = found.world.told(*lines)

        assert isinstance(story.events(kind)[-1], kind), (phase, lines)


LARGER_SIZES: dict[str, tuple[int, int]] = {}


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
