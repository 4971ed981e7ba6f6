"""Closes a run when the scheduler asks for it.

Rule 1: the handler is there before the run is given out, and for as long as the run is open.
Rule 2: what arrives while the run closes changes nothing; a run closes once.
"""

import signal
import threading
from collections.abc import Iterable, Sequence

import anyio
import anyio.abc

from groupstate.core.near import meant
from groupstate.errors import BadSettings
from groupstate.logs import Logger
from groupstate.runtime.run import Run

log = Logger("groupstate.signals")

UNSTOPPABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


def signals_named(names: Sequence[str | int]) -> tuple[signal.Signals, ...]:
    """The signals that `close_on` names.

    Raises:
        BadSettings: no such signal, one that nobody can catch, or a thread that gets none.
    """
    if not isinstance(names, str | int | Iterable):
        raise BadSettings(f"close_on is {names!r}; it must be a list of signals, such as ['SIGTERM'], or () for none")
    found = tuple(_signal(name) for name in ((names,) if isinstance(names, str | int) else names))
    if found and threading.current_thread() is not threading.main_thread():
        raise BadSettings(
            "close_on needs the main thread, which alone gets signals; elsewhere, and under groupstate.sync, call "
            "run.close('SIGTERM', mark=True) from a handler of your own"
        )
    return found


def _signal(name: str | int) -> signal.Signals:
    try:
        found = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError) as error:
        near = meant(name, [known.name for known in signal.Signals])
        raise BadSettings(
            f"close_on has {name!r}; it names signals, such as 'SIGTERM' or signal.SIGUSR1{near}"
        ) from error
    if found in UNSTOPPABLE:
        raise BadSettings(
            f"close_on has {found.name}, which no process can catch; name the signal that comes before it"
        )
    return found


async def close_on_signal(
    run: Run, signals: Sequence[signal.Signals], *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Wait for one of `signals`, then mark and close the run."""
    with anyio.open_signal_receiver(*signals) as received:
        task_status.started()
        async for number in received:
            name = signal.Signals(number).name
            log.info("closing on a signal", signal=name)
            await run.close(name, mark=True)
