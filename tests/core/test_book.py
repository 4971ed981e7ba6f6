"""The book: what it answers after each event, what it refuses, and that it never counts anything twice."""

import itertools
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from groupstate.core import book_changes
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.held import MARKS_KEPT, MARKS_REMEMBERED, Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import Phase
from groupstate.core.rules import RULES_VERSION, Rules
from groupstate.core.shelf import Shelf
from groupstate.errors import BadMark, DuplicateGroup, IllegalTransition, LogError, UnknownBatch, UnknownGroup
from groupstate.testing.notation import START_NS, Story, play
from groupstate.version import VERSION


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


# Looking ---------------------------------------------------------------------------------------------


def test_a_new_book_is_empty() -> None:
    book = Book()

    assert (book.last_seq, book.weight_version, book.lineage, book.run_id) == (0, 0, 1, "")
    assert (book.ready_count(), book.in_flight_count(), list(book.in_flight_by_age())) == (0, 0, [])
    assert (book.waiting(), book.partitions(), list(book.ready())) == ([], [], [])
    assert book.state()["run"] == ["", 0, 0, "", {}, 1, 0, 1, 0, 0, 0, 0, 0, {}, False, None, "", False]
    assert (book.last_at_ns, book.mark_seqs.maxlen) == (0, MARKS_REMEMBERED)


def test_a_run_begins_with_its_rules_and_its_version() -> None:
    story = play(weight_version=5)

    assert (story.book.run_id, story.book.weight_version, story.book.lineage) == ("story", 5, 1)
    assert story.book.rules == Rules().to_dict()


def test_a_group_in_flight_that_counts_from_another_version_comes_to_another_place() -> None:
    book = play("submit a/1 stamp=3", "submit b/1 stamp=5", weight_version=5).book
    shelf = Shelf()
    for group_id in ("a", "b"):
        shelf.add(book.group(group_id))
    shelf.move(book.group("a"), msgspec.structs.replace(book.group("a"), phase=Phase.RUNNING, aged_from=9))

    assert [list(group_ids) for _, group_ids in shelf.in_flight.by_class()] == [["b", "a"]]
    assert list(shelf.phases[Phase.RUNNING]) == ["a"]


def test_an_observer_is_told_how_the_group_of_an_event_was_before_it() -> None:
    story = Story()
    seen: list[tuple[str, str, int]] = []

    def note(record: ev.Record) -> None:
        group = story.book.before(record.event)  # type: ignore[arg-type]
        if group is not None:
            seen.append((type(record.event).__name__, str(group.phase), group.settled_count))

    assert Book().before(ev.GroupFinished("a")) is None
    story.ledger.observers.append(note)
    story.tell("submit a/2", "start a.0", "fail a.0", "fail a.1", "requeue a", "submit b/1")

    assert seen == [
        ("SessionStarted", "pending", 0),
        ("SessionFailed", "running", 0),
        ("SessionFailed", "running", 1),
        ("GroupFailed", "running", 2),
        ("GroupRequeued", "failure", 2),
    ]
    assert story.book.before(ev.GroupFinished("b")) is None


def test_counts_are_by_phase_and_partition() -> None:
    story = play("submit a/1", "submit b/1", "submit v/1 partition=val", "start b")
    book = story.book

    assert book.count(Phase.PENDING) == 2
    assert book.count(Phase.PENDING, Phase.RUNNING) == 3
    assert book.count(Phase.PENDING, partition="train") == 1
    assert book.count(Phase.RUNNING, partition="val") == 0
    assert book.count(Phase.PENDING, Phase.RUNNING, partition="train") == 2
    assert book.count(Phase.PENDING, Phase.RUNNING, partition="val") == 1
    assert book.count(Phase.PENDING, partition="test") == book.count(*Phase, partition="test") == 0
    assert book.in_flight_count() == 2
    assert book.in_flight_count("val") == 1
    assert book.partitions() == ["train", "val"]


def test_groups_of_a_phase_come_in_the_order_in_which_they_came_to_it() -> None:
    story = play("submit a/1", "submit b/1", "submit c/1 partition=val", "start c", "start b", "start a")

    assert [group.group_id for group in story.book.in_phase(Phase.RUNNING, "train")] == ["b", "a"]
    assert sorted(group.group_id for group in story.book.in_phase(Phase.RUNNING)) == ["a", "b", "c"]


def test_an_unknown_group_was_never_submitted() -> None:
    with pytest.raises(UnknownGroup) as refused:
        play().book.group("ghost", "requeue")

    assert str(refused.value) == "cannot requeue: group 'ghost' is not in the book; it was never submitted"
    assert refused.value.group_id == "ghost"
    assert refused.value.tried == "requeue"


def test_a_free_id_is_not_taken() -> None:
    story = play(*done("a", "b", "c"), "evict a stale", "sample 1", "commit 1")
    book = story.book

    assert book.is_taken("new") is None
    assert book.is_taken("a") == "it was evicted and has left the book"
    assert book.is_taken("b") == "it was committed and has left the book"
    assert book.is_taken("c") == "it is finished"


def test_a_window_of_a_partition_nothing_happened_in_is_empty() -> None:
    assert play().book.window("val") == Window()


def test_looking_changes_nothing() -> None:
    book = play("publish 1").book
    before = book.digest()
    book.window("train")
    book.ready_count("val")
    book.count(Phase.PENDING, partition="test")

    assert book.digest() == before


# Submission ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (["submit g/1"], "it is pending"),
        (done("g"), "it is finished"),
        ([*done("g"), "sample 1"], "it is sampled"),
        ([*done("g"), "evict g stale"], "it was evicted and has left the book"),
        ([*done("g"), "sample 1", "commit 1"], "it was committed and has left the book"),
        (["mark", *done("g"), "sample 1", "commit 1"], "it was committed and has left the book"),
    ],
    ids=["pending", "finished", "sampled", "evicted", "committed", "aside"],
)
def test_an_id_is_used_once_in_a_run_even_after_its_group_left(lines: list[str], where: str) -> None:
    story = play(*lines)
    before = story.book.digest()
    with pytest.raises(DuplicateGroup) as refused:
        story.tell("submit g/1")

    assert str(refused.value).startswith(f"group id 'g' is taken: {where};")
    assert refused.value.group_id == "g"
    assert story.book.digest() == before


