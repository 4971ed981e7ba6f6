"""Scenario files: a bug report as data, run on the real ledger, rules and sampler in virtual time.

Rule 1: a step does one thing through the public API, then everything runs until all tasks are blocked.
Rule 2: a file that isn't understood is refused (`MalformedScenario`), never half run.
Rule 3: an error that no step asks for fails the step in which it came up, whoever raised it: the step, a `sample()`
that waits, or the source.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from groupstate.batch import Batch, BatchGroup, Row
from groupstate.core import events as ev
from groupstate.core.events import VersionSpan
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.core.phases import Phase
from groupstate.core.prompt import Prompt
from groupstate.core.select import held_by_stale
from groupstate.core.trajectory import Trajectory
from groupstate.errors import GroupstateError, SourceFailed, UnknownGroup
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.runtime.opening import open_run
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.run import Run
from groupstate.runtime.sources import IteratorSource, MixedSource, Source
from groupstate.simulate.kinds import MISSING, MalformedScenario
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.simulate.scenario_file import SESSION, UNKNOWN, Scenario, Step, load

LOOP_TURNS = 60
"""Turns of the event loop after each step. A claim takes under ten, whoever waits."""


class StepFailed(Exception):
    """A step that couldn't be done, or whose outcome differs from its expectation."""


