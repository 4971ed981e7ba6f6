"""Settings from a TOML file and flags, and functions by name.

Rule 1: whatever is wrong is named with the place it stands at: the file and the table, or the flag.
Rule 2: a flag wins over the file, key by key.
"""

import importlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import fields

from groupstate.core.near import nearest
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.core.typed_settings import bound_problem, typed, unknown_key
from groupstate.engines.port import SamplingParams
from groupstate.errors import BadInput, BadSettings
from groupstate.runtime.functions import session_problem

T = TypeVar("T", bound=msgspec.Struct)


class RunTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[run]`: what is collected, from where, and where it goes. Paths are relative to the current directory."""

    prompts: str | None = None
    """A .jsonl or .parquet file."""
    session: str | None = None
    """`pkg.mod:fn` or `path/to/file.py:fn`: `async def fn(ctx) -> Trajectory | list[Trajectory]`."""
    reward: str | None = None
    """The same for a reward function: `fn(prompt, text) -> float | dict[str, float]`, plain or async."""
    groups: int | None = None
    """Accepted groups to collect; None takes every prompt there is."""
    out: str | None = None
    """A .jsonl or .parquet file that doesn't exist yet."""
    run: str | None = None
    """The run directory."""
    n: int = 8
    """Sessions per group, where the prompt doesn't say."""
    in_flight: int = 16
    """Groups whose sessions run at the same time."""
    grace_s: float = 10.0
    """Seconds that sessions get to end after SIGTERM."""
    disk_bytes_max: int | None = None
    """No prompts are drawn while the run directory takes more."""
    disk_free_min_bytes: int | None = None
    """No prompts are drawn while the file system has less left."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A settings file: the four tables, checked but not yet merged with flags."""

    run: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    """`name`: `torch`, or `pkg.mod:make_engine`; everything else is an argument of what makes it."""
    sampling: dict[str, Any] = {}


# Files -----------------------------------------------------------------------------------------------


def read_settings(path: Path) -> Settings:
    """The tables of a TOML file.

    Raises:
        BadInput: no such file, or not TOML.
        BadSettings: a table or key that doesn't exist, or a value of a wrong type.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: the settings file can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    for name, table in data.items():
        if name not in Settings.__struct_fields__:
            raise BadSettings(unknown_key(name, Settings.__struct_fields__, str(path)))
        if not isinstance(table, dict):
            raise BadSettings(f"{path}: {name} is {table!r}; it must be a table: [{name}]")
    settings = Settings(**data)
    run_table(settings.run, where=f"{path}: [run]")
    rules_from_dict(settings.rules, f"{path}: [rules]")
    sampling_params(settings.sampling, where=f"{path}: [sampling]")
    return settings


def run_table(data: Mapping[str, Any], *, where: str) -> RunTable:
    table = _converted(data, RunTable, where)
    counts = ("groups", "n", "in_flight", "disk_bytes_max", "disk_free_min_bytes")
    for name, least in (*((name, 1) for name in counts), ("grace_s", 0)):
        if problem := bound_problem(name, getattr(table, name), least):
            raise BadSettings(f"{where}: {problem}")
    return table


def sampling_params(data: Mapping[str, Any], *, where: str) -> SamplingParams:
    return _converted(data, SamplingParams, where)


def merged_rules(settings: Settings, assignments: Iterable[str]) -> Rules:
    """The file's rules, changed by `key=value` flags."""
    changes = parsed_assignments(assignments, "--rules")
    for key in changes:
        if key not in Rules.__struct_fields__:
            raise BadSettings(unknown_key(key, Rules.__struct_fields__, "--rules"))
    return rules_from_dict({**settings.rules, **changes}, "the rules")


def parsed_assignments(assignments: Iterable[str], flag: str) -> dict[str, Any]:
    """`key=value` flags as a table. A value is TOML where it can be, else a string."""
    table = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise BadSettings(f"{flag} {assignment!r} must be key=value")
        try:
            table[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            table[key.strip()] = value
    return table


def _converted(data: Mapping[str, Any], kind: type[T], where: str) -> T:
    known = kind.__struct_fields__
    for key in data:
        if key not in known:
            raise BadSettings(unknown_key(key, known, where))
    try:
        given = [field for field in fields(kind) if field.name in data]
        return kind(**{field.name: typed(field.name, field.type, data[field.name]) for field in given})
    except (BadSettings, ValueError) as error:
        raise BadSettings(f"{where}: {error}") from error


# Functions -------------------------------------------------------------------------------------------


def load_function(name: str, flag: str) -> Callable[..., Any]:
    """A function by import path (`pkg.mod:fn`) or file (`path/to/file.py:fn`).

    Modules are looked for where Python looks, and in the current directory.

    Raises:
        BadInput: no such file, module or function, an error inside of the module, or not a function.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise BadInput(f"{flag} {name!r} must be module:function, such as pkg.mod:fn or path/to/file.py:fn")
    module = _module_of_file(Path(place), flag) if place.endswith(".py") else _module(place, flag)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{flag}: {place} has no {attribute!r}; {_near(part, found)}")
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(f"{flag}: {name} is {type(found).__name__}, not a function")
    return found


def load_session(name: str, flag: str) -> Callable[..., Any]:
    """A session function, which must be async.

    Raises:
        BadInput: see `load_function`; or it can't be run as a session.
    """
    function = load_function(name, flag)
    if problem := session_problem(function):
        raise BadInput(f"{flag}: {name} {problem}")
    return function


def _module(name: str, flag: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        # Where `python -m` would look too; a console script doesn't.
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadInput(f"{flag}: there is no module {error.name!r} (from {name!r}), here or installed") from error
        raise BadInput(f"{flag}: importing {name} failed: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise BadInput(f"{flag}: importing {name} failed: {type(error).__name__}: {error}") from error


def _module_of_file(path: Path, flag: str) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"{flag}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As when the file is run as a script, so that it can import what lies beside it.
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{flag}: {path} can't be run: {type(error).__name__}: {error}") from error
    return module


def _near(name: str, module: Any) -> str:
    names = [known for known in vars(module) if not known.startswith("_") and callable(getattr(module, known))]
    near = nearest(name, names, 3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    own = [known for known in names if getattr(getattr(module, known), "__module__", None) == module.__name__]
    return f"it has {', '.join(map(repr, sorted(own))) or 'no functions'}"
