"""Plans as TOML files, so that what a simulation found can be kept, read and repeated.

Rule: what is written is read back as the same plan.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from groupstate.core.near import nearest
from groupstate.errors import BadInput
from groupstate.simulate.plan import Plan


def plan_text(plan: Plan) -> str:
    """The plan as TOML; what is at its default is left out, but the seed and the hours."""
    data = {"seed": plan.seed, "hours": plan.hours, **_set(plan)}
    return "\n".join(_lines(data, ())) + "\n"


def _set(part: msgspec.Struct) -> dict[str, Any]:
    """What differs from the defaults. A part that is there although all of it is at its default is an empty table."""
    found = {}
    for field in msgspec.structs.fields(part):
        value = getattr(part, field.name)
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if value != default:
            found[field.name] = _set(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
    return found


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for name, value in plain.items():
        if value is not None:
            yield f"{_key(name)} = {toml_value(value)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, name))


def toml_value(value: Any) -> str:
    """One value on one line.

    Raises:
        BadInput: TOML has no word for it.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _number(value)
        case str():
            return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case Mapping():
            inner = ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items() if item is not None)
            return f"{{ {inner} }}" if inner else "{}"
    raise BadInput(f"TOML has no word for {value!r}")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else msgspec.json.encode(name).decode()


def read_plan(path: Path) -> Plan:
    """
    Raises:
        BadInput: no plan; the text says where.
        BadSettings: rules that can't be.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path}: {error}") from error
    try:
        plan = msgspec.convert(data, Plan)
    except msgspec.ValidationError as error:
        near = [near for key in data for near in nearest(key, Plan.__struct_fields__) if key != near]
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadInput(f"{path} is no plan of a simulation: {error}{hint}") from error
    plan.check()
    return plan
