"""From the log of a run to the smallest scenario file in which a decision about one group is made again.

Rule 1: a scenario counts only if playing it leads to the decision: the same phase, the same reasons and credit of an
eviction, as many new starts, and the same hold on a sampler. The file expects all of that of itself.
Rule 2: what was done about the group itself is never left out; all else is, as long as the decision stays the same.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules, known_rules
from groupstate.core.select import held_by_stale
from groupstate.errors import BadInput, NotReproduced
from groupstate.inspect.about import About
from groupstate.inspect.replay import applied
from groupstate.inspect.unknown import unknown_group
from groupstate.inspect.words import in_words, kind_of, one_line
from groupstate.log.reading import beginning, read_book, read_log
from groupstate.runtime.ledger import DOOMED
from groupstate.runtime.opening import own_selection
from groupstate.simulate.kinds import MalformedScenario
from groupstate.simulate.retold import After, Step, Teller, scenario_text
from groupstate.simulate.scenario import StepFailed, play
from groupstate.simulate.scenario_file import parse

STEPS_PLAYED_MAX = 60_000
"""Steps that making a scenario smaller may play in all; a minute or two."""

LEFT_OUT = ("session_deadline_s", "group_deadline_s", "stall_s", "generated_groups_max")
"""Rules that a scenario does without: its steps say what time did, and groups are submitted by hand."""

BY_RULES_ALONE = frozenset({"EvictionStreak", "MissingMetric", "CustomRuleError"})
"""Errors of a waiting `sample()` that come again by themselves; others are told as its cancellation."""


@attrs.frozen
class Decision:
    """What was decided about a group."""

    seq: int
    """The event that it stands after."""
    phase: str
    reasons: tuple[str, ...]
    """Of its eviction; empty where it wasn't evicted."""
    credit: int
    requeues: int
    holds: bool
    """It is in flight at its lag bound, and a `sample()` waits for that."""

    def expected(self, group_id: str) -> dict[str, Any]:
        """As a scenario's last step expects it."""
        expect: dict[str, Any] = {"phase": {group_id: self.phase}}
        if self.reasons:
            expect |= {"reasons": {group_id: list(self.reasons)}, "credit": {group_id: self.credit}}
        if self.requeues:
            expect["requeues"] = {group_id: self.requeues}
        return expect | ({"held_by": group_id} if self.holds else {})

    def __str__(self) -> str:
        earned = f" for {', '.join(self.reasons)}, credit {self.credit}" if self.reasons else ""
        again = f", started over {self.requeues} times" if self.requeues > 1 else ", started over once"
        return f"{self.phase}{earned}{again if self.requeues else ''}{', and a sample() waits for it' * self.holds}"


@attrs.frozen
class Reproduced:
    decision: Decision
    text: str
    """The scenario file."""
    steps: int
    told: int
    """Steps that the log was told in before what is unrelated was left out."""


def reproduced(
    records: Iterable[ev.Record],
    group_id: str,
    until: int | None = None,
    base: Book | None = None,
    *,
    selection: str | None = None,
) -> Reproduced:
    """A scenario in which the same is decided about a group.

    Args:
        until: the last event that counts; None for the one with which the group left, or else the last.
        base: the book before the first of the records; None where they are all that there were. What happened up to
            then can't be told, so the group must have been submitted since.
        selection: where the run's selection function is found, if the path that the log has leads nowhere: of one that
            was in the script that was run it leads to whatever is run now.

    Raises:
        UnknownGroup: the log never submitted it, or its submission is gone.
        BadInput: there is no such event, or the group came after it; `selection` is given, and the run's was none of
            the user's own.
        BadSettings: the selection function isn't found.
        NotReproduced: no scenario of steps leads to the decision; the text says what may be behind it.
        LogError: the log isn't one that a run wrote.
    """
    situation = _situation(list(records), group_id, until, base, selection)
    told = list(_told(situation))
    maker = _Maker(situation)
    found = next((kept for kept in _guesses(situation, told) if maker.leads_there(kept)), None)
    if found is None:
        raise NotReproduced(group_id, str(situation.decision), situation.decision.seq, maker.why_not)
    found = _tidied(maker, _fewer(maker, found))
    steps = maker.steps_of(found)
    return Reproduced(situation.decision, _text(situation, steps), len(steps), len(told))


