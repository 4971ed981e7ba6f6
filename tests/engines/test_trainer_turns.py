"""A trainer and the embedded engine by turns: real weights, real memory, sessions in the middle of an answer."""

import anyio
import torch

from groupstate import SamplingParams, SessionContext, Trajectory, open_run
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocabulary_size=16, context=1000, width=16, layers=1, heads=2)


async def test_sessions_in_the_middle_of_an_answer_go_on_under_what_the_turn_published() -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        return ctx.trajectory([1], await ctx.generate([1]), reward=float(ctx.session))

    trainer = Transformer(CONFIG, seed=0)
    engine = TorchEngine(trainer, slots_max=8)
    params = SamplingParams(max_tokens=300)
    try:
        async with open_run(session=session, engine=engine, params=params, group_size=4) as run:
            run.submit("p")
            # The port has no stream of tokens to wait on.
            while not any(row.token_ids for row in engine._rows.values()):  # noqa: ASYNC110
                await anyio.sleep(0.0005)
            for version in range(1, 4):
                async with run.trainer_turn() as turn:
                    made = [len(row.token_ids) for row in engine._rows.values()]
                    with torch.no_grad():
                        for parameter in trainer.parameters():
                            parameter.mul_(0.99)
                    await turn.publish(version, trainer.state_dict())
                    assert [len(row.token_ids) for row in engine._rows.values()] == made
                    assert engine.state == "asleep"
            rows = (await run.sample(1, timeout_s=60)).rows
    finally:
        await engine.aclose()

    for row in rows:
        spans = row.trajectory.spans
        assert [span.weight_version for span in spans] == sorted({span.weight_version for span in spans})
        assert spans[-1].weight_version == 3
        assert len(row.trajectory.log_probs) == len(row.trajectory.response_ids) == spans[-1].stop == 300
