"""The trainer of a simulated run: samples, learns for a while, commits or gives back, publishes weights, marks.

Rule: it tells the witness what it was told, in the moment in which it was told.
"""

from typing import TYPE_CHECKING

import anyio

from groupstate.batch import Batch
from groupstate.core import events as ev
from groupstate.errors import (
    EngineDied,
    EngineError,
    EvictionStreak,
    LogFailed,
    NotEnoughGroups,
    RefillLimitExceeded,
    RolloutDied,
    RunIsClosed,
    SamplerBusy,
    SampleTimeout,
    WeightVersionError,
)
from groupstate.simulate.lots import Lots
from groupstate.simulate.witness import Breach

if TYPE_CHECKING:
    from groupstate.simulate.life import Life

_WORK, _CLAIM = 601, 602
PAUSE_S = 5.0
"""After an answer that asking again at once wouldn't change."""


class _Over(Exception):
    """There is nothing more to do for a worker."""


async def train(life: "Life") -> None:
    """All workers, until none has anything more to do."""
    async with anyio.create_task_group() as tasks:
        for number in range(life.plan.trainer.workers):
            tasks.start_soon(life.works, _work, life, number)


async def _work(life: "Life", number: int) -> None:
    worker = _Worker(life, life.lots(_WORK, number))
    try:
        while True:
            await worker.step()
    except _Over:
        pass
    except LogFailed as error:
        life.log_failed(error)
    except EngineDied:
        if not life.engine_died:
            raise
        life.finish("died")
    except RunIsClosed:
        if life.how is None:
            raise
        # Its life is ending already, in another's hands.


