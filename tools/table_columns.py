"""Write the list of tables and columns of docs/export.md from the code.

Rule: what stands between the two markers is never edited by hand; a test fails if it is behind.
"""

from pathlib import Path

from groupstate.inspect.columns import TABLES

PAGE = Path(__file__).parent.parent / "docs" / "export.md"
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


def rewritten(page: str) -> str:
    """The page with its generated part as the code has it today."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has lost one of its two markers:\n{BEGIN}\n{END}")
    return before + generated() + after


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page)
    if new != page:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.name}: {'written' if new != page else 'already as the code has it'}")


if __name__ == "__main__":
    main()