def test_ids_are_opaque() -> None:
    names = ["math", "math_1", "math_1_0", "a/b", "a:b", "é中🙂", "0"]
    story = play(*done(*names), "evict math stale")

    assert story.ready() == names[1:]


def test_the_oldest_departed_ids_are_forgotten_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 2)
    story = play(*done("a", "b", "c"), "evict a stale", "evict b stale", "evict c stale")

    assert list(story.book.departed) == ["b", "c"]
    assert story.book.is_taken("a") is None


def test_a_group_that_came_back_is_forgotten_in_the_order_in_which_it_leaves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 2)
    story = play(*done("a", "b", "c", "d"), "evict a stale", "mark", "sample 1", "commit 1", "evict c stale")
    assert list(story.book.departed) == ["b", "c"]
    story.tell("recover at=1", "evict d stale", "evict b stale")

    assert list(story.book.departed) == ["d", "b"]


def test_forgetting_a_departed_id_costs_the_same_however_many_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 50_000)
    book = Book()
    names = iter(range(100_000))

    def depart(count: int) -> float:
        begin = time.thread_time()
        for name in itertools.islice(names, count):
            book_changes.depart(book, f"g{name}", Phase.COMMITTED)
        return time.thread_time() - begin

    depart(50_000)
    early = min(depart(100) for _ in range(5))
    depart(34_000)
    late = min(depart(100) for _ in range(5))

    assert late < 5 * early


def test_a_refill_needs_credit() -> None:
    with pytest.raises(AssertionError, match="a refill without credit"):
        play("submit g/1 cause=refill")


def test_the_source_goes_on_behind_the_furthest_prompt() -> None:
    story = play("submit a/1 position=4", "submit b/1 position=2", "submit c/1")

    assert story.book.source_position == 5


# Credit ----------------------------------------------------------------------------------------------


def test_credit_is_earned_spent_first_in_first_out_and_forfeited_from_the_end() -> None:
    story = play(
        "submit a/3 dataset=math", "submit b/2 dataset=code", "start a", "start b", "fail a", "fail b",
        "evict a empty credit=2", "evict b empty credit=1",
    )  # fmt: skip
    earned = list(story.book.credits)
    story.tell("submit r1/3 cause=refill", "forfeit 1")

    assert earned == [Credit(3, "math", "a"), Credit(3, "math", "a"), Credit(2, "code", "b")]
    assert list(story.book.credits) == [Credit(3, "math", "a")]
    assert (story.book.totals["credit"], story.book.totals["refills"], story.book.totals["forfeited"]) == (3, 1, 1)
    assert (story.book.window("train").refills, story.book.window("train").forfeited) == (1, 1)


def test_more_can_be_forfeited_than_is_owed_and_only_what_was_owed_is_taken_off() -> None:
    story = play("submit a/1", "start a", "fail a", "evict a empty credit=1", "forfeit 3")

    assert not story.book.credits
    assert story.book.totals["forfeited"] == 1
    assert story.book.window("train").forfeited == 3


def test_nothing_is_no_forfeit() -> None:
    with pytest.raises(AssertionError):
        play("forfeit 0")


# Counts ----------------------------------------------------------------------------------------------


def test_data_sets_count_what_became_of_their_groups() -> None:
    story = play(
        "submit a/1 dataset=math", "submit b/1 dataset=math", "submit c/1", "start a", "start b", "finish a reward=1",
        "finish b reward=1", "evict b stale", "sample 1", "commit 1",
    )  # fmt: skip

    assert story.book.datasets == {
        "math": {"submitted": 2, "evicted": 1, "sampled": 1, "committed": 1},
        "": {"submitted": 1},
    }


def test_a_window_counts_until_a_batch_of_its_partition_is_sampled() -> None:
    story = play(
        "submit v/1 partition=val", *done("a", "b"), "submit f/2", "start f", "fail f.0 timeout", "fail f.0 timeout",
        "fail f.1", "evict f empty,stale lag=4 credit=1", "submit r/2 cause=refill", "start r",
        "sample 1 partition=val",
    )  # fmt: skip
    before = story.book.window("train")
    counts = (before.submitted, before.refills, before.fenced, before.evicted_groups, before.stale_lags)
    by_name = dict(before.evicted), dict(before.sessions_failed)
    story.tell("sample 1")

    assert counts == (4, 1, 1, 1, [4])
    assert by_name == ({"empty": 1, "stale": 1}, {"timeout": 1, "error": 1})
    assert story.book.window("train") == Window()
    assert story.book.window("val").submitted == 1


def test_a_fenced_result_counts_in_the_partition_of_its_group_and_for_none_that_left() -> None:
    story = play(
        *done("a", "b"), "submit v/1 partition=val", "start v", "finish v reward=1", "finish v.0 reward=1",
        "evict b stale", "finish b.0 reward=1",
    )  # fmt: skip

    assert (story.book.window("val").fenced, story.book.window("train").fenced) == (1, 0)
    assert story.book.totals["fenced"] == 2


def test_totals_count_the_whole_run() -> None:
    story = play(
        *done("a", "b", "c"), "submit f/1", "start f", "fail f timeout", "evict f empty", "sample 2", "release 1",
        "sample 2", "commit 2", "finish a.0 reward=1",
    )  # fmt: skip

    expected = {
        "submitted": 4,
        "session_failed/timeout": 1,
        "evicted": 1,
        "evicted/empty": 1,
        "credit": 0,
        "batches": 2,
        "batches_returned": 1,
        "batches_committed": 1,
        "committed": 2,
        "fenced": 1,
    }

    assert {name: story.book.totals[name] for name in expected} == expected
    assert conserved(story.book)


# Batches ---------------------------------------------------------------------------------------------


def test_a_request_waits_in_its_partition_in_order_of_arrival() -> None:
    story = play("wait 3", "sample 2", "sample 1 partition=val", "sample 3")

    assert story.book.waiting() == [
        OpenRequest(1, "train", 2, 0, 2, START_NS + 3_000_000_000),
        OpenRequest(3, "train", 3, 0, 4, START_NS + 3_000_000_000),
    ]
    assert [request.request for request in story.book.waiting("val")] == [2]


