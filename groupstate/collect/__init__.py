"""`groupstate run`: prompts in, accepted groups out, without a loop of one's own."""

from groupstate.collect.collecting import Collected, Progress, collect

__all__ = ["Collected", "Progress", "collect"]
