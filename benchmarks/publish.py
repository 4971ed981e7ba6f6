"""What a new weight version costs, by how many groups it makes stale and how many are held.

Measured is `publish()` with all that follows from it: the version is recorded, each stale group is evicted, and a
refill is drawn from the source and submitted for each. The groups that turn stale stand at the lag bound before.
"""

from benchmarks.held import LAG_MAX, Held, held, varied
from benchmarks.measure import (
    Measurement,
    Meter,
    Result,
    Spread,
    frozen_heap,
    interleaved,
    lines_run,
    ratio_of_pairs,
    seconds,
)

HELD_RATIO_MAX = 1.5
"""Of a publication's cost, by what is held beside what turns stale."""
STALE_RATIO_MAX = 1.5
"""Of the cost per stale group, by how many turn stale: a cost that is in proportion has 1."""


async def measure(
    *,
    small: int = 1_000,
    large: int = 100_000,
    few: int = 100,
    many: int = 1_000,
    versions: int = 100,
    repetitions: int = 21,
) -> list[Result]:
    """
    Args:
        small: groups that the one run holds.
        large: the other.
        few: groups that turn stale at one publication.
        many: at another.
        versions: published in each repetition where nothing turns stale, one after the other.
    """
    runs = [held(small), held(large)]
    beside = [f"{small:,} held", f"{large:,} held"]
    results = []
    with frozen_heap():
        fresh = [published(run, 0, times=versions) for run in runs]
        spreads = await _measured(dict(zip(beside, fresh, strict=True)), repetitions)
        lines = [await published(run, 0, lines_run)() for run in runs]
        name = "a published version, nothing turns stale"
        results.append(
            _result(name, spreads, HELD_RATIO_MAX, f"lines of Python run: {lines[0]:,.0f} and {lines[1]:,.0f}")
        )

        stale = [published(run, few) for run in runs]
        spreads = await _measured(dict(zip(beside, stale, strict=True)), repetitions)
        results.append(_result(f"a published version, {few:,} groups turn stale", spreads, HELD_RATIO_MAX))

        counts = {
            f"{many // few} times {few:,} stale, each": _each(published(runs[1], few), few, many // few),
            f"{many:,} stale, each": _each(published(runs[1], many), many),
        }
        spreads = await _measured(counts, repetitions)
        name = f"a published version per stale group, {large:,} held"
        results.append(_result(name, spreads, STALE_RATIO_MAX))
    return results


def published(run: Held, stale: int, meter: Meter = seconds, *, times: int = 1) -> Measurement:
    """One publication at which `stale` groups are evicted and refilled.

    Args:
        times: publications one after the other, where nothing turns stale.
    """
    assert times == 1 or not stale
    ledger = run.ledger

    def publish() -> None:
        for _ in range(times):
            ledger.publish(ledger.book.weight_version + 1)

    async def measured() -> float:
        names = run.submitted(stale, lag=LAG_MAX)
        for end in run.all_but_last(names, varied):
            ledger.record(end)
        ledger.settle()
        spent = meter(publish)
        refills = run.refilled()
        assert len(refills) == stale
        assert not any(name in ledger.book.groups for name in names)
        run.leave(refills)
        return spent / times

    return measured


def _each(measurement: Measurement, count: int, times: int = 1) -> Measurement:
    """Per stale group; of several publications, so that each variant is exposed to other work for as long."""

    async def measured() -> float:
        return sum([await measurement() for _ in range(times)]) / (count * times)

    return measured


async def _measured(variants: dict[str, Measurement], repetitions: int) -> dict[str, Spread]:
    for variant in variants.values():
        await variant()
    return await interleaved(variants, repetitions)


def _result(name: str, spreads: dict[str, Spread], bound: float, *notes: str) -> Result:
    ratio, text = ratio_of_pairs(*spreads.values())
    return Result(name, spreads, ratio, bound, "times", [text, *notes])