def test_a_withdrawn_request_waits_no_more() -> None:
    story = play("sample 2", "sample 3", "withdraw 1")

    assert [request.request for request in story.book.waiting()] == [2]


def test_a_request_is_numbered_without_gaps() -> None:
    story = play()
    with pytest.raises(AssertionError):
        story.book.apply(ev.Record(2, 0, ev.BatchRequested(5, "train", 1, 0)))

    assert story.book.requests == {}


@pytest.mark.parametrize(
    "event",
    [
        ev.BatchRequestCancelled(7),
        ev.BatchRequested(7, "train", 1, 0),
        ev.BatchSampled(1, 1, "train", ("a",), 0, ()),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_the_book_can_not_apply_is_not_posted(event: ev.AnyEvent) -> None:
    story = play(*done("a"), "sample 2")
    kept = story.log.last_seq
    with pytest.raises((AssertionError, LogError, KeyError, ValueError)):
        story.record(event)

    assert story.log.last_seq == kept == story.book.last_seq


def test_a_sampled_batch_is_with_the_trainer() -> None:
    story = play(*done("a", "b", "c"), "publish 2", "sample 2")

    assert story.book.batches == {1: OpenBatch(1, "train", ("a", "b"), (2, 2), 2, story.book.last_seq)}
    assert (story.group("a").batch, story.group("a").sampled_lag) == (1, 2)
    assert story.book.requests == {}
    assert story.ready() == ["c"]


def sampled_event(story: Story, **changes: Any) -> ev.BatchSampled:
    fields = {"batch": 1, "request": 1, "partition": "train", "group_ids": ("a",), "weight_version": 0, "lags": (0,)}
    return ev.BatchSampled(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"request": 9},
        {"batch": 2},
        {"group_ids": ("a", "a"), "lags": (0, 0)},
        {"group_ids": ("bare",)},
        {"group_ids": ("v",)},
        {"group_ids": ("v",), "partition": "test"},
    ],
    ids=["no request", "wrong number", "twice", "no rows", "another partition", "and another"],
)
def test_a_batch_that_can_not_be_is_our_own_fault_and_changes_nothing(changes: dict[str, Any]) -> None:
    story = play(
        *done("a"), "submit bare/1", "start bare", "fail bare", "submit v/1 partition=val", "start v",
        "finish v reward=1", "sample 5",
    )  # fmt: skip
    before, kept = story.book.digest(), story.log.last_seq
    with pytest.raises(AssertionError):
        story.record(sampled_event(story, **changes))

    assert (story.book.digest(), story.log.last_seq) == (before, kept)


@pytest.mark.parametrize("verb", ["commit", "release"])
@pytest.mark.parametrize(
    ("lines", "batch", "state"),
    [
        ([], 1, "was never sampled"),
        (["sample 1", "commit 1"], 1, "was committed or returned already"),
        (["sample 1", "release 1"], 1, "was committed or returned already"),
        (["sample 1", "commit 1"], 2, "was never sampled"),
    ],
)
def test_a_batch_that_is_not_out_can_not_be_ended(verb: str, lines: list[str], batch: int, state: str) -> None:
    story = play(*done("a"), *lines)
    before, kept = story.book.digest(), story.log.last_seq
    with pytest.raises(UnknownBatch) as refused:
        story.tell(f"{verb} {batch}")

    tried = {"commit": "commit", "release": "return"}[verb]
    assert str(refused.value) == f"cannot {tried} batch {batch}: it {state}"
    assert refused.value.batch == batch
    assert (story.book.digest(), story.log.last_seq) == (before, kept)


def test_a_training_group_without_rows_is_not_sampleable_and_a_validation_group_is() -> None:
    story = play(
        "submit a/1", "submit v/1 partition=val", "start a", "start v", "fail a", "fail v",
        "submit x/1 partition=val", "start x", "finish x reward=1",
    )  # fmt: skip

    assert (story.ready(), story.book.ready_count()) == ([], 0)
    assert (story.ready("val"), story.book.ready_count("val")) == (["v", "x"], 2)


def test_a_failed_group_with_rows_is_sampleable() -> None:
    story = play("submit a/2", "start a", "finish a.0 reward=1", "fail a.1")

    assert story.ready() == ["a"]


def test_grouping_is_by_id_and_not_by_position() -> None:
    story = play("submit a/3", "submit b/3", "start a", "start b")
    seen = []
    for end in ("a.0", "b.0", "a.1", "b.1", "b.2", "a.2"):
        story.tell(f"finish {end} reward=1")
        seen.append(story.ready())

    assert seen == [[], [], [], [], ["b"], ["a", "b"]]


def test_batches_come_back_with_the_lag_that_they_were_sampled_with() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 9", "release 1")

    assert story.book.lag(story.group("a")) == 2
    assert (story.group("a").batch, story.group("a").sampled_lag, story.group("a").stamp) == (0, 0, 0)


def test_a_returned_group_ages_no_more_and_is_not_evicted_as_stale() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 9", "release 1", "publish 99", rules=Rules(lag_max=2))

    assert story.book.lag(story.group("a")) == 2
    assert story.evicted() == {}


def test_a_requeued_group_keeps_no_lag() -> None:
    story = play(
        "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "publish 2", "sample 1", "publish 9", "release 1"
    )
    kept = story.book.lag(story.group("a"))
    story.tell("requeue a")

    assert (kept, story.book.lag(story.group("a"))) == (2, 9)


def test_a_group_newer_than_the_trainer_comes_back_with_lag_zero() -> None:
    story = play("submit a/1 stamp=5", "start a", "finish a reward=1", "sample 1", "release 1", "publish 7")

    assert story.book.lag(story.group("a")) == 0


def test_a_returned_group_takes_its_old_place_in_the_order() -> None:
    story = play(*done("a"), "publish 2", *done("b", stamp=2), "sample 1", "publish 4", "release 1")

    assert story.ready() == ["a", "b"]


def test_only_groups_whose_lag_grows_are_in_the_order_of_age() -> None:
    story = play(
        *done("a"), "publish 2", *done("c", stamp=2), *done("b", stamp=1), "sample 1", "publish 4", "release 1"
    )

    assert story.ready() == ["a", "b", "c"]
    assert [[group.group_id for group in groups] for groups in story.book.by_age()] == [["b", "c"]]


