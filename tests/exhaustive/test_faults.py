"""Faults that are planted on purpose: each is found, by the shortest history that shows it."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest

from groupstate.core import book, book_changes, evict, group, snapshot
from groupstate.core import events as ev
from groupstate.core.custom import Drop, Select
from groupstate.core.group import Group, Session
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.runtime import ledger, recovery
from groupstate.runtime.controller import Controller
from groupstate.testing.exhaustive import World, explore, sameness, search, shortest_story
from groupstate.testing.exhaustive.stage import Stage
from groupstate.testing.exhaustive.worlds import WORLDS

ONE = World(rules=Rules(lag_max=0), groups=1, sessions=1, at_most={"fail": 1, "publish": 1}, withdraws=False)


def found(world: World, rule: str, **options: Any) -> tuple[str, ...]:
    """The shortest story that breaks a rule."""
    return {breach.rule: breach.story for breach in explore(world, **options).breaches}[rule]


def test_a_group_that_ends_before_its_sessions_have(monkeypatch):
    monkeypatch.setattr(Group, "settled", property(lambda self: self.settled_count >= 1))

    story = found(attrs.evolve(ONE, sessions=2), "invariant 1")

    assert story == ("submit g1/2", "fail g1.0 error")


def test_an_eviction_that_earns_its_credit_twice(monkeypatch):
    once = evict.credit_of
    monkeypatch.setattr(evict, "credit_of", lambda *args, **options: 2 * once(*args, **options))

    assert found(ONE, "invariant 5") == ("submit g1/1", "fail g1.0 error")


def test_a_lag_bound_that_is_one_too_low(monkeypatch):
    monkeypatch.setattr(evict, "is_stale", lambda group, lag, rules: lag >= rules.lag_max)

    assert found(ONE, "invariant 6") == ("submit g1/1", "fail g1.0 error")


def test_a_lag_bound_that_is_one_too_high(monkeypatch):
    monkeypatch.setattr(evict, "is_stale", lambda group, lag, rules: lag > rules.lag_max + 1)

    story = found(ONE, "invariant 6")

    assert sorted(story) == ["finish g1.0 reward=1", "publish 1", "sample 1", "start g1.0", "submit g1/1"]


def plant(monkeypatch, mutate: Callable[[Group, Group], Group]) -> None:
    """Let a requeue make something else of a group."""
    right = group._HANDLERS[ev.GroupRequeued]

    def wrong(before: Group, event: Any, phase: Phase, seq: int, at_ns: int) -> Group:
        return mutate(before, right(before, event, phase, seq, at_ns))

    for phase in (Phase.PENDING, Phase.RUNNING, Phase.FAILURE):
        monkeypatch.setitem(group._STEPS[phase], ev.GroupRequeued, (wrong, Phase.PENDING))


def test_a_requeue_that_keeps_the_old_trajectories(monkeypatch):
    plant(monkeypatch, lambda before, after: msgspec.structs.replace(after, trajectory_count=before.trajectory_count))

    story = found(World(groups=1, at_most={"requeue": 1}), "counts")

    assert story == ("submit g1/2", "start g1.0", "finish g1.0 reward=1", "requeue g1")


def test_a_requeue_that_keeps_what_the_filter_compares(monkeypatch):
    plant(monkeypatch, lambda before, after: msgspec.structs.replace(after, session_ranges=before.session_ranges))

    story = found(World(groups=1, at_most={"requeue": 1}), "counts")

    assert story == ("submit g1/2", "start g1.0", "finish g1.0 reward=1", "requeue g1")


def test_a_requeue_that_keeps_a_session_that_had_finished(monkeypatch):
    def keep(before: Group, after: Group) -> Group:
        done = tuple(
            old if old.state == "finished" else new for old, new in zip(before.sessions, after.kept, strict=True)
        )
        count = sum(session.state == "finished" for session in done)
        return msgspec.structs.replace(
            after, kept=done, finished_count=count, settled_count=count, trajectory_count=count
        )

    plant(monkeypatch, keep)

    story = found(World(groups=1, at_most={"recover": 1}), "invariant 1")

    assert story[:3] == ("submit g1/2", "start g1.0", "finish g1.0 reward=1")
    assert story[3:] == ("recover", "start g1.1", "finish g1.1 reward=1")


def test_a_requeue_that_begins_no_new_attempt(monkeypatch):
    def again(before: Group, after: Group) -> Group:
        return msgspec.structs.replace(after, kept=tuple(Session(attempt=old.attempt) for old in before.sessions))

    plant(monkeypatch, again)

    story = found(World(groups=1, sessions=1, at_most={"requeue": 1}), "invariant 1")

    assert story == ("submit g1/1", "requeue g1", "start g1.0", "finish g1.0 reward=1")


def test_a_late_result_that_counts(monkeypatch):
    monkeypatch.setattr(ledger, "fence_reason", lambda group, session, attempt, result: None)

    assert found(ONE, "error") == (
        "submit g1/1",
        "start g1.0",
        "finish g1.0 reward=1",
        "finish g1.0 reward=1 attempt=1",
    )


def test_a_recovery_that_leaves_a_batch_out(monkeypatch):
    def forgetful(run: ledger.Ledger, **options: Any) -> None:
        batches, run.book.batches = run.book.batches, {}
        right(run, **options)
        run.book.batches = batches

    right = recovery.recover
    monkeypatch.setattr(recovery, "recover", forgetful)

    story = found(World(groups=1, sessions=1, at_most={"recover": 1}), "invariant 10")

    assert len(story) == 5
    assert story[-1] == "recover"


def test_an_end_that_is_written_apart_from_its_group_s_is_found_by_dying_between_them(monkeypatch):
    """A group whose last session has ended, and that hasn't: what the one commit for both is there for."""

    def in_two(self: ledger.Ledger, event: ev.AnyEvent) -> int:
        ended = isinstance(event, ev.SessionFailed)
        with monkeypatch.context() as patch:
            if ended:
                patch.setattr(ledger, "terminal_event", lambda group, **options: None)
            seq = right(self, event)
        group = self.book.groups.get(getattr(event, "group_id", ""))
        if ended and group is not None and group.settled:
            seq = right(self, ev.GroupFailed(group.group_id))
        return seq

    right = ledger.Ledger.record
    monkeypatch.setattr(ledger.Ledger, "record", in_two)

    story = found(attrs.evolve(ONE, at_most={"fail": 1, "recover": 1}), "invariant 1")

    assert story == ("submit g1/1", "fail g1.0 error", "recover keep=3")


