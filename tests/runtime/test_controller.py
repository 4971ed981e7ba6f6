"""The rules at work: what the controller does after each event."""

import pytest
from msgspec.structs import replace

from groupstate import Trajectory
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.custom import Drop
from groupstate.core.held import OpenRequest
from groupstate.core.phases import Phase
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Capacity, Rules, Slots
from groupstate.errors import EvictionStreak, NotEnoughGroups, RefillLimitExceeded
from groupstate.testing.notation import play
from tests.runtime.scenes import events, opened, virtual

SYNC = Rules(mode="sync", batch_size=4, filter_metric="acc")


# As the controller does it ---------------------------------------------------------------------------


def test_credit_of_sync_mode_is_spent_slot_by_slot_and_the_surplus_discarded() -> None:
    story = play(
        "submit same/2", "submit slow/2", "start same", "start slow", "sample 2", "finish same acc=0",
        rules=replace(SYNC, batch_size=2), source=["r1", "r2", "r3"],
    )  # fmt: skip
    first = story.refills()
    story.tell("start r1", "finish r1.0 acc=0", "finish r1.1 acc=1")
    second = story.refills()
    story.tell("start r2", "finish r2.0 acc=0", "finish r2.1 acc=1")
    waiting = story.batches()
    story.tell("finish slow.0 acc=0", "finish slow.1 acc=1")

    assert (first, second, waiting) == (["r1"], ["r1", "r2"], [])
    assert story.batches() == [("slow", "r1")]
    assert story.evicted() == {"same": ("zero_variance",), "r2": ("surplus",)}
    assert story.refills() == ["r1", "r2"]


def test_a_demand_that_refills_can_not_meet_is_drawn_from_the_source() -> None:
    story = play("sample 3", rules=Rules(), source=["r1", "r2", "r3", "r4"])

    assert sorted(story.book.groups) == ["r1", "r2", "r3"]
    assert story.refills() == []


def test_an_exhausted_source_answers_the_waiter_with_the_counts_and_keeps_the_rest() -> None:
    story = play(
        "submit a/1", "submit b/1", "submit c/1", "start a", "start b", "start c", "finish a acc=1",
        "sample 3", "fail b", "finish c acc=1", rules=Rules(), source=[],
    )  # fmt: skip
    error = story.waiters[0].error
    story.tell("sample 2")

    assert isinstance(error, NotEnoughGroups)
    assert (error.needed, error.counts) == (
        3,
        {"needed": 3, "sampleable": 1, "in_flight": 1, "older_waiters": 0},
    )
    assert "sample a batch of at most 2" in str(error)
    assert story.events(ev.RefillForfeited) == [ev.RefillForfeited(1, "source exhausted")]
    assert story.batches() == [("a", "c")]


def test_with_several_waiters_the_one_that_is_left_without_is_told() -> None:
    story = play("submit a/1", "start a", "sample 1", "sample 1", rules=Rules(), source=[])

    assert [type(waiter.error).__name__ for waiter in story.waiters] == ["NoneType", "NotEnoughGroups"]
    assert "1 in flight of which older samplers wait for 1" in str(story.waiters[1].error).replace(",", "")


def test_a_streak_of_evictions_stops_the_run_with_the_reasons() -> None:
    rules = Rules(filter_metric="acc", eviction_streak_max=3)
    story = play("submit g/2", "sample 1", "start g", "finish g acc=1", rules=rules, source=["r1", "r2", "r3", "r4"])
    story.tell("start r1", "finish r1 acc=1")
    before = story.waiters[0].error
    story.tell("start r2", "fail r2")
    error = story.waiters[0].error

    assert before is None
    assert isinstance(error, EvictionStreak)
    assert (error.streak, error.bound, error.reasons) == (3, 3, {"zero_variance": 2, "empty": 1})