def test_a_batch_of_a_recovered_run_comes_back_with_its_lag() -> None:
    story = play(*done("a"), "publish 2", "sample 1", "publish 3", "recover version=9", rules=Rules(lag_max=2))

    assert story.book.lag(story.group("a")) == 2
    assert story.ready() == ["a"]


def test_a_batch_keeps_its_lag_when_the_trainer_goes_on_from_an_older_version() -> None:
    story = play(*done("a", stamp=3), "publish 5", "sample 1", "recover version=3")

    assert story.book.lag(story.group("a")) == 2


def test_committed_groups_leave_and_their_batch_with_them() -> None:
    story = play(*done("a", "b"), "sample 2", "commit 1")

    assert (story.book.groups, story.book.batches, story.book.aside) == ({}, {}, {})
    assert story.book.departed == {"a": Phase.COMMITTED, "b": Phase.COMMITTED}
    assert conserved(story.book)


# Payloads --------------------------------------------------------------------------------------------


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


# Marks and going back ---------------------------------------------------------------------------------


def test_the_last_two_marks_are_kept() -> None:
    story = play("mark first", "publish 1", "mark second", "publish 2", "mark third")

    assert MARKS_KEPT == 2
    assert story.book.marks == [Mark(2, 4, 1, 1, "second"), Mark(3, 6, 2, 1, "third")]
    assert story.book.last_mark == 3


def test_without_a_mark_nothing_is_kept_aside() -> None:
    story = play(*done("a"), "sample 1", "commit 1", "mark")

    assert story.book.aside == {}


def test_going_back_undoes_the_commits_after_the_mark_and_no_others() -> None:
    story = play(*done("a", "b", "c"), "mark", "sample 1", "commit 1", "mark", "sample 1", "commit 2", "recover at=2")

    assert story.phase("a") == "committed"
    assert story.ready() == ["b", "c"]
    assert list(story.book.aside) == ["a"]
    assert story.book.totals["committed"] == 1
    assert story.book.datasets[""]["committed"] == 1
    assert conserved(story.book)


def test_going_back_to_the_older_mark_forgets_the_younger_one() -> None:
    story = play(*done("a", "b", "c"), "mark", "sample 1", "commit 1", "mark", "sample 1", "commit 2", "recover at=1")

    assert story.ready() == ["a", "b", "c"]
    assert [mark.mark for mark in story.book.marks] == [1]
    assert conserved(story.book)


def test_a_commit_that_came_back_has_left_nowhere() -> None:
    story = play("mark", *done("a"), "submit v/1 partition=val", "start v", "finish v reward=1", "sample 1", "commit 1")
    story.tell("sample 1 partition=val", "commit 2")
    before = {name: story.book.totals[name] for name in ("committed", "committed/train", "committed/val")}
    story.tell("recover at=1")

    assert before == {"committed": 2, "committed/train": 1, "committed/val": 1}
    assert {name: story.book.totals[name] for name in before} == dict.fromkeys(before, 0)
    assert (story.book.departed, story.book.aside) == ({}, {})
    assert story.book.is_taken("a") == "it is finished"


def test_a_commit_comes_back_once() -> None:
    story = play("mark", *done("a", "b"), "sample 1", "commit 1", "recover at=1")
    story.tell("sample 1", "commit 2", "mark", "recover at=2")

    assert story.phase("a") == "committed"
    assert story.ready() == ["b"]
    assert story.batches() == [("a",), ("a",)]


def test_a_commit_that_came_back_can_come_back_again_after_a_second_commit() -> None:
    story = play("mark", *done("a"), "sample 1", "commit 1", "recover at=1", "sample 1", "commit 2", "recover at=1")

    assert story.ready() == ["a"]
    assert conserved(story.book)


def test_an_eviction_after_the_mark_is_not_undone() -> None:
    story = play("mark", *done("a"), "evict a stale", "recover at=1")

    assert story.phase("a") == "evicted"
    assert story.ready() == []


def test_an_uncommitted_batch_comes_back_before_the_run_goes_back() -> None:
    story = play(*done("a"), "mark", "sample 1", "recover at=1")

    assert story.ready() == ["a"]
    assert story.events(ev.BatchReturned) == [ev.BatchReturned(1, "recovery")]


def test_a_new_lineage_begins_with_the_version_of_the_mark() -> None:
    story = play("publish 3", "mark", "publish 7", "recover at=1")

    assert (story.book.weight_version, story.book.lineage) == (3, 2)


def test_work_of_the_abandoned_line_counts_its_lag_from_the_mark() -> None:
    story = play("publish 3", "mark", "publish 7", *done("new", stamp=7), "submit old/1 stamp=2", "recover at=1")
    story.tell("publish 5")

    assert story.book.lag(story.group("new")) == 2
    assert story.book.lag(story.group("old")) == 3


def test_running_work_of_the_abandoned_line_counts_its_lag_from_the_mark_too() -> None:
    story = play("publish 3", "mark", "publish 7", "submit new/1", "start new", "recover at=1", "publish 5")

    assert story.book.lag(story.group("new")) == 2


def test_a_commit_that_is_undone_keeps_the_lag_that_it_was_sampled_with() -> None:
    story = play(
        "publish 3", "mark", "publish 7", *done("new", stamp=7), *done("old", stamp=2), "sample 2", "commit 1",
        "recover at=1",
    )  # fmt: skip
    story.tell("publish 4")

    assert story.book.lag(story.group("new")) == 0
    assert story.book.lag(story.group("old")) == 5


@pytest.mark.parametrize(
    ("lines", "kept"),
    [([], "none"), (["mark", "mark", "mark"], "2 (event 3), 3 (event 4)")],
    ids=["none", "pruned"],
)
def test_a_mark_that_is_not_kept_can_not_be_gone_back_to(lines: list[str], kept: str) -> None:
    story = play(*lines)
    before, posted = story.book.digest(), story.log.last_seq
    with pytest.raises(BadMark) as refused:
        story.record(ev.RunRewound(1, 2, 0, 2))

    assert str(refused.value) == f"mark 1 at event 2 can't be gone back to; marks that are kept: {kept}"
    assert (story.book.digest(), story.log.last_seq) == (before, posted)