def test_a_wait_that_nothing_will_end(monkeypatch):
    monkeypatch.setattr("groupstate.runtime.refusals.unservable", lambda *args, **options: None)

    story = found(attrs.evolve(ONE, source=0), "invariant 12")

    assert story == ("sample 1",)


def test_rules_that_leave_something_undone(monkeypatch):
    monkeypatch.setattr(Controller, "settle", lambda self: self._evict() or self.admission.forfeit())

    assert found(ONE, "unsettled") == ("submit g1/1", "fail g1.0 error")


def test_a_phase_that_the_table_doesn_t_lead_to(monkeypatch):
    wrong = (group._HANDLERS[ev.SessionFailed], Phase.RUNNING)
    monkeypatch.setitem(group._STEPS[Phase.PENDING], ev.SessionFailed, wrong)

    assert found(attrs.evolve(ONE, sessions=2), "table") == ("submit g1/2", "fail g1.0 error")


def test_a_replay_that_leads_elsewhere(monkeypatch):
    right = book_changes.CHANGES[ev.WeightsPublished]

    def published(self: book.Book, event: ev.WeightsPublished, seq: int, at_ns: int) -> None:
        right(self, event, seq, at_ns)
        self.source_position += self.notes_released

    monkeypatch.setitem(book_changes.CHANGES, ev.WeightsPublished, published)

    assert found(attrs.evolve(ONE, groups=0), "replay") == ("publish 1",)


def test_a_snapshot_that_forgets(monkeypatch):
    right = snapshot.restore

    def forgetful(taken: snapshot.Capture) -> book.Book:
        again = right(taken)
        again.requests.clear()
        return again

    monkeypatch.setattr("groupstate.testing.exhaustive.stage.restore", forgetful)

    assert found(ONE, "snapshot") == ("sample 1",)


def test_a_late_result_that_does_something_beside_being_fenced(monkeypatch):
    right = ledger.Ledger._fence

    def fence(self: ledger.Ledger, *args: Any) -> None:
        right(self, *args)
        self.record(ev.WeightsPublished(self.book.weight_version + 1, self.book.lineage))

    monkeypatch.setattr(ledger.Ledger, "_fence", fence)

    assert found(ONE, "late")[-1].endswith("attempt=1")


def test_a_selection_of_ones_own_that_can_t_be_followed():
    story = found(attrs.evolve(ONE, groups=2, at_most={}), "selection", selection=too_many)

    assert story[-1] == "sample 1"
    assert sum(line.startswith("finish") for line in story) == 2


def test_a_selection_of_ones_own_may_be_named_by_the_rules():
    named = Rules(selection=f"{__name__}:too_many")
    two = attrs.evolve(ONE, groups=2, at_most={})

    stories = {
        found(attrs.evolve(two, rules=named), "selection"),
        found(two, "selection", rules=named),
        found(two, "selection", selection=too_many),
    }

    assert len(stories) == 1
    with pytest.raises(BadSettings, match="has no 'too_mny'; did you mean 'too_many'"):
        explore(attrs.evolve(two, rules=Rules(selection=f"{__name__}:too_mny")))


