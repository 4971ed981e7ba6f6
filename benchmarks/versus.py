"""One decision by the rules beside one by a rescan of all groups, on the same run.

The end of a group's last session has been recorded. The rescan is measured until it has found what follows, and does
none of it. The rules are measured until all that follows is recorded, drawing and submitting the refill included: they
are asked to do more.
"""

from benchmarks.held import Held, Rewards, flat, held, varied
from benchmarks.measure import Measurement, Meter, Result, frozen_heap, interleaved, lines_run, ratio_of_pairs, seconds
from benchmarks.rescan import Decision, rescan
from groupstate.core import evict, select, supply
from groupstate.core.book import Book
from groupstate.core.phases import TERMINAL
from groupstate.core.rules import Rules

RATIO_MIN = 100.0


async def measure(*, count: int = 20_000, repetitions: int = 31) -> list[Result]:
    """
    Args:
        count: groups that the run holds.
    """
    run = held(count)
    results = []
    with frozen_heap():
        for name, rewards in (("kept", varied), ("evicted and refilled", flat)):
            variants = {"by the rules": by_rules(run, rewards), "by a rescan": by_rescan(run, rewards)}
            for warm_up in variants.values():
                await warm_up()
            spreads = await interleaved(variants, repetitions)
            ratio, text = ratio_of_pairs(*spreads.values())
            lines = [await by_rules(run, rewards, lines_run)(), await by_rescan(run, rewards, lines_run)()]
            notes = [text, f"lines of Python run: {lines[0]:,.0f} and {lines[1]:,.0f}"]
            title = f"rules beside a rescan, {count:,} held, the group is {name}"
            results.append(Result(title, spreads, ratio, RATIO_MIN, "times", notes, least=True))
    return results


def by_rules(run: Held, rewards: Rewards, meter: Meter = seconds) -> Measurement:
    async def measured() -> float:
        (name,) = _ended(run, rewards)
        spent = meter(run.ledger.settle)
        _clear_up(run, name, rewards)
        return spent

    return measured


def by_rescan(run: Held, rewards: Rewards, meter: Meter = seconds) -> Measurement:
    async def measured() -> float:
        (name,) = _ended(run, rewards)
        found: list[Decision] = []
        spent = meter(lambda: found.append(rescan(run.ledger.book, run.ledger.rules)))
        run.ledger.settle()
        assert {left.group_id for left in found[0].evictions} == {name} - run.ledger.book.groups.keys()
        _clear_up(run, name, rewards)
        return spent

    return measured


def _ended(run: Held, rewards: Rewards) -> list[str]:
    names = run.submitted(1)
    for end in run.all_but_last(names, rewards):
        run.ledger.record(end)
    return names


def _clear_up(run: Held, name: str, rewards: Rewards) -> None:
    refills = run.refilled()
    assert (name in run.ledger.book.groups, len(refills)) == ((False, 1) if rewards is flat else (True, 0))
    run.leave(refills or [name])


def by_indexes(book: Book, rules: Rules, damaged: dict[str, str] | None = None) -> Decision:
    """What the incremental rules makes of a book, in the shape of a rescan's answer."""
    waiting = book.waiting()
    demand = waiting[0].size if waiting else None
    candidates = [group for group in book.groups.values() if group.phase in TERMINAL]
    judgement = evict.judged(book, rules, candidates, demand=demand, damaged=damaged or {})
    picks = []
    for partition in book.partitions():
        for request in book.waiting(partition)[:1]:
            if select.why_not(book, rules, request) is None:
                chosen = select.selected(book, rules, request)
                rest = frozenset(left.group_id for left in select.surplus(book, rules, request, chosen))
                picks.append((request.request, tuple(group.group_id for group in chosen), rest))
    drawn = max(supply.shortage(book, rules), supply.admissible(book, rules))
    return Decision(
        frozenset(judgement.evictions),
        frozenset(judgement.missing),
        frozenset(judgement.kept),
        tuple(group.group_id for group in evict.newly_stale(book, rules)),
        supply.forfeits(book, rules),
        supply.refills_now(book, rules),
        drawn if select.held_by_stale(book, rules) is None else 0,
        tuple(picks),
    )
