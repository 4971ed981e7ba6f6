"""Weights & Biases.

Steps are the metric `groupstate/step`, which every other one is drawn over: W&B's own step only rises, and what is
logged for a lower one is dropped there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from groupstate.core.arguments import shown
from groupstate.errors import BadSettings
from groupstate.integrations.trackers.packages import needed
from groupstate.logs import Logger

log = Logger("groupstate.trackers")

STEP: Final = "groupstate/step"

INCREMENTS_PER_TABLE: Final = 100
"""Times that rows are added to one table before the next one is begun. W&B names all earlier increments with each new
one, so that a table costs more each time, and shows no more than the latest hundred."""


class WandB:
    name = "wandb"

    def __init__(self, *, run: Any = None, **init: Any) -> None:
        """
        Args:
            run: what `wandb.init` gave, to log there; whoever made it finishes it. None makes one.
            init: what `wandb.init` takes, such as `project`, `name`, `mode="offline"`.

        Raises:
            MissingExtra: wandb isn't installed.
            BadSettings: `run` is no run of W&B.
        """
        self._wandb = needed("wandb", tracker="WandB", package="wandb", extra="wandb")
        if run is not None and not all(callable(getattr(run, part, None)) for part in ("log", "define_metric")):
            raise BadSettings(f"run is {shown(run)}; it must be what wandb.init gave, or None for a run of its own")
        self._run = run
        self._is_own = run is None
        self._init = init
        self._drawn_over_step: set[str] = set()
        self._tables: dict[str, _Table] = {}
        self._increments = True

    def start(self) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._init)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        run = self._open()
        for name in metrics:
            self._draw_over_step(run, name)
        run.log({**metrics, STEP: step})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        run = self._open()
        table = self._tables.setdefault(name, _Table())
        if table.value is None or table.increments >= INCREMENTS_PER_TABLE or not self._increments:
            table.value, table.increments, table.number = self._new(columns), 0, table.number + 1
        for row in rows:
            table.value.add_data(*row)
        table.increments += 1
        is_first = not self._increments or table.number == 1
        key = name if is_first else f"{name}/part-{table.number}"
        run.log({key: table.value, STEP: step})

    def _new(self, columns: Sequence[str]) -> Any:
        if self._increments:
            try:
                return self._wandb.Table(columns=list(columns), log_mode="INCREMENTAL")
            except (TypeError, ValueError, AssertionError):
                self._increments = False
                log.warning(
                    "this wandb has no incremental tables: the rows of each step become a table of their own",
                    version=getattr(self._wandb, "__version__", "unknown"),
                    help="a newer wandb gathers them in one",
                )
        return self._wandb.Table(columns=list(columns))

    def finish(self, exit_code: int) -> None:
        if self._is_own and self._run is not None:
            run, self._run = self._run, None
            # Another run that this is given to has another one.
            self._drawn_over_step, self._tables = set(), {}
            run.finish(exit_code=exit_code)

    def _draw_over_step(self, run: Any, name: str) -> None:
        if name not in self._drawn_over_step:
            self._drawn_over_step.add(name)
            run.define_metric(name, step_metric=STEP)

    def _open(self) -> Any:
        if self._run is None:
            self.start()
        return self._run


class _Table:
    """The table that rows are added to."""

    def __init__(self) -> None:
        self.value: Any = None
        self.number = 0
        self.increments = 0
