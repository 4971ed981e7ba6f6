"""Every history of a small world, and the shortest story of whatever is wrong.

`explore(world)` goes through all states that a few groups and sessions can come to. It needs no test library, and is
part of the kit because its histories are lines of the notation, which a test can tell again.
"""

from groupstate.testing.exhaustive.search import Breach, Exploration, explore, shortest_story
from groupstate.testing.exhaustive.world import World

__all__ = ["Breach", "Exploration", "World", "explore", "shortest_story"]
