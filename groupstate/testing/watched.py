"""A selection of the user's own while it is tested: asked twice each time, and what it says is noted.

Rule: what is wrong is kept in `problem` and not raised, since an exception would be taken for the rule's own.
"""

import inspect
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs

from groupstate.core.book import Book
from groupstate.core.custom import CustomRule, Drop, Select, WrongAnswer, checked
from groupstate.core.events import TrajectoryRecord
from groupstate.core.group import Group, forget_unpacked
from groupstate.core.held import OpenRequest
from groupstate.core.rules import Rules
from groupstate.testing.attributes import no_answer
from groupstate.testing.plain.model import Said

SHOWN_MAX: Final = 8
"""Groups that are told of, where a promise is broken."""


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
        self.kind = ""
        """The same for whatever groups it is about."""

    @property
    def name(self) -> str:
        return getattr(self.rule, "__qualname__", "") or type(self.rule).__qualname__

    def __call__(self, book: Book, rules: Rules, request: OpenRequest) -> Any:
        before = book.digest()
        first, second = (self._asked_once(book, rules, request, before) for _ in range(2))
        if first != second:
            self._wrong(
                f"gave two answers to one question, {first} and {second}; it must be a plain function of the book: "
                "no clock, no randomness, no memory"
            )
        if isinstance(first, list):
            self._note(book, rules, request, first)
        return first

    def _asked_once(self, book: Book, rules: Rules, request: OpenRequest, before: str) -> Any:
        """
        Raises:
            AssertionError: what it did can't be gone on from.
        """
        __tracebackhide__ = True
        raised: Exception | None = None
        try:
            answer = listed(self.rule(book, rules, request))
        except Exception as error:
            raised = error
        if book.digest() != before:
            forget_unpacked()
            raise self._wrong("changed the book; a rule only looks at it")
        if raised is not None:
            self._found(raised, f"raised {type(raised).__name__}: {raised}")
            raise raised
        if inspect.iscoroutine(answer) or inspect.isasyncgen(answer):
            if inspect.iscoroutine(answer):
                answer.close()
            raise self._wrong("is async; a rule is a plain function of the book, and nothing is awaited in it")
        return answer

    def _wrong(self, complaint: str) -> AssertionError:
        problem = AssertionError(f"{self.name} {complaint}")
        self._found(problem, complaint)
        return problem

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
        __tracebackhide__ = True
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
            returned: Any = self.promise(asked)
        except Exception as error:
            # It is the user's: its own exceptions tell him best.
            complaint = f"broke its promise: {str(error) or type(error).__name__}\n\n{_in_words(asked, answer)}"
            self._found(error, complaint, kind=f"promise {place_of(error)}")
            return
        if complaint := no_answer(returned):
            self._wrong(f"has a promise that {complaint}")

    def _found(self, problem: Exception, complaint: str, kind: str = "") -> None:
        if self.problem is None:
            self.problem, self.complaint = problem, complaint
            self.kind = kind or without_names(complaint)

    def taken(self) -> Exception | None:
        """What was found since somebody looked."""
        problem, self.problem = self.problem, None
        return problem


def _in_words(asked: Asked, answer: list[Any]) -> str:
    """A question and its answer, for a reader."""
    shown = asked.ready[:SHOWN_MAX]
    groups = [f"    {group.group_id}, lag {asked.lag(group)}: {_ends_in_words(group)}" for group in shown]
    if len(asked.ready) > len(shown):
        groups.append(f"    and {len(asked.ready) - len(shown)} more")
    question = f"It was asked for {asked.request.size} of these groups:\n\n" + "\n".join(groups)
    if not asked.ready:
        question = f"It was asked for {asked.request.size} groups when none was sampleable"
    return f"{question}\n\nand answered {', '.join(map(_intent_in_words, answer)) or 'that the sampler waits on'}"


def _ends_in_words(group: Group) -> str:
    """The metrics of its rows, and their lengths where there are some; sessions are parted by `;`, rows by `|`."""
    return "; ".join(
        " | ".join(_row_in_words(row) for row in session.trajectories) or "nothing" for session in group.sessions
    )


def _row_in_words(row: TrajectoryRecord) -> str:
    length = [f"tokens={row.response_tokens}"] if row.response_tokens else []
    return " ".join([*(f"{name}={value:g}" for name, value in row.metrics.items()), *length]) or "no metric"


def _intent_in_words(intent: Select | Drop) -> str:
    if isinstance(intent, Drop):
        return f"Drop({intent.group_id!r})"
    return f"Select({list(intent.group_ids)})"


def without_names(text: str) -> str:
    """A sentence that is the same for whatever groups and numbers it is about."""
    return re.sub(r"\[.*\]|'[^']*'|\d+", "_", text)


def place_of(error: BaseException) -> str:
    """The line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


def listed(answer: Any) -> Any:
    """An answer that can be looked at twice."""
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        return list(answer)
    return [answer] if isinstance(answer, Select | Drop) else answer
