"""The command that says where a run's groups, tokens and time went."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from groupstate.cli.output import Section, while_read, write_json, write_sections
from groupstate.cli.runs import beginning_of, records_of
from groupstate.inspect.histogram import Histogram
from groupstate.inspect.stats import as_object, stats
from groupstate.inspect.tallies import NO_VALUE, REQUEUED, UNDONE, UNTIMED, Fates, Interval, Stats
from groupstate.inspect.words import joined, name_of, one_line, span_of

LAGS_MAX = 20
FAILURES_MAX = 15
KINDS_MAX = 25
"""Rows of a section in text; the JSON has all."""

KINDS = {
    "dataset": "dataset",
    "cause": "submitted by",
    "prompt_length": "characters of the prompt",
    "answer_tokens": "tokens of an answer",
}
"""Kinds of groups -> what their column is called; the reward's is the metric's."""


@click.command("stats", short_help="Say where groups, tokens and time went.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--by", type=click.IntRange(min=1), default=None, metavar="N", help="Weight versions in an interval.")
@click.option("--metric", default=None, metavar="NAME", help="Told as the reward; the rules' filter metric by default.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text, with every count of every interval.")
def stats_command(run: Path, by: int | None, metric: str | None, as_json: bool) -> None:
    """Say where the groups, tokens and time of RUN went, in all and per interval of weight versions: what was trained
    on and what was thrown away and why, what the trainer waited for, lags, durations, failures, credits, and which
    prompts and answers the rules let through.

    Without --by there are up to 40 intervals of equally many versions. Quantiles are to within 4.5 %.

    \b
    Examples:
      groupstate stats runs/demo
      groupstate stats runs/demo --by 10
      groupstate stats runs/demo --json
    """
    base, start = beginning_of(run)
    seen = stats(records_of(run, start), base, by=by, metric=metric)
    if start > 1:
        click.echo(f"events before {start} are gone: what happened up to then isn't counted", err=True)
    with while_read():
        if as_json:
            write_json(as_object(seen))
        else:
            write_sections(stats_sections(seen))


def stats_sections(seen: Stats) -> list[Section]:
    """Empty ones are left out when they are written."""
    whole = seen.whole
    return [
        Section("groups", (), list(_groups(seen))),
        Section("tokens", ("what", "tokens", "share"), list(_tokens(seen))),
        Section("trainer", ("what", "for", "share"), list(_trainer(whole))),
        Section("lag", ("versions", "in flight", "in the queue", "when sampled"), _lags(whole)),
        Section("durations", ("what", "count", "p50", "p90", "p99", "longest", "in all"), list(_durations(whole))),
        Section(
            "slowest sessions",
            ("session", "attempt", "for", "ended at"),
            [
                (f"{name_of(s.group_id)}/{s.session}", str(s.attempt), span_of(s.seconds), str(s.seq))
                for s in seen.slowest
            ],
        ),
        Section(
            "failures",
            ("kind", "message", "count", "tried again", "last at"),
            _cut(
                [
                    (f.kind, one_line(f.message) or "(none)", str(f.count), str(f.retried), str(f.last_seq))
                    for f in seen.failures
                ],
                FAILURES_MAX,
            ),
        ),
        Section("late results", (), _counts(whole.fenced)),
        Section("credits", (), list(_credits(seen))),
        *_survivals(seen),
        _intervals(seen),
    ]


def _groups(seen: Stats) -> Iterator[tuple[str, str]]:
    totals, validation = seen.whole.totals, seen.whole.validation
    training = totals["submitted"] - validation["submitted"]
    yield "submitted", str(totals["submitted"])
    if validation["submitted"]:
        yield "... for validation", str(validation["submitted"])
    yield "trained on", _share(totals["committed/train"], training)
    if undone := totals[UNDONE] - validation[UNDONE]:
        yield "commits undone by going back", str(undone)
    yield "thrown away", _share(totals["evicted"], training)
    for name in sorted(totals):
        if name.startswith("evicted/"):
            yield f"... {name.removeprefix('evicted/')}", str(totals[name])
    for phase, count in sorted(seen.live.items()):
        if count := count - seen.validation_live.get(phase, 0):
            yield f"live, {phase}", str(count)
    if validation["committed"]:
        yield "ended as validation", _share(validation["committed"], validation["submitted"])
    if validation[UNDONE]:
        yield "validation undone by going back", str(validation[UNDONE])
    for phase, count in sorted(seen.validation_live.items()):
        yield f"live validation, {phase}", str(count)
    if totals["requeued"]:
        yield "started over", str(totals["requeued"])


def _tokens(seen: Stats) -> Iterator[tuple[str, str, str]]:
    whole, ended = seen.whole, seen.whole.validation_tokens
    generated = whole.totals["response_tokens"]
    rows = [("generated", generated), ("... for validation", whole.validation["response_tokens"])]
    rows += [("trained on", whole.trained_tokens), ("thrown away", whole.thrown_tokens.total())]
    rows += [(f"... {reasons}", count) for reasons, count in whole.thrown_tokens.most_common()]
    rows += [("of live groups", seen.held_tokens - seen.validation_held_tokens)]
    rows += [("ended as validation", ended["committed"]), ("of validation that started over", ended[REQUEUED])]
    for name, count in [*rows, ("of live validation", seen.validation_held_tokens)]:
        if count or name == "generated":
            yield name, f"{count}", _percent(count, generated)


def _trainer(whole: Interval) -> Iterator[tuple[str, str, str]]:
    span = whole.last_at_ns - whole.first_at_ns
    waited = whole.waited_ns.total()
    rest = span - waited - whole.trainer_ns - whole.down_ns
    rows = [("waited", waited)]
    rows += [(f"... for {cause}", lasted) for cause, lasted in whole.waited_ns.most_common()]
    rows += [("worked, or asked for nothing", whole.trainer_ns), ("until its first request after an opening", rest)]
    rows += [("no process had the run open", whole.down_ns)]
    for name, lasted in rows:
        if lasted:
            yield name, span_of(lasted / 1e9), _percent(lasted, span)
    yield "from the first event to the last", span_of(span / 1e9), ""


def _lags(whole: Interval) -> list[tuple[str, ...]]:
    columns = (whole.in_flight_lags, whole.queue_lags, whole.sampled_lags)
    lags = sorted({lag for column in columns for lag in column})
    rows: list[tuple[str, ...]] = [
        (str(lag), *(str(column[lag]) if column[lag] else "" for column in columns)) for lag in lags[:LAGS_MAX]
    ]
    if more := lags[LAGS_MAX:]:
        rows.append((f"{more[0]} to {more[-1]}", *(str(sum(column[lag] for lag in more)) for column in columns)))
    return rows


def _durations(whole: Interval) -> Iterator[tuple[str, ...]]:
    named = {
        "sessions that finished": whole.sessions_s,
        "sessions that failed": whole.failed_sessions_s,
        "groups, until a session began": whole.pending_s,
        "groups, until they ended": whole.groups_s,
        "... of which the second half of the sessions": whole.tails_s,
        "groups, until they were sampled": whole.queued_s,
        "sample() calls of the trainer": whole.waits_s,
    }
    if untimed := whole.totals[UNTIMED]:
        yield "sessions that were only observed", str(untimed), *["not known"] * 5
    for name, histogram in named.items():
        if histogram.count:
            told = histogram.summary()
            times = (told.p50, told.p90, told.p99, told.most, told.total)
            yield name, str(told.count), *map(span_of, times)


def _credits(seen: Stats) -> Iterator[tuple[str, str]]:
    whole = seen.whole
    totals = whole.totals
    if not totals["credit"] + totals["refills"] + totals["forfeited"] + seen.owed:
        return
    yield "earned by evictions", str(totals["credit"])
    yield "spent on refills", str(totals["refills"])
    refills = seen.survival["cause"].get("refill", Fates())
    if refills.count:
        yield "... of which trained on", f"{_share(refills.committed, refills.count)} of those that left"
    yield "forfeited", str(totals["forfeited"])
    for reason, count in whole.forfeited.most_common():
        yield f"... {one_line(reason)}", str(count)
    yield "owed", str(seen.owed)


def _survivals(seen: Stats) -> list[Section]:
    metric = name_of(seen.metric)
    told = [_survival(name.replace("_", " "), heading, seen.survival[name]) for name, heading in KINDS.items()]
    return [*told, _survival(metric, f"mean {metric}", seen.survival["reward"])]


def _survival(name: str, heading: str, kinds: Mapping[Any, Fates]) -> Section:
    trivial = len(kinds) < 2 and heading in (KINDS["dataset"], KINDS["cause"])
    rows = [
        (_named(key), str(f.count), str(f.committed), f"{f.survival:.0%}", _reasons(f)) for key, f in _sorted(kinds)
    ]
    columns = (heading, "groups that left", "trained on", "share", "thrown away")
    return Section(f"survival by {name}", columns, [] if trivial else _cut(rows, KINDS_MAX))


def _sorted(kinds: Mapping[Any, Fates]) -> list[tuple[Any, Fates]]:
    return sorted(kinds.items(), key=lambda item: item[0])


def _named(key: Any) -> str:
    if key == NO_VALUE:
        return "none"
    if isinstance(key, tuple):
        return f"{key[0]:g} to {key[1]:g}"
    return name_of(key) if key else "(none)"


def _reasons(fates: Fates) -> str:
    return joined(f"{count} {reasons}" for reasons, count in fates.evicted.most_common()) if fates.evicted else ""


_INTERVAL = (
    "versions", "lineage", "events", "for", "submitted", "trained on", "thrown away", "tokens", "trained", "thrown",
    "waited", "lag", "session p50", "p99", "failed",
)  # fmt: skip


_APART: Mapping[str, Callable[[Interval], int]] = {
    "undone": lambda interval: interval.totals[UNDONE] - interval.validation[UNDONE],
    "tokens undone": lambda interval: interval.undone_tokens,
    "for validation": lambda interval: interval.validation["submitted"],
    "ended as validation": lambda interval: interval.validation["committed"],
    "tokens for validation": lambda interval: interval.validation["response_tokens"],
}
"""Columns behind these, of what few runs have: they are there where the run has it."""


def _intervals(seen: Stats) -> Section:
    apart = {name: of for name, of in _APART.items() if of(seen.whole)}
    rows = [(*_interval(interval), *(str(of(interval)) for of in apart.values())) for interval in seen.intervals]
    return Section("intervals", (*_INTERVAL, *apart), rows)


def _interval(interval: Interval) -> tuple[str, ...]:
    totals = interval.totals
    first, last = interval.first_version, interval.last_version
    failed = sum(count for name, count in totals.items() if name.startswith("session_failed/"))
    return (
        str(first) if first == last else f"{first}-{last}",
        str(interval.lineage),
        f"{interval.first_seq}-{interval.last_seq}",
        span_of((interval.last_at_ns - interval.first_at_ns) / 1e9),
        str(totals["submitted"]),
        str(totals["committed/train"]),
        str(totals["evicted"]),
        str(totals["response_tokens"]),
        str(interval.trained_tokens),
        str(interval.thrown_tokens.total()),
        span_of(interval.waited_ns.total() / 1e9),
        _mean(interval.sampled_lags),
        _quantile(interval.sessions_s, 0.5),
        _quantile(interval.sessions_s, 0.99),
        str(failed),
    )


def _mean(lags: Counter[int]) -> str:
    count = lags.total()
    return f"{sum(lag * times for lag, times in lags.items()) / count:.2f}" if count else ""


def _quantile(histogram: Histogram, share: float) -> str:
    return span_of(histogram.quantile(share)) if histogram.count else ""


def _counts(counts: Counter[str]) -> list[tuple[str, str]]:
    return [(name, str(count)) for name, count in counts.most_common()]


def _share(count: int, of: int) -> str:
    return f"{count} ({_percent(count, of)})" if of else str(count)


def _percent(count: float, of: float) -> str:
    return f"{count / of:.1%}" if of else ""


def _cut(rows: Sequence[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    if len(rows) <= most:
        return list(rows)
    return [*rows[:most], (f"and {len(rows) - most} more, see --json", *("" for _ in rows[0][1:]))]
