"""Sums from the package reasoning-gym, whose own verifier gives the reward.

Rule 1: a training task is a pure function of its position, so a run that is opened again goes on with the
task that comes next.
Rule 2: no held-out expression is ever a training task: where the generator gives one, another takes its place.
"""

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import attrs

from groupstate.engines.tokenizer import CharTokenizer
from groupstate.errors import GroupstateError

ALPHABET = "0123456789+-="

HELD_OUT_OFFSET = 1 << 40
"""Where held-out tasks begin. The generator seeds task number i with seed + i, so two sets of tasks must lie
further apart than either is long."""

DETOUR = 1 << 41
"""How far away the generator is asked again when it gave a held-out expression."""

SEED_STRIDE = 1 << 20
"""Training tasks of one seed before those of the next seed begin."""


class MissingTasks(GroupstateError):
    """The package with the demo's tasks isn't installed."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the demo's tasks come from reasoning-gym, and {cause}; install the extra "
            "'demo' of groupstate, for instance from a clone: pip install '.[demo]', and then: pip install --no-deps "
            "reasoning-gym"
        )


@attrs.frozen
class Task:
    """One expression to work out."""

    position: int
    """Number in the training source, or in the held-out set."""
    expression: str
    """As the generator wrote it, such as `12 + 30`."""
    answer: str
    entry: dict[str, Any] = attrs.field(repr=False, eq=False)
    """As the verifier wants it."""

    @property
    def prompt(self) -> str:
        """The expression alone. The question's English is the same in every task and would only cost time."""
        return self.expression.replace(" ", "") + "="

    @property
    def prompt_ids(self) -> list[int]:
        return [tokenizer().bos_id, *tokenizer().encode(self.prompt)]

    @property
    def answer_ids(self) -> list[int]:
        """The right answer and its end."""
        return [*tokenizer().encode(self.answer), tokenizer().eos_id]


class Tasks:
    """A training source without end and a held-out set that it never touches."""

    def __init__(self, *, seed: int, held_out_count: int, terms: tuple[int, int], digits: tuple[int, int]) -> None:
        """
        Args:
            seed: Of the training source. The held-out set is the same for every seed.
            terms: Fewest and most numbers in an expression.
            digits: Fewest and most digits of a number.
        """
        chain_sum = import_task_module("arithmetic", "chain_sum")
        config = chain_sum.ChainSumConfig(
            min_terms=terms[0], max_terms=terms[1], min_digits=digits[0], max_digits=digits[1], seed=0
        )
        self._generator = chain_sum.ChainSumDataset(config)
        self._first = seed * SEED_STRIDE
        self.held_out = tuple(itertools.islice(self._distinct(HELD_OUT_OFFSET), held_out_count))
        self._forbidden = frozenset(task.expression for task in self.held_out)

    def train(self, position: int) -> Task:
        """The training task at a position, from 0."""
        for index in itertools.count(self._first + position, DETOUR):
            task = self._task(index, position)
            if task.expression not in self._forbidden:
                return task
        raise AssertionError("the generator never ends")

    def score(self, task: Task, answer: str) -> float:
        """What the package's verifier gives: 1 for the right number, less for an answer that contains it."""
        return float(self._generator.score_answer(answer, task.entry))

    def reward(self, task: Task, answer: str) -> float:
        """1 for full marks from the verifier, else 0. Its part marks go to answers that contain the right
        number, which would pay for a wrong sign."""
        return 1.0 if self.score(task, answer) >= 1.0 else 0.0

    def _task(self, index: int, position: int) -> Task:
        entry = self._generator[index]
        return Task(position, entry["metadata"]["expression"], entry["answer"], entry)

    def _distinct(self, start: int) -> Iterator[Task]:
        seen: set[str] = set()
        for index in itertools.count(start):
            task = self._task(index, len(seen))
            if task.expression not in seen:
                seen.add(task.expression)
                yield task


@functools.cache
def tokenizer() -> CharTokenizer:
    """Of every part of the demo."""
    return CharTokenizer(ALPHABET)


def import_task_module(category: str, name: str) -> ModuleType:
    """One module of reasoning-gym, without the rest of the package.

    `import reasoning_gym` brings in every task, and with them packages that need a C compiler. So the
    packages above the module are hollow while it is imported, and gone again afterwards.

    Raises:
        MissingTasks: the package, or one that this module needs, isn't there.
    """
    try:
        with _hollow_packages("reasoning_gym", f"reasoning_gym.{category}"):
            return importlib.import_module(f"reasoning_gym.{category}.{name}")
    except ImportError as error:
        raise MissingTasks(f"importing {name} failed with: {error}") from error


@contextmanager
def _hollow_packages(*names: str) -> Iterator[None]:
    if names[0] in sys.modules:
        # The whole package is imported already, by somebody who has all that it needs.
        yield
        return
    before = frozenset(sys.modules)
    try:
        for name in names:
            sys.modules[name] = _hollow(name)
        yield
    finally:
        for name in [name for name in sys.modules if _is_inside(name, names[0]) and name not in before]:
            del sys.modules[name]


def _hollow(name: str) -> ModuleType:
    """A package that has its directory and nothing in it."""
    parent = name.rpartition(".")[0]
    spec = PathFinder.find_spec(name, list(sys.modules[parent].__path__) if parent else None)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return importlib.util.module_from_spec(spec)


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
