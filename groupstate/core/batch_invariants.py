"""What the events of the run, of those that wait and of batches say that can't be, and what they count.

Rule: for the checker of invariants alone. What a group says of itself is asked before it is moved (`misfits`).
"""

from collections import Counter
from typing import TYPE_CHECKING, Final

from groupstate.core import events as ev
from groupstate.core.group_invariants import Handler, filtered
from groupstate.core.held import UNDELIVERED, Window
from groupstate.core.misfits import wrong_taking
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase
from groupstate.core.rules import recorded_rules
from groupstate.core.tracked import Tracked
from groupstate.errors import BadSettings

if TYPE_CHECKING:
    from groupstate.core.invariants import Checker

# The run -------------------------------------------------------------------------------------------


def _in_force(checker: "Checker", event: ev.RunStarted | ev.RunRecovered) -> None:
    if event.rules != checker.recorded:
        checker.rules_seq = checker.seq
        checker.recorded = event.rules
        try:
            checker.rules = recorded_rules(event.rules)
        except BadSettings as error:
            checker.wrong(9, f"the rules of the run can't be read: {error}")
    checker.version, checker.version_seq = event.weight_version, checker.seq
    checker.request_seqs.update(dict.fromkeys(checker.requests, checker.seq))
    checker.requests.clear()


def _published(checker: "Checker", event: ev.WeightsPublished) -> None:
    checker.version, checker.version_seq = event.weight_version, checker.seq


def _rewound(checker: "Checker", event: ev.RunRewound) -> None:
    checker.version, checker.version_seq, checker.rewound_seq = event.weight_version, checker.seq, checker.seq
    checker.builds_on = tuple(checker.batch_seqs[number] for number in checker.batches)[:1]
    for group in checker.groups.values():
        if _too_new(checker, group) and group.phase not in (Phase.EVICTED, Phase.COMMITTED):
            checker.lift(group)
            _rewind(checker, group)
            checker.place(group, group.phase)
    while checker.commits and checker.commits[-1][0] > event.mark_seq:
        _, batch = checker.commits.pop()
        for group in _of_batch(checker, batch, Phase.COMMITTED):
            if _too_new(checker, group):
                _rewind(checker, group)
            _bring_back(checker, group)
    if event.evicts:
        checker.abandoned = {
            group.group_id
            for group in checker.groups.values()
            if group.phase in TERMINAL
            and group.partition == ev.TRAIN
            and (group.submitted_seq > event.mark_seq or group.stamp > event.weight_version)
        }


def _rewind(checker: "Checker", group: Tracked) -> None:
    group.aged_from = group.rewound_to = checker.version
    group.aged_seq = group.rewound_seq = checker.seq


def _too_new(checker: "Checker", group: Tracked) -> bool:
    """Made for a version of the abandoned line, and not waiting for the new line to reach it."""
    return group.aged_from > checker.version and group.target_version is None


# Batches -------------------------------------------------------------------------------------------


def _requested(checker: "Checker", event: ev.BatchRequested) -> None:
    checker.builds_on = (next(reversed(checker.request_seqs.values()), 0),)
    checker.requests[event.request] = event
    checker.request_seqs[event.request] = checker.seq


def _request_cancelled(checker: "Checker", event: ev.BatchRequestCancelled) -> None:
    _close_request(checker, event.request)


def _close_request(checker: "Checker", number: int) -> None:
    checker.builds_on = (checker.request_seqs.get(number, 0),)
    if checker.requests.pop(number, None) is not None:
        checker.request_seqs[number] = checker.seq


def _sampled(checker: "Checker", event: ev.BatchSampled) -> None:
    if event.request in checker.requests:
        checker.builds_on = (next(reversed(checker.batch_seqs.values()), 0),)
        checker.requests.pop(event.request)
        checker.request_seqs[event.request] = checker.seq
    else:
        checker.builds_on = (checker.request_seqs.get(event.request, 0),)
    checker.reported[event.batch] = _check_window(checker, event.partition)
    if event.partition == ev.TRAIN:
        _check_wait(checker, event)
    if len(event.lags) != len(event.group_ids):
        checker.wrong(11, f"batch {event.batch} has {len(event.group_ids)} groups and {len(event.lags)} lags")
    for group_id, lag in zip(event.group_ids, event.lags, strict=False):
        group = checker.known(group_id)
        if group is not None:
            for text, seqs in wrong_taking(group, event):
                checker.wrong(4, text, group_id, *seqs)
            _check_sampled_lag(checker, group, event, lag)
            checker.lift(group)
            group.batch, group.sampled_lag = event.batch, lag
            group.sampled_seq = group.left_seq = checker.seq
            checker.place(group, Phase.SAMPLED)
    checker.batches[event.batch] = event
    checker.batch_seqs[event.batch] = checker.seq


