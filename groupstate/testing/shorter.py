"""A story that shows something wrong, told in fewer lines that show the same.

Rule: a line goes if the story without it goes wrong in the same way; so what is left is what it takes.
"""

from collections.abc import Callable
from typing import Final

from groupstate.errors import GroupstateError
from groupstate.testing.twin import BrokenStory, Call, Twin

TELLINGS_MAX: Final = 400
"""Stories that are tried."""

SOURCES: Final = (None, 1, 3)
"""Numbers of prompts that are tried in place of those of the story."""

Begin = Callable[[int | None, bool], Twin]
"""Makes a twin that nothing was told yet, with so many prompts in its source (None: no source), that admits or not."""


class Shorter:
    def __init__(self, begin: Begin, twin: Twin, prompts: int | None, admits: bool) -> None:
        """
        Args:
            twin: what the story is told to.
            prompts, admits: what it begins with.
        """
        self.twin = twin
        self._begin = begin
        self._prompts, self._admits = prompts, admits

    def run(self) -> BrokenStory:
        """The shortest story that is found, once the twin is broken; that one where nothing is known that a shorter one
        must show."""
        assert self.twin.broken is not None, "nothing is wrong with the story"
        self.broken: BrokenStory = self.twin.broken
        self._best = (list(self.twin.calls), self._prompts, self._admits)
        self._left = TELLINGS_MAX
        before = None
        while self.broken.kind and self._left > 0 and before != self.broken.lines:
            before = self.broken.lines
            self._begin_with_less()
            self._leave_groups_out()
            self._leave_lines_out()
        return self.broken

    def _begin_with_less(self) -> None:
        calls, prompts, admits = self._best
        if admits:
            self._is_as_good(calls, prompts, False)
        for fewer in SOURCES:
            is_fewer = prompts is not None and (fewer is None or fewer < prompts)
            if is_fewer and self._is_as_good(calls, fewer, self._best[2]):
                return

    def _leave_groups_out(self) -> None:
        names = dict.fromkeys(args[0] for _, args, _ in self._best[0] if args and isinstance(args[0], str))
        for name in reversed(names):
            calls, prompts, admits = self._best
            self._is_as_good([call for call in calls if call[1][:1] != (name,)], prompts, admits)

    def _leave_lines_out(self) -> None:
        """Long runs of lines first, then shorter ones, from the end on."""
        length = len(self._best[0]) // 2
        while length:
            at = len(self._best[0]) - length
            while at >= 0:
                calls, prompts, admits = self._best
                self._is_as_good(calls[:at] + calls[at + length :], prompts, admits)
                at -= length
            length //= 2

    def _is_as_good(self, calls: list[Call], prompts: int | None, admits: bool) -> bool:
        if not self._left or not calls:
            return False
        self._left -= 1
        twin = self._begin(prompts, admits)
        try:
            for name, args, kwargs in calls:
                getattr(twin, name)(*args, **kwargs)
        except BrokenStory as error:
            if error.kind == self.broken.kind:
                self.broken, self._best = error, (list(twin.calls), prompts, admits)
                return True
        except (GroupstateError, AssertionError, LookupError, ValueError):
            # Without those lines the rest can't happen.
            return False
        return False
