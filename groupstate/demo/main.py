"""`groupstate demo`: a real training run on two CPU cores, through the event log, that can be killed and resumed."""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import msgspec
from rich.console import Console

from groupstate import CheckpointMark, open_run
from groupstate.core.events import GroupEvicted
from groupstate.demo import plot
from groupstate.demo.checkpoint import Checkpoint
from groupstate.demo.evaluate import held_out_accuracy
from groupstate.demo.policy import EngineName, engine_of, new_policy
from groupstate.demo.progress import TrainingProgress
from groupstate.demo.settings import Settings
from groupstate.demo.tasks import Tasks
from groupstate.demo.train import TOKENIZER, Trainer, rules_of, session_of, source_of
from groupstate.demo.warmup import WarmUp, warm_up
from groupstate.engines.port import Engine
from groupstate.errors import BadInput
from groupstate.log.reading import read_log

RUNS = Path("runs")


class Summary(msgspec.Struct, frozen=True):
    """What a finished demo wrote into `summary.json`."""

    seed: int
    mode: str
    engine: str
    steps: int
    held_out_tasks: int
    accuracy_before: float
    accuracy_after: float
    seconds: float


def free_folder() -> Path:
    """`runs/demo`, or the first of `runs/demo-2`, `runs/demo-3`, ... that isn't there."""
    folder, number = RUNS / "demo", 1
    while folder.exists():
        number += 1
        folder = RUNS / f"demo-{number}"
    return folder


def last_folder() -> Path:
    """The demo's run that was written last.

    Raises:
        BadInput: there is none.
    """
    found = [path.parent for path in RUNS.glob("demo*/run.json")]
    if not found:
        raise BadInput(f"there is no run of the demo under {RUNS}/ to resume; start one with: groupstate demo")
    return max(found, key=lambda path: (path / "log").stat().st_mtime_ns)


def demo(
    *,
    mode: Literal["async", "sync"] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    engine: EngineName | None = None,
    out: Path | None = None,
    resume: bool = False,
    console: Console | None = None,
    recipe: Settings | None = None,
) -> Summary | None:
    """Train; None if it was stopped by a signal before the end.

    Args:
        mode, steps, seed, engine: None takes the recipe's, or those of the run that is resumed.
        recipe: all other numbers; None for the demo's own.

    Raises:
        BadInput: `out` is taken or can't be written to, there is nothing to resume, or the run was begun with other
            settings.
    """
    folder = out or (last_folder() if resume else free_folder())
    _check_place(folder)
    if not resume and folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; go on with it by --resume, or name another by --out")
    if resume and not (folder / "run.json").exists():
        raise BadInput(f"there is no run in {folder} to resume; start one there with: groupstate demo --out {folder}")
    checkpoints = Checkpoint(folder)
    saved = checkpoints.load() if resume else None
    values = (("mode", mode), ("seed", seed), ("steps", steps), ("engine", engine))
    given: dict[str, Any] = {name: value for name, value in values if value is not None}
    settings = attrs.evolve(recipe or Settings(), **given) if saved is None else _resumed(folder, saved[0], given)
    return anyio.run(_Demo(settings, folder, console or Console(), checkpoints, saved).run)


