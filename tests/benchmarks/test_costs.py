"""What the rules cost doesn't grow with what is held: the benchmarks' claims at small sizes.

Counted in lines of Python that are run, not in seconds, so that it holds on a busy machine as well.
"""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import decision, publish, versus
from benchmarks.held import Held, flat, held, varied
from benchmarks.measure import Measurement, Meter, Result, Spread, lines_run, seconds
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.runtime import admission, controller

RATIO_MAX = 1.1
"""A sorted list splits now and then, which takes some lines more."""

FEW, MANY = 20, 1_000


@pytest.fixture(scope="module")
def runs() -> tuple[Held, Held]:
    return held(FEW), held(MANY)


async def ratio(few: Measurement, many: Measurement) -> float:
    return statistics.median([await many() for _ in range(3)]) / statistics.median([await few() for _ in range(3)])


Variant = Callable[[Held, int, Meter], Measurement]


@pytest.mark.parametrize(
    ("variant", "count"),
    [(decision.kept, 3), (decision.evicted, 3), (publish.published, 0), (publish.published, 5)],
    ids=["kept", "evicted and refilled", "published", "published, some stale"],
)
async def test_the_cost_does_not_grow_with_what_is_held(runs: Any, variant: Variant, count: int) -> None:
    few, many = (variant(run, count, lines_run) for run in runs)

    assert await ratio(few, many) <= RATIO_MAX


async def test_the_cost_of_a_version_is_in_proportion_to_what_turns_stale(runs: Any) -> None:
    nothing, few, many = (publish.published(runs[1], stale, lines_run) for stale in (0, 10, 100))
    fixed = await nothing()

    assert (await many() - fixed) / (await few() - fixed) == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("rewards", [varied, flat], ids=["kept", "evicted and refilled"])
async def test_the_rules_do_a_small_part_of_the_work_of_a_rescan(runs: Any, rewards: Any) -> None:
    """The work of a rescan goes with what is held, so the bound of the benchmark is scaled to the groups held here."""
    by_rules, by_rescan = versus.by_rules(runs[1], rewards, lines_run), versus.by_rescan(runs[1], rewards, lines_run)

    assert await ratio(by_rules, by_rescan) >= versus.RATIO_MIN * MANY / 20_000
    assert await ratio(versus.by_rescan(runs[0], rewards, lines_run), by_rescan) > 10


@pytest.mark.parametrize(
    ("where", "name", "variant", "count"),
    [
        (admission, "refills_now", decision.kept, 3),
        (admission, "forfeits", decision.evicted, 3),
        (controller, "newly_stale", publish.published, 0),
    ],
)
async def test_a_rule_that_looks_at_every_group_is_noticed(
    runs: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, variant: Variant, count: int
) -> None:
    rule = getattr(where, name)

    def slow(book: Book, rules: Rules) -> Any:
        for group in book.groups.values():
            assert group.phase is not Phase.COMMITTED
        return rule(book, rules)

    monkeypatch.setattr(where, name, slow)
    few, many = (variant(run, count, lines_run) for run in runs)

    assert await ratio(few, many) > RATIO_MAX


async def test_what_is_measured_has_happened(runs: Any) -> None:
    """Repetitions leave the run as it was, each event recorded."""
    for run in runs:
        book = run.ledger.book
        before = book.in_flight_count(), book.ready_count()
        evicted = book.totals["evicted/stale"]
        assert await publish.published(run, 7, seconds)() > 0
        assert await decision.kept(run, 2, seconds)() > 0
        assert book.totals["evicted/stale"] == evicted + 7
        assert (book.in_flight_count(), book.ready_count()) == before


@pytest.mark.parametrize(
    ("figure", "least", "met"), [(99, True, False), (100, True, True), (99, False, True), (101, False, False)]
)
def test_a_bound_is_the_most_or_the_least(figure: float, least: bool, met: bool) -> None:
    result = Result("it", {"one": Spread((1.0,))}, figure, 100, "times", least=least)

    assert result.met is met
    assert ("bound at least 100 times" if least else "bound 100 times") in str(result)
    assert ("NOT MET" in str(result)) is not met
