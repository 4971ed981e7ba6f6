"""An engine whose answers a test writes down.

Rule 1: same script, same calls, same order: same generations, to the last virtual microsecond.
Rule 2: it keeps every promise of the port, so whatever runs on it runs on a real engine.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import attrs

from groupstate.core.arguments import seconds, shown
from groupstate.core.events import VersionSpan
from groupstate.engines.death import Death
from groupstate.engines.given import (
    need_count_or_none,
    need_in_flight,
    need_no_extra,
    need_request,
    need_tokenizer,
    need_version,
    token_ids_of,
)
from groupstate.engines.port import (
    FinishReason,
    Generation,
    Home,
    InFlight,
    Request,
    State,
    Tokenizer,
    Weights,
    claim,
    next_state,
)
from groupstate.errors import EngineDied, EngineError, RequestRefused

Answer: TypeAlias = Sequence[int] | BaseException
Script: TypeAlias = Callable[[Sequence[int]], Answer] | Sequence[Answer]
"""A function from prompt ids to the answer's ids, or answers to be given in the order of the calls. An
exception, given or raised, is raised by that `generate`."""


@attrs.define(eq=False)
class _Row:
    """A request under way."""

    scope: anyio.CancelScope
    token_ids: list[int] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    aborted: bool = False
    generates: bool = False
    """It has its place and has begun."""


class ScriptedEngine:
    """Generates what the script says, one token every `token_s` seconds of the loop's clock."""

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        start_s: float = 0.0,
        token_s: float = 0.0,
        slots_max: int | None = None,
        context: int | None = None,
        in_flight: InFlight = "continue",
        log_prob: float = -0.5,
        weight_version: int = 0,
        fits: Callable[[Any], bool] = lambda weights: True,
    ) -> None:
        """
        Args:
            start_s: Seconds before the first token.
            slots_max: Requests that generate at once, the others wait; None: no limit.
            context: Tokens of prompt and answer together; None: no limit.
            in_flight: What new weights do to requests under way.
            log_prob: What every token gets.
            fits: Whether published weights fit; those that don't are refused.

        Raises:
            EngineError: an argument that can't be.
        """
        if not callable(script) and (isinstance(script, str | bytes) or not isinstance(script, Sequence)):
            raise EngineError(
                f"script is {shown(script)}; it must be a function of the prompt ids, or a list of answers"
            )
        if not callable(fits):
            raise EngineError(f"fits is {shown(fits)}; it must be a function of the weights")
        self.start_s = seconds("start_s", start_s, error=EngineError)
        self.token_s = seconds("token_s", token_s, error=EngineError)
        self.published: list[tuple[int, Weights]] = []
        """Versions and weights in the order they came."""
        self._script = script
        self._call_count = 0
        self.tokenizer = need_tokenizer(tokenizer)
        self._context = need_count_or_none("context", context)
        self._log_prob = log_prob
        self._weight_version = need_version(weight_version)
        self._fits = fits
        self._rows: dict[str, _Row] = {}
        slots_max = need_count_or_none("slots_max", slots_max)
        self._slots = anyio.Semaphore(slots_max) if slots_max is not None else None
        self._in_flight = need_in_flight(in_flight)
        self._state: State = "generating"
        self._changed = anyio.Event()
        """Set, and replaced, whenever somebody's wait may be over."""
        self._publishing_count = 0
        self._end: Exception | None = None
        self._death = Death()
        self._closed = False
        self._home = Home()

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def state(self) -> State:
        return self._state

    @property
    def in_flight_count(self) -> int:
        """Requests that generate or wait for a slot."""
        return len(self._rows)

    async def generate(self, request: Request) -> Generation:
        need_request(request)
        self._home.need("scripted")
        self._check_alive()
        self._check(request)
        claim(request)
        row = self._rows[request.id] = _Row(anyio.CancelScope())
        finish_reason: FinishReason = "abort"
        try:
            with row.scope:
                finish_reason = await self._generate(request, row)
        finally:
            del self._rows[request.id]
            self._tell()
        if not row.aborted:
            self._check_alive()
        return self._generation(row, finish_reason)

    def abort(self, request: Request) -> None:
        if row := self._rows.get(request.id):
            row.aborted = True
            row.scope.cancel()

    async def pause(self) -> None:
        await self._enter("pause")

    async def sleep(self) -> None:
        await self._enter("sleep")

    async def wake(self) -> None:
        await self._enter("wake")

    async def resume(self) -> None:
        await self._enter("resume")

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        self._check_alive()
        weight_version = need_version(weight_version)
        await anyio.lowlevel.checkpoint()
        if not self._fits(weights):
            raise EngineError(
                f"the weights of version {weight_version} don't fit; version {self._weight_version} stays"
            )
        self._publishing_count += 1
        try:
            while self._must_finish_first():
                await self._changed.wait()
                self._check_alive()
            self._weight_version = weight_version
            self.published.append((weight_version, weights))
            if self._in_flight == "restart":
                for row in self._rows.values():
                    row.token_ids.clear()
                    row.versions.clear()
        finally:
            self._publishing_count -= 1
            self._tell()

    async def aclose(self) -> None:
        self._closed = True
        self._interrupt()
        await anyio.lowlevel.checkpoint()

    async def died(self) -> None:
        await self._death.wait()
        self._check_alive()

    def die(self, error: Exception) -> None:
        """Fail every request under way, and all to come, as a crash of the engine would."""
        self._end = error
        self._interrupt()
        self._death.happen()

    async def _enter(self, call: str) -> None:
        self._check_alive()
        self._state = next_state(self._state, call)
        self._tell()
        await anyio.lowlevel.checkpoint()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _must_finish_first(self) -> bool:
        under_way = any(row.generates for row in self._rows.values())
        return self._in_flight == "keep" and self._state == "generating" and under_way

    async def _generate(self, request: Request, row: _Row) -> FinishReason:
        if self._slots is None:
            return await self._speak(request, row)
        async with self._slots:
            return await self._speak(request, row)

    async def _speak(self, request: Request, row: _Row) -> FinishReason:
        answer = self._next_answer(request)
        while self._in_flight == "keep" and self._publishing_count:
            await self._changed.wait()
        row.generates = True
        await anyio.sleep(self.start_s)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            raise EngineError(
                f"the script's answer to request {request.id} is the text {shown(answer)}; it must be token ids, such "
                "as tokenizer.encode(text)"
            )
        room = None if self._context is None else self._context - len(request.prompt_ids)
        length_max = request.params.max_tokens if room is None else min(request.params.max_tokens, room)
        # Not a loop over the answer: new weights may make the row begin anew.
        while len(row.token_ids) < len(answer):
            await anyio.sleep(self.token_s)
            while self._state != "generating":
                await self._changed.wait()
            token = answer[len(row.token_ids)]
            row.token_ids.append(token)
            row.versions.append(self._weight_version)
            if token in request.params.stop_token_ids:
                return "stop"
            if len(row.token_ids) == length_max:
                return "length"
        return "stop"

    def _next_answer(self, request: Request) -> Answer:
        if callable(self._script):
            return self._script(request.prompt_ids)
        if self._call_count == len(self._script):
            raise EngineError(f"the script has {len(self._script)} answers, and {request.id} asks for one more")
        self._call_count += 1
        return self._script[self._call_count - 1]

    def _generation(self, row: _Row, finish_reason: FinishReason) -> Generation:
        return Generation(
            token_ids=tuple(row.token_ids),
            log_probs=(self._log_prob,) * len(row.token_ids),
            spans=_spans(row.versions),
            finish_reason=finish_reason,
            text=self.tokenizer.decode(row.token_ids) if self.tokenizer else "",
        )

    def _check(self, request: Request) -> None:
        need_no_extra(request, "scripted")
        prompt_ids = token_ids_of(request.prompt_ids, f"the prompt of request {request.id}", RequestRefused)
        if not prompt_ids:
            raise RequestRefused(f"request {request.id} has an empty prompt; give at least one token, such as bos")
        if min(prompt_ids) < 0:
            raise RequestRefused(f"request {request.id} has a token below 0: {min(prompt_ids)}")
        if self._context is not None and len(prompt_ids) >= self._context:
            raise RequestRefused(
                f"the prompt of request {request.id} has {len(prompt_ids)} tokens; the context of "
                f"{self._context} needs room for at least one more"
            )

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDied(f"the engine died: {type(self._end).__name__}: {self._end}") from self._end
        if self._closed:
            raise EngineDied("the engine is closed")

    def _interrupt(self) -> None:
        for row in self._rows.values():
            row.scope.cancel()
        self._tell()


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions."""
    spans: list[VersionSpan] = []
    for version, run in itertools.groupby(versions):
        start = spans[-1].stop if spans else 0
        spans.append(VersionSpan(start, start + len(list(run)), version))
    return tuple(spans)
