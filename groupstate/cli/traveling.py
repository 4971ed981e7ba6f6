"""The command that compares two moments of a run."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from groupstate.cli.output import Section, while_read, write_json, write_sections
from groupstate.cli.runs import records_of
from groupstate.inspect.diff import Diff, GroupChange, Place, diff, in_short
from groupstate.inspect.places import seq_of
from groupstate.inspect.words import counted, joined, name_of, one_line, span_of, time_of

ROWS_MAX = 40
"""Of a section in text; the JSON has all."""


@click.command("diff", short_help="Tell what changed between two moments.")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("first", metavar="A")
@click.argument("last", metavar="[B]", default="end")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text, with every group.")
def diff_command(run: Path, first: str, last: str, as_json: bool) -> None:
    """Tell what changed in RUN from place A to place B: groups that entered, left or moved, totals, versions,
    batches, waits, credits and rules, each with the event that changed it.

    Places are those of `show --at`: an event's number, a time, +90s since the first event, version:N, start, end.
    Without B it is the end. Where more than 500,000 events lie between, only the two ends are compared.

    \b
    Examples:
      groupstate diff runs/demo 1200 1300
      groupstate diff runs/demo version:11 version:12
      groupstate diff runs/demo 18:05:00 18:06:30 --json
    """
    records_of(run)  # for its error, where this is no run
    seen = diff(run, seq_of(run, first), seq_of(run, last))
    with while_read():
        if as_json:
            write_json(attrs.asdict(seen))
        else:
            write_sections(diff_sections(seen))


def diff_sections(seen: Diff) -> list[Section]:
    """Empty ones are left out when they are written."""
    return [
        Section("diff", (), _header(seen)),
        Section("totals", ("what", "before", "after", "change"), _counts(seen)),
        *(_groups(title, changes) for title, changes in _kinds(seen).items()),
        Section(
            "versions",
            ("event", "version", "lineage", "how"),
            _some([(str(v.seq), str(v.weight_version), str(v.lineage), v.how) for v in seen.versions]),
        ),
        Section(
            "batches",
            ("batch", "partition", "groups", "sampled at", "ended at", "now"),
            _some(
                [
                    (
                        str(b.batch),
                        b.partition,
                        str(b.groups),
                        str(b.sampled_seq),
                        _number(b.ended_seq),
                        one_line(b.now),
                    )
                    for b in seen.batches
                ]
            ),
        ),
        Section(
            "waits",
            ("request", "partition", "groups", "began at", "ended at", "for", "now"),
            _some(
                [
                    (
                        str(w.request),
                        w.partition,
                        str(w.size),
                        str(w.begun_seq),
                        _number(w.ended_seq),
                        "?" if w.waited_s is None else span_of(w.waited_s),
                        one_line(w.now),
                    )
                    for w in seen.waits
                ]
            ),
        ),
        Section(
            "credits",
            ("event", "what", "refills", "about"),
            _some([(str(c.seq), c.what, str(c.count), name_of(c.about)) for c in seen.credits]),
        ),
        Section(
            "rules",
            ("event", "setting", "before", "after"),
            [(_number(r.seq), r.setting, one_line(repr(r.before)), one_line(repr(r.after))) for r in seen.rules],
        ),
        Section("also", ("event", "kind", "what"), _some([(str(o.seq), o.kind, o.text) for o in seen.others])),
    ]


def _header(seen: Diff) -> list[tuple[str, str]]:
    count = seen.last.seq - seen.first.seq
    rows = [
        ("from", _place(seen.first)),
        ("to", _place(seen.last)),
        ("between", f"{counted(count, 'event')}, {span_of(seen.seconds)}"),
    ]
    rows += [(title, in_short(changes)) for title, changes in _kinds(seen).items() if changes]
    if seen.kinds:
        rows.append(("events", joined(f"{count} {kind}" for kind, count in seen.kinds.items())))
    if not seen.read:
        rows.append(("not read", "too many events lie between to tell them one by one; the two ends are compared"))
    return rows


def _place(place: Place) -> str:
    return f"event {place.seq}, {time_of(place.at_ns)}, version {place.weight_version}, lineage {place.lineage}"


def _counts(seen: Diff) -> list[tuple[str, str, str, str]]:
    rows = [(name, *values) for name, values in seen.totals.items()]
    for partition, phases in seen.phases.items():
        rows += [(f"{partition} groups {phase}", *values) for phase, values in phases.items()]
    if seen.owed[0] != seen.owed[1]:
        rows.append(("refills owed", *seen.owed))
    return [(name, str(before), str(after), f"{after - before:+}") for name, before, after in rows]


def _kinds(seen: Diff) -> dict[str, list[GroupChange]]:
    return {
        "entered": seen.entered,
        "moved": seen.moved,
        "left": seen.left,
        "came and went": seen.passed,
    }


def _groups(title: str, changes: list[GroupChange]) -> Section:
    rows: list[tuple[str, ...]] = [
        (
            name_of(change.group_id),
            change.partition,
            f"{change.before} to {change.after}" if change.before else change.after,
            _number(change.seq),
            one_line(change.why),
        )
        for change in changes
    ]
    return Section(title, ("group", "partition", "phase", "at", "why"), _some(rows))


def _some(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= ROWS_MAX:
        return list(rows)
    more = len(rows) - ROWS_MAX
    return [*rows[:ROWS_MAX], (f"and {more} more, see --json", *("" for _ in rows[0][1:]))]


def _number(seq: int | None) -> str:
    return "" if seq is None else str(seq)
