"""A kind of engine, as its contract needs it told; and what all tests of a kind do with its engines.

Rule: nothing here knows one kind from another; what they differ in, a kind says itself.
"""

import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio

from groupstate.engines.port import Engine, Generation, Request, SamplingParams

VOCABULARY = 16
"""Every engine knows at least the tokens below this one."""

CONTEXT = 2000
"""Tokens of prompt and answer together, in every engine."""


class EngineKind(Protocol):
    """How the contract makes and breaks one kind of engine. What stands here without a body has to be said."""

    long: int = 1500
    """Tokens that take the engine long enough for something to happen meanwhile; `CONTEXT` has room for them."""
    death: str = "boom"
    """What the text of its death contains."""
    sets_slots: bool = False
    """Whether each engine may have slots of its own (`slots_max`)."""

    @abstractmethod
    def make(self, **options: Any) -> Any:
        """A new engine that knows the tokens below `VOCABULARY`, and has room for `CONTEXT` tokens.

        Args:
            options: of `weight_version`, `in_flight`, and with `sets_slots` `slots_max`, what the test asks for.
        """

    async def make_mortal(self, **options: Any) -> Any:
        """One that may be killed without harm to the others."""
        return self.make(**options)

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Others than those that engines are made with. With a tensor `nonsense` among them they are misfit."""

    @abstractmethod
    def kill(self, engine: Any) -> None:
        """It dies now, or with its next token, of an error whose text contains `death`; whether it generates or is
        idle, once it has answered a request."""

    @abstractmethod
    def token_count(self, engine: Any, request: Request) -> int:
        """Tokens that a request has so far; 0 also for one that isn't there."""

    @abstractmethod
    def is_publishing(self, engine: Any) -> bool:
        """Whether weights were published that it doesn't generate with yet."""

    async def requests_left(self, engine: Any) -> int:
        """Requests that the engine still works for, counted where it works."""
        return int(engine.in_flight_count)


Make = Callable[..., Any]


@asynccontextmanager
async def closing(make_engine: Make) -> AsyncIterator[Make]:
    """Makes engines that are closed in the end."""
    engines: list[Engine] = []

    def make_one(**options: Any) -> Engine:
        engines.append(make_engine(**options))
        return engines[-1]

    yield make_one
    for engine in engines:
        await engine.aclose()


def slots(kind: EngineKind, count: int) -> dict[str, int]:
    """So few that requests queue, where the engine may have slots of its own."""
    return {"slots_max": count} if kind.sets_slots else {}


def ask(prompt_ids: tuple[int, ...] = (1, 5, 7), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 4, **params}))


async def wait_first_token(kind: EngineKind, engine: Any, request: Request) -> None:
    with anyio.fail_after(30):
        # The port has no stream of tokens to wait on.
        while not kind.token_count(engine, request):  # noqa: ASYNC110
            await anyio.sleep(0.0005)


async def wait_publishing(kind: EngineKind, engine: Any) -> None:
    with anyio.fail_after(30):
        while not kind.is_publishing(engine):  # noqa: ASYNC110
            await anyio.sleep(0.0005)


def check(generation: Generation) -> None:
    """What holds for every generation."""
    assert len(generation.log_probs) == len(generation.token_ids)
    assert all(math.isfinite(value) and value <= 0 for value in generation.log_probs)
    covered = [at for span in generation.spans for at in range(span.start, span.stop)]
    assert covered == list(range(len(generation.token_ids)))