def too_many(book, rules, request):
    return [Select([group.group_id for group in book.ready()])] if book.ready_count() else []


def test_a_selection_may_be_a_partial_function():
    def oldest(count, book, rules, request):
        ready = [group.group_id for group in book.ready()]
        return [Select(ready[:count])] if len(ready) >= count else []

    assert explore(ONE, selection=functools.partial(oldest, 1)).breaches == ()


def test_whoever_waits_for_what_the_world_still_brings_is_no_fault():
    def two_to_choose_from(book, rules, request):
        ready = [group.group_id for group in book.ready()]
        return [Select(ready[:1])] if len(ready) >= 2 else []

    world = attrs.evolve(ONE, groups=2, at_most={}, withdraws=False, late=False)
    story = found(world, "for ever", selection=two_to_choose_from)

    assert sum(line.startswith("submit") for line in story) == 2
    assert explore(attrs.evolve(world, patient=True), selection=two_to_choose_from).breaches == ()


def test_a_check_of_ones_own_on_every_state():
    """A rule that drops what it is shown lets a sampler wait while groups come and go."""

    def drop_failures(book, rules, request):
        ready = [group.group_id for group in book.ready()]
        return [Drop(ready[0], message="not to my taste")] if ready else []

    def serves(stage: Stage) -> str | None:
        dropped = [event for event in stage.events(ev.GroupEvicted) if "custom" in event.reasons]
        return f"{dropped[0].group_id} was dropped" if dropped else None

    story = found(ONE, "serves", selection=drop_failures, checks=[serves])

    assert sorted(story) == ["finish g1.0 reward=1", "sample 1", "start g1.0", "submit g1/1"]


def test_the_story_of_a_fault_fails_when_it_is_told_again(monkeypatch):
    once = evict.credit_of
    monkeypatch.setattr(evict, "credit_of", lambda *args, **options: 2 * once(*args, **options))
    breach = explore(ONE).breaches[0]

    assert breach.rule == "invariant 5"
    assert ONE.told(*breach.story).events(ev.GroupEvicted)[0].credit == 2


# What is taken for the same ------------------------------------------------------------------------------


def test_a_key_that_leaves_something_out_is_found(monkeypatch):
    right = sameness._session
    monkeypatch.setattr(sameness, "_session", lambda group, session: (right(group, session)[0],))
    world = attrs.evolve(WORLDS["retries"], at_most={"fail": 2})

    assert [breach.rule for breach in explore(world, check_keys=True).breaches] == ["key"]


def test_the_key_leaves_nothing_out_that_matters_here():
    world = World(rules=Rules(lag_max=0), groups=1, sessions=1, at_most={"fail": 1, "publish": 1, "recover": 1})

    assert explore(world, check_keys=True).breaches == ()


def test_groups_and_sessions_are_told_apart_by_what_happened_to_them_and_not_by_name():
    two = World(sessions=2, late=False, withdraws=False, groups=1)

    states = {sameness.key_of(stage) for stage in (_after(two, "start g1.0"), _after(two, "start g1.1"))}

    assert len(states) == 1


def _after(world: World, *lines: str) -> Stage:
    stage = Stage(world)
    for line in ("submit g1/2", *lines):
        stage.go(line)
    return stage


# Asking for a state --------------------------------------------------------------------------------------


def test_the_shortest_story_to_a_state():
    story = shortest_story(WORLDS["drop"], lambda stage: stage.book.totals["evicted/stale"] == 1)

    assert story is not None
    assert len(story) == 6
    assert story.count("publish 1") == 1


def test_no_story_leads_to_a_state_that_can_t_be():
    assert shortest_story(ONE, lambda stage: stage.book.totals["evicted/surplus"] == 1) is None


def test_the_first_state_may_be_the_one_that_is_asked_for():
    assert shortest_story(ONE, lambda stage: not stage.book.groups) == ()


def test_a_search_that_is_ended_early_says_so():
    assert not explore(ONE, states_max=3).complete


def test_rules_can_be_given_in_place_of_the_world_s():
    kept = explore(ONE, rules=Rules(lag_max=1))

    assert not [name for name in kept.outcomes if "stale" in name]
    assert [name for name in explore(ONE).outcomes if "stale" in name]


def test_a_breach_tells_its_story_line_by_line():
    breach = search.Breach("invariant 5", "twice", ("submit g1/1", "fail g1.0 error"))

    assert str(breach) == "invariant 5: twice\n  submit g1/1\n  fail g1.0 error"