def test_a_group_that_is_kept_ends_the_streak() -> None:
    rules = Rules(filter_metric="acc", eviction_streak_max=2)
    story = play(
        "submit a/2", "submit b/2", "submit c/2", "sample 3", "start a", "start b", "start c", "finish a acc=1",
        "finish b.0 acc=0", "finish b.1 acc=1", "finish c acc=1", rules=rules, source=[f"r{i}" for i in range(9)],
    )  # fmt: skip

    assert story.evicted() == {"a": ("zero_variance",), "c": ("zero_variance",)}
    assert story.waiters[0].error is None


def test_one_batch_takes_no_more_groups_than_the_limit() -> None:
    """The second refill is owed, and not drawn: the limit bounds what is started, not only what is waited for."""
    rules = Rules(filter_metric="acc", generated_groups_max=2)
    story = play("submit g/2", "sample 1", "start g", "finish g acc=1", rules=rules, source=["r1", "r2"])
    at_the_limit = story.waiters[0].error
    story.tell("start r1", "finish r1 acc=1")
    error = story.waiters[0].error

    assert at_the_limit is None
    assert isinstance(error, RefillLimitExceeded)
    assert (error.generated, error.bound, error.reasons) == (2, 2, {"zero_variance": 2})


def test_a_withdrawn_sampler_takes_nothing() -> None:
    story = play("submit a/1", "sample 2", "withdraw", "start a", "finish a acc=1", "sample 1", rules=Rules())

    assert story.batches() == [("a",)]
    assert story.events(ev.BatchRequestCancelled) == [ev.BatchRequestCancelled(1, "told so")]


def test_a_sampler_that_leaves_with_its_batch_gives_it_back() -> None:
    story = play("submit a/1", "start a", "finish a acc=1", "sample 1", "withdraw", rules=Rules())

    assert story.ready() == ["a"]
    assert story.events(ev.BatchReturned) == [ev.BatchReturned(1, "cancelled")]


# With an exhausted source ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_of", "rules", "lag", "reasons", "credit"),
    [
        (["finish g.0 acc=0", "finish g.1 acc=1"], Rules(lag_max=1), 2, ("stale",), 1),
        (["finish g acc=1"], Rules(filter_metric="acc"), 0, ("zero_variance",), 1),
        (["finish g acc=1"], SYNC, 0, ("zero_variance",), 2),
        (["finish g.0 acc=1", "fail g.1"], Rules(), 0, ("failed",), 1),
        (["finish g.0 acc=1", "fail g.1"], replace(SYNC, failure="refill"), 0, ("failed",), 1),
        (["fail g"], Rules(), 0, ("empty",), 1),
        (["fail g"], SYNC, 0, ("empty",), 1),
        (["finish g nothing"], Rules(empty_session="allow"), 0, ("empty",), 1),
        (["finish g nothing"], replace(SYNC, empty_session="allow", empty="drop"), 0, ("empty",), 0),
        (["finish g acc=1"], Rules(lag_max=1, filter_metric="acc"), 2, ("stale", "zero_variance"), 1),
        (["cancel g"], Rules(), 0, ("cancelled",), 1),
    ],
)
def test_whatever_takes_the_last_group_of_an_exhausted_source_the_waiter_is_told(
    made_of: list[str], rules: Rules, lag: int, reasons: tuple[str, ...], credit: int
) -> None:
    story = play(
        "submit good/2", "submit g/2", "start good", "finish good.0 acc=0", "finish good.1 acc=1", "start g",
        "sample 2",
        rules=replace(rules, batch_size=2), source=[],
    )  # fmt: skip
    assert story.waiters[0].error is None  # `g` may yet do
    story.tell(f"submit fresh/1 stamp={lag}", f"publish {lag}", *made_of)
    story.tell("start fresh", "fail fresh")

    assert story.evicted()["g"] == reasons
    assert sum(event.count for event in story.events(ev.RefillForfeited)) >= credit
    assert {event.reason for event in story.events(ev.RefillForfeited)} <= {"source exhausted"}
    assert isinstance(story.waiters[0].error, NotEnoughGroups)
    assert story.waiters[0].error.counts["sampleable"] == len(story.ready())


