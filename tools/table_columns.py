"""Write the list of tables and columns of docs/export.md from the code."""

from groupstate.inspect.columns import TABLES
from tools.generated_part import DOCS, GeneratedPart

PAGE = DOCS / "export.md"
BEGIN = "<!-- generated from groupstate.inspect.columns.TABLES by `make docs`; edits are overwritten -->"
END = "<!-- end of the generated part -->"

ABOUT = {
    "events": "One row for each event.",
    "sessions": "One row for each attempt of a session.",
    "trajectories": "One row for each trajectory that a session returned.",
    "groups": "One row for each group.",
    "batches": "One row for each `sample()`, with the batch that it got.",
    "batch_groups": "One row for each group of each batch.",
    "versions": "One row for each time that a weight version was the current one.",
}


def generated() -> str:
    parts = [BEGIN]
    for name, columns in TABLES.items():
        rows = [f"| `{column.name}` | {column.kind} | {column.about} |" for column in columns]
        parts += [f"### {name}", ABOUT[name], "\n".join(["| column | type | |", "| --- | --- | --- |", *rows])]
    return "\n\n".join([*parts, END])


PART = GeneratedPart(PAGE, BEGIN, END, generated)

if __name__ == "__main__":
    PART.write()
