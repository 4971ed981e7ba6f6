"""Trainer and engine take turns on one device: the engine stands still and asleep while the trainer learns.

| step | who | the engine is then |
| --- | --- | --- |
| a batch was sampled | the trainer's loop | generating |
| `pause` | entering the block | paused: requests under way keep their tokens and wait |
| `sleep` | entering the block | asleep: its memory is the trainer's |
| train | the block | asleep |
| `publish` | the block | asleep, under new weights |
| `wake` | leaving the block | paused |
| `resume` | leaving the block | generating: requests go on under the new weights |

Rule 1: however a turn ends, the engine generates again, unless it has died: entering may fail in the middle, the block
may raise, and the waits may be cancelled, each of them. A call of the engine's is never cut short.
Rule 2: from the end of `pause` to `resume` nothing is generated; a turn in which somebody else resumed the engine is an
error.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from groupstate.engines.port import Engine, Weights
from groupstate.engines.tasks import loose, settled
from groupstate.errors import BadSettings, EngineError
from groupstate.logs import Logger
from groupstate.runtime.session import describe

if TYPE_CHECKING:
    from groupstate.runtime.run import Run

log = Logger("groupstate.turns")


class TrainerTurn:
    """One turn of the trainer: an async context manager, made by `run.trainer_turn()` and used once."""

    def __init__(self, run: "Run", *, sleep: bool) -> None:
        self._run = run
        self._sleep = sleep
        self._state = "new"

    async def publish(self, weight_version: int, weights: Weights | None = None) -> None:
        """`run.publish_weights`, while the engine stands still.

        Raises:
            EngineError: outside of the block, or the engine generates; or it refused the weights.
        """
        if self._state != "on":
            raise EngineError(
                f"cannot publish version {weight_version} in this turn: it {_TOLD[self._state]}; publish in its block, "
                "or by run.publish_weights at any time"
            )
        self._need_still()
        await self._run.publish_weights(weight_version, weights)

    async def __aenter__(self) -> "TrainerTurn":
        engine = self._begin()
        try:
            for step in (engine.pause, engine.sleep) if self._sleep else (engine.pause,):
                if (cancelled := await _to_its_end(step())) is not None:
                    raise cancelled
                # The shield hid what came by a scope, and the block may train for long before it waits again.
                await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException as error:
            await self._end(error)
            raise
        self._state = "on"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._state != "on":
            raise EngineError(f"cannot leave this turn: it {_TOLD[self._state]}")
        try:
            if error is None:
                self._need_still()
        finally:
            await self._end(error)

    # Inside ------------------------------------------------------------------------------------------

    def _begin(self) -> Engine:
        """Take the turn, before anything is awaited.

        Raises:
            BadSettings: the run has no engine.
            EngineError: it can't be taken now.
            WrongEventLoop: this is not the run's.
        """
        self._run._need_loop("begin a trainer's turn")
        engine = self._run.engine
        if engine is None:
            raise BadSettings("a trainer's turn pauses the run's engine, and this run has none; open_run(engine=...)")
        if self._state != "new":
            raise EngineError(f"this turn {_TOLD[self._state]}; take another: run.trainer_turn()")
        if self._run._controller.turn is not None:
            raise EngineError("a trainer's turn is on already, so a second one can't begin; leave the first one before")
        if engine.state != "generating":
            raise EngineError(
                f"a trainer's turn can't begin: the engine is {engine.state} already, by a call from outside, and the "
                "end of the turn would resume it; resume it first"
            )
        self._run._controller.turn = self
        self._state = "begun"
        return engine

    def _need_still(self) -> None:
        """
        Raises:
            EngineError: somebody else has resumed the engine.
        """
        assert self._run.engine is not None
        if self._run.engine.state == "generating":
            raise EngineError(
                "the engine generates in the middle of a trainer's turn: it was resumed by a call from outside; only "
                "the end of the turn may do that"
            )

    async def _end(self, error: BaseException | None) -> None:
        """Have the engine generate again. What fails in it is raised, or noted on the error that there is already.

        Raises:
            EngineError: the engine can't go on.
            CancelledError: the wait was cancelled meanwhile; the engine generates.
        """
        assert self._run.engine is not None
        cancelled: asyncio.CancelledError | None = None
        try:
            cancelled = await _to_its_end(_restored(self._run.engine))
        except Exception as failed:
            # Whatever an engine raises: what the block raised must not be lost over it.
            log.error("the engine can't go on after a trainer's turn", error=describe(failed))
            if error is None:
                raise
            error.add_note(f"the engine can't go on after the trainer's turn: {describe(failed)}")
        finally:
            self._state = "over"
            self._run._controller.turn = None
        if cancelled is not None:
            raise cancelled


_TOLD = {"new": "has not begun", "begun": "is beginning", "on": "is on", "over": "is over"}
"""What an error says of the states of a turn."""


async def _restored(engine: Engine) -> None:
    if engine.state == "asleep":
        await engine.wake()
    await engine.resume()


async def _to_its_end(call: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Wait for a call of the engine's, whoever is cancelled meanwhile: nobody could say what state an engine is in that
    was cut short on its way into another.

    Returns:
        The cancellation that came meanwhile, for the caller to raise; what the call raised beside it is noted on it.

    Raises:
        What the call raises.
    """
    task = loose(call)
    cancelled = await settled(task)
    try:
        task.result()
    except Exception as failed:
        if cancelled is None:
            raise
        log.error("an engine failed in a trainer's turn that was cancelled", error=describe(failed))
        cancelled.add_note(f"meanwhile the engine failed: {describe(failed)}")
    return cancelled
