"""Opens runs, new or again: `open_run` is the only way in and out.

Rule: what can be wrong is told before anything is written; leaving the block leaves a log that can be opened again.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import anyio

from groupstate import logs
from groupstate.core.arguments import integer, integer_or_none
from groupstate.core.custom import CustomRule
from groupstate.core.near import meant
from groupstate.core.prompt import GROUP_SIZE_MAX
from groupstate.core.rules import Rules
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import BadInput, BadSettings, Unsupported
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.port import Durability, EventLog
from groupstate.log.retention import Keep, checked_keep
from groupstate.log.rundir import RunDir
from groupstate.runtime import options, recovery
from groupstate.runtime.beside import running
from groupstate.runtime.controller import Controller
from groupstate.runtime.keeping import EVENTS_PER_SNAPSHOT, Keeping, checked_events
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import CheckpointMark, OnRewind
from groupstate.runtime.rollout import Rollout
from groupstate.runtime.run import Run
from groupstate.runtime.session import SessionFunction
from groupstate.runtime.settings import load_function
from groupstate.runtime.sharing import sharable
from groupstate.runtime.signals import signals_named
from groupstate.runtime.source_identity import check_same, identity
from groupstate.runtime.sources import Source, as_source
from groupstate.runtime.tracking import TrackBy, Tracker, Tracking, exit_code_of


@contextlib.asynccontextmanager
async def open_run(
    path: str | Path | None = None,
    *,
    rules: Rules | None = None,
    selection: CustomRule | None = None,
    source: Any = None,
    session: SessionFunction | None = None,
    engine: Engine | None = None,
    params: SamplingParams | None = None,
    group_size: int = 8,
    weight_version: int | None = None,
    resume_at: CheckpointMark | None = None,
    on_rewind: OnRewind = "keep",
    source_changed: bool = False,
    grace_s: float = 10.0,
    cancel_grace_s: float = 5.0,
    close_on: Sequence[str | int] = (),
    durability: Durability = "fsync",
    disk_bytes_max: int | None = None,
    disk_free_min_bytes: int | None = None,
    keep_log: Keep = "all",
    take_over: bool = False,
    log: EventLog | None = None,
    snapshot_events: int = EVENTS_PER_SNAPSHOT,
    seed: int = 0,
    trackers: Sequence[Tracker] = (),
    track_by: TrackBy = "weight_version",
    clock_ns: Callable[[], int] = time.time_ns,
) -> AsyncIterator[Run]:
    """Open a run, new or again, and close it at the end of the block.

    Args:
        path: run directory, made if it isn't there; None keeps everything in memory.
        rules: None takes the log's, or the defaults for a new run.
        selection: a function in place of the rules' own `selection`: `rule(book, rules, request)` returns `Select`
            and `Drop`. The log keeps its import path, by which the run finds it again unless it is given again.
        source: where prompts come from: a `Source`, a .jsonl or .parquet file, any iterable of prompts, rows or
            contents; a mapping of dataset names to such, from which the rules' shares draw; None if only `run.submit`
            brings prompts.
        session: `async def session(ctx) -> Trajectory | list[Trajectory]`, run for each session of each group;
            None if the sessions are dispatched by the caller.
        engine: what `ctx.generate` uses. It is not closed with the run.
        params: how it generates.
        group_size: sessions per group, where the prompt doesn't say.
        weight_version: the trainer's version, any integer, -1 too for weights from before a step 0; None is 0 for a new
            run, the last published for an old one.
        resume_at: go back to this mark.
        on_rewind: with `resume_at`, what becomes of groups that ended on the line that is gone back from, those
            submitted after the mark or stamped above its version: `keep` them, or `evict` them as stale.
        source_changed: the source is another than before, on purpose: go on in it behind the last position.
        grace_s: seconds that sessions get to end when the run closes; then they start over on the next opening.
        close_on: signals, such as "SIGTERM", on which the run makes a mark and closes: waiting samplers get
            `RunIsClosed`, and `run.final_mark` is the mark. Needs the main thread.
        cancel_grace_s: seconds that a cancelled session gets to end before it is given up as lost.
        durability: what acknowledged events survive: `fsync` the machine, `os` the process, `memory` nothing.
        disk_bytes_max: once the run directory takes more bytes, no prompts are drawn until it takes less.
        disk_free_min_bytes: the same once the file system has less left.
        keep_log: what stays of the events on disk: `all` of them, all with old segments packed (`archive`), or, as a
            number, those since so many checkpoints.
        take_over: take the run from a writer on another host, of whom nobody here can tell whether it lives.
        log: an event log to use instead of `path`.
        snapshot_events: events between two snapshots, which make opening quick.
        trackers: where numbers go besides, such as W&B or a file (`groupstate.integrations.trackers`): the metrics of
            each batch, how the run stands, and what `run.track` is given. They are finished once the run has closed.
        track_by: the step of what they get: the `weight_version` of a batch, or the number of the `batch`.

    Raises:
        LogInUse: another process writes this run.
        NotARun: the path holds something else.
        CorruptLog, LostEvents, UnsupportedLog: the log can't be trusted; no event was changed (bytes of an interrupted
            commit behind the last one may be gone).
        BadMark: `resume_at` doesn't fit this log.
        BadSettings: settings that can't be; a source whose order isn't the one that the log's positions count in.
        TrackerFailed: a tracker could not be opened.
        RolloutDied: in place of `SampleError` where nobody waited when the rollout died.
    """
    _need_asyncio()
    logs.prepare()
    options.check_log(log)
    event_log, tracking = log, Tracking()
    try:
        options.check_path(path)
        options.check_rules(rules)
        options.check_selection(selection)
        options.check_session(session)
        options.check_engine(engine, params)
        options.check_resumption(resume_at, on_rewind, source_changed, take_over)
        options.check_times(grace_s, cancel_grace_s, clock_ns)
        group_size = integer("group_size", group_size, least=1, most=GROUP_SIZE_MAX, error=BadSettings)
        weight_version = integer_or_none("weight_version", weight_version, error=BadSettings)
        seed = integer("seed", seed, error=BadSettings)
        snapshot_events, keep_log = checked_events(snapshot_events), checked_keep(keep_log)
        signals = signals_named(close_on)
        prompts = None if source is None else as_source(source)
        tracking = Tracking(trackers, by=track_by)
        await tracking.start()
        if event_log is None:
            event_log = _open_log(path, durability, keep_log, take_over, disk_bytes_max, disk_free_min_bytes)
        else:
            _check_beside_log(path, keep_log, disk_bytes_max, disk_free_min_bytes)
        ledger, custom = _ledger(event_log, rules, selection, group_size, clock_ns)
        controller = _controller(ledger, custom, prompts, group_size)
        rollout = _rollout(controller, session, engine, params, cancel_grace_s)
        run = Run(ledger, controller, rollout, engine, grace_s)
        Keeping(ledger, events=snapshot_events)
        if controller.source is not None and not source_changed:
            check_same(ledger.book, controller.source)
        _begin(run, event_log, weight_version, resume_at, on_rewind, seed)
        run._compare_engine()
        run._track_with(tracking)
    except BaseException as error:
        await _give_up(error, event_log, tracking)
        raise
    async with _finishing(tracking, run), running(run, signals):
        yield run


async def _give_up(error: BaseException, event_log: EventLog | None, tracking: Tracking) -> None:
    """Close what is open already, since there will be no run to close it."""
    try:
        if event_log is not None:
            with anyio.CancelScope(shield=True):
                await event_log.aclose()
    finally:
        await tracking.finish(exit_code_of(error, tracking.signal))


@contextlib.asynccontextmanager
async def _finishing(tracking: Tracking, run: Run) -> AsyncIterator[None]:
    """Finish the trackers once the run has closed; they are told how it ended."""
    try:
        yield
    except BaseException as error:
        on_purpose = run.final_mark is not None
        await tracking.finish(exit_code_of(error, tracking.signal, closed_on_purpose=on_purpose))
        raise
    await tracking.finish(0)


def _need_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise Unsupported(
            "groupstate runs on asyncio; start it with asyncio.run() or anyio.run(..., backend='asyncio')"
        ) from error
    if not hasattr(signal, "SIGKILL"):
        raise Unsupported("groupstate needs Linux or macOS: its locks and durability are not made for Windows")


def _open_log(
    path: str | Path | None,
    durability: Durability,
    keep: Keep,
    take_over: bool,
    disk_bytes_max: int | None,
    disk_free_min_bytes: int | None,
) -> EventLog:
    bounded = (disk_bytes_max, disk_free_min_bytes) != (None, None)
    if bounded and (path is None or durability == "memory"):
        raise BadSettings(
            "disk_bytes_max and disk_free_min_bytes bound a run directory, and this run is kept in memory"
        )
    if durability not in get_args(Durability):
        known = get_args(Durability)
        raise BadSettings(f"durability is {durability!r}; it is one of {', '.join(known)}{meant(durability, known)}")
    if path is None:
        return MemoryLog()
    exists = os.path.lexists(RunDir.at(path).marker)
    if durability == "memory":
        if exists:
            raise BadSettings(
                f"{path} holds a run on disk; durability 'memory' would pass it over, so leave the path out"
            )
        return MemoryLog()
    if exists:
        return FileLog.open(
            path,
            durability=durability,
            keep=keep,
            take_over=take_over,
            disk_bytes_max=disk_bytes_max,
            disk_free_min_bytes=disk_free_min_bytes,
        )
    return FileLog.create(
        path, durability=durability, keep=keep, disk_bytes_max=disk_bytes_max, disk_free_min_bytes=disk_free_min_bytes
    )


def _check_beside_log(
    path: str | Path | None, keep: Keep, disk_bytes_max: int | None, disk_free_min_bytes: int | None
) -> None:
    """Raises BadSettings where a log is given, and beside it what would be said of one that is opened here."""
    if path is not None:
        raise BadSettings(f"both path {str(path)!r} and a log are given; a run is kept in one of them")
    if (disk_bytes_max, disk_free_min_bytes, keep) != (None, None, "all"):
        raise BadSettings(
            "disk_bytes_max, disk_free_min_bytes and keep_log are the log's; give them to the log that you made"
        )


def _ledger(
    event_log: EventLog,
    rules: Rules | None,
    selection: CustomRule | None,
    group_size: int,
    clock_ns: Callable[[], int],
) -> tuple[Ledger, CustomRule | None]:
    """The ledger with the log's book, and the user's own selection rule if there is one."""
    ledger = Ledger(event_log, rules or Rules(), clock_ns=clock_ns)
    recovery.load(ledger)
    if rules is None and ledger.book.run_id:
        ledger.rules = recovery.stored_rules(ledger.book)
    if selection is not None:
        path = f"{selection.__module__}:{getattr(selection, '__qualname__', type(selection).__qualname__)}"
        if rules is not None and rules.selection not in {path, Rules().selection}:
            raise BadSettings(
                f"the rules have selection {rules.selection!r}, and open_run(selection=...) has {path!r}: give one of "
                "the two"
            )
        ledger.rules = ledger.rules.changed(selection=path)
    _check_size(ledger.rules, group_size)
    return ledger, selection or own_selection(ledger.rules)


def _controller(ledger: Ledger, custom: CustomRule | None, prompts: Source | None, group_size: int) -> Controller:
    """With the prompts as the rules have them drawn, and with what says how much room the log has."""
    prompts = sharable(ledger.rules, ledger.book, prompts)
    controller = Controller(ledger, prompts, group_size=group_size, custom=custom)
    controller.space = getattr(ledger.log, "space", None)
    return controller


def _rollout(
    controller: Controller,
    session: SessionFunction | None,
    engine: Engine | None,
    params: SamplingParams | None,
    cancel_grace_s: float,
) -> Rollout | None:
    """What runs the sessions; None where the caller dispatches them."""
    if session is None:
        return None
    params = params or SamplingParams()
    return Rollout(controller, session, engine=engine, params=params, cancel_grace_s=cancel_grace_s)


GIVE_IT = "give open_run(selection=...) the function itself"
"""What whoever opens a run can do about a function that isn't found by its path."""