def _check_place(folder: Path) -> None:
    """
    Raises:
        BadInput: there can be no such folder. Found out only after the warm-up it would have cost half a minute.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise BadInput(f"the run can't be written to {folder}: {nearest} is a file; name another folder by --out")
    if not os.access(nearest, os.W_OK):
        raise BadInput(f"the run can't be written to {folder}: {nearest} takes no files; name another folder by --out")


def _resumed(folder: Path, state: dict[str, Any], given: dict[str, Any]) -> Settings:
    """The settings that a run goes on with: its own, up to another number of steps."""
    settings = Settings(**state["settings"])
    for name in ("mode", "seed", "engine"):
        if name in given and given[name] != getattr(settings, name):
            raise BadInput(
                f"{folder} was begun with {name} {getattr(settings, name)}; leave out --{name} to go on with it"
            )
    if given.get("steps", settings.steps) < state["step"]:
        raise BadInput(f"{folder} is at step {state['step']} already; name at least so many --steps, or leave them out")
    return attrs.evolve(settings, **given)


class Stopped(Exception):
    """A signal came during the warm-up."""


class _Demo:
    def __init__(
        self,
        settings: Settings,
        folder: Path,
        console: Console,
        checkpoints: Checkpoint,
        saved: tuple[dict[str, Any], CheckpointMark] | None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._console = console
        self._checkpoints = checkpoints
        self._saved = saved
        self._tasks = Tasks(
            seed=settings.seed,
            held_out_count=settings.held_out_count,
            terms=settings.terms,
            digits=settings.digits,
        )
        self._began_s = time.monotonic()
        self._stopping = threading.Event()

    async def run(self) -> Summary | None:
        self._say(
            f"GRPO on sums from reasoning-gym, {self._settings.mode} mode, seed {self._settings.seed}, "
            f"engine {self._settings.engine}; "
            f"the run is {self._folder}"
        )
        summary: Summary | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signal, tasks.cancel_scope)
            try:
                summary = await self._train()
            except Exception as error:
                # Raised again below, outside of the task group, which would wrap it.
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if summary is not None:
            return summary
        if (self._folder / "run.json").exists():
            self._say(f"stopped; go on with: {_program()} demo --resume --out {self._folder}")
        else:
            self._say(f"stopped before the run began; start anew with: {_program()} demo")
        return None

    async def _stop_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self._say(f"{number.name}: letting sessions end, then closing")
                self._stopping.set()
                scope.cancel()
                return

    async def _train(self) -> Summary:
        trainer, mark = await self._trainer()
        with self._console.status(f"starting the engine {self._settings.engine!r}"):
            engine = await engine_of(trainer.model, self._settings, self._folder, trainer.step)
        try:
            if trainer.accuracy_before is None:
                trainer.accuracy_before = await self._accuracy(engine, "before GRPO")
            await self._run(trainer, engine, mark)
            after = await self._accuracy(engine, "after GRPO")
        finally:
            with anyio.CancelScope(shield=True):
                await engine.aclose()
        return self._end(trainer, trainer.accuracy_before, after)

    async def _trainer(self) -> tuple[Trainer, CheckpointMark | None]:
        """The trainer of the last checkpoint, or a new one on a freshly warmed-up model."""
        model = new_policy(self._settings.engine, self._settings, TOKENIZER.vocabulary_size)
        trainer = Trainer(model, self._settings, self._checkpoints)
        if self._saved is not None:
            state, mark = self._saved
            trainer.load(state)
            self._say(f"resumed at step {trainer.step} of {self._settings.steps}")
            return trainer, mark
        with self._console.status("warming up: supervised training on right answers") as status:

            def show(progress: WarmUp) -> None:
                status.update(
                    f"warming up: right with probability {progress.accuracy:.0%} after {progress.steps} steps"
                )

            warm = await anyio.to_thread.run_sync(lambda: warm_up(model, self._tasks, self._settings, on_progress=show))
        trainer.first_task = warm.next_position
        self._say(f"warmed up to {warm.accuracy:.0%} right in {warm.steps} steps, {warm.seconds:.0f} s")
        return trainer, None

    async def _run(self, trainer: Trainer, engine: Engine, mark: CheckpointMark | None) -> None:
        async with open_run(
            self._folder,
            rules=rules_of(self._settings),
            source=source_of(self._tasks, trainer.first_task),
            session=session_of(self._tasks),
            engine=engine,
            params=self._settings.sampling(TOKENIZER.eos_id),
            group_size=self._settings.group_size,
            weight_version=None if mark is not None else trainer.step,
            resume_at=mark,
            seed=self._settings.seed,
            grace_s=self._settings.grace_s,
        ) as run:
            if mark is None:
                await trainer.save(run)
            try:
                with TrainingProgress(run, self._settings.steps, self._console) as progress:
                    await trainer.train(run, progress.step)
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await trainer.save(run)
                raise
            await trainer.save(run)

    async def _accuracy(self, engine: Engine, when: str) -> float:
        with self._console.status(f"held-out accuracy {when}"):
            return await held_out_accuracy(engine, self._tasks, self._settings)

    def _end(self, trainer: Trainer, before: float, after: float) -> Summary:
        points = plot.history(self._folder)
        picture = self._folder / "reward.png"
        plot.draw(points, picture)
        summary = Summary(
            seed=self._settings.seed,
            mode=self._settings.mode,
            engine=self._settings.engine,
            steps=trainer.step,
            held_out_tasks=self._settings.held_out_count,
            accuracy_before=before,
            accuracy_after=after,
            seconds=time.monotonic() - self._began_s,
        )
        (self._folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
        self._say(
            f"\nheld-out accuracy on {summary.held_out_tasks} tasks: {before:.1%} before GRPO, {after:.1%} after "
            f"({(after - before) * 100:+.1f} points), {summary.seconds:.0f} s\npicture: {picture}\n\nWhat to type next:"
        )
        group = _evicted_group(self._folder)
        for command in ("show {}", "log {} --limit 20", f"why {{}} {group}", "check {}"):
            self._say(f"  {_program()} {command.format(self._folder)}")
        return summary

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _program() -> str:
    """What the user types for this program: its name, or its path where the name isn't found."""
    here = Path(sys.argv[0])
    if here.name != "groupstate" or shutil.which("groupstate") == str(here.resolve()):
        return "groupstate"
    return os.path.relpath(here)


def _evicted_group(folder: Path) -> str:
    """A group whose life is worth a look: the first that was evicted."""
    evicted = (r.event.group_id for r in read_log(folder) if isinstance(r.event, GroupEvicted))
    return next(evicted, "g1")
