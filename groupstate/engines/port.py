"""What every engine does, and the values that go in and come out.

Rule 1: a request belongs to one `generate` call; its id is made here, so no id can be in use twice.
Rule 2: cancelling `generate` frees the request's place in the engine before the cancellation goes on.
Rule 3: tokens are never relabelled: each is recorded with the weight version that generated it.
Rule 4: an engine generates, is paused, or is asleep. `pause`, `sleep`, `wake`, `resume` go along that row and back, one
place each; the next place twice is the same as once, and what skips one is refused.
"""

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import attrs
import msgspec

from groupstate.core.arguments import INTEGER_MAX, shown, string
from groupstate.core.events import VersionSpan
from groupstate.core.typed_settings import Settings
from groupstate.errors import BadInput, BadSettings, EngineError

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

InFlight: TypeAlias = Literal["keep", "continue", "restart"]
"""What a publication of weights does to the requests under way.

`keep`: they finish under the old weights first, and new ones wait. `continue`: their tokens and log-probabilities
stay, and they go on from there under the new weights. `restart`: they begin anew under the new weights. Under way are
those that have begun to generate; one that waits for its place begins under the new weights in any case. A paused
engine can't let requests finish, so there `keep` is as `continue`.
"""

IN_FLIGHT: tuple[InFlight, ...] = ("keep", "continue", "restart")

Weights: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
"""Tensors by name, or the folder of a checkpoint (safetensors) where the engine can read one."""

State: TypeAlias = Literal["generating", "paused", "asleep"]


class SamplingParams(Settings, frozen=True):
    """How to generate, in vLLM's names. A value that can't be is refused where it is given, as `BadSettings`."""

    LEAST: ClassVar[Mapping[str, float]] = {"temperature": 0.0, "max_tokens": 1}
    AS_GIVEN = frozenset({"extra"})

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; it is part of the answer."""
    seed: int | None = None
    """Any integer. Engines that know none below 0 or beyond 63 bits take it modulo 2**63."""
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Parameters that not every engine has, by the engine's names, such as vLLM's `top_k`. Refused where unknown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0.0 < self.top_p <= 1.0):
            raise BadSettings(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        if not isinstance(self.extra, Mapping):
            raise BadSettings(f"extra is {shown(self.extra)}; it must be a table, such as {{'top_k': 20}}")
        if unnamed := [name for name in self.extra if not isinstance(name, str)]:
            raise BadSettings(f"extra has {shown(unnamed[0])}; the names of parameters are strings")

    @property
    def seed_bits(self) -> int | None:
        """The seed as one that every engine takes: 63 bits."""
        return None if self.seed is None else self.seed & INTEGER_MAX


_numbers = itertools.count(1)


def _need_params(request: "Request", attribute: Any, value: Any) -> None:
    if not isinstance(value, SamplingParams):
        raise BadInput(f"params is {shown(value)}; it must be SamplingParams, such as SamplingParams(max_tokens=64)")


def _need_text(request: "Request", attribute: Any, value: Any) -> None:
    if value or type(value) is not str:
        string(attribute.name, value)


@attrs.define(eq=False)
class Request:
    """One generation. Made by the caller, used once. Its prompt is looked at by the engine.

    Raises:
        BadInput: another argument of another kind than it must be.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = attrs.field(factory=SamplingParams, validator=_need_params)
    affinity: str = attrs.field(default="", kw_only=True, validator=_need_text)
    """Requests of the same affinity share a beginning (turns of one session): several replicas send them to the same
    one, which has it in its cache."""
    text: str = attrs.field(default="", kw_only=True, validator=_need_text)
    """The prompt as text, for an engine without a tokenizer that takes texts (`takes_text`); then there are no
    `prompt_ids`."""
    id: str = attrs.field(factory=lambda: f"r{next(_numbers)}", init=False, on_setattr=attrs.setters.frozen)
    used: bool = attrs.field(default=False, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is another request, with an id of its own."""
        return _made, (type(self), self.prompt_ids, self.params, self.affinity, self.text)


def _made(kind: type[Request], prompt_ids: Sequence[int], params: SamplingParams, affinity: str, text: str) -> Request:
    return kind(prompt_ids, params, affinity=affinity, text=text)


@attrs.define(eq=False)
class Home:
    """The event loop that an engine lives in: its locks and connections are of that one."""

    moves: bool = True
    """Whether the engine can go on in another loop once its own has ended."""
    _loop: asyncio.AbstractEventLoop | None = attrs.field(default=None, init=False)

    def need(self, engine: str) -> None:
        """
        Raises:
            EngineError: this is another loop, and the engine's own runs, or is the only one it can live in.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if self._loop.is_running():
                raise EngineError(
                    f"the engine {engine!r} is used from two event loops at once; await it where it was used first, "
                    "from a thread by asyncio.run_coroutine_threadsafe(..., loop)"
                )
            if not self.moves:
                raise EngineError(
                    f"the engine {engine!r} can't go on in another event loop than the one it was used in first, which "
                    "has ended; make it, use it and close it within one asyncio.run"
                )
        self._loop = loop


STEPS: dict[str, tuple[State, State]] = {
    "pause": ("generating", "paused"),
    "sleep": ("paused", "asleep"),
    "wake": ("asleep", "paused"),
    "resume": ("paused", "generating"),
}
"""Call -> the states it leads from and to."""


def next_state(state: State, call: str) -> State:
    """Where a call leads from a state.

    Raises:
        EngineError: it skips a state.
    """
    start, end = STEPS[call]
    if state not in (start, end):
        first = "wake it first" if state == "asleep" else "pause it first"
        raise EngineError(f"cannot {call}: the engine is {state}; {first}")
    return end


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
    def state(self) -> State: ...

    @property
    def in_flight_count(self) -> int:
        """Requests that generate or wait for their place."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For prompts and answers as text; None for an engine of token ids alone."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Answer one request; many may be under way at once.

        Raises:
            RequestRefused: the request can't be served, now or later. Nothing was sent.
            EngineUnavailable: it can't be served now; the same again may be.
            EngineError: it was used before, or failed in the engine.
            EngineDied: the engine has crashed or was closed.
        """
        ...

    def abort(self, request: Request) -> None:
        """End a request now: its `generate` returns the tokens so far with finish_reason 'abort'.
        Nothing happens if it has ended."""
        ...

    async def pause(self) -> None:
        """Stop generating, requests stay; returns once no step is under way.

        Raises:
            EngineError: it is asleep.
        """
        ...

    async def sleep(self) -> None:
        """Give the memory back that can be had again, for a trainer on the same device; requests stay.

        Raises:
            EngineError: it isn't paused.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again; the engine is paused then.

        Raises:
            EngineError: it generates.
        """
        ...

    async def resume(self) -> None:
        """Go on generating.

        Raises:
            EngineError: it is asleep.
        """
        ...

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        """Take new weights, in whatever state the engine is. What becomes of requests under way is the engine's
        `in_flight` setting.

        Raises:
            EngineError: misfit weights; the old ones stay in force.
        """
        ...

    async def aclose(self) -> None:
        """End the engine; requests under way fail with `EngineError`. Idempotent."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """What an engine has too that hears of its own crash while nobody asks anything of it."""

    async def died(self) -> None:
        """Wait until the engine has crashed, which may be for ever. To be closed is no crash.

        Raises:
            EngineDied: it has.
        """
        ...
