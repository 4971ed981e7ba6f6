"""Fixtures that several files of this folder use."""

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