BY_PATH = "name it as selection = 'module:function' or 'path/to/file.py:function'"
"""What whoever writes a file of settings can."""


def own_selection(rules: Rules, *, way_on: str = GIVE_IT) -> CustomRule | None:
    """The function that `selection` names; None if it is one of the library's.

    Args:
        way_on: what the caller can do where it isn't found, for the error.

    Raises:
        BadSettings: it can't be found, is async, or is the class of an object that was given.
    """
    if not rules.has_own_selection:
        return None
    try:
        found = load_function(rules.selection, "selection")
    except BadInput as error:
        place, _, name = rules.selection.rpartition(":")
        if place == "__main__":
            raise BadSettings(
                f"selection {rules.selection!r} was a function of the script that was run, and the one that runs now "
                f"has no {name!r}; {way_on}"
            ) from error
        # What was meant is asked as a question.
        end = "" if str(error).endswith("?") else ";"
        raise BadSettings(f"{error}{end} or {way_on}") from error
    if isinstance(found, type):
        raise BadSettings(
            f"selection {rules.selection!r} is a class, which makes no selection by itself; give "
            "open_run(selection=...) the object that is to be called"
        )
    options.check_selection(found)
    return found


def _check_size(rules: Rules, group_size: int) -> None:
    if group_size + rules.oversample > GROUP_SIZE_MAX:
        raise BadSettings(
            f"group_size {group_size} and oversample {rules.oversample} make more than {GROUP_SIZE_MAX} sessions"
        )
    if group_size == 1 and rules.filter_metric is not None and rules.on_singleton == "evict" and rules.per == "session":
        raise BadSettings(
            "group_size is 1, and on_singleton 'evict' throws every group of one session away, so no batch could ever "
            "come; make group_size at least 2, or keep such groups by on_singleton 'keep'"
        )


def _begin(
    run: Run,
    event_log: EventLog,
    weight_version: int | None,
    resume_at: CheckpointMark | None,
    on_rewind: OnRewind,
    seed: int,
) -> None:
    """Write what the log begins or goes on with, and bring the source to its place."""
    book, controller = run.book, run._controller
    recovery.hear_of_damage(event_log)
    if not book.run_id:
        if resume_at is not None:
            raise BadSettings("resume_at needs a run that was begun; this one is new")
        run_id = getattr(event_log, "log_id", "memory")
        recovery.start(run.ledger, run_id=str(run_id), weight_version=weight_version or 0, seed=seed)
    else:
        recovery.recover(
            run.ledger,
            torn_bytes=getattr(event_log, "torn_bytes", 0),
            weight_version=weight_version,
            resume_at=resume_at,
            on_rewind=on_rewind,
        )
        recovery.keep_live_payloads(book, event_log)
        controller.rejudge()
    if controller.source is not None and (opened := identity(controller.source)) != book.source:
        run.ledger.record(opened)
    controller.drawing.seek()
    controller.abandoned.add([group.group_id for group in book.groups.values() if group.validation_round])
    controller.settle()
