"""Sessions of several turns as tensors, held against the model that generated them."""

import asyncio

import pytest
import torch
from torch import Tensor

from groupstate import Batch, SamplingParams, SessionContext, Trajectory, broadcast_reward, open_run
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocabulary_size=32, context=64, width=16, layers=2, heads=2)
MODELS = [Transformer(CONFIG, seed=seed) for seed in (0, 1)]
"""By weight version."""


def tool(session: int, turn: int) -> list[int]:
    """What the environment says: of different lengths, and none at all now and then."""
    return [20 + turn] * ((session + turn) % 3)


async def session(ctx: SessionContext) -> list[Trajectory]:
    t = ctx.transcript([1, 2, 3 + ctx.session])
    for turn in range(4):
        if turn == 2:
            # The first to get there publishes; the same version again changes nothing.
            await ctx.engine.publish_weights(MODELS[1].state_dict(), 1)
        await t.generate(seed=ctx.session * 10 + turn)
        t.observe(tool(ctx.session, turn))
    short = ctx.transcript([1, 9])
    await short.generate()
    return broadcast_reward([t.trajectory(), short.trajectory(reward=float(ctx.session))])


async def collected() -> Batch:
    """One group of four sessions, of which some have answers of two versions."""
    engine = TorchEngine(MODELS[0], slots_max=8)
    params = SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, seed=5)
    try:
        async with open_run(session=session, engine=engine, params=params, group_size=4) as run:
            run.submit("p")
            return await run.sample(1, timeout_s=60)
    finally:
        await engine.aclose()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return asyncio.run(collected())


def observed(row: Trajectory) -> list[bool]:
    """Of each response token, whether the environment wrote it."""
    wrote = [False] * len(row.response_ids)
    for start, stop in row.environment:
        wrote[start:stop] = [True] * (stop - start)
    return wrote


def expected_log_probs(row: Trajectory) -> list[float]:
    """Each generated token's log-probability under the model of its version, computed over the whole row at once."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    with torch.inference_mode():
        by_version = [model(ids).log_softmax(-1)[0] for model in MODELS]
    version = {at: s.weight_version for s in row.spans for at in range(s.start, s.stop)}
    before = len(row.prompt_ids) - 1
    return [
        float(by_version[version[at]][before + at, token]) if at in version else 0.0
        for at, token in enumerate(row.response_ids)
    ]


def test_the_environments_tokens_are_what_the_tool_said_and_the_rest_is_of_both_versions(batch: Batch) -> None:
    for row in batch.rows:
        said = [token for turn in range(4) for token in tool(row.session, turn)] if row.index == 0 else []
        ids, wrote = row.trajectory.response_ids, observed(row.trajectory)
        assert [token for token, w in zip(ids, wrote, strict=True) if w] == said

    assert {span.weight_version for row in batch.rows for span in row.trajectory.spans} == {0, 1}


def test_the_response_mask_is_zero_exactly_on_tokens_of_the_environment_and_pads(batch: Batch) -> None:
    mask = batch.to_torch()["response_mask"]

    for row, line in zip(batch.rows, mask.tolist(), strict=True):
        wrote = observed(row.trajectory)
        assert line == [int(not w) for w in wrote] + [0] * (len(line) - len(wrote))
        generated = [at for span in row.trajectory.spans for at in range(span.start, span.stop)]
        assert generated == [at for at, value in enumerate(line) if value]


def test_log_probs_line_up_with_the_tokens_that_the_model_of_that_version_gives_them(batch: Batch) -> None:
    tensors = batch.to_torch()

    for row, line in zip(batch.rows, tensors["rollout_log_probs"], strict=True):
        count = len(row.trajectory.response_ids)
        assert line[:count].tolist() == pytest.approx(expected_log_probs(row.trajectory), abs=1e-4)
        assert line[count:].abs().sum() == 0


def test_advantages_are_the_sessions_on_every_generated_token_of_all_its_rows(batch: Batch) -> None:
    tensors = batch.to_torch(advantages="grpo_no_std")

    assert tensors["rewards"].tolist() == [float(row.session) for row in batch.rows]
    expected = torch.tensor([row.session - 1.5 for row in batch.rows])[:, None] * tensors["response_mask"]
    assert torch.equal(tensors["advantages"], expected)


def test_end_to_end_the_same_numbers_stand_at_the_same_tokens(batch: Batch) -> None:
    padded, jagged = batch.to_torch(), batch.to_torch(layout="jagged")
    width = [len(row.trajectory.response_ids) for row in batch.rows]

    def cut(name: str) -> Tensor:
        return torch.cat([line[:count] for line, count in zip(padded[name], width, strict=True)])

    for name in ("response_mask", "rollout_log_probs", "advantages"):
        assert torch.equal(jagged[name], cut(name)), name
    response = [token for row in batch.rows for token in row.trajectory.response_ids]
    assert jagged["input_ids"][jagged["response_index"]].tolist() == response
