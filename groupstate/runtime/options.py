"""What `open_run` is given, checked before anything is opened or written.

Rule: an argument of another kind than it must be is refused by its name, with its value and what would be right.
"""

import os
from collections.abc import Callable
from typing import Any, get_args

from groupstate.core.arguments import boolean, seconds, shown
from groupstate.core.custom import CustomRule
from groupstate.core.near import meant
from groupstate.core.rules import Rules
from groupstate.engines.port import SamplingParams
from groupstate.errors import BadSettings
from groupstate.runtime.functions import call_problem, is_async, named, session_problem
from groupstate.runtime.recovery import CheckpointMark, OnRewind

LOG_PARTS = ("last_seq", "durable_seq", "payloads", "post", "durable", "read", "aclose")
ENGINE_PARTS = ("weight_version", "tokenizer", "generate")
"""What every run asks of an engine. Not every one is given new weights, and who pauses or ends one is outside."""


def check_log(log: Any) -> None:
    """Raises BadSettings where it is no event log."""
    if log is not None:
        _check_parts("log", log, LOG_PARTS, "an event log, as FileLog.create('runs/one') or MemoryLog() makes one")


def check_path(path: Any) -> None:
    """Raises BadSettings where it names no directory."""
    usable = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and "\0" not in os.fspath(path)
    if path is None or (usable and os.fspath(path)):
        return
    raise BadSettings(
        f"path is {shown(path)}; it must be the name of a directory, such as 'runs/one', or None to keep the run in "
        "memory"
    )


def check_rules(rules: Any) -> None:
    """Raises BadSettings where they are none."""
    _check_kind("rules", rules, Rules, "Rules, such as Rules(lag_max=1)")


def check_engine(engine: Any, params: Any) -> None:
    """Raises BadSettings where it is none, or the parameters are none."""
    if engine is not None:
        _check_parts("engine", engine, ENGINE_PARTS, "an engine, an object with what groupstate.Engine lists")
    _check_kind("params", params, SamplingParams, "SamplingParams, such as SamplingParams(temperature=0.7)")


def check_session(session: Any) -> None:
    """Raises BadSettings where it can't be run as a session."""
    if session is not None and (problem := session_problem(session)):
        raise BadSettings(f"session {named(session)} {problem}")


def check_selection(selection: CustomRule | None) -> None:
    """Raises BadSettings where it can't be called as a selection."""
    if selection is not None and (not callable(selection) or is_async(selection)):
        raise BadSettings(
            f"selection is {selection!r}; it must be a plain function rule(book, rules, request): a decision sees one "
            "state of the book, so nothing may be awaited in it"
        )
    if selection is not None and (problem := call_problem(selection, "book", "rules", "request")):
        raise BadSettings(f"selection {named(selection)} {problem}")


def check_resumption(resume_at: Any, on_rewind: Any, source_changed: Any, take_over: Any) -> None:
    """Raises BadSettings where a run can't be gone on with by these."""
    right = "the CheckpointMark that run.checkpoint() gave (CheckpointMark.from_json(text) reads one that was kept)"
    _check_kind("resume_at", resume_at, CheckpointMark, right)
    if on_rewind not in get_args(OnRewind):
        known = get_args(OnRewind)
        raise BadSettings(f"on_rewind is {shown(on_rewind)}; it is one of {', '.join(known)}{meant(on_rewind, known)}")
    boolean("source_changed", source_changed, error=BadSettings)
    boolean("take_over", take_over, error=BadSettings)


def check_times(grace_s: Any, cancel_grace_s: Any, clock_ns: Callable[[], int]) -> None:
    """Raises BadSettings where these are no durations and no clock."""
    seconds("grace_s", grace_s, error=BadSettings)
    seconds("cancel_grace_s", cancel_grace_s, error=BadSettings)
    now_ns = clock_ns() if callable(clock_ns) else None
    if not isinstance(now_ns, int):
        told = f"clock_ns gives {shown(now_ns)}" if callable(clock_ns) else f"clock_ns is {shown(clock_ns)}"
        raise BadSettings(f"{told}; it must be a function that gives whole nanoseconds, as time.time_ns does")


def _check_kind(name: str, value: Any, kind: type, right: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise BadSettings(f"{name} is {shown(value)}; it must be {right}, or None")


def _check_parts(name: str, value: Any, parts: tuple[str, ...], right: str) -> None:
    if isinstance(value, type):
        raise BadSettings(f"{name} is the class {value.__name__}; it must be an object of it")
    missing = [part for part in parts if not hasattr(value, part)]
    if missing:
        lacks = "" if len(missing) == len(parts) else f", which has no {', no '.join(missing)}"
        raise BadSettings(f"{name} is {shown(value)}{lacks}; it must be {right}")
