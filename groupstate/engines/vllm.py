"""vLLM in this process: its AsyncLLM behind the port.

Rule 1: requests stay in vLLM. What freezes, wakes or recomputes them is vLLM's own, so that seeds, penalties and
grammars go on as if nothing had been; only `restart` sends a request twice.
Rule 2: one change of state or weights at a time, and once it touches vLLM it is carried to its end: a cancellation
can't leave vLLM in between.
Rule 3: nobody waits for a dead engine. vLLM fails its requests itself; other calls into it are watched.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs

from groupstate.core.arguments import shown
from groupstate.core.events import VersionSpan
from groupstate.engines.checkpoint import Checkpoint, WeightFiles
from groupstate.engines.death import Death
from groupstate.engines.given import checked_prompt, need_in_flight, need_request, need_tokenizer, need_version
from groupstate.engines.orphans import Guard
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
from groupstate.engines.tasks import carried, carried_on, guarded, loose
from groupstate.engines.tokenizer import TransformersTokenizer
from groupstate.errors import EngineDied, EngineError, EngineUnavailable, MissingExtra

try:
    import vllm
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise MissingExtra("the engine 'vllm'", "vllm", "vllm") from error

from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate.engines.vllm_params import ParamsMaker, refusal
from groupstate.engines.vllm_start import (
    exit_codes,
    folder_of_model,
    need_sleep_level,
    need_usable,
    process_ids,
    started,
    words,
)

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


@attrs.define(eq=False)
class _Row:
    """A request under way."""

    given_up: bool = False
    """By `abort`, or by the end of the engine."""
    waiting: anyio.CancelScope | None = None
    """While it waits for its turn."""
    publication: int = 0
    """How many publications there had been when it was sent to vLLM."""
    sent: Any = None
    """Where vLLM puts what it makes of it."""
    freeing: "asyncio.Task[None] | None" = None
    """Takes it out of vLLM, which then gives what it has made so far."""


class VllmEngine:
    """Generates with vLLM, in whatever batches it makes."""

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        tokenizer: Tokenizer | None = None,
        in_flight: InFlight = "continue",
        weight_version: int = 0,
        sleep_level: int = 1,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            llm: Yours: `aclose` leaves it running.
            tokenizer: In place of vLLM's.
            in_flight: What new weights do to requests under way.
            sleep_level: vLLM's. 1 keeps the weights in the memory of the host; 2 drops them, so that new ones must be
                published before it generates again.
            scratch: Where weights that are published as tensors are written, such as a folder below /dev/shm; None is
                the system's folder for temporary files. The workers must see it.

        Raises:
            EngineError: settings that can't be, or a vLLM that lacks what this needs.
        """
        self._in_flight = need_in_flight(in_flight)
        self._sleep_level = need_sleep_level(sleep_level)
        need_usable(llm)
        self.llm = llm
        self.tokenizer = need_tokenizer(tokenizer)
        if tokenizer is None and llm.tokenizer is not None:
            self.tokenizer = TransformersTokenizer(llm.tokenizer)
        self._params = ParamsMaker(llm)
        self._files = WeightFiles(lambda: folder_of_model(llm), scratch)
        self._weight_version = need_version(weight_version)
        self._is_own = False
        """Whether it was started here, and ends here."""
        self._guard: Guard | None = None
        self._is_labelled = False
        """Whether vLLM knows the first weight version."""
        self._state: State = "generating"
        self._asleep: set[str] = set()
        """Whose memory is given back, by vLLM's names."""
        self._weights_lost = False
        self._rows: dict[str, _Row] = {}
        self._lock = anyio.Lock()
        """Held by whoever changes state or weights."""
        self._publishing = False
        """Whether new requests wait."""
        self._publication_count = 0
        self._changed = anyio.Event()
        """Set, and replaced, whenever somebody's wait may be over."""
        self._closed = False
        self._home = Home(moves=False)  # vLLM would say that it had died.
        self._end: Exception | None = None
        self._death_seen = Death()

    @classmethod
    async def start(
        cls,
        model: str | os.PathLike[str],
        *,
        in_flight: InFlight = "continue",
        weight_version: int = 0,
        sleep_level: int = 1,
        scratch: str | os.PathLike[str] | None = None,
        **engine_args: Any,
    ) -> Self:
        """An engine with a vLLM of its own, which `aclose` ends. The loop stands still until it is up.

        Args:
            model: A folder, or a name that vLLM knows.
            engine_args: vLLM's own (`AsyncEngineArgs`), such as `max_model_len`, `gpu_memory_utilization`, `dtype`.

        Raises:
            EngineError: settings that can't be, or vLLM did not start; nothing is left running.
        """
        need_in_flight(in_flight)
        need_version(weight_version)
        need_sleep_level(sleep_level)
        if not isinstance(model, str | os.PathLike):
            raise EngineError(f"model is {shown(model)}; it must be a folder, or a name that vLLM knows")
        llm = started(os.fspath(model), engine_args)
        try:
            engine = cls(
                llm, in_flight=in_flight, weight_version=weight_version, sleep_level=sleep_level, scratch=scratch
            )
        except BaseException:
            llm.shutdown()
            raise
        engine._home.need("vllm")
        engine._is_own = True
        # A signal that nobody handles ends this process, and would leave vLLM's with all its memory.
        engine._guard = Guard.over(process_ids(llm))
        return engine

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def state(self) -> State:
        return self._state

    @property
    def in_flight_count(self) -> int:
        return len(self._rows)

    async def generate(self, request: Request) -> Generation:
        need_request(request)
        self._home.need("vllm")
        self._check_alive()
        config = self.llm.model_config
        # vLLM doesn't look at the vocabulary, and one token out of range ends its process.
        prompt_ids = checked_prompt(request, context=config.max_model_len, vocabulary_size=config.get_vocab_size())
        params = self._params.made(request, len(prompt_ids))
        prompt = tokens_input(prompt_ids)
        claim(request)
        row = self._rows[request.id] = _Row()
        try:
            # No coroutine more than it takes: each stays until the answer is there, for the garbage collector to visit.
            output = await self._attempt(request, row, prompt, params)
            while self._is_to_restart(row, output):
                output = await self._attempt(request, row, prompt, params)
        except EngineError:
            raise
        except Exception as error:
            raise self._failure(request, error) from error
        finally:
            del self._rows[request.id]
            if self._closed:
                self._tell()
        if output is None:
            return Generation((), (), (), "abort")
        return self._generation(request, output)

    def abort(self, request: Request) -> None:
        if row := self._rows.get(request.id):
            self._give_up(row)

    async def pause(self) -> None:
        """Requests keep their place and their cache in vLLM."""
        await self._go("pause", lambda: self.llm.pause_generation(mode="keep", clear_cache=False))

    async def sleep(self) -> None:
        """As the port says, with vLLM's sleep mode, which CPUs don't have: there it only stands still. Requests are
        computed anew when they go on.

        Raises:
            EngineError: it isn't paused, or vLLM was started without its sleep mode.
        """
        if current_platform.is_sleep_mode_available() and not self.llm.model_config.enable_sleep_mode:
            raise EngineError(
                "vLLM was started without its sleep mode, so sleep gives no memory back; start it with "
                "enable_sleep_mode=True"
            )
        await self._go("sleep", self._fall_asleep)

    async def wake(self) -> None:
        """Take the memory of the weights again; that of the cache comes with `resume`, since vLLM generates as soon
        as it has both."""
        await self._go("wake", lambda: self._wake("weights"))

    async def resume(self) -> None:
        """
        Raises:
            EngineError: it is asleep, or its weights were dropped in its sleep and no others were published.
        """
        await self._go("resume", self._resume)

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        """As the port says. Tensors are written to files, in the types of the model's; don't change them until this
        returns. Requests under way are computed anew under the new weights, up to where they are.

        Raises:
            EngineError: misfit weights, or vLLM could not load them; the old ones stay in force.
            EngineDied: and vLLM could not load the old ones either.
        """
        self._home.need("vllm")
        self._check_alive()
        weight_version = need_version(weight_version)
        scope = anyio.CancelScope()
        await guarded(self._publish_unless(scope, weights, weight_version), scope.cancel)

    async def _publish_unless(self, given_up: anyio.CancelScope, weights: Weights, weight_version: int) -> None:
        """In a task of its own, which nothing but the scope ends, and that only before vLLM is given weights."""
        with given_up:
            async with self._lock:
                self._check_alive()
                await self._label_first()
                checkpoint = await self._checked_weights(weights, f"the weights of version {weight_version}")
                self._publishing = True
                self._publication_count += 1
                try:
                    await self._stop_for_publication()
                    with anyio.CancelScope(shield=True):
                        await self._take(checkpoint, weight_version)
                finally:
                    self._publishing = False
                    self._tell()
                    self._files.discard_other(checkpoint)

    async def aclose(self) -> None:
        """As the port says; ends vLLM too if it was started here."""
        self._closed = True
        self._release_rows()
        await carried(self._close())

    async def died(self) -> None:
        self._home.need("vllm")
        self._output_handler().add_done_callback(self._note_end)
        await self._death_seen.wait()
        raise self._death()

    def _note_end(self, handler: "asyncio.Task[Any]") -> None:
        if not self._closed:
            self._death_seen.happen()

    async def _close(self) -> None:
        while self._rows:
            await self._changed.wait()
        if self._is_own:
            self._is_own = False
            if self.llm.output_handler is not None:
                # While vLLM shuts down it would take the end of the process for a death, and log a traceback.
                self.llm.output_handler.cancel()
            await anyio.to_thread.run_sync(self._shut_down)
        self._files.close()

    def _shut_down(self) -> None:
        self.llm.shutdown()
        if self._guard is not None:
            self._guard.release()

    # Requests --------------------------------------------------------------------------------------

    def _is_to_restart(self, row: _Row, output: Any) -> bool:
        return (
            self._in_flight == "restart"
            and output is not None
            and output.finish_reason == "abort"
            and not row.given_up
            and row.publication != self._publication_count
        )

    async def _attempt(self, request: Request, row: _Row, prompt: Any, params: vllm.SamplingParams) -> Any:
        """What vLLM made of it; None if it never came there."""
        row.sent = None
        if not self._is_labelled or self._publishing:
            await self._wait_turn(row)
        self._check_alive()
        if row.given_up:
            return None
        # Nothing suspends from here until vLLM has it, so that a publication has all requests or none.
        row.publication = self._publication_count
        try:
            row.sent = await self.llm.add_request(request.id, prompt, params)
            if row.given_up:
                self._give_up(row)
            result = await row.sent.get()
        except BaseException as error:
            if row.sent is not None:
                await carried(self._free(row.sent.request_id, internal=True))
            elif isinstance(error, asyncio.CancelledError):
                # vLLM may have it, under a name that it hasn't told.
                await carried(self._free(request.id, internal=False))
            raise
        finally:
            if row.freeing is not None:
                await carried_on(row.freeing)
        if self._closed or self._end:
            self._check_alive()
        return result.outputs[0]

    def _give_up(self, row: _Row) -> None:
        """Have a request end with what it has, wherever it is."""
        row.given_up = True
        if row.waiting is not None:
            row.waiting.cancel()
        if row.sent is not None and row.freeing is None:
            row.freeing = loose(self._given_up(row.sent))

    async def _given_up(self, sent: Any) -> None:
        try:
            await self._free(sent.request_id, internal=True)
        except Exception as error:
            # What waits for its tokens would wait for ever.
            sent.put(error)

    async def _free(self, name: str, *, internal: bool) -> None:
        """Take a request out of vLLM.

        Args:
            internal: the name is vLLM's own.
        """
        try:
            await self.llm.abort(name, internal=internal)
        except VLLMServerError:
            pass  # It is dead: there is nothing to free.

    async def _wait_turn(self, row: _Row) -> None:
        with anyio.CancelScope() as row.waiting:
            if not self._is_labelled:
                async with self._lock:
                    await self._label_first()
            while self._publishing:
                await self._changed.wait()
        row.waiting = None

    async def _label_first(self) -> None:
        """Tell vLLM the first version, once; the caller holds the lock."""
        if not self._is_labelled:
            await self._call(self.llm.update_weight_version(str(self._weight_version)))
            await self._call(self.llm.get_supported_tasks())  # It remembers them, and asks before it takes a request.
            self._is_labelled = True

    def _failure(self, request: Request, error: Exception) -> EngineError:
        if self.llm.errored:
            return self._death()
        if isinstance(error, TypeError | ValueError | VLLMClientError):
            request.used = False  # It was looked at and not taken.
            return refusal(request, error)
        return EngineUnavailable(f"vLLM could not serve request {request.id}: {words(error)}")

    def _generation(self, request: Request, output: Any) -> Generation:
        if output.finish_reason not in FINISH_REASONS:
            raise EngineUnavailable(f"vLLM ended request {request.id} with {output.finish_reason!r}; its log says why")
        token_ids = tuple(output.token_ids)
        return Generation(
            token_ids=token_ids,
            log_probs=_log_probs(output.logprobs) if token_ids else (),
            spans=tuple(_span(span) for span in output.weight_versions or ()),
            finish_reason=FINISH_REASONS[output.finish_reason],
            text=self.tokenizer.decode(token_ids) if self.tokenizer else "",
        )

    # State -----------------------------------------------------------------------------------------

    async def _go(self, call: str, work: Callable[[], Awaitable[Any]]) -> None:
        self._home.need("vllm")
        self._check_alive()
        async with self._lock:
            self._check_alive()
            state = next_state(self._state, call)
            if state != self._state:
                await carried(self._changed_to(state, work))

    async def _changed_to(self, state: State, work: Callable[[], Awaitable[Any]]) -> None:
        """vLLM's state and the engine's: whoever is cancelled meanwhile leaves them the same."""
        await self._call(work())
        self._state = state

    async def _fall_asleep(self) -> None:
        await self.llm.sleep(level=self._sleep_level, mode="keep")
        self._weights_lost |= self._sleep_level == 2 and current_platform.is_sleep_mode_available()
        self._asleep = {"weights", "kv_cache"}

    async def _wake(self, part: str) -> None:
        if part in self._asleep:
            await self.llm.wake_up(tags=[part])
            self._asleep.remove(part)

    async def _resume(self) -> None:
        if self._weights_lost:
            raise EngineError(
                "cannot resume: the weights were dropped in the engine's sleep (sleep_level 2); publish weights first"
            )
        # With its cache vLLM goes on by itself.
        await (self._wake("kv_cache") if self._asleep else self.llm.resume_generation())

    # Weights ---------------------------------------------------------------------------------------

    async def _checked_weights(self, weights: Weights, what: str) -> Checkpoint:
        """A folder that fits, which for tensors is written now.

        Raises:
            EngineError: there is none.
        """
        try:
            return await anyio.to_thread.run_sync(self._files.checked, weights, what)
        except EngineError as error:
            raise EngineError(f"{error}; version {self._weight_version} stays") from error

    async def _stop_for_publication(self) -> None:
        """Let vLLM stand still, with what is under way as `in_flight` has it."""
        lets_finish = self._in_flight == "keep" and self._state == "generating"
        mode = "abort" if self._in_flight == "restart" else "wait" if lets_finish else "keep"
        try:
            # Caches are of the old weights. A sleeping engine has none.
            await self._call(self.llm.pause_generation(mode=mode, clear_cache=self._state != "asleep"))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._go_on()
            raise

    async def _go_on(self) -> None:
        """As before the publication."""
        if self._state == "generating" and not self.llm.errored and self._end is None:
            await self._call(self.llm.resume_generation())

    async def _take(self, checkpoint: Checkpoint, weight_version: int) -> None:
        try:
            self._check_alive()
            await self._call(self._wake("weights"))
            await self._load_or_go_back(checkpoint, weight_version)
            await self._call(self.llm.update_weight_version(str(weight_version)))
            self._files.replace(checkpoint)
            self._weight_version = weight_version
        finally:
            await self._go_on()

    async def _load_or_go_back(self, checkpoint: Checkpoint, weight_version: int) -> None:
        """
        Raises:
            EngineError: the old weights are in force again.
            EngineDied: none are.
        """
        try:
            await self._load(checkpoint)
        except EngineDied:
            raise
        except EngineError as error:
            # Some of the new weights may be in vLLM by now.
            try:
                await self._load(self._files.loaded)
            except EngineDied:
                raise
            except EngineError as again:
                self._end = EngineError(
                    f"it could load neither the weights of version {weight_version} ({error}) nor those of version "
                    f"{self._weight_version} again ({again})"
                )
                self._release_rows()
                self._death_seen.happen()
                raise self._death() from again
            stays = f"version {self._weight_version} stays"
            raise EngineError(f"the weights of version {weight_version} can't be loaded; {stays}: {error}") from error

    async def _load(self, checkpoint: Checkpoint) -> None:
        arguments = {"weights_path": str(checkpoint.folder)}
        await self._call(self.llm.collective_rpc("reload_weights", kwargs=arguments))
        self._weights_lost = False

    # The end ---------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._closed or self._end is not None or self.llm.errored:
            raise self._death()

    def _death(self) -> EngineDied:
        if self._closed:
            return EngineDied("the engine is closed")
        if self._end is not None:
            return EngineDied(f"the engine died: {self._end}")
        return EngineDied(f"the engine died: {words(self.llm.dead_error)}{exit_codes(self.llm)}")

    def _release_rows(self) -> None:
        """Let every request under way see that the engine has ended."""
        for row in self._rows.values():
            self._give_up(row)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _call(self, call: Awaitable[Any]) -> Any:
        """What vLLM answers. Over the death of its process it would be silent for ever.

        Raises:
            EngineError: it can't do it.
            EngineDied: it died.
        """
        result, failure = None, None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_on_death, tasks.cancel_scope)
            try:
                result = await call
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if self.llm.errored:
            raise self._death() from failure
        if isinstance(failure, EngineError):
            raise failure
        if failure is not None:
            raise EngineError(f"vLLM can't do it: {words(failure)}") from failure
        return result

    async def _cancel_on_death(self, scope: anyio.CancelScope) -> None:
        await asyncio.wait([self._output_handler()])
        scope.cancel()

    def _output_handler(self) -> "asyncio.Task[Any]":
        """vLLM's own task that passes on what its process says, and ends with it."""
        self.llm._run_output_handler()  # Does nothing where it runs, which it does unless vLLM was made without a loop.
        handler: asyncio.Task[Any] = self.llm.output_handler
        return handler


def _log_probs(flat: Any) -> tuple[float, ...]:
    """Of the tokens themselves, which stand first at each place; the others there, if any, vLLM gives unasked."""
    found, starts = flat.logprobs, flat.start_indices
    return tuple(found) if len(found) == len(starts) else tuple(map(found.__getitem__, starts))


def _span(span: Any) -> VersionSpan:
    try:
        return VersionSpan(span.start, span.end, int(span.version))
    except ValueError:
        raise EngineError(
            f"vLLM says that weights {span.version!r} made a token, which nobody published here; don't set its weight "
            "version yourself"
        ) from None
