"""Tables that only grow, in columns of numbers, and their compact form for the page.

Rule 1: a row never changes, and rows come in the order of events: what is new since an event is the end of each table.
Rule 2: adding a row is one append to a list; rows go into columns many at a time.
"""

import json
import math
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

LEVEL = 1
"""Of compression: level 4 takes a sixth longer for four percent, level 6 half as long again."""


LIMITS = {"B": (0, 2**8 - 1), "H": (0, 2**16 - 1), "I": (0, 2**32 - 1), "q": (-(2**63), 2**63 - 1)}


def _extend(column: "array[Any]", values: Sequence[Any]) -> None:
    """A number that no run writes, as in a log that was made by hand, is cut to what the column can hold: what is wrong
    with it, the invariants say."""
    try:
        part = array(column.typecode, values)
    except OverflowError:
        low, high = LIMITS[column.typecode]
        part = array(column.typecode, [min(max(value, low), high) for value in values])
    column.extend(part)


class Table:
    """Rows of numbers, kept by column. The column `seq` says from which event on a row is there."""

    def __init__(self, **types: str) -> None:
        """
        Args:
            types: per column its type: B, H, I (unsigned, 1, 2 and 4 bytes), q (signed, 8 bytes), d (floating point).
        """
        self.columns: dict[str, array[Any]] = {name: array(code) for name, code in types.items()}
        self._waiting: list[tuple[Any, ...]] = []
        self.add: Callable[[tuple[Any, ...]], None] = self._waiting.append
        """Take a row in: a value per column, in their order."""

    def __len__(self) -> int:
        return len(self.columns["seq"]) + len(self._waiting)

    def extend(self, *columns: list[Any]) -> None:
        """Take many rows in at once, as a list per column, in their order."""
        self.flush()
        for column, values in zip(self.columns.values(), columns, strict=True):
            _extend(column, values)

    def flush(self) -> None:
        """Put the rows that were added into the columns."""
        if self._waiting:
            for column, values in zip(self.columns.values(), zip(*self._waiting, strict=True), strict=True):
                _extend(column, values)
            self._waiting.clear()

    def since(self, seq: int) -> dict[str, "array[Any]"]:
        """The columns of what came after event `seq`. Rows must have been flushed."""
        start = bisect_right(self.columns["seq"], seq)
        return {name: column[start:] for name, column in self.columns.items()}


class Measured(Table):
    """A table whose rows have metrics too, as a mapping behind the other values; a column for each, not a number where
    a row lacks it."""

    def __init__(self, columns_max: int, **types: str) -> None:
        super().__init__(**types)
        self.metrics: dict[str, array[float]] = {}
        self.left_out: set[str] = set()
        """Metrics that there was no column for."""
        self._columns_max = columns_max

    def flush(self) -> None:
        if not self._waiting:
            return
        found = [row[-1] for row in self._waiting]
        for name in dict.fromkeys(chain.from_iterable(found)):
            if name not in self.metrics and len(self.metrics) < self._columns_max:
                self.metrics[name] = array("d", [math.nan]) * len(self.columns["seq"])
            elif name not in self.metrics:
                self.left_out.add(name)
        for name, column in self.metrics.items():
            column.extend([metrics.get(name, math.nan) for metrics in found])
        for column, values in zip(self.columns.values(), list(zip(*self._waiting, strict=True))[:-1], strict=True):
            _extend(column, values)
        self._waiting.clear()

    def since(self, seq: int) -> dict[str, "array[Any]"]:
        start = bisect_right(self.columns["seq"], seq)
        measured = {f"metric {place}": column[start:] for place, column in enumerate(self.metrics.values())}
        return super().since(seq) | measured


class Texts:
    """Texts by number, each once. Number 0 is the empty one."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._seqs = [0]
        self.numbers = {"": 0}
        """By text."""

    def number(self, text: str, seq: int) -> int:
        """The number of a text that event `seq` needs."""
        found = self.numbers.get(text)
        if found is None:
            found = self.numbers[text] = len(self.texts)
            self.texts.append(text)
            self._seqs.append(seq)
        return found

    def since(self, seq: int) -> list[str]:
        return self.texts[bisect_right(self._seqs, seq) if seq else 0 :]


Columns = Mapping[str, "array[Any]"]


class Packed:
    """Tables as bytes.

    Compressed (zlib): the columns, a header as JSON, and its length (4 bytes, little-endian). Of a column all first
    bytes come first, then all second ones; where it never falls, the differences of its values are kept. So what takes
    long can be done before all is known that the header says.
    """

    def __init__(self, tables: Mapping[str, Columns]) -> None:
        self._listed: dict[str, list[list[Any]]] = {}
        self._compress = zlib.compressobj(LEVEL)
        self._parts: list[bytes] = []
        for table, columns in tables.items():
            self._listed[table] = []
            for name, column in columns.items():
                rising = name in RISING and len(column) > 0
                if rising:
                    column = array(column.typecode, [column[0], *map(int.__sub__, column[1:], column)])
                self._listed[table].append([name, column.typecode, len(column), rising])
                self._parts.append(self._compress.compress(_by_place(column)))

    def beside(self, meta: Mapping[str, Any]) -> bytes:
        """The tables, and in their header what isn't a table."""
        header = json.dumps({**meta, "tables": self._listed}, ensure_ascii=False, separators=(",", ":")).encode()
        end = self._compress.copy()
        return b"".join([*self._parts, end.compress(header), end.compress(struct.pack("<I", len(header))), end.flush()])


RISING = frozenset({"seq", "at_us"})


def _by_place(column: "array[Any]") -> bytes:
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        column = array(column.typecode, column)
        column.byteswap()
    raw = column.tobytes()
    width = column.itemsize
    return raw if width == 1 else b"".join(raw[place::width] for place in range(width))
