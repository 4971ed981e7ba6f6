"""The table of the ten faults: which tool finds each, after how much of its work, and in how much processor time.

    python -m tests.planted

Some minutes. Cells that a tool can't fill by what it is are not tried.
"""

from collections.abc import Iterator

from tests.planted.faults import TEN
from tests.planted.tools import NOT_SEEN, TOOLS, Found


def rows() -> Iterator[str]:
    yield f"| fault | {' | '.join(TOOLS)} |"
    yield "| --- " * (1 + len(TOOLS)) + "|"
    for name, plant in TEN.items():
        cells = [NOT_SEEN.get((name, tool)) or told(tool, find(plant)) for tool, find in TOOLS.items()]
        yield "| " + " | ".join([name, *cells]) + " |"


def told(tool: str, found: Found | None) -> str:
    if found is None:
        return "NOT FOUND"
    if tool == "machine":
        where = f"story {found.after}"
    elif tool == "search":
        where = f"state {found.after:,}, world `{found.where}`"
    else:
        where = f"seed {found.where}"
    return f"{where}, {found.seconds:.2g} s"


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
