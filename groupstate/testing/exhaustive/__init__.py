"""Every history of a small world: all that a few groups and sessions can come to, with the shortest story of what is wrong."""

from groupstate.testing.exhaustive.search import Breach, Exploration, explore, shortest_story
from groupstate.testing.exhaustive.world import World

__all__ = ["Breach", "Exploration", "World", "explore", "shortest_story"]
