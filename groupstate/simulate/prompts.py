"""Prompts and rows that say of themselves where they come from, so that whoever gets them can tell.

A prompt's content is `dataset:number`; a row's text is `prompt|group|session|attempt`.
"""

from collections.abc import Callable, Iterator

import attrs

from groupstate.batch import BatchGroup
from groupstate.core.prompt import Prompt
from groupstate.runtime.sources import FunctionSource, MixedSource, Source
from groupstate.simulate.lots import Lots
from groupstate.simulate.plan import Plan

_SIZE = 401
OWN = "own"
"""In place of a dataset: what the user submits by hand."""
VALIDATION = "val"


def prompt_key(prompt: Prompt | None) -> str:
    return "" if prompt is None else str(prompt.content)


def number_of(key: str) -> int:
    """One number for the whole key, for the draws of its sessions."""
    dataset, _, position = key.rpartition(":")
    return (int.from_bytes(dataset.encode(), "big") << 40) + int(position)


@attrs.frozen
class Told:
    """What a row says of itself, and where it was found."""

    session: int
    group_id: str
    returned_by: int
    attempt: int

    @classmethod
    def of_batch(cls, group: BatchGroup) -> Iterator["Told"]:
        for row in group.rows():
            _, group_id, session, attempt = row.trajectory.text.split("|")
            yield cls(row.session, group_id, int(session), int(attempt))


def text_of(key: str, group_id: str, session: int, attempt: int) -> str:
    return f"{key}|{group_id}|{session}|{attempt}"


def source_of(plan: Plan, ended: Callable[[], bool]) -> Source:
    """The source of a plan, from its beginning.

    Args:
        ended: whether it is to give no more, whatever the plan says.
    """

    def prompts(dataset: str) -> FunctionSource:
        def make(position: int) -> Prompt | None:
            dry = plan.source.prompts is not None and position >= plan.source.prompts
            return None if dry or ended() else sized(plan, f"{dataset}:{position}", dataset)

        return FunctionSource(make, name=dataset or "prompts")

    if not plan.source.datasets:
        return prompts("")
    return MixedSource({name: prompts(name) for name in plan.source.datasets}, name="datasets")


def sized(plan: Plan, key: str, dataset: str = "") -> Prompt:
    """A prompt, with sessions as the plan's mixture says."""
    sizes = plan.sessions.sizes
    n = Lots(plan.seed, _SIZE, number_of(key)).pick(sizes) if sizes else None
    return Prompt(key, dataset, n)
