"""The part of a page that is written from the code.

Rule: what stands between the two markers is never edited by hand; a test fails if it is behind.
"""

from collections.abc import Callable
from pathlib import Path

import attrs

DOCS = Path(__file__).parent.parent / "docs"


@attrs.frozen
class GeneratedPart:
    page: Path
    begin: str
    """The marker before it."""
    end: str
    make: Callable[[], str]
    """Makes it anew, markers included."""

    def rewritten(self, text: str) -> str:
        """The page with its generated part as the code has it today.

        Raises:
            ValueError: a marker is missing.
        """
        before, begin, rest = text.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"{self.page.name} has lost one of its two markers:\n{self.begin}\n{self.end}")
        return before + self.make() + after

    def write(self) -> None:
        text = self.page.read_text(encoding="utf-8")
        new = self.rewritten(text)
        if new != text:
            self.page.write_text(new, encoding="utf-8")
        print(f"{self.page.name}: {'written' if new != text else 'already as the code has it'}")
