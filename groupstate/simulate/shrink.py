"""Makes what was found smaller: features of a plan are dropped, and its run shortened, while the same breach stays.

Rule: a smaller plan counts only if a run of it ends in a breach of the same kind.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec

from groupstate.errors import BadSettings
from groupstate.simulate.plan import Part, Plan
from groupstate.simulate.simulator import Outcome, simulate

RUNS_MAX = 120
"""Runs that shrinking may take."""

HOURS_MIN = 0.002
"""Below this a run isn't made shorter."""

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
    best, kind, runs = outcome, outcome.breach.kind, 0
    useless: set[str] = set()
    """What could not be left out."""
    while True:
        name, plan = next(((name, plan) for name, plan in smaller(best) if name not in useless), ("", None))
        if plan is None or runs >= runs_max:
            return Shrunk(best, runs)
        try:
            found = run(plan)
        except BadSettings:
            found = None  # without this setting the other rules contradict each other
        else:
            runs += 1
        if found is not None and found.breach is not None and found.breach.kind == kind:
            best = found
        else:
            useless.add(name)


def smaller(outcome: Outcome) -> Iterator[tuple[str, Plan]]:
    """Plans with one thing less and what that is, the largest things first."""
    plan, until_h = outcome.plan, outcome.virtual_s / 3600.0
    if until_h < 0.9 * plan.hours:
        # What came behind the breach had no part in it.
        yield "the rest", plan.changed(hours=until_h * 1.02)
    if plan.hours > HOURS_MIN:
        for part in (0.25, 0.6):
            yield f"hours {part}", plan.changed(hours=plan.hours * part)
    for name in ("engine", "validation"):
        if getattr(plan, name) is not None:
            yield name, plan.changed(**{name: None})
    for name in PARTS:
        if name != "trainer" and getattr(plan, name) != (whole := getattr(Plan(), name)):
            yield name, plan.changed(**{name: whole})
    for name in (*PARTS, "engine", "validation"):
        part_of = getattr(plan, name)
        if part_of is not None:
            for setting, less in _with_less(part_of):
                yield f"{name}.{setting}", plan.changed(**{name: less})
    for name in plan.rules:
        if name != "batch_size":
            yield f"rules.{name}", plan.changed(rules={key: plan.rules[key] for key in plan.rules if key != name})
    for size in (1, 2):
        if size < plan.group_size:
            yield f"group_size {size}", plan.changed(group_size=size)


def _with_less(part: Part) -> Iterator[tuple[str, Part]]:
    """The same with one setting at its default."""
    plain: dict[str, Any] = msgspec.structs.asdict(type(part)())
    for name, value in msgspec.structs.asdict(part).items():
        if value != plain[name] and name != "batch_size":
            yield name, msgspec.structs.replace(part, **{name: plain[name]})
