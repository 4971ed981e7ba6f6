"""Refills of a system outside: credit that is taken, owed again or forfeited."""

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.errors import BadInput
from tests.runtime.outside import Make

pytestmark = pytest.mark.usefixtures("no_event_loop")


def test_an_eviction_s_credit_is_taken_and_its_prompt_shows_up_as_a_refill(outside: Make) -> None:
    out = outside().report("a", "failure", size=3)

    assert (out.feed.take_refills(), out.feed.take_refills()) == (1, 0)
    out.report("v", "pending", partition="val").report("b", "pending").report("c", "pending")

    submitted = [(event.group_id, event.cause, event.size) for event in out.events(ev.GroupSubmitted)]
    assert submitted[1:] == [("v", "submit", 2), ("b", "refill", 3), ("c", "submit", 2)]
    assert not out.feed.book.credits


def test_credit_that_was_not_taken_is_still_owed(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert out.feed.take_refills() == 1


def test_a_refill_of_another_size_is_a_group_like_any_other(outside: Make) -> None:
    out = outside().report("a", "failure", size=3)
    out.feed.take_refills()
    out.report("b", "pending", size=2)

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert [event.count for event in out.events(ev.RefillForfeited)] == [1]


def test_a_refill_without_a_place_is_a_group_like_any_other(outside: Make) -> None:
    out = outside(gs.Rules(admission=gs.Slots(n=1))).report("a", "failure")
    assert out.feed.take_refills() == 1
    out.feed.ledger.record(ev.GroupSubmitted("by hand", 2, "train", 0, 1, "submit"))
    out.report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "submit"
    assert not out.feed.book.credits


def test_refills_are_forfeited_when_there_are_no_more_prompts(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "failure")
    out.feed.take_refills()

    assert (out.feed.give_up_refills(), out.feed.give_up_refills()) == (2, 0)
    assert out.report("c", "pending").events(ev.GroupSubmitted)[-1].cause == "submit"


def test_refills_are_taken_in_whole_multiples(outside: Make) -> None:
    out = outside(gs.Rules(refill_multiple=2)).report("a", "failure")
    assert out.feed.take_refills() == 0
    out.report("b", "failure").report("c", "failure")

    assert (out.feed.take_refills(), out.feed.take_refills()) == (2, 0)


def test_refills_that_were_not_dispatched_are_owed_again(outside: Make) -> None:
    out = outside().report("a", "failure").report("b", "failure")
    assert out.feed.take_refills() == 2
    out.feed.return_refills(1)

    assert (out.feed.take_refills(), out.feed.take_refills()) == (1, 0)
    with pytest.raises(BadInput, match="count is 3"):
        out.feed.return_refills(3)


def test_an_id_that_can_t_be_recorded_leaves_the_refill_to_the_next_one(outside: Make) -> None:
    out = outside().report("a", "failure")
    out.feed.take_refills()
    out.report("half a pair \ud800", "pending").report("b", "pending")

    assert out.events(ev.GroupSubmitted)[-1].cause == "refill"


def test_credit_outlives_the_polls_of_a_draining_sampler(outside: Make) -> None:
    """Sync mode with a filter: refills are earned while a batch is wanted, and dispatched between two looks."""
    rules = gs.Rules(mode="sync", filter_metric="reward", batch_size=2)
    out = outside(rules).report("a", "finished", 0.0, 1.0).report("b", "finished", 1.0, 1.0)

    assert out.feed.sample_now(2) is None
    assert out.feed.take_refills() == 2
    out.report("c", "running").report("d", "running").report("c", "finished", 0.0, 1.0)
    assert out.feed.sample_now(2) is None
    out.report("d", "finished", 0.0, 1.0)

    assert out.feed.sample_now(2).group_ids == ["a", "c"]
    assert out.evicted() == {"b": ("zero_variance",), "d": ("surplus",)}
    assert [event.cause for event in out.events(ev.GroupSubmitted)] == ["submit", "submit", "refill", "refill"]
