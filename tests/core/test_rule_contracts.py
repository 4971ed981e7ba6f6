"""The contracts of selection and eviction rules, kept by the library's own and by a few of a user's."""

from groupstate import Book, Drop, OpenRequest, Rules, Select
from groupstate.core.group import Group
from groupstate.testing.contracts import EvictionContract, SelectionContract


def longest_first(book: Book, rules: Rules, request: OpenRequest) -> list[Select]:
    ready = sorted(book.ready(), key=lambda group: (-group.size, group.submitted_seq))
    return [Select(group.group_id for group in ready[: request.size])] if len(ready) >= request.size else []


def mean(group: Group) -> float:
    rewards = [row.metrics["reward"] for session in group.sessions for row in session.trajectories]
    return sum(rewards) / len(rewards)


def in_band(book: Book, rules: Rules, request: OpenRequest) -> list[Select | Drop]:
    good = [group.group_id for group in book.ready() if 0.2 <= mean(group) <= 0.8]
    bad = [group.group_id for group in book.ready() if group.group_id not in good]
    return [*map(Drop, bad), *([Select(good[: request.size])] if len(good) >= request.size else [])]


class TestOldestFirst(SelectionContract):
    rules = Rules(selection="oldest_first")


class TestFreshestFirst(SelectionContract):
    rules = Rules(selection="freshest_first")


class TestExactVersion(SelectionContract):
    rules = Rules(selection="exact_version", batch_size=9, lag_max=0, basis="target_version")


class TestLongestFirst(SelectionContract):
    selection = longest_first


class TestInBandSelects(SelectionContract):
    selection = in_band


class TestInBandEvicts(EvictionContract):
    selection = in_band


class TestZeroVariance(EvictionContract):
    rules = Rules(filter_metric="reward")


class TestZeroVarianceInSyncMode(EvictionContract):
    rules = Rules(mode="sync", filter_metric="reward", batch_size=2)
