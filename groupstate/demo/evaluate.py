"""Held-out accuracy of whatever weights an engine has.

Rule: the same engine weights give the same number, whoever else asks the engine for tokens: every task's
draw has a seed of its own.
"""

import anyio

from groupstate.demo.settings import Settings
from groupstate.demo.tasks import Task, Tasks, tokenizer
from groupstate.engines.port import Engine, Request


async def held_out_accuracy(engine: Engine, tasks: Tasks, settings: Settings, *, temperature: float = 1.0) -> float:
    """Share of the held-out tasks, each answered once, whose answer gets full marks from the verifier.

    Temperature 1, as in training, measures the policy that is being learned; 0 its likeliest answers.
    """
    words = tokenizer()
    right: list[Task] = []

    async def answer(task: Task) -> None:
        params = settings.sampling(words.eos_id, temperature=temperature, seed=task.position)
        generation = await engine.generate(Request(task.prompt_ids, params))
        if tasks.reward(task, words.decode(generation.token_ids)) == 1.0:
            right.append(task)

    async with anyio.create_task_group() as group:
        for task in tasks.held_out:
            group.start_soon(answer, task)
    return len(right) / len(tasks.held_out)
