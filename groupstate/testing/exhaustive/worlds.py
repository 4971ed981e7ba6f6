"""The worlds that groupstate itself is gone through in: small ones for every day, and larger ones of the same kind.

Rule: each of them is there for what the others don't have. Together they go through every cell of the table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from groupstate.core.rules import Rules, Slots
from groupstate.testing.exhaustive.world import World

_DROP = World(rules=Rules(lag_max=0), at_most={"fail": 1, "publish": 1}, withdraws=False)
_FLAT = Rules(lag_max=0, filter_metric="reward")
_DRAINS = Rules(mode="sync", filter_metric="reward", batch_size=1)
_EITHER = ("reward=1", "reward=0")

WORLDS: Final[Mapping[str, World]] = MappingProxyType(
    {
        # Async, nobody draws prompts: two groups of two, lag, failure, cancellation, late results, a batch.
        "drop": _DROP,
        "cancel": World(at_most={"cancel": 1, "requeue": 1}, sessions=1, withdraws=False),
        "three_groups": attrs.evolve(_DROP, groups=3, sessions=1, batch=2, at_most={"publish": 1}),
        "three_sessions": World(
            rules=Rules(lag_max=0, survivors_min=2),
            groups=1,
            sessions=3,
            at_most={"fail": 2, "publish": 1, "recover": 1},
        ),
        "wait": World(
            rules=Rules(lag_max=1, on_stale="wait"), sessions=1, at_most={"fail": 1, "publish": 1}, withdraws=False
        ),
        # A source: refills, what admission draws, and its end.
        "refill": World(
            rules=Rules(lag_max=0), groups=1, source=1, at_most={"fail": 1, "publish": 1, "sample": 1}, withdraws=False
        ),
        "zero_variance": World(
            rules=_FLAT, groups=1, source=1, outcomes=_EITHER, at_most={"publish": 1, "sample": 1}, withdraws=False
        ),
        "slots": World(
            rules=Rules(lag_max=0, admission=Slots(n=1, ready_max=1)),
            groups=0,
            source=2,
            admits=True,
            at_most={"fail": 1, "publish": 1},
        ),
        "capacity": World(
            rules=Rules.capacity(1, max_head_offpolicyness=1),
            groups=0,
            sessions=1,
            source=2,
            admits=True,
            at_most={"publish": 1, "recover": 1},
            withdraws=False,
            late=False,
        ),
        "in_order": World(
            rules=Rules.in_order(1, max_lookahead_versions=1),
            groups=0,
            sessions=1,
            source=2,
            admits=True,
            at_most={"fail": 1, "publish": 2},
        ),
        # Sync: each way to deal with failed and empty groups, and the filter that drains.
        "sync": World(rules=Rules(mode="sync"), at_most={"fail": 1}, withdraws=False),
        "sync_refill": World(
            rules=Rules(mode="sync", failure="refill"),
            groups=1,
            source=1,
            at_most={"fail": 2, "cancel": 1, "sample": 1},
            withdraws=False,
        ),
        "sync_keep_empty": World(
            rules=Rules(mode="sync", empty="keep"), sessions=1, at_most={"fail": 1}, withdraws=False
        ),
        "sync_filter": World(
            rules=_DRAINS,
            groups=1,
            source=1,
            outcomes=_EITHER,
            at_most={"fail": 1, "damage": 1, "sample": 1},
            withdraws=False,
            late=False,
        ),
        # Attempts: retries, requeues by the rules and by the user, sessions that end while they are being cancelled.
        "retries": World(
            rules=Rules(attempts_max=2, requeues_max=1),
            groups=1,
            failures=("error retryable",),
            at_most={"fail": 4, "requeue": 1},
        ),
        "cancelling": World(
            rules=Rules(oversample=1), groups=1, sessions=1, runs=True, at_most={"fail": 1, "cancel": 1, "requeue": 1}
        ),
        "doomed": World(
            rules=Rules(lag_max=0, cancel_doomed=True),
            groups=1,
            runs=True,
            at_most={"fail": 1, "publish": 1, "requeue": 1},
        ),
        # Crashes, in the middle of steps and of recoveries too, and going back to a mark.
        "crash": attrs.evolve(_DROP, sessions=1, at_most={"publish": 1, "recover": 1}, late=False),
        "crash_twice": attrs.evolve(_DROP, groups=1, at_most={"fail": 1, "publish": 1, "recover": 2}),
        "rewind": World(
            rules=Rules(lag_max=1),
            groups=1,
            sessions=1,
            rewinds=("keep", "evict"),
            at_most={"mark": 1, "publish": 1, "recover": 1, "fail": 1},
        ),
        # Who waits: validation beside training, and one sampler behind another.
        "validation": World(
            rules=Rules(lag_max=0), groups=1, sessions=1, validation=1, at_most={"fail": 1}, withdraws=False
        ),
        "samplers": World(sessions=1, waiting_max=2, at_most={"fail": 1}),
    }
)
"""By name; all of them together take less than half a minute."""

_MORE: Final[Mapping[str, Mapping[str, object]]] = {
    "drop": {"source": 1, "at_most": {"fail": 1, "cancel": 1, "publish": 1}},
    "three_groups": {"at_most": {"fail": 1, "publish": 1}, "waiting_max": 2},
    "zero_variance": {"at_most": {"publish": 1, "recover": 1}},
    "sync": {"at_most": {"fail": 2, "cancel": 1, "requeue": 1}},
    "sync_filter": {"at_most": {"fail": 1, "damage": 1}, "late": True, "withdraws": True},
    "retries": {"failures": ("error retryable", "error"), "at_most": {"fail": 3, "requeue": 1, "recover": 1}},
    "cancelling": {"source": 1},
    "crash": {"sessions": 2},
    "rewind": {"groups": 2, "at_most": {"mark": 1, "publish": 1, "recover": 1}},
    "validation": {"at_most": {"fail": 1, "recover": 1}},
}

LARGER: Final[Mapping[str, World]] = MappingProxyType(
    {name: attrs.evolve(WORLDS[name], **more) for name, more in _MORE.items()}  # type: ignore[arg-type]
)
"""Some of them with more in them; a minute or two each."""