def test_a_group_that_is_kept_although_it_failed_meets_the_demand_of_an_exhausted_source() -> None:
    story = play("submit g/2", "start g", "sample 1", "finish g.0 acc=1", "fail g.1", rules=SYNC, source=[])

    assert story.batches() == [("g",)]


# Batches of changing size ----------------------------------------------------------------------------


def test_in_async_mode_each_call_gets_as_many_as_it_asks_for() -> None:
    lines = [f"{verb} g{i}{rest}" for i in range(6) for verb, rest in (("submit", "/1"), ("start", ""), ("finish", ""))]
    story = play(*lines, "sample 1", "sample 3", "sample 2", rules=Rules(batch_size=2))

    assert story.batches() == [("g0",), ("g1", "g2", "g3"), ("g4", "g5")]


def test_in_sync_mode_a_batch_below_the_rules_leaves_no_surplus_and_the_next_full_one_does() -> None:
    good = [
        line
        for i in range(4)
        for line in (f"submit g{i}/2", f"start g{i}", f"finish g{i}.0 acc=0", f"finish g{i}.1 acc=1")
    ]
    story = play(*good, "sample 1", rules=replace(SYNC, batch_size=2), source=["r1"])
    assert (story.batches(), story.evicted()) == ([("g0",)], {})

    story.tell("sample 2")
    assert (story.batches(), story.evicted()) == ([("g0",), ("g1", "g2")], {"g3": ("surplus",)})


def test_the_demand_that_counts_is_that_of_the_call_that_waits() -> None:
    story = play(
        "submit a/2", "submit b/2", "start a", "start b", "sample 1", "finish a acc=1",
        rules=replace(SYNC, batch_size=4), source=["r1", "r2", "r3", "r4"],
    )  # fmt: skip
    assert [event.credit for event in story.events(ev.GroupEvicted)] == [2]

    story.tell("finish b.0 acc=0", "finish b.1 acc=1", "start r1", "start r2", "finish r1 acc=1", "finish r2 acc=1")
    assert [event.credit for event in story.events(ev.GroupEvicted)] == [2, 0, 0]
    assert story.batches() == [("b",)]


# Between two decisions -------------------------------------------------------------------------------


def test_a_group_that_ends_between_two_decisions_is_judged_by_the_next() -> None:
    story = play("submit g/2", "start g", rules=Rules(lag_max=0, filter_metric="acc"), source=["r1"])
    settle, story.ledger.settle = story.ledger.settle, lambda: None
    story.tell("finish g.0 acc=1", "publish 3", "finish g.1 acc=1")
    assert (story.phase("g"), story.evicted()) == ("finished", {})

    story.ledger.settle = settle
    settle()
    assert story.evicted() == {"g": ("stale", "zero_variance")}
    assert story.refills() == ["r1"]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (("publish 5", "finish late.1 acc=1"), "stale"),
        (("finish late.1 acc=0",), "zero_variance"),
        (("fail late.1",), "failed"),
    ],
)
def test_a_group_that_ends_while_the_source_is_drawn_from_is_judged_before_anything_is_served(
    ending: tuple[str, ...], reason: str
) -> None:
    """A source is user code, and may end a session of its own while it makes the refill."""
    story = play(
        "submit late/2", "start late", "finish late.0 acc=0", "submit flat/1", "start flat",
        rules=Rules(lag_max=1, filter_metric="acc", on_singleton="evict"), source=["r1"],
    )  # fmt: skip
    source = story.controller.source
    assert source is not None
    draw = source.draw

    def draw_and_end() -> Prompt | None:
        story.tell(*ending)
        return draw()

    source.draw = draw_and_end  # type: ignore[method-assign]
    story.tell("sample 1", "finish flat acc=1")

    assert story.evicted()["late"] == (reason,)
    assert story.batches() == []


