"""Trackers for the tests: one that keeps what it is sent, one that raises, one that waits; and a run that has them."""

import contextlib
import threading
from typing import Any

from groupstate import Rules, Run, Trajectory, open_run
from groupstate.runtime.tracking import Tracker


class Kept:
    """A tracker that keeps what it is sent."""

    name = "kept"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.came = threading.Semaphore(0)

    def start(self) -> None:
        self.calls.append(("start",))

    def log(self, metrics: Any, step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log", dict(metrics), step))
        self.came.release()

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self.calls.append(("table", name, tuple(columns), [tuple(row) for row in rows], step))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]

    @property
    def logged(self) -> list[tuple[dict[str, float], int]]:
        return self.of("log")  # type: ignore[return-value]

    @property
    def codes(self) -> list[int]:
        return [code for (code,) in self.of("finish")]


class Broken(Kept):
    """Raises wherever it is told to."""

    name = "broken"

    def __init__(self, *where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self._where = where
        self._error = error or ConnectionError("no route")

    def _raise(self, where: str) -> None:
        if where in self._where:
            raise self._error

    def start(self) -> None:
        super().start()
        self._raise("start")

    def log(self, metrics: Any, step: int) -> None:
        super().log(metrics, step)
        self._raise("log")

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        super().log_table(name, columns, rows, step)
        self._raise("table")

    def finish(self, exit_code: int) -> None:
        super().finish(exit_code)
        self._raise("finish")


class Held(Kept):
    """Its calls take until it is let go."""

    name = "held"

    def __init__(self, *where: str) -> None:
        super().__init__()
        self._where = where
        self.go = threading.Event()
        self.reached = threading.Event()

    def _wait(self, where: str) -> None:
        if where in self._where:
            self.reached.set()
            assert self.go.wait(60)

    def start(self) -> None:
        self._wait("start")
        super().start()

    def log(self, metrics: Any, step: int) -> None:
        self._wait("log")
        super().log(metrics, step)

    def finish(self, exit_code: int) -> None:
        self._wait("finish")
        super().finish(exit_code)


async def alternating(ctx: Any) -> Trajectory:
    """Each third prompt's sessions end alike, at 0 or at 1."""
    number = ctx.prompt.content
    return Trajectory(response_ids=[1], reward=float(ctx.session if number % 3 else number % 2))


def filtering(*trackers: Tracker, **options: Any) -> contextlib.AbstractAsyncContextManager[Run]:
    rules = Rules(filter_metric="reward", batch_size=2)
    return open_run(rules=rules, source=range(60), session=alternating, group_size=2, trackers=trackers, **options)
