"""Where prompts come from.

Rule 1: a source is drawn from synchronously, one prompt at a time, and knows its position.
Rule 2: a source that can seek goes on behind the last submitted prompt when a run is opened again.
Rule 3: a source may say what its order depends on (`describe() -> dict`), so that a run opened with another one is
refused before prompts are skipped or repeated.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import msgspec

from groupstate.core.arguments import shown, string
from groupstate.core.prompt import Prompt, as_prompt, row_prompt
from groupstate.errors import BadInput, BadSettings, MissingExtra


class Source(Protocol):
    """Gives prompts one by one."""

    @property
    def name(self) -> str: ...

    @property
    def position(self) -> int:
        """Index of the next prompt."""
        ...

    def draw(self) -> Prompt | None:
        """The next prompt; None once there are no more."""
        ...

    def seek(self, position: int) -> None:
        """Go on with the prompt at `position`."""
        ...


class ListSource:
    """Prompts that are all at hand, in order or shuffled anew for each epoch."""

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        epochs: int | None = 1,
        shuffle_seed: int | None = None,
        name: str = "list",
    ) -> None:
        """
        Args:
            prompts: `Prompt`s, rows (dicts with a "prompt", as in a file) or bare contents.
            epochs: passes over the prompts; None for no end.
            shuffle_seed: None keeps the order; else epoch e has the permutation of (seed, e).

        Raises:
            BadInput: they are a set.
        """
        _need_order(prompts)
        self.name = name
        self.position = 0
        self._prompts = prompts
        self._epochs = epochs
        self._seed = shuffle_seed
        self._order: tuple[int, list[int]] | None = None

    def draw(self) -> Prompt | None:
        size = len(self._prompts)
        if not size or (self._epochs is not None and self.position >= size * self._epochs):
            return None
        epoch, index = divmod(self.position, size)
        self.position += 1
        prompt = as_prompt(self._prompts[self._shuffled(epoch)[index] if self._seed is not None else index])
        # An id of the file can only be used once in a run.
        return prompt if epoch == 0 else attrs.evolve(prompt, group_id=None)

    def seek(self, position: int) -> None:
        self.position = position

    def describe(self) -> dict[str, Any]:
        return {"size": len(self._prompts), "epochs": self._epochs, "shuffle_seed": self._seed}

    def by_dataset(self) -> "MixedSource":
        """The same prompts, apart by their dataset: each in its order, with the passes and the shuffling of all."""
        prompts: dict[str, list[Prompt]] = {}
        for prompt in map(as_prompt, self._prompts):
            dataset = string(f"the dataset of a prompt of {self.name}", prompt.dataset)
            prompts.setdefault(dataset, []).append(prompt)
        return MixedSource(
            {
                dataset: ListSource(own, epochs=self._epochs, shuffle_seed=self._seed, name=f"{self.name}:{dataset}")
                for dataset, own in prompts.items()
            },
            name=self.name,
        )

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


class IteratorSource:
    """Prompts from any iterable. Seeking draws and drops, so the iterable must begin anew on each start."""

    def __init__(self, prompts: Iterable[Any], *, name: str = "iterator") -> None:
        _need_order(prompts)
        self.name = name
        self.position = 0
        self._prompts: Iterator[Any] = iter(prompts)

    def draw(self) -> Prompt | None:
        for content in self._prompts:
            self.position += 1
            return as_prompt(content)
        return None

    def seek(self, position: int) -> None:
        if position < self.position:
            raise BadInput(f"{self.name} is at prompt {self.position} and can't go back to {position}")
        for _ in itertools.islice(self._prompts, position - self.position):
            self.position += 1


def _need_order(prompts: Iterable[Any]) -> None:
    """
    Raises:
        BadInput: they are a set, whose order is another one in each process.
    """
    if isinstance(prompts, set | frozenset):
        raise BadInput(
            f"{shown(prompts)} is a {type(prompts).__name__}, and the order of one differs from process to process, so "
            "a run that is opened again would skip some prompts and repeat others; give a list, such as sorted(prompts)"
        )


class FunctionSource:
    """Prompts made from their position, without end: `make(position)` gives a `Prompt`, a row or a content."""

    def __init__(self, make: Callable[[int], Any], *, name: str = "function") -> None:
        self.name = name
        self.position = 0
        self._make = make

    def draw(self) -> Prompt | None:
        prompt = self._make(self.position)
        if prompt is None:
            return None
        self.position += 1
        return as_prompt(prompt)

    def seek(self, position: int) -> None:
        self.position = position


class MixedSource:
    """Several datasets, each with a source of its own. In a run the rules' shares say whose turn it is."""

    def __init__(self, sources: Mapping[str, Any], *, name: str = "mixed") -> None:
        """
        Args:
            sources: per dataset a source, or what `as_source` makes one of. Its prompts are of that dataset,
                whatever they say.

        Raises:
            BadInput: a dataset is of several itself.
        """
        self.name = name
        for dataset, source in sources.items():
            if not isinstance(dataset, str):
                raise BadInput(f"{dataset!r} is no name of a dataset; it must be a string")
            if isinstance(source, Mapping | MixedSource):
                raise BadInput(f"dataset {dataset!r} of {name} is a mapping itself; give one source for each dataset")
        self._sources = {dataset: as_source(source) for dataset, source in sources.items()}
        self._done: set[str] = set()

    @property
    def datasets(self) -> tuple[str, ...]:
        """Those that may have prompts left."""
        return tuple(dataset for dataset in self._sources if dataset not in self._done)

    @property
    def position(self) -> int:
        """Prompts drawn in all."""
        return sum(source.position for source in self._sources.values())

    def position_of(self, dataset: str) -> int:
        return self._sources[dataset].position

    def draw_from(self, dataset: str) -> Prompt | None:
        """The next prompt of one dataset; None once it has no more."""
        prompt = self._sources[dataset].draw()
        if prompt is None:
            self._done.add(dataset)
            return None
        return attrs.evolve(as_prompt(prompt), dataset=dataset)

    def draw(self) -> Prompt | None:
        """The next prompt of the dataset that has given the fewest: for use outside of a run."""
        while names := self.datasets:
            prompt = self.draw_from(min(names, key=self.position_of))
            if prompt is not None:
                return prompt
        return None

    def seek(self, position: int) -> None:
        raise BadInput(f"{self.name} is of several datasets, so one position says nothing; use seek_each")

    def seek_each(self, positions: Mapping[str, int]) -> None:
        """Go on behind the last prompt of each dataset."""
        for dataset, source in self._sources.items():
            if position := positions.get(dataset, 0):
                source.seek(position)
        self._done.clear()

    def describe(self) -> dict[str, Any]:
        """By dataset, what its source says of itself."""
        said = {dataset: description(source) for dataset, source in self._sources.items()}
        return {dataset: {"name": name, "kind": kind, **details} for dataset, (name, kind, details) in said.items()}