def test_going_back_with_a_batch_out_is_our_own_fault() -> None:
    story = play(*done("a"), "mark", "sample 1")
    mark = story.book.marks[0]
    with pytest.raises(AssertionError, match="batches come back before the run is rewound"):
        story.record(ev.RunRewound(1, mark.seq, 0, 2))

    assert story.phase("a") == "sampled"


def test_going_back_leaves_groups_that_are_not_committed_where_they_are() -> None:
    story = play("mark", "submit p/1", *done("f"), "submit x/1", "start x", "fail x", "recover at=1")

    assert (story.phase("p"), story.phase("f"), story.phase("x")) == ("pending", "finished", "failure")


# Opening again ----------------------------------------------------------------------------------------


def test_a_run_that_is_opened_again_has_no_waiters_and_a_source_to_ask() -> None:
    story = play("sample 2", "exhausted", "close")
    closed = (story.book.closed, story.book.source_exhausted, len(story.book.requests))
    story.tell("recover")

    assert closed == (True, True, 1)
    assert (story.book.closed, story.book.source_exhausted, len(story.book.requests)) == (False, False, 0)
    assert story.book.lineage == 2


def test_running_groups_are_requeued_with_their_stamp_and_pending_ones_wait() -> None:
    story = play("submit a/2", "submit b/1", "start a.0", "publish 3", "recover")

    assert (story.phase("a"), story.group("a").stamp, story.book.lag(story.group("a"))) == ("pending", 0, 3)
    assert [session.attempt for session in story.group("a").sessions] == [2, 2]
    assert [session.attempt for session in story.group("b").sessions] == [1]


def test_a_hold_is_remembered() -> None:
    story = play()
    story.record(ev.AdmissionHeld("lag"))

    assert story.book.held_reason == "lag"


def test_records_are_applied_in_order_and_none_twice() -> None:
    story = play("submit a/1")
    record = next(story.log.read(start=2))
    with pytest.raises(AssertionError, match="event 2 after event 2"):
        story.book.apply(record)

    assert story.book.last_seq == 2


# Basis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("basis", "version"), [("dispatch", 1), ("first_token", 4), ("oldest_token", 2), ("newest_token", 6)]
)
def test_lag_counts_from_what_the_basis_names(basis: Any, version: int) -> None:
    rules = Rules(basis=basis)
    story = play(
        "submit g/2 stamp=1", "start g", "publish 6", "finish g.0 versions=4,2,6", "finish g.1 versions=5,5",
        rules=rules,
    )  # fmt: skip

    assert (story.group("g").stamp, story.group("g").version, story.group("g").aged_from) == (1, version, version)
    assert story.book.lag(story.group("g")) == 6 - version


@pytest.mark.parametrize("basis", ["first_token", "oldest_token", "newest_token"])
def test_without_token_versions_the_stamp_stands_in(basis: Any) -> None:
    story = play("submit g/1 stamp=1", "start g", "publish 6", "finish g reward=1", rules=Rules(basis=basis))

    assert story.book.lag(story.group("g")) == 5


def test_a_first_token_version_known_at_the_start_counts_without_spans() -> None:
    story = play("submit g/1", "publish 4", "start g version=4", "finish g reward=1", rules=Rules(basis="first_token"))

    assert story.book.lag(story.group("g")) == 0


def test_a_version_known_at_the_start_stands_in_for_its_session_alone() -> None:
    story = play(
        "submit g/2", "publish 6", "start g.0 version=4", "start g.1 version=6", "finish g.0 reward=1",
        "finish g.1 versions=5", rules=Rules(basis="newest_token"),
    )  # fmt: skip

    assert story.group("g").version == 5


def test_a_session_without_rows_has_no_version() -> None:
    story = play(
        "submit g/2", "publish 6", "start g.0 version=4", "start g.1 version=6", "finish g.0 nothing",
        "finish g.1 reward=1", rules=Rules(basis="oldest_token", empty_session="allow"),
    )  # fmt: skip

    assert story.group("g").version == 6


def test_a_requeued_group_does_not_count_from_tokens_that_were_dropped() -> None:
    story = play(
        "submit a/2 stamp=5", "publish 5", "start a", "finish a.0 versions=3", "fail a.1", "requeue a",
        rules=Rules(basis="oldest_token"), controlled=False,
    )  # fmt: skip

    assert story.group("a").aged_from == 5


def test_an_undone_commit_that_is_requeued_counts_from_the_mark() -> None:
    story = play(
        "publish 3", "mark", "publish 7", "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "sample 1",
        "commit 1", "recover at=1", "requeue a", "publish 5",
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 2


def test_in_flight_the_lag_counts_from_the_stamp_whatever_the_basis() -> None:
    story = play("submit g/1 stamp=1", "start g", "publish 6", rules=Rules(basis="newest_token"))

    assert story.book.lag(story.group("g")) == 5


def test_the_order_of_sampling_is_by_the_basis() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "publish 5", "finish a versions=5", "finish b versions=3",
        rules=Rules(basis="oldest_token"),
    )  # fmt: skip

    assert story.ready() == ["b", "a"]


