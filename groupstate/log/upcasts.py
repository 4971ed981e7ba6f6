"""Events of older formats, made what they are in this one. One step per format, from each to the next.

A field that is appended with a default needs no step. What does: another meaning, order or type of a field, or one
kind of event in place of another. Then `FORMAT` is raised, the old arrays stay as they are on the disk, and a step
from the old format says how each event that changed reads in the new one.

Rule 1: a step is a pure function of one array, `[tag, field, ...]`; it sees no other event, and is never edited once a
version with it was released.
Rule 2: an event of the current format never comes here.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import msgspec

FORMAT = 1
"""Of the events in a segment; the segment's header holds it."""

Step: TypeAlias = Callable[[list[Any]], list[Any]]
"""An event as an array of one format -> the same event in the next format."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Any])


@attrs.frozen
class Upcasts:
    """Which formats can be read, and how the older ones are."""

    oldest: int = FORMAT
    """The first format that can be read."""
    steps: Mapping[int, Mapping[int, Step]] = attrs.field(factory=dict)
    """By format and tag: how such an event reads in the next format. One that isn't named is the same in both."""

    def __attrs_post_init__(self) -> None:
        for form in self.steps:
            assert self.oldest <= form < FORMAT, f"a step from format {form} is none of {self.oldest} to {FORMAT - 1}"

    @property
    def readable(self) -> str:
        """The formats that can be read, as text."""
        return f"format {FORMAT}" if self.oldest == FORMAT else f"formats {self.oldest} to {FORMAT}"

    def reads(self, form: int) -> bool:
        return self.oldest <= form <= FORMAT

    def raised(self, body: bytes | memoryview, form: int) -> bytes | memoryview:
        """The body of a frame as it would be in the current format.

        Raises:
            msgspec.MsgspecError, TypeError, LookupError, ValueError, AttributeError: it isn't what that format says.
        """
        steps = [self.steps[step] for step in range(form, FORMAT) if self.steps.get(step)]
        if not steps:
            return body
        return _ENCODER.encode([[*place, _raised(event, steps)] for *place, event in _DECODER.decode(body)])


def _raised(event: list[Any], steps: list[Mapping[int, Step]]) -> list[Any]:
    for step in steps:
        change = step.get(event[0])
        if change is not None:
            event = change(event)
    return event


UPCASTS = Upcasts()
"""Those of this version."""
