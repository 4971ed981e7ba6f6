"""The drop-in for verl beside verl's own replay buffer, on the same TransferQueue in the same process.

Both get the same groups, one after the other, since verl's lists all partitions at each look. Who goes first
alternates. What verl's trainer does besides, clearing the trajectories of a step that is over, is done and not
measured.
"""

import contextlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, Spread, frozen_heap, ratio_of_pairs, shown

SESSIONS = 8
BATCH = 64
FLAT_EACH = 4
"""Every so many groups have the same value throughout."""

GROUPS_A_PUT = 128
POLL_S = 0.05

RATIO_MAX = 1.5
"""Of what a sample takes where nothing is new: both list the same, and one of them flushes a log."""

Made = Callable[..., Any]

VERL, OURS = "verl's own", "the drop-in"


async def measure(
    folder: Path,
    *,
    counts: tuple[int, ...] = (1_000, 5_000),
    samples: int = 7,
    wakes: int = 15,
    rounds: int = 2,
    batch: int = BATCH,
) -> list[Result]:
    """
    Args:
        folder: where the drop-in's logs are written and flushed.
        counts: groups that are listed.
        samples: measured calls of `sample`, in each round.
        wakes: times that a waiting `sample` is woken.
        batch: groups that one call of `sample` takes.
    """
    results: list[Result] = []
    with _transfer_queue(), tempfile.TemporaryDirectory(dir=folder) as logs:
        bench = _Bench(Path(logs), batch)
        for count in counts:
            for name, filtered in (("", False), (", with a filter", True)):
                results += bench.sampled(count, name, filtered=filtered, samples=samples, rounds=rounds)
            results.append(bench.woken(count, wakes, rounds))
            results.append(bench.held(count))
    return results


class _Bench:
    def __init__(self, logs: Path, batch: int) -> None:
        self.logs = logs
        self.batch = batch
        self.kinds: dict[str, Made] = {VERL: self._verl, OURS: self._ours}
        self.random = random.Random(7)

    def _ours(self, **settings: Any) -> Any:
        from groupstate.integrations.verl import ReplayBuffer

        return _constructed(ReplayBuffer, **settings, sampler_kwargs={"log": str(self.logs / uuid.uuid4().hex)})

    def _verl(self, **settings: Any) -> Any:
        return _constructed(_verl_classes().ReplayBufferAsync, **settings, sampler_kwargs={})

    def in_turn(self, rounds: int) -> Iterator[str]:
        for number in range(rounds):
            yield from self.kinds if number % 2 == 0 else reversed(self.kinds)

    # Time of a sample --------------------------------------------------------------------------------

    def sampled(self, count: int, name: str, *, filtered: bool, samples: int, rounds: int) -> list[Result]:
        moments = {
            "the first look, of": float("inf"),
            "nothing new since the last look, of": RATIO_MAX,
            f"{self.batch} groups that ended since, of": float("inf"),
        }
        values: dict[str, dict[str, list[float]]] = {moment: {kind: [] for kind in self.kinds} for moment in moments}
        for kind in self.in_turn(rounds):
            queue = _Queue()
            queue.put(count)
            settings = {"filter_groups_metric": "acc", "refill_fn": lambda count: None} if filtered else {}
            buffer = self.kinds[kind](**settings)
            with frozen_heap():
                first, idle, busy = values.values()
                first[kind].append(self._one(buffer, queue))
                for _ in range(samples):
                    queue.put(self.batch)
                    busy[kind].append(self._one(buffer, queue))
                    queue.put(self.batch)
                    buffer.get_sampleable_count(1, queue.partition)
                    idle[kind].append(self._one(buffer, queue))
            queue.clear()
            _close(buffer)
        results = []
        for moment, bound in moments.items():
            spreads = {kind: Spread(tuple(found)) for kind, found in values[moment].items()}
            ratio, text = ratio_of_pairs(spreads[VERL], spreads[OURS])
            title = f"verl: sample({self.batch}), {moment} {count:,} groups listed{name}"
            results.append(Result(title, spreads, ratio, bound, "of verl's", [text]))
        return results

    def _one(self, buffer: Any, queue: "_Queue") -> float:
        begin = time.perf_counter()
        batch, _ = buffer.sample(global_steps=1, partition_id=queue.partition, batch_size=self.batch)
        spent = time.perf_counter() - begin
        queue.clear(batch.keys)
        return spent

    # Waking up ---------------------------------------------------------------------------------------

    def woken(self, count: int, wakes: int, rounds: int) -> Result:
        """From the put of the last status that is missing until `sample` has returned."""
        spans: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        busy: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        for kind in self.in_turn(rounds):
            queue = _Queue()
            queue.put(count, status="running")
            buffer = self.kinds[kind](poll_interval=POLL_S)
            buffer.get_sampleable_count(1, queue.partition)
            for _ in range(wakes):
                queue.put(self.batch - 1)
                last = queue.put(1, status="running")[0]
                woken = _Woken(queue, last, after_s=4 * POLL_S + self.random.random() * POLL_S)
                began, used = time.perf_counter(), time.process_time()
                batch, _ = buffer.sample(global_steps=1, partition_id=queue.partition, batch_size=self.batch)
                ended = time.perf_counter()
                busy[kind].append((time.process_time() - used) / (ended - began))
                spans[kind].append(ended - woken.at())
                queue.clear(batch.keys)
            queue.clear()
            _close(buffer)
        spreads = {kind: Spread(tuple(found)) for kind, found in spans.items()}
        ratio, text = ratio_of_pairs(spreads[VERL], spreads[OURS])
        shares = {kind: Spread(tuple(found)).median for kind, found in busy.items()}
        notes = [text, *(f"{kind} takes {share:.0%} of a core meanwhile" for kind, share in shares.items())]
        title = f"verl: sample({self.batch}) is woken at a poll interval of {POLL_S} s, {count:,} other groups running"
        return Result(title, spreads, ratio, float("inf"), "of verl's", notes)

    # Memory ------------------------------------------------------------------------------------------

    def held(self, count: int) -> Result:
        """What Python holds for a buffer that has looked at all groups, and the most that it held meanwhile."""
        kept: dict[str, Spread] = {}
        notes = []
        for kind, make in self.kinds.items():
            queue = _Queue()
            queue.put(count)
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            buffer = make(filter_groups_metric="acc", refill_fn=lambda count: None)
            buffer.get_sampleable_count(1, queue.partition)
            now, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            kept[kind] = Spread(((now - before) / count,), "bytes a group")
            notes.append(f"{kind} at its peak: {shown((peak - before) / count, 'bytes a group')}")
            queue.clear()
            _close(buffer)
        ratio = kept[OURS].median / kept[VERL].median
        title = f"verl: memory with {count:,} groups listed, with a filter"
        return Result(title, kept, ratio, float("inf"), "of verl's", notes)


