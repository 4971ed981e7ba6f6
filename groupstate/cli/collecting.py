"""`groupstate run`: collect accepted groups into a file.

Rule: standard output carries nothing but the result; progress and errors go to standard error.
"""

import asyncio
import contextlib
import importlib
import inspect
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec

from groupstate.cli.places import Place
from groupstate.collect import Collected, Progress, collect
from groupstate.core.rules import Rules
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import BadInput, BadSettings, GroupstateError, MissingExtra, NotARun
from groupstate.runtime.session import SessionFunction, session_from_reward
from groupstate.runtime.settings import (
    RunTable,
    Settings,
    load_function,
    load_session,
    merged_rules,
    parsed_assignments,
    read_settings,
    run_table,
    sampling_params,
)

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_EXHAUSTED = 3
EXIT_INTERRUPTED = 130

PROGRESS_EVERY_S = 5.0
"""Seconds between two lines of progress where standard error is not a terminal."""


ENGINES = {"torch": "groupstate.engines.model_file", "openai": "groupstate.engines.openai_options"}
"""Name -> the module whose `engine_from_options(options, where)`, plain or async, makes one."""

_UNUSABLE = (BadInput, BadSettings, NotARun, MissingExtra)
"""Errors that are about what the user named; the others happened on the way."""


@click.command("run", short_help="Collect accepted groups into a file, without writing a loop.")
@click.option("--prompts", metavar="FILE", help="Prompts: .jsonl or .parquet.")
@click.option("--session", metavar="NAME", help="Session function: pkg.mod:fn or path/to/file.py:fn, async.")
@click.option("--reward", metavar="NAME", help="Reward function, in place of a session: fn(prompt, text).")
@click.option(
    "--engine", metavar="NAME", help="'torch', 'openai', or pkg.mod:make_engine; none if the session generates itself."
)
@click.option("--engine-option", "engine_options", metavar="KEY=VALUE", multiple=True, help="Argument of the engine.")
@click.option("--model", metavar="NAME", help="File of weights for the engine 'torch', name of a model for 'openai'.")
@click.option("--groups", metavar="N", type=int, help="Accepted groups to collect; without it, all there are.")
@click.option(
    "--out", type=Place(), metavar="FILE", help="Where the rows go: .jsonl or .parquet, one row per trajectory."
)
@click.option("--run", metavar="DIR", help="Run directory, which keeps everything.")
@click.option("--config", metavar="FILE", help="Settings in TOML: [run], [rules], [engine], [sampling].")
@click.option("--n", metavar="N", type=int, help="Sessions per group, where the prompt doesn't say (8).")
@click.option("--in-flight", metavar="N", type=int, help="Groups under way at once (16).")
@click.option("--rules", metavar="KEY=VALUE", multiple=True, help="A rule, such as filter_metric=reward.")
@click.option("--max-tokens", metavar="N", type=int, help="Longest answer.")
@click.option("--temperature", metavar="T", type=float, help="0 is greedy.")
@click.option("--grace-s", metavar="S", type=float, help="Seconds that sessions get to end after SIGTERM (10).")
@click.option("--resume", is_flag=True, help="Go on with the run where there is one.")
@click.option("--overwrite", is_flag=True, help="Replace --out where it is there already.")
def run(**flags: Any) -> None:
    """Run your session or reward function over prompts, and write the groups that the rules accept.

    Sessions of one prompt make a group. A group that fails, or whose sessions all score the same
    (--rules filter_metric=reward), is dropped and the next prompt takes its place. SIGTERM and Ctrl-C end
    the collection in order: the run keeps what was accepted, and the same command with --resume goes on.

    Exit code: 0 done (or stopped by SIGTERM), 1 failed, 2 unusable input, 3 the prompts ran out first,
    130 stopped by Ctrl-C.
    """
    try:
        code = _run(flags)
    except GroupstateError as error:
        click.echo(f"Error: {error}", err=True)
        code = EXIT_BAD_INPUT if isinstance(error, _UNUSABLE) else EXIT_FAILED
    sys.exit(code)


def _run(flags: dict[str, Any]) -> int:
    settings = Settings() if flags["config"] is None else read_settings(Path(flags["config"]))
    table = _run_table(settings, flags)
    session = _session_function(table)
    rules = merged_rules(settings, flags["rules"])
    params = _params(settings, flags)
    make_engine = _engine_maker(settings, flags)
    if table.reward is not None and make_engine is None:
        raise BadSettings("--reward scores what an engine generates: give --engine too, or --session in its place")
    return asyncio.run(
        _collect(table, session, make_engine, rules, params, resume=flags["resume"], overwrite=flags["overwrite"])
    )


# Settings and flags ----------------------------------------------------------------------------------


def _run_table(settings: Settings, flags: dict[str, Any]) -> RunTable:
    given = {name: flags[name] for name in RunTable.__struct_fields__ if flags.get(name) is not None}
    table = run_table({**settings.run, **given}, where="the settings")
    for name, what in (
        ("prompts", "which prompts"),
        ("out", "where the rows go"),
        ("run", "where the run is kept"),
    ):
        if getattr(table, name) is None:
            raise BadSettings(f"--{name} is missing: say {what}, by the flag or as {name} in [run] of --config")
    if (table.session is None) == (table.reward is None):
        said = "both are given" if table.session is not None else "neither is given"
        raise BadSettings(f"give --session or --reward: {said}")
    return table


