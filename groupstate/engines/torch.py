"""A small language model that generates in batches on one thread: the embedded engine.

Rule 1: the worker thread owns the model, the cache and the slots; the event loop only leaves requests, marks
and weights under the lock, and is told of outcomes through `call_soon_threadsafe`.
Rule 2: the lock is never held while the model computes, and nobody polls: the worker waits on a condition.
Rule 3: a request joins or leaves between two steps of the batch, never within one.
"""

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import attrs
import torch
from torch import Tensor

from groupstate.core.arguments import integer, shown
from groupstate.core.events import VersionSpan
from groupstate.engines.checkpoint import plain_tensor
from groupstate.engines.death import Death
from groupstate.engines.given import (
    checked_prompt,
    need_count,
    need_count_or_none,
    need_in_flight,
    need_no_extra,
    need_request,
    need_tokenizer,
    need_version,
)
from groupstate.engines.port import (
    FinishReason,
    Generation,
    InFlight,
    Request,
    State,
    Tokenizer,
    Weights,
    claim,
    next_state,
)
from groupstate.engines.slots import SlotBatch
from groupstate.engines.tasks import carried
from groupstate.engines.transformer import Transformer, TransformerConfig
from groupstate.errors import EngineDied, EngineError, Unsupported

Outcome: TypeAlias = tuple["asyncio.Future[Any]", Any]
"""A future and what it is to become: an exception or a result."""

SLOTS_MAX = 128
"""Requests that generate at once: 16 groups of 8 sessions. The cache of the default model takes 33 MB for them."""


