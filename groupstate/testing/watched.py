"""A selection of the user's own while it is tested: asked twice each time, and what it says is noted.

Rule: what is wrong is kept in `problem` and not raised, since an exception would be taken for the rule's own.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from groupstate.core.book import Book
from groupstate.core.custom import CustomRule, Drop, Select, WrongAnswer, checked
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.rules import Rules
from groupstate.testing.plain.model import Said


@attrs.frozen
class Asked:
    """A selection of the user's own, asked once: what it saw and what it answered."""

    book: Book
    """As it was seen; only good while the promise is checked."""
    rules: Rules
    request: OpenRequest
    ready: tuple[Group, ...]
    """The sampleable training groups, oldest first."""
    selected: tuple[Group, ...]
    """In the order of the answer; empty if the sampler waits on."""
    dropped: tuple[Group, ...]

    @property
    def passed_over(self) -> tuple[Group, ...]:
        """Sampleable groups that were neither selected nor dropped."""
        named = {group.group_id for group in (*self.selected, *self.dropped)}
        return tuple(group for group in self.ready if group.group_id not in named)

    def lag(self, group: Group) -> int:
        return self.book.lag(group)


Promise = Callable[[Asked], None]
"""Raises (an assertion, mostly) where an answer of a rule isn't what the rule is meant to give."""


class Watched:
    def __init__(self, rule: CustomRule, promise: Promise | None = None) -> None:
        self.rule = rule
        self.promise = promise
        self.answers: deque[Said] = deque()
        """What it said, in the order in which it was asked."""
        self.problem: Exception | None = None
        """The first that was found; `taken` takes it away."""
        self.complaint = ""
        """The same as the end of a sentence that begins with the rule's name."""

    @property
    def name(self) -> str:
        return getattr(self.rule, "__qualname__", "") or type(self.rule).__qualname__

    @property
    def path(self) -> str:
        """What the log calls it."""
        return f"{self.rule.__module__}:{self.name}"

    def __call__(self, book: Book, rules: Rules, request: OpenRequest) -> Any:
        before = book.digest()
        try:
            first, second = (_listed(self.rule(book, rules, request)) for _ in range(2))
        except Exception as error:
            self._found(error, f"raised {type(error).__name__}: {error}")
            raise
        if book.digest() != before:
            self._found(AssertionError("it changed the book; a rule only looks at it"))
        if first != second:
            text = f"it gave two answers to one question, {first} and {second}; it must be a plain function of the book"
            self._found(AssertionError(f"{text}: no clock, no randomness, no memory"))
        if isinstance(first, list):
            self._note(book, rules, request, first)
        return first

    def _note(self, book: Book, rules: Rules, request: OpenRequest, answer: list[Any]) -> None:
        try:
            checked(book, request, answer)
        except WrongAnswer as error:
            self._found(error, f"can't be followed: {error}")
            return
        selected = [name for intent in answer if isinstance(intent, Select) for name in intent.group_ids]
        drops = [intent for intent in answer if isinstance(intent, Drop)]
        dropped = [drop.group_id for drop in drops]
        self.answers.append(Said(request.request, selected, [(drop.group_id, drop.reason) for drop in drops]))
        if self.promise is None:
            return
        groups = book.groups
        asked = Asked(
            book,
            rules,
            request,
            tuple(book.ready()),
            tuple(groups[name] for name in selected),
            tuple(groups[name] for name in dropped),
        )
        try:
            self.promise(asked)
        except Exception as error:
            # It is the user's: its own exceptions tell him best.
            self._found(error)

    def _found(self, problem: Exception, complaint: str = "") -> None:
        if self.problem is None:
            said = str(problem) or type(problem).__name__
            self.problem, self.complaint = problem, complaint or f"broke its promise: {said}"

    def taken(self) -> Exception | None:
        """What was found since somebody looked."""
        problem, self.problem = self.problem, None
        return problem


def _listed(answer: Any) -> Any:
    """An answer that can be looked at twice."""
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        return list(answer)
    return [answer] if isinstance(answer, Select | Drop) else answer
