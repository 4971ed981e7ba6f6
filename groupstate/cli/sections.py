"""What `show` and `why` have to say, as tables."""

from collections.abc import Mapping, Sequence

import attrs

from groupstate.cli.output import Section
from groupstate.core.explain import Explanation
from groupstate.core.frontier import Ranges, SourceFrontier
from groupstate.inspect.overview import LIVE, Header, Overview
from groupstate.inspect.story import Story
from groupstate.inspect.words import counted, joined, name_of, one_line, span_of, time_of


def overview_sections(seen: Overview, now_ns: int | None = None) -> list[Section]:
    """Empty ones are left out when they are written. `now_ns`, the time of day, says how old the last event is."""
    phases = tuple(str(phase) for phase in LIVE)
    return [
        Section("run", (), _header(seen.header, now_ns)),
        Section(
            "groups",
            ("partition", *phases, "sampleable"),
            [
                (part.partition, *(str(part.phases[phase]) for phase in phases), str(part.sampleable))
                for part in seen.partitions
            ],
        ),
        Section("totals", (), _totals(seen.totals)),
        Section(
            "waiting",
            ("request", "partition", "groups", "for"),
            [(str(number), part, str(size), span_of(waited)) for number, part, size, waited in seen.requests],
        ),
        Section("why it waits", (), [row for wait in seen.waits for row in _reasons(wait)]),
        Section(
            "in flight",
            ("group", "phase", "lag", "age", "quiet for", "sessions open", "to begin"),
            [row for wait in seen.waits for row in _in_flight(wait)],
        ),
        Section(
            "with the trainer",
            ("batch", "partition", "version", "groups", "lags"),
            [
                (
                    str(batch.batch),
                    batch.partition,
                    str(batch.weight_version),
                    " ".join(map(name_of, batch.group_ids)),
                    " ".join(map(str, batch.lags)),
                )
                for batch in seen.batches
            ],
        ),
        Section(
            "refills owed",
            ("for", "sessions"),
            [(name_of(credit.evicted), str(credit.size)) for credit in seen.credits],
        ),
        Section(
            "marks",
            ("mark", "event", "version", "lineage", "name"),
            [tuple(map(str, attrs.astuple(mark))) for mark in seen.marks],
        ),
        *(Section(f"since the last batch, {name}", (), _named(counts)) for name, counts in seen.windows.items()),
        Section("datasets", (), _datasets(seen.datasets)),
    ]


def _header(header: Header, now_ns: int | None) -> list[tuple[str, str]]:
    source = f"{counted(header.drawn, 'prompt')} drawn{', exhausted' if header.source_exhausted else ''}"
    rules = ", ".join(f"{name} {value}" for name, value in header.rules.items())
    rows = [
        ("run", header.run_id),
        ("event", str(header.seq)),
        ("at", f"{time_of(header.at_ns)}, {span_of((header.at_ns - header.started_at_ns) / 1e9)} after the first"),
        ("state", _state(header)),
        ("last event", _quiet_for(header, now_ns)),
        ("opened", f"{header.openings} times" if header.openings > 1 else "once"),
        ("weight version", f"{header.weight_version}, lineage {header.lineage}"),
        ("source", source),
        ("admission held", header.admission_held),
        ("rules", rules or "the defaults"),
        ("groupstate", header.library),
    ]
    return [(name, one_line(value)) for name, value in rows if value]


def _state(header: Header) -> str:
    if not header.closed:
        return "open, or its process is gone"
    return f"closed: {header.closed_for}" if header.closed_for not in ("", "closed") else "closed"


def _quiet_for(header: Header, now_ns: int | None) -> str:
    return "" if header.closed else quiet_for(header.at_ns, now_ns)


def quiet_for(at_ns: int, now_ns: int | None) -> str:
    """How long an open run has written nothing: what tells a slow one from a dead one. Nothing where it isn't open."""
    if now_ns is None or not 0 < at_ns <= now_ns:
        return ""
    return f"{span_of((now_ns - at_ns) / 1e9)} ago"


TOLD_BESIDE = {"batches_committed": "commits of all partitions, those that were undone among them"}
"""Totals that don't fit the groups beside them -> why."""


def _totals(counts: Mapping[str, int]) -> list[tuple[str, ...]]:
    return [(name, count, *([TOLD_BESIDE[name]] if name in TOLD_BESIDE else [])) for name, count in _named(counts)]


def _named(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, str(count)) for name, count in counts.items() if count]


def _reasons(wait: Explanation) -> list[tuple[str, str]]:
    if not wait.blocked_by:
        return []
    return [
        (wait.partition, wait.blocked_by),
        *((f"{wait.partition}, to go on", way) for way in wait.unblocked_by),
    ]


def _in_flight(wait: Explanation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            name_of(group.group_id),
            group.phase,
            str(group.lag),
            span_of(group.age_s),
            span_of(group.quiet_s),
            " ".join(map(str, group.open_sessions)) or "none",
            " ".join(map(str, group.waiting_sessions)) or "none",
        )
        for group in wait.in_flight
    ]
    more = wait.in_flight_count - len(rows)
    return [*rows, (f"and {more} more", "", "", "", "", "", "")] if more else rows


def _datasets(datasets: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Only where there is more than the one without a name."""
    if set(datasets) <= {""}:
        return []
    return [
        (one_line(name) or "(none)", joined(f"{count} {what}" for what, count in counts.items()))
        for name, counts in datasets.items()
    ]


def frontier_sections(places: Sequence[SourceFrontier]) -> list[Section]:
    rows = []
    for place in places:
        kinds: tuple[tuple[str, Ranges], ...] = (
            ("committed", place.committed),
            ("open", place.open),
            ("evicted", place.evicted),
        )
        if place.since > 1:
            kinds = (*kinds, (f"either, before event {place.since}", place.unknown))
        rows += [(name_of(place.dataset) if place.dataset else "all", what, _ranges(found)) for what, found in kinds]
        left = "" if place.left is None else f", {place.left} left"
        rows.append((rows[-1][0], "not yet drawn", f"from {place.next} on{left}"))
        rows.append((rows[-1][0], "lowest not resolved", str(place.lowest_open)))
    return [Section("frontier", ("dataset", "what", "positions"), rows)]


def _ranges(ranges: Ranges) -> str:
    """`0-4 7`: both ends are in it."""
    return " ".join(str(first) if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in ranges) or "none"


def story_sections(told: Story, now_ns: int | None = None) -> list[Section]:
    """`now_ns`, the time of day, says for how long a run that is open has written nothing."""
    steps = [(str(step.seq), f"+{span_of(step.since_s)}", step.kind, one_line(step.text, 600)) for step in told.steps]
    name = name_of(told.group_id)
    end = [
        ("now", told.now),
        ("held up by", told.held_up_by),
        ("versions", told.versions),
        ("last event", quiet_for(told.seen_at_ns, now_ns)),
    ]
    return [
        Section(name, ("event", "time", "kind", "what happened"), steps),
        Section(name, (), [row for row in end if row[1]]),
    ]