def test_a_returned_group_is_not_counted_by_its_tokens_again() -> None:
    story = play(
        "submit a/1", "start a", "publish 5", "finish a versions=3", "sample 1", "publish 9", "release 1",
        rules=Rules(basis="oldest_token"),
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 2
    assert story.group("a").version == 3


def test_a_group_that_was_out_under_another_basis_comes_back_as_it_was() -> None:
    story = play("submit a/1 stamp=1", "start a", "publish 5", "finish a versions=3", "sample 1")
    story.record(ev.RunRecovered(Rules(basis="oldest_token").to_dict(), 1, 5, 2))
    story.tell("release 1")

    assert (story.group("a").version, story.group("a").aged_from) == (1, 1)


def test_a_requeued_group_counts_from_its_stamp_again() -> None:
    story = play(
        "submit a/2 stamp=1", "start a", "publish 5", "finish a.0 versions=3", "fail a.1", "requeue a",
        rules=Rules(basis="oldest_token"), controlled=False,
    )  # fmt: skip

    assert (story.group("a").version, story.group("a").aged_from) == (1, 1)


@pytest.mark.parametrize("basis", ["dispatch", "oldest_token"])
def test_one_whose_prompt_is_dispatched_anew_counts_from_the_version_of_then(basis: Any) -> None:
    story = play(
        "submit a/1 stamp=1", "start a", "publish 5", "requeue a stamp=4", rules=Rules(basis=basis), controlled=False
    )
    group = story.group("a")

    assert (group.stamp, group.version, group.aged_from, story.book.lag(group)) == (4, 4, 4, 1)
    story.tell("requeue a")
    assert (story.group("a").stamp, story.group("a").aged_from) == (4, 4)


def test_so_does_one_that_had_not_begun_and_it_is_younger_among_those_in_flight() -> None:
    story = play("submit a/1 stamp=1", "submit b/1 stamp=2", "publish 5", "requeue a stamp=5")

    assert story.phase("a") == "pending"
    assert [[group.group_id for group in groups] for groups in story.book.in_flight_by_age()] == [["b", "a"]]


def test_an_undone_commit_that_is_dispatched_anew_counts_from_the_version_of_then() -> None:
    story = play(
        "publish 3", "mark", "publish 7", "submit a/2", "start a", "finish a.0 reward=1", "fail a.1", "sample 1",
        "commit 1", "recover at=1", "requeue a stamp=4", "publish 5", "requeue a",
    )  # fmt: skip

    assert story.book.lag(story.group("a")) == 1


# The digest -------------------------------------------------------------------------------------------


def test_equal_books_have_equal_digests_and_different_ones_do_not() -> None:
    lines = ["submit a/2", "start a", "finish a.0 reward=1"]

    assert play(*lines).book.digest() == play(*lines).book.digest()
    assert play(*lines).book.digest() != play(*lines, "finish a.1 reward=1").book.digest()
    assert play(*lines).book.digest() != play("publish 0", *lines[:2], "finish a.0 reward=0").book.digest()


EVERYTHING = [
    "submit a/2 content=hello dataset=math", "submit b/1", "submit v/1 partition=val", "start a", "start v",
    "finish a.0 reward=1 versions=1,2 | reward=0", "fail a.1 timeout", "finish v reward=1", "mark", "sample 1",
    "commit 1", "sample 1 partition=val", "release 2", "sample 5", "start b", "fail b", "evict b empty credit=2",
    "submit r/1 cause=refill", "forfeit 1", "publish 4", "finish b.0 reward=1", "recover at=1", "requeue r", "close",
]  # fmt: skip
"""A story in which every kind of event happens, but holds and exhaustion."""


def test_any_prefix_of_a_log_replays_to_the_book_that_was_there() -> None:
    story = play(*EVERYTHING)
    records = list(story.log.read())
    book = Book()
    for count, record in enumerate(records, 1):
        book.apply(record)
        book.released.clear()

        assert replayed(records[:count]).digest() == book.digest()
    assert len({type(record.event) for record in records}) >= 16


def test_a_replay_is_the_same_each_time_and_holds_no_payloads_to_free() -> None:
    records = list(play(*EVERYTHING).log.read())

    assert len({replayed(records).digest() for _ in range(3)}) == 1
    assert replayed(records).released == []


def test_groups_are_found_by_the_version_that_they_are_of() -> None:
    story = play(
        "publish 9", *done("d", stamp=4), *done("b", "c", stamp=2), *done("a", stamp=1),
        "submit x/1 stamp=2", "submit y/1 stamp=2", "submit z/1 stamp=4",
    )  # fmt: skip
    book = story.book

    assert [[group.group_id for group in book.ready_at(version)] for version in range(6)] == [
        [], ["a"], ["b", "c"], [], ["d"], [],
    ]  # fmt: skip
    assert [book.ready_count_at(version) for version in range(6)] == [0, 1, 2, 0, 1, 0]
    assert [book.in_flight_count_at(version) for version in range(6)] == [0, 0, 2, 0, 1, 0]
    assert [group.group_id for group in book.freshest()] == ["d", "b", "c", "a"]
    assert [list(book.state()[index]["train"]) for index in ("aging", "in_flight")] == [[""], [""]]


# Twice -----------------------------------------------------------------------------------------------


def round_of_events(story: Story, number: int) -> None:
    evicted, failing = f"e{number}", f"f{number}"
    story.record(ev.GroupSubmitted(evicted, 1, "train", 0, 1, "submit", "math", target_version=7))
    story.tell(
        f"submit {failing}/2 dataset=math", f"submit s{number}/1 dataset=code", f"submit k{number}/1 dataset=code"
    )
    story.tell(f"start {evicted}", f"finish {evicted} acc=0.5 versions=0,0 | acc=1 versions=0")
    story.tell(f"start {failing}", f"fail {failing}")
    story.record(ev.GroupEvicted(evicted, ("stale", "zero_variance"), 3, 3, 0.5, "acc"))
    story.tell("forfeit 1", f"submit r{number}/1 dataset=drawn position={number - 1} cause=refill")
    story.record(ev.GroupRequeued(failing, "once more", True))
    story.record(ev.ResultFenced(failing, 0, 1, "finished", "attempt"))
    story.record(ev.DatasetStarved("math", 1, 1, 1))
    story.record(ev.GroupSubmitted(f"t{number}", 1, "val", 0, 1, "submit", "math", target_version=7))
    story.tell(f"start t{number}", f"fail t{number}", f"evict t{number} failed")


def test_what_happens_twice_is_counted_twice() -> None:
    story = play()
    for number in (1, 2):
        round_of_events(story, number)

    assert story.book.totals == {
        "submitted": 12, "sessions_finished": 2, "response_tokens": 6, "session_failed/error": 6, "evicted": 4,
        "credit": 6, "evicted/stale": 2, "evicted/zero_variance": 2, "evicted/failed": 2, "forfeited": 2, "fenced": 2,
        "starved": 2, "refills": 2, "drawn": 2,
    }  # fmt: skip
    assert story.book.datasets == {
        "math": {"submitted": 6, "evicted": 4}, "code": {"submitted": 4}, "drawn": {"submitted": 2}
    }  # fmt: skip
    assert story.book.uses == {
        "math": DatasetUse(4, 2, 2), "code": DatasetUse(4, 0, 4, 4), "drawn": DatasetUse(2, 0, 2, 2)
    }  # fmt: skip
    assert (story.book.source_position, story.book.source_positions) == (2, {"drawn": 2})
    assert story.book.targets == {7: 0}
    assert list(story.book.credits) == [Credit(1, "math", "e2", 7)] * 2
    assert story.book.window("train") == Window(
        evicted=Counter(stale=2, zero_variance=2),
        evicted_groups=2,
        stale_lags=[3, 3],
        submitted=10,
        refills=2,
        forfeited=2,
        fenced=2,
        requeued=2,
        sessions_failed=Counter(error=4),
        starved=Counter(math=2),
        filtered_values=Counter({0.5: 2}),
    )


def test_batches_that_go_out_come_back_and_are_committed_twice_are_counted_twice() -> None:
    story = play("submit v/1 partition=val", "start v", "finish v acc=1", "sample 1 partition=val", "release 1")
    for number in (1, 2):
        name, batch = f"s{number}", story.book.last_batch + 1
        story.tell(f"submit {name}/1 dataset=code", f"start {name}", f"finish {name} acc=1", "sample 1")
        story.tell(f"release {batch}", "sample 1", f"commit {batch + 1}")
    story.tell("recover", "recover")

    assert story.book.totals == {
        "submitted": 3, "sessions_finished": 3, "response_tokens": 0, "batches": 5, "batches_returned": 3,
        "committed": 2, "committed/train": 2, "batches_committed": 2,
    }  # fmt: skip
    assert story.book.datasets == {
        "": {"submitted": 1, "sampled": 1}, "code": {"submitted": 2, "sampled": 4, "committed": 2}
    }  # fmt: skip
    assert story.book.uses == {"code": DatasetUse(2)}
    assert not story.book.windows_out
    assert (story.book.openings, story.book.rules_version, story.book.library) == (3, RULES_VERSION, VERSION)


def test_a_group_says_which_event_changed_it_last_and_when() -> None:
    story = play("mark", "submit g/1", "start g", "fail g")
    told = []
    for lines in (["requeue g"], ["start g", "finish g acc=1", "sample 1"], ["release 1"], ["sample 1", "commit 2"]):
        story.tell("wait 1", *lines)
        group = story.book.groups.get("g") or story.book.aside["g"]
        told.append((group.last_seq, group.last_at_ns) == (story.book.last_seq, story.book.last_at_ns))
    story.tell("wait 1", "recover at=1")
    rewound = next(record for record in story.log.read() if isinstance(record.event, ev.RunRewound))
    group = story.group("g")

    assert told == [True] * 4
    assert (group.last_seq, group.last_at_ns) == (rewound.seq, rewound.at_ns)


def test_going_back_undoes_commits_to_the_last_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 1)
    story = play(
        "publish 2", *done("old", stamp=1), *done("at", stamp=2), "mark", "publish 4", *done("new", stamp=4),
        "sample 2", "commit 1", "sample 1", "commit 2",
    )  # fmt: skip
    marked = list(story.book.mark_seqs)
    story.tell("recover at=1")
    groups = [story.group(name) for name in ("old", "at", "new")]

    assert [(group.ended_version, group.aged_from, group.rewound_to) for group in groups] == [
        (2, 1, None), (2, 2, None), (2, 2, 2),
    ]  # fmt: skip
    assert list(story.book.mark_seqs)[:1] == marked
    assert (story.book.datasets[""]["committed"], story.book.totals["committed"]) == (0, 0)
    assert story.book.uses[""].open == 3


