"""Small helpers of the core's tests: stories driven without the controller."""

from groupstate.core.book import Book
from groupstate.core.phases import Phase
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


def done(*names: str, stamp: int = 0, size: int = 1) -> list[str]:
    """Lines that bring groups to `finished`, in this order."""
    return [
        line
        for name in names
        for line in (f"submit {name}/{size} stamp={stamp}", f"start {name}", f"finish {name} reward=1")
    ]


def conserved(book: Book) -> bool:
    live = book.count(Phase.PENDING, Phase.RUNNING, Phase.FINISHED, Phase.FAILURE, Phase.SAMPLED)
    return book.totals["submitted"] == live + book.totals["evicted"] + book.totals["committed"]
