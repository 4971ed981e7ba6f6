"""Selection rules of the user's own: what they say, and what is wrong with it.

A rule is a function `rule(book, rules, request)` that looks at the book and returns intents: `Select` for the groups
that the waiting `sample()` gets, `Drop` for each group that is to be evicted. No intent at all is fine: the sampler
waits on.

Rule: an answer is taken whole or not at all; a wrong one changes nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, get_args

import attrs

from groupstate.core.book import Book
from groupstate.core.events import TRAIN, EvictReason
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.near import meant
from groupstate.core.phases import TERMINAL
from groupstate.core.rules import Rules
from groupstate.core.shelf import has_rows
from groupstate.errors import BadInput


def _ids(group_ids: Iterable[str]) -> tuple[str, ...]:
    if isinstance(group_ids, str):
        raise BadInput(
            f"Select takes a list of group ids, and not the text {group_ids!r:.80}, of which each letter is one"
        )
    return tuple(group_ids)


@attrs.frozen
class Select:
    """Intent: give these groups to the waiting `sample()`, in this order.

    Raises:
        BadInput: a single id, which isn't a list of ids.
    """

    group_ids: tuple[str, ...] = attrs.field(converter=_ids)


@attrs.frozen
class Drop:
    """Intent: evict a terminal training group untrained. What that earns follows from the rules."""

    group_id: str
    reason: EvictReason = "custom"
    message: str = ""


CustomRule: TypeAlias = Callable[[Book, Rules, OpenRequest], Iterable[Select | Drop]]


@attrs.frozen
class Answer:
    """What a rule wants done, checked."""

    selected: tuple[Group, ...]
    """Empty if the sampler is to wait on."""
    drops: tuple[tuple[Group, Drop], ...]


class WrongAnswer(ValueError):
    """What a rule returned can't be done; the text says which part of it and why."""


def checked(book: Book, request: OpenRequest, answer: Any) -> Answer:
    """
    Raises:
        WrongAnswer: not intents, an unknown group or reason, a group that can't be taken, one that is named twice,
            or a selection of another size than the request's.
    """
    if isinstance(answer, Select | Drop):
        answer = [answer]
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        raise WrongAnswer(f"it returned {type(answer).__name__} {answer!r:.80}; it must be a list of Select and Drop")
    selected: list[Group] | None = None
    drops: list[tuple[Group, Drop]] = []
    named: set[str] = set()
    for intent in answer:
        if isinstance(intent, Drop):
            drops.append((_group(book, intent.group_id, named, "drops"), _sound(intent)))
        elif isinstance(intent, Select) and selected is None:
            selected = [_group(book, group_id, named, "selects") for group_id in intent.group_ids]
        elif isinstance(intent, Select):
            raise WrongAnswer("it selects twice; one Select names the whole batch")
        else:
            raise WrongAnswer(f"it returned {type(intent).__name__} {intent!r:.80} among its intents")
    _check_size(selected, request)
    return Answer(tuple(selected or ()), tuple(drops))


def _group(book: Book, group_id: Any, named: set[str], verb: str) -> Group:
    """A group that can be sampled or evicted now."""
    if not isinstance(group_id, str):
        raise WrongAnswer(
            f"it {verb} an object of type {type(group_id).__name__}; groups are named by their ids, group.group_id"
        )
    group = book.groups.get(group_id)
    if group is None:
        where = book.departed.get(group_id)
        raise WrongAnswer(f"it {verb} group {group_id!r}, which " + (f"was {where}" if where else "never was"))
    if group_id in named:
        raise WrongAnswer(f"it names group {group_id!r} twice; a group is selected or dropped, once")
    named.add(group_id)
    if group.partition != TRAIN:
        raise WrongAnswer(f"it {verb} group {group_id!r} of partition {group.partition!r}; it may touch {TRAIN!r} only")
    if group.phase not in TERMINAL:
        raise WrongAnswer(f"it {verb} group {group_id!r}, which is {group.phase}; only terminal groups can be")
    if verb == "selects" and not has_rows(group):
        raise WrongAnswer(f"it selects group {group_id!r}, which has no trajectory")
    return group


def _sound(intent: Drop) -> Drop:
    if not isinstance(intent.message, str):
        raise WrongAnswer(
            f"it drops {intent.group_id!r} with the message {intent.message!r:.80}; a message is a string"
        )
    if intent.reason not in get_args(EvictReason):
        known = ", ".join(get_args(EvictReason)) + meant(intent.reason, get_args(EvictReason))
        raise WrongAnswer(f"it drops {intent.group_id!r} for {intent.reason!r}; a reason is one of {known}")
    return intent


def _check_size(selected: list[Group] | None, request: OpenRequest) -> None:
    if selected is not None and len(selected) != request.size:
        raise WrongAnswer(
            f"it selects {len(selected)} groups for a batch of {request.size}; select so many, or none to wait on"
        )
