"""What tests the library, each put to a fault that was planted: what it finds, and after how much of its work.

| tool | its work |
| --- | --- |
| machine | `GroupMachine` under the library's own rules, others in each story: stories, by fixed seeds |
| search | `explore`, world after world in their order: states |
| simulator | `simulate`, seed after seed from 0 on: seeds |
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.simulator import simulate
from groupstate.testing.exhaustive.search import STATES_MAX, _Search
from groupstate.testing.exhaustive.worlds import WORLDS
from tests.planted.faults import TEN

ROOT = Path(__file__).parents[2]

Plant = Callable[[pytest.MonkeyPatch], None]

STORIES_MAX = 500
SEEDS_MAX = 60

NOT_SEEN = {
    ("lost wake-up", "machine"): "nobody sleeps: whether a sampler was served is looked at",
    ("lost wake-up", "search"): "nobody sleeps",
    ("snapshot off by one", "machine"): "it recovers from the log alone",
    ("fsync skipped", "machine"): "no disk",
    ("fsync skipped", "search"): "no disk",
    ("a cancelled sampler keeps its groups", "search"): "nobody keeps account of who has which batch",
    ("a waiter on a dead rollout", "machine"): "no rollout",
    ("a waiter on a dead rollout", "search"): "no rollout",
}
"""Fault and tool -> why the tool can't see it."""


@attrs.frozen
class Found:
    after: int
    """Stories, states or seeds, that in which it shows included."""
    what: str
    """In a word or two."""
    where: str = ""
    """The world or the seed."""
    seconds: float = 0.0
    """Processor time."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    logger = logging.getLogger("groupstate")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def by_machine(plant: Plant, *, most: int = STORIES_MAX) -> Found | None:
    """In a process of its own: hypothesis draws numbers that stand in the modules that are there, so what else was
    imported would decide which stories are told."""
    name = next(name for name, known in TEN.items() if known is plant)
    command = [sys.executable, "-m", "tests.planted.machine", name, str(most)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    return None if found is None else Found(**found)


class _Enough(Exception):
    pass


class _First(_Search):
    """Ends at the first thing that is wrong."""

    def _is_new(self, node: Any, stage: Any) -> bool:
        new = super()._is_new(node, stage)
        if self.breaches:
            raise _Enough
        return new


def by_search(plant: Plant, *, worlds: Iterable[str] = WORLDS) -> Found | None:
    states = 0
    began = time.process_time()
    with planted(plant):
        for name in worlds:
            search = _First(WORLDS[name], ())
            try:
                search.run(STATES_MAX)
            except _Enough:
                states += len(search.nodes) + 1
                breach = next(iter(search.breaches.values()))
                return Found(states, breach.rule, name, time.process_time() - began)
            states += len(search.nodes)
    return None


def by_simulator(plant: Plant, *, seeds: Iterable[int] = range(SEEDS_MAX)) -> Found | None:
    began = time.process_time()
    with planted(plant):
        for number, seed in enumerate(seeds, 1):
            breach = simulate(drawn_plan(seed)).breach
            if breach is not None:
                return Found(number, breach.kind, str(seed), time.process_time() - began)
    return None


TOOLS: dict[str, Callable[[Plant], Found | None]] = {
    "machine": by_machine,
    "search": by_search,
    "simulator": by_simulator,
}
