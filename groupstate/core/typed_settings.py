"""Settings whose values have the types that they are declared with, or are refused with what would be right.

Rule: checked where they are made, because they are written into logs: what can't be read back must not get there.
"""

import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

import msgspec
from msgspec.structs import FieldInfo, fields, force_setattr

from groupstate.core.arguments import as_integer, shown
from groupstate.core.near import meant, nearest
from groupstate.errors import BadSettings

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "None"}
PLURALS = {int: "integers", float: "numbers", str: "strings"}


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """Looked up once: it takes longer than to check them, and sessions make settings for each answer."""
    return fields(kind)


class _Made(msgspec.StructMeta):
    """Makes settings: what can't be one is told as it is for a file, and not as a fault of the call."""

    def as_recorded(cls, *values: Any, **settings: Any) -> Any:
        """Settings as a log holds them, which contradictions that were taken then are no fault of."""
        for name in settings:
            if name not in cls.__struct_fields__:
                raise BadSettings(unknown_key(name, cls.__struct_fields__, cls.__name__))
        by_name = _fields_of(typing.cast(type[msgspec.Struct], cls))[len(values) :]
        if missing := [field.name for field in by_name if field.required and field.name not in settings]:
            raise BadSettings(f"{cls.__name__} needs {missing[0]}: {cls.__name__}({missing[0]}=...)")
        try:
            return super().__call__(*values, **settings)
        except TypeError as error:
            raise BadSettings(f"{cls.__name__}: {error}") from error

    # Type checkers see the signature that the fields make.
    if not TYPE_CHECKING:  # pragma: no branch

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            made = cls.as_recorded(*values, **settings)
            for contradiction in made.contradictions():
                raise BadSettings(contradiction)
            return made


class Settings(msgspec.Struct, metaclass=_Made, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of settings. A table, as TOML has it, may stand for a value that has settings of its own."""

    WHERE: ClassVar[str] = ""
    """What a message begins with, for settings that are part of others."""
    LEAST: ClassVar[Mapping[str, float]] = {}
    """Settings that are numbers, with the least value of each."""
    MOST: ClassVar[Mapping[str, float]] = {}
    AS_GIVEN: ClassVar[frozenset[str]] = frozenset()
    """Settings that are somebody else's to check, and are kept as they were given."""

    def contradictions(self) -> Sequence[str]:
        """What only whoever writes such settings anew is told, since logs that are kept may hold it."""
        return ()

    def __post_init__(self) -> None:
        for field in _fields_of(type(self)):
            if field.name in self.AS_GIVEN:
                continue
            force_setattr(self, field.name, typed(self.WHERE + field.name, field.type, getattr(self, field.name)))
        for name, least in self.LEAST.items():
            problem = bound_problem(self.WHERE + name, getattr(self, name), least, self.MOST.get(name))
            if problem:
                raise BadSettings(problem)


def typed(name: str, kind: Any, value: Any) -> Any:
    """The value as one of the type `kind`, which is a field's or a parameter's.

    Raises:
        BadSettings: the value is of another type.
    """
    kinds = _settings_of(kind)
    if kinds and isinstance(value, Mapping):
        return _from_table(name, kinds, value)
    if typing.get_origin(kind) is dict and isinstance(value, Mapping):
        (part,) = _settings_of(typing.get_args(kind)[1])
        return {str(key): _part(f"{name}[{key!r}]", part, own) for key, own in value.items()}
    try:
        return msgspec.convert(msgspec.to_builtins(_plain(value)), kind)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadSettings(f"{name} is {shown(value)}; it must be {_wanted(kind, value)}") from error


def _settings_of(kind: Any) -> list[type[Settings]]:
    """The kinds of settings that a value may be."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, Settings)]


def _from_table(where: str, kinds: list[type[Settings]], table: Mapping[str, Any]) -> Settings:
    """Settings from a table with their `kind`."""
    by_name = {str(kind.__struct_config__.tag): kind for kind in kinds}
    name = str(table.get("kind", ""))
    if name not in by_name:
        near = nearest(name, by_name)
        hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(map(repr, by_name))}"
        raise BadSettings(f"{where} has kind {name!r}; {hint}" if name else f"{where} has no kind; {hint}")
    return _part(where, by_name[name], {key: value for key, value in table.items() if key != "kind"})


def _part(where: str, kind: type[Settings], value: Any) -> Settings:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise BadSettings(f"{where} is {value!r}; it must be a {kind.__name__} or a table of its settings")
    for key in value:
        if key not in kind.__struct_fields__:
            raise BadSettings(unknown_key(key, kind.__struct_fields__, where))
    try:
        return kind(**value)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from error


def unknown_key(key: str, known: Sequence[str], where: str) -> str:
    """The text for a setting that there isn't, with the nearest that there is."""
    near = nearest(key, known)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"{where} has no setting {key!r}; {hint}"


def bound_problem(name: str, value: float | None, least: float, most: float | None = None) -> str:
    """What is wrong with a number that must be finite and within bounds; empty if nothing is."""
    if value is None or (least <= value < math.inf and (most is None or value <= most)):
        return ""
    if most is not None:
        return f"{name} is {value!r}; it must be from {least} to {most}"
    return f"{name} is {value!r}; it must be {'' if math.isfinite(value) else 'finite and '}at least {least}"


def _plain(value: Any) -> Any:
    """Numbers of numpy and others as Python's own, by themselves or in a list."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    whole = as_integer(value)
    if whole is not None:
        return whole
    return float(value) if isinstance(value, numbers.Real) else value


def _wanted(kind: Any, value: Any) -> str:
    """What would be right in place of the value."""
    if allowed := _choices(kind):
        return " or ".join(map(repr, allowed)) + meant(str(value), allowed)
    if kinds := _settings_of(kind):
        return _tables(kinds, value)
    return " or ".join(_words(kind))


def _tables(kinds: list[type[Settings]], value: Any) -> str:
    """Kinds of settings as a file and as Python write them; the one that a string means, if it means one."""
    by_name = {str(kind.__struct_config__.tag): kind for kind in kinds}
    close = nearest(value, by_name) if isinstance(value, str) else []
    tables, calls = [], []
    for name in close or by_name:
        needed = [field.name for field in fields(by_name[name]) if field.required]
        tables.append("{ " + ", ".join([f'kind = "{name}"', *(f"{key} = ..." for key in needed)]) + " }")
        calls.append(f"{by_name[name].__name__}({', '.join(f'{key}=...' for key in needed)})")
    return f"a table, {' or '.join(tables)}; in Python {' or '.join(calls)}"


def _choices(kind: Any) -> list[str]:
    """Values of a type that is a choice of strings."""
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def _words(kind: Any) -> list[str]:
    """A type in words, one for each kind of value."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return [word for part in typing.get_args(kind) for word in _words(part)]
    if typing.get_origin(kind) is dict:
        return [f"a table of names, each with a {typing.get_args(kind)[1].__name__} or a table of its settings"]
    if typing.get_origin(kind) is tuple:
        return [f"a list of {PLURALS[typing.get_args(kind)[0]]}"]
    if typing.get_origin(kind) is Mapping:
        return ["a table"]
    return [WORDS.get(kind, getattr(kind, "__name__", str(kind)))]
