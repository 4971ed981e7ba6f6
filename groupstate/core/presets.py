"""What presets of the rules have in common: their parameters are checked under their own names, then translated.

Rule 1: a message names what was written, with the preset it was written for.
Rule 2: what a parameter becomes can't be said a second time under another name.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from groupstate.core.typed_settings import Settings, bound_problem, typed, unknown_key
from groupstate.errors import BadSettings

T = TypeVar("T", bound=Settings)
P = ParamSpec("P")

CHANGES = "changes"
"""The parameter that takes further settings by keyword."""


@attrs.frozen
class Preset:
    function: Callable[..., Settings]
    becomes: Mapping[str, str]
    """Parameter -> the setting that it becomes, `setting.part` for a part of one."""
    least: Mapping[str, float]
    """Parameters that are numbers, with the least value of each."""
    fixed: Mapping[str, tuple[Any, str]]
    """Settings that it can't be this preset without, each with its value and the reason."""

    @property
    def name(self) -> str:
        return self.function.__qualname__

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """Name -> type."""
        kinds = typing.get_type_hints(self.function)
        return {name: kinds[name] for name in self.signature.parameters if name not in {"cls", CHANGES}}

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def made(self, kind: type[T], *args: Any, **settings: Any) -> T:
        """
        Raises:
            BadSettings: a parameter or a setting that can't be.
        """
        for name in settings:
            if name not in self.parameters and name not in kind.__struct_fields__:
                raise BadSettings(self._unknown(kind, name))
        try:
            bound = self.signature.bind(kind, *args, **settings)
        except TypeError as error:
            raise BadSettings(f"{self.name}: {error}") from error
        given = {name: bound.arguments[name] for name in self.parameters if name in bound.arguments}
        changes = bound.arguments.get(CHANGES, {})
        for name in changes:
            self._check_change(name, changes[name], given)
        for name, value in given.items():
            given[name] = typed(f"{self.name}: {name}", self.parameters[name], value)
            if name in self.least and (problem := bound_problem(name, given[name], self.least[name])):
                raise BadSettings(f"{self.name}: {problem}")
        try:
            return typing.cast(T, self.function(kind, **given, **changes))
        except BadSettings as error:
            raise BadSettings(f"{self.name}: {error}{self._translated(str(error), given)}") from error

    def _check_change(self, name: str, value: Any, given: Mapping[str, Any]) -> None:
        if name in self.fixed and value != self.fixed[name][0]:
            raise BadSettings(f"{self.name} can't have {name} {value!r}: {self.fixed[name][1]}")
        for parameter, setting in self.becomes.items():
            if setting.partition(".")[0] == name and parameter in given:
                raise BadSettings(
                    f"{self.name} has {parameter} and {name}, and {parameter} becomes {setting}: give one of the two"
                )

    def _unknown(self, kind: type[T], name: str) -> str:
        """The text for a name that there isn't. What is a name elsewhere is no misspelling of one here."""
        for parameter, setting in self.becomes.items():
            if setting.rpartition(".")[2] == name:
                return f"{self.name} has no setting {name!r}; did you mean {parameter!r}?"
        others = [preset.name for preset in PRESETS.values() if name in preset.parameters]
        if others:
            own = ", ".join(self.parameters)
            return f"{self.name} has no setting {name!r}, which is for {' and '.join(others)}; its parameters are {own}"
        return unknown_key(name, tuple(dict.fromkeys((*self.parameters, *kind.__struct_fields__))), self.name)

    def _translated(self, text: str, given: Mapping[str, Any]) -> str:
        """Where the settings in a message come from, so far as the message doesn't say."""
        from_here = [
            f"{parameter} becomes {setting}"
            for parameter, setting in self.becomes.items()
            if parameter in given
            and setting.partition(".")[0] != parameter
            and re.search(rf"\b{setting.partition('.')[0]}\b", text)
            and not re.search(rf"\b{parameter}\b", text)
        ]
        return f" ({', '.join(from_here)})" if from_here else ""


PRESETS: dict[str, Preset] = {}
"""By the name of the function."""


def preset(
    *, becomes: Mapping[str, str], least: Mapping[str, float], fixed: Mapping[str, tuple[Any, str]]
) -> Callable[[Callable[Concatenate[type[T], P], T]], Callable[Concatenate[type[T], P], T]]:
    """Decorates a function that makes settings of its parameters; see `Preset` for what it needs to know."""

    def decorated(function: Callable[Concatenate[type[T], P], T]) -> Callable[Concatenate[type[T], P], T]:
        made = PRESETS[function.__name__] = Preset(function, becomes, least, fixed)

        @functools.wraps(function)
        def checked(kind: type[T], /, *args: P.args, **settings: P.kwargs) -> T:
            return made.made(kind, *args, **settings)

        return checked

    return decorated
