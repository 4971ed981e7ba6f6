"""Supervised learning up to a mediocre model, which reinforcement learning then has something to add to.

Rule: it takes training tasks in order from position 0 and says where it stopped, so that reinforcement
learning goes on with tasks that the model hasn't seen.
"""

import time
from collections.abc import Callable, Sequence

import attrs
import torch
from torch.nn import functional as F

from groupstate.demo.policy import Policy
from groupstate.demo.settings import Settings
from groupstate.demo.tasks import Task, Tasks, tokenizer

IGNORED = -100
"""Target of tokens that don't count; what torch's cross-entropy skips unless told otherwise."""

SMOOTHING = 0.1
"""Weight of the newest batch in the running accuracy: it averages over some ten batches."""


@attrs.frozen
class WarmUp:
    """How far the warm-up is."""

    steps: int
    accuracy: float
    """Running probability of the right answer, which is the accuracy at temperature 1. It is measured on
    each batch before learning from it."""
    loss: float
    """Nats per token."""
    seconds: float
    next_position: int
    """The first training task that wasn't used."""
    reached: bool
    """Whether `warmup_accuracy` is reached; the last one without it ran out of steps."""


def warm_up(
    model: Policy,
    tasks: Tasks,
    settings: Settings,
    *,
    on_progress: Callable[[WarmUp], None] = lambda progress: None,
) -> WarmUp:
    """Train the model in place until it is right often enough. Blocking: call it in a thread.

    Args:
        on_progress: Called after every step, in this thread; what it raises ends the warm-up.
    """
    torch.set_num_threads(settings.threads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=settings.betas, weight_decay=0.01)
    size = settings.warmup_batch_size
    began_s = time.monotonic()
    now = WarmUp(steps=0, accuracy=0.0, loss=0.0, seconds=0.0, next_position=0, reached=False)
    while not now.reached and now.steps < settings.warmup_steps_max:
        for group in optimizer.param_groups:
            group["lr"] = settings.warmup_learning_rate_at(now.steps)
        batch = [tasks.train(position) for position in range(now.next_position, now.next_position + size)]
        right, loss = _learn(model, optimizer, batch, settings.gradient_norm_max)
        accuracy = now.accuracy + SMOOTHING * (right - now.accuracy)
        now = WarmUp(
            steps=now.steps + 1,
            accuracy=accuracy,
            loss=loss,
            seconds=time.monotonic() - began_s,
            next_position=now.next_position + size,
            reached=accuracy >= settings.warmup_accuracy,
        )
        on_progress(now)
    return now


def _learn(
    model: Policy, optimizer: torch.optim.Optimizer, batch: Sequence[Task], gradient_norm_max: float
) -> tuple[float, float]:
    """One step; the mean probability of the right answers before it, and the loss per token."""
    input_ids, targets = _tensors(batch)
    surprise = F.cross_entropy(
        model(input_ids)[:, :-1].transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    loss = surprise.sum() / (targets != IGNORED).sum()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_norm_max)
    optimizer.step()
    return float((-surprise.detach().sum(1)).exp().mean()), float(loss.detach())


def _tensors(batch: Sequence[Task]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded texts, and the successor of each token where it belongs to the answer."""
    longest = max(len(task.prompt_ids) + len(task.answer_ids) for task in batch)
    texts, targets = [], []
    for task in batch:
        prompt, answer = task.prompt_ids, task.answer_ids
        pads = longest - len(prompt) - len(answer)
        texts.append([*prompt, *answer, *[tokenizer().pad_id] * pads])
        targets.append([*[IGNORED] * (len(prompt) - 1), *answer, *[IGNORED] * pads])
    return torch.tensor(texts), torch.tensor(targets)
