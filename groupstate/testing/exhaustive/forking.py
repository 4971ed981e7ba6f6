"""Copies of a run in memory that go on independently of each other.

Rule 1: what can change is copied, what never does is shared, and a kind of which neither is known is refused: a copy
that shares something by accident would be a run that another one meddles with.
Rule 2: what two objects share, their copies share; a bound method is bound to the copy.
"""

import enum
import functools
import itertools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import attrs
import msgspec
from sortedcontainers import SortedList

from groupstate.core.departed import Departed
from groupstate.log.memory import MemoryPayloads
from groupstate.log.waiters import Waiters
from groupstate.logs import Logger

T = TypeVar("T")

Memo: TypeAlias = dict[int, Any]
"""Copies by the `id` of what they are copies of."""

Copier: TypeAlias = Callable[[Any, Memo], Any]

SHARED: Final = (
    *(type(None), bool, int, float, str, bytes, tuple, frozenset, range, type),
    functools.partial,  # a selection of the user's own
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MappingProxyType),
    Logger,
    MemoryPayloads,  # adds and forgets by key; a run that is only explored reads none back
    Waiters,  # nobody waits for a run that is explored
    anyio.Event,
    itertools.count,  # numbers that only rise, whoever takes them
    BaseException,
    enum.Enum,
)
"""Kinds that are shared, those derived from them included. A tuple holds nothing that changes, by the house's style."""

_copiers: dict[type, Copier] = {}


def forked(value: T) -> T:
    """An independent copy of a run.

    Raises:
        TypeError: it holds something of which nobody knows whether it can be shared.
    """
    return _copy(value, {})  # type: ignore[no-any-return]


def _copy(value: Any, memo: Memo) -> Any:
    kind = type(value)
    copier = _copiers.get(kind)
    if copier is None:
        copier = _copiers[kind] = _copier(kind)
    return copier(value, memo)


def _same(value: Any, memo: Memo) -> Any:
    return value


def _copier(kind: type) -> Copier:
    if kind is types.MethodType:
        return _method
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]
    if issubclass(kind, SHARED):
        return _same
    if issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen:
        return _same
    if attrs.has(kind):
        return _same if kind.__setattr__.__name__ == "_frozen_setattrs" else _by_fields(kind)
    if kind.__dictoffset__ and not hasattr(kind, "__slots__"):
        return _by_dict
    raise TypeError(f"a run that holds a {kind.__module__}.{kind.__qualname__} can't be copied; see forking.py")


def _method(value: types.MethodType, memo: Memo) -> Any:
    return types.MethodType(value.__func__, _copy(value.__self__, memo))


def _by_dict(value: Any, memo: Memo) -> Any:
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = object.__new__(type(value))
        held = made.__dict__
        held.update(value.__dict__)
        for name, part in value.__dict__.items():
            # Looked up here, since most parts are shared and a call for each would take longer than all else.
            copier = _copiers.get(type(part), _copy)
            if copier is not _same:
                held[name] = copier(part, memo)
    return made


def _by_fields(kind: type) -> Copier:
    names = [field.name for field in attrs.fields(kind)]
    put = object.__setattr__

    def copier(value: Any, memo: Memo) -> Any:
        made = memo.get(id(value))
        if made is None:
            made = memo[id(value)] = object.__new__(kind)
            for name in names:
                part = getattr(value, name)
                copier = _copiers.get(type(part), _copy)
                put(made, name, part if copier is _same else copier(part, memo))
        return made

    return copier


def _list(value: Any, memo: Memo) -> Any:
    return value.copy() if _all_same(value) else [_copy(part, memo) for part in value]


def _dict(value: Any, memo: Memo) -> Any:
    return value.copy() if _all_same(value.values()) else {key: _copy(part, memo) for key, part in value.items()}


def _counter(value: Any, memo: Memo) -> Any:
    made: Counter[Any] = Counter.__new__(Counter)
    dict.update(made, value)  # as `Counter.copy` does, in a tenth of its time
    return made


def _ordered(value: Any, memo: Memo) -> Any:
    return OrderedDict((key, _copy(part, memo)) for key, part in value.items())


def _deque(value: Any, memo: Memo) -> Any:
    return deque([_copy(part, memo) for part in value], value.maxlen)


def _defaults(value: Any, memo: Memo) -> Any:
    return defaultdict(value.default_factory, {key: _copy(part, memo) for key, part in value.items()})


def _copied(value: Any, memo: Memo) -> Any:
    """By itself: all that is in it is shared."""
    return value.copy()


def _all_same(parts: Iterable[Any]) -> bool:
    # A loop, since this is asked a hundred times per copy and a generator would take twice the time.
    for part in parts:  # noqa: SIM110
        if _copiers.get(type(part)) is not _same:
            return False
    return True


_CONTAINERS: Final[dict[type, Copier]] = {
    list: _list,
    dict: _dict,
    set: _copied,
    Departed: _copied,
    Counter: _counter,
    SortedList: _by_dict,
    OrderedDict: _ordered,
    deque: _deque,
    defaultdict: _defaults,
}
