"""The commands that write a run in another form: trace, export."""

from collections.abc import Iterator
from pathlib import Path

import click

from groupstate.cli.output import Section, while_read, write_json, write_sections
from groupstate.cli.places import FORCE, Place, force_told
from groupstate.cli.runs import beginning_of, check_range, first_of, nearest_book, records_of
from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.errors import BadInput
from groupstate.inspect.redact import Redacted, redact
from groupstate.inspect.replay import book_at
from groupstate.inspect.tables import Written, write_tables
from groupstate.inspect.trace import write_trace

RUN = click.argument("run", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


@click.command(short_help="Write a run as a trace for Perfetto.")
@RUN
@click.option(
    "-o",
    "--out",
    type=Place(path_type=Path),
    required=True,
    metavar="FILE",
    help="Where the trace goes; packed where the name ends in .gz.",
)
@click.option(
    "--tracks",
    type=click.Choice(["group", "lane"]),
    default="group",
    help="group: tracks of its own for each group. lane: groups share them, one after the other.",
)
@click.option("--from", "first", type=click.IntRange(min=1), default=None, metavar="SEQ", help="First event.")
@click.option("--to", "last", type=click.IntRange(min=1), default=None, metavar="SEQ", help="Last event.")
@FORCE
@AS_JSON
def trace(run: Path, out: Path, tracks: str, first: int | None, last: int | None, force: bool, as_json: bool) -> None:
    """Write RUN as a file in the Chrome trace event format, to open at ui.perfetto.dev or in chrome://tracing.

    Each group has a track for its phases and one for each session with its attempts; waits and batches of the trainer,
    weight versions, restarts, and counters of groups in flight and sampleable lie above. Arrows go from groups to the
    batch that took them. What is open where the log ends, ends there and is marked (open_at_end).

    A viewer has trouble with more than some thousand groups: take a part by --from and --to, or --tracks lane.

    \b
    Examples:
      groupstate trace runs/demo -o trace.json
      groupstate trace runs/demo -o trace.json.gz --tracks lane
      groupstate trace runs/demo -o trace.json --from 1200 --to 2400
    """
    check_range(first, last)
    base, start = _from(run, first)
    records = _some(run, start, last)
    with force_told():
        written = write_trace(records, out, base, tracks="lane" if tracks == "lane" else "group", overwrite=force)
    if first is None:
        _tell_gone(start)
    with while_read():
        if as_json:
            write_json(written)
        else:
            cut = f", {written.open_at_end} of them open where it ends" if written.open_at_end else ""
            write_sections(
                [
                    Section(
                        "trace",
                        (),
                        [
                            ("written", written.path),
                            ("events", f"{written.first_seq} to {written.last_seq}"),
                            ("trace events", f"{written.trace_events}{cut}"),
                        ],
                    )
                ]
            )


# export ---------------------------------------------------------------------------------------------------


@click.command(short_help="Write a run as tables, or as a copy for a bug report.")
@RUN
@click.option(
    "--parquet",
    type=Place(path_type=Path),
    default=None,
    metavar="DIR",
    help="Tables as Parquet files: events, sessions, trajectories, groups, batches, batch_groups, versions.",
)
@click.option(
    "--redact",
    "redacted",
    type=Place(path_type=Path),
    default=None,
    metavar="DIR|FILE.tar.gz",
    help="A copy of the run in which nothing of yours is left.",
)
@FORCE
@AS_JSON
@click.pass_context
def export(
    ctx: click.Context, run: Path, parquet: Path | None, redacted: Path | None, force: bool, as_json: bool
) -> None:
    """Write RUN in another form: tables for DuckDB, Polars or pandas (--parquet; needs the extra 'parquet'), or a copy
    for a bug report (--redact).

    In the copy prompts, answers, error texts, group ids that you gave, and names of workers, data sets, metrics, files
    and hosts are replaced, the same text by the same token. Numbers and times stay: every group is in the same phase
    after every event, which is checked before the copy is handed out, and check, show and why say what they say of RUN.

    What is written is there whole or not at all. Something that is there already is replaced only with --force, and a
    directory only if an earlier export made it.

    \b
    Examples:
      groupstate export runs/demo --parquet tables
      duckdb -c "select phase, count(*) from 'tables/groups.parquet' group by phase"
      groupstate export runs/demo --redact report.tar.gz
    """
    if (parquet is None) == (redacted is None):
        raise click.UsageError("Give one of --parquet DIR and --redact DIR|FILE.tar.gz.", ctx)
    done: Written | Redacted
    if parquet is not None:
        base, start = beginning_of(run)
        with force_told():
            done = write_tables(_some(run, start), parquet, base, overwrite=force)
        _tell_gone(start)
    else:
        assert redacted is not None
        _some(run, first_of(run))
        with force_told():
            done = redact(run, redacted, overwrite=force)
    with while_read():
        if as_json:
            write_json(done)
        else:
            write_sections(_written(done) if isinstance(done, Written) else _redacted(done))


def _written(done: Written) -> list[Section]:
    rows = [("written", done.path), ("events", f"{done.first_seq} to {done.last_seq}")]
    counts = [(name, str(count)) for name, count in done.rows.items()]
    return [Section("export", (), rows), Section("tables", ("table", "rows"), counts)]


def _redacted(done: Redacted) -> list[Section]:
    rows = [
        ("written", done.path),
        ("events", f"{done.first_seq} to {done.last_seq}"),
        ("segments", str(done.segments)),
        ("snapshots", str(done.snapshots)),
        ("payloads", str(done.payloads)),
        ("phases", f"the same after every event (digest {done.phases[:16]})"),
        *(("left out", text) for text in done.left_out),
    ]
    counts = [(what, str(count)) for what, count in done.replaced.items()]
    return [Section("export", (), rows), Section("replaced", ("what", "texts"), counts)]


def _some(run: Path, first: int, last: int | None = None) -> Iterator[Record]:
    """Records `first` to `last`, of which there must be one.

    Raises:
        BadInput: there is none.
    """
    stop = None if last is None else last + 1
    if next(records_of(run, first, stop), None) is None:
        which = "no event yet" if first == 1 and last is None else f"no event from {first} on"
        raise BadInput(f"{run} has {which if last is None else f'no event from {first} to {last}'}: nothing to write")
    return records_of(run, first, stop)


def _tell_gone(start: int) -> None:
    if start > 1:
        click.echo(f"events before {start} are gone: what happened up to then isn't told", err=True)


def _from(run: Path, first: int | None) -> tuple[Book | None, int]:
    """The book before event `first`, and that event; where the log begins for None."""
    base, start = beginning_of(run)
    if first is None or first <= start:
        if first is not None and first < start:
            raise BadInput(f"event {first} of {run} is gone: it can be told from event {start} on")
        return base, start
    base, start = nearest_book(run, first - 1)
    if base is None:
        base, start = beginning_of(run)
    return book_at(records_of(run, start, first), first - 1, base), first
