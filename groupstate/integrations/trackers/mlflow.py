"""MLflow: a run at a tracking server, or in a database file.

The package is `mlflow-skinny`, which `mlflow` holds too.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from groupstate.core.arguments import shown, string
from groupstate.errors import BadSettings
from groupstate.integrations.trackers.packages import needed

METRICS_PER_CALL: Final = 1_000
"""More is refused by MLflow."""

ROWS_PER_PART: Final = 200
"""Rows of one file of a table. The last file is written anew each time, so this bounds what a step costs."""

NAME_MAX: Final = 250
"""Characters of a name; more is refused."""

DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
"""Tracking addresses that begin so are a database's."""

ODD = re.compile(r"[^\w\-. /:]", re.ASCII)
"""What MLflow refuses in a name."""


class MLflow:
    name = "mlflow"

    def __init__(
        self,
        experiment: str = "groupstate",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            experiment: made if it isn't there.
            run_name: None lets MLflow make one up.
            tracking_uri: such as `http://host:5000` or `sqlite:///mlflow.db`; None is MLflow's own choice.
            artifact_location: where a new experiment keeps the files of tables, such as a folder; None is MLflow's own
                choice, which with a database file is `./mlruns`.
            run_id: go on with this run in place of a new one.
            tags: of a new run.

        Raises:
            MissingExtra: MLflow isn't installed, or what it needs for a database.
            BadSettings: what is given can't be.
        """
        self._tracking = needed("mlflow.tracking", tracker="MLflow", package="mlflow-skinny", extra="mlflow")
        self._entities = needed("mlflow.entities", tracker="MLflow", package="mlflow-skinny", extra="mlflow")
        self._experiment = string("experiment", experiment, error=BadSettings)
        self._run_name = _text_or_none("run_name", run_name)
        self._tracking_uri = _text_or_none("tracking_uri", tracking_uri)
        self._artifact_location = _text_or_none("artifact_location", artifact_location)
        self._tags = _texts(tags or {})
        self._need_database()
        self._client: Any = None
        self._parts: dict[str, _Part] = {}
        self.run_id = _text_or_none("run_id", run_id)
        """Of MLflow's run, once it was started."""

    def _need_database(self) -> None:
        """MLflow without them calls the address of a database one that it doesn't support."""
        scheme = str(self._tracking_uri or self._tracking.get_tracking_uri()).partition("://")[0]
        if scheme.partition("+")[0] in DATABASES:
            for package in ("sqlalchemy", "alembic"):
                needed(package, tracker="MLflow with a database", package=package, extra="mlflow")

    def start(self) -> None:
        self._client = self._tracking.MlflowClient(tracking_uri=self._tracking_uri)
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return
        run = self._client.create_run(self._experiment_id(), run_name=self._run_name, tags=self._tags)
        self.run_id = run.info.run_id

    def _experiment_id(self) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        if known is not None:
            return str(known.experiment_id)
        return str(self._client.create_experiment(self._experiment, artifact_location=self._artifact_location))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        client, now_ms = self._open(), time.time_ns() // 1_000_000
        whole = [self._entities.Metric(_allowed(name), value, now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(whole), METRICS_PER_CALL):
            client.log_batch(self.run_id, metrics=whole[first : first + METRICS_PER_CALL])

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Rows go to files `NAME/part-1.json`, ..., each in the form that `mlflow.load_table` reads. MLflow's own
        `log_table` fetches the whole table and sends it back each time."""
        client = self._open()
        part = self._parts.setdefault(name, _Part())
        for row in rows:
            if len(part.rows) >= ROWS_PER_PART:
                self._send(client, name, columns, part)
                part.number, part.rows = part.number + 1, []
            part.rows.append(list(row))
        self._send(client, name, columns, part)

    def _send(self, client: Any, name: str, columns: Sequence[str], part: "_Part") -> None:
        table = {"columns": list(columns), "data": part.rows}
        client.log_dict(self.run_id, table, f"{_allowed(name)}/part-{part.number}.json")

    def finish(self, exit_code: int) -> None:
        status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code > 128 else "FAILED"
        client = self._open()
        client.set_tag(self.run_id, "exit_code", str(exit_code))
        client.set_terminated(self.run_id, status)

    def _open(self) -> Any:
        if self._client is None:
            self.start()
        return self._client


class _Part:
    """The file of a table that is being filled."""

    def __init__(self) -> None:
        self.number = 1
        self.rows: list[list[Any]] = []


def _text_or_none(name: str, value: Any) -> str | None:
    return None if value is None else string(name, value, error=BadSettings)


def _texts(tags: Any) -> dict[str, str]:
    if not isinstance(tags, Mapping):
        raise BadSettings(f"tags is {shown(tags)}; it must be a dict of names and texts")
    return {
        string("the name of a tag", name, error=BadSettings): string(f"tag {name!r}", value, error=BadSettings)
        for name, value in tags.items()
    }


def _allowed(name: str) -> str:
    """A name that MLflow takes: one that it refuses would cost all numbers that are sent with it."""
    parts = ODD.sub("_", name).split("/")
    # It may become a path: no part of it may be empty, or lead elsewhere.
    whole = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return re.sub(r"^\.\.", "__", whole)[:NAME_MAX].rstrip("/")