@attrs.define(eq=False)
class _Waiter:
    """A `sample()` step and what became of it."""

    task: "asyncio.Task[Batch]"
    number: int
    """Counted from 1, in the order in which they began."""
    step: int
    """Number of the step."""
    gone: bool = False
    """It was killed with its run, so what it raised nobody heard."""

    @property
    def blocked(self) -> bool:
        return not self.task.done()

    @property
    def batch(self) -> Batch | None:
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if done else None

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class Runner:
    """Runs one scenario."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop, folder: Path | None) -> None:
        self._scenario = scenario
        self._loop = loop
        self._folder = folder
        """Where the file log lies; None for a memory log."""
        self._stack = contextlib.AsyncExitStack()
        self._run: Run | None = None
        self._waiters: list[_Waiter] = []
        self._marks: dict[str, CheckpointMark] = {}
        self._copies = itertools.count(1)
        self._number = 0
        """Of the step that runs, from 1."""
        self._error: BaseException | None = None
        """What the step raised."""
        self._broke: Exception | None = None
        """What the source raised, once that was heard."""
        self._rules = scenario.rules
        self._group_size = scenario.group_size

    async def play(self) -> None:
        """
        Raises:
            StepFailed: the first step that differs.
        """
        async with self._stack:
            try:
                await self._open(weight_version=self._scenario.first_version)
            except GroupstateError as error:
                raise MalformedScenario(f"{self._scenario.path}: no run can be opened so: {error}") from error
            for number, step in enumerate(self._scenario.steps, 1):
                self._number = number
                try:
                    await self._step(step)
                except StepFailed as failed:
                    raise StepFailed(f"{self.where}{failed}") from failed.__cause__
            for waiter in self._waiters:
                waiter.task.cancel()
            await asyncio.wait([waiter.task for waiter in self._waiters]) if self._waiters else None

    @property
    def where(self) -> str:
        """The step that runs, for the beginning of a message."""
        return f"step {self._number} {self._scenario.steps[self._number - 1]}: " if self._number else ""

    async def _step(self, step: Step) -> None:
        before = self.run.book.last_seq if self._run is not None else 0
        failed_before = {waiter.step for waiter in self._waiters if waiter.error is not None}
        self._error = None
        try:
            await getattr(self, f"_do_{step.verb}")(step)
        except StepFailed:
            raise
        except Exception as error:
            self._error = error
        await self._quiet()
        if step.verb == "recover" and self._run is not None:
            # What recovery did begins with the event that says so; what was there before isn't its doing.
            recoveries = (r.seq for r in self._run.ledger.log.read() if isinstance(r.event, ev.RunRecovered))
            before = max(recoveries, default=1) - 1
        self._hear(step, [w for w in self._waiters if w.error is not None and w.step not in failed_before])
        self._compare(step, before)

    def _hear(self, step: Step, failed: list[_Waiter]) -> None:
        """Errors that came up in this step.

        Args:
            failed: whose `sample()` raised in it.

        Raises:
            StepFailed: an error that this step doesn't name, and no later one asks for.
        """
        named = self._named(step) if "error" in step.expect else None
        if self._error is not None and (named is None or not isinstance(named, GroupstateError)):
            raise StepFailed(f"raised {_told(self._error)}") from self._error
        for waiter in failed:
            if waiter.error is not named and not waiter.gone and not self._asked_for_later(waiter):
                who = "" if waiter.step == self._number else f"the sample() of step {waiter.step} "
                raise StepFailed(f"{who}raised {_told(waiter.error)}") from waiter.error
        broke = None if self._run is None else self._run._controller.drawing.error
        if broke is not None and broke is not self._broke and broke is not named and not self._source_failure_is_told():
            raise StepFailed(f"the source failed: {_told(broke)}") from broke
        self._broke = broke

    def _named(self, step: Step) -> BaseException | None:
        """The error that an expectation of the step is about: its own, or else its sampler's, or else the source's."""
        told = self._error or (self._waiter(step).error if self._waiters else None)
        return told or (None if self._run is None else self._run._controller.drawing.error)

    def _asked_for_later(self, waiter: _Waiter) -> bool:
        """A later `waiting` step names the error of this one."""
        samples = len(self._waiters)
        for step in self._scenario.steps[self._number :]:
            samples += step.verb == "sample"
            if (
                step.verb == "waiting"
                and "error" in step.expect
                and step.options.get("waiter", samples) == waiter.number
            ):
                return True
        return False

    def _source_failure_is_told(self) -> bool:
        """A sampler was told of it, which is for that one's step to name, or a later step names it."""
        later = [step.expect.get("error") for step in self._scenario.steps[self._number :]]
        told = any(isinstance(waiter.error, SourceFailed) for waiter in self._waiters)
        return told or SourceFailed.__name__ in later

    async def _quiet(self) -> None:
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)

    @property
    def run(self) -> Run:
        if self._run is None:
            raise StepFailed("the run has crashed or is closed; a recover step must come first")
        return self._run

    # Opening, crashing -------------------------------------------------------------------------------

    async def _open(self, *, weight_version: int | None = None, resume_at: CheckpointMark | None = None) -> None:
        self._run = await self._stack.enter_async_context(
            open_run(
                rules=self._rules,
                source=self._source(),
                group_size=self._group_size,
                weight_version=weight_version,
                resume_at=resume_at,
                clock_ns=self._loop.clock_ns,
                log=self._log(),
            )
        )
        if self._scenario.admits:
            # What a rollout does when it begins. There is none here: each start is a step.
            self._run._controller.admits = True
            self._run._controller.settle()

    def _source(self) -> Source | None:
        source = self._scenario.source
        if isinstance(source, dict):
            return MixedSource({name: _prompts(ids) for name, ids in source.items()}, name="source")
        return None if source is None else IteratorSource(_prompts(source), name="source")

    def _log(self) -> MemoryLog | FileLog:
        if self._folder is None:
            return MemoryLog()
        if (self._folder / "run.json").exists():
            return FileLog.open(self._folder, durability="os", inline=True)
        return FileLog.create(self._folder, durability="os", inline=True)

    async def _do_crash(self, step: Step) -> None:
        """What a kill leaves is a copy of the files; the old run is taken down on files nobody reads again."""
        assert self._folder is not None
        copy = self._folder.with_name(f"{self._scenario.folder_name}-{next(self._copies)}")
        shutil.copytree(self.run.ledger.log.path, copy)  # type: ignore[attr-defined]
        (copy / "log" / "lock").unlink(missing_ok=True)
        if step.options:
            last = max((copy / "log").glob("*.seg"))
            size = last.stat().st_size
            kept = min(step.options.get("keep_bytes", size), size - step.options.get("lose_bytes", 0))
            os.truncate(last, max(0, kept))
            # The watermark isn't flushed, so after a kill it may be behind, never ahead.
            (copy / "log" / "head").unlink(missing_ok=True)
        for waiter in self._waiters:
            waiter.gone = waiter.gone or waiter.blocked
        await self._stack.aclose()
        for waiter in self._waiters:
            waiter.task.cancel()
        self._folder = copy
        self._run = None

    async def _do_close(self, step: Step) -> None:
        await self.run.close()
        await self._stack.aclose()
        self._run = None

    async def _do_recover(self, step: Step) -> None:
        if self._run is not None:
            raise StepFailed("the run is open; a close or crash step must come first")
        name = step.options.get("at")
        if name is not None and name not in self._marks:
            known = f"are {', '.join(map(repr, self._marks))}" if self._marks else "is none"
            raise StepFailed(f"there is no checkpoint named {name!r}; there {known}")
        self._rules = step.options.get("rules", self._rules)
        self._group_size = step.options.get("n", self._group_size)
        await self._open(resume_at=self._marks[name] if name is not None else None)

    # Steps -------------------------------------------------------------------------------------------

    async def _do_submit(self, step: Step) -> None:
        options = step.options
        self.run.submit(
            Prompt(dataset=options.get("dataset", "")),
            group_id=step.subject,
            n=options.get("n", 1),
            partition=options.get("partition", ev.TRAIN),
            weight_version=options.get("weight_version"),
            target_version=options.get("target_version"),
        )

    async def _do_start(self, step: Step) -> None:
        groups = self.run.book.groups
        attempt = step.options.get("attempt")
        if step.subject not in groups:
            if not SESSION.fits(step.subject):
                left = self.run.book.departed.get(step.subject)
                known = "it was never submitted" if left is None else f"it was {left}"
                raise UnknownGroup(step.subject, "start it", known)
            self.run.ledger.start(*step.address, attempt)
            return
        due = [number for number, session in enumerate(groups[step.subject].sessions) if session.state == "waiting"]
        if not due:
            raise StepFailed(f"no session of {step.subject!r} is to be started; it is {groups[step.subject].phase}")
        for number in due:
            self.run.ledger.start(step.subject, number, attempt)

    async def _do_finish(self, step: Step) -> None:
        group_id, session = step.address
        rows = step.options.get("trajectories")
        if rows is None:
            result = [Trajectory(metrics=step.options.get("metrics", {}))]
        else:
            result = [_trajectory(row) for row in rows]
        self.run.ledger.finish(group_id, session, step.options.get("attempt"), result)

    async def _do_fail(self, step: Step) -> None:
        group_id, session = step.address
        options = step.options
        self.run.ledger.fail(
            group_id,
            session,
            options.get("attempt"),
            options.get("kind", "error"),
            "scenario",
            retryable=options.get("retryable", False),
        )

    async def _do_cancel(self, step: Step) -> None:
        self.run.cancel(step.subject)

    async def _do_requeue(self, step: Step) -> None:
        stamp = step.options.get("weight_version")
        if stamp is None:
            self.run.requeue(step.subject)
        else:
            # Only a listing says so, as of verl's prompts: a run of its own has no call for it.
            self.run.book.group(step.subject, "requeue")
            self.run.ledger.record(ev.GroupRequeued(step.subject, "dispatched anew", weight_version=stamp))
            self.run.ledger.settle()

    async def _do_publish(self, step: Step) -> None:
        await self.run.publish_weights(step.subject)

    async def _do_sample(self, step: Step) -> None:
        call = self.run.sample(
            step.subject,
            weight_version=step.options.get("weight_version"),
            partition=step.options.get("partition", ev.TRAIN),
        )
        task = asyncio.ensure_future(call)
        # A scenario needn't look at how each ended.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiters.append(_Waiter(task, len(self._waiters) + 1, self._number))

    async def _do_waiting(self, step: Step) -> None:
        self._waiter(step)

    async def _do_cancel_sample(self, step: Step) -> None:
        waiter = self._waiter(step)
        if not waiter.blocked:
            how = f"raised {_told(waiter.error)}" if waiter.batch is None else f"got {waiter.batch.group_ids}"
            raise StepFailed(f"the sample() of step {waiter.step} doesn't wait any more: it {how}")
        waiter.task.cancel()

    async def _do_commit(self, step: Step) -> None:
        await self.run.commit(step.subject)

    async def _do_release(self, step: Step) -> None:
        await self.run.release(step.subject)

    async def _do_advance_s(self, step: Step) -> None:
        await asyncio.sleep(step.subject)

    async def _do_checkpoint(self, step: Step) -> None:
        self._marks[step.subject] = await self.run.checkpoint(step.subject)

    async def _do_check(self, step: Step) -> None:
        records = list(self.run.ledger.log.read())
        found = violations(records)
        if found:
            raise StepFailed("invariants are violated:\n" + "\n".join(f"  {violation}" for violation in found))
        if replayed(records).digest() != self.run.book.digest():
            raise StepFailed("replaying the log gives another book than the run has")

    def _waiter(self, step: Step) -> _Waiter:
        number: int = step.options.get("waiter", len(self._waiters))
        if not 1 <= number <= len(self._waiters):
            raise StepFailed(f"there is no waiter {number}; {len(self._waiters)} sample steps were run")
        return self._waiters[number - 1]

    # Expectations ------------------------------------------------------------------------------------

    def _compare(self, step: Step, before: int) -> None:
        for name, expected in step.expect.items():
            actual = self._actual(name, expected, step, before)
            if actual != expected:
                raise StepFailed(f"{name}\n  expected {expected!r}\n  actual   {actual!r}")

    def _actual(self, name: str, expected: Any, step: Step, before: int) -> Any:
        if name in {"blocked", "waiting"}:
            return self._waiter(step).blocked
        if name in _OF_BATCH:
            return self._of_batch(name, expected, step)
        if name == "error":
            error = self._named(step)
            return None if error is None else type(error).__name__
        if name == "phase":
            return {group_id: self._phase(group_id) for group_id in expected}
        if name == "counts":
            return {phase: self._count(phase) for phase in expected}
        if name == "held_by":
            held = held_by_stale(self.run.book, self.run.rules)
            return MISSING if held is None else held.group_id
        if name in _OF_LOG:
            return _picked(_OF_LOG[name](self._events_since(0), expected), expected)
        return _OF_EVENTS[name](self._events_since(before))

    def _of_batch(self, name: str, expected: Any, step: Step) -> Any:
        waiter = self._waiter(step)
        if waiter.batch is None:
            return f"no batch: {'still waiting' if waiter.blocked else repr(waiter.error)}"
        return _OF_BATCH[name](waiter.batch, expected)

    def _phase(self, group_id: str) -> str:
        book = self.run.book
        group = book.groups.get(group_id)
        return str(group.phase if group is not None else book.departed.get(group_id, UNKNOWN))

    def _count(self, phase: str) -> int:
        book = self.run.book
        if phase in {"evicted", "committed", "submitted"}:
            return book.totals[phase]
        if phase == "owed":
            return len(book.credits)
        return book.count(Phase(phase))

    def _events_since(self, before: int) -> list[ev.AnyEvent]:
        return [record.event for record in self.run.ledger.log.read(before + 1)]


