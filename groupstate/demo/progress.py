"""What the demo shows while it runs: a live table in a terminal, a line every few steps in a pipe."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from groupstate import Phase, Run
from groupstate.demo.train import StepReport

LINE_EVERY = 10
"""Steps between two lines in a pipe."""

PHASES = (Phase.PENDING, Phase.RUNNING, Phase.FINISHED, Phase.SAMPLED)
REASONS = ("zero_variance", "stale", "failed", "empty", "surplus")


class TrainingProgress:
    """Use as a context manager around the training loop; give it each `StepReport`."""

    def __init__(
        self, run: Run, steps: int, console: Console, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._steps = steps
        self._console = console
        self._clock_s = clock_s
        self._last: StepReport | None = None
        self._began_s = clock_s()
        self._tokens_before = run.book.totals["response_tokens"]
        self._bar = Progress(
            TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("training", total=steps)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> "TrainingProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def step(self, report: StepReport) -> None:
        self._last = report
        self._bar.update(self._task, completed=report.step)
        if not self._console.is_terminal and (report.step % LINE_EVERY == 0 or report.step == self._steps):
            values = ", ".join(f"{name} {value}" for name, value in self._figures().items())
            self._console.print(f"step {report.step}/{self._steps}: {values}", highlight=False, soft_wrap=True)

    def _figures(self) -> dict[str, str]:
        book, last = self._run.book, self._last
        seconds = max(1e-9, self._clock_s() - self._began_s)
        tokens = book.totals["response_tokens"] - self._tokens_before
        evicted = [
            f"{reason} {book.totals[f'evicted/{reason}']}" for reason in REASONS if book.totals[f"evicted/{reason}"]
        ]
        return {
            "reward": "-" if last is None else f"{last.reward:.2f}",
            "lag": "-" if last is None else f"{last.metrics['training/off_policy/group_staleness/mean'] - 1:.2f}",
            "groups": " ".join(f"{phase} {book.count(phase)}" for phase in PHASES),
            "evicted": "; ".join(evicted) or "none",
            "refills": str(book.totals["refills"]),
            "tokens/s": f"{tokens / seconds:,.0f}",
        }

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, value in self._figures().items():
            table.add_row(f"[bold]{name}[/bold]", value)
        return Group(self._bar, table)
