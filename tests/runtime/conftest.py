"""Fixtures that several files of this folder use."""

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import groupstate as gs
from tests.runtime.outside import Outside


@pytest.fixture
def outside() -> Iterator[Callable[..., Outside]]:
    """Makes systems outside; at the end each log must be one that can be true, and replay to its book."""
    made: list[Outside] = []

    def make(rules: gs.Rules | None = None, **options: Any) -> Outside:
        made.append(Outside(rules, **options))
        return made[-1]

    yield make
    for system in made:
        system.check()


@pytest.fixture
def no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the test may start an event loop."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a status feed started an event loop")

    monkeypatch.setattr("asyncio.new_event_loop", never)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the tracking of a run has warned of."""
    caplog.set_level(logging.WARNING, "groupstate.tracking")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "groupstate.tracking"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of SIGINT and SIGTERM back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