def _forfeited(events: Iterable[ev.AnyEvent]) -> int:
    return sum(event.count for event in events if isinstance(event, ev.RefillForfeited))


def _fenced(events: Iterable[ev.AnyEvent]) -> str | None:
    reasons = [event.reason for event in events if isinstance(event, ev.ResultFenced)]
    return reasons[-1] if reasons else None


_OF_EVENTS: dict[str, Callable[[list[ev.AnyEvent]], Any]] = {
    "evicted": lambda events: {e.group_id: list(e.reasons) for e in events if isinstance(e, ev.GroupEvicted)},
    "submitted": lambda events: [
        e.group_id for e in events if isinstance(e, ev.GroupSubmitted) and e.cause != "submit"
    ],
    "forfeited": _forfeited,
    "requeued": lambda events: [e.group_id for e in events if isinstance(e, ev.GroupRequeued)],
    "starved": lambda events: [e.dataset for e in events if isinstance(e, ev.DatasetStarved)],
    "fenced": _fenced,
}


def _evictions(events: Iterable[ev.AnyEvent]) -> list[ev.GroupEvicted]:
    return [event for event in events if isinstance(event, ev.GroupEvicted)]


def _requeues(events: Iterable[ev.AnyEvent], wanted: Iterable[str]) -> dict[str, int]:
    found = [event.group_id for event in events if isinstance(event, ev.GroupRequeued)]
    return {group_id: found.count(group_id) for group_id in wanted}


