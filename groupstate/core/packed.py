"""Numbers and JSON-like values of a row as they are stored, made into Python's own only when somebody looks at them.

A sampled row of 16,000 tokens takes 64 KB so, as a tuple of integers ten times that; and what only becomes a tensor,
or bytes for another process, is never taken apart.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeAlias

import msgspec

Code: TypeAlias = Literal["i", "f", "d"]
"""Of a C int, float or double, as `struct` and `array` name them."""

BYTES: Final[dict[Code, int]] = {code: struct.calcsize(code) for code in ("i", "f", "d")}


class Packed:
    """A row of numbers as it lies in memory."""

    __slots__ = ("_numbers", "code", "data")

    def __init__(self, code: Code, data: bytes) -> None:
        """
        Args:
            data: whole numbers of the kind that `code` names, in this machine's order of bytes.

        Raises:
            ValueError: it ends within a number.
        """
        if len(data) % BYTES[code]:
            raise ValueError(f"{len(data)} bytes are no whole number of {BYTES[code]} bytes each")
        self.code = code
        self.data = data
        self._numbers: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.data) // BYTES[self.code]

    @property
    def is_packed(self) -> bool:
        """Nobody has asked for the numbers yet."""
        return self._numbers is None

    @property
    def value(self) -> tuple[Any, ...]:
        if self._numbers is None:
            self._numbers = struct.unpack(f"{len(self)}{self.code}", self.data)
        return self._numbers


class PackedInfo:
    """A dict as msgpack has it."""

    __slots__ = ("_info", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._info: dict[str, Any] | None = None

    @property
    def is_packed(self) -> bool:
        """Nobody has asked for the dict yet."""
        return self._info is None

    @property
    def value(self) -> dict[str, Any]:
        if self._info is None:
            self._info = _info(self.data)
        return self._info


_info = msgspec.msgpack.Decoder(dict[str, Any]).decode
_KINDS = frozenset({Packed, PackedInfo})


def unpack_when_read(owner: type, fields: Iterable[str]) -> dict[str, Any]:
    """Have a class with slots hold `Packed` and `PackedInfo` in some of its fields: who reads one gets what it stands
    for, the same object each time.

    Returns:
        The slots by field, for who wants what lies in them.
    """
    slots = {field: owner.__dict__[field] for field in fields}
    for field, slot in slots.items():
        setattr(owner, field, property(_reading(slot), slot.__set__))
    return slots


def _reading(slot: Any) -> Callable[[Any], Any]:
    def read(row: Any) -> Any:
        kept = slot.__get__(row)
        return kept.value if type(kept) in _KINDS else kept

    return read
