"""Makes what was found smaller: features of a plan are dropped, and its run shortened, while the same breach stays.

Rule: a smaller plan counts only if a run of it ends in a breach of the same kind.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec

from groupstate.errors import BadSettings
from groupstate.simulate.plan import Part, Plan
from groupstate.simulate.simulator import Outcome, simulate

RUNS_MAX = 120
"""Runs that shrinking may take."""

PARTS = ("sessions", "source", "trainer", "storage", "user", "crash")


@attrs.frozen
class Shrunk:
    outcome: Outcome
    """Of the smallest plan."""
    runs: int
    """That it took."""


def shrunk(outcome: Outcome, *, runs_max: int = RUNS_MAX, run: Callable[[Plan], Outcome] = simulate) -> Shrunk:
    """The smallest run that is found with the same breach."""
    assert outcome.breach is not None
    best, tries = outcome, itertools.count(1)
    kind = outcome.breach.kind
    while True:
        for plan in smaller(best):
            number = next(tries)
            if number > runs_max:
                return Shrunk(best, number - 1)
            try:
                found = run(plan)
            except BadSettings:
                continue  # without this setting the other rules contradict each other
            if found.breach is not None and found.breach.kind == kind:
                best = found
                break
        else:
            return Shrunk(best, next(tries) - 1)


def smaller(outcome: Outcome) -> Iterator[Plan]:
    """Plans with one thing less, the largest things first."""
    plan, until_h = outcome.plan, outcome.virtual_s / 3600.0
    if until_h < 0.9 * plan.hours:
        # What came behind the breach had no part in it.
        yield plan.changed(hours=until_h * 1.02)
    for part in (0.25, 0.6):
        yield plan.changed(hours=plan.hours * part)
    for name in ("engine", "validation"):
        if getattr(plan, name) is not None:
            yield plan.changed(**{name: None})
    for name in PARTS:
        if name != "trainer" and getattr(plan, name) != (whole := getattr(Plan(), name)):
            yield plan.changed(**{name: whole})
    for name in (*PARTS, "engine", "validation"):
        part_of = getattr(plan, name)
        if part_of is not None:
            yield from (plan.changed(**{name: less}) for less in _with_less(part_of))
    for name in plan.rules:
        if name != "batch_size":
            yield plan.changed(rules={key: value for key, value in plan.rules.items() if key != name})
    for size in (1, 2):
        if size < plan.group_size:
            yield plan.changed(group_size=size)


def _with_less(part: Part) -> Iterator[Part]:
    """The same with one setting at its default."""
    plain: dict[str, Any] = msgspec.structs.asdict(type(part)())
    for name, value in msgspec.structs.asdict(part).items():
        if value != plain[name] and name != "batch_size":
            yield msgspec.structs.replace(part, **{name: plain[name]})