_OF_LOG: dict[str, Callable[[list[ev.AnyEvent], Any], dict[str, Any]]] = {
    "reasons": lambda events, _: {e.group_id: list(e.reasons) for e in _evictions(events)},
    "credit": lambda events, _: {e.group_id: e.credit for e in _evictions(events)},
    "requeues": _requeues,
}
"""Of all that has happened so far, whichever step it was in."""


def _told(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _ended(group: BatchGroup) -> str:
    how = "partial" if group.partial else group.phase
    return f"{how} {len(group.sessions)}/{group.size}"


def _key(row: Row) -> str:
    return f"{row.group_id}/{row.session}/{row.index}"


def _picked(there: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What is there of what is wanted."""
    return {key: there.get(key, MISSING) for key in wanted}


def _rows(batch: Batch, wanted: dict[str, Any]) -> dict[str, Any]:
    there = {_key(row): dict(row.trajectory.metrics) for row in batch.rows}
    return {
        key: _picked(row, wanted[key]) if isinstance(row, dict) and isinstance(wanted[key], dict) else row
        for key, row in _picked(there, wanted).items()
    }


def _histograms(batch: Batch) -> dict[str, Any]:
    """With values as text, since keys of TOML are."""
    return {
        name: {str(value): count for value, count in counts.items()} for name, counts in batch.tally.histograms.items()
    }


_OF_BATCH: dict[str, Callable[[Batch, Any], Any]] = {
    "groups": lambda batch, _: batch.group_ids,
    "batch": lambda batch, _: [_key(row) for row in batch.rows],
    "metrics": lambda batch, wanted: _picked(batch.metrics, wanted),
    "histograms": lambda batch, wanted: _picked(_histograms(batch), wanted),
    "rows": _rows,
    "ended": lambda batch, wanted: _picked({group.group_id: _ended(group) for group in batch.groups}, wanted),
}


def _prompts(ids: Iterable[str]) -> list[Prompt]:
    return [Prompt(group_id=group_id) for group_id in ids]


def _trajectory(row: dict[str, Any]) -> Trajectory:
    versions: list[int] = row.get("versions", [])
    spans, start = [], 0
    for version, tokens in itertools.groupby(versions):
        stop = start + len(list(tokens))
        spans.append(VersionSpan(start, stop, version))
        start = stop
    return Trajectory(response_ids=[0] * len(versions), spans=spans, metrics=row.get("metrics", {}))


# Running files ---------------------------------------------------------------------------------------


def play(scenario: Scenario) -> None:
    """Run a scenario.

    Raises:
        StepFailed: the first step that couldn't be done, or that differs.
        MalformedScenario: no run can be opened with such rules.
    """
    runner: Runner | None = None
    with contextlib.ExitStack() as stack:
        folder = None
        if scenario.reopens:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / scenario.folder_name

        async def main(loop: VirtualLoop) -> None:
            nonlocal runner
            runner = Runner(scenario, loop, folder)
            await runner.play()

        try:
            run_virtual(main)
        except (StepFailed, MalformedScenario):
            raise
        except Exception as error:
            where = "" if runner is None else runner.where
            raise StepFailed(f"{where}raised {_told(error)}") from error


def scenario_files(path: Path) -> list[Path]:
    """The file that is named, or the .toml files beneath the directory that is.

    Raises:
        MalformedScenario: nothing is there, or a directory without any.
    """
    if not path.exists():
        raise MalformedScenario(f"{path}: there is no such file or directory")
    files = sorted(path.rglob("*.toml")) if path.is_dir() else [path]
    if not files:
        raise MalformedScenario(f"{path}: it holds no .toml files")
    return files


def main_paths(paths: Sequence[str | Path], *, say: Callable[[str], None] = print) -> int:
    """Run scenario files; 0 if all expectations hold, 1 if a step differs, 2 if a file is malformed.

    Every file is run, whatever the others are.
    """
    malformed: list[str] = []
    files: list[Path] = []
    for path in map(Path, paths):
        try:
            files += scenario_files(path)
        except MalformedScenario as error:
            malformed.append(str(error))
            say(f"MALFORMED {error}")
    passed = failed = 0
    for file in files:
        try:
            scenario = load(file)
            play(scenario)
        except MalformedScenario as error:
            malformed.append(str(error))
            say(f"MALFORMED {error}")
        except StepFailed as error:
            failed += 1
            say(f"FAILED {file}: {scenario.title}".rstrip(": ") + f"\n{error}")
            if error.__cause__ is not None and not isinstance(error.__cause__, GroupstateError):
                say("".join(traceback.format_exception(error.__cause__)).rstrip())
        else:
            passed += 1
            say(f"ok     {file}: {scenario.title}".rstrip(": "))
    say(f"{passed} passed, {failed} failed" + (f", {len(malformed)} malformed" if malformed else ""))
    return 2 if malformed else int(failed > 0)