def reproduced_run(
    path: str | os.PathLike[str], group_id: str, until: int | None = None, *, selection: str | None = None
) -> Reproduced:
    """The same of a run directory: no more than what follows the nearest snapshot before the group's submission is
    replayed and told, unless the decision needs what came before.

    Raises:
        UnknownGroup, BadInput, BadSettings, NotReproduced, LogError: see `reproduced`.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    submitted, decided, last = _places(read_log(path, start), group_id)
    if submitted and submitted <= (until or decided) <= last:
        seq = until or decided
        near = read_book(path, submitted - 1)
        if near is not None and near.last_seq >= start:
            try:
                return reproduced(read_log(path, near.last_seq + 1, seq + 1), group_id, seq, near, selection=selection)
            except NotReproduced:
                pass  # groups of before take part in it
    return reproduced(read_log(path, start), group_id, until, base, selection=selection)


# What was decided ------------------------------------------------------------------------------------------


@attrs.frozen
class _Situation:
    """The decision, and what there was when it was made."""

    group_id: str
    decision: Decision
    records: Sequence[ev.Record]
    """Up to the decision."""
    rules: dict[str, Any]
    """In force at the first of them."""
    version: int
    """Current at the first of them."""
    submitted_seq: int
    live: frozenset[str]
    """Groups that were in the book then, or in the batch that took it."""
    requests: frozenset[int]
    """Requests that waited then, and the one whose batch took it."""
    run_id: str
    selection: str | None
    """Where the run's own selection function is found; None: where the log says."""

    def settings(self, rules: Mapping[str, Any]) -> dict[str, Any]:
        """Rules of the log as the scenario has them: what isn't the default."""
        settings = _settings(rules)
        if self.selection is not None and known_rules(rules).has_own_selection:
            settings["selection"] = self.selection
        return settings


def _situation(
    records: list[ev.Record], group_id: str, until: int | None, base: Book | None, selection: str | None
) -> _Situation:
    start = 1 if base is None else base.last_seq + 1
    first, decided, _ = _places(records, group_id)
    if not first:
        submitted = {r.event.group_id: None for r in records if isinstance(r.event, ev.GroupSubmitted)}
        known = {} if base is None else dict.fromkeys([*base.departed, *base.groups])
        left = None if base is None else base.departed.get(group_id)
        if base is not None and group_id in base.groups:
            left = base.groups[group_id].phase
        raise unknown_group(group_id, "tell a scenario of it", known | submitted, left=left, start=start)
    seq = decided if until is None else until
    if not records[0].seq <= seq <= records[-1].seq:
        raise BadInput(f"there is no event {seq}: the log has events {records[0].seq} to {records[-1].seq}")
    if seq < first:
        raise BadInput(f"group {group_id!r} was submitted at event {first}, after event {seq}")
    book = Book() if base is None else base
    rules, version = dict(book.rules), book.weight_version
    evicted, requeues, batch = None, 0, None
    prefix = records[: seq - records[0].seq + 1]
    for record in prefix:
        event = record.event
        applied(book, record)
        if isinstance(event, ev.RunStarted):
            rules, version = dict(event.rules), event.weight_version
        elif isinstance(event, ev.GroupEvicted) and event.group_id == group_id:
            evicted = event
        elif isinstance(event, ev.GroupRequeued) and event.group_id == group_id:
            requeues += 1
        elif isinstance(event, ev.BatchSampled) and group_id in event.group_ids:
            batch = event
    live = book.groups.get(group_id)
    phase = str(live.phase if live is not None else book.departed[group_id])
    in_force = known_rules(book.rules)
    held = None if live is None else held_by_stale(book, in_force, live.partition)
    decision = Decision(
        seq,
        phase,
        () if evicted is None or phase != Phase.EVICTED else evicted.reasons,
        0 if evicted is None else evicted.credit,
        requeues,
        held is not None and held.group_id == group_id,
    )
    there = {*book.groups, *(() if batch is None else batch.group_ids)}
    waiting = {*book.requests, *(() if batch is None else (batch.request,))}
    _need_selection(in_force, selection)
    return _Situation(
        group_id, decision, prefix, rules, version, first, frozenset(there), frozenset(waiting), book.run_id, selection
    )


def _need_selection(rules: Rules, selection: str | None) -> None:
    """
    Raises:
        BadSettings: the selection function isn't found.
        BadInput: one is given for rules that have none.
    """
    if selection is not None:
        if not rules.has_own_selection:
            raise BadInput(f"the run's selection is {rules.selection!r}, not a function of yours: leave selection out")
        rules = rules.changed(selection=selection)
    name = rules.selection.rpartition(":")[2]
    way_on = f"name the module or the file that has it: --selection train:{name} or path/to/train.py:{name}"
    own_selection(rules, way_on=way_on)


