"""How many groups are started, and of what: refills, shortages, admission, datasets, weight versions to come.

Rule 1: pure functions from the book to numbers; nothing is recorded here.
Rule 2: refills come first: each takes the place that an evicted group gave back.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

import attrs

from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.held import Credit, DatasetUse
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots
from groupstate.core.select import held_by_stale, in_flight_for, ready_for

NO_LIMIT = 2**62
"""More groups than any run has."""


def draining(book: Book, rules: Rules) -> bool:
    """Sync mode with a filter: the demand is met, so nothing more is dispatched."""
    if not rules.drains:
        return False
    waiting = book.waiting()
    return bool(waiting) and book.ready_count() >= waiting[0].size


# Refills ---------------------------------------------------------------------------------------------


def forfeits(book: Book, rules: Rules) -> tuple[int, str] | None:
    """Credit that can't be spent any more, and why."""
    if not book.credits:
        return None
    if draining(book, rules):
        return len(book.credits), "batch full"
    if book.source_exhausted:
        return len(book.credits), "source exhausted"
    rule = rules.admission_rule
    if isinstance(rule, Capacity):
        beyond = len(book.credits) - max(0, _free_capacity(book, rules, rule))
        if beyond > 0:
            return beyond, "admission"
    return None


def refills_now(book: Book, rules: Rules) -> int:
    """How many refills to submit now; what is owed beyond that waits for a place, or for a whole multiple."""
    if not book.credits or (rules.drains and (not book.waiting() or draining(book, rules))):
        return 0
    count = max(0, min(len(book.credits), refill_room(book, rules), generation_left(book, rules)))
    return count - count % rules.refill_multiple


def refill_room(book: Book, rules: Rules) -> int:
    """Places for refills: what the rules bound in flight by, less what is there."""
    in_flight, ready, owed = book.in_flight_count(), book.ready_count(), len(book.credits)
    rule = rules.admission_rule
    room = owed
    if rules.drains:
        assert rules.batch_size is not None
        room = min(room, rules.in_flight_batches_max * rules.batch_size - in_flight)
    if isinstance(rule, Slots):
        # What waiting samplers need has a place beside what is ready, or they would wait for ever.
        wanted = sum(request.size for request in book.waiting())
        room = min(room, rule.n - in_flight, max(rule.n + rule.ready_max, wanted) - ready - in_flight)
    elif isinstance(rule, Capacity):
        room = min(room, _free_capacity(book, rules, rule), _free_places(book, rule, owed))
    return max(0, room)


def _free_capacity(book: Book, rules: Rules, rule: Capacity) -> int:
    """Groups that may be started beside those that are sampleable or in flight, at the current version."""
    assert rules.batch_size is not None
    consumed = book.count(Phase.SAMPLED, partition=TRAIN) + book.totals["committed/train"]
    capacity = (rule.lag_max + book.weight_version + 1) * rules.batch_size - consumed
    return capacity - book.ready_count() - book.in_flight_count()


def _free_places(book: Book, rule: Capacity, most: int) -> int:
    return most if rule.in_flight_max is None else rule.in_flight_max - book.in_flight_count()


# Admission -------------------------------------------------------------------------------------------


def shortage(book: Book, rules: Rules) -> int:
    """Groups to draw because waiting samplers need them beyond what is sampleable, in flight or owed.

    It goes past what admission would let start, or they would wait for ever, but never past the bound of groups in
    flight."""
    wanted = sum(request.size for request in book.waiting())
    return short_of(book, rules, wanted) if wanted else 0


def short_of(book: Book, rules: Rules, wanted: int) -> int:
    """Groups to draw so that `wanted` are sampleable, in flight or owed."""
    short = wanted - ready_for(book, rules) - in_flight_for(book, rules) - _coming(book, rules)
    rule = rules.admission_rule
    if isinstance(rule, Slots):
        short = min(short, rule.n - book.in_flight_count())
    elif isinstance(rule, Capacity):
        short = min(short, _free_places(book, rule, short))
    return max(0, min(short, generation_left(book, rules)))


def generation_left(book: Book, rules: Rules) -> int:
    """Groups that may yet be started for this batch; as many as there can be without a limit."""
    if rules.generated_groups_max is None:
        return NO_LIMIT
    return rules.generated_groups_max - book.window(TRAIN).submitted


def _coming(book: Book, rules: Rules) -> int:
    """Refills that will come by themselves and could be sampled now.

    What is less than a whole multiple, or finds no place, may yet come while groups are in flight; then it is left
    over."""
    owed = len(book.credits)
    if rules.targets_versions:
        owed = sum(_refill_target(book, credit) == book.weight_version for credit in book.credits)
    return owed if book.in_flight_count() else min(owed, refills_now(book, rules))


