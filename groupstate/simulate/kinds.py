"""Kinds of values in a scenario file. Each checks a value, and says the same as JSON schema.

Rule: the loader and the schema are made from these alone, so that one refuses what the other refuses.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from groupstate.core.near import nearest
from groupstate.errors import GroupstateError

Schema = dict[str, Any]


class MalformedScenario(GroupstateError):
    """A scenario file that can't be run."""


class Kind(Protocol):
    def check(self, value: Any, where: str) -> None:
        """
        Raises:
            MalformedScenario: the value is none of this kind; the text says what would be.
        """
        ...

    @property
    def schema(self) -> Schema: ...


def refused(where: str, value: Any, wanted: str) -> MalformedScenario:
    return MalformedScenario(f"{where} is {value!r}; it must be {wanted}")


def known(data: Mapping[str, Any], names: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    """
    Raises:
        MalformedScenario: a key that isn't one of the names.
    """
    for key in data:
        if key not in names:
            raise MalformedScenario(f"{where} has no key {key!r}; {hint(key, names)}")


def hint(word: str, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    near = nearest(word, names)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"


@attrs.frozen
class Whole:
    least: int | None = None
    most: int | None = None

    def check(self, value: Any, where: str) -> None:
        fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits or (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            bounds = "" if self.least is None else f" of at least {self.least}"
            bounds = bounds if self.most is None else f" from {self.least} to {self.most}"
            raise refused(where, value, f"an integer{bounds}")

    @property
    def schema(self) -> Schema:
        bounds = {"minimum": self.least, "maximum": self.most}
        return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}


@attrs.frozen
class Number:
    """Not a number, as a reward that a broken scorer gives, is one here: what becomes of it is what a step looks at."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refused(where, value, "a number")

    @property
    def schema(self) -> Schema:
        return {"type": "number"}


@attrs.frozen
class Seconds:
    def check(self, value: Any, where: str) -> None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not 0 <= value < math.inf:
            raise refused(where, value, "a finite number of at least 0")

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": 0}


@attrs.frozen
class Flag:
    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bool):
            raise refused(where, value, "true or false")

    @property
    def schema(self) -> Schema:
        return {"type": "boolean"}


@attrs.frozen
class Yes:
    """What can only be done: `false` would say that it isn't."""

    def check(self, value: Any, where: str) -> None:
        if value is not True:
            raise refused(where, value, "true")

    @property
    def schema(self) -> Schema:
        return {"const": True}


@attrs.frozen
class Text:
    pattern: str = ""
    """A regular expression that the whole text must match; empty for any text."""
    words: str = "a string"
    """The pattern in words."""

    def fits(self, value: str) -> bool:
        return not self.pattern or re.fullmatch(self.pattern, value) is not None

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or not self.fits(value):
            raise refused(where, value, self.words)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{self.pattern}$"} if self.pattern else {"type": "string"}


@attrs.frozen
class OneOf:
    words: tuple[str, ...]

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise refused(where, value, f"one of {', '.join(self.words)}")
        if value not in self.words:
            raise MalformedScenario(f"{where} is {value!r}; {hint(value, self.words)}")

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.words)}


@attrs.frozen
class ListOf:
    item: Kind

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise refused(where, value, "a list")
        for item in value:
            self.item.check(item, where)

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema}


@attrs.frozen
class TableOf:
    """A table whose keys are names of something, such as ids."""

    value: Kind
    key: Kind = Text()

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refused(where, value, "a table")
        for key, one in value.items():
            self.key.check(key, f"{where}: the key")
            self.value.check(one, f"{where}.{key}")

    @property
    def schema(self) -> Schema:
        names = {} if self.key == Text() else {"propertyNames": self.key.schema}
        return {"type": "object", **names, "additionalProperties": self.value.schema}


@attrs.frozen
class Form:
    """A table of which each key has a meaning of its own. All may be left out."""

    fields: Mapping[str, Kind]
    excludes: tuple[str, str] | None = None
    """Two keys of which one alone may be there."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refused(where, value, "a table")
        known(value, self.fields, where)
        for key, one in value.items():
            self.fields[key].check(one, f"{where}.{key}")
        if self.excludes is not None and all(key in value for key in self.excludes):
            raise MalformedScenario(f"{where} has {' and '.join(self.excludes)}; it must be one or the other")

    @property
    def schema(self) -> Schema:
        form: Schema = {
            "type": "object",
            "properties": {key: kind.schema for key, kind in self.fields.items()},
            "additionalProperties": False,
        }
        return form if self.excludes is None else {**form, "not": {"required": list(self.excludes)}}


@attrs.frozen
class OrMissing:
    """Something, or the word for that it isn't there, for which TOML has none."""

    kind: Kind

    def check(self, value: Any, where: str) -> None:
        if value != MISSING:
            self.kind.check(value, where)

    @property
    def schema(self) -> Schema:
        return {"anyOf": [self.kind.schema, {"const": MISSING}]}


@attrs.frozen
class RulesTable:
    """Settings of `Rules`, which says itself what they may be."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refused(where, value, "a table")

    @property
    def schema(self) -> Schema:
        return {"$ref": "#/$defs/Rules"}


MISSING = "missing"
"""Stands for what isn't there."""
