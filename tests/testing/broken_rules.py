"""Selections of a user's own with the mistakes that one makes, and the same ones right."""

from collections.abc import Iterator
from typing import Any

from groupstate import Book, Drop, OpenRequest, Phase, Rules, Select
from groupstate.core.events import TrajectoryRecord
from groupstate.core.group import Group


def mean(group: Group) -> float:
    rewards = [row.metrics["reward"] for session in group.sessions for row in session.trajectories]
    return sum(rewards) / len(rewards)


def in_band(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Train on groups whose mean reward is from 0.25 to 0.75, both included."""
    good = []
    for group in book.ready():
        if 0.25 <= mean(group) <= 0.75:
            good.append(group.group_id)
        else:
            yield Drop(group.group_id)
    if len(good) >= request.size:
        yield Select(good[: request.size])


def above_the_lower_bound(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Off by one: the lower bound is left out."""
    good = []
    for group in book.ready():
        if 0.25 < mean(group) <= 0.75:
            good.append(group.group_id)
        else:
            yield Drop(group.group_id)
    if len(good) >= request.size:
        yield Select(good[: request.size])


def needs_one_more(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Off by one: exactly enough groups aren't enough."""
    ready = [group.group_id for group in book.ready()]
    if len(ready) > request.size:
        yield Select(ready[: request.size])


def evicts_what_was_sampled(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Cleans up groups that are old, those of the trainer too."""
    for phase in (Phase.FINISHED, Phase.SAMPLED):
        for group in book.in_phase(phase, "train"):
            if book.lag(group) > 0:
                yield Drop(group.group_id, "stale")
    young = [group.group_id for group in book.ready() if book.lag(group) == 0]
    if len(young) >= request.size:
        yield Select(young[: request.size])


def selects_twice(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """One half of the best groups, one half of the oldest: a group may be both."""
    oldest = [group.group_id for group in book.ready()]
    best = [group.group_id for group in sorted(book.ready(), key=mean, reverse=True)]
    if len(oldest) >= request.size:
        half = request.size // 2
        yield Select([*best[:half], *oldest[: request.size - half]])


def takes_validation(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Looks at all that has ended, in whatever partition."""
    ready = [group.group_id for group in book.groups.values() if group.phase is Phase.FINISHED]
    if len(ready) >= request.size:
        yield Select(ready[: request.size])


def counts_validation(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Takes training groups alone, but counts those of validation too."""
    finished = sum(group.phase is Phase.FINISHED for group in book.groups.values())
    if finished >= request.size:
        yield Select([group.group_id for group in book.ready()][: request.size])


class Forgetful:
    """Answers something else each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
        self.count += 1
        ready = [group.group_id for group in book.ready()]
        if len(ready) >= request.size and self.count % 2:
            yield Select(ready[: request.size])


def wants_each_reward(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Doesn't think of sessions that failed in a group which is finished in part."""
    ready = sorted(book.ready(), key=lambda group: [one.trajectories[-1].metrics["reward"] for one in group.sessions])
    if len(ready) >= request.size:
        yield Select(group.group_id for group in ready[: request.size])


def rows(group: Group) -> list[TrajectoryRecord]:
    return [row for session in group.sessions for row in session.trajectories]


def short_and_safe(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Evicts groups with an answer of more than 8 tokens, and such as are unsafe."""
    good = []
    for group in book.ready():
        if max(row.response_tokens for row in rows(group)) > 8 or min(row.metrics["safe"] for row in rows(group)) < 1:
            yield Drop(group.group_id)
        else:
            good.append(group.group_id)
    if len(good) >= request.size:
        yield Select(good[: request.size])


def short_if_all_are(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Looks for groups whose answers are all too long, and so keeps one long answer among short ones."""
    good = [group for group in book.ready() if min(row.response_tokens for row in rows(group)) <= 8]
    yield from (Drop(group.group_id) for group in book.ready() if group not in good)
    if len(good) >= request.size:
        yield Select(group.group_id for group in good[: request.size])


def gives_up_by_hand(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Takes groups out of the book itself, and trips over that the next time."""
    for group in list(book.ready()):
        if mean(group) == 1.0:
            del book.groups[group.group_id]
    yield from in_band(book, rules, request)


def hides_rewards(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """Caps the rewards for itself, and so for all."""
    for group in book.ready():
        for row in rows(group):
            row.metrics["reward"] = min(row.metrics["reward"], 0.5)
    yield from in_band(book, rules, request)


class Later:
    """Would have to be awaited, which isn't to be seen before it is asked."""

    def __call__(self, book: Book, rules: Rules, request: OpenRequest) -> Any:
        async def answer() -> list[Select | Drop]:
            return []

        return answer()


def names_one(book: Book, rules: Rules, request: OpenRequest) -> Iterator[Select | Drop]:
    """An id in place of a list of ids."""
    for group in book.ready():
        yield Select(group.group_id)
        return
