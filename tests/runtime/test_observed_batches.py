"""Batches out of listings: asked for at once or waited for, claimed, released and refused."""

import attrs
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.errors import EvictionStreak, UnknownBatch, WeightVersionError
from groupstate.runtime.observed import Reported, ReportedRow
from groupstate.runtime.reported import split_key
from tests.runtime.outside import Make

pytestmark = pytest.mark.usefixtures("no_event_loop")

# Batches ---------------------------------------------------------------------------------------------------


def test_a_batch_is_claimed_with_its_lags_metrics_and_keys(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=2))
    rows = {(0, 0): ReportedRow(), (1, 0): ReportedRow(), (1, 3): ReportedRow()}
    out.report("a_1", "finished", rows=rows)

    batch = out.feed.sample_now(1, weight_version=2)

    assert (batch.group_ids, batch.lags, batch.weight_version) == (["a_1"], (2,), 2)
    assert [str(key) for key in batch.keys] == ["a_1_0_0", "a_1_1_0", "a_1_1_3"]
    assert [split_key(str(key)) for key in batch.keys] == list(batch.keys)
    assert batch.metrics
    assert out.feed.explanation is None


def test_a_batch_that_is_not_there_is_explained_and_asked_for_again_at_no_cost(outside: Make) -> None:
    out = outside().report("g", "running")

    assert out.feed.sample_now(1) is None
    before = out.log.last_seq
    assert [out.feed.sample_now(1) for _ in range(5)] == [None] * 5
    assert out.log.last_seq == before
    assert "0 of 1 groups are sampleable" in str(out.feed.explanation)
    assert not out.feed.book.requests

    out.report("g", "finished", 0.0, 1.0)
    assert out.feed.sample_now(1) is not None


def test_a_batch_that_can_t_come_is_an_error(outside: Make) -> None:
    out = outside(gs.Rules(eviction_streak_max=2))
    for name in "ab":
        out.report(name, "failure")

    text = r"empty 2 \(empty: it ended without any trajectory, finished or failed\)\. The last session to fail"
    with pytest.raises(EvictionStreak, match=text):
        out.feed.sample_now(1)
    assert out.feed.sample_now(1) is None


def test_what_keeps_groups_from_ever_being_sampleable_is_told_to_whoever_only_waits_for_them(outside: Make) -> None:
    for mode in ("async", "sync"):
        rules = gs.Rules(mode=mode, filter_metric="acc", batch_size=2, eviction_streak_max=1)  # type: ignore[arg-type]
        out = outside(rules).report("good", "finished", rows={(0, 0): ReportedRow(metrics={"acc": 1.0})}, size=1)
        assert out.feed.why_never(2) is None
        out.report("bad", "finished", 0.0, 1.0)
        assert "session 0 of group 'bad' has no metric 'acc'" in str(out.feed.why_never(2))
        assert out.feed.why_never(2, ev.VALIDATION) is None


def test_advice_is_for_whoever_has_no_run_to_submit_to_or_to_cancel_in(outside: Make) -> None:
    out = outside().report("b", "running")
    out.feed.ask(3)

    assert out.feed.explain().unblocked_by == (
        "groups in flight must be listed as ended, or not be listed any more, which gives them up",
        "only prompts that are dispatched outside can supply the missing 2 groups",
    )


def test_what_can_t_be_asked_for_is_refused(outside: Make) -> None:
    feed = outside(version=3).feed
    with pytest.raises(WeightVersionError):
        feed.sample_now(1, weight_version=2)
    with pytest.raises(gs.GroupstateError, match="batch_size is 0"):
        feed.sample_now(0)
    with pytest.raises(UnknownBatch):
        feed.commit(1)
    with pytest.raises(UnknownBatch):
        feed.release(1)


def test_a_batch_of_another_feed_is_refused(outside: Make) -> None:
    one, other = outside().report("g", "finished", 0.0, 1.0), outside().report("g", "finished", 0.0, 1.0)
    mine, theirs = one.feed.sample_now(1), other.feed.sample_now(1)
    for call in (other.feed.commit, other.feed.release):
        with pytest.raises(UnknownBatch, match=f"batch 1: it is of run '{mine.run_id}', and this is run"):
            call(mine)
    one.feed.release(mine)
    other.feed.commit(theirs)

    assert (one.phase("g"), other.phase("g")) == ("finished", "committed")


def test_a_released_group_is_sampled_again_only_if_it_is_still_there(outside: Make) -> None:
    out = outside().report("g", "finished", 0.0, 1.0).report("h", "finished", 0.0, 1.0)
    batch = out.feed.sample_now(2)
    out.remove("g")
    out.feed.release(batch.batch)

    assert (out.phase("h"), out.evicted()) == ("finished", {"g": ("damaged",)})


# Waiting while listings come in ----------------------------------------------------------------------------


def test_one_that_asked_is_answered_by_a_later_listing(outside: Make) -> None:
    out = outside().report("a", "finished", 0.0, 1.0).report("b", "running")
    waiter = out.feed.ask(2, weight_version=3)
    assert out.feed.answer(waiter) is None
    assert out.feed.explain().blocked_by == "1 of 2 groups are sampleable"
    out.report("b", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter).group_ids == ["a", "b"]
    assert [
        type(event).__name__ for event in out.events(ev.BatchRequested, ev.BatchSampled, ev.BatchRequestCancelled)
    ] == [
        "BatchRequested",
        "BatchSampled",
    ]


