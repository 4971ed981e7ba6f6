"""GRPO on groupstate, whole: the loop to copy.

Takes: groups that finished and survived the rules. Makes: a new weight version per batch. Blocked by:
`run.sample`, until enough groups are sampleable. Unblocked by: sessions that end.

A batch is committed only once a checkpoint on disk holds what was learned from it, so a kill at any moment
loses no group and trains on none twice.
"""

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import attrs
import torch

from groupstate import Batch, Prompt, Rules, Run, SessionContext, Trajectory
from groupstate.demo.checkpoint import Checkpoint
from groupstate.demo.loss import grpo_loss
from groupstate.demo.policy import Policy
from groupstate.demo.settings import Settings
from groupstate.demo.tasks import Tasks, tokenizer
from groupstate.runtime.session import SessionFunction
from groupstate.runtime.sources import FunctionSource

TOKENIZER = tokenizer()


@attrs.frozen
class StepReport:
    """One trainer step, for whoever shows progress."""

    step: int
    reward: float
    """Mean over the batch's trajectories."""
    metrics: dict[str, float]
    """The batch's and the loss's."""


def rules_of(settings: Settings) -> Rules:
    """Zero-variance filtering in both modes; in async mode groups may lag `lag_max` weight versions."""
    return Rules(
        mode=settings.mode,
        batch_size=settings.batch_size,
        filter_metric="reward",
        lag_max=settings.lag_max if settings.mode == "async" else None,
    )


def source_of(tasks: Tasks, first: int) -> FunctionSource:
    """Prompts without end, behind those of the warm-up; the run itself remembers how far it is."""

    def make(position: int) -> Prompt:
        task = tasks.train(first + position)
        return Prompt(task.prompt, dataset="chain_sum", extra={"task": task.position})

    return FunctionSource(make)


def session_of(tasks: Tasks) -> SessionFunction:
    """One answer to one task: generate, then let the task's own verifier score it."""

    async def session(ctx: SessionContext) -> Trajectory:
        task = tasks.train(ctx.prompt.extra["task"])
        generation = await ctx.generate(task.prompt_ids)
        return ctx.trajectory(
            task.prompt_ids, generation, reward=tasks.reward(task, TOKENIZER.decode(generation.token_ids))
        )

    return session


class Trainer:
    """The model, its optimizer, and the batches that no checkpoint holds yet."""

    def __init__(self, model: Policy, settings: Settings, checkpoints: Checkpoint) -> None:
        self.model = model
        self.settings = settings
        self.step = 0
        self.first_task = 0
        """The first task behind the warm-up's."""
        self.accuracy_before: float | None = None
        """Held-out accuracy of the warmed-up model."""
        self._checkpoints = checkpoints
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
        )
        self._trained: list[Batch] = []
        self._saved_step = -1

    async def train(self, run: Run, report: Callable[[StepReport], None]) -> None:
        """Train up to `settings.steps`, from wherever the model is."""
        while self.step < self.settings.steps:
            batch = await run.sample(self.settings.batch_size, weight_version=self.step)
            metrics = await anyio.to_thread.run_sync(self._update, batch)
            # Nothing suspends between the update and these two lines: what the weights hold is what they say.
            self._trained.append(batch)
            self.step += 1
            await run.publish_weights(self.step, self.model.state_dict())
            rewards = [row.trajectory.metrics["reward"] for row in batch.rows]
            report(StepReport(self.step, sum(rewards) / len(rewards), {**batch.metrics, **metrics}))
            if self.step % self.settings.checkpoint_every == 0:
                await self.save(run)

    def _update(self, batch: Batch) -> dict[str, float]:
        torch.set_num_threads(self.settings.threads)
        tensors = batch.to_torch(pad_id=TOKENIZER.pad_id, advantages=self.settings.advantages)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step)
        loss, metrics = grpo_loss(
            self.model, tensors, clip_low=self.settings.clip_low, clip_high=self.settings.clip_high
        )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_norm_max)
        self._optimizer.step()
        return metrics

    async def save(self, run: Run) -> None:
        """Commit what was trained on, mark the place, and keep both with the weights, in this order.

        A kill before the file is in place leaves the older checkpoint, and going back to its mark undoes the
        commits.
        """
        if self._saved_step == self.step and not self._trained:
            return
        if self.step > run.weight_version:
            await run.publish_weights(self.step, self.model.state_dict())
        while self._trained:
            await run.commit(self._trained.pop(0))
        mark = await run.checkpoint(f"step {self.step}")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "first_task": self.first_task,
            "accuracy_before": self.accuracy_before,
            "settings": attrs.asdict(self.settings),
        }
        await anyio.to_thread.run_sync(self._checkpoints.save, state, mark)
        self._saved_step = self.step

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.first_task = state["first_task"]
        self.accuracy_before = state["accuracy_before"]