def _places(records: Iterable[ev.Record], group_id: str) -> tuple[int, int, int]:
    """The group's submission (0 without one), the event that decides about it, and the last event.

    What decides is that with which the group left. Of one that hasn't it is the last of the log, or, of a run that was
    closed, the last about the group before that."""
    submitted, last, left, end, closed = 0, 0, False, 0, False
    about = About(group_id)
    for record in records:
        event = record.event
        end, closed = record.seq, isinstance(event, ev.RunClosed)
        if isinstance(event, ev.GroupSubmitted) and event.group_id == group_id:
            submitted = record.seq
        if isinstance(event, ev.RunRewound):
            left = False
        closing = isinstance(event, ev.GroupRequeued) and event.reason.startswith("the run closed")
        if about(record) and not closing and not isinstance(event, ev.ResultFenced):
            last, left = record.seq, isinstance(event, ev.GroupEvicted | ev.BatchCommitted)
    return submitted, last if left or closed else end, end


# Steps -----------------------------------------------------------------------------------------------------


@attrs.frozen
class _Told:
    """A step of the log, with what it is about."""

    number: int
    """Its place."""
    step: Step
    verb: str
    group: str = ""
    request: int = 0
    batch: int = 0
    """The batch that its request got, or that it commits or gives back."""
    opening: int = 0
    """Numbers the openings: what ended a run and what opened it again belong together."""
    stamp: int = 0
    members: tuple[str, ...] = ()
    """Groups of the batch that the request got."""
    rows: tuple[ev.TrajectoryRecord, ...] = ()
    """What its session yielded."""
    lives: int = 0
    """How often its group had started over."""


def _told(situation: _Situation) -> Iterator[_Told]:
    events = [record.event for record in situation.records]
    served = {e.request: e for e in events if isinstance(e, ev.BatchSampled)}
    teller, number, opening, rules = Teller(version=situation.version), 0, 0, situation.rules
    lives: Counter[str] = Counter()
    if situation.version:
        yield _Told(number, {"publish": situation.version}, "publish")
    for place, event in enumerate(events):
        before = len(teller.steps)
        if isinstance(event, ev.GroupRequeued):
            lives[event.group_id] += 1
        teller.tell(event, After(events, place))
        for step in teller.steps[before:]:
            number += 1
            verb = next(iter(step))
            if verb == "cancel" and getattr(event, "message", "") == DOOMED.message:
                continue  # the rules do it by themselves
            opening += verb in {"close", "crash"}
            if isinstance(event, ev.RunRecovered) and verb == "recover" and event.rules != rules:
                rules = dict(event.rules)
                step["rules"] = situation.settings(rules)
            about = _about(number, verb, step, event, served, opening)
            yield attrs.evolve(about, lives=lives[about.group])


def _about(
    number: int, verb: str, step: Step, event: ev.AnyEvent, served: Mapping[int, ev.BatchSampled], opening: int
) -> _Told:
    request = getattr(event, "request", 0)
    batch = served.get(request)
    if isinstance(event, ev.BatchRequestCancelled) and event.reason in BY_RULES_ALONE:
        verb, step = "waiting", {"waiting": False, "error": event.reason, "waiter": 0}
    elif isinstance(event, ev.GroupSubmitted) and event.dataset:
        step["dataset"] = event.dataset
    elif isinstance(event, ev.SessionFinished):
        step = {**_without(step, "trajectories"), **_rows(event.trajectories, versions=True)}
    return _Told(
        number,
        step,
        verb,
        getattr(event, "group_id", ""),
        request,
        batch.batch if batch is not None else getattr(event, "batch", 0),
        opening if verb in {"close", "crash", "recover"} else 0,
        getattr(event, "weight_version", 0) if verb == "submit" else 0,
        () if batch is None else batch.group_ids,
        event.trajectories if isinstance(event, ev.SessionFinished) else (),
    )


def _rows(rows: Iterable[ev.TrajectoryRecord], *, versions: bool) -> dict[str, Any]:
    """What a session yielded, with one token for each stretch that a version generated."""
    told = []
    for row in rows:
        spans = [span.weight_version for span in row.spans] if versions else []
        told.append({"metrics": dict(row.metrics), **({"versions": spans} if spans else {})})
    alone = len(told) == 1 and "versions" not in told[0]
    return {"metrics": told[0]["metrics"]} if alone else {"trajectories": told}


