"""The commands that look at a run: log, show, why, check."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import anyio
import anyio.abc
import attrs
import click
from rich.text import Text

from groupstate.cli.output import console, reader_has_gone, while_read, write, write_json, write_sections
from groupstate.cli.runs import beginning_of, check_range, first_of, records_of
from groupstate.cli.sections import frontier_sections, overview_sections, story_sections
from groupstate.cli.why_sections import batch_sections, wait_sections
from groupstate.core.book import Book
from groupstate.core.events import GroupSubmitted, Record, RunClosed
from groupstate.core.frontier import frontier
from groupstate.errors import BadInput
from groupstate.inspect.about import About
from groupstate.inspect.batch_story import BatchStory, batch_story_of
from groupstate.inspect.checking_apart import checking
from groupstate.inspect.overview import overview_of
from groupstate.inspect.places import book_after, seq_of
from groupstate.inspect.story import Story, story_of
from groupstate.inspect.unknown import unknown_group
from groupstate.inspect.wait_story import WaitStory, wait_story_of
from groupstate.inspect.words import as_object, in_words, kind_named, kind_of, time_of
from groupstate.log.follow import follow as follow_log
from groupstate.log.reading import last_event

RUN = click.argument("run", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")

COLOURS = {"run": "magenta", "group": "green", "session": "cyan", "batch": "yellow", "result": "red"}
"""By the first word of the kind."""


# log ------------------------------------------------------------------------------------------------------


@click.command(short_help="Print the events of a run, one per line.")
@RUN
@click.option("--group", "group_id", default=None, metavar="ID", help="Only events about this group.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind, such as group_evicted; repeatable."
)
@click.option("--from", "first", type=click.IntRange(min=1), default=None, metavar="SEQ", help="First event.")
@click.option("--to", "last", type=click.IntRange(min=1), default=None, metavar="SEQ", help="Last event.")
@click.option("--limit", type=click.IntRange(min=1), default=None, metavar="N", help="At most the first N of these.")
@click.option("--follow", is_flag=True, help="Go on as events are written, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, with every field.")
def log(
    run: Path,
    group_id: str | None,
    kinds: tuple[str, ...],
    first: int | None,
    last: int | None,
    limit: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the events of RUN, one per line: number, time (UTC), kind, and what it says.

    In a pipe the four are separated by tabs. A group that the log never submitted, or an event that it doesn't
    reach, exits with 2; with --follow they are waited for. --follow ends with exit code 0 on Ctrl-C, on SIGTERM,
    and when nobody reads its output any more.

    \b
    Examples:
      groupstate log runs/demo --kind group_evicted --kind refill_forfeited
      groupstate log runs/demo --group g17
      groupstate log runs/demo --from 100 --to 200 --json
      groupstate log runs/demo --follow
    """
    check_range(first, last)
    wanted = _Wanted(group_id, kinds, first or 1)
    # Which groups a committed batch holds is told where it was sampled, so --group reads from the beginning.
    start = first if first is not None and not group_id else first_of(run)
    if first is None and start > 1:
        click.echo(f"events before {start} are gone", err=True)
    write_one = _writer(as_json=as_json)
    with while_read():
        if follow:
            anyio.run(_follow, run, start, wanted, write_one, last, limit)
        else:
            records = records_of(run, start, None if last is None else last + 1)
            for record in islice(filter(wanted, records), limit):
                write_one(record)
    if not follow:
        _need_there(run, wanted)


class _Wanted:
    """Says of each record, given in order, whether it is to be printed."""

    def __init__(self, group_id: str | None, kinds: tuple[str, ...], first: int) -> None:
        self.group_id = group_id
        self.first = first
        self.last_seq = 0
        """Of the records that were looked at."""
        self.submitted: dict[str, None] = {}
        """Groups, where one is looked for."""
        self.concerned = False
        """Some record was about the group."""
        self._types = tuple(kind_named(kind) for kind in kinds)
        self._about = About(group_id) if group_id else None

    def __call__(self, record: Record) -> bool:
        self.last_seq = record.seq
        if self._about is not None:
            if isinstance(record.event, GroupSubmitted):
                self.submitted[record.event.group_id] = None
            if not self._about(record):
                return False
            self.concerned = True
        return record.seq >= self.first and (not self._types or isinstance(record.event, self._types))


