"""A prompt as a value, what users write for one, and its form in the payload store.

Rule: a row means the same wherever it comes from: a line of a file, a dict in a list, an argument of `submit`.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from groupstate.core.arguments import as_integer, shown, string
from groupstate.errors import BadInput

GROUP_SIZE_MAX = 4_096
"""Sessions in a group. More is a mistake in a file, not a plan."""

PROMPT = "prompt"
"""The column that makes a mapping a row."""

COLUMNS = frozenset({PROMPT, "n", "group_id", "data_source", "dataset"})
"""Columns of a row that have a meaning here; every other one is for the reward."""


def _plain(n: int | None) -> int | None:
    """An integer of another library as Python's own. What is none is refused where the prompt comes in."""
    found = None if n is None else as_integer(n)
    return n if found is None else found


@attrs.frozen
class Prompt:
    """One task for a group. `content` goes to the session function as it is, and into the payload store."""

    content: Any = None
    """A text, a list of chat messages, token ids, a dict: JSON-like values."""
    dataset: str = ""
    n: int | None = attrs.field(default=None, converter=_plain)
    """Sessions; None for the run's setting."""
    group_id: str | None = None
    """None: one is made."""
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    """What the reward needs and the model must not see, such as the right answer."""


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    content: Any
    extra: dict[str, Any]


def encoded_prompt(prompt: Prompt, group_id: str) -> bytes:
    """As the payload store keeps it.

    Raises:
        BadInput: it holds what can't be stored, or sizes that make no sense.
    """
    if not isinstance(group_id, str) or not group_id:
        raise BadInput(f"a group id is a string that is not empty, not {shown(group_id)}")
    return _encoded(prompt, f"group {group_id!r}", f"the prompt of group {group_id!r}", group_id)


def check_prompt(prompt: Prompt, called: str) -> None:
    """The same checks for a prompt that has no group yet.

    Args:
        called: what a text calls it, such as `prompt 3 of the round`.

    Raises:
        BadInput: as `encoded_prompt`.
    """
    _encoded(prompt, called, called)


def _encoded(prompt: Prompt, owner: str, called: str, group_id: str = "") -> bytes:
    """See `encoded_prompt`; a text calls the prompt `called`, and what has its settings `owner`."""
    count = None if prompt.n is None else as_integer(prompt.n)
    if prompt.n is not None and (count is None or not 1 <= count <= GROUP_SIZE_MAX):
        raise BadInput(f"{owner} has n = {shown(prompt.n)} sessions; it must be an integer from 1 to {GROUP_SIZE_MAX}")
    string(f"the dataset of {owner}", prompt.dataset)
    if not isinstance(prompt.extra, Mapping):
        raise BadInput(f"the extra of {owner} is {shown(prompt.extra)}; it must be a mapping of names")
    try:
        group_id.encode()
        data = msgspec.msgpack.encode(_Stored(prompt.content, dict(prompt.extra)))
        msgspec.msgpack.decode(data, type=_Stored)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{called} can't be stored: {error}; use JSON-like values") from error
    return data


def decoded_prompt(data: bytes, *, dataset: str, n: int, group_id: str) -> Prompt:
    stored = msgspec.msgpack.decode(data, type=_Stored)
    return Prompt(stored.content, dataset, n, group_id, stored.extra)


def prompt_length(prompt: Prompt) -> int:
    """Characters of a text, items of a list (token ids, messages), 0 for anything else."""
    return len(prompt.content) if isinstance(prompt.content, (str, list, tuple)) else 0


def as_prompt(value: Any) -> Prompt:
    """A prompt from what users have at hand: a `Prompt`, a row (a mapping with a "prompt"), or else its content.

    Raises:
        BadInput: a row that can't be used.
    """
    if isinstance(value, Prompt):
        return value
    if isinstance(value, Mapping) and PROMPT in value:
        return row_prompt(value, "the row")
    return Prompt(value)


def row_prompt(row: Any, where: str) -> Prompt:
    """A prompt from a row in groupstate's or in verl's columns.

    `prompt` is the content; `data_source` (or `dataset`) the data set; `reward_model.ground_truth` (or
    `ground_truth`, `answer`) what the reward compares with; `group_id` and `n` are optional.

    Raises:
        BadInput: it is no row, or has values that can't be used.
    """
    if not isinstance(row, Mapping):
        raise BadInput(f"{where} is {type(row).__name__}; it must be an object with a 'prompt'")
    if row.get(PROMPT) is None:
        has = ", ".join(sorted(repr(name) for name in row if name != PROMPT)) or "nothing"
        empty = ": it is null" if PROMPT in row else f"; it has {has}"
        raise BadInput(f"{where} has no 'prompt'{empty}")
    n, group_id, dataset = row.get("n"), row.get("group_id"), row.get("data_source", row.get("dataset", ""))
    count = None if n is None else as_integer(n)
    if n is not None and (count is None or not 1 <= count <= GROUP_SIZE_MAX):
        raise BadInput(f"{where} has n = {shown(n)}; it must be an integer from 1 to {GROUP_SIZE_MAX}")
    if group_id is not None and (not isinstance(group_id, str) or not group_id):
        raise BadInput(f"{where} has group_id = {shown(group_id)}; it must be a string that is not empty")
    extra = {name: value for name, value in row.items() if name not in COLUMNS}
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        extra.setdefault("ground_truth", reward_model["ground_truth"])
    return Prompt(row[PROMPT], "" if dataset is None else str(dataset), count, group_id, extra)
