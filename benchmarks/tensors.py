"""What `batch.to_torch()` costs, beside the obvious way to make the same tensors of rows of Python's numbers.

The batch was sampled from a run, so its numbers are packed. By hand each row's lists become tensors one by one, which
torch then pads: `torch.tensor(list)` looks at each number by itself.
"""

import time
from collections.abc import Sequence

from benchmarks.measure import Measurement, Result, frozen_heap, interleaved, ratio_of_pairs
from groupstate import Batch, Trajectory, open_run

RATIO_MAX = 0.2
SIZE = 8
"""Sessions of a group."""
PROMPT_TOKENS = 512


async def measure(*, groups: int = 8, tokens: int = 8_192, repetitions: int = 15) -> Result:
    """
    Args:
        tokens: of an answer.
    """
    batch = await _sampled(groups, tokens)
    rows = [row.trajectory for row in batch.rows]
    lists = [(list(row.prompt_ids), list(row.response_ids), list(row.log_probs)) for row in rows]
    variants = {"by hand, of lists": _by_hand(lists), "to_torch": _to_torch(batch)}
    with frozen_heap():
        for variant in variants.values():
            await variant()
        spreads = await interleaved(variants, repetitions)
    ratio, text = ratio_of_pairs(*spreads.values())
    title = f"to_torch() of {len(rows)} rows of {PROMPT_TOKENS} + {tokens:,} tokens"
    return Result(title, spreads, ratio, RATIO_MAX, "times", [text])


async def _sampled(groups: int, tokens: int) -> Batch:
    row = Trajectory(
        prompt_ids=range(1_000, 1_000 + PROMPT_TOKENS),
        response_ids=range(1_000, 1_000 + tokens),
        log_probs=[-0.5] * tokens,
        reward=1.0,
    )
    async with open_run() as run:
        for _ in range(groups):
            group = run.submit("a prompt", n=SIZE)
            for session in range(SIZE):
                group.start(session).finish(row)
        return await run.sample(groups)


def _to_torch(batch: Batch) -> Measurement:
    async def measured() -> float:
        begin = time.perf_counter()
        batch.to_torch()
        return time.perf_counter() - begin

    return measured


def _by_hand(rows: Sequence[tuple[list[int], list[int], list[float]]]) -> Measurement:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    async def measured() -> float:
        begin = time.perf_counter()
        prompts = [torch.tensor(prompt_ids) for prompt_ids, _, _ in rows]
        responses = [torch.tensor(response_ids) for _, response_ids, _ in rows]
        left = pad_sequence(prompts, batch_first=True, padding_side="left")
        right = pad_sequence(responses, batch_first=True)
        torch.cat([left, right], dim=1)
        pad_sequence([torch.ones_like(response) for response in responses], batch_first=True)
        pad_sequence([torch.tensor(log_probs) for _, _, log_probs in rows], batch_first=True)
        return time.perf_counter() - begin

    return measured