def _need_there(run: Path, wanted: _Wanted) -> None:
    """Whoever asked for what isn't there must not take the silence for an answer.

    Raises:
        UnknownGroup: nothing is told of the group.
        BadInput: the log doesn't reach the first event.
    """
    if wanted.group_id and not wanted.concerned:
        base, _ = beginning_of(run)
        if base is None:
            raise unknown_group(wanted.group_id, "print its events", wanted.submitted)
        if wanted.group_id not in base.groups:
            known = dict.fromkeys([*base.departed, *base.groups]) | wanted.submitted
            left = base.departed.get(wanted.group_id)
            raise unknown_group(wanted.group_id, "print its events", known, left=left, start=first_of(run))
    if wanted.last_seq < wanted.first and (last := last_event(run)) < wanted.first - 1:
        end = f"its last one is event {last}" if last else "it has none"
        raise BadInput(f"{run} has no event {wanted.first} yet: {end}")


def _writer(*, as_json: bool) -> Callable[[Record], None]:
    if as_json:
        return lambda record: write_json(as_object(record))
    terminal = console()
    if not terminal.is_terminal:
        return lambda record: write("\t".join(_columns(record)))

    def write_coloured(record: Record) -> None:
        seq, at, kind, words = _columns(record)
        colour = COLOURS.get(kind.partition("_")[0], "blue")
        terminal.print(Text.assemble((f"{seq:>7} {at} ", "dim"), (f"{kind:<22} ", colour), words))

    return write_coloured


def _columns(record: Record) -> tuple[str, str, str, str]:
    return str(record.seq), time_of(record.at_ns), kind_of(record.event), in_words(record.event)


async def _follow(
    run: Path,
    start: int,
    wanted: Callable[[Record], bool],
    write_one: Callable[[Record], None],
    last: int | None,
    limit: int | None,
) -> None:
    records_of(run)  # for its error, where this is no run
    async with anyio.create_task_group() as tasks:
        await tasks.start(_stop_on_signal, tasks.cancel_scope)
        try:
            await _write_followed(run, start, wanted, write_one, last, limit)
        except BrokenPipeError:
            pass  # nobody reads any more; a task group would wrap this
        tasks.cancel_scope.cancel()


async def _write_followed(
    run: Path,
    start: int,
    wanted: Callable[[Record], bool],
    write_one: Callable[[Record], None],
    last: int | None,
    limit: int | None,
) -> None:
    written = 0
    async for records in follow_log(run, start, stop_when=reader_has_gone):
        for record in records:
            if last is not None and record.seq > last:
                return
            if wanted(record):
                write_one(record)
                written += 1
            if written == limit or record.seq == last:
                return
        sys.stdout.flush()