class _Worker:
    def __init__(self, life: "Life", lots: Lots) -> None:
        self.life = life
        self.lots = lots
        self.plan = life.plan.trainer
        self.held: list[Batch] = []
        """Trained on and not committed yet."""
        self.size = self.plan.batch_size
        self.batches = 0
        self.commits = 0

    async def step(self) -> None:
        """One batch.

        Raises:
            _Over: none will come any more.
        """
        batch = await self._asked()
        if batch is None:
            return
        self.batches += 1
        plan, life = self.plan, self.life
        if plan.turns and life.engine is not None:
            await self._take_turn()
        else:
            await anyio.sleep(plan.train.draw(self.lots))
            if self.batches % plan.publish_every == 0:
                await self._publish()
        if self.lots.chance(plan.release) and not life.calm:
            await life.run.release(batch)
            life.witness.released(batch.number)
            return
        self.held.append(batch)
        if len(self.held) >= plan.commit_every or life.calm:
            await self._commit()

    # Sampling -----------------------------------------------------------------------------------------

    async def _asked(self) -> Batch | None:
        """A batch; None if this request brought none.

        Raises:
            _Over: nothing is left.
        """
        life, lots, plan = self.life, self.lots, self.plan
        size = 1 + lots.below(self.size) if lots.chance(plan.other_size) else self.size
        version = None
        if lots.chance(plan.tells_version):
            version = life.run.weight_version + lots.below(2)
        timeout_s = lots.waiting_s(60.0) if lots.chance(plan.timeout) and not life.calm else None
        cancel_s = lots.waiting_s(60.0) if lots.chance(plan.cancel) and not life.calm else None
        try:
            return await self._sampled(size, version, timeout_s, cancel_s)
        except SampleTimeout:
            life.count("timeouts")
        except WeightVersionError:
            if version is None or life.run.weight_version <= version:
                raise
        except SamplerBusy:
            await anyio.sleep(PAUSE_S)
        except EvictionStreak:
            life.count("streaks")
            await anyio.sleep(PAUSE_S)
        except NotEnoughGroups as error:
            await self._make_do(size, error.counts)
        except RefillLimitExceeded:
            life.count("limits")
            await self._make_do(size, {"sampleable": life.run.sampleable_count()})
        except RolloutDied as error:
            if not life.engine_died:
                raise Breach("error RolloutDied", f"the rollout died: {error}") from error
            life.finish("died")
            raise _Over from error
        return None

    async def _sampled(
        self, size: int, version: int | None, timeout_s: float | None, cancel_s: float | None
    ) -> Batch | None:
        life = self.life
        with anyio.CancelScope() as scope:
            if cancel_s is not None:
                scope.deadline = anyio.current_time() + cancel_s

            def asking(request: int) -> None:
                life.scopes[request] = scope

            life.asking = asking
            try:
                call = life.run.sample(size, weight_version=version, timeout_s=timeout_s)
                batch = await call
            finally:
                if life.asking is asking:
                    life.asking = None
            if not life.over:
                life.witness.sampled(batch)
            return batch
        life.count("cancelled samples")
        return None

    async def _make_do(self, size: int, counts: dict[str, int]) -> None:
        """Fewer than asked for are left: commit what is held, ask for those, and go once there are none."""
        left = counts.get("sampleable", 0) + counts.get("in_flight", 0) - counts.get("older_waiters", 0)
        if self.held:
            await self._commit()
        if left > 0:
            self.size = min(size - 1, left) if size > 1 else 1
            if size == 1:
                await anyio.sleep(PAUSE_S)
        elif size > 1:
            self.size = 1
        elif self.life.calm:
            raise _Over
        elif self.life.engine_died:
            # No session is left that could have heard of it.
            self.life.finish("died")
            raise _Over
        else:
            self.life.count("dry")
            await anyio.sleep(10 * PAUSE_S)

    # Learning -----------------------------------------------------------------------------------------

    def _next_version(self) -> int:
        jumps = self.lots.chance(self.plan.version_jump) and not self.life.calm
        return self.life.run.weight_version + (2 + self.lots.below(3) if jumps else 1)

    def _weights(self) -> str | None:
        engine = self.life.plan.engine
        if engine is None:
            return None
        refused = self.lots.chance(engine.refuses_weights) and not self.life.calm
        return "misfit" if refused else "weights"

    async def _publish(self) -> None:
        version, weights = self._next_version(), self._weights()
        try:
            await self.life.run.publish_weights(version, weights)
        except WeightVersionError:
            if self.life.run.weight_version < version:
                raise
        except EngineDied:
            raise
        except EngineError:
            if weights != "misfit":
                raise

    async def _take_turn(self) -> None:
        version, weights = self._next_version(), self._weights()
        try:
            async with self.life.run.trainer_turn() as turn:
                await anyio.sleep(self.plan.train.draw(self.lots))
                await turn.publish(version, weights)
        except EngineDied:
            raise
        except EngineError:
            if weights != "misfit":
                raise

    async def _commit(self) -> None:
        life = self.life
        while self.held:
            number = self.held[0].number
            life.witness.asks_commit(number)
            await life.run.commit(self.held[0])
            del self.held[0]
            if life.over:
                return
            life.witness.committed(number)
            self.commits += 1
            if self.plan.checkpoint_every and self.commits % self.plan.checkpoint_every == 0:
                mark = await life.run.checkpoint()
                if life.over:
                    return
                life.witness.marked(mark)


def cancel_at_claim(life: "Life", scope: anyio.CancelScope) -> None:
    """A sampler has just been served: cancel some of them before they hear of it, or while it becomes durable."""
    plan = life.plan
    if not plan.trainer.cancel_at_claim or life.calm:
        return
    lots = life.lots(_CLAIM, life.run.book.last_seq)
    if lots.chance(plan.trainer.cancel_at_claim):
        delay_s = lots.pick((0.0, plan.storage.commit.mean_s * lots.unit()))
        life.loop.call_later(delay_s, scope.cancel)


async def see_to_the_end(life: "Life") -> None:
    """Nothing more goes wrong and the trainer has all: whatever is still open must come to an end.

    Raises:
        Breach: something didn't.
    """
    run = life.run
    while any(run.book.in_flight_count(partition) for partition in (ev.TRAIN, ev.VALIDATION)):
        await run.wait_changed()
    while count := run.sampleable_count(ev.VALIDATION):
        # Validation groups of a life that ended before its round did.
        batch = await run.sample(count, partition=ev.VALIDATION)
        life.witness.sampled(batch)
        life.witness.asks_commit(batch.number)
        await run.commit(batch)
        life.witness.committed(batch.number)
    if run.book.requests:
        raise Breach("stuck", f"samplers still wait though everything has ended: {list(run.book.requests.values())}")
