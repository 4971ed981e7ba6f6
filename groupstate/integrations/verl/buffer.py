"""The classes that stand in the place of verl's replay buffer, with its contract.

verl's trainer constructs one, calls `sample` for training and for validation, and, where it lends its device to the
rollout, `get_sampleable_count` and `wait_for_sampleable`. All calls come from one thread at a time and block.

Rule: each look at TransferQueue is a listing, what follows from it in the log, and what follows from that in
TransferQueue, in this order.
"""

import re
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import attrs

from groupstate.core.arguments import integer
from groupstate.core.explain import Explanation
from groupstate.errors import RunIsClosed, SampleTimeout
from groupstate.integrations.verl.metrics import everything
from groupstate.integrations.verl.options import VALIDATION, BadVerlConfig, Given, read
from groupstate.integrations.verl.queue import transfer_queue
from groupstate.integrations.verl.run import VerlRun, kind_of
from groupstate.logs import Logger

log = Logger("groupstate.verl")

TRAINING = "train"
"""verl's partition of training groups. It and that of validation are in one log."""


class ReplayBuffer:
    """verl's replay buffer on a log, for each trainer mode. See docs/integrations/verl.md."""

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Any,
        poll_interval: float | None = None,
        refill_fn: Callable[[int], Any] | None = None,
        filter_groups_metric: str | None = None,
        train_batch_size: int | None = None,
        gen_batch_size: int | None = None,
        max_inflight_gen_batches: int | None = None,
        sync_refill_failed_groups: bool | None = None,
    ) -> None:
        """Arguments are verl's. What is None is read from `sampler_kwargs`, then from the configuration around it.

        Raises:
            BadVerlConfig: settings that can't work.
            LogError: the log can't be opened; `LogInUse` where another process writes it.
        """
        self.trainer_mode = trainer_mode
        self.options = read(
            Given(
                trainer_mode=self._mode(trainer_mode),
                max_off_policy_threshold=max_off_policy_threshold,
                max_off_policy_strategy=max_off_policy_strategy,
                sampler_kwargs=sampler_kwargs,
                trainer_config=trainer_config,
                has_refill_fn=refill_fn is not None,
                direct={
                    "poll_interval": poll_interval,
                    "filter_groups_metric": filter_groups_metric,
                    "train_batch_size": train_batch_size,
                    "gen_batch_size": gen_batch_size,
                    "max_inflight_gen_batches": max_inflight_gen_batches,
                    "sync_refill_failed_groups": sync_refill_failed_groups,
                },
            )
        )
        self.poll_interval = self.options.poll_interval
        self._refill = refill_fn
        self._runs = {TRAINING: VerlRun(self.options, refill_fn, training=TRAINING, log_path=self.options.log)}
        self._closer = weakref.finalize(self, _close, self._runs)

    @staticmethod
    def _mode(trainer_mode: str) -> str:
        return trainer_mode

    @property
    def log_path(self) -> str | None:
        """The run directory, for `groupstate show` and its like; None for a log in memory."""
        return self._runs[TRAINING].path

    def close(self) -> None:
        """Close the log; every call from then on is refused (`RunIsClosed`). It is closed at the end of the process in
        any case, and may as well be killed."""
        self._closer()

    # What verl's trainer calls -------------------------------------------------------------------------

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Wait for the oldest `batch_size` groups and take them.

        Returns:
            A `KVBatchMeta` with the keys and tags of their trajectories, and the metrics of this call.

        Raises:
            SampleError: the batch can't come, or didn't in `timeout_s`; the text says why.
            LogFailed: the log is broken.
        """
        sample = ReplayBuffer._sample
        # verl can save what was sampled, for runs that skip the rollout. Its decorator is there where verl is.
        skip = getattr(sys.modules.get("verl.utils.skip"), "SkipManager", None)
        if skip is not None:
            sample = skip.annotate_tq(role="rollout_tq", phase="sample")(sample)
        return sample(self, global_steps, partition_id, batch_size)

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """How many groups could be sampled at `global_steps`. Takes, clears and replaces nothing."""
        run = self._run(partition_id, global_steps)
        run.look(partition_id)
        return len(run.sampleable(kind_of(partition_id), int(global_steps)))

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, Any]]:
        """Wait until so many groups can be sampled, clearing and replacing what is evicted meanwhile.

        Returns:
            Their uids, and the metrics of this call.

        Raises:
            SampleTimeout: not in `timeout_s`.
            SampleError: there never will be so many; the text says why.
            LogFailed: the log is broken.
        """
        run, kind = self._run(partition_id, global_steps), kind_of(partition_id)
        count = integer("target_count", target_count, least=0)
        run.advance(int(global_steps))

        def explained() -> Explanation:
            found = run.feed.explain(kind)
            holder = run.feed.held_by(kind)
            blocked = f"{found.sampleable} of {count} groups are sampleable"
            return attrs.evolve(
                found, needed=count, blocked_by=f"group {holder!r} is at the bound" if holder else blocked
            )

        patience = Patience(self, "wait_for_sampleable()", run, explained)
        while True:
            run.look(partition_id)
            again = run.act(partition_id)
            ready = run.sampleable(kind)
            if len(ready) >= count and run.feed.held_by(kind) is None:
                return set(ready), run.told(partition_id)
            if len(ready) < count:
                run.check(partition_id, count)
            if not again:
                patience.wait()

    # One call of `sample` ------------------------------------------------------------------------------

    def _sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        run, kind = self._run(partition_id, global_steps), kind_of(partition_id)
        run.advance(int(global_steps))
        run.look(partition_id)
        waiter = run.feed.ask(int(batch_size), partition=kind)
        patience = Patience(self, "sample()", run, lambda: run.feed.explain(kind))
        try:
            while (taken := run.taken(partition_id, waiter)) is None:
                if not run.act(partition_id):
                    patience.wait()
                run.look(partition_id)
        except BaseException as error:
            if waiter.error is None:
                run.feed.withdraw(waiter, type(error).__name__)
            raise
        run.act(partition_id)
        metrics = run.told(partition_id)
        if self.options.metrics == "all":
            metrics = everything(partition_id, taken.sampled.metrics) | metrics
        batch = transfer_queue().KVBatchMeta(partition_id=partition_id, keys=taken.keys, tags=taken.tags)
        return batch, metrics

    def _run(self, partition_id: str, global_steps: int) -> VerlRun:
        integer("global_steps", global_steps, least=0)
        if not self._closer.alive:
            where = "in memory" if self.log_path is None else str(self.log_path)
            raise RunIsClosed(f"this {type(self).__name__} was closed (its log: {where}); construct another one")
        name = TRAINING if partition_id == VALIDATION else partition_id
        if name not in self._runs:
            beside = None if self.log_path is None else f"{self.log_path}-{_directory(name)}"
            self._runs[name] = VerlRun(self.options, self._refill, training=name, log_path=beside)
        self._runs[name].begin(partition_id, int(global_steps))
        return self._runs[name]


class ReplayBufferAsync(ReplayBuffer):
    """The same for the asynchronous trainer modes alone."""

    @staticmethod
    def _mode(trainer_mode: str) -> str:
        if trainer_mode == "sync":
            raise BadVerlConfig("trainer_mode is 'sync', which ReplayBufferAsync is not for; ReplayBuffer is for each")
        return trainer_mode


class Patience:
    """One wait: it sleeps from look to look, says what it waits for where nothing happens, and ends at a time-out."""

    def __init__(self, buffer: ReplayBuffer, what: str, run: VerlRun, explained: Callable[[], Explanation]) -> None:
        options = buffer.options
        self._poll_s = buffer.poll_interval
        self._stall_s, self._timeout_s = options.stall_s, options.timeout_s
        self._what, self._run, self._explained = what, run, explained
        self._began = self._quiet_since = time.monotonic()
        self._seq = run.feed.book.last_seq

    def wait(self) -> None:
        """
        Raises:
            SampleTimeout: the time is over.
        """
        now, seq = time.monotonic(), self._run.feed.book.last_seq
        if seq != self._seq:
            self._seq, self._quiet_since = seq, now
        left_s = self._poll_s
        if self._timeout_s is not None:
            left_s = self._timeout_s - (now - self._began)
            if left_s <= 0:
                raise SampleTimeout(self._timeout_s, self._explained())
        if self._stall_s and now - self._quiet_since >= self._stall_s:
            log.warning("a wait is stalled", call=self._what, explanation=str(self._explained()))
            self._quiet_since = now
        time.sleep(min(self._poll_s, left_s))


def _directory(partition: str) -> str:
    """A partition's name as one of a directory, another for each. `-2` and so on behind a log's name are kept for
    further logs of the same partition."""
    return re.sub(r"(^|(?<=-))[0-9](?=[0-9]*$)", lambda first: f"%{ord(first[0]):02X}", quote(partition, safe=""))


def _close(runs: dict[str, VerlRun]) -> None:
    for run in runs.values():
        run.close()
