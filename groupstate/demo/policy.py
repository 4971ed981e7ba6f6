"""What the demo trains: a model, and the engine that generates under its weights.

Rule: the trainer sees a `Policy` and an `Engine`; which of the two kinds they are is decided here alone.
"""

from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from groupstate.demo.settings import Settings
from groupstate.demo.tasks import tokenizer
from groupstate.engines.port import Engine

EngineName: TypeAlias = Literal["torch", "vllm"]


class Policy(Protocol):
    """A causal language model as the demo's trainer needs it: a torch module, and these."""

    @property
    def dtype(self) -> Any: ...

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits of every token's successor, right-padded rows: (rows, tokens, vocabulary)."""
        ...

    def token_log_probs(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, response_tokens: int | None = None
    ) -> Tensor:
        """Log-probability of each of the last `response_tokens` tokens given those before it, with gradient."""
        ...

    def parameters(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def new_policy(engine: EngineName, settings: Settings, vocabulary_size: int) -> Policy:
    """Fresh weights.

    Raises:
        MissingExtra: the engine's packages aren't installed.
    """
    if engine == "vllm":
        from groupstate.demo.qwen import QwenPolicy

        return QwenPolicy(settings, vocabulary_size)
    from groupstate.engines.transformer import Transformer

    return Transformer(settings.model(vocabulary_size), seed=settings.seed)


async def engine_of(policy: Policy, settings: Settings, folder: Path, weight_version: int) -> Engine:
    """An engine that generates under the policy's weights."""
    from groupstate.engines.transformer import Transformer

    if isinstance(policy, Transformer):
        from groupstate.engines.torch import TorchEngine

        return TorchEngine(
            policy,
            tokenizer(),
            slots_max=settings.slots_max,
            weight_version=weight_version,
            seed=settings.seed,
            threads=settings.threads,
        )
    from groupstate.demo.qwen import QwenPolicy, vllm_engine

    assert isinstance(policy, QwenPolicy)
    return await vllm_engine(policy, settings, folder, weight_version)
