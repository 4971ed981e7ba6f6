"""Write the phase diagram and the transition table of docs/state-machine.md from the table in the code."""

from collections import defaultdict
from collections.abc import Iterator

from groupstate.core.events import ResultFenced
from groupstate.core.phases import TERMINAL, TRANSITIONS, Phase, Restored
from tools.generated_part import DOCS, GeneratedPart

PAGE = DOCS / "state-machine.md"
BEGIN = "<!-- generated from groupstate.core.phases.TRANSITIONS by `make docs`; edits are overwritten -->"
END = "<!-- end of the generated part -->"
START = "[*]"
"""How Mermaid writes the place before the first phase, and after the last."""


def arrows() -> Iterator[tuple[str, str, str]]:
    """(from, to, event) of every move; what leaves the phase as it is says nothing in a picture."""
    for phase, cells in TRANSITIONS.items():
        for kind, target in cells.items():
            for reached in _reached(target):
                if reached is not phase:
                    yield START if phase is None else str(phase), str(reached), kind.__name__


def _reached(target: Phase | Restored) -> list[Phase]:
    if isinstance(target, Restored):
        return sorted(TERMINAL, key=list(Phase).index)
    return [target]


def final_phases() -> list[Phase]:
    return [phase for phase in Phase if set(TRANSITIONS[phase]) <= {ResultFenced}]


def diagram() -> str:
    labels = defaultdict(list)
    for source, target, event in arrows():
        labels[source, target].append(event)
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in labels.items()]
    lines += [f"    {phase} --> {START}" for phase in final_phases()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def table() -> str:
    """Events down, phases across; an empty cell is an `IllegalTransition`."""
    events = list(dict.fromkeys(kind for cells in TRANSITIONS.values() for kind in cells))
    rows = [
        ["event", *("not submitted" if phase is None else str(phase) for phase in TRANSITIONS)],
        ["---"] * (len(TRANSITIONS) + 1),
    ]
    for kind in events:
        cells = [TRANSITIONS[phase].get(kind) for phase in TRANSITIONS]
        rows.append([f"`{kind.__name__}`", *(_cell(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(target: Phase | Restored | None) -> str:
    if target is None:
        return ""
    return str(target.value)


def generated() -> str:
    return f"{BEGIN}\n\n{diagram()}\n\n{table()}\n\n{END}"


PART = GeneratedPart(PAGE, BEGIN, END, generated)

if __name__ == "__main__":
    PART.write()