class _Queue:
    """A partition of its own."""

    def __init__(self) -> None:
        self.partition = f"bench-{uuid.uuid4().hex}"
        self.count = 0

    def put(self, count: int, status: str = "finished") -> list[str]:
        """Put groups, many at a time; their uids."""
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        uids = []
        for begin in range(0, count, GROUPS_A_PUT):
            some = [uuid.uuid4().hex for _ in range(min(GROUPS_A_PUT, count - begin))]
            rows = [(uid, session) for uid in some for session in range(SESSIONS)]
            tq.kv_batch_put(
                keys=[f"{uid}_{session}_0" for uid, session in rows],
                partition_id=self.partition,
                fields=list_of_dict_to_tensordict([self._fields(session) for _, session in rows]),
                tags=[{"status": "success", "seq_len": 3, "global_steps": 1} for _ in rows],
            )
            tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in some]
            tq.kv_batch_put(keys=some, partition_id=self.partition, tags=tags)
            uids += some
        return uids

    def _fields(self, session: int) -> dict[str, Any]:
        import torch

        self.count += session == 0
        value = float(session % 2 and self.count % FLAT_EACH > 0)
        return {"input_ids": torch.tensor([1, 2, 3]), "extra_fields": {"reward_extra_info": {"acc": value}}}

    def finish(self, uid: str) -> None:
        import transfer_queue as tq

        tq.kv_put(key=uid, partition_id=self.partition, tag={"status": "finished"})

    def clear(self, keys: list[str] | None = None) -> None:
        import transfer_queue as tq

        listed = list(tq.kv_list(partition_id=self.partition).get(self.partition, {})) if keys is None else keys
        if listed:
            tq.kv_clear(keys=listed, partition_id=self.partition)


class _Woken:
    """Ends a group, after a while, in a thread of its own."""

    def __init__(self, queue: _Queue, uid: str, after_s: float) -> None:
        self._queue, self._uid, self._after_s = queue, uid, after_s
        self._at = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(self._after_s)
        self._at = time.perf_counter()
        self._queue.finish(self._uid)

    def at(self) -> float:
        self._thread.join()
        return self._at


def _constructed(kind: Any, **settings: Any) -> Any:
    defaults = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "poll_interval": POLL_S,
    }
    return kind(**{**defaults, **settings})


def _close(buffer: Any) -> None:
    if hasattr(buffer, "close"):
        buffer.close()


def _verl_classes() -> Any:
    """verl's own buffers, without the trainers that their package imports."""
    name = "verl_replay_buffer"
    if name not in sys.modules:
        found = importlib.util.find_spec("verl")
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin).parent / "trainer" / "ppo" / "v1" / "replay_buffer.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextlib.contextmanager
def _transfer_queue() -> Iterator[None]:
    """TransferQueue, unless it is there already. Its actors ask for one core each, whatever there is."""
    os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count() or 1))
    import ray
    import transfer_queue as tq

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    tq.init()
    try:
        yield
    finally:
        tq.close()
        ray.shutdown()
