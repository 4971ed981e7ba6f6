"""The contract of engines, kept by those that need nothing but torch."""

import asyncio
from typing import Any

import pytest
import torch

from groupstate.engines.port import Request
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer, TransformerConfig
from groupstate.testing.contracts import EngineContract, EngineKind
from groupstate.testing.contracts.engine_kind import CONTEXT, VOCABULARY

CONFIG = TransformerConfig(vocabulary_size=VOCABULARY, context=CONTEXT, width=8, layers=1, heads=2)


class WithRows:
    """What the two have in common."""

    long = 1500
    death = "boom"
    sets_slots = True

    def make(self, **options: Any) -> Any:
        raise NotImplementedError

    async def make_mortal(self, **options: Any) -> Any:
        return self.make(**options)

    def token_count(self, engine: Any, request: Request) -> int:
        return len(engine._rows[request.id].token_ids) if request.id in engine._rows else 0

    async def requests_left(self, engine: Any) -> int:
        return len(engine._rows)


class Scripted(WithRows):
    def is_publishing(self, engine: Any) -> bool:
        return bool(engine._publishing_count)

    def make(self, **options: Any) -> ScriptedEngine:
        return ScriptedEngine(
            lambda prompt_ids: [(sum(prompt_ids) + at) % VOCABULARY for at in range(CONTEXT - 100)],
            token_s=0.0002,
            context=CONTEXT,
            fits=lambda weights: "nonsense" not in weights,
            **options,
        )

    def weights(self) -> dict[str, Any]:
        return {}

    def kill(self, engine: Any) -> None:
        engine.die(RuntimeError("boom"))


class Torch(WithRows):
    device = "cpu"

    def is_publishing(self, engine: Any) -> bool:
        return bool(engine._published)

    def make(self, **options: Any) -> TorchEngine:
        return TorchEngine(CONFIG, device=self.device, **options)

    def weights(self) -> dict[str, Any]:
        return Transformer(CONFIG, seed=1).state_dict()

    def kill(self, engine: Any) -> None:
        # Weights that break on their way in: an idle engine takes no step that could fail.
        told = asyncio.get_running_loop().create_future()
        told.add_done_callback(asyncio.Future.exception)
        with engine._changed:
            engine._published.append(({"boom": torch.ones(1)}, 1, told))
            engine._changed.notify()


class TorchOnGpu(Torch):
    device = "cuda"


ON_A_GPU = pytest.param(TorchOnGpu, marks=pytest.mark.gpu, id="torch on a GPU")


class TestEmbedded(EngineContract):
    @pytest.fixture(params=[pytest.param(Scripted, id="scripted"), pytest.param(Torch, id="torch"), ON_A_GPU])
    def kind(self, request: pytest.FixtureRequest) -> EngineKind:
        kind: EngineKind = request.param()
        return kind
