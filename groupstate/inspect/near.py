"""What somebody may have meant."""

import difflib
from collections.abc import Iterable
from itertools import islice

NAMES_COMPARED_MAX = 20_000
"""Names that are compared; each costs some microseconds."""


def near(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`; empty if nothing is near."""
    compared = list(islice((other for other in known if abs(len(other) - len(name)) <= 3), NAMES_COMPARED_MAX))
    found = difflib.get_close_matches(name, compared, n=3)
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""
