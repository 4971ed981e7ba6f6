"""What one decision costs, by how many groups are held.

A decision is what follows from the end of a group's last session: the end and the group's terminal event are recorded,
then the rules do all that there is to do. Either the group is kept, or it has zero variance and is evicted, and a
refill is drawn from the source and submitted. Everything before that end, and clearing up, isn't measured.
"""

from collections.abc import Callable, Mapping

from benchmarks.held import Held, Rewards, flat, held, varied
from benchmarks.measure import Measurement, Meter, Result, frozen_heap, interleaved, lines_run, ratio_of_pairs, seconds
from groupstate.core.book_changes import depart
from groupstate.core.phases import Phase

RATIO_MAX = 1.5


async def measure(
    *, small: int = 1_000, large: int = 100_000, decisions: int = 100, repetitions: int = 31
) -> list[Result]:
    """
    Args:
        small: groups that the one run holds.
        large: the other.
        decisions: made in each repetition, one after the other.
    """
    runs = {f"{count:,} held": held(count) for count in (small, large)}
    with frozen_heap():
        return [
            await _compared("a decision, the group is kept", runs, kept, decisions, repetitions),
            await _compared("a decision, the group is evicted and refilled", runs, evicted, decisions, repetitions),
        ]


async def measure_left(
    *, count: int = 1_000, left: int = 1_350_000, decisions: int = 100, repetitions: int = 31
) -> list[Result]:
    """The same by how many groups the run has seen go, whose ids are refused.

    Args:
        count: groups that both runs hold.
        left: groups that have left the one; of so many, the book has forgotten some again.
    """
    runs = {name: held(count) for name in ("none has left", f"{left:,} have left")}
    for number in range(left):
        depart(runs[f"{left:,} have left"].ledger.book, f"left{number}", Phase.COMMITTED)
    with frozen_heap():
        title = f"a decision, {count:,} held, the group is evicted and refilled"
        return [await _compared(title, runs, evicted, decisions, repetitions)]


async def _compared(
    title: str,
    runs: Mapping[str, Held],
    variant: Callable[[Held, int, Meter], Measurement],
    decisions: int,
    repetitions: int,
) -> Result:
    variants = {name: variant(run, decisions, seconds) for name, run in runs.items()}
    for warm_up in variants.values():
        await warm_up()
    spreads = await interleaved(variants, repetitions)
    ratio, text = ratio_of_pairs(*spreads.values())
    lines = [await variant(run, 1, lines_run)() for run in runs.values()]
    notes = [text, f"lines of Python run: {lines[0]:,.0f} and {lines[1]:,.0f}"]
    return Result(title, spreads, ratio, RATIO_MAX, "times", notes)


def kept(run: Held, decisions: int, meter: Meter = seconds) -> Measurement:
    """Each of the groups is sampleable after its decision."""

    async def measured() -> float:
        names = run.submitted(decisions)
        spent = _decided(run, names, varied, meter)
        assert run.ledger.book.group(names[-1]).terminal is not None
        run.leave(names)
        return spent / decisions

    return measured


def evicted(run: Held, decisions: int, meter: Meter = seconds) -> Measurement:
    """Each of the groups is evicted and refilled; the refills are the groups of the next repetition."""
    names = run.submitted(decisions)

    async def measured() -> float:
        nonlocal names
        spent = _decided(run, names, flat, meter)
        names = run.refilled()
        assert len(names) == decisions
        return spent / decisions

    return measured


def _decided(run: Held, names: list[str], rewards: Rewards, meter: Meter) -> float:
    ends = run.all_but_last(names, rewards)
    ledger = run.ledger

    def decide() -> None:
        for end in ends:
            ledger.record(end)
            ledger.settle()

    return meter(decide)
