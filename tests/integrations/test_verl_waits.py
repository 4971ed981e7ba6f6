"""What the drop-in for verl says to whoever waits, on a stand-in for TransferQueue; `tests/verl` has the real one."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from groupstate.errors import EvictionStreak, SampleTimeout
from groupstate.integrations.verl.buffer import ReplayBuffer
from groupstate.integrations.verl.missing import MissingVerlMetric

Listing = dict[str, dict[str, Any]]


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Listing:
    """What TransferQueue lists: keys and tags. A trajectory's values stand in its tag."""
    listed: Listing = {}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[Any]]:
        return {"extra_fields": [{"reward_extra_info": listed[key]["info"]} for key in keys]}

    def clear(keys: list[str], partition_id: str) -> None:
        for key in keys:
            del listed[key]

    queue = ModuleType("transfer_queue")
    queue.__dict__.update(kv_list=lambda partition_id: {partition_id: dict(listed)}, kv_batch_get=get, kv_clear=clear)
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    return listed


def put(listing: Listing, uid: str, status: str, *infos: dict[str, float]) -> None:
    listing.update({f"{uid}_{session}_0": {"info": info} for session, info in enumerate(infos)})
    listing[uid] = {"is_prompt": True, "status": status, "global_steps": 0}


@pytest.fixture
def buffer(listing: Listing) -> Iterator[Callable[..., ReplayBuffer]]:
    made: list[ReplayBuffer] = []

    def make(**settings: Any) -> ReplayBuffer:
        given = {"filter_groups_metric": "acc", "refill_fn": lambda count: count, "poll_interval": 0, **settings}
        made.append(ReplayBuffer("separate_async", {}, 8, "drop", {"timeout_s": 5}, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_wait_for_groups_says_that_the_metric_is_missing(
    listing: Listing, buffer: Callable[..., ReplayBuffer]
) -> None:
    put(listing, "good", "finished", {"acc": 0.0}, {"acc": 1.0})
    put(listing, "bad", "finished", {"score": 0.0}, {"score": 1.0})

    assert buffer().wait_for_sampleable(1, "train", 1)[0] == {"good"}
    with pytest.raises(MissingVerlMetric, match=r"no metric 'acc', which the filter reads; .* has 'score'"):
        buffer().wait_for_sampleable(1, "train", 2)


def test_a_wait_for_groups_says_that_all_are_evicted(listing: Listing, buffer: Callable[..., ReplayBuffer]) -> None:
    for number in range(20):
        put(listing, f"flat{number}", "finished", {"acc": 1.0}, {"acc": 1.0})

    with pytest.raises(EvictionStreak, match="zero_variance 20"):
        buffer().wait_for_sampleable(1, "train", 1)


def test_a_wait_that_ends_speaks_of_what_a_trainer_can_do(
    listing: Listing, buffer: Callable[..., ReplayBuffer]
) -> None:
    put(listing, "slow", "running")
    made = buffer()
    made.options = type(made.options)(rules=made.options.rules, timeout_s=0)

    with pytest.raises(SampleTimeout) as told:
        made.sample(1, "train", 2)
    assert "listed as ended" in str(told.value)
    assert "run." not in str(told.value)
