"""The commands about a run's files: repair, disk."""

from pathlib import Path
from typing import Any

import attrs
import click

from groupstate.cli.output import Section, while_read, write_json, write_sections
from groupstate.cli.places import Place
from groupstate.cli.runs import nearest_book, other_runs_told, records_of
from groupstate.errors import BadInput
from groupstate.inspect.disk import Usage, size_of, usage
from groupstate.log.repair import Diagnosis, Repaired, diagnose
from groupstate.log.repair import repair as write_repaired

RUN = click.argument("run", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


@click.command(short_help="Write a new run from what is good of a damaged one.")
@RUN
@click.option(
    "--keep-until", "seq", type=click.IntRange(min=1), default=None, metavar="SEQ", help="Last event to keep."
)
@click.option(
    "-o", "--out", type=Place(path_type=Path), default=None, metavar="NEWRUN", help="Directory of the new run."
)
@AS_JSON
def repair(run: Path, seq: int | None, out: Path | None, as_json: bool) -> None:
    """Say how far the log of RUN is good; with --keep-until and -o write a new run that ends there.

    RUN itself is never changed. Payload files are shared with the new run as hard links where that can be. The new
    run has the same id, opens as any other and goes on; groups whose payloads are gone are evicted as damaged.

    \b
    Examples:
      groupstate repair runs/demo
      groupstate repair runs/demo --keep-until 1200 -o runs/demo-repaired
    """
    if (seq is None) != (out is None):
        raise BadInput("--keep-until and -o belong together: the last event to keep, and where the new run goes")
    with other_runs_told(run):
        found = diagnose(run)
    written = None if seq is None or out is None else write_repaired(run, out, seq)
    with while_read():
        if as_json:
            write_json(_as_object(found, written))
        else:
            write_sections([Section("repair", (), _rows(found, written, run))])


@click.command(short_help="Show what a run takes on the disk, and what of it may go.")
@RUN
@AS_JSON
def disk(run: Path, as_json: bool) -> None:
    """Show what RUN takes on the disk: by kind of file, and per payload file how much of it the log still needs.

    Live is what groups in flight, sampleable or with the trainer have; marked is what committed groups have that a
    mark could still bring back; freed comes back with the whole file.

    \b
    Examples:
      groupstate disk runs/demo
      groupstate disk runs/demo --json
    """
    base, start = nearest_book(run, None)
    found = usage(run, records_of(run, start), base)
    with while_read():
        if as_json:
            write_json(found)
        else:
            write_sections(_usage_sections(found))


def _usage_sections(found: Usage) -> list[Section]:
    kinds = [(kind.heading, str(kind.files), size_of(kind.size_bytes)) for kind in found.kinds]
    payloads = [
        (file.name, *map(size_of, (file.size_bytes, file.live_bytes, file.marked_bytes, file.freed_bytes)))
        for file in found.payload_files
    ]
    return [
        Section("disk", (), [("run", size_of(found.size_bytes)), ("free beside it", size_of(found.free_bytes))]),
        Section("files", ("kind", "files", "size"), kinds),
        Section("payload files", ("file", "size", "live", "marked", "freed"), payloads),
        Section("what may go", (), [(way,) for way in found.advice]),
    ]


def _as_object(found: Diagnosis, written: Repaired | None) -> dict[str, Any]:
    return {
        **attrs.asdict(found),
        "keep_until": found.keep_until,
        "written": None if written is None else attrs.asdict(written),
    }


def _good(found: Diagnosis) -> str:
    if found.last_seq < found.first_seq:
        return "none"
    before = " (those before are gone, as keep_log has it)" if found.first_seq > 1 else ""
    return f"events {found.first_seq} to {found.last_seq}{before}"


def _torn(found: Diagnosis) -> str:
    if found.damage:
        return f"{found.torn_bytes} bytes at the end are no whole commit"
    return f"{found.torn_bytes} bytes of an interrupted commit at the end; opening the run cuts them"


def _rows(found: Diagnosis, written: Repaired | None, run: Path) -> list[tuple[str, str]]:
    rows = [("damage", found.damage or "none"), ("good", _good(found))]
    if found.behind:
        behind = f"{found.behind} good events between {found.first_behind} and {found.last_behind} are lost"
        rows.append(("behind the damage", behind))
    if found.torn_bytes:
        rows.append(("torn", _torn(found)))
    if written is not None:
        files = f"{written.segments} segments, {written.payload_files} payload files ({written.linked} of them shared)"
        rows.append(("written", f"{written.path}: events {found.first_seq} to {written.last_seq}, {files}"))
    elif not found.damage:
        rows.append(("to do", "nothing: the run can be opened"))
    elif found.keep_until is None:
        rows.append(("to do", "nothing can be kept"))
    else:
        rows.append(("to do", f"groupstate repair {run} --keep-until {found.keep_until} -o NEWRUN"))
    return rows