@attrs.define(eq=False)
class _Row:
    """A request under way."""

    request: Request
    future: "asyncio.Future[Generation]"
    prompt_ids: tuple[int, ...]
    length_max: int
    """Tokens that the answer may have."""
    uniforms: Tensor
    """One draw from [0, 1) for each token to come, so that neighbours can't shift a request's luck."""
    token_ids: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    spans: list[VersionSpan] = attrs.field(factory=list)
    live: bool = True
    """False once it has an outcome, or nobody waits for one; its slot is then free at the next step."""

    def append(self, token: int, log_prob: float, weight_version: int) -> FinishReason | None:
        """Keep a token; says why the answer ends with it, if it does."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        count = len(self.token_ids)
        if self.spans and self.spans[-1].weight_version == weight_version:
            self.spans[-1] = VersionSpan(self.spans[-1].start, count, weight_version)
        else:
            self.spans.append(VersionSpan(count - 1, count, weight_version))
        if token in self.request.params.stop_token_ids:
            return "stop"
        return "length" if count == self.length_max else None

    def restart(self) -> None:
        """Begin anew: the same draws under other weights."""
        self.token_ids.clear()
        self.log_probs.clear()
        self.spans.clear()

    def generation(self, finish_reason: FinishReason) -> Generation:
        return Generation(tuple(self.token_ids), tuple(self.log_probs), tuple(self.spans), finish_reason)


class TorchEngine:
    """Continuous batching over a key-value cache with a fixed number of slots."""

    def __init__(
        self,
        model: Transformer | TransformerConfig,
        tokenizer: Tokenizer | None = None,
        *,
        slots_max: int = SLOTS_MAX,
        in_flight: InFlight = "continue",
        device: str = "cpu",
        weight_version: int = 0,
        seed: int = 0,
        threads: int | None = 1,
    ) -> None:
        """
        Args:
            model: Copied, so that a trainer may go on changing its own; a config gives fresh weights.
            slots_max: Requests that generate at once; the others wait in order of arrival.
            in_flight: What new weights do to requests under way.
            seed: Of fresh weights, and of the draws of requests that have no seed of their own.
            threads: CPU threads of the worker's arithmetic. More than one waits for the slowest at every operation,
                which a small model feels on a busy machine; None leaves torch's own number.

        Raises:
            EngineError: an argument that can't be.
        """
        self.tokenizer = need_tokenizer(tokenizer)
        self._slots_max = need_count("slots_max", slots_max)
        self._in_flight = need_in_flight(in_flight)
        self._threads = need_count_or_none("threads", threads)
        self._weight_version = need_version(weight_version)
        seed = integer("seed", seed, error=EngineError)
        if not isinstance(model, Transformer | TransformerConfig):
            raise EngineError(f"model is {shown(model)}; it must be a Transformer, or a TransformerConfig")
        own = Transformer(model, seed=seed) if isinstance(model, TransformerConfig) else copy.deepcopy(model)
        self._model = _on(device, own).eval()
        self._chance = torch.Generator().manual_seed(seed)

        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="groupstate-torch-engine", daemon=True)
        self._waiting: deque[_Row] = deque()
        self._rows: dict[str, _Row] = {}
        self._published: list[tuple[Mapping[str, Tensor], int, asyncio.Future[None]]] = []
        self._stepping = False
        self._state: State = "generating"
        self._holds_memory = False
        """Whether the worker has a cache, which it makes with its first step."""
        self._pausing: list[asyncio.Future[None]] = []
        """Who waits for the worker to stand still, or to have given its memory back."""
        self._end: BaseException | None = None
        self._death = Death()
        self._closed = False

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
        prompt_ids = self._checked_prompt(request)
        future: asyncio.Future[Generation] = _future()
        with self._changed:
            self._check_alive()
            claim(request)
            row = self._new_row(request, prompt_ids, future)
            self._rows[request.id] = row
            self._waiting.append(row)
            self._wake_worker()
        try:
            generation = await future
        finally:
            # Whatever ended the wait, the place is free before anybody hears of it.
            with self._changed:
                self._drop(row)
        return self._with_text(generation)

    def abort(self, request: Request) -> None:
        with self._changed:
            if (row := self._rows.get(request.id)) and row.live:
                self._drop(row)
                _post([(row.future, row.generation("abort"))])

    async def pause(self) -> None:
        with self._changed:
            self._enter("pause")
            if not self._stepping:
                return
            stopped: asyncio.Future[None] = _future()
            self._pausing.append(stopped)
        await stopped

    async def sleep(self) -> None:
        """The cache is given back, and every request under way is computed anew when it goes on. Weights stay."""
        with self._changed:
            self._enter("sleep")
            if not self._holds_memory:
                return
            freed: asyncio.Future[None] = _future()
            self._pausing.append(freed)
            self._changed.notify()
        await freed

    async def wake(self) -> None:
        with self._changed:
            self._enter("wake")

    async def resume(self) -> None:
        with self._changed:
            self._enter("resume")
            self._wake_worker()

    def _enter(self, call: str) -> None:
        self._check_alive()
        self._state = next_state(self._state, call)

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        """As the port says. A publication that is cancelled before the weights are in force is withdrawn."""
        weight_version = need_version(weight_version)
        checked = self._checked_weights(weights, weight_version)
        applied: asyncio.Future[None] = _future()
        with self._changed:
            self._check_alive()
            self._published.append((checked, weight_version, applied))
            self._wake_worker()
        try:
            await applied
        finally:
            with self._changed:
                # They may wait for requests under way, and nobody would know of them any more.
                self._published = [published for published in self._published if published[2] is not applied]
                self._changed.notify()

    async def aclose(self) -> None:
        with self._changed:
            self._closed = True
            outcomes = self._take_pending("the engine was closed", None)
            self._changed.notify()
        _post(outcomes)
        if self._thread.ident is not None:
            await carried(anyio.to_thread.run_sync(self._thread.join))

    async def died(self) -> None:
        await self._death.wait()
        self._check_alive()

    # The loop's side -------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDied(f"the engine died: {type(self._end).__name__}: {self._end}") from self._end
        if self._closed:
            raise EngineDied("the engine is closed")

    def _checked_prompt(self, request: Request) -> tuple[int, ...]:
        need_no_extra(request, "torch")
        config = self._model.config
        return tuple(checked_prompt(request, context=config.context, vocabulary_size=config.vocabulary_size))

    def _new_row(self, request: Request, prompt_ids: tuple[int, ...], future: "asyncio.Future[Generation]") -> _Row:
        length_max = min(request.params.max_tokens, self._model.config.context - len(prompt_ids))
        seed = request.params.seed_bits
        chance = self._chance if seed is None else torch.Generator().manual_seed(seed)
        return _Row(request, future, prompt_ids, length_max, torch.rand(length_max, generator=chance))

    def _checked_weights(self, weights: Weights, weight_version: int) -> dict[str, Tensor]:
        """A copy that fits, so that the caller's training can't change it on the way.

        Raises:
            EngineError: names, shapes or values that can't be.
        """
        present = self._model.state_dict()
        stays = f"version {self._weight_version} stays"
        if not isinstance(weights, Mapping):
            raise EngineError(
                f"the engine 'torch' takes weights as tensors by name, and version {weight_version} is "
                f"{type(weights).__name__}; give model.state_dict(); {stays}"
            )
        if missing := sorted(present.keys() - weights.keys()):
            raise EngineError(f"the weights of version {weight_version} lack {missing}; {stays}")
        if unknown := sorted(weights.keys() - present.keys(), key=str):
            raise EngineError(f"the weights of version {weight_version} have unknown {unknown}; {stays}")
        for name, own in present.items():
            new = weights[name]
            if not isinstance(new, Tensor) or new.shape != own.shape:
                given = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
                raise EngineError(
                    f"{name} of version {weight_version} is a {given}; it must be a tensor of shape "
                    f"{tuple(own.shape)}; {stays}"
                )
        try:
            return {
                name: plain_tensor(name, weights[name], own.dtype, f"version {weight_version}").to(
                    own.device, copy=True
                )
                for name, own in present.items()
            }
        except EngineError as error:
            raise EngineError(f"{error}; {stays}") from error

    def _wake_worker(self) -> None:
        # Started by the first request, so that an engine nobody used leaves no thread behind.
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify()

    def _drop(self, row: _Row) -> None:
        row.live = False
        self._rows.pop(row.request.id, None)

    def _with_text(self, generation: Generation) -> Generation:
        if self.tokenizer is None:
            return generation
        return attrs.evolve(generation, text=self.tokenizer.decode(generation.token_ids))

    # The worker's side -----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                batch: SlotBatch[_Row] = SlotBatch(self._model, self._slots_max)
                while self._turn(batch):
                    pass
        except BaseException as error:
            with self._changed:
                self._end = error
                outcomes = self._take_pending(f"the engine died: {type(error).__name__}: {error}", error)
            _post(outcomes)
            self._death.happen()

    def _turn(self, batch: SlotBatch[_Row]) -> bool:
        """One change of the batch and one step of it; False when the engine closes."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._closed:
                return False
            batch.keep([row.live for row in batch.rows])
            outcomes = self._apply_published(batch)
            self._stepping = self._state == "generating"
            if self._stepping:
                self._refill(batch)
            elif self._state == "asleep":
                batch.free()
                self._holds_memory = False
                outcomes += self._stopped()
        _post(outcomes)
        if self._stepping:
            self._holds_memory |= bool(batch.rows)
            drawn = batch.step() if batch.rows else []
            with self._changed:
                self._stepping = False
                outcomes = self._deliver(drawn)
            _post(outcomes)
        return True

    def _has_work(self) -> bool:
        if self._closed or self._published:
            return True
        if self._state == "asleep":
            return self._holds_memory
        return bool(self._rows) and self._state == "generating"

    def _apply_published(self, batch: SlotBatch[_Row]) -> list[Outcome]:
        if not self._published or self._must_finish_first(batch):
            return []
        outcomes: list[Outcome] = []
        for weights, weight_version, applied in self._published:
            self._model.load_state_dict(weights)
            self._weight_version = weight_version
            outcomes.append((applied, None))
        self._published.clear()
        batch.forget_cache()
        if self._in_flight == "restart":
            for row in batch.rows:
                row.restart()
        return outcomes

    def _must_finish_first(self, batch: SlotBatch[_Row]) -> bool:
        return self._in_flight == "keep" and self._state == "generating" and bool(batch.rows)

    def _refill(self, batch: SlotBatch[_Row]) -> None:
        if self._published:
            return  # They wait until the rows under way have finished under the old weights.
        joining: list[_Row] = []
        while self._waiting and len(batch.rows) + len(joining) < self._slots_max:
            row = self._waiting.popleft()
            if row.live:
                joining.append(row)
        batch.join(joining)

    def _deliver(self, drawn: Sequence[tuple[_Row, int, float]]) -> list[Outcome]:
        outcomes = self._stopped()
        for row, token, log_prob in drawn:
            if row.live and (finish_reason := row.append(token, log_prob, self._weight_version)):
                self._drop(row)
                outcomes.append((row.future, row.generation(finish_reason)))
        return outcomes

    def _stopped(self) -> list[Outcome]:
        outcomes: list[Outcome] = [(stopped, None) for stopped in self._pausing]
        self._pausing.clear()
        return outcomes

    def _take_pending(self, message: str, cause: BaseException | None) -> list[Outcome]:
        """Everything that somebody waits for, each with an error of its own; nothing is left behind."""
        rows = list(self._rows.values())
        futures = [row.future for row in rows] + [applied for _, _, applied in self._published] + self._pausing
        for row in rows:
            self._drop(row)
        self._waiting.clear()
        self._published.clear()
        self._pausing.clear()
        outcomes: list[Outcome] = []
        for future in futures:
            error = EngineDied(message)
            error.__cause__ = cause
            outcomes.append((future, error))
        return outcomes


def _on(device: Any, model: Transformer) -> Transformer:
    try:
        return model.to(device)
    except Exception as error:
        # Whatever torch raises of a device that it doesn't know, or that isn't there.
        raise EngineError(f"the model can't be put on device {shown(device)}: {error}") from error


def _future() -> "asyncio.Future[Any]":
    try:
        return asyncio.get_running_loop().create_future()
    except RuntimeError:
        raise Unsupported(
            "TorchEngine needs a running asyncio event loop; run it with anyio's asyncio backend"
        ) from None


def _post(outcomes: Sequence[Outcome]) -> None:
    """Let the loops that wait know, from any thread, with one wake-up each."""
    loops = {future.get_loop(): None for future, _ in outcomes}
    for loop in loops:
        own = [outcome for outcome in outcomes if outcome[0].get_loop() is loop]
        try:
            loop.call_soon_threadsafe(_settle, own)
        except RuntimeError:
            pass  # The loop is closed: nobody waits there any more.


def _settle(outcomes: Sequence[Outcome]) -> None:
    for future, value in outcomes:
        if future.done():
            continue
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
