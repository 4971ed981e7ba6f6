"""How many group lifetimes a second one core simulates: the real run on a disk in memory, with crashes and recoveries,
every event checked when it is durable, and the whole log read, checked and replayed once more at the end.

Processor time is measured, since the machine may have other work; and the best repetition counts, since others only
make it slower. Groups have four sessions.
"""

import asyncio
import time

from benchmarks.measure import Result, Spread
from groupstate.simulate.lots import Law
from groupstate.simulate.plan import CrashPlan, Plan, SessionPlan, StoragePlan, TrainerPlan, UserPlan
from groupstate.simulate.simulator import Outcome, simulate

RATE_MIN = 1_000.0

RULES = {
    "batch_size": 16,
    "lag_max": 4,
    "filter_metric": "acc",
    "attempts_max": 2,
    "admission": {"kind": "slots", "n": 64, "ready_max": 32},
}


def plan(seed: int, hours: float) -> Plan:
    """A run as many are: some sessions fail, some groups are flat, twice an hour the process dies."""
    return Plan(
        seed=seed,
        hours=hours,
        group_size=4,
        rules=RULES,
        sessions=SessionPlan(
            delay=Law(law="lognormal", mean_s=20.0), error=0.02, retryable=0.02, flat=0.1, stubborn=0.1
        ),
        trainer=TrainerPlan(
            batch_size=16,
            train=Law(law="exponential", mean_s=5.0),
            checkpoint_every=10,
            cancel_at_claim=0.1,
            rewind=0.3,
        ),
        user=UserPlan(cancel_every_s=60.0, requeue_every_s=60.0),
        crash=CrashPlan(every_s=1_800.0, power=0.5),
        storage=StoragePlan(commit=Law(law="exponential", mean_s=0.05), snapshot_events=5_000),
    )


async def measure(*, hours: float = 1.0, repetitions: int = 5) -> Result:
    """
    Args:
        hours: virtual hours of one repetition; each has a seed of its own.
    """
    seconds, outcomes = [], []
    for seed in range(repetitions):
        took_s, outcome = await asyncio.to_thread(_timed, plan(seed, hours))
        assert outcome.breach is None, outcome.breach
        seconds.append(took_s / outcome.lifetimes)
        outcomes.append(outcome)
    spread = Spread(tuple(seconds))
    lifetimes = sum(outcome.lifetimes for outcome in outcomes)
    events = sum(outcome.events for outcome in outcomes)
    lives = sum(outcome.lives for outcome in outcomes)
    notes = [
        f"{lifetimes:,} lifetimes of 4 sessions, {events / lifetimes:.1f} events each, in {lives} processes",
        f"events a second, best repetition: {events / lifetimes / min(seconds):,.0f}",
    ]
    return Result(
        "simulated, processor time per group lifetime",
        {"whole": spread},
        1 / min(seconds),
        RATE_MIN,
        "lifetimes a second of processor time",
        notes,
        least=True,
    )


def _timed(one: Plan) -> tuple[float, Outcome]:
    begin = time.thread_time()
    outcome = simulate(one)
    return time.thread_time() - begin, outcome
