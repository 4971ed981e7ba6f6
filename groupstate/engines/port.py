"""What every engine does, and the values that go in and come out.

Rule 1: a request belongs to one `generate` call; its id is made here, so no id can be in use twice.
Rule 2: cancelling `generate` frees the request's place in the engine before the cancellation goes on.
Rule 3: tokens are never relabelled: each is recorded with the weight version that generated it.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs
import msgspec

from groupstate.core.events import VersionSpan
from groupstate.errors import EngineError

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate, in vLLM's names. Out-of-range values are refused before anything is sent."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; it is part of the answer."""
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature is {self.temperature!r}; it must be finite and at least 0")
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens!r}; it must be at least 1")


_numbers = itertools.count(1)


@attrs.define(eq=False)
class Request:
    """One generation. Made by the caller, used once."""

    prompt_ids: Sequence[int]
    params: SamplingParams = attrs.field(factory=SamplingParams)
    id: str = attrs.field(factory=lambda: f"r{next(_numbers)}", init=False)
    used: bool = attrs.field(default=False, init=False)


def claim(request: Request) -> None:
    """Take the request for one `generate` call; engines call this once its arguments are checked.

    Raises:
        EngineError: it was used before.
    """
    if request.used:
        raise EngineError(f"request {request.id} was used before; make a new Request for each generate call")
    request.used = True


@attrs.frozen
class Generation:
    """What an engine made of a request."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Natural logarithms, one per token, under the distribution that the token was drawn from
    before temperature and top-p."""
    spans: tuple[VersionSpan, ...]
    """Contiguous, in order, covering all tokens."""
    finish_reason: FinishReason
    text: str = ""
    """The answer as text, where the engine has a tokenizer."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Engine(Protocol):
    """Generates token by token under weights that may change on the way."""

    @property
    def weight_version(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For prompts and answers as text; None for an engine of token ids alone."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Answer one request; many may be under way at once.

        Raises:
            EngineError: the request can't be served or was used before.
            EngineDied: the engine has crashed or was closed.
        """
        ...

    def abort(self, request: Request) -> None:
        """End a request now: its `generate` returns the tokens so far with finish_reason 'abort'.
        Nothing happens if it has ended."""
        ...

    async def pause(self) -> None:
        """Stop generating, requests stay; returns once no step is under way."""
        ...

    async def resume(self) -> None: ...

    async def publish_weights(self, weights: Mapping[str, Any], weight_version: int) -> None:
        """Go on under new weights, requests in flight included: their tokens so far are kept.

        Raises:
            EngineError: misfit weights; the old ones stay in force.
        """
        ...

    async def aclose(self) -> None:
        """End the engine; requests under way fail with `EngineError`. Idempotent."""
        ...