def _check_sampled_lag(checker: "Checker", group: Tracked, event: ev.BatchSampled, lag: int) -> None:
    name, counted = group.group_id, checker.lag(group)
    if lag != counted:
        text = f"batch {event.batch} gives group {name!r} with lag {lag}, and its lag is {counted}"
        checker.wrong(11, text, name, *checker.lag_seqs(group))
    if event.partition != ev.TRAIN:
        return
    if checker.rules.targets_versions and group.counts_from != event.weight_version:
        text = f"batch {event.batch} of version {event.weight_version} takes group {name!r}, which is made for "
        checker.wrong(6, f"{text}version {group.counts_from}", name, group.submitted_seq)
    bound = checker.rules.lag_bound(group.dataset) if checker.rules.drops_stale else None
    if bound is not None and lag > bound:
        text = f"batch {event.batch} takes group {name!r} with lag {lag}, past lag_max {bound}"
        checker.wrong(6, text, name, checker.rules_seq)


def _check_wait(checker: "Checker", event: ev.BatchSampled) -> None:
    """With `wait`, no batch is given out while a group in flight is at its bound."""
    if not checker.rules.waits_for_stale:
        return
    for dataset, ages in checker.ages.items():
        bound = checker.rules.lag_bound(dataset)
        if bound is None or not ages or checker.version - min(ages) < bound:
            continue
        oldest = next(
            group
            for group in checker.groups.values()
            if group.phase in IN_FLIGHT
            and (group.partition, group.dataset, group.aged_from) == (ev.TRAIN, dataset, min(ages))
        )
        checker.wrong(
            6,
            f"batch {event.batch} is sampled while group {oldest.group_id!r} in flight has lag "
            f"{checker.lag(oldest)}, and at lag_max {bound} sampling waits",
            oldest.group_id,
            *checker.lag_seqs(oldest),
        )


def _check_window(checker: "Checker", partition: ev.Partition) -> Counter[str]:
    """The counts that the batch's metrics are made of, since the previous batch."""
    counted = +checker.windows.pop(partition, Counter())
    window = checker.booked_window(partition)
    if window is None:
        return counted
    booked = flat(window)
    for name in sorted(counted.keys() | booked.keys()):
        if counted[name] != booked[name]:
            text = f"the metrics of this batch count {booked[name]} {name}, the log holds {counted[name]}"
            checker.wrong(11, text)
    return counted


def _returned(checker: "Checker", event: ev.BatchReturned) -> None:
    batch = _out(checker, event.batch, "returned")
    reported = checker.reported.pop(event.batch, Counter())
    if batch is not None:
        if event.reason in UNDELIVERED:
            # Its metrics reached nobody: the next batch reports them.
            checker.windows[batch.partition].update(reported)
        for group in _of_batch(checker, batch, Phase.SAMPLED):
            _bring_back(checker, group)


def _committed(checker: "Checker", event: ev.BatchCommitted) -> None:
    batch = _out(checker, event.batch, "committed")
    checker.reported.pop(event.batch, None)
    if batch is None:
        return
    checker.commits.append((checker.seq, batch))
    for group in _of_batch(checker, batch, Phase.SAMPLED):
        checker.lift(group)
        group.left_seq = checker.seq
        checker.place(group, Phase.COMMITTED)


def _out(checker: "Checker", number: int, done: str) -> ev.BatchSampled | None:
    batch = checker.batches.pop(number, None)
    if batch is None:
        checker.wrong(4, f"batch {number} is {done}, and no such batch is out", "", checker.batch_seqs.get(number, 0))
    else:
        checker.batch_seqs[number] = checker.seq
    return batch


def _of_batch(checker: "Checker", batch: ev.BatchSampled, phase: Phase) -> list[Tracked]:
    """The batch's groups that are still where it put them; in a broken log some may not be."""
    groups = [checker.groups[group_id] for group_id in batch.group_ids if group_id in checker.groups]
    return [group for group in groups if group.phase is phase and group.batch == batch.batch]


def _bring_back(checker: "Checker", group: Tracked) -> None:
    """Sampleable again, with the lag that it was sampled with."""
    checker.lift(group)
    group.kept_lag = None if checker.rules.basis == "target_version" else group.sampled_lag
    group.batch, group.left_seq = 0, checker.seq
    checker.place(group, group.ending)


def flat(window: Window) -> Counter[str]:
    """What a book counts for a batch, by the names under which the checker counts it."""
    counts = Counter(
        submitted=window.submitted,
        refills=window.refills,
        forfeited=window.forfeited,
        fenced=window.fenced,
        requeued=window.requeued,
        evicted_groups=window.evicted_groups,
    )
    counts.update({f"evicted/{reason}": count for reason, count in window.evicted.items()})
    counts.update({f"starved/{dataset}": count for dataset, count in window.starved.items()})
    counts.update({f"failed/{kind}": count for kind, count in window.sessions_failed.items()})
    counts.update(f"evicted/stale with lag {lag}" for lag in window.stale_lags)
    counts.update({filtered(value): count for value, count in window.filtered_values.items()})
    return +counts


HANDLERS: Final[dict[type[ev.Event], Handler]] = {
    ev.RunStarted: _in_force,
    ev.RunRecovered: _in_force,
    ev.RunRewound: _rewound,
    ev.WeightsPublished: _published,
    ev.BatchRequested: _requested,
    ev.BatchRequestCancelled: _request_cancelled,
    ev.BatchSampled: _sampled,
    ev.BatchReturned: _returned,
    ev.BatchCommitted: _committed,
}
