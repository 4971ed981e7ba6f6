"""What a search found, for people to read."""

from collections.abc import Iterable, Iterator
from typing import Any

from groupstate.testing.exhaustive.cells import CELLS, told
from groupstate.testing.exhaustive.search import Exploration

UNEXPLAINED = "nothing in the world stands against it"


def lines_of(name: str, found: Exploration) -> Iterator[str]:
    """One world: its size, the cells that it misses and why, and what is wrong by the shortest story."""
    end = "" if found.complete else ", NOT COMPLETE"
    yield f"{name}: {found.states} states, {found.transitions} transitions, {found.depth} deep{end}"
    yield f"  cells of the table reached: {len(found.cells)} of {len(CELLS)}"
    for cell, why in found.missed.items():
        yield f"    not {told(cell)}: {why or UNEXPLAINED}"
    if not found.breaches:
        yield "  every invariant holds in every state"
    for breach in found.breaches:
        yield f"  WRONG, {breach.rule}: {breach.text}"
        yield f"    after {len(breach.story)} steps: " + ", ".join(breach.story)


def as_object(name: str, found: Exploration) -> dict[str, Any]:
    """The same as plain values, with the shortest story of each cell."""
    return {
        "world": name,
        "states": found.states,
        "transitions": found.transitions,
        "depth": found.depth,
        "complete": found.complete,
        "reached": {told(cell): list(story) for cell, story in found.cells.items()},
        "missed": {told(cell): why for cell, why in found.missed.items()},
        "outcomes": dict(sorted(found.outcomes.items())),
        "breaches": [{"rule": one.rule, "text": one.text, "story": list(one.story)} for one in found.breaches],
    }


def summary(found: Iterable[Exploration]) -> Iterator[str]:
    """All worlds together."""
    every = list(found)
    reached = {cell for one in every for cell in one.cells}
    missed = [told(cell) for cell in CELLS if cell not in reached]
    states, transitions = sum(one.states for one in every), sum(one.transitions for one in every)
    wrong = sum(bool(one.breaches) for one in every)
    yield f"{len(every)} worlds: {states} states, {transitions} transitions, {wrong} of them with something wrong"
    yield f"cells of the table that none of them reaches: {', '.join(missed) or 'none'}"