def _settings(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that aren't the defaults."""
    defaults = Rules().to_dict()
    return {
        name: value
        for name, value in rules.items()
        if name not in LEFT_OUT and value is not None and (name not in defaults or value != defaults[name])
    }


Kept = tuple[_Told, ...]


class _Maker:
    """Makes scenarios of told steps and plays them."""

    def __init__(self, situation: _Situation) -> None:
        self.situation = situation
        self.rules = situation.settings(situation.rules)
        self.steps_played = 0
        self.why_not = ""
        """What the last one that was played led to."""

    @property
    def spent(self) -> bool:
        return self.steps_played >= STEPS_PLAYED_MAX

    def leads_there(self, kept: Kept) -> bool:
        """Whether playing these leads to the decision."""
        return self._plays(self.steps_of(kept))

    def _plays(self, steps: list[Step]) -> bool:
        self.steps_played += len(steps)
        try:
            play(parse({"rules": self.rules, "steps": steps}))
        except (StepFailed, MalformedScenario) as error:
            self.why_not = one_line(str(error))
            return False
        return True

    def same_with(self, kept: Kept, change: Any) -> Kept:
        """The steps after a change, if they still lead there; else the steps."""
        changed = tuple(attrs.evolve(one, step=dict(one.step)) for one in kept)
        changed = change(changed)
        return changed if not self.spent and self.leads_there(changed) else kept

    def steps_of(self, kept: Kept) -> list[Step]:
        """As a scenario has them: batches and waiters numbered anew, stamps where they aren't the current version."""
        here = {one.group for one in kept if one.verb == "submit"}
        batches = sorted({one.batch for one in kept if one.verb == "sample" and one.batch})
        waiters = [one.request for one in kept if one.verb == "sample"]
        version = max([0, *(one.stamp for one in _leading(kept))])
        leading = len(_leading(kept))
        steps: list[Step] = []
        for place, one in enumerate(kept):
            step = dict(one.step)
            if one.verb == "submit":
                step.pop("weight_version", None)
                if one.stamp > version:
                    # A publication was left out that it comes behind.
                    steps.append({"publish": one.stamp})
                    version = one.stamp
                if version if place < leading else one.stamp < version:
                    step["weight_version"] = one.stamp
            elif one.verb == "sample" and one.members:
                step["sample"] = len(here.intersection(one.members))
            elif one.verb in {"commit", "release"}:
                step[one.verb] = batches.index(one.batch) + 1
            elif one.verb in {"cancel_sample", "waiting"}:
                step["waiter"] = waiters.index(one.request) + 1
            elif one.verb == "publish":
                version = max(version, step["publish"])
            steps.append(step)
        return [*steps, {"check": True, "expect": self.situation.decision.expected(self.situation.group_id)}]


def _leading(kept: Kept) -> Kept:
    """The submits that it begins with: they say at which version."""
    end = next((place for place, one in enumerate(kept) if one.verb != "submit"), len(kept))
    return kept[:end]


# Fewer of them ---------------------------------------------------------------------------------------------


def _fits(kept: Iterable[_Told]) -> Kept:
    """Without what refers to something that isn't there: batches of nobody, and their ends."""
    steps = list(kept)
    here = {one.group for one in steps if one.verb == "submit"}
    asked = {
        one.request for one in steps if one.verb == "sample" and (not one.members or here.intersection(one.members))
    }
    got = {one.batch for one in steps if one.verb == "sample" and one.request in asked}
    return tuple(
        one
        for one in steps
        if (not one.group or one.group in here)
        and (not one.request or one.request in asked)
        and (one.verb not in {"commit", "release"} or one.batch in got)
    )


def _guesses(situation: _Situation, told: Sequence[_Told]) -> Iterator[Kept]:
    """What may be enough, the least first."""
    own, since = situation.group_id, _alive_since(situation)
    lives = {one.group: one.lives for one in told}

    def chosen(groups: frozenset[str] | None, requests: frozenset[int] | None, *, openings: bool) -> Kept:
        return _fits(
            one if openings or one.group in ("", own) else attrs.evolve(one, step=_without(one.step, "attempt"))
            for one in told
            if (not one.group or groups is None or one.group in groups or one.group == own)
            and (not one.request or requests is None or one.request in requests)
            and (openings or one.verb not in {"close", "crash", "recover", "checkpoint"})
            # Without the openings nothing starts over, and another group's last life is as good as all of them.
            and (openings or one.group in ("", own) or one.verb == "submit" or one.lives == lives[one.group])
            and (openings or one.group in ("", own) or one.verb != "requeue")
        )

    reopened = any(one.opening for one in told)
    none: frozenset[str] = frozenset()
    for openings in (False, True) if reopened else (False,):
        yield chosen(none, frozenset(), openings=openings)
        yield chosen(none, situation.requests, openings=openings)
    for openings in (False, True) if reopened else (False,):
        yield chosen(situation.live, situation.requests, openings=openings)
    yield chosen(situation.live, None, openings=reopened)
    yield chosen(since, None, openings=reopened)
    yield _fits(told)


def _without(step: Step, name: str) -> Step:
    return {key: value for key, value in step.items() if key != name}


def _alive_since(situation: _Situation) -> frozenset[str]:
    """Groups that were in the book at any time since the group was submitted."""
    alive: set[str] = set()
    batches: dict[int, tuple[str, ...]] = {}
    for record in situation.records:
        event = record.event
        if isinstance(event, ev.GroupSubmitted):
            alive.add(event.group_id)
        elif isinstance(event, ev.BatchSampled):
            batches[event.batch] = event.group_ids
        elif record.seq > situation.submitted_seq:
            continue
        elif isinstance(event, ev.GroupEvicted):
            alive.discard(event.group_id)
        elif isinstance(event, ev.BatchCommitted):
            alive.difference_update(batches.get(event.batch, ()))
    return frozenset(alive)


def _units(situation: _Situation, kept: Kept) -> list[frozenset[int]]:
    """What may be left out together, by number: all about another group, all about a request and its batch, a
    publication, the end of a run with its next opening."""
    units: dict[Any, set[int]] = {}
    for one in kept:
        if one.group == situation.group_id:
            continue
        key = (
            ("group", one.group)
            if one.group
            else ("request", one.request or one.batch)
            if one.request or one.batch
            else ("opening", one.opening)
            if one.opening
            else ("step", one.number)
        )
        units.setdefault(key, set()).add(one.number)
    return [frozenset(numbers) for numbers in units.values()]


def _fewer(maker: _Maker, kept: Kept) -> Kept:
    """Leave out units, many at once first, while it still leads there."""
    units = _units(maker.situation, kept)
    length = len(units)
    while length >= 1 and not maker.spent:
        start, before = 0, len(units)
        while start < len(units) and not maker.spent:
            out = frozenset().union(*units[start : start + length])
            fewer = _fits(one for one in kept if one.number not in out)
            if maker.leads_there(fewer):
                kept, units = fewer, [*units[:start], *units[start + length :]]
            else:
                start += length
        if length > 1 or len(units) == before:
            length //= 2
    return kept


def _tidied(maker: _Maker, kept: Kept) -> Kept:
    """The same, said more shortly where that changes nothing."""

    def without_attempts(steps: Kept) -> Kept:
        for one in steps:
            one.step.pop("attempt", None)
        return steps

    def without_versions(steps: Kept) -> Kept:
        return tuple(
            attrs.evolve(one, step={**_without(one.step, "trajectories"), **_rows(one.rows, versions=False)})
            if one.rows
            else one
            for one in steps
        )

    def started_together(steps: Kept) -> Kept:
        found: list[_Told] = []
        for one in steps:
            if one.verb == "start" and found and found[-1].verb == "start" and found[-1].group == one.group:
                continue
            step = {"start": one.group} if one.verb == "start" else one.step
            found.append(attrs.evolve(one, step=step))
        return tuple(found)

    kept = maker.same_with(maker.same_with(kept, without_attempts), without_versions)
    return maker.same_with(kept, started_together)


# The file --------------------------------------------------------------------------------------------------


def _text(situation: _Situation, steps: Sequence[Step]) -> str:
    decision, group_id = situation.decision, situation.group_id
    last = situation.records[-1]
    title = f"Group {group_id} is {decision}"
    head = [
        f"# Told from run {situation.run_id}, up to event {last.seq}: {kind_of(last.event)} {in_words(last.event)}",
        "# What was done about other groups is left out where the decision is the same without it.",
    ]
    return "\n".join([*head, scenario_text(situation.settings(situation.rules), steps, title)])