@pytest.mark.parametrize("tried", ["return", "commit"])
def test_a_batch_that_is_not_out_says_what_was_tried(tried: str) -> None:
    event = ev.BatchReturned(1, "closed") if tried == "return" else ev.BatchCommitted(1)

    with pytest.raises(UnknownBatch, match=f"cannot {tried} batch 1: it was never sampled"):
        Book().apply(ev.Record(1, 0, event))


def test_what_happens_to_a_group_that_has_left_is_told_by_its_name() -> None:
    story = play("submit g/1", "start g", "fail g", "evict g failed")

    with pytest.raises(IllegalTransition, match="GroupEvicted"):
        story.record(ev.GroupEvicted("g", ("failed",), 0, 0))
    with pytest.raises(IllegalTransition, match="GroupRequeued"):
        story.record(ev.GroupRequeued("g"))


# What is told, and what is compared ------------------------------------------------------------------


def test_the_state_of_a_book_names_its_parts_and_holds_sessions_unpacked() -> None:
    story = play("submit g/1", "start g", "finish g acc=1", "submit x/1", "start x", "fail x", "evict x failed")
    source = ev.SourceOpened("prompts", "ListSource", {"size": 3})
    before = story.book.state()["run"]
    story.record(source)
    state = story.book.state()

    assert list(state) == [
        "groups", "aside", "departed", "ready", "aging", "in_flight", "phases", "requests", "batches", "credits",
        "marks", "mark_seqs", "windows", "totals", "datasets", "uses", "targets", "run",
    ]  # fmt: skip
    assert state["departed"] == {"x": "evicted"}
    assert {phase: ids for phase, ids in state["phases"]["train"].items() if ids} == {"finished": ["g"]}
    assert [session[:2] for session in state["groups"][0][15]] == [["finished", 1]]
    assert (before[-3], state["run"][-3]) == (None, [10, "prompts", "ListSource", {"size": 3}])


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"mode": "sync", "empty": "keep"}, True),
        ({"mode": "sync", "empty": "keep_all"}, True),
        ({"mode": "async", "empty": "keep"}, False),
        ({"mode": "async", "empty": "keep_all"}, False),
        ({"mode": "async", "empty": "keep_finished"}, False),
        ({"mode": "sync", "empty": "drop"}, False),
        ({"mode": "sync", "empty": "keep_finished"}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_failed_group_without_rows_is_kept_where_the_rules_of_the_log_say_so(
    rules: dict[str, Any], kept: bool, partition: Any
) -> None:
    book = Book()
    events: list[ev.Event] = [
        ev.RunStarted("r", rules, 5, 3),
        ev.GroupSubmitted("g", 1, partition, 3, 1, "submit"),
        ev.SessionFailed("g", 0, 1, "error"),
        ev.GroupFailed("g"),
    ]
    for seq, event in enumerate(events, 1):
        book.apply(ev.Record(seq, seq * 100, event))

    assert book.group("g").kept_empty is (kept and partition == "train")
    assert (book.group("g").ended_version, book.group("g").submitted_at_ns) == (3, 200)
    assert (book.openings, book.rules_version, book.last_at_ns) == (1, 5, 400)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"mode": "sync", "empty": "keep"}, False),
        ({"mode": "sync", "empty": "keep_finished"}, True),
        ({"mode": "sync", "empty": "keep_all"}, True),
        ({"mode": "async", "empty": "keep_finished"}, True),
        ({"mode": "async", "empty": "keep_all"}, False),
    ],
)
@pytest.mark.parametrize("partition", ["train", "val"])
def test_so_is_a_finished_one(rules: dict[str, Any], kept: bool, partition: Any) -> None:
    book = Book()
    events: list[ev.Event] = [
        ev.RunStarted("r", rules, 5, 3),
        ev.GroupSubmitted("g", 1, partition, 3, 1, "submit"),
        ev.SessionStarted("g", 0, 1),
        ev.SessionFinished("g", 0, 1),
        ev.GroupFinished("g"),
    ]
    for seq, event in enumerate(events, 1):
        book.apply(ev.Record(seq, seq * 100, event))

    assert book.group("g").kept_empty is (kept and partition == "train")
    assert [group.group_id for group in book.ready(partition)] == ["g"] * (kept or partition == "val")


