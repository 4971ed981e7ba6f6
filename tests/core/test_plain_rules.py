"""The incremental rules against a plain model of them, on every decision of random runs.

Agreement means something only where something was decided, so the last test counts what the random runs hold.
"""

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from groupstate.core import events as ev
from groupstate.core.rules import Rules, recorded_rules
from groupstate.runtime.ledger import DOOMED, SPARE
from groupstate.testing.plain.settings import SETTINGS
from tests.core.plain_scenes import STEP_MAX, played

pytestmark = pytest.mark.slow

SETTING_NUMBERS = st.lists(st.integers(0, 2**16 - 1), min_size=SETTINGS, max_size=SETTINGS)


def step_numbers(most: int) -> st.SearchStrategy[list[int]]:
    """Lists of every length alike; a plain `lists` would be short almost always."""
    return st.integers(1, most).flatmap(lambda n: st.lists(st.integers(0, STEP_MAX), min_size=n, max_size=n))


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of runs have thousands of things to warn of."""
    logger = logging.getLogger("groupstate")
    before = logger.level
    # By its method: what is enabled is remembered, and an attribute that is set leaves later tests without warnings.
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


A_DAMAGED_GROUP_BEFORE_THE_STREAKS_END = [0] * 25 + [3] + [0] * 21 + [2], [0, 0, 17, 17, 70, 0, 47, 52960]


@settings(deadline=None, max_examples=300)
@example(*A_DAMAGED_GROUP_BEFORE_THE_STREAKS_END)
@given(SETTING_NUMBERS, step_numbers(80))
def test_each_decision_is_the_plain_models(setting_numbers: list[int], steps: list[int]) -> None:
    assume(played(setting_numbers, steps))


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=30_000)
@given(SETTING_NUMBERS, step_numbers(100))
def test_each_decision_is_the_plain_models_in_many_long_runs(setting_numbers: list[int], steps: list[int]) -> None:
    assume(played(setting_numbers, steps))


RUNS = 400
"""Random runs whose decisions are counted; they are compared like all others."""

LEAST = 5
"""Times that each of these happens in them."""

DECISIONS = {
    *(f"async evicts for {reason}" for reason in ("stale", "zero_variance", "failed", "empty", "too_few", "cancelled")),
    *(
        f"sync evicts for {reason}"
        for reason in ("zero_variance", "failed", "empty", "too_few", "cancelled", "surplus")
    ),
    *(f"sync credit {credit}" for credit in (0, 1, 2)),
    "evicts for several reasons",
    "evicts as damaged",
    *(f"forfeits: {why}" for why in ("batch full", "source exhausted", "admission", "no source", "source failed")),
    *(f"submits by {cause}" for cause in ("submit", "admission", "refill")),
    *(f"{rule} admits" for rule in ("PerBatch", "Slots", "Capacity")),
    *(f"{rule} refills" for rule in ("PerBatch", "Slots", "Capacity")),
    *(f"refuses with {error}" for error in ("EvictionStreak", "RefillLimitExceeded", "NotEnoughGroups")),
    "refuses with MissingMetric",
    "refuses with SourceFailed",
    "holds admission",
    "lets admission go on",
    "ends a doomed group",
    "ends spare sessions",
    "tries a session again",
    "times out",
    "starts a group over",
    "finishes a group in part",
    "says that a dataset starves",
    *(f"samples by {selection}" for selection in ("oldest_first", "freshest_first", "exact_version")),
    "samples validation",
    "samples after a drain",
    "samples under wait",
    "samples a batch with lag",
    "samples for one of several who wait",
    *(f"a batch comes back: {why}" for why in ("released", "cancelled", "damaged", "recovery")),
}


def decisions(records: list[ev.Record]) -> Iterator[str]:
    """What was decided in a run, in words."""
    assert isinstance(records[0].event, ev.RunStarted)
    rules = recorded_rules(records[0].event.rules)
    waiting: Counter[str] = Counter()
    for before, record in zip([None, *records], records, strict=False):
        event = record.event
        if isinstance(event, ev.GroupEvicted):
            yield from _eviction(rules, event)
        elif isinstance(event, ev.GroupSubmitted):
            yield f"submits by {event.cause}"
            if event.cause != "submit":
                yield f"{type(rules.admission_rule).__name__} {'admits' if event.cause == 'admission' else 'refills'}"
        elif isinstance(event, ev.BatchRequested):
            waiting[event.partition] += 1
        elif isinstance(event, ev.BatchRequestCancelled):
            waiting.clear()
            yield f"refuses with {event.reason}"
        elif isinstance(event, ev.BatchSampled):
            yield from _batch(rules, event, waiting[event.partition])
            drained = before is not None and not isinstance(before.event, ev.BatchRequested)
            if drained and event.partition == "train" and rules.drains:
                yield "samples after a drain"
            waiting[event.partition] -= 1
        else:
            yield from _other(event)


def _eviction(rules: Rules, event: ev.GroupEvicted) -> Iterator[str]:
    yield from (f"{rules.mode} evicts for {reason}" for reason in event.reasons)
    if len(event.reasons) > 1:
        yield "evicts for several reasons"
    if "damaged" in event.reasons:
        yield "evicts as damaged"
    if rules.mode == "sync":
        yield f"sync credit {event.credit}"


def _batch(rules: Rules, event: ev.BatchSampled, waiting: int) -> Iterator[str]:
    if event.partition != "train":
        yield "samples validation"
        return
    yield f"samples by {rules.selection}"
    if rules.waits_for_stale:
        yield "samples under wait"
    if any(event.lags):
        yield "samples a batch with lag"
    if waiting > 1:
        yield "samples for one of several who wait"


def _other(event: ev.AnyEvent) -> Iterator[str]:
    if isinstance(event, ev.RefillForfeited):
        yield f"forfeits: {event.reason}"
    elif isinstance(event, ev.AdmissionHeld):
        yield "holds admission" if event.reason else "lets admission go on"
    elif isinstance(event, ev.SessionFailed):
        yield from _failure(event)
    elif isinstance(event, ev.GroupRequeued) and event.by_rule:
        yield "starts a group over"
    elif isinstance(event, ev.GroupFinished) and event.partial:
        yield "finishes a group in part"
    elif isinstance(event, ev.DatasetStarved):
        yield "says that a dataset starves"
    elif isinstance(event, ev.BatchReturned):
        yield f"a batch comes back: {event.reason}"


def _failure(event: ev.SessionFailed) -> Iterator[str]:
    if event.retry_in_s is not None:
        yield "tries a session again"
    if event.failure == "timeout":
        yield "times out"
    if event.message == DOOMED.message:
        yield "ends a doomed group"
    elif event.message == SPARE.message:
        yield "ends spare sessions"


def test_the_random_runs_hold_each_kind_of_decision() -> None:
    seen: Counter[str] = Counter()
    for seed in range(RUNS):
        numbers = random.Random(seed)
        setting_numbers = [numbers.randrange(2**16) for _ in range(SETTINGS)]
        steps = [numbers.randint(0, STEP_MAX) for _ in range(60)]
        if records := played(setting_numbers, steps):
            seen.update(decisions(records))

    assert {name: seen[name] for name in DECISIONS if seen[name] < LEAST} == {}
