"""Collect accepted groups into a file: a run without a trainer.

Takes: prompts from a file, a session function, an engine. Makes: one file with the rows of the groups that
the rules accepted. Blocked by: the sessions. Unblocked by: their ends.

Rule 1: the run directory keeps every group that was accepted, and the file is made from it, in one go at the
end: stopped or killed at any point, the next start goes on and no group is written twice.
Rule 2: groups are claimed one at a time and never committed, so that a run can be resumed for more of them.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import attrs

from groupstate.collect.files import RowFile, row_file
from groupstate.core import events as ev
from groupstate.core.arguments import integer, integer_or_none
from groupstate.core.book import Book
from groupstate.core.rules import Rules, Slots
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import BadInput, BadSettings, NotARun, NotEnoughGroups
from groupstate.log.rundir import RunDir
from groupstate.runtime.opening import open_run
from groupstate.runtime.options import check_rules
from groupstate.runtime.run import Run
from groupstate.runtime.session import SessionFunction
from groupstate.runtime.sources import as_source

Ending: TypeAlias = Literal["complete", "exhausted", "stopped"]

EVICTION_STREAK_MIN = 512
"""Evictions in a row before it is an error that nothing is accepted: a hard data set may well accept one group
in a hundred, a broken reward accepts none."""


@attrs.frozen
class Progress:
    """How far a collection is, from the log of the whole run."""

    accepted: int
    """Groups in the file to be, those that an earlier start had accepted included."""
    wanted: int | None
    in_flight: int
    submitted: int
    evicted: dict[str, int]
    """Groups per reason; a group with two reasons counts under both."""
    sessions_failed: dict[str, int]
    last_failure: str = ""
    """What the last session that failed said."""


@attrs.frozen
class Collected:
    ending: Ending
    """`complete`: as many as were wanted, or all there were. `exhausted`: fewer, since the prompts ran out.
    `stopped`: the stop scope was cancelled; no file was written, and the run has what there was."""
    accepted: int
    rows: int
    progress: Progress


async def collect(
    *,
    prompts: Any,
    out: str | Path,
    session: SessionFunction,
    groups: int | None = None,
    run: str | Path | None = None,
    engine: Engine | None = None,
    rules: Rules | None = None,
    params: SamplingParams | None = None,
    group_size: int = 8,
    in_flight: int = 16,
    resume: bool = False,
    overwrite: bool = False,
    grace_s: float = 10.0,
    disk_bytes_max: int | None = None,
    disk_free_min_bytes: int | None = None,
    stop: anyio.CancelScope | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Collected:
    """Run sessions until `groups` groups are accepted, and write their rows to a file.

    Args:
        prompts: a .jsonl or .parquet file, a `Source`, or any iterable.
        out: .jsonl or .parquet; one row per trajectory.
        session: what runs for each session; `session_from_reward(reward)` makes one from a reward function.
        groups: groups wanted; None takes every prompt there is.
        run: run directory; None keeps the run in memory, and then nothing can be resumed.
        rules: which groups are accepted, in async mode. `filter_metric` drops groups whose sessions all score
            the same.
        group_size: sessions per group, where the prompt doesn't say.
        in_flight: groups under way at once. When the last group is accepted, others are still under way: what
            they have finished stays in the run, the rest starts over when it is resumed.
        resume: go on with the run if it is there.
        overwrite: `out` may exist.
        grace_s: seconds that sessions get to end once stopped.
        disk_bytes_max, disk_free_min_bytes: as of `open_run`.
        stop: cancel it, and the collection ends in order.
        report: called when something has changed; it must be quick.

    Raises:
        BadInput: files that can't be used, a run that is there and isn't to be resumed.
        BadSettings: sync mode, numbers that can't be.
        NotARun: `run` is another directory.
        SampleError: nothing is accepted any more, a metric is missing, the engine died.
        LogError: the run directory can't be used.
    """
    check_rules(rules)
    groups = integer_or_none("groups", groups, least=1, error=BadSettings)
    in_flight = integer("in_flight", in_flight, least=1, error=BadSettings)
    chosen = _rules_for(rules or Rules(), groups, in_flight)
    _check_out(prompts, out)
    _check_run(run, resume=resume)
    source = as_source(prompts)
    with _discarded(row_file(Path(out), overwrite=overwrite)) as file:
        async with open_run(
            run,
            rules=chosen,
            source=source,
            session=session,
            engine=engine,
            params=params,
            group_size=group_size,
            grace_s=grace_s,
            disk_bytes_max=disk_bytes_max,
            disk_free_min_bytes=disk_free_min_bytes,
        ) as opened:
            collection = _Collection(opened, file, groups, report)
            ending = await collection.complete(stop or anyio.CancelScope())
    return Collected(ending, collection.accepted, collection.rows, collection.progress())


def _rules_for(rules: Rules, groups: int | None, in_flight: int) -> Rules:
    if rules.mode == "sync":
        raise BadSettings("mode is 'sync', which is about a trainer that waits; collecting has none: leave it out")
    changes: dict[str, Any] = {}
    if rules.admission is None:
        changes["admission"] = Slots(n=min(in_flight, groups or in_flight))
    if rules.eviction_streak_max is None:
        changes["eviction_streak_max"] = max(EVICTION_STREAK_MIN, 8 * (groups or 0))
    return rules.changed(**changes)


def _check_out(prompts: Any, out: str | Path) -> None:
    if isinstance(prompts, str | Path) and Path(prompts).resolve() == Path(out).resolve():
        raise BadInput(f"{out} holds the prompts; the rows must go to another file")


def _check_run(run: str | Path | None, *, resume: bool) -> None:
    if run is None:
        if resume:
            raise BadInput("resume needs a run directory: run=... (--run)")
        return
    if os.path.lexists(RunDir.at(run).marker):
        if not resume:
            raise BadInput(f"{run} holds a run already; pass --resume to go on with it, or name another directory")
    elif os.path.isdir(run) and os.listdir(run):
        raise NotARun(f"{run} holds something else than a run; name a directory that is new or empty")
    elif os.path.lexists(run) and not os.path.isdir(run):
        raise NotARun(f"{run} is a file; name a directory for the run")


@contextlib.contextmanager
def _discarded(file: RowFile) -> Iterator[RowFile]:
    """Whatever happens, no half-written file stays behind."""
    try:
        yield file
    finally:
        file.discard()


class _Collection:
    """Claims groups of an open run, one by one, into a file."""

    def __init__(self, run: Run, file: RowFile, wanted: int | None, report: Callable[[Progress], None] | None) -> None:
        self.accepted = 0
        self.rows = 0
        self._run = run
        self._file = file
        self._wanted = wanted
        self._report = report
        self._last_failure = ""
        run.ledger.observers.append(self._note)

    async def complete(self, stop: anyio.CancelScope) -> Ending:
        """Claim what is wanted, and finish the file; one that is stopped is left as it is."""
        ending = await self._claim_all(stop)
        if ending != "stopped":
            self._file.finish()
            # The file is there; nobody waits for what is still under way.
            self._run.hurry()
        return ending

    async def _claim_all(self, stop: anyio.CancelScope) -> Ending:
        with stop:
            while self._wanted is None or self.accepted < self._wanted:
                try:
                    batch = await self._run.sample(1)
                except NotEnoughGroups:
                    return "complete" if self._wanted is None else "exhausted"
                self.rows += self._file.write(batch)
                self.accepted += 1
                self._tell()
            return "complete"
        return "stopped"

    def progress(self) -> Progress:
        book = self._run.book
        return Progress(
            accepted=self.accepted,
            wanted=self._wanted,
            in_flight=book.in_flight_count(),
            submitted=book.totals["submitted"],
            evicted=_totals(book, "evicted/"),
            sessions_failed={k: count for k, count in _totals(book, "session_failed/").items() if k != "spare"},
            last_failure=self._last_failure,
        )

    def _note(self, record: ev.Record) -> None:
        if isinstance(record.event, ev.SessionFailed) and record.event.failure != "spare":
            self._last_failure = record.event.message
        elif not isinstance(record.event, ev.GroupSubmitted | ev.GroupEvicted | ev.SessionFailed):
            return
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            self._report(self.progress())


def _totals(book: Book, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in sorted(book.totals.items()) if name.startswith(prefix)}