def admissible(book: Book, rules: Rules) -> int:
    """How many new prompts the rollout may start now."""
    return max(0, min(_admitted(book, rules), generation_left(book, rules)))


def _admitted(book: Book, rules: Rules) -> int:
    """What the admission rule says, below 0 if there are too many already."""
    if draining(book, rules) or held_by_stale(book, rules) is not None:
        return 0
    rule = rules.admission_rule
    owed = len(book.credits) + unjudged_count(book)
    under_way = book.in_flight_count() + owed
    ready = book.ready_count()
    if isinstance(rule, PerBatch):
        if rules.targets_versions:
            return _missing_of_targets(book, rules, rule.warmup)
        wanted = sum(request.size for request in book.waiting())
        ahead = rule.warmup * (rules.batch_size or max([request.size for request in book.waiting()], default=1))
        return wanted + ahead - ready - under_way
    if isinstance(rule, Capacity):
        free = _free_capacity(book, rules, rule)
        return min(free, _free_places(book, rule, free)) - owed
    return min(rule.n - under_way, rule.n + rule.ready_max - ready - under_way)


def unjudged_count(book: Book) -> int:
    """Terminal training groups without a trajectory. In sync mode they wait for a `sample()` to be evicted, and
    take up their places until then, or a source of failing prompts would be drawn without end."""
    terminal = book.count(*TERMINAL, partition=TRAIN)
    return terminal - book.ready_count()


# Weight versions to come -----------------------------------------------------------------------------


def next_target(book: Book, rules: Rules) -> int:
    """The first weight version, from the current one on, for which fewer than a batch of groups are made."""
    made = _made_for(book)
    return next(v for v in itertools.count(book.weight_version) if made[v] < (rules.batch_size or 0))


def refill_target(book: Book, rules: Rules) -> int:
    """The version that the next refill is made for: that of the evicted group, if it isn't over."""
    target = book.credits[0].target_version
    if target is not None and target >= book.weight_version:
        return target
    return next(v for v in itertools.count(book.weight_version) if book.targets[v] < (rules.batch_size or 0))


def _missing_of_targets(book: Book, rules: Rules, ahead: int) -> int:
    """Groups that are missing for the current version and the next `ahead` ones."""
    made = _made_for(book)
    versions = range(book.weight_version, book.weight_version + ahead + 1)
    return sum(max(0, (rules.batch_size or 0) - made[version]) for version in versions)


def _made_for(book: Book) -> Counter[int]:
    """Groups submitted or owed, by the version that they are made for."""
    return book.targets + Counter(_refill_target(book, credit) for credit in book.credits)


def _refill_target(book: Book, credit: Credit) -> int:
    return max(book.weight_version, credit.target_version or 0)


# Datasets --------------------------------------------------------------------------------------------


@attrs.frozen
class Starved:
    """Intent: say that a dataset has had no group sampled for too many weight versions."""

    dataset: str
    versions: int
    open_groups: int
    evicted: int


def next_dataset(book: Book, rules: Rules, names: Sequence[str]) -> str | None:
    """The dataset that the next prompt comes from; None if all have a share of 0.

    With K groups kept (submitted and not evicted) and N submitted over all datasets: the one for which
    `share * (K + 1) - kept` is highest, among those with `submitted < (share + share_tolerance) * (N + 1)`; the
    first of `names` where several are.

    Args:
        names: datasets that still give prompts; their shares are taken to add up to 1.
    """
    shares = shares_of(rules, names)
    uses = {name: book.uses.get(name) or DatasetUse() for name in shares}
    if not shares:
        return None
    submitted = sum(use.submitted for use in uses.values())
    kept = sum(use.kept for use in uses.values())
    within = [
        name
        for name, share in shares.items()
        if uses[name].submitted < (share + rules.share_tolerance) * (submitted + 1)
    ]
    return max(within or shares, key=lambda name: shares[name] * (kept + 1) - uses[name].kept)


def shares_of(rules: Rules, names: Sequence[str]) -> dict[str, float]:
    """Shares above 0 of the datasets in `names`, made to add up to 1. Those without a share divide up what is left."""
    given = {name: own.share for name, own in rules.datasets.items() if own.share is not None}
    others = [name for name in names if name not in given]
    left = max(0.0, 1.0 - sum(given.values()))
    shares = {name: given.get(name, left / max(1, len(others))) for name in names}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items() if share > 0}


def starving(book: Book, rules: Rules) -> list[Starved]:
    """Datasets that have groups, and of which none was sampled for `starvation_versions`."""
    bound = rules.starvation_versions
    if bound is None:
        return []
    return [
        Starved(name, book.weight_version - use.version, use.open, use.evicted)
        for name, use in sorted(book.uses.items())
        if (use.open or use.new) and book.weight_version - use.told_version >= bound
    ]