def test_a_group_that_is_not_there_is_told_by_what_became_of_it() -> None:
    story = play("submit g/1", "start g", "fail g", "evict g failed")

    with pytest.raises(UnknownGroup, match=r"look up.*'g'.*it was evicted and has left"):
        story.book.group("g")
    with pytest.raises(UnknownGroup, match=r"'other'.*it was never submitted"):
        story.book.group("other")


@pytest.mark.parametrize("event", [ev.SessionStarted("g", 0, 1), ev.GroupEvicted("g", ("failed",), 0, 0)])
@pytest.mark.parametrize(
    ("lines", "phase"), [(["submit g/1", "start g", "fail g", "evict g failed"], "evicted"), ([], None)]
)
def test_an_event_about_a_group_that_is_not_there_is_refused(
    lines: list[str], phase: str | None, event: ev.Event
) -> None:
    book = play(*lines).book
    for attempt in (lambda: book.preview(event, 99, 99), lambda: book.apply(ev.Record(book.last_seq + 1, 0, event))):
        with pytest.raises(IllegalTransition) as refused:
            attempt()

        assert (refused.value.group_id, refused.value.phase) == ("g", phase)
        assert type(event).__name__ in str(refused.value)


def test_a_preview_is_the_group_as_it_would_be() -> None:
    story = play("submit g/1")
    group = story.book.preview(ev.SessionStarted("g", 0, 1), 9, 99)

    assert group is not None
    assert (group.phase, group.last_seq, group.last_at_ns) == (Phase.RUNNING, 9, 99)
    assert story.phase("g") == "pending"


def test_a_group_that_was_previewed_is_not_made_a_second_time_by_its_event() -> None:
    book = play("submit g/2", "start g.0").book
    event, seq = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    previewed = book.preview(event, seq, 99)
    book.apply(ev.Record(seq, 99, event))

    assert book.group("g") is previewed


@pytest.mark.parametrize(
    ("session", "ahead", "at_ns"),
    [
        pytest.param(2, 0, 99, id="another event"),
        pytest.param(1, 1, 99, id="the same event with another number"),
        pytest.param(1, 0, 98, id="the same event at another time"),
    ],
)
def test_a_preview_of_something_else_is_not_taken_for_the_event(session: int, ahead: int, at_ns: int) -> None:
    book = play("submit g/3", "start g.0").book
    event, now = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    book.preview(event if session == 1 else ev.SessionStarted("g", session, 1), now + ahead, at_ns)
    book.apply(ev.Record(now, 99, event))

    group = book.group("g")
    assert [session.state for session in group.sessions] == ["open", "open", "waiting"]
    assert (group.last_seq, group.last_at_ns) == (now, 99)


def test_a_preview_of_a_group_that_has_changed_since_is_not_taken_for_the_event() -> None:
    book = play("submit g/3", "start g.0").book
    event, now = ev.SessionStarted("g", 1, 1), book.last_seq + 1

    book.preview(event, now + 1, 99)
    book.apply(ev.Record(now, 98, ev.SessionStarted("g", 2, 1)))
    book.apply(ev.Record(now + 1, 99, event))

    assert [session.state for session in book.group("g").sessions] == ["open", "open", "open"]


def test_a_replay_notes_no_payloads_that_nobody_asked_for() -> None:
    story = play()
    story.record(ev.GroupSubmitted("g", 1, "train", 0, 1, "submit", prompt=ev.PayloadRef(1, 2, 3)))
    story.tell("start g", "fail g", "evict g failed")
    book = replayed(story.log.read())

    assert (book.released, book.notes_released) == ([], True)


def test_a_group_made_for_a_version_keeps_it_whatever_its_tokens_say() -> None:
    rules = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1)
    story = play("submit g/1 target=2", "start g", "finish g acc=1 versions=0,1", rules=rules)

    assert (story.group("g").version, story.group("g").aged_from) == (2, 2)


def test_ids_are_forgotten_in_the_order_in_which_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_changes, "DEPARTED_IDS_MAX", 1)
    story = play()
    for name in "abcd":
        story.tell(f"submit {name}/1", f"start {name}", f"fail {name}", f"evict {name} failed")

    assert list(story.book.departed) == ["d"]


def test_a_position_that_was_drawn_late_takes_no_dataset_back() -> None:
    story = play("submit a/1 dataset=math position=3", "submit b/1 dataset=math position=1")

    assert (story.book.source_positions, story.book.source_position) == ({"math": 4}, 4)


def test_a_dataset_with_open_groups_counts_from_when_it_was_sampled() -> None:
    story = play(*done("a"), "submit b/1", "sample 1", "publish 3", "submit c/1")

    assert (story.book.uses[""].version, story.book.uses[""].told_version) == (0, 0)