def test_rules_that_can_never_fill_a_batch_are_told_at_once() -> None:
    story = play("sample 5", rules=Rules(generated_groups_max=3), source=list("abcdef"))

    assert isinstance(story.waiters[0].error, RefillLimitExceeded)
    assert "3 groups were submitted for this batch and generated_groups_max is 3" in str(story.waiters[0].error)
    assert story.book.totals["submitted"] == 3


def test_a_streak_of_single_sessions_names_the_setting_that_throws_them_away() -> None:
    story = play(
        "submit a/1", "start a", "sample 1", "finish a acc=1",
        rules=Rules(filter_metric="acc", on_singleton="evict", eviction_streak_max=1), source=["r1"],
    )  # fmt: skip

    assert isinstance(story.waiters[0].error, EvictionStreak)
    assert "groups have one session each, which on_singleton 'evict' throws away" in str(story.waiters[0].error)


@pytest.mark.slow
def test_after_a_hundred_failures_reported_twice_as_many_may_run_as_at_first() -> None:
    names = [f"g{number}" for number in range(110)]
    story = play(rules=Rules(admission=Slots(n=4), eviction_streak_max=1_000), source=names, admits=True, group_size=1)
    story.ledger.settle()
    for name in names[:100]:
        story.tell(f"start {name}", f"fail {name}.0", f"fail {name}.0")

        assert story.book.in_flight_count() == 4
    assert story.evicted() == dict.fromkeys(names[:100], ("empty",))


@pytest.mark.slow
def test_capacity_at_version_fifty_is_the_same_after_a_crash() -> None:
    story = play(rules=Rules(batch_size=2, admission=Capacity(lag_max=1)), source=map(str, range(200)), admits=True)
    story.ledger.settle()
    for version in range(1, 51):
        for group_id in [group.group_id for group in story.book.in_phase(Phase.PENDING)][:2]:
            story.tell(f"start {group_id}", f"finish {group_id} acc=1")
        story.tell("sample 2", f"commit {version}", f"publish {version}")
    before = len(story.book.groups)
    story.tell("recover")

    assert (before, len(story.book.groups)) == (4, 4)
    assert story.book.in_flight_count() == 4


# A selection of one's own ----------------------------------------------------------------------------


def test_a_selection_that_drops_everything_ends_in_a_streak_and_not_in_endless_generation() -> None:
    def nothing_is_good(book: Book, rules: Rules, request: OpenRequest) -> list[Drop]:
        return [Drop(group.group_id) for group in book.ready()]

    story = play("sample 1", rules=Rules(eviction_streak_max=3), source=list("abcdefgh"), selection=nothing_is_good)
    for name in "abc":
        story.tell(f"start {name}", f"finish {name} acc=1")

    assert isinstance(story.waiters[0].error, EvictionStreak)
    assert "custom 3. Selection 'oldest_first' drops whatever it is shown" in str(story.waiters[0].error)
    assert "e" not in story.book.groups


def test_a_streak_of_failures_tells_the_last_of_them() -> None:
    story = play("submit a/1", "submit b/1", "start a", "start b", "sample 1", "fail a", "fail b timeout",
                 rules=Rules(eviction_streak_max=2), source=[])  # fmt: skip

    assert "The last session to fail was session 0 of group 'b' (timeout): told so" in str(story.waiters[0].error)


@virtual
async def test_two_groups_of_one_text_are_judged_apart(loop):
    """Each is all right or all wrong; taken for one they would have a spread."""
    async with opened(loop, rules=Rules(filter_metric="reward")) as run:
        for group_id, reward in (("u1", 0.0), ("u2", 1.0)):
            group = run.submit("the same text", n=2, group_id=group_id)
            for session in range(2):
                group.start(session).finish(Trajectory(reward=reward))

        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["u1", "u2"]
        assert run.sampleable_count() == 0
