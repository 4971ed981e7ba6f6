"""What other rules would have made of a run, beside what was: `what_if`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.arguments import integer
from groupstate.core.custom import CustomRule
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.inspect.words import in_words, kind_of
from groupstate.runtime.opening import own_selection
from groupstate.simulate.whatif.figures import Figures, figures
from groupstate.simulate.whatif.play import Played, play
from groupstate.simulate.whatif.recorded import Recorded, recorded

DECISIONS = (
    ev.GroupSubmitted,
    ev.GroupFinished,
    ev.GroupFailed,
    ev.GroupEvicted,
    ev.RefillForfeited,
    ev.BatchSampled,
)


@attrs.frozen
class WhatIf:
    own: Rules
    rules: Rules
    """The other ones."""
    recorded: Figures
    """What was."""
    replayed: Figures | None
    """The run's own rules over what was recorded: what the method gets wrong shows here. None where they can't be
    played."""
    other: Figures
    """The other rules over the same."""
    parted: str
    """Where the run's own rules, played again, decide otherwise than the log says; empty if nowhere."""
    unchecked: str
    """Why the run's own rules can't be played; empty if they were."""
    stand_in: str
    """The path of the function that the run's own rules were played with, where theirs leads nowhere; else empty."""
    stopped: str
    """Why the other rules didn't come to the end of what the trainer did; empty if they did."""
    made_up: dict[str, int]
    """What the log doesn't know and the other rules asked for, drawn from what it does know: by kind, how often."""
    until: str
    """Why the end of the log is left out; empty if all of it is in."""
    records: list[ev.Record]
    """The log that the other rules made, to look at as at any other."""

    @property
    def is_exact(self) -> bool:
        """The run's own rules give the run again."""
        return not self.parted and not self.unchecked


def what_if(records: Iterable[ev.Record], rules: Rules | Callable[[Rules], Rules], *, seed: int = 0) -> WhatIf:
    """Run other rules over what a run recorded.

    Kept as they were: how long each session took and how it ended, its metrics and tokens, when the trainer asked,
    published and committed after what it had done before. Made anew by the rules: which groups are submitted, evicted,
    refilled, sampled, and how long the trainer waits. Where the other rules ask for more than the log knows (prompts
    beyond those that were drawn, sessions that were cut off) it is drawn from what the log knows, and counted. Not
    known at all, and so as it was: that sessions take longer where more of them run at once, and that other batches
    make other weights.

    The run's own rules are played as well, as a check. Where their `selection` is a function that isn't found any more,
    such as one of the script that was run, they are played with that of the other rules if it has the same name, and
    not at all if it hasn't.

    Args:
        records: the log, from its first event.
        rules: the other rules, or what makes them of the run's own: `lambda own: own.changed(lag_max=2)`.
        seed: picks what is drawn.

    Raises:
        BadInput: the log is empty, or its beginning is gone.
        BadSettings: the other rules name a selection function that can't be found.
        LogError: the log isn't one that a run wrote.
    """
    seed = integer("seed", seed, least=0)
    found = recorded(records)
    chosen = rules if isinstance(rules, Rules) else rules(found.rules)
    custom = own_selection(chosen, way_on=_way_on(chosen))
    own, own_custom, unchecked = _own(found.rules, chosen, custom)
    replayed = None if unchecked else play(found, own, own_custom, seed=seed)
    other = play(found, chosen, custom, seed=seed)
    return WhatIf(
        found.rules,
        chosen,
        figures(found.records),
        None if replayed is None else figures(replayed.records),
        figures(other.records),
        "" if replayed is None else _parted(found, replayed),
        unchecked,
        "" if own is found.rules else own.selection,
        other.stopped,
        other.drawn,
        found.until,
        other.records,
    )


def _own(own: Rules, chosen: Rules, custom: CustomRule | None) -> tuple[Rules, CustomRule | None, str]:
    """The run's own rules with their selection function, or why it can't be had. One of the same name that the other
    rules have stands in for it."""
    try:
        name = own.selection.rpartition(":")[2]
        return own, own_selection(own, way_on=f"the check needs other rules with a function {name!r}"), ""
    except BadSettings as error:
        if custom is not None and _name_of(own) == _name_of(chosen):
            return own.changed(selection=chosen.selection), custom, ""
        return own, None, str(error)


def _way_on(rules: Rules) -> str:
    name = rules.selection.rpartition(":")[2]
    return f"name the module or the file that has it: --set selection=train:{name} or path/to/train.py:{name}"


def _name_of(rules: Rules) -> str:
    return rules.selection.rpartition(":")[2].rpartition(".")[2]


def _parted(found: Recorded, played: Played) -> str:
    was, now = _decisions(found.records), _decisions(played.records)
    while True:
        left, right = next(was, None), next(now, None)
        if left is None:
            return "" if right is None else f"the log ends, and played again {_told(right[0].event)} follows"
        there = f"event {left[0].seq} is {_told(left[0].event)}"
        if right is None:
            return f"{there}, and the play ends before it: {played.stopped or 'nothing more is decided'}"
        if left[1] != right[1]:
            return f"{there}, and played again it is {_told(right[0].event)}"


def _told(event: ev.AnyEvent) -> str:
    return f"{kind_of(event)} ({in_words(event)})"


def _decisions(records: Iterable[ev.Record]) -> Iterator[tuple[ev.Record, Any]]:
    validation: set[str] = set()
    for record in records:
        event = record.event
        if isinstance(event, ev.GroupSubmitted) and event.partition != ev.TRAIN:
            validation.add(event.group_id)
        if not isinstance(event, DECISIONS) or getattr(event, "group_id", None) in validation:
            continue
        if getattr(event, "partition", ev.TRAIN) == ev.TRAIN:
            yield record, _decision(event)


def _decision(event: ev.AnyEvent) -> tuple[Any, ...]:
    """What of an event the rules decided."""
    if isinstance(event, ev.GroupSubmitted):
        return "submitted", event.group_id, event.size, event.weight_version, event.cause, event.target_version
    if isinstance(event, ev.GroupEvicted):
        return "evicted", event.group_id, event.reasons, event.lag, event.credit
    if isinstance(event, ev.BatchSampled):
        return "sampled", event.group_ids, event.weight_version, event.lags
    if isinstance(event, ev.RefillForfeited):
        return "forfeited", event.count, event.reason
    return type(event).__name__, getattr(event, "group_id", "")
