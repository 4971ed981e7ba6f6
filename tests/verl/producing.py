"""Who fills TransferQueue in these tests: what verl's agent loop puts there, in the order in which it does."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transfer_queue as tq

POLL_S = 0.02

FILTERED_COUNTS = "_dapo_filtered_reward_counts"
"""Where verl's trainer looks for the values that filtered groups collapsed to."""


def construct(kind: Any, **settings: Any) -> Any:
    """A buffer as verl's trainer constructs one, with what a test says in place of the defaults."""
    filtered = settings.get("filter_groups_metric") is not None
    defaults = {
        "trainer_mode": "sync",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "poll_interval": POLL_S,
        **({"train_batch_size": 2, "gen_batch_size": 1} if filtered else {}),
    }
    return kind(**{**defaults, **settings})


class Queue:
    """One partition, with the groups that were put into it."""

    def __init__(self, partition: str) -> None:
        self.partition = partition

    def group(
        self, uid: str, status: str, /, *values: float | None, stamp: int = 0, metric: str = "acc", **tag: Any
    ) -> str:
        """Put a group: a trajectory for each value, None for a session without one, then the prompt's status."""
        for session, value in enumerate(values):
            if value is not None:
                self.row(f"{uid}_{session}_0", value, metric=metric, global_steps=stamp, **tag)
        self.status(uid, status, stamp=stamp)
        return uid

    def row(
        self, key: str, value: float = 0.0, *, metric: str = "acc", info: dict[str, Any] | None = None, **tag: Any
    ) -> None:
        fields: dict[str, Any] = {"input_ids": torch.tensor([1, 2, 3])}
        if metric == "reward":
            fields["rm_scores"] = torch.tensor([0.0, 0.0, value])
        elif metric:
            fields["extra_fields"] = {"reward_extra_info": {metric: value} if info is None else info}
        tq.kv_put(key=key, partition_id=self.partition, fields=fields, tag={"seq_len": 3, **tag})

    def status(self, uid: str, status: Any, *, stamp: Any = 0) -> None:
        self.tag(uid, {"is_prompt": True, "status": status, "global_steps": stamp})

    def tag(self, key: str, tag: dict[str, Any]) -> None:
        tq.kv_put(key=key, partition_id=self.partition, tag=tag)

    def listed(self) -> set[str]:
        return set(tq.kv_list(partition_id=self.partition).get(self.partition, {}))

    def uids(self) -> set[str]:
        """Those whose prompt is listed."""
        listed = tq.kv_list(partition_id=self.partition).get(self.partition, {})
        return {key for key, tag in listed.items() if tag.get("is_prompt")}

    def clear(self, *keys: str) -> None:
        """Take these out, or all."""
        listed = list(keys or self.listed())
        if listed:
            tq.kv_clear(keys=listed, partition_id=self.partition)

    def take(self, buffer: Any, batch_size: int, *, global_steps: int = 0) -> tuple[list[str], dict[str, Any]]:
        """Sample; the uids in the order of the batch, and the metrics."""
        batch, metrics = buffer.sample(global_steps=global_steps, partition_id=self.partition, batch_size=batch_size)
        assert batch.partition_id == self.partition
        assert len(batch.tags) == len(batch.keys)
        return uids_of(batch.keys), metrics


def uids_of(keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(key.rsplit("_", 2)[0] for key in keys))


class Refiller:
    """The trainer's refill_fn: puts groups that have finished already, with these values."""

    def __init__(self, queue: Queue, *values: float, stamp: int = 0) -> None:
        self.queue = queue
        self.values = values or (0.0, 1.0)
        self.stamp = stamp
        self.calls: list[int] = []
        self.uids: list[str] = []

    def __call__(self, count: int) -> int:
        self.calls.append(count)
        for _ in range(count):
            self.uids.append(self.queue.group(f"refill{len(self.uids)}", "finished", *self.values, stamp=self.stamp))
        return count


class Waiting(threading.Thread):
    """A call that blocks, in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error

    def still_waits(self) -> bool:
        """Whether it does after a few looks at the queue."""
        time.sleep(8 * POLL_S)
        return self.is_alive()

    def ended(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "the call did not return"
        if self.error is not None:
            raise self.error
        return self.result
