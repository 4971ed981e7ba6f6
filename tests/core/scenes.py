"""Small helpers of the rules' tests: stories driven without the controller."""

from groupstate.core.rules import Rules
from groupstate.testing.notation import Story, play

SYNC = Rules(mode="sync", batch_size=4, filter_metric="acc")


def sync_story(*lines: str, flat: int = 0, good: int = 0, running: int = 0) -> Story:
    """Groups of a run in sync mode, driven without the controller."""
    story = play()
    for name, count in (("flat", flat), ("good", good), ("run", running)):
        for number in range(count):
            story.tell(f"submit {name}{number}/2", f"start {name}{number}")
            if name == "flat":
                story.tell(f"finish {name}{number} acc=1")
            if name == "good":
                story.tell(f"finish {name}{number}.0 acc=0", f"finish {name}{number}.1 acc=1")
    return story.tell(*lines)


def owing(story: Story, credit: int) -> Story:
    """The same story with so much credit outstanding."""
    story.tell("submit gone/1", "start gone", "fail gone", f"evict gone failed credit={credit}")
    return story