def _session_function(table: RunTable) -> SessionFunction:
    if table.session is not None:
        return load_session(table.session, "--session")
    assert table.reward is not None
    return session_from_reward(load_function(table.reward, "--reward"))


def _params(settings: Settings, flags: dict[str, Any]) -> SamplingParams:
    given = {name: flags[name] for name in ("max_tokens", "temperature") if flags[name] is not None}
    return sampling_params({**settings.sampling, **given}, where="the sampling parameters")


EngineMaker = Callable[[], Any]


def _engine_maker(settings: Settings, flags: dict[str, Any]) -> EngineMaker | None:
    """What makes the engine, once the event loop runs; None if there is none."""
    options = {**settings.engine, **parsed_assignments(flags["engine_options"], "--engine-option")}
    if flags["model"] is not None:
        options["model"] = flags["model"]
    name = flags["engine"] or options.pop("name", None)
    options.pop("name", None)
    if name is None:
        if options:
            raise BadSettings(f"{', '.join(sorted(options))} given, but no engine; name one: --engine torch")
        return None
    if name in ENGINES:
        from_options = importlib.import_module(ENGINES[name]).engine_from_options
        return lambda: from_options(options, "the engine's options")
    function = load_function(name, "--engine")

    def make() -> Any:
        try:
            inspect.signature(function).bind(**options)
        except TypeError as error:
            raise BadSettings(f"--engine: {name} can't be called with {options}: {error}") from error
        return function(**options)

    return make


# Collecting ------------------------------------------------------------------------------------------


async def _collect(
    table: RunTable,
    session: SessionFunction,
    make_engine: EngineMaker | None,
    rules: Rules,
    params: SamplingParams,
    *,
    resume: bool,
    overwrite: bool,
) -> int:
    assert table.prompts is not None
    assert table.out is not None
    async with _opened(make_engine) as engine:
        if not params.stop_token_ids and (eos := _eos_of(engine)) is not None:
            params = msgspec.structs.replace(params, stop_token_ids=(eos,))
        with _signals() as stopped, _progress() as report:
            done = await collect(
                prompts=table.prompts,
                out=table.out,
                session=session,
                groups=table.groups,
                run=table.run,
                engine=engine,
                rules=rules,
                params=params,
                group_size=table.n,
                in_flight=table.in_flight,
                resume=resume,
                overwrite=overwrite,
                grace_s=table.grace_s,
                disk_bytes_max=table.disk_bytes_max,
                disk_free_min_bytes=table.disk_free_min_bytes,
                stop=stopped.scope,
                report=report,
            )
    click.echo(_summary(done, table), err=done.ending != "complete")
    if done.ending == "stopped":
        return EXIT_INTERRUPTED if stopped.by is signal.SIGINT else 0
    return EXIT_EXHAUSTED if done.ending == "exhausted" else 0


@contextlib.asynccontextmanager
async def _opened(make_engine: EngineMaker | None) -> AsyncIterator[Engine | None]:
    if make_engine is None:
        yield None
        return
    engine = make_engine()
    if inspect.isawaitable(engine):
        engine = await engine
    if not hasattr(engine, "generate"):
        raise BadInput(f"--engine gave {type(engine).__name__}, which has no generate(); it must be an Engine")
    try:
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


def _eos_of(engine: Engine | None) -> int | None:
    """The token that ends an answer, where the engine's tokenizer knows one."""
    return getattr(getattr(engine, "tokenizer", None), "eos_id", None)


class _Stopped:
    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.by: signal.Signals | None = None


@contextlib.contextmanager
def _signals() -> Iterator[_Stopped]:
    """The first SIGTERM or SIGINT stops in order; a second one has its usual effect."""
    loop = asyncio.get_running_loop()
    stopped = _Stopped()
    watched = (signal.SIGTERM, signal.SIGINT)

    def stop(number: signal.Signals) -> None:
        stopped.by = number
        click.echo(f"{number.name}: letting sessions end, then closing", err=True)
        for each in watched:
            loop.remove_signal_handler(each)
        stopped.scope.cancel()

    for number in watched:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopped
    finally:
        for number in watched:
            loop.remove_signal_handler(number)


def _summary(done: Collected, table: RunTable) -> str:
    accepted = f"{done.accepted} groups"
    if done.ending == "stopped":
        return f"stopped with {accepted} accepted; they are in {table.run}: the same command with --resume goes on"
    written = f"{accepted}, {done.rows} rows in {table.out}"
    if done.ending == "exhausted":
        return f"the prompts ran out: {written}; {table.groups} were wanted ({_counts(done.progress)})"
    return f"{written} ({_counts(done.progress)})"


# Progress --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _Lines().report


class _Lines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + PROGRESS_EVERY_S

    def report(self, progress: Progress) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PROGRESS_EVERY_S
            of = "" if progress.wanted is None else f" of {progress.wanted}"
            click.echo(f"{progress.accepted}{of} groups accepted ({_counts(progress)})", err=True)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # What a failed session said may look like markup.
    counts = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("accepted"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), counts)
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.accepted, total=progress.wanted, description=_counts(progress))

        yield report


def _counts(progress: Progress) -> str:
    parts = [f"{progress.submitted} submitted"]
    parts += [f"{count} {reason.replace('_', ' ')}" for reason, count in progress.evicted.items()]
    failed = sum(progress.sessions_failed.values())
    if failed:
        last = progress.last_failure.splitlines()[0][:120] if progress.last_failure else ""
        parts.append(f"{failed} sessions failed" + (f", the last: {last}" if last else ""))
    return ", ".join(parts)
