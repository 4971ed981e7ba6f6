"""What the strategies draw is valid, holds what there is, and shrinks to something that can be read."""

from collections import Counter

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from groupstate import Rules
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.log.memory import MemoryLog
from groupstate.testing import play, strategies
from groupstate.testing.strategies import History, Outcome

FIXED = settings(max_examples=200, derandomize=True, database=None)


@given(strategies.events())
def test_an_event_of_any_kind_can_be_kept(event: ev.AnyEvent) -> None:
    log = MemoryLog()  # which gives back what a file would give back
    log.post([ev.Record(1, 1, event)])

    assert list(log.read()) == [ev.Record(1, 1, event)]


@pytest.mark.parametrize("kind", ev.EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_can_be_drawn(kind: type[ev.Event]) -> None:
    assert isinstance(find(strategies.events(kind), lambda event: True, settings=FIXED), kind)


@given(strategies.histories(rules=strategies.rules()))
def test_a_history_can_be_played_as_it_is(history: History) -> None:
    """It was made by the model alone, so the real side has to take each line without an error."""
    story = history.play(replays=False)

    assert violations(story.log.read()) == []


@settings(max_examples=20)
@given(strategies.histories(moves_max=8))
def test_a_history_is_shown_as_the_call_that_plays_it(history: History) -> None:
    again = eval(repr(history), {"play": play, "Rules": Rules})

    assert list(again.log.read()) == list(history.play().log.read())


@given(strategies.logs(rules=Rules(filter_metric="reward", lag_max=1)))
def test_a_log_can_be_true(records: list[ev.Record]) -> None:
    assert violations(records) == []


def test_histories_hold_what_there_is() -> None:
    seen: Counter[str] = Counter()

    @FIXED
    @given(strategies.histories(rules=Rules(filter_metric="reward", lag_max=1), moves_min=20, moves_max=30))
    def play_one(history: History) -> None:
        story = history.play(replays=False)
        seen.update({type(record.event).__name__ for record in story.log.read()})
        seen.update({event.reasons[0] for event in story.events(ev.GroupEvicted)})

    play_one()

    wanted = {"BatchSampled", "BatchCommitted", "BatchReturned", "RunRecovered", "ResultFenced", "SourceExhausted"}
    wanted |= {"RefillForfeited", "GroupRequeued", "stale", "zero_variance", "failed", "empty", "cancelled"}
    assert {name for name in wanted if seen[name] < 5} == set()


@pytest.mark.parametrize(
    "reason",
    [pytest.param("stale", marks=pytest.mark.long), "zero_variance", pytest.param("empty", marks=pytest.mark.long)],
)
def test_a_history_shrinks_to_a_short_story(reason: str) -> None:
    rules = Rules(filter_metric="reward", lag_max=1)

    def evicts(history: History) -> bool:
        return any(reason in event.reasons for event in history.play(replays=False).events(ev.GroupEvicted))

    shortest = find(strategies.histories(rules=rules), evicts, settings=FIXED)

    assert len(shortest.lines) <= 7, shortest


@given(strategies.rules(mode="sync", batch_size=3))
def test_rules_keep_what_is_given(rules: Rules) -> None:
    assert (rules.mode, rules.batch_size) == ("sync", 3)


@given(strategies.outcomes(metric="acc"))
def test_an_outcome_is_a_line_of_the_notation(outcome: Outcome) -> None:
    story = play("submit a/1", "start a", outcome.of("a.0"))

    assert story.phase("a") in (["finished"] if outcome.finishes and "nothing" not in outcome.text else ["failure"])


SCRIPTS = (["a1", "a2", "a3"], ["b1", "b2"], ["c1"])


@given(strategies.interleavings(*SCRIPTS))
def test_an_interleaving_keeps_the_order_of_each_script(steps: list[str]) -> None:
    assert sorted(steps) == sorted(step for script in SCRIPTS for step in script)
    for script in SCRIPTS:
        assert [step for step in steps if step in script] == script


def test_the_plainest_interleaving_is_one_script_after_the_other() -> None:
    plain = find(strategies.interleavings(*SCRIPTS), lambda steps: True, settings=FIXED)

    assert plain == ["a1", "a2", "a3", "b1", "b2", "c1"]


def test_every_interleaving_comes_up() -> None:
    seen = set()

    @settings(FIXED, max_examples=200)
    @given(strategies.interleavings(["a", "b"], ["c", "d"]))
    def look(steps: list[str]) -> None:
        seen.add("".join(steps))

    look()

    assert seen == {"abcd", "acbd", "acdb", "cabd", "cadb", "cdab"}


@given(st.integers(0, 6).flatmap(strategies.spans))
def test_spans_cover_all_tokens_in_order(spans: tuple[ev.VersionSpan, ...]) -> None:
    covered = [at for span in spans for at in range(span.start, span.stop)]

    assert covered == list(range(len(covered)))
