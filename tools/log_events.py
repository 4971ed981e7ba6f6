"""What the library says to a log: the events of all loggers, read from the source, and their table in the docs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs

import groupstate
from groupstate.logs import LEVELS
from tools.generated_part import DOCS, GeneratedPart

PACKAGE = Path(groupstate.__file__).parent
PAGE = DOCS / "integrations" / "metrics.md"
BEGIN = "<!-- generated from the calls of loggers in the source by `make docs`; edits are overwritten -->"
END = "<!-- end of the log's events -->"

WARNS = "warn"
"""Where a part below the loggers hands its warnings to whoever has one."""


@attrs.frozen
class Said:
    """One call of a logger."""

    where: str
    """File and line."""
    level: str
    event: str | None
    """None where it isn't a constant."""
    keys: tuple[str, ...]
    """With `**` for what isn't spelled out."""


def said() -> list[Said]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    logs = {path: text for path, text in texts.items() if "Logger(" in text or f".{WARNS}(" in text}
    return [call for path, text in logs.items() for call in calls(text, path.relative_to(PACKAGE).as_posix())]


def calls(text: str, path: str) -> Iterator[Said]:
    """The calls in a source file that imports the loggers, or hands warnings on."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        logs = name in LEVELS and (owner == "log" or owner.startswith("Logger("))
        if not logs and not (name == WARNS and owner == "self"):
            continue
        first = node.args[0] if node.args else None
        event = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        keys = tuple(keyword.arg or "**" for keyword in node.keywords)
        yield Said(f"{path}:{node.lineno}", name if logs else "warning", event, keys)


def generated() -> str:
    found: dict[str, Said] = {}
    for call in said():
        found.setdefault(str(call.event), call)
    ordered = sorted(found.values(), key=lambda call: (-LEVELS[call.level], str(call.event)))
    rows = [f"| {call.event} | {call.level} | {', '.join(f'`{key}`' for key in call.keys)} |" for call in ordered]
    return "\n\n".join([BEGIN, "\n".join(["| event | level | values |", "| --- | --- | --- |", *rows]), END])


PART = GeneratedPart(PAGE, BEGIN, END, generated)

if __name__ == "__main__":
    PART.write()
