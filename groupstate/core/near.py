"""What somebody may have meant."""

import difflib
from collections.abc import Iterable
from itertools import islice

NAMES_COMPARED_MAX = 20_000
"""Names that are compared; each costs some microseconds."""


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The names that are nearest, best first; none if nothing is near. Capital letters make no difference."""
    folded: dict[str, list[str]] = {}
    for other in known:
        folded.setdefault(other.casefold(), []).append(other)
    found = difflib.get_close_matches(name.casefold(), folded, n=count)
    return [other for match in found for other in folded[match]][:count]


def near(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, of names as long but for some letters; empty if nothing is near."""
    compared = list(islice((other for other in known if abs(len(other) - len(name)) <= 3), NAMES_COMPARED_MAX))
    found = nearest(name, compared, 3)
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def meant(value: object, known: Iterable[str]) -> str:
    """` (did you mean 'a'?)`, to put behind the words that there are; empty if nothing is near."""
    found = nearest(value, known) if isinstance(value, str) else []
    return f" (did you mean {found[0]!r}?)" if found else ""
