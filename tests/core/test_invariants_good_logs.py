"""Logs of real runs have nothing wrong with them, nor have their beginnings."""

import random
from typing import Any

import anyio
import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.invariants import Checker, violations
from groupstate.core.rules import RULES_VERSION, Rules
from groupstate.log.memory import MemoryLog
from groupstate.simulate.loop import VirtualLoop, run_virtual

from .handmade_logs import done, evict, finish, log, sample, start, submit, whole

RULES = {
    "async filter": Rules(filter_metric="reward", lag_max=1, batch_size=4),
    "async wait": Rules(lag_max=2, on_stale="wait", batch_size=4),
    "async oldest token": Rules(lag_max=5, basis="oldest_token", batch_size=4),
    "async retries": Rules(attempts_max=3, survivors_min=2, retry_delay_s=0.1),
    "async capacity": Rules(lag_max=1, batch_size=4, admission=gs.Capacity(lag_max=1)),
    "sync": Rules(mode="sync", batch_size=4),
    "sync filter": Rules(mode="sync", filter_metric="reward", batch_size=4, failure="refill"),
}


def real_log(rules: Rules, seed: int) -> MemoryLog:
    """Six trainer steps under `rules`, with failures, late versions, releases, validation and a second opening."""
    rng = random.Random(seed)
    records = MemoryLog()

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        await anyio.sleep(rng.random())
        if rng.random() < 0.1:
            raise gs.RetryableError("boom")
        version = rng.randrange(3)
        return gs.Trajectory(
            prompt_ids=(1,),
            response_ids=(2, 3),
            log_probs=(0.0, 0.0),
            reward=float(rng.randrange(2)),
            spans=(gs.VersionSpan(0, 1, version), gs.VersionSpan(1, 2, version + 1)),
        )

    async def main(loop: VirtualLoop) -> None:
        async with gs.open_run(
            rules=rules, source=range(300), session=session, group_size=3, clock_ns=loop.clock_ns, log=records
        ) as run:
            for step in range(6):
                batch = await run.sample(4, weight_version=step)
                await (run.release(batch) if rng.random() < 0.3 else run.commit(batch))
                await run.checkpoint()
            await run.validate(range(2))

    run_virtual(main)
    return records


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_the_log_of_a_real_run_has_nothing_wrong(name: str, seed: int) -> None:
    records = list(real_log(RULES[name], seed).read())

    assert len(records) > 100
    assert violations(records) == []


def rewound(*, evicts: bool = True) -> list[ev.AnyEvent]:
    """A group before a mark and two behind it, one of validation, and the run goes back."""
    return [
        *whole("before"), ev.CheckpointMarked(1, 0, 1), *whole("after"), *whole("val", val=True), submit("flying"),
        ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 2), ev.RunRewound(1, 6, 0, 2, evicts),
    ]  # fmt: skip


def test_a_run_that_goes_back_may_evict_what_ended_since() -> None:
    text = "group 'before' is evicted as stale under rules that drop nothing for its lag"

    assert violations(log(rewound(), evict("after", "stale", credit=1), ev.WeightsPublished(1, 2))) == []
    assert violations(log(rewound(evicts=False))) == []
    assert text in str(violations(log(rewound(), evict("before", "stale"), evict("after", "stale")))[0])
    assert "is evicted as stale under rules" in str(violations(log(rewound(evicts=False), evict("after", "stale")))[0])


def test_a_run_that_goes_back_and_evicts_leaves_nothing_over_but_to_the_next_opening() -> None:
    again = ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 3)
    (left,) = violations(log(rewound(), ev.GroupRequeued("flying", "recovery"), again))

    assert (left.invariant, left.group_id) == (6, "after")
    assert "group 'after' is still there at GroupRequeued" in left.text
    assert violations(log(rewound(), again)) == []


def test_a_recovered_and_rewound_log_has_nothing_wrong() -> None:
    records = log(
        whole("a"), whole("b", 4), submit("c"), start("c"), whole("v", val=True),
        sample(1, "a"), ev.CheckpointMarked(1, 0, 1), ev.BatchCommitted(1),
        ev.WeightsPublished(3), sample(2, "b", lags=(3,)), ev.BatchCommitted(2), submit("late", stamp=3),
        ev.RunRecovered({}, RULES_VERSION, 0, 2), ev.RunRewound(1, 18, 0, 2), ev.GroupRequeued("c", "recovery"),
        ev.WeightsPublished(1, 2), sample(3, "a", "b", lags=(0, 3)), ev.BatchReturned(3),
        start("c", 0, 2), ev.ResultFenced("c", 0, 1, "finished", "attempt"), finish("c", 0, 2), done("c"),
        sample(4, "c", lags=(1,)), ev.BatchCommitted(4), ev.ResultFenced("c", 0, 2, "finished", "gone"),
        ev.RunClosed(),
    )  # fmt: skip

    assert violations(records) == []


@pytest.mark.parametrize(
    ("basis", "lag"), [("dispatch", 9), ("first_token", 4), ("oldest_token", 6), ("newest_token", 2)]
)
def test_the_lag_is_counted_from_what_the_basis_says(basis: Any, lag: int) -> None:
    group = [submit("a", 2), start("a", 0), start("a", 1), finish("a", 0, 1, 5, 3, 7), finish("a", 1, 1, 6), done("a")]
    records = log(group, ev.WeightsPublished(9), sample(1, "a", lags=(lag,)), rules=Rules(basis=basis))

    assert violations(records) == []


def test_rows_without_spans_are_counted_from_the_submission() -> None:
    records = log(whole("a"), ev.WeightsPublished(2), sample(1, "a", lags=(2,)), rules=Rules(basis="first_token"))

    assert violations(records) == []


def test_without_a_first_token_the_oldest_one_counts() -> None:
    second = ev.TrajectoryRecord(1, {}, 1, 1, (ev.VersionSpan(0, 1, 2),))
    two = ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0), second))
    records = log(
        submit("a"), start("a"), two, done("a"), ev.WeightsPublished(3), sample(1, "a", lags=(1,)),
        rules=Rules(basis="first_token"),
    )  # fmt: skip

    assert violations(records) == []


def test_any_prefix_of_a_good_log_is_good() -> None:
    records = list(real_log(RULES["sync filter"], 5).read())
    checker = Checker()

    assert [checker.feed(record) for record in records] == [[]] * len(records)
    assert checker.finish() == []
