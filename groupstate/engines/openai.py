"""Any server with an OpenAI-compatible API, or several of them, as an engine.

Takes: requests, weights. Makes: generations, from streams of tokens. Blocked by: a publication or a pause (nothing new
is asked for meanwhile), servers that are down. Unblocked by: their ends.

Rule 1: an answer is put together of pieces. A piece is one stream of one server under one weight version; closing the
stream ends it anywhere, and what it gave is kept. So abort, cancellation and publication work with any server.
Rule 2: no stream is open at a server while its weights change.
Rule 3: what can be asked again without harm is asked again here: a server that wasn't reached, or that says it is busy.
Whatever fails later is the session's failure.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from groupstate.core.arguments import boolean, seconds, shown, string
from groupstate.core.near import meant
from groupstate.engines.given import (
    need_count_or_none,
    need_in_flight,
    need_request,
    need_tokenizer,
    need_version,
    token_ids_of,
)
from groupstate.engines.http.answers import Failed, Garbage, Lacking, Piece
from groupstate.engines.http.client import NO_PLACE_S, Broken, NoEvents, NoPlace, NotReached, Stream
from groupstate.engines.http.dialects import DIALECTS, Ask, DialectName
from groupstate.engines.http.fleet import Fleet, Publish, ReplicaView, replicas_of
from groupstate.engines.http.routing import Replica
from groupstate.engines.http.rows import Row
from groupstate.engines.http.urls import checked_urls
from groupstate.engines.http.weights import Checkpoints, Given
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
from groupstate.engines.tasks import carried, guarded
from groupstate.errors import EngineDied, EngineError, EngineUnavailable, RequestRefused

TAIL_S = 5.0
"""For what a server says after the end of an answer, such as its counts."""

BUSY_S_MAX = 30.0
"""Longest pause that a busy server is believed to need."""


class OpenAIEngine:
    """Generates by streams from one or several servers.

    `async with OpenAIEngine(...)` checks that they are up; without, they are waited for by the first request.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        dialect: DialectName = "vllm",
        tokenizer: Tokenizer | None = None,
        api_key: str | None = None,
        in_flight: InFlight | None = None,
        weight_version: int = 0,
        log_probs: bool = True,
        context: int | None = None,
        vocabulary_size: int | None = None,
        weights_dir: str | os.PathLike[str] | None = None,
        publish: Publish | None = None,
        slots_max: int | None = None,
        stall_s: float = 600.0,
        reconnect_s: float = 300.0,
    ) -> None:
        """
        Args:
            urls: Servers of the same model, such as "http://localhost:8000".
            model: As the servers call it; None: the first that they list.
            dialect: `vllm`, `sglang`: token ids and log-probabilities. `text`, `chat`: any server, texts alone.
            tokenizer: For prompts and answers as text. The dialects of texts need none.
            in_flight: What new weights do to requests under way; "continue", and for texts "restart".
            weight_version: Of the weights that the servers have now.
            log_probs: Whether to ask for them; a server that doesn't give them is an error then.
            context: Tokens of prompt and answer together, where the servers don't say.
            vocabulary_size: Tokens that there are; prompts and answers with others are refused.
            weights_dir: A folder that the servers see under the same path. Live weights are written into it.
            publish: `await publish(url, weights, weight_version)` brings weights to a server, in place of the dialect.
            slots_max: Requests at one server at once; the others wait here. None: servers have queues of their own.
            stall_s: A stream that gives nothing for so long has failed.
            reconnect_s: How long servers may be down or busy; then the engine has died.

        Raises:
            EngineError: an argument that can't be.
        """
        _check_given(dialect, publish, stall_s, reconnect_s)
        slots_max = need_count_or_none("slots_max", slots_max)
        weight_version = need_version(weight_version)
        self._dialect = DIALECTS[dialect]()
        self._in_flight = _fitting_in_flight(dialect, in_flight, tokenizer, has_ids=self._dialect.has_ids)
        self.tokenizer = need_tokenizer(tokenizer)
        self._log_probs = boolean("log_probs", log_probs, error=EngineError) and self._dialect.has_ids
        self._context = need_count_or_none("context", context)
        self._vocabulary_size = need_count_or_none("vocabulary_size", vocabulary_size)
        self._checkpoints = Checkpoints(weights_dir)
        self._publish = publish
        self._stall_s = stall_s
        self._reconnect_s = reconnect_s

        self._rows: dict[str, Row] = {}
        self._state: State = "generating"
        self._changed = anyio.Event()
        """Set, and replaced, whenever somebody's wait may be over."""
        self._publishing_count = 0
        self._acting = anyio.Lock()
        """Held while servers are paused, resumed, put to sleep, woken or given weights."""
        self._end: EngineDied | None = None
        self._closed = False
        self._home = Home()
        name = None if model is None else string("model", model, error=EngineError)
        self._fleet = self._fleet_of(replicas_of(checked_urls(urls), api_key), name, weight_version, slots_max)

    def _fleet_of(
        self, replicas: list[Replica], model: str | None, weight_version: int, slots_max: int | None
    ) -> Fleet:
        return Fleet(
            replicas,
            self._dialect,
            model=model,
            version=weight_version,
            publish=self._publish,
            slots_max=slots_max,
            reconnect_s=self._reconnect_s,
            state=lambda: self._state,
            interrupt=lambda replica: self._close_streams(lambda row: row.replica is replica),
            on_change=self._tell,
            on_death=self._die,
        )

    # What it is ------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        return self._fleet.version

    @property
    def state(self) -> State:
        return self._state

    @property
    def in_flight_count(self) -> int:
        """Requests that generate or wait for their place."""
        return len(self._rows)

    @property
    def takes_text(self) -> bool:
        return not self._dialect.has_ids

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer together; None while it isn't known."""
        return self._context if self._context is not None else self._fleet.context

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        """The servers as they are seen now."""
        return self._fleet.views()

    async def start(self) -> None:
        """Check that every server is up.

        Raises:
            EngineError: one isn't, or isn't what it should be; the text says which.
        """
        self._check_alive()
        await self._fleet.start()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()

    # Generating ------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Generation:
        need_request(request)
        self._home.need("openai")
        self._check_alive()
        prompt_ids = self._checked_prompt(request)
        claim(request)
        row = Row(request, prompt_ids, self._dialect.has_ids)
        self._rows[request.id] = row
        try:
            while (finish_reason := await self._piece(row)) is None:
                pass
        finally:
            del self._rows[request.id]
            self._tell()
        return row.generation(finish_reason, self.tokenizer)

    def abort(self, request: Request) -> None:
        if row := self._rows.get(request.id):
            row.close("abort")

    async def _piece(self, row: Row) -> FinishReason | None:
        """One stream; None if another must follow."""
        row.begin()
        return await guarded(self._scoped(row), lambda: row.close("abort"))

    async def _scoped(self, row: Row) -> FinishReason | None:
        """In a task of its own, which nothing but the row's scope ends."""
        self._check_alive()
        with row.scope:
            replica = await self._place(row)
            try:
                # Between the place and this line a publication may have begun.
                return await self._stream(row, replica) if self._fleet.router.is_open else None
            finally:
                row.replica = None
                self._fleet.router.release(replica)
                self._tell()
        return self._closed_early(row)

    async def _place(self, row: Row) -> Replica:
        if self.context is None:
            # Servers that nobody has asked yet may say it.
            await self._fleet.ready()
        try:
            self._check_length(row.request, row.prompt_ids)
        except RequestRefused:
            row.request.used = False
            raise
        return await self._fleet.acquire(row.request.affinity)

    def _closed_early(self, row: Row) -> FinishReason | None:
        """After the row's scope was cancelled: by `close`, by the engine's end, or because the stream was silent."""
        why = row.why
        if row.piece is not None and row.piece.finish is not None:
            return row.keep()  # Only what comes after the end was missing.
        if self._end is not None or self._closed:
            self._check_alive()
        if why is None:
            raise EngineUnavailable(f"the server was silent for {self._stall_s:g} s, {_so_far(row)}")
        if why == "abort":
            return row.keep() or "abort"
        if not row.can_go_on:
            row.restart()
            return None
        return row.keep()

    async def _stream(self, row: Row, replica: Replica) -> FinishReason | None:
        ask = self._ask(row)
        try:
            body = msgspec.json.encode(self._dialect.body(ask))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestRefused(f"request {row.request.id} can't be written as JSON: {error}") from error
        piece = Piece(ask.tokens_max, self._dialect.has_ids, self._log_probs, self._vocabulary_size)
        row.piece, row.replica, row.version = piece, replica, self._fleet.version
        row.scope.deadline = self._deadline(replica)
        try:
            async with replica.client.stream(self._dialect.path, body) as stream:
                if stream.status != 200:
                    await self._refused(row, replica, stream)
                    return None
                row.refused_since = None
                await self._read(row, replica, stream, ask, piece)
        except NoPlace as error:
            self._be_patient(row, f"no connection to {replica.url} can be made ({error})")
            await anyio.sleep(NO_PLACE_S)
            return None
        except NotReached as error:
            self._fleet.failed(replica, str(error), lost=True, reachable=False)
            return None
        except Broken as error:
            self._fleet.failed(replica, str(error), lost=True)
            if piece.finish is None:
                self._ask_once_more(row, replica, error)
                return None
        except (Garbage, NoEvents) as error:
            self._fleet.failed(replica, str(error))
            raise EngineUnavailable(f"{replica.url} sent {error} ({_so_far(row)})") from error
        except Lacking as error:
            raise EngineError(f"{replica.url}: {error}") from error
        except Failed as error:
            if error.code is not None and 400 <= error.code < 500:
                raise RequestRefused(f"{replica.url} refuses request {row.request.id}: {error}") from error
            self._fleet.failed(replica, str(error))
            raise EngineUnavailable(f"{replica.url}: {error} ({_so_far(row)})") from error
        self._fleet.served(replica)
        return row.keep()

    def _ask(self, row: Row) -> Ask:
        params, before = row.request.params, len(row.token_ids)
        left = params.max_tokens - before
        if self._dialect.has_ids and self.context is not None:
            left = min(left, self.context - len(row.prompt_ids) - before)
        prompt_ids = (*row.prompt_ids, *row.token_ids)
        return Ask(self._fleet.model, prompt_ids, row.request.text, left, params, row.seed, self._log_probs, before)

    async def _read(self, row: Row, replica: Replica, stream: Stream, ask: Ask, piece: Piece) -> None:
        async with contextlib.aclosing(stream.events()) as events:
            async for data in events:
                if data != b"[DONE]":
                    piece.take(self._dialect.chunk(data, piece, ask))
                due = anyio.current_time() + TAIL_S if piece.finish else self._deadline(replica)
                # A timer costs more than the rest of an event, so it isn't moved by a little.
                if not 0.0 <= due - row.scope.deadline < self._stall_s / 20:
                    row.scope.deadline = due
        if piece.finish is None:
            raise Garbage("a stream that ended before the answer did")

    def _deadline(self, replica: Replica) -> float:
        """Until when something must come."""
        return math.inf if replica.frozen else anyio.current_time() + self._stall_s

    async def _refused(self, row: Row, replica: Replica, stream: Stream) -> None:
        answer = await stream.answer()
        what = f"{replica.url} answers request {row.request.id} with {answer.words}"
        if answer.status in (429, 503):
            pause_s = min(stream.retry_after_s or 0.0, BUSY_S_MAX)
            self._fleet.failed(replica, answer.words, pause_s=max(pause_s, replica.pause_s))
            self._be_patient(row, what)
        elif answer.status >= 500 or answer.late:
            self._fleet.failed(replica, answer.words)
            raise EngineUnavailable(what)
        elif answer.status >= 400 and not answer.missing and answer.status != 401:
            raise RequestRefused(what)
        else:
            raise EngineError(f"{what} ({self._dialect.path})")

    def _be_patient(self, row: Row, what: str) -> None:
        now = time.monotonic()
        row.refused_since = row.refused_since or now
        if now - row.refused_since >= self._reconnect_s:
            raise EngineUnavailable(f"{what}, for {self._reconnect_s:g} s now")

    def _ask_once_more(self, row: Row, replica: Replica, error: Broken) -> None:
        """A server may close an idle connection just as it is used; but what ends servers must not be sent for ever."""
        if error.answered or row.asked_twice:
            raise EngineUnavailable(f"the connection to {replica.url} failed: {error} ({_so_far(row)})") from error
        row.asked_twice = True

    # Checks ----------------------------------------------------------------------------------------

    def _checked_prompt(self, request: Request) -> tuple[int, ...]:
        self._dialect.check(request.id, request.params)
        if not self._dialect.has_ids:
            given = token_ids_of(request.prompt_ids, f"the prompt of request {request.id}", RequestRefused)
            if given or not request.text:
                what = "token ids" if given else "an empty prompt"
                raise RequestRefused(f"request {request.id} has {what}; the dialect {self._dialect.name!r} takes texts")
            return ()
        prompt_ids = tuple(token_ids_of(request.prompt_ids, f"the prompt of request {request.id}", RequestRefused))
        if not prompt_ids:
            what = "a text; give token ids, or a tokenizer to the engine" if request.text else "an empty prompt"
            raise RequestRefused(f"request {request.id} has {what}")
        size = self._vocabulary_size
        if min(prompt_ids) < 0 or (size is not None and max(prompt_ids) >= size):
            bad = min(prompt_ids) if min(prompt_ids) < 0 else max(prompt_ids)
            there = "tokens begin at 0" if size is None else f"the vocabulary has 0 to {size - 1}"
            raise RequestRefused(f"request {request.id} has token {bad}; {there}")
        self._check_length(request, prompt_ids)
        return prompt_ids

    def _check_length(self, request: Request, prompt_ids: tuple[int, ...]) -> None:
        if self.context is not None and len(prompt_ids) >= self.context:
            raise RequestRefused(
                f"the prompt of request {request.id} has {len(prompt_ids)} tokens; the context of {self.context} "
                "needs room for at least one more"
            )

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDied(str(self._end)) from self._end
        if self._closed:
            raise EngineDied("the engine is closed")

    # States ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """vLLM in dev mode keeps the streams; elsewhere they are closed, and gone on with later."""
        await self._change("pause", self._pause)

    async def sleep(self) -> None:
        self._check_alive()
        if self._state == "paused":
            await self._fleet.ready()
        await self._change("sleep", self._sleep)

    async def wake(self) -> None:
        await self._change("wake", self._fleet.wake)

    async def resume(self) -> None:
        await self._change("resume", self._resume)

    async def _change(self, call: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One change of state at a time, done to its end."""
        self._check_alive()
        async with self._acting:
            self._check_alive()
            state = next_state(self._state, call)
            if state != self._state:
                await carried(self._changed_to(state, work))

    async def _changed_to(self, state: State, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The servers' state and the engine's: whoever is cancelled meanwhile leaves them the same."""
        await work()
        self._enter(state)

    async def _pause(self) -> None:
        self._enter("paused")  # First, so that nothing new begins.
        unable = await self._fleet.freeze()
        for row in self._rows.values():
            if row.replica is not None and row.replica.frozen:
                row.scope.deadline = math.inf
        await self._close_streams(lambda row: row.replica in unable or not _is_frozen(row))

    async def _sleep(self) -> None:
        await self._close_streams(lambda row: True)
        await self._fleet.sleep()

    async def _resume(self) -> None:
        await self._fleet.thaw()
        for row in self._rows.values():
            if row.replica is not None:
                row.scope.deadline = self._deadline(row.replica)

    def _enter(self, state: State) -> None:
        self._state = state
        self._set_gate()
        self._tell()

    def _set_gate(self) -> None:
        self._fleet.router.open(self._state == "generating" and not self._publishing_count)

    # Weights ---------------------------------------------------------------------------------------

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        """As the port says. Once servers are being given weights, it goes on to the end even if it is cancelled."""
        self._check_alive()
        weight_version = need_version(weight_version)
        scope = anyio.CancelScope()
        try:
            await guarded(self._publish_unless(scope, weights, weight_version), scope.cancel)
        except EngineDied:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; version {self.weight_version} stays") from error

    async def _publish_unless(self, given_up: anyio.CancelScope, weights: Weights, weight_version: int) -> None:
        """In a task of its own, which nothing but the scope ends, and that only before the servers hear of it."""
        with given_up:
            if not self._fleet.takers:
                await self._fleet.ready()
            given = await self._prepared(weights, weight_version)
            settle = self._checkpoints.refused
            try:
                await self._publish_given(given)
                settle = self._checkpoints.taken
            finally:
                with anyio.CancelScope(shield=True):
                    await settle(given)

    async def _publish_given(self, given: Given) -> None:
        self._publishing_count += 1
        self._set_gate()
        try:
            while True:
                while self._must_finish_first():
                    await self._changed.wait()
                    self._check_alive()
                async with self._acting:
                    self._check_alive()
                    if not self._must_finish_first():
                        with anyio.CancelScope(shield=True):
                            await self._swap(given)
                        return
        finally:
            self._publishing_count -= 1
            self._set_gate()

    def _must_finish_first(self) -> bool:
        streams = any(row.replica is not None for row in self._rows.values())
        return self._in_flight == "keep" and self._state == "generating" and streams

    async def _swap(self, given: Given) -> None:
        await self._close_streams(lambda row: True)
        await self._fleet.publish(given)
        if self._in_flight == "restart":
            for row in self._rows.values():
                row.restart()

    async def _close_streams(self, chosen: Callable[[Row], bool]) -> None:
        """Close streams, and wait until they are; their rows go on once they may."""
        for row in self._rows.values():
            if row.replica is not None and chosen(row):
                row.close("again")
        while any(row.replica is not None and chosen(row) for row in self._rows.values()):
            await self._changed.wait()

    async def _prepared(self, weights: Weights, weight_version: int) -> Given:
        if self._publish is not None:
            return Given(weight_version, weights)
        if not self._dialect.takes_weights:
            raise EngineError(
                f"the dialect {self._dialect.name!r} can't give a server weights; give the engine publish="
            )
        root = next((replica.root for replica in self._fleet.replicas if replica.root is not None), None)
        return await self._checkpoints.prepare(weights, weight_version, root)

    # The end ---------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Streams are closed, servers are left as they are; what was written to `weights_dir` goes."""
        self._closed = True
        self._end_all(lambda: EngineDied("the engine is closed"))
        await carried(self._close())

    async def _close(self) -> None:
        while self._rows:
            await self._changed.wait()
        async with self._acting:
            await self._fleet.aclose()
            await self._checkpoints.aclose()

    def _die(self, error: EngineDied) -> None:
        if self._end is None and not self._closed:
            self._end = error
            self._end_all(lambda: EngineDied(str(error)))

    def _end_all(self, error: Callable[[], EngineDied]) -> None:
        for row in self._rows.values():
            row.scope.cancel()
        self._fleet.router.fail(error)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _is_frozen(row: Row) -> bool:
    return row.replica is not None and row.replica.frozen


def _so_far(row: Row) -> str:
    count = len(row.token_ids) + (len(row.piece.token_ids) if row.piece is not None else 0)
    return f"after {count} tokens of request {row.request.id}"


def _check_given(dialect: Any, publish: Any, stall_s: Any, reconnect_s: Any) -> None:
    """Refuse with `EngineError` what can't be by itself."""
    if dialect not in list(DIALECTS):
        words = f"{', '.join(map(repr, DIALECTS))}{meant(dialect, DIALECTS)}"
        raise EngineError(f"dialect is {shown(dialect)}; it must be one of {words}")
    if publish is not None and not callable(publish):
        raise EngineError(f"publish is {shown(publish)}; it must be async def publish(url, weights, weight_version)")
    if not seconds("stall_s", stall_s, endless=True, error=EngineError):
        raise EngineError(f"stall_s is {stall_s!r}; it must be above 0")
    seconds("reconnect_s", reconnect_s, endless=True, error=EngineError)


def _fitting_in_flight(
    dialect: str, in_flight: InFlight | None, tokenizer: Tokenizer | None, *, has_ids: bool
) -> InFlight:
    """What new weights do to requests under way, in a dialect with token ids or of texts alone.

    Raises:
        EngineError: the dialect can't do so, or has no use for the tokenizer.
    """
    if in_flight is None:
        in_flight = "continue" if has_ids else "restart"
    found = need_in_flight(in_flight)
    if not has_ids and (found == "continue" or tokenizer is not None):
        what = "tokenizer" if tokenizer is not None else "in_flight='continue'"
        raise EngineError(f"the dialect {dialect!r} knows no tokens, so {what} can't be; leave it out")
    return found