def test_one_that_asked_is_answered_from_the_whole_listing(outside: Make) -> None:
    out = outside()
    waiter = out.feed.ask(1)
    out.listing = {name: Reported(status="finished", stamp=stamp, rows={(0, 0): ReportedRow(), (1, 0): ReportedRow()})
                   for name, stamp in (("new", 4), ("old", 1))}  # fmt: skip
    out.look()

    assert out.feed.answer(waiter).group_ids == ["old"]


def test_what_is_in_flight_in_the_same_listing_is_drained_too(outside: Make) -> None:
    rules = gs.Rules(mode="sync", filter_metric="reward", batch_size=1)
    out = outside(rules)
    waiter = out.feed.ask(1)
    out.listing["flying"] = Reported(status="running", stamp=0)
    out.listing = {"a": Reported(status="finished", stamp=0, rows={(s, 0): ReportedRow(metrics={"reward": s})
                                                                   for s in (0, 1)}), **out.listing}  # fmt: skip
    out.look()
    assert out.feed.answer(waiter) is None
    out.report("flying", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter).group_ids == ["a"]
    assert out.evicted() == {"flying": ("surplus",)}


def test_one_that_asked_and_can_t_be_served_is_told(outside: Make) -> None:
    out = outside(gs.Rules(filter_metric="reward")).report("a", "running")
    waiter = out.feed.ask(1)
    out.report("a", "finished", 0.0, 1.0, rows={(0, 0): ReportedRow(), (1, 0): ReportedRow()})

    with pytest.raises(gs.GroupstateError, match="no metric 'reward'"):
        out.feed.answer(waiter)


def test_one_that_asked_and_leaves_takes_nothing(outside: Make) -> None:
    out = outside().report("a", "running")
    waiter = out.feed.ask(1)
    out.feed.withdraw(waiter, "tired")
    out.report("a", "finished", 0.0, 1.0)

    assert out.feed.answer(waiter) is None
    assert out.feed.sample_now(1).group_ids == ["a"]


def test_what_changed_is_enough(outside: Make) -> None:
    out = outside().report("a", "running").report("b", "finished", 0.0, 1.0)
    out.listing["a"] = attrs.evolve(out.listing["b"])
    out.feed.observe_changes({"a": out.listing["a"]}, ["b"])

    assert (out.phase("a"), out.phase("b")) == ("finished", "evicted")
    out.feed.observe_changes({})
    assert out.feed.sampleable() == ["a"]


def test_a_validation_group_that_is_removed_is_in_nobody_s_way(outside: Make) -> None:
    out = outside().report("gone", "finished", 0.0, 1.0, partition="val").report("lost", "running", partition="val")
    waiter = out.feed.ask(2, partition="val")
    out.report("there", "finished", 0.0, 1.0, partition="val")
    assert out.feed.answer(waiter).group_ids == ["gone", "there"]
    out.feed.release(out.feed.answer(waiter))
    out.remove("gone", "lost")

    assert out.feed.sampleable(partition="val") == ["there"]
    assert out.feed.sample_now(1, partition="val").group_ids == ["there"]


def test_one_that_was_never_listed_may_be_named_as_removed(outside: Make) -> None:
    out = outside().report("a", "finished", 0.0, 1.0)
    out.feed.observe_changes({}, ["nobody"])

    assert out.feed.sampleable() == ["a"]


def test_what_could_be_sampled_at_a_version_to_come_is_told_without_publishing_it(outside: Make) -> None:
    rules = gs.Rules(lag_max=1, filter_metric="reward")
    out = outside(rules, version=2)
    for name, stamp in (("old", 1), ("new", 2), ("newer", 4)):
        out.report(name, "finished", 0.0, 1.0, stamp=stamp)
    out.report("flying", "running").report("held out", "finished", 1.0, 1.0, partition="val")

    assert out.feed.sampleable() == ["old", "new", "newer"]
    assert [out.feed.sampleable(weight_version=v) for v in (1, 3, 4, 6)] == [
        ["old", "new", "newer"],
        ["new", "newer"],
        ["newer"],
        [],
    ]
    assert out.feed.sampleable(weight_version=99, partition="val") == ["held out"]
    assert out.feed.book.weight_version == 2


def test_a_group_of_a_batch_that_came_back_stays_as_old_as_it_was(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=1)).report("a", "finished", 0.0, 1.0)
    out.feed.release(out.feed.sample_now(1))

    assert out.feed.sampleable(weight_version=9) == ["a"]


def test_the_group_that_holds_everybody_is_named(outside: Make) -> None:
    out = outside(gs.Rules(lag_max=1, on_stale="wait")).report("a", "running", stamp=0).report("b", "running", stamp=5)
    assert out.feed.held_by() is None
    out.feed.publish(1)

    assert (out.feed.held_by(), out.feed.held_by("val")) == ("a", None)
    assert outside(gs.Rules(lag_max=1)).report("a", "running", stamp=0).feed.held_by() is None
