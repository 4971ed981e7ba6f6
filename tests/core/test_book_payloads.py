"""Payloads of a book's groups: which are released, and when."""

from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.testing.notation import play

from .scenes import done


class Watched:
    """A story whose released groups are written down before the ledger frees their payloads."""

    def __init__(self, *lines: str) -> None:
        self.story = play()
        self.released: list[list[str]] = []
        self.story.ledger.observers.append(self._look)
        self.tell(*lines)

    def _look(self, record: ev.Record) -> None:
        self.seen = [ref.key for ref in self.story.book.released]

    def tell(self, *lines: str) -> "Watched":
        for line in lines:
            self.seen: list[int] = []
            self.story.tell(line)
            self.released.append(self.seen)
        return self


def test_an_evicted_group_releases_its_payloads() -> None:
    watched = Watched("submit a/1 content=hello", "start a", "finish a reward=1 versions=1")
    refs = watched.story.group("a").payloads()
    watched.tell("evict a stale")

    assert len(refs) == 2
    assert watched.released[-1] == [ref.key for ref in refs]
    assert watched.story.log.payloads.keep_only(set()) == 0


def test_a_committed_group_releases_its_payloads_when_no_mark_is_kept() -> None:
    watched = Watched("submit a/1 content=hello", "submit b/1 content=you", "start a", "start b")
    watched.tell("finish a reward=1", "finish b reward=1", "sample 2", "commit 1")

    assert watched.released[-1] == [1, 2]


def test_a_sampled_or_returned_group_keeps_its_payloads() -> None:
    watched = Watched("submit a/1 content=hello", "start a", "finish a reward=1", "sample 1", "release 1", "sample 1")

    assert watched.released == [[]] * 6
    assert watched.story.log.payloads.keep_only(set()) == 1


def test_a_group_that_a_mark_could_bring_back_keeps_its_payloads_until_the_mark_is_pruned() -> None:
    watched = Watched("mark", "submit a/1 content=hello", *done("b"), "start a", "finish a reward=1")
    watched.tell("sample 1", "commit 1")
    with_first = list(watched.story.book.aside)
    watched.tell("mark", "sample 1", "commit 2", "mark")

    assert with_first == ["a"]
    assert watched.released[-1] == [1]
    assert list(watched.story.book.aside) == ["b"]


def test_a_requeue_releases_what_it_drops() -> None:
    story = play("submit a/2 content=hello", "start a", "finish a.0 reward=1 versions=1,1", "requeue a")

    assert story.group("a").requeue_count == 1
    assert story.log.payloads.keep_only({ref.key for ref in story.group("a").payloads()}) == 0


def test_a_batch_that_never_reached_its_sampler_gives_back_what_it_reported() -> None:
    story = play(
        *done("a"), "submit f/1", "start f", "fail f timeout", "evict f stale lag=3 credit=2",
        "submit r/1 cause=refill", "forfeit 1", "finish a.0 reward=1", "sample 1",
    )  # fmt: skip
    story.tell("submit g/2", "start g", "fail g.0 timeout", "fail g.0 timeout", "fail g.1", "evict g stale lag=5")
    story.record(ev.BatchReturned(1, "cancelled"))
    window = story.book.window("train")

    assert (window.submitted, window.refills, window.forfeited, window.fenced) == (4, 1, 1, 2)
    assert (window.evicted_groups, dict(window.evicted), window.stale_lags) == (2, {"stale": 2}, [3, 5])
    assert dict(window.sessions_failed) == {"timeout": 2, "error": 1}


def test_damage_gives_the_counts_back_and_a_release_does_not() -> None:
    stories = [play(*done("a"), "sample 1") for _ in range(3)]
    for story, reason in zip(stories, ("damaged", "released", "recovery"), strict=True):
        story.record(ev.BatchReturned(1, reason))

    assert [story.book.window("train").submitted for story in stories] == [1, 0, 0]


def test_a_replay_notes_no_payloads_that_nobody_asked_for() -> None:
    story = play()
    story.record(ev.GroupSubmitted("g", 1, "train", 0, 1, "submit", prompt=ev.PayloadRef(1, 2, 3)))
    story.tell("start g", "fail g", "evict g failed")
    book = replayed(story.log.read())

    assert (book.released, book.notes_released) == ([], True)
