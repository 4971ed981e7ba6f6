"""Why a world doesn't go through a cell of the table of transitions.

Rule: each reason is a condition on the world that is told in words. A cell that a world could go through by its
condition and doesn't has no reason: then the cell is dead, or the condition is wrong.
"""

from collections.abc import Callable
from typing import Final

from groupstate.core import events as ev
from groupstate.core.phases import TRANSITIONS, Phase
from groupstate.testing.exhaustive.stage import Cell
from groupstate.testing.exhaustive.world import World

CELLS: Final[tuple[Cell, ...]] = tuple((phase, kind) for phase, cells in TRANSITIONS.items() for kind in cells)
"""Every cell of the table."""


def told(cell: Cell) -> str:
    """A cell in words."""
    phase, kind = cell
    return f"{'(none)' if phase is None else phase}: {kind.__name__}"


def why_missed(world: World, cell: Cell) -> str:
    """The reason for which a world can't go through a cell; empty if there is none."""
    can, reason = _NEEDS.get(cell, (_always, ""))
    return "" if can(world) else reason


def _always(world: World) -> bool:
    return True


def _may(world: World, verb: str) -> int:
    bound = world.bound(verb)
    return 10**6 if bound is None else bound


def _gives_up(world: World) -> bool:
    """A group is given up while it is in flight: by the user, or because it is doomed."""
    return bool(_may(world, "cancel")) or (
        world.rules.cancel_doomed and (_may(world, "publish") > 0 or _may(world, "fail") > 0)
    )


def _fails(world: World) -> bool:
    return bool(_may(world, "fail")) or _gives_up(world)


def _fails_unstarted(world: World) -> bool:
    """All sessions of a group fail before one has begun."""
    rules = world.rules
    trains = world.sessions + rules.oversample
    tries = (rules.attempts_max if all("retryable" in failure for failure in world.failures) else 1) * trains
    return _gives_up(world) or _may(world, "fail") >= tries


def _starts_over(world: World) -> bool:
    return bool(_may(world, "requeue") or _may(world, "recover"))


def _stays_failed(world: World) -> bool:
    """A failed group is not evicted at once."""
    return _fails(world) and (world.rules.mode == "sync" or world.validation > 0)


def _evicts_finished(world: World) -> bool:
    rules = world.rules
    stale = rules.drops_stale and _may(world, "publish") > (rules.lag_max or 0)
    back = "evict" in world.rewinds and _may(world, "recover") and _may(world, "mark")
    flat = rules.filter_metric is not None
    return bool(stale or back or flat or _may(world, "damage") or world.own_rule is not None)


def _samples_failed(world: World) -> bool:
    rules = world.rules
    if not _fails(world):
        return False
    if world.validation:
        return True
    in_part = world.sessions > 1 and rules.failure == "keep"
    return rules.mode == "sync" and (in_part or Phase.FAILURE in rules.kept_empty)


def _settles_in_part(world: World) -> bool:
    """A session has ended while its group is still running, or an attempt of it is over."""
    return world.sessions + world.rules.oversample > 1 or _starts_over(world) or world.rules.attempts_max > 1


def _settles_before(world: World) -> bool:
    """An attempt is over while its group is pending: the group starts over, or a session fails before one begins."""
    return _starts_over(world) or world.rules.requeues_max > 0 or (_fails(world) and _settles_in_part(world))


def _evicts_failed(world: World) -> bool:
    """Some way to fail leads to an eviction: cancelled ones always do, and the rules say which others."""
    rules, empties = world.rules, "nothing" in world.outcomes
    if not (_fails(world) or empties):
        return False
    if rules.mode == "async" or rules.failure == "refill" or _gives_up(world) or _may(world, "damage"):
        return True
    return Phase.FAILURE not in rules.kept_empty and (empties or _may(world, "fail") >= world.sessions)


def _late(condition: Callable[[World], bool] = _always) -> Callable[[World], bool]:
    return lambda world: world.late and condition(world)


def _evicts(world: World) -> bool:
    return _evicts_finished(world) or _evicts_failed(world)


_FAILS: Final = "no session fails and no group is given up (at_most: fail, cancel)"
_LATE: Final = "no result comes late (late)"
_NEEDS: Final[dict[Cell, tuple[Callable[[World], bool], str]]] = {
    (Phase.PENDING, ev.SessionFailed): (_fails, _FAILS),
    (Phase.PENDING, ev.GroupFailed): (
        _fails_unstarted,
        "too few failures to end every session of a group before one begins, and no group is given up",
    ),
    (Phase.PENDING, ev.GroupRequeued): (
        lambda world: _may(world, "requeue") > 0,
        "only the user starts a pending group over (at_most: requeue)",
    ),
    (Phase.PENDING, ev.ResultFenced): (
        _late(_settles_before),
        "no attempt is over while its group is pending, or no result comes late",
    ),
    (Phase.RUNNING, ev.SessionStarted): (
        lambda world: world.sessions + world.rules.oversample > 1 or world.rules.attempts_max > 1,
        "a group's one session is all that starts, once",
    ),
    (Phase.RUNNING, ev.SessionFailed): (
        lambda world: _fails(world) or world.rules.oversample > 0 or "nothing" in world.outcomes,
        _FAILS,
    ),
    (Phase.RUNNING, ev.GroupFailed): (lambda world: _fails(world) or "nothing" in world.outcomes, _FAILS),
    (Phase.RUNNING, ev.GroupRequeued): (
        _starts_over,
        "no running group starts over: no crash, and the user doesn't (at_most: recover, requeue)",
    ),
    (Phase.RUNNING, ev.ResultFenced): (
        _late(_settles_in_part),
        "a group's one session ends with it, or no result comes late",
    ),
    (Phase.FINISHED, ev.GroupEvicted): (
        _evicts_finished,
        "the rules keep what finished: nothing goes stale, no filter, no damage",
    ),
    (Phase.FINISHED, ev.ResultFenced): (_late(), _LATE),
    (Phase.FAILURE, ev.GroupEvicted): (_evicts_failed, "nothing fails in a way that these rules evict"),
    (Phase.FAILURE, ev.BatchSampled): (
        _samples_failed,
        "the rules evict every failed group: async, or it has no trajectory and those aren't kept",
    ),
    (Phase.FAILURE, ev.GroupRequeued): (
        lambda world: (
            _fails(world) and (world.rules.requeues_max > 0 or (_may(world, "requeue") > 0 and _stays_failed(world)))
        ),
        "no failed group starts over: requeues_max is 0, and the user finds none, or doesn't (at_most: requeue)",
    ),
    (Phase.FAILURE, ev.ResultFenced): (
        _late(_stays_failed),
        "a failed group is evicted at once, or no result comes late",
    ),
    (Phase.SAMPLED, ev.ResultFenced): (_late(), _LATE),
    (Phase.EVICTED, ev.ResultFenced): (_late(_evicts), "nothing is evicted, or no result comes late"),
    (Phase.COMMITTED, ev.RunRewound): (
        lambda world: bool(world.rewinds) and _may(world, "mark") > 0 and _may(world, "recover") > 0,
        "the run goes back to no mark (rewinds; at_most: mark, recover)",
    ),
    (Phase.COMMITTED, ev.ResultFenced): (_late(), _LATE),
}