def description(source: Source) -> tuple[str, str, dict[str, Any]]:
    """The source's name, its class, and what its order depends on; nothing where it has no `describe`.

    Raises:
        BadSettings: what it says is no dict.
    """
    describe = getattr(source, "describe", None)
    details = {} if describe is None else describe()
    if not isinstance(details, dict):
        raise BadSettings(f"describe() of source {source.name!r} gave {type(details).__name__}; it must give a dict")
    return source.name, type(source).__name__, details


def as_source(value: Any) -> Source:
    """A source from what users have at hand: a source, a file name, a list, any other iterable; a mapping of
    dataset names to such."""
    if isinstance(value, Mapping):
        return MixedSource(value)
    if isinstance(value, str) and Path(value).suffix.lower() not in _READERS and not os.path.isdir(value):
        raise BadInput(
            f"prompts are read from a .jsonl or a .parquet file, and {shown(value)} is none by its name; if it is a "
            "prompt itself, give a list with it in it"
        )
    if isinstance(value, (str, Path)):
        return file_source(Path(value))
    if hasattr(value, "draw"):
        missing = [name for name in ("name", "position", "seek") if not hasattr(value, name)]
        if missing:
            raise BadInput(
                f"source {shown(value)} has no {', no '.join(missing)}; it needs name, position, draw() and seek()"
            )
        return value  # type: ignore[no-any-return]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return ListSource(value)
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | memoryview):
        raise BadInput(
            f"{shown(value)} can't give prompts; a source is a list, a file name, any iterable, a mapping of dataset "
            "names to such, or an object with name, position, draw() and seek()"
        )
    return IteratorSource(value)


# Files -----------------------------------------------------------------------------------------------


def file_source(path: Path, *, epochs: int | None = 1, shuffle_seed: int | None = None) -> ListSource:
    """Prompts of a .jsonl or .parquet file.

    Raises:
        BadInput: no such file, another ending, or a row that can't be used (named by its number).
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None or os.path.isdir(path):
        what = "a folder" if os.path.isdir(path) else "none by its name"
        raise BadInput(f"prompts are read from a .jsonl or a .parquet file, and {str(path)!r} is {what}")
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file")
    prompts, seen = [], dict[str, int]()
    for number, row in reader(path):
        prompt = row_prompt(row, f"{path}: {'row' if reader is _parquet_rows else 'line'} {number}")
        if prompt.group_id is not None:
            first = seen.setdefault(prompt.group_id, number)
            if first != number:
                raise BadInput(f"{path}: group_id {prompt.group_id!r} stands at {first} and again at {number}")
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: it holds no prompts")
    return ListSource(prompts, epochs=epochs, shuffle_seed=shuffle_seed, name=path.name)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BadInput(f"{path}: line {number} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtra(f"reading {path.name}", "pyarrow", "parquet") from error
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path}: not a readable Parquet file: {error}") from error
    yield from enumerate(table.to_pylist(), 1)


_READERS: Final = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".parquet": _parquet_rows}
"""By the ending of a file's name, what reads its rows."""
