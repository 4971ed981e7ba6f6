"""What runs beside the block of a run: the rollout, its deadlines, and who watches the log, the disk and signals.

Rule 1: all of it begins with the block and has ended behind it; before it ends the run is closed.
Rule 2: what ends the rollout or the log reaches whoever waits; if nobody does, it is raised behind the block.
"""

import contextlib
import signal
from collections.abc import AsyncIterator, Sequence

import anyio
import anyio.from_thread
import anyio.to_thread

from groupstate.core.held import DISK_HOLD
from groupstate.errors import LogFailed, RolloutDied
from groupstate.log.space import LOOK_EVERY_NS, Space
from groupstate.logs import Logger
from groupstate.runtime.rollout import Rollout
from groupstate.runtime.run import Run
from groupstate.runtime.session import describe
from groupstate.runtime.signals import close_on_signal

log = Logger("groupstate.run")

NEVER = 2**62
"""A number that no event of a log will have."""


@contextlib.asynccontextmanager
async def running(run: Run, signals: Sequence[signal.Signals]) -> AsyncIterator[None]:
    """All that runs beside the block of a run; in the end the run is closed.

    Raises:
        What the block raised, or the closing, or what nobody was told of.
    """
    failure: BaseException | None = None
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        run.portal = portal
        tasks.start_soon(_watch_log, run)
        if signals:
            await tasks.start(close_on_signal, run, signals)
        if (space := run._controller.space) is not None:
            tasks.start_soon(_watch_space, run, space)
        if run.deadlines.needed:
            tasks.start_soon(run.deadlines.run)
        if run._rollout is not None:
            tasks.start_soon(_run_rollout, run, run._rollout)
        try:
            yield
        except BaseException as error:
            # Raised again below, outside of the task groups, which would wrap it.
            failure = error
            run.hurry()
        came = await run._closing.close_whatever_comes("closed" if failure is None else type(failure).__name__)
        failure = failure or came
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    _raise_untold(run)


async def _watch_log(run: Run) -> None:
    """Wait for the log to fail, and tell whoever waits: nobody else may be writing."""
    try:
        await run.ledger.log.durable(NEVER)
    except LogFailed as error:
        if not run._closing.begun:
            log.error("the log failed", error=str(error))
            run._controller.die(error)


async def _watch_space(run: Run, space: Space) -> None:
    """Once a second see whether there is room again: while nothing is drawn, nothing may be written either."""
    while not run._controller.closing:
        await anyio.sleep(LOOK_EVERY_NS / 1e9)
        if space.problem and run.ledger.log.payloads.blocks:
            await anyio.to_thread.run_sync(space.look)
        elif space.problem:
            space.look()
        held = run.book.held_reason
        if space.problem != (held if held.startswith(DISK_HOLD) else ""):
            run._controller.settle()


async def _run_rollout(run: Run, rollout: Rollout) -> None:
    """Run the rollout until the run closes; its death reaches every waiting sampler."""
    controller, closing = run._controller, run._closing
    controller.admits = True
    try:
        with closing.rollout_scope:
            controller.settle()
            await rollout.run()
    except anyio.get_cancelled_exc_class():
        raise
    except BaseException as error:
        cause = _first_cause(error)
        log.error("the rollout died", error=describe(cause))
        controller.die(cause)
    finally:
        controller.admits = False
        closing.rollout_ended.set()


def _first_cause(error: BaseException) -> BaseException:
    """The first error inside of the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _raise_untold(run: Run) -> None:
    """Raise the rollout's death if no sampler was told of it.

    Raises:
        RolloutDied: it died and nobody waited.
        LogFailed: the log failed and nobody waited.
    """
    dead = run._controller.dead
    if dead is None or run._controller.death_told:
        return
    if isinstance(dead, LogFailed):
        raise dead
    raise RolloutDied(f"the rollout died while nobody waited for it: {describe(dead)}") from dead