async def _stop_on_signal(
    scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


# show -----------------------------------------------------------------------------------------------------


@click.command(short_help="Show where a run stands.")
@RUN
@click.option("--at", default=None, metavar="PLACE", help="As it was after this event, or at this time.")
@click.option("--frontier", "by_position", is_flag=True, help="Which prompts of the source are done with, and no more.")
@AS_JSON
def show(run: Path, at: str | None, by_position: bool, as_json: bool) -> None:
    """Show where RUN stands: its groups by phase, totals, who waits for what, open batches, marks.

    Times are those of the log: an age is counted up to its last event (or to the one named by --at). The row
    `last event` alone looks at this machine's clock: it says for how long an open run has written nothing.

    Totals count what happened, in all partitions. Of commits that going back to a mark undid, `batches_committed`
    counts the batches still; `committed` and `committed/train` no longer count their groups.

    PLACE is an event's number; a time in UTC as `log` prints it, or only its HH:MM:SS where the run was there once
    (the last event up to then counts); the time since the first event (+90s, +5m, +2h); version:N or
    version:N/LINEAGE, the event with which that weight version became the current one; start or end.

    \b
    Examples:
      groupstate show runs/demo
      groupstate show runs/demo --at 1200
      groupstate show runs/demo --at 18:05:30
      groupstate show runs/demo --at version:12
      groupstate show runs/demo --json
      groupstate show runs/demo --frontier
    """
    records_of(run)  # for its error, where this is no run
    seq = None if at is None else seq_of(run, at)
    if by_position:
        _show_frontier(run, seq, as_json=as_json)
        return
    book = book_after(run, seq)
    last = next(records_of(run, book.last_seq), None) if book.closed else None
    seen = overview_of(book, last.event if last is not None and isinstance(last.event, RunClosed) else None)
    with while_read():
        if as_json:
            write_json(seen)
        else:
            write_sections(overview_sections(seen, None if seq is not None else time.time_ns()))


def _told_from(run: Path, base: Book | None, start: int, seq: int | None) -> Iterator[Record]:
    """Records from `start` up to and including `seq`.

    Raises:
        BadInput: `seq` lies before the first book that there is.
    """
    if base is not None and seq is not None and seq < base.last_seq:
        raise BadInput(f"what was at event {seq} can't be told any more: the first that can is event {base.last_seq}")
    return records_of(run, start, None if seq is None else seq + 1)


def _show_frontier(run: Path, seq: int | None, *, as_json: bool) -> None:
    base, start = beginning_of(run)
    places = frontier(_told_from(run, base, start, seq), base=base)
    with while_read():
        if as_json:
            write_json([attrs.asdict(place) for place in places])
        else:
            write_sections(frontier_sections(places))


# why ------------------------------------------------------------------------------------------------------


@click.command(short_help="Tell why: of a group, of a batch, of a wait.")
@RUN
@click.argument("group", required=False)
@click.option("--batch", type=click.IntRange(min=1), default=None, metavar="N", help="Why this batch holds its groups.")
@click.option(
    "--wait", "seq", type=click.IntRange(min=1), default=None, metavar="SEQ", help="What was waited for then."
)
@AS_JSON
@click.pass_context
def why(ctx: click.Context, run: Path, group: str | None, batch: int | None, seq: int | None, as_json: bool) -> None:
    """Tell the life of GROUP in RUN, with the numbers behind each decision: why it was evicted, what was its lag, which
    session held it up, which batch took it, what came in its place.

    --batch N tells why batch N holds these groups in this order, what was passed over, and what was evicted with it.
    --wait SEQ tells what the sample() waited for that waited at event SEQ, what happened meanwhile, and what ended the
    wait. An id, batch or event that there isn't exits with 2 and names what is near.

    \b
    Examples:
      groupstate why runs/demo g17
      groupstate why runs/demo --batch 3
      groupstate why runs/demo --wait 214
      groupstate why runs/demo g17 --json
    """
    if [group, batch, seq].count(None) != 2:
        raise click.UsageError("Give one of GROUP, --batch and --wait.", ctx)
    start = first_of(run)
    told: Story | BatchStory | WaitStory
    if batch is not None:
        told = batch_story_of(run, batch)
        sections = batch_sections(told)
    elif seq is not None:
        told = wait_story_of(run, seq)
        sections = wait_sections(told, time.time_ns())
    else:
        assert group is not None
        told = story_of(run, group)
        sections = story_sections(told, time.time_ns())
    if start > 1:
        click.echo(f"events before {start} are gone: what happened up to then isn't told", err=True)
    with while_read():
        if as_json:
            write_json(told)
        else:
            write_sections(sections)


# check ----------------------------------------------------------------------------------------------------


@click.command(short_help="Check a log against the invariants.")
@RUN
@AS_JSON
@click.pass_context
def check(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Check the log of RUN against the invariants, one line for each thing that is wrong, and below it, indented, the
    two or three events that can't all be true.

    Exits with 0 if nothing is wrong, 1 if something is, 2 if the log can't be read: the text then names the
    file and the place in it.

    \b
    Examples:
      groupstate check runs/demo
      groupstate check runs/demo --json
    """
    with checking(_some(run)) as result:
        seen = result()
    with while_read():
        if as_json:
            write_json(seen)
        elif seen.violations:
            for violation in seen.violations:
                write(str(violation))
                for event in seen.witness_of(violation):
                    write(f"\tevent {event.seq}\t{event.kind}\t{event.text}")
        else:
            write(seen.verdict)
    ctx.exit(1 if seen.violations else 0)


def _some(run: Path) -> Path:
    """The run, which must have an event."""
    base, start = beginning_of(run)
    if base is None and next(records_of(run, start), None) is None:
        raise BadInput(f"{run} has no event yet, so there is nothing to check")
    return run
