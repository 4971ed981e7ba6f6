"""What `why --batch` and `why --wait` have to say, as tables."""

from collections.abc import Sequence

from groupstate.cli.output import Section
from groupstate.cli.sections import quiet_for
from groupstate.core.explain import Explanation
from groupstate.inspect.batch_story import BatchStory, Candidate, summary
from groupstate.inspect.wait_story import WaitStory
from groupstate.inspect.words import counted, joined, name_of, one_line, span_of

ROWS_MAX = 20
"""Rows of what can be long; `--json` has them all."""

TEXT_MAX = 400


def batch_sections(told: BatchStory) -> list[Section]:
    """Empty ones are left out when they are written."""
    asked = f"{counted(told.demand, 'group')} of {told.partition}, asked for by request {told.request}"
    if told.request_seq:
        asked = f"{asked} at event {told.request_seq}"
    older = joined(map(str, told.older_requests))
    rows = [
        ("sampled", f"at event {told.seq}: {summary(told)}"),
        ("demand", asked),
        ("its wait", f"`why --wait {told.request_seq}` tells what for" if 0 < told.request_seq < told.seq - 1 else ""),
        ("waiting before it", f"request {older}" if older else ""),
        ("order", f"{told.selection}: {told.order}"),
        ("since", "" if told.batch_before_seq or told.told_from == 1 else f"events are told from {told.told_from} on"),
        ("then", told.fate),
    ]
    columns = ("group", "version", "submitted", "ended", "lag", "lag_max")
    return [
        Section(f"batch {told.batch}", (), [row for row in rows if row[1]]),
        Section("taken", ("place", *columns, "with"), _numbered(told.taken)),
        Section("passed over", (*columns, "why"), _short(_candidates(told.passed_over), len(columns) + 1)),
        Section("not ready", (*columns, "why"), _short(_candidates(told.not_ready), len(columns) + 1)),
        Section("evicted since the last batch", ("event", "group", "when", "why"), _evicted(told)),
    ]


def _candidates(groups: Sequence[Candidate]) -> list[tuple[str, ...]]:
    return [
        (
            name_of(group.group_id),
            str(group.version),
            str(group.submitted_seq),
            str(group.ended_seq or "no"),
            str(group.lag),
            "none" if group.lag_max is None else str(group.lag_max),
            one_line(group.why, TEXT_MAX),
        )
        for group in groups
    ]


def _numbered(groups: Sequence[Candidate]) -> list[tuple[str, ...]]:
    return [(str(place), *row) for place, row in enumerate(_candidates(groups), 1)]


def _evicted(told: BatchStory) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            str(one.seq),
            name_of(one.group_id),
            "with it" if one.with_it else "before",
            one_line(one.why, TEXT_MAX),
        )
        for one in told.evicted
    ]
    return _short(rows, 4, last=True)


def _short(rows: list[tuple[str, ...]], width: int, *, last: bool = False) -> list[tuple[str, ...]]:
    """The first of many rows (or the last), and how many there are beside them."""
    left = len(rows) - ROWS_MAX
    if left <= 0:
        return rows
    more = (f"and {left} {'before' if last else 'more'}", *("",) * (width - 1))
    return [more, *rows[-ROWS_MAX:]] if last else [*rows[:ROWS_MAX], more]


def wait_sections(told: WaitStory, now_ns: int | None = None) -> list[Section]:
    """`now_ns`, the time of day, says for how long a run that is open has written nothing."""
    request = f"{counted(told.size, 'group')} of {told.partition}, since event {told.request_seq}"
    behind = joined(map(str, told.behind))
    rows = [
        ("request", f"{told.request}: {request}"),
        ("asked about", f"event {told.seq}, {span_of(told.waited_s)} after it began to wait"),
        ("behind", f"request {behind}, which came before" if behind else ""),
        *_explained(told.then),
    ]
    sessions = joined(f"{count} {what}" for what, count in told.sessions.items())
    let_go = f"event {told.let_go_seq}: {told.let_go}" if told.let_go_seq else ""
    end = f"event {told.ended_seq}, " if told.ended_seq else ""
    ends = [
        ("since", f"events are told from {told.told_from} on" if told.told_from > told.request_seq else ""),
        ("sessions meanwhile", sessions),
        ("nothing held it after", let_go),
        ("ended", f"{end}after {span_of(told.lasted_s)}: {told.ended}"),
    ]
    if not told.ended_seq:
        ends += [("last event", quiet_for(told.seen_at_ns, now_ns)), *_explained(told.at_end)]
    steps: list[tuple[str, ...]] = [
        (
            str(step.seq),
            f"+{span_of(step.since_s)}",
            step.kind,
            f"{step.sampleable} of {told.size}",
            str(step.in_flight),
            one_line(step.text, TEXT_MAX),
        )
        for step in told.steps
    ]
    return [
        Section("wait", (), [(name, one_line(text, TEXT_MAX)) for name, text in rows if text]),
        Section("in flight then", ("group", "phase", "lag", "quiet for", "waits for"), _in_flight(told.then)),
        Section("meanwhile", ("event", "time", "kind", "sampleable", "in flight", "what"), _short(steps, 6, last=True)),
        Section("end", (), [(name, one_line(text, TEXT_MAX)) for name, text in ends if text]),
        Section(
            "in flight at the end",
            ("group", "phase", "lag", "quiet for", "waits for"),
            [] if told.ended_seq else _in_flight(told.at_end),
        ),
    ]


def _explained(wait: Explanation) -> list[tuple[str, str]]:
    owed = counted(wait.refills_owed, "refill")
    there = f"{wait.sampleable} sampleable, {wait.in_flight_count} in flight, {owed} owed"
    gone = joined(f"{reason} {count}" for reason, count in wait.evicted)
    return [
        ("waits for", wait.blocked_by or "nothing: it can be served"),
        ("numbers", there + (", source exhausted" if wait.source_exhausted else "")),
        ("evicted since the last batch", gone),
        *(("to go on", way) for way in wait.unblocked_by),
    ]


def _in_flight(wait: Explanation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for group in wait.in_flight:
        open_ones = f"session {joined(map(str, group.open_sessions))} open" if group.open_sessions else ""
        begin = f"session {joined(map(str, group.waiting_sessions))} to begin" if group.waiting_sessions else ""
        parts = [part for part in (open_ones, begin, group.last_failure) if part]
        rows.append(
            (name_of(group.group_id), group.phase, str(group.lag), span_of(group.quiet_s), one_line("; ".join(parts)))
        )
    more = wait.in_flight_count - len(rows)
    return [*rows, (f"and {more} more", "", "", "", "")] if more else rows
